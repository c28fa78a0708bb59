"""Commands that read evaluations run without torch and TorchRL, and load little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tdcollect

from ..evaluation.envs import Walk
from ..evaluation.ledgers import contents
from ..evaluation.policies import deterministic

HIDDEN = ["torch", "torchrl", "tensordict", "gymnasium", "tqdm", "cloudpickle"]
HIDE = f"""
import sys
from importlib.machinery import PathFinder
class Others:
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in {HIDDEN}
        return None if hidden else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
"""
SUITE = """
[suite]
name = "one"
version = 1
episodes = 4
seed = 0
[[tasks]]
name = "cart"
env = "CartPole-v1"
[[policies]]
name = "random"
factory = "random"
"""
COMMANDS = [
    "verify kept",
    "verify curve",
    "verify suite",
    "compare plain kept --fail-if-worse 0",
    "merge 0 1 --output-dir merged",
    "suite ls suite.toml --output-dir suite",
    "suite report suite.toml --output-dir suite",
    "view .",
]


def run(program: str, *arguments: object) -> list[str]:
    """Run a program in a fresh interpreter; return the lines that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two evaluations, one with data, the other again in two shards, a learning curve, a suite."""
    root = tmp_path_factory.mktemp("stored")
    tdcollect.evaluate("CartPole-v1", None, 4, output_dir=root / "kept", keep_trajectories=True)
    tdcollect.evaluate("CartPole-v1", None, 4, output_dir=root / "plain")
    for i in range(2):
        tdcollect.evaluate("CartPole-v1", None, 4, shard=(i, 2), output_dir=root / f"{i}")
    how = {"num_trajectories": 3, "output_dir": root / "curve"}
    with tdcollect.Evaluator(Walk, deterministic(), **how) as evaluator:
        evaluator.evaluate(step=1)
    (root / "suite.toml").write_text(SUITE)
    tdcollect.Suite.read(root / "suite.toml").run(root / "suite")
    return root


def test_each_command_runs_on_what_is_stored(stored: Path) -> None:
    program = f"""
import os
from tdcollect.cli import main
os.chdir(sys.argv[1])
for command in {COMMANDS}:
    print("status", main(command.split()))
"""
    before = contents(stored / "suite")
    said = run(HIDE + program, stored)
    assert [line for line in said if line.startswith("status")] == ["status 0"] * len(COMMANDS)
    assert contents(stored / "suite") == before
    assert contents(stored / "merged") == contents(stored / "plain")


def test_results_are_read_with_arrays_for_tensors(stored: Path) -> None:
    program = """
import numpy as np
import tdcollect
result = tdcollect.EvaluationResult.load(sys.argv[1])
data = result.trajectory(2)
np.savez(sys.argv[2], action=data["action"], **data["next"])
print(result)
print(result.summary())
"""
    said = run(HIDE + program, stored / "kept", stored / "read.npz")
    result = tdcollect.EvaluationResult.load(stored / "kept")
    assert said == [repr(result), *str(result.summary()).splitlines()]
    data = result.trajectory(2)
    with np.load(stored / "read.npz") as read:
        assert {*read} == {"action", *data["next"].keys()}
        for key, array in read.items():
            of = data if key == "action" else data["next"]
            assert array.tobytes() == of[key].numpy().tobytes()


def test_verify_loads_neither_torch_nor_jinja_nor_scipys_statistics(stored: Path) -> None:
    program = """
import sys
from tdcollect.cli import main
main(["verify", sys.argv[1]])
print(*{"torch", "gymnasium", "scipy.stats", "jinja2"} & {*sys.modules})
"""
    assert run(program, stored / "kept")[-1] == ""


REFUSED = [
    ("evaluate CartPole-v1 --policy none.py:f", "none.py, which is no file"),
    ("evaluate CartPole-v1 --policy none.py", "expected module:name or path/to/file.py:name"),
    ("evaluate CartPole-v1 --policy not_there:f", "there is no module not_there in"),
    ("evaluate CartPole-v1 --policy os:f --checkpoint none.pt", "none.pt, which is no file"),
    ("evaluate CartPole-v1 --policy sb3", "name the model's file, such as model.zip"),
    ("evaluate CartPole-v1 --policy sb3 --checkpoint none.zip", "none.zip, which is no file"),
    ("evaluate CartPole-v1 --policy sb3 --checkpoint verify --vecnormalize no", "no, which is no"),
    ("evaluate CartPole-v1 --policy random --output-dir file/run", "a directory, got the file"),
    ("evaluate CartPole-v9 --policy random", "VersionNotFound"),
    ("evaluate FetchReach-v9 --policy random", "package:FetchReach-v9"),
    ("evaluate none.py:f --policy random", "none.py, which is no file"),
    ("race CartPole-v1 --policy a=random --policy b=none.py:f", "none.py, which is no file"),
    ("race CartPole-v1 --policy a=random --policy b=random --output-dir file", "got the file"),
    ("suite run none.toml --output-dir suite", "none.toml, which is no file"),
]


def test_what_needs_no_torch_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    program = """
import sys
from contextlib import redirect_stderr
from tdcollect.cli import main
for command in sys.argv[1:]:
    with redirect_stderr(sys.stdout):
        main(command.split())
    assert "torch" not in sys.modules
"""
    said = run(program, *(command for command, _ in REFUSED))
    for line, (command, reason) in zip(said, REFUSED, strict=True):
        assert reason in line, command


def test_what_needs_torch_says_what_is_missing() -> None:
    program = """
from tdcollect.cli import main
main(["evaluate", "CartPole-v1", "--policy", "random"])
"""
    command = [sys.executable, "-c", HIDE + program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "expected torch from 2.8 on, got none; do: pip install 'torch>=2.8' " in done.stderr
