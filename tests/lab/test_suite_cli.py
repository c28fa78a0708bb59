"""The commands of suites, and what a trial finds."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tdcollect.cli import main
from tdcollect.lab import Suite

from ..evaluation.ledgers import contents
from .parts import FILE, HERE, tables

pytestmark = pytest.mark.usefixtures("small_reports")

PAGE = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def typed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Typed:
    """Type a command in the folder of a suite's file; its status, stdout and stderr."""
    (folder / "suite.toml").write_text(FILE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(command: str) -> tuple[int, str, str]:
        status = main(command.split())
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_run_ls_and_report(typed: Typed, folder: Path) -> None:
    status, out, _ = typed("suite ls suite.toml --output-dir out")
    assert status == 0
    assert out.startswith("small 1, 6 evaluations of 6 episodes\n")
    assert out.count("missing") == 6
    status, out, err = typed("suite run suite.toml --output-dir out --task w* --policy net")
    assert status == 0
    assert "small 1: 2 of 6 evaluations finished, 6 episodes each" in out
    assert out.rstrip().endswith("report out/report.html")
    assert "walk/net/1: mean return" in err
    status, out, _ = typed("suite ls suite.toml --output-dir out --json")
    found = json.loads(out)
    assert [cell["status"] for cell in found["cells"]] == [
        "missing",
        *["finished"] * 2,
        *["missing"] * 3,
    ]
    status, out, err = typed("suite run suite.toml --output-dir out --quiet")
    assert (status, out, err) == (0, "", "")
    status, out, _ = typed("suite report suite.toml --output-dir out --json")
    found = json.loads(out)
    assert status == 0
    assert found["aggregates"]["runs"] == {"net": 2, "random": 1}
    assert found["failures"] == {}
    status, whole, _ = typed("suite report suite.toml --output-dir out")
    assert status == 0
    assert "interquartile mean" in whole
    status, _, err = typed("suite report suite.toml --output-dir out --episodes 3")
    assert status == 1
    assert "expected 3 episodes of root seed 3 in" in err


@pytest.mark.usefixtures("quick_children")
def test_flags_override_the_file(typed: Typed, folder: Path) -> None:
    for command in ("one --limit 2", "two --episodes 2 --workers 1 --keep-trajectories"):
        assert typed(f"suite run suite.toml --quiet --output-dir {command}")[0] == 0
    ledgers = [
        {name: data for name, data in contents(folder / out).items() if "episodes.jsonl" in name}
        for out in ("one", "two")
    ]
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]) == 6
    assert [*folder.glob("two/evaluations/*/*/*/trajectories")]
    assert "Limited to 2 of the 6" in typed("suite report suite.toml --output-dir one --limit 2")[1]
    shard = "--shard 1/2 --limit 2"
    assert typed(f"suite run suite.toml --output-dir three --quiet {shard}")[0] == 0
    found = json.loads(typed("suite ls suite.toml --output-dir three --json")[1])
    assert [cell["episodes"] for cell in found["cells"]] == [0, 2] * 3


def test_what_cannot_be_done_is_one_line(typed: Typed, folder: Path) -> None:
    status, _, err = typed("suite run nothing.toml --output-dir out")
    said = "tdcollect: expected the TOML file of a suite, got nothing.toml, which is no file\n"
    assert (status, err) == (1, said)
    status, _, err = typed("suite run suite.toml --output-dir out --task cartpole")
    assert status == 1
    assert "expected tasks of the suite, which are walk and short, got 'cartpole'" in err
    assert typed("suite run suite.toml --output-dir out --ray-workers 1 --workers 1")[0] == 2
    assert typed("suite run suite.toml")[0] == 2
    assert typed("suite run suite.toml --output-dir out --shard 2/2")[0] == 2
    assert not (folder / "out").exists()
    status, _, err = typed("suite report suite.toml --output-dir out")
    assert status == 1
    assert "expected the directory of a suite, got out; run the suite first" in err
    assert not (folder / "out").exists()


def test_cells_that_fail_are_named_with_the_status(typed: Typed, folder: Path) -> None:
    (folder / "suite.toml").write_text(FILE.replace(":net", ":broken"))
    status, _, err = typed("suite run suite.toml --output-dir out --quiet")
    assert status == 1
    line = "tdcollect: walk/net/0 could not run: RuntimeError: this policy is broken"
    assert err.splitlines()[0] == line


def test_an_interrupted_suite_says_how_it_goes_on(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tdcollect.evaluation.evaluate.Recording.add", interrupt)
    status, _, err = typed("suite run suite.toml --output-dir out --quiet")
    assert status == 130
    assert err == "tdcollect: interrupted; the same command resumes the evaluation\n"


def test_a_trial_of_one_episode_finds_what_cannot_run(folder: Path) -> None:
    (folder / "runs/net/walk/1.pt").write_bytes(b"not a file of torch's")
    given = tables()
    for name, env in [
        ("unknown", "NoSuchEnv-v0"),
        ("lacking", "no_such_module_here:Env-v0"),
        ("unseeded", "tests.evaluation.envs:Unseeded"),
    ]:
        given["tasks"].append({"name": name, "env": env})
    given["policies"].append({"name": "misfit", "factory": f"{HERE}:wrong_shape"})
    given["policies"].append({"name": "gone", "factory": f"{HERE}:gone"})
    given["policies"][1]["checkpoints"] = "runs/net/walk/{run}.pt"
    suite = Suite.of(given, folder).limited(1)
    results = suite.run(folder / "trial", progress=False)
    text = "\n".join(f"{name}: {reason}" for name, reason in results.failures.items())
    for expected in [
        "unknown/random/0: NameNotFound: Environment `NoSuchEnv` doesn't exist",
        "lacking/random/0: ModuleNotFoundError: ",
        "unseeded/random/0: NotReproducibleError: ",
        "walk/net/1: ValueError: ",
        "walk/misfit/0: ValueError: expected a policy for observations 'observation' [3], as",
        f"walk/gone/0: AttributeError: expected {HERE} to have 'gone', which it has not",
    ]:
        assert expected in text, expected
    assert not {*results.failures} & {"walk/net/0", "walk/random/0", "short/random/0"}


# The page


def test_the_first_suite_of_the_page_runs_as_it_is_copied(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own, its policies.py is the only module of this name.
    monkeypatch.setitem(sys.modules, "policies", None)
    del sys.modules["policies"]
    files = re.findall(r"^```\w+\n(# (\S+)\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert [name for _, name in files] == ["first.toml", "policies.py"]
    for text, name in files:
        Path(name).write_text(text)
    command, shown = re.findall(r"^```console\n\$ tdcollect (.*?)\n(.*?)^```", PAGE, re.S | re.M)[1]
    status, printed, _ = typed(command)
    assert status == 0
    assert printed.startswith(shown)
