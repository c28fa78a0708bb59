"""``tdcollect watch``: what the files of a run tell, while it runs and when it has ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tdcollect
from tdcollect.cli import main, watching
from tdcollect.cli.watching import Watched
from tdcollect.files import locked

from ..evaluation.envs import Walk
from ..evaluation.ledgers import contents
from ..evaluation.test_race import race
from ..suites.parts import save_runs, small
from ..zoo.reports import small_reports

__all__ = ["small_reports"]
pytestmark = pytest.mark.usefixtures("small_reports")

LINES = "episodes.jsonl"
RACED = ("left", "right")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_reports: None) -> dict[str, Path]:
    """The directories of an evaluation, a race and a suite; copy them before you alter them."""
    root = tmp_path_factory.mktemp("watched")
    tdcollect.evaluate(Walk, None, 12, output_dir=root / "evaluation", progress=False)
    race(root / "race", alpha=1e-4)
    save_runs(root)
    small(root).run(root / "suite", progress=False)
    return {name: root / name for name in ("evaluation", "race", "suite")}


@pytest.fixture
def copied(finished: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(finished[kind], tmp_path / kind))


def cut(root: Path, count: int) -> bytes:
    """Make an evaluation one that is running, whose next line is half-written; return the lines."""
    (root / "results.json").unlink()
    whole = (root / LINES).read_bytes()
    lines = whole.splitlines(keepends=True)
    (root / LINES).write_bytes(b"".join(lines[:count]) + lines[count][:9])
    return whole


def age(root: Path, seconds: float) -> None:
    for file in root.rglob("*"):
        os.utime(file, (time.time() - seconds,) * 2)


def test_an_evaluation_is_followed_from_before_it_begins_to_its_end(
    copied: Callable[[str], Path], finished: dict[str, Path], tmp_path: Path
) -> None:
    watched = Watched(tmp_path / "evaluation")
    assert watched.look()["state"] == "waiting"
    root = copied("evaluation")
    returns = [e.episode_return for e in tdcollect.EvaluationResult.load(root).episodes]
    whole = cut(root, 5)
    with locked(root):
        there = sorted(root.rglob("*"))
        found = watched.look()
        assert (found["state"], found["episodes"], found["of"]) == ("running", 5, 12)
        assert found["mean_return"] == pytest.approx(sum(returns[:5]) / 5)
        assert [writer["process"] for writer in found["writers"]] == [os.getpid()]
        assert "per_minute" not in found
        began = time.monotonic()
        (root / LINES).write_bytes(b"".join(whole.splitlines(keepends=True)[:9]))
        found = watched.look()
        least = 60 * 4 / (time.monotonic() - began + 60)
        assert found["per_minute"] > least
        assert found["seconds_left"] == pytest.approx(60 * 3 / found["per_minute"])
        assert sorted(root.rglob("*")) == there
    age(root, 300)
    found = watched.look()
    assert (found["state"], found["writers"], round(found["quiet"], -1)) == ("stopped", [], 300)
    told = "; ".join(watching._facts(found))
    assert "last change 5 min ago; no process of this machine writes there: the same comm" in told
    shutil.rmtree(root)
    shutil.copytree(finished["evaluation"], root)
    assert watched.look()["state"] == "finished"
    assert contents(root) == contents(finished["evaluation"])


def test_a_process_that_was_killed_writes_no_more(copied: Callable[[str], Path]) -> None:
    root = copied("evaluation")
    cut(root, 5)
    code = f"""
import subprocess, sys, time
from pathlib import Path
from tdcollect.files import locked
with locked(Path({str(root)!r})):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print("locked", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        watched = Watched(root)
        assert watched.look()["writers"] == [{"process": process.pid, "below": 1}]
        process.kill()
    assert (root / ".lock").exists()
    assert watched.look()["writers"] == []


def test_a_race_shows_the_difference_of_the_looks_so_far(
    copied: Callable[[str], Path], finished: dict[str, Path]
) -> None:
    root = copied("race")
    result = tdcollect.evaluation.RaceResult.load(root)
    assert result.looks > 2
    (root / "race.json").write_text(json.dumps({"format": 1, "plan": result.plan.to_dict()}))
    most = result.plan.max_episodes
    for name in RACED:
        part = root / "policies" / name
        manifest = json.loads((part / "manifest.json").read_bytes())
        (part / "manifest.json").write_text(json.dumps({**manifest, "episodes": most}))
        cut(part, result.plan.block * 2 - (name == "right"))
    watched = Watched(root)
    for looks in (1, 2):
        found = watched.look()
        (pair,) = found["pairs"]
        look = result.history[RACED][looks - 1]
        assert (pair["difference"], *pair["interval"]) == (look.difference, look.low, look.high)
        assert (found["state"], pair["decisions"]) == ("running", ["undecided"])
        assert found["of"] == 2 * most
        shutil.copy(finished["race"] / "policies/right" / LINES, root / "policies/right")
    shutil.rmtree(root)
    shutil.copytree(finished["race"], root)
    found = watched.look()
    assert (found["state"], found["pairs"]) == ("finished", result.outcome["pairs"])
    assert found["of"] == found["episodes"] == result.episodes


def test_a_suite_counts_its_evaluations_and_has_the_means_so_far(
    copied: Callable[[str], Path], finished: dict[str, Path]
) -> None:
    root = copied("suite")
    results = small(finished["suite"].parent).results(root)
    found = Watched(root).look()
    assert found["state"] == "finished"
    count = len(results.cells)
    assert found["evaluations"] == {"ended": count, "could_not_run": 0, "of": count}
    for task, means in found["mean_returns"].items():
        for policy, mean in means.items():
            runs = [cell.mean for cell in results.of(task, policy)]
            assert mean == pytest.approx(sum(runs) / len(runs))
    assert len(found["mean_returns"]) == len(results.tasks)
    first, second, *_ = (root / cell.path for cell in results.cells)
    cut(first, 2)
    shutil.rmtree(second)
    second.with_name(f"{second.name}.error.json").write_text('{"reason": "no such file"}')
    for seconds, state in ((30, "running"), (90, "stopped")):
        age(root, seconds)
        found = Watched(root).look()
        assert (found["state"], found["evaluations"]["ended"]) == (state, count - 1)
    assert found["evaluations"]["could_not_run"] == 1
    assert found["of"] - found["episodes"] == results.episodes - 2


class Stages:
    """Stands for time.sleep: each call brings the next stage of a run."""

    def __init__(self, *stages: Callable[[], Any]):
        self.stages, self.seconds = list(stages), list[float]()

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.stages.pop(0)()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_command_shows_each_look_and_ends_with_the_run(
    terminal: bool,
    copied: Callable[[str], Path],
    finished: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def end() -> None:
        shutil.copytree(finished["evaluation"], root, dirs_exist_ok=True)

    root = copied("evaluation")
    cut(root, 5)
    sleep = Stages(end)
    monkeypatch.setattr(watching.time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["watch", str(root)]) == 0
    out = capsys.readouterr().out
    assert sleep.seconds == [2.0 if terminal else 30.0]
    assert out.count("of 12 episodes") == 2
    assert ("\x1b[" in out) == terminal
    assert max(map(len, re.sub(r"\x1b\[\dF\x1b\[J", "", out).splitlines())) < 60 or not terminal
    if not terminal:
        assert [line.split("evaluation ")[-1].split(":")[0] for line in out.splitlines()] == [
            "stopped",
            "finished",
        ]


def test_json_and_interrupts_and_what_is_not_to_be_watched(
    copied: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", (sleep := Stages(lambda: None, interrupt)))
    assert main(["watch", str(tmp_path / "none"), "--json", "--interval", "0.5"]) == 0
    told = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert (told, sleep.seconds) == (["waiting"] * 2, [0.5, 0.5])
    root = copied("evaluation")
    (root / LINES).write_bytes(b"{}\n" + (root / LINES).read_bytes())
    assert main(["watch", str(root)]) == 1
    assert "line 1 of" in capsys.readouterr().err
    (root / "refused.json").write_text('{"reason": "it draws"}')
    assert main(["watch", str(root)]) == 1
    assert "the evaluation was refused: it draws; remove the dir" in capsys.readouterr().err
    assert main(["watch", str(tmp_path)]) == 1
    assert "of an evaluation, a race or a suite, got" in capsys.readouterr().err
