"""The command line: its output, files and exit status."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest
import torch

import tdcollect
from tdcollect.cli import _line, main
from tdcollect.cli.commands import program
from tdcollect.cli.program import distinct_names
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.evaluate import Recording
from tdcollect.evaluation.ledger import LOST, Episode, read_directory
from tdcollect.evaluation.request import is_named
from tdcollect.files import write_atomically

from ..evaluation.ledgers import contents, unfinished


def test_evaluate_prints_the_statistics_and_writes_the_report(typed, here) -> None:
    command = "evaluate CartPole-v1 --policy @:lean --episodes 6"
    status, out, _ = typed(f"{command} --output-dir run")
    result = tdcollect.EvaluationResult.load("run")
    assert status == 0
    assert str(result.summary()) in out
    assert result.digest in out
    assert read_directory("run").rechecked
    assert "report run/report.html" in out
    assert (here / "run" / "report.html").exists()
    before = sorted(here.iterdir())
    assert typed(command)[0] == 0  # without a directory, nothing is written
    assert sorted(here.iterdir()) == before


def test_each_option_reaches_the_evaluation(typed) -> None:
    command = (
        "evaluate @:short --policy random --env-seeds 5,7,9 --num-envs 2 --max-episode-steps 8 "
        '--max-restarts 1 --env-kwargs {"length":12} --inference-batch-size 4 --backend serial '
        "--exploration-type random --inference-threads 2 --no-eval-mode --device cpu "
        "--keep-trajectories --output-dir run --quiet --no-recheck"
    )
    assert typed(command)[:2] == (0, "")
    assert not read_directory("run").rechecked
    result = tdcollect.EvaluationResult.load("run")
    assert [episode.env_seed for episode in result.episodes] == [5, 7, 9]
    assert result.manifest["max_episode_steps"] == 8
    assert result.manifest["inference_batch_size"] == 4
    assert result.manifest["inference_threads"] == 2
    assert result.manifest["policy"]["exploration"] == "random"
    assert result.manifest["env"]["kwargs"] == {"length": 12}
    assert len(result.trajectory(0)) == 8
    names = "--env @:short --policy random --env-kwargs"
    assert typed(f'replay run 1 {names} {{"length":12}}')[0] == 0
    status, _, err = typed(f'replay run 1 {names} {{"length":7}}')
    assert status == 1
    assert "episode 1 is not what the ledger says" in err


def test_the_bound_of_endless_episodes_is_taken_off_by_inf(typed) -> None:
    command = "evaluate @:short --policy random --episodes 1 --quiet --output-dir run"
    assert typed(f"{command} --max-episode-steps inf")[0] == 0
    assert tdcollect.EvaluationResult.load("run").manifest["max_episode_steps"] is None
    status, _, err = typed(f"{command} --max-episode-steps many")
    assert status == 2
    assert "expected a number of steps, or inf, got 'many'" in err


@pytest.mark.filterwarnings("ignore:expected an info 'lives'")
def test_metrics_are_named_as_env_and_policy_are(typed, here) -> None:
    (here / "figures_of.py").write_text("def steps(data):\n    return len(data)\n")
    command = (
        "evaluate @:short --policy random --episodes 3 --quiet --output-dir run "
        "--metric steps=figures_of.py:steps --metric lives=info:lives:last"
    )
    assert typed(command)[0] == 0
    result = tdcollect.EvaluationResult.load("run")
    assert result.metrics["steps"].tolist() == result.lengths.tolist()
    assert result.manifest["metrics"]["lives"] == "info:lives:last"
    assert result.manifest["metrics"]["steps"]["function"] == "figures_of.steps"
    assert typed("replay run 1 --env @:short --policy random")[0] == 0
    assert typed("verify run")[0] == 0
    for wrong in ("steps", "steps=info:lives"):
        status, _, err = typed(f"{command} --metric {wrong}")
        assert status == 2
        assert f"expected NAME=VALUE, each name once, got '{wrong}'" in err
    status, _, err = typed(command.replace("info:lives:last", "lives"))
    assert status == 1
    assert "expected a metric to be 'info:NAME'" in err


def test_reset_options_come_from_a_file(typed, here) -> None:
    options = [{"low": -0.01 * i, "high": 0.01 * i} for i in range(3)]  # as CartPole takes them
    (here / "options.json").write_text(json.dumps(options))
    command = "evaluate @:short --policy random --quiet --episodes"
    given = "--episode-options options.json --output-dir run"
    assert typed(f"{command} 3 {given}")[0] == 0
    result = tdcollect.EvaluationResult.load("run")
    assert result.manifest["episode_options"] == {"name": "options.json", "options": options}
    assert typed("replay run 2 --env @:short --policy random")[0] == 0
    assert typed("verify run")[0] == 0
    status, _, err = typed(f"{command} 4 {given}")
    assert status == 1
    assert "expected a dict for each of the episodes up to index 3, got 3 dicts" in err


def test_json_is_all_that_is_printed_and_the_same_command_changes_nothing(typed, here) -> None:
    def state() -> dict[Path, tuple[bytes, int]]:
        files = (path for path in (here / "run").rglob("*") if path.is_file())
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    command = (
        "evaluate CartPole-v1 --policy @:lean --episodes 3 --json --output-dir run "
        "--keep-trajectories"
    )
    status, out, err = typed(command)
    assert status == 0
    told = json.loads(out)
    result = tdcollect.EvaluationResult.load("run")
    assert told["ledger"] == result.digest
    assert told["returns"]["mean"] == result.summary().returns.mean
    assert told["report"] == "run/report.html"
    assert err == "read\nmade\n"  # what the user's own module prints
    before = state()
    assert typed(command)[:2] == (status, out)
    assert state() == before
    status, out, err = typed(f"{command} --seed 1")
    assert (status, out) == (1, "")
    assert "tdcollect: run holds another evaluation: seeds.root is 0 there and 1 here" in err
    assert "remove this one to start again\n" in err


def test_a_checkpoint_is_loaded_and_replay_tells_that_it_has_changed(typed, here) -> None:
    weights = {"module.layer.weight": torch.tensor([[0, 0, 0, 0.0], [0, 0, 1, 0]])}
    torch.save({**weights, "module.layer.bias": torch.zeros(2)}, here / "net.pt")
    typed(
        "evaluate CartPole-v1 --policy @:net --checkpoint net.pt --episodes 4 --quiet "
        "--output-dir net"
    )
    typed("evaluate CartPole-v1 --policy @:lean --episodes 4 --output-dir lean --quiet")
    net, lean = (tdcollect.EvaluationResult.load(name) for name in ("net", "lean"))
    assert net.digest == lean.digest
    torch.save({**weights, "module.layer.bias": torch.tensor([9.0, 0.0])}, here / "net.pt")
    status, out, err = typed("replay net 0 --env CartPole-v1 --policy @:net --checkpoint net.pt")
    assert (status, out) == (1, "")
    assert "episode 0 is not what the ledger says: " in err
    assert "What has changed: policy.digest was " in err


def test_lost_episodes_have_a_status_of_their_own(typed, monkeypatch) -> None:
    """The same command goes on to have it, until it is told to run them again."""
    command = "evaluate CartPole-v1 --policy @:lean --episodes 4 --quiet --output-dir"
    add = Recording.add

    def losing(self: Recording, ended: Finished) -> None:
        record = ended.record
        if record.index == 2:
            ended = Finished(Episode(record.index, record.env_seed, record.policy_seed, LOST))
        add(self, ended)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "add", losing)
        status, _, err = typed(f"{command} run")
    assert status == 3
    assert err.endswith("1 lost episode, whose workers ended; the same command runs them again\n")
    assert typed(f"{command} run")[0] == 0
    assert typed(f"{command} whole")[0] == 0
    assert contents(Path("run")) == contents(Path("whole"))


def test_failed_episodes_are_told_and_counted(typed) -> None:
    status, out, err = typed(
        "evaluate @:falling --policy @:lean --episodes 5 --json --output-dir run"
    )
    told = json.loads(out)
    assert status == 1
    assert told["failed"] > 0
    assert f"tdcollect: {told['failed']} of 5 episodes failed" in err
    assert err.count("RuntimeError: the env fell over\n") == told["failed"]
    (first, *_) = (
        e.index for e in tdcollect.EvaluationResult.load("run").episodes if not e.completed
    )
    assert f"\ntdcollect: episode {first}: RuntimeError: the env fell over\n" in err


def test_json_has_null_where_a_number_is_not_finite(typed) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    command = "evaluate @:unrewarded --policy random --episodes 2 --json --output-dir run"
    told = json.loads(typed(command)[1], parse_constant=refuse)
    assert (told["returns"]["mean"], told["returns"]["not_finite"]) == (None, 2)
    status, out, _ = typed("replay run 1 --env @:unrewarded --policy random --json")
    assert status == 0
    told = json.loads(out, parse_constant=refuse)
    assert (told["return"], told["length"], told["same"]) == (None, 5, True)


def test_mode_and_weights_of_the_policy_are_those_of_each_time(typed) -> None:
    """A factory draws the weights; the mode is replayed."""
    for number in range(2):
        torch.manual_seed(number)
        more = f"--episodes 2 --output-dir {number} --quiet --no-eval-mode"
        typed(f"evaluate CartPole-v1 --policy @:net {more}")
    first, second = (tdcollect.EvaluationResult.load(name).manifest["policy"] for name in "01")
    assert first["digest"] == second["digest"]
    assert first["mode"] == "train"
    status, out, err = typed("replay 0 1 --env CartPole-v1 --policy @:net")
    assert (status, "the same to the bit" in out) == (0, True), err


def test_a_model_with_masks_is_evaluated_with_them(typed, here) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    from ..evaluation.test_sb3 import Doors

    model = contrib.MaskablePPO("MlpPolicy", Doors(), n_steps=8, batch_size=8, device="cpu")
    model.save(here / "model.zip")
    (here / "doors.py").write_text(f"from {Doors.__module__} import Doors\n")
    command = "evaluate doors.py:Doors --policy sb3 --checkpoint model.zip --episodes 3 --json"
    status, out, err = typed(command)
    assert status == 0, err
    assert json.loads(out)["returns"]["mean"] == json.loads(out)["lengths"]["mean"]


# Refusals: one line, and the status


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("evaluate CartPole-v1 --policy @:breaks", "ZeroDivisionError: in the factory of the user"),
        ("evaluate CartPole-v1 --policy @:nothing", "to give a policy, got None"),
        (
            "evaluate CartPole-v1 --policy @:keyed",
            "integer or boolean arrays are valid indices; it was called with one",
        ),
        ("evaluate CartPole-v1 --policy @:other", "to have 'other', which it has not"),
        ("evaluate CartPole-v1 --policy a..b:lean", "expected module:name or path/to/file.py:name"),
        ("evaluate CartPole-v0x --policy random", "CartPole"),
        ("evaluate CartPole-v1 --policy random --env-seeds 1,2,1", "got 1 for episodes 0 and 2"),
        ("evaluate CartPole-v1 --policy random --checkpoint a.pt", "no checkpoint with random"),
        ("evaluate CartPole-v1 --policy @:net --checkpoint @.py", "is no state_dict of TensorDict"),
        ("evaluate CartPole-v1 --policy random --vecnormalize a", "with the policy 'sb3' alone"),
        ("evaluate CartPole-v1 --policy random --output-dir .", "to be empty, or the directory of"),
        ("compare one two", "the directory of an evaluation, got one, which is no directory; name"),
        ("replay @.py 3", "expected the directory of an evaluation, got policies"),
        ("evaluate CartPole-v1 --policy random --output-dir @.py", "to be a directory, got"),
    ],
)
def test_what_is_refused_is_told_on_one_line(typed, command: str, reason: str) -> None:
    status, out, err = typed(command)
    assert (status, out) == (1, "")
    told = [line for line in err.splitlines() if line.startswith("tdcollect: ")]
    assert len(told) == 1
    assert reason in told[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("evaluate CartPole-v1", "'--policy'. Name a function that makes it, FILE"),
        ("evaluate CartPole-v1 --policy random --episodes many", "'many' is not a valid integer"),
        ("evaluate CartPole-v1 --policy random --env-kwargs [1]", "expected a JSON object, got"),
        ("evaluate CartPole-v1 --policy random --env-kwargs {", "expected a JSON object, got '{'"),
        ("evaluate CartPole-v1 --policy random --env-seeds 1;2", "ints with commas between"),
        ("evaluate CartPole-v1 --policy random --keep-trajectories", "a directory: --output-dir"),
        ("evaluate CartPole-v1 --policy random --exploration-type mad", "'mad' is not one of"),
        ("compare one", "expected two directories or more"),
        ("compare one two --on success", "--on goes with --fail-if-worse or --require-not-worse"),
        ("replay one -- -1", "-1 is not in the range"),
        ("dance", "No such command 'dance'"),
    ],
)
def test_what_is_not_understood_has_the_status_2(typed, command: str, reason: str) -> None:
    status, out, err = typed(command)
    assert (status, out) == (2, "")
    assert reason in err


def test_a_traceback_is_shown_on_request(typed) -> None:
    words = ["evaluate", "CartPole-v1", "--policy", "@:breaks"]
    for place in (0, 1, len(words)):
        with pytest.raises(ZeroDivisionError):
            typed(" ".join([*words[:place], "--traceback", *words[place:]]))
    for command in program.commands.values():
        assert "--traceback" in [option for p in command.params for option in p.opts]


def line_of(file: Path, text: str) -> int:
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_an_error_of_the_users_code_tells_where(typed, here) -> None:
    """Below the names of slot and episode, too; what others refuse has no place."""
    (file,) = here.glob("policies_*.py")
    raising = line_of(file, "raise ZeroDivisionError")
    for of in ("@:breaks", "@.py:breaks"):
        status, _, err = typed(f"evaluate CartPole-v1 --policy {of}")
        assert status == 1
        assert err.splitlines()[-1] == (
            f"tdcollect: ZeroDivisionError: in the factory of the user ({file.name}:{raising})"
        )
    _, _, err = typed("evaluate @:falling --policy @:lean --episodes 5 --on-env-error raise")
    assert err.splitlines()[-1].endswith(f"({file.name}:{line_of(file, 'raise RuntimeError')})")
    for command in ("evaluate CartPole-v0x --policy random", "evaluate CartPole-v1 --policy sb3"):
        assert not re.search(r":\d+\)$", typed(command)[2])


# compare


def test_compare_prints_the_comparison(typed, here) -> None:
    for name, policy in [("lean", "@:lean"), ("random", "random")]:
        typed(
            f"evaluate CartPole-v1 --policy {policy} --episodes 8 --output-dir runs/{name} --quiet"
        )
    status, out, _ = typed("compare runs/random runs/lean --output-dir report")
    results = [tdcollect.EvaluationResult.load(f"runs/{name}") for name in ("random", "lean")]
    found = tdcollect.compare(*results, names=["random", "lean"])
    assert status == 0
    assert str(found) in out
    assert "report report/comparison.html" in out
    alone = tdcollect.evaluate("CartPole-v1", None, 8, progress=False)
    assert results[0].digest == alone.digest
    assert (here / "report" / "comparison.html").exists()
    status, out, _ = typed("compare runs/random runs/lean --json")
    assert status == 0
    assert json.loads(out) == {"report": None, **json.loads(json.dumps(found.to_dict()))}
    unfinished(here / "runs" / "lean", 2)
    status, _, err = typed("compare runs/random runs/lean")
    assert status == 1
    assert "runs/lean is unfinished: it lacks 6 of its episodes" in err


def test_compare_ends_with_status_3_where_a_policy_is_shown_to_be_worse(typed, here) -> None:
    (here / "counting.py").write_text("steps = len\n")
    more = "--episodes 8 --metric steps=counting.py:steps --quiet"
    for name, policy in [("lean", "@:lean"), ("random", "random")]:
        typed(f"evaluate CartPole-v1 --policy {policy} --output-dir runs/{name} {more}")
    for options, status in [
        ("--fail-if-worse 0 runs/lean runs/random", 3),
        ("--fail-if-worse 1000 runs/lean runs/random", 0),
        ("--fail-if-worse=1000 runs/lean runs/random", 0),
        ("--fail-if-worse 0 runs/random runs/lean", 0),
        ("--require-not-worse 1000 runs/lean runs/random", 0),
        ("--require-not-worse 1 runs/lean runs/random", 3),
        ("--require-not-worse 1 --fail-if-worse 1000 runs/lean runs/random", 3),
        ("--fail-if-worse 0 runs/random runs/lean runs/random/../random", 2),
        ("--fail-if-worse 0 --on steps runs/lean runs/random", 3),
        ("--fail-if-worse 0 --on steps --lower-is-better runs/lean runs/random", 0),
        ("--fail-if-worse 0 --on steps --lower-is-better runs/random runs/lean", 3),
        ("--require-not-worse 1 --on steps --lower-is-better runs/lean runs/random", 0),
        ("--lower-is-better runs/lean runs/random", 2),
    ]:
        assert typed(f"compare {options}")[0] == status
    said = typed("compare runs/lean runs/random --fail-if-worse 0")[2]
    difference = r"difference of mean returns -\d+\.\d+ \[-\d+\.\d+, -\d+\.\d+\]"
    told = "tdcollect: random is shown to be worse than lean by more than 0: " + difference
    assert re.fullmatch(told, said.strip())
    said = typed("compare runs/lean runs/random --require-not-worse 1")[2]
    told = "tdcollect: random is not shown to be worse than lean by less than 1, if at all: "
    assert re.fullmatch(told + difference, said.strip())
    said = typed("compare runs/lean runs/random --fail-if-worse 0 --on steps")[2]
    assert re.search("by more than 0: " + difference.replace("returns", "steps"), said)
    status, out, _ = typed("compare runs/lean runs/random --fail-if-worse 1000 --json")
    assert (status, json.loads(out)["reasons"]) == (0, [])
    assert typed("compare runs/lean runs/random --fail-if-worse 0 --on success")[0] == 1
    assert typed("compare runs/lean runs/random --fail-if-worse nan")[0] == 1


def test_compare_takes_more_episodes_of_the_first_and_one_policy_across_envs(typed) -> None:
    for name, options in [
        ("many", "CartPole-v1 --episodes 40"),
        ("few", "CartPole-v1 --episodes 20"),
        ("short", "CartPole-v1 --episodes 20 --max-episode-steps 30"),
    ]:
        typed(f"evaluate {options} --policy @:lean --output-dir runs/{name} --quiet")
    status, out, _ = typed("compare runs/many runs/few")
    assert status == 0
    assert "few minus many on the same 20 episodes" in out
    assert typed("compare runs/few runs/many")[0] == 1
    assert typed("compare runs/few runs/short")[0] == 1
    status, out, _ = typed("compare runs/many runs/short --across-envs")
    assert status == 0
    assert "The envs differ: max_episode_steps is None in many and 30 in short." in out
    Path("tasks.py").write_text("def pairs(index): return index // 2\n")
    status, out, _ = typed("compare runs/many runs/few --groups tasks.py:pairs --json")
    assert (status, json.loads(out)["differences"][0]["groups"]) == (0, 10)
    assert "have 'triples'" in typed("compare runs/many runs/few --groups tasks.py:triples")[2]


def test_replay_runs_the_episode_again(typed) -> None:
    typed("evaluate CartPole-v1 --policy @:lean --episodes 4 --seed 3 --output-dir run --quiet")
    status, out, _ = typed("replay run 2 --env CartPole-v1 --policy @:lean")
    record = tdcollect.EvaluationResult.load("run").episodes[2]
    assert status == 0
    assert f"return {record.episode_return:.6g}, {record.length} steps; the same to the bit" in out
    status, out, _ = typed("replay run 2 --env CartPole-v1 --policy @:lean --json")
    assert json.loads(out) == {**json.loads(record.to_json()), "same": True, "video": None}
    status, _, err = typed("replay run 4")
    assert status == 1
    assert "episode 4 is not among the 4 of this ledger: 0, 1, 2 and 1 more" in err


def command_of(run: Path, index: int) -> str:
    """The command that the report has for an episode."""
    page = (run / "report.html").read_text()
    (before, after) = re.findall('data-before="(.*?)" data-after="(.*?)"', page)[0]
    return html.unescape(f"{before}{index}{after}")


def test_replay_works_as_the_report_says_it(typed, here) -> None:
    """And as it says itself, if something is not named."""
    torch.save({"module.layer.weight": torch.eye(2, 4), "module.layer.bias": torch.ones(2)}, "w.pt")
    named = f"--env CartPole-v1 --policy {file_of(here)}:net --checkpoint w.pt"
    typed(f"evaluate {named[6:]} --episodes 2 --quiet --output-dir run")
    assert command_of(here / "run", 1) == f"tdcollect replay DIR 1 {named}"
    status, out, err = typed("replay run 1 --policy random")
    assert (status, out) == (1, "")
    assert "expected --env ENV and --policy POLICY, as replay runs only what you name, got" in err
    assert f"no --env; the evaluation was run as in: tdcollect replay run 1 {named} (it may" in err
    assert typed(f"replay run 1 {named}")[0] == 0


def file_of(here: Path) -> str:
    """The file with policies."""
    (file,) = here.glob("policies_*.py")
    return file.name


def test_replay_films(typed, here) -> None:
    pytest.importorskip("pygame")
    typed("evaluate CartPole-v1 --policy random --episodes 2 --output-dir run --quiet")
    status, out, _ = typed("replay run 1 --env CartPole-v1 --policy random --video run/1.mp4")
    assert status == 0
    assert "video run/1.mp4" in out
    assert (here / "run" / "1.mp4").read_bytes()[4:8] == b"ftyp"
    before = sorted(here.iterdir())
    for file in (".", "film", "film.txt"):
        command = f"replay run 0 --env CartPole-v1 --policy random --video {file}"
        status, out, err = typed(command)
        assert (status, out) == (1, "")
        assert f"expected a video file, .mp4 or .mkv or .mov, got {file}" in err
    assert sorted(here.iterdir()) == before


# The program


TALKS = """
import ctypes, gymnasium, os
print("of the module")

class Talks(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        ctypes.CDLL(None).printf(b"of C code"), os.write(1, b"of a descriptor")

    def step(self, action):
        print("of a step")
        return super().step(action)
"""


@pytest.mark.parametrize(
    "command",
    [
        "evaluate talks.py:Talks --policy random --episodes 2",
        "evaluate talks.py:Talks --policy random --episodes 2 --workers 2",
        "doctor talks.py:Talks",
    ],
)
def test_json_has_stdout_for_itself(here, capfd, command: str) -> None:
    (here / "talks.py").write_text(TALKS)
    try:
        main([*command.split(), "--json"])
    finally:
        sys.modules.pop("talks", None)
    out, err = capfd.readouterr()
    assert json.loads(out)
    for said in ("of the module", "of C code", "of a descriptor", "of a step"):
        assert said in err


def test_help_comes_at_once() -> None:
    """torch, which takes seconds, is not imported for it; the package is the program."""
    code = (
        "import runpy, sys; sys.argv = ['tdcollect', 'evaluate', '--help']\n"
        "try: runpy.run_module('tdcollect', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tdcollect evaluate [OPTIONS] ENV" in done.stdout
    assert done.stdout.endswith("False\n")


def test_missing_click_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "click", None)
    assert main([]) == 1
    expected = (
        "tdcollect: the command line needs the click package: pip install '.[evaluate]' in a clone "
        "of tdcollect"
    )
    assert capsys.readouterr().err == expected + "\n"


@pytest.mark.parametrize(
    ("ended", "more", "status", "told"),
    [
        (KeyboardInterrupt(), "", 130, "interrupted\n"),
        (KeyboardInterrupt(), "--output-dir run", 130, "; the same command resumes the evaluation"),
        (BrokenPipeError(errno.EPIPE, "Broken"), "", 1, "a pipe was closed at its other end"),
    ],
)
def test_an_interrupt_says_where_it_can_go_on_and_a_pipe_of_another_kind_is_told(
    typed, monkeypatch, ended: BaseException, more: str, status: int, told: str
) -> None:
    monkeypatch.setattr(tdcollect, "evaluate", Mock(side_effect=ended))
    found, _, err = typed(f"evaluate CartPole-v1 --policy random {more}")
    assert (found, told in err) == (status, True)


def into(file: IO[str], *typed: str) -> int:
    """Run a command whose output goes there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        return main(typed)


def test_a_reader_that_goes_away_ends_it_without_a_word(here, capsys) -> None:
    for name in "ab":
        tdcollect.evaluate("CartPole-v1", None, 2, output_dir=name, progress=False)
    for typed in (("doctor", "--help"), ("compare", "a", "b")):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as output:
            assert into(output, *typed) == 141
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_told(here, capsys) -> None:
    with suppress(OSError), open("/dev/full", "w") as output:
        assert into(output, "doctor", "--help") == 1
    assert capsys.readouterr().err == "tdcollect: No space left on device\n"


def test_an_error_is_a_line_with_the_file_or_the_type(tmp_path: Path, monkeypatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as failed:
        write_atomically(tmp_path / "report.html", b"new")
    assert failed.value.filename == f"{tmp_path}/report.html"
    told = OSError(errno.ENOSPC, "No space left on device", "report.html")
    assert _line(told) == "report.html: No space left on device"
    assert _line(tdcollect.NotReproducibleError("it differs")) == "it differs"
    assert _line(ZeroDivisionError("it differs")) == "ZeroDivisionError: it differs"


def test_a_script_that_ends_the_program_is_told(typed, here) -> None:
    (here / "script_that_exits.py").write_text("import sys\nsys.exit(0)\n")
    status, _, err = typed("evaluate CartPole-v1 --policy script_that_exits.py:make")
    assert status == 1
    assert "ended the program by sys.exit(0); put what a script runs under" in err
    assert err.endswith("(script_that_exits.py:2)\n")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/random/0", "runs/net/0"], ["random", "net"]),
        (["runs/random/0", "runs/net/0", "runs/net/1"], ["random/0", "net/0", "net/1"]),
        (["one/x/y", "two/x/y"], ["one", "two"]),
        (["runs", "runs/0"], ["runs", "0"]),
    ],
)
def test_names_of_directories_are_short_and_differ(paths: list[str], names: list[str]) -> None:
    assert distinct_names([Path(path) for path in paths]) == names


def test_returns_of_several_groups_are_said_to_be_means_unless_one_is_chosen(typed) -> None:
    command = "evaluate tests.evaluation.torchrl_envs:teams --policy random --episodes 2"
    status, out, _ = typed(command)
    assert status == 0
    assert out.count("--reward-keys, such as blue/reward") == 1
    assert "mean over agents, then over groups (blue/reward, red/reward)" in out
    status, out, _ = typed(f"{command} --reward-keys red/reward")
    assert (status, "--reward-keys" in out) == (0, False)


def test_names_of_objects_are_told_from_ids_of_envs() -> None:
    for text in ("a:b", "a.b:c.d", "dir/file.py:name", "/x y/f.py:Class"):
        assert is_named(text)
    for text in ("CartPole-v1", "ale_py:ALE/Pong-v5", "module:Id-v0", "random", ":a"):
        assert not is_named(text)
