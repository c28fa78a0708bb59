"""Races: one decision and the same files for any workers and kills, and every refusal."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import tdcollect
from tdcollect import LocalWorkers
from tdcollect.cli import main
from tdcollect.lab import RaceResult
from tdcollect.lab.pages.view import view
from tdcollect.seeding import env_seed

from ..evaluation.crews import seven, some
from ..evaluation.envs import Failing, Walk
from ..evaluation.ledgers import alter, contents
from ..evaluation.test_interrupted import lines
from ..forkserver import start
from ..zoo.reports import shrink

__all__ = ["seven"]
pytestmark = pytest.mark.usefixtures("small_reports")

BLOCK = 4


def always(action: int) -> TensorDictModule:
    row = torch.nn.functional.one_hot(torch.tensor(action), 2)
    return TensorDictModule(
        lambda observation: row.expand(*observation.shape[:-1], 2), ["observation"], ["action"]
    )


POLICIES = {"left": always(0), "right": always(1)}


def race(out: Path | None = None, policies: Any = POLICIES, **more: Any) -> RaceResult:
    usual = {"env": Walk, "max_episodes": 60, "block": BLOCK, "num_envs": 3, "progress": False}
    return tdcollect.race(policies=policies, output_dir=out, **{**usual, **more})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, small_reports: None) -> Path:
    """The directory of a race; copy it before you alter it."""
    out = tmp_path_factory.mktemp("races") / "race"
    race(out, keep_trajectories=True)
    return out


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "race"))


def small(command: list[str]) -> int:
    """Run a command with small reports, in another process too."""
    shrink(pytest.MonkeyPatch())
    return main(command)


def played(out: Path) -> int:
    (count,) = {lines(out / "policies" / name) for name in POLICIES}
    return count


def test_any_number_of_slots_and_workers_gives_one_race(
    written: Path, tmp_path: Path, seven: LocalWorkers
) -> None:
    count = played(written)
    assert BLOCK < count < 60
    assert count % BLOCK == 0
    for place, how in enumerate(
        [{"num_envs": 1}, {"num_envs": 50}, {"workers": some(seven, 2)}, {"workers": seven}]
    ):
        out = tmp_path / str(place)
        found = race(out, keep_trajectories=True, **how)
        assert contents(out) == contents(written)
        assert repr(found) == (
            f"RaceResult(left, right, right is best, after {2 * count} episodes and "
            f"{count // BLOCK} looks)"
        )
    assert tdcollect.verify(written).passed
    assert str(RaceResult.load(written)) == str(found) == str(race())


def test_each_policy_has_the_evaluation_of_the_episodes_that_count(
    written: Path, copied: Path, tmp_path: Path
) -> None:
    for name, policy in POLICIES.items():
        out = tmp_path / name
        how = {"num_envs": 3, "progress": False, "keep_trajectories": True}
        tdcollect.evaluate(Walk, policy, played(written), output_dir=out, **how)
        assert contents(out) == contents(written / "policies" / name)
        before = (copied / "policies" / name / "run.json").read_bytes()
        tdcollect.evaluate(
            Walk, policy, played(written), output_dir=copied / "policies" / name, **how
        )
        assert (copied / "policies" / name / "run.json").read_bytes() == before  # it was done
    race(copied, keep_trajectories=True)
    assert contents(copied) == contents(written)


def test_what_is_given_by_episode_is_that_of_the_episodes_that_count(tmp_path: Path) -> None:
    given = {"episode_options": lambda index: {"n": index}, "env_seeds": lambda index: 7 * index}
    out = tmp_path / "race"
    count = len(race(out, **given).results["left"].episodes)
    assert count < 60
    how = {"num_envs": 3, "progress": False, **given}
    tdcollect.evaluate(Walk, POLICIES["left"], count, output_dir=tmp_path / "one", **how)
    assert contents(tmp_path / "one") == contents(out / "policies" / "left")


def test_a_race_that_died_at_its_end_goes_on_to_the_same_files(
    written: Path, tmp_path: Path
) -> None:
    """Before, between and after the files that mark the episodes that count."""
    count = played(written)

    def unmarked(here: Path) -> None:
        alter(here / "manifest.json", {"episodes": 60})

    def unfinished(here: Path) -> None:
        (here / "results.json").unlink()

    def shorter(here: Path) -> None:
        text = (here / "episodes.jsonl").read_text().splitlines(keepends=True)
        (here / "episodes.jsonl").write_text("".join(text[: count - 3]))
        (here / "trajectories" / f"{count - 1:06d}.npz").unlink()

    dead: list[dict[str, list[Callable[[Path], None]]]] = [
        {"left": [unfinished]},
        {"left": [unfinished], "right": [unfinished, unmarked]},
        {"left": [unfinished, unmarked], "right": [unfinished]},
        {"left": [unfinished, unmarked, shorter], "right": [unfinished, unmarked]},
        {"left": [shutil.rmtree], "right": [unfinished, unmarked, shorter]},
    ]
    for place, changes in enumerate(dead):
        out = Path(shutil.copytree(written, tmp_path / str(place)))
        alter(out / "race.json", {"outcome": None})
        for name, each in changes.items():
            for change in each:
                change(out / "policies" / name)
        race(out, keep_trajectories=True)
        assert contents(out) == contents(written)


@pytest.mark.slow
def test_killed_at_random_moments_and_run_again(here: Path) -> None:
    (file,) = here.glob("policies_*.py")
    rng, kills = random.Random(0), 0
    command = ["race", f"{file.stem}:short", "--policy", "a=random", "--policy"]
    command += [f"b={file.stem}:lean", "--env-kwargs", '{"length": 40}', "--block", "7"]
    command += ["--max-episodes", "80", "--return-range", "0", "40", "--num-envs=2", "--quiet"]
    command += ["--output-dir"]
    assert main([*command, "whole"]) == 0
    out = here / "killed"
    while kills < 4:
        process = start(small, [*command, "killed"])
        before, aim = lines(out / "policies" / "a"), rng.choice([1, 5, 9])
        while process.is_alive() and lines(out / "policies" / "a") < before + aim:
            time.sleep(0.001)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    assert kills
    assert main([*command, "killed"]) == 0
    assert contents(out) == contents(here / "whole")
    assert "request" in json.loads((out / "policies" / "b" / "run.json").read_text())[-1]


def test_a_policy_that_is_out_plays_no_more(tmp_path: Path) -> None:
    several = {"a": always(0), "b": always(1), "c": always(1)}
    found = race(tmp_path / "race", several, on="success", max_episodes=150, margin=0.15)
    counts = {name: len(one.episodes) for name, one in found.results.items()}
    assert counts["a"] < counts["b"] == counts["c"]
    assert found.outcome["out"]["a"]["episodes"] == counts["a"]
    assert set(found.outcome["out"]) == {"a"}
    assert found.winner is None
    assert "no difference larger than margin" in str(found)
    assert tdcollect.verify(tmp_path / "race").passed
    page = (tmp_path / "race" / "report.html").read_text()
    assert "worse than b" in page
    assert 'href="./policies/a/report.html"' in page


def test_failed_episodes_count_by_the_rule_that_the_result_names() -> None:
    env = partial(Failing, seeds=(env_seed(0, 1), env_seed(0, 6)))
    how = {"env": env, "return_range": (-100.0, 100.0), "max_episodes": 8, "max_restarts": 0}
    worst, left_out = race(**how), race(**how, failed="leave out")
    assert [one.outcome["pairs"][0]["pairs"] for one in (worst, left_out)] == [8, 6]
    assert "4 failed or lost episodes count as the worst value." in str(worst)
    assert "4 failed or lost episodes count not at all" in str(left_out)
    assert set(worst.results["left"].errors) == {1, 6}


def test_a_return_outside_the_range_ends_the_race(tmp_path: Path) -> None:
    for _ in range(2):  # and again, when it is resumed
        with pytest.raises(ValueError, match=r"returns from 0 to 1, got -?\d.* in episode \d"):
            race(tmp_path / "race", return_range=(0, 1))


def test_a_race_on_a_metric() -> None:
    """Of the last observations, of which those of the right are the higher."""
    how = {"metrics": {"last": last_place}, "on": "last", "return_range": (-20.0, 20.0)}
    assert race(**how, max_episodes=150).winner == "right"
    found = race(**how, max_episodes=150, lower_is_better=True)
    assert found.winner == "left"
    assert found.outcome["question"] == "is the mean last lower?"
    (pair,) = found.outcome["pairs"]
    assert pair["difference"] < 0
    assert pair["decisions"] == ["better"]


def last_place(data: TensorDict) -> float:
    return float(data["next", "observation"][-1].sum())


def test_verify_decides_again(written: Path, tmp_path: Path) -> None:
    found = json.loads((written / "race.json").read_text())
    pair = found["outcome"]["pairs"][0]
    wrong: dict[str, Any] = {
        "outcome is": {"outcome": {**found["outcome"], "pairs": [{**pair, "difference": 0.0}]}},
        "policies is": {"policies": {}},
        "the race is unfinished": {"outcome": ...},
        "more by the rule": {"plan": {**found["plan"], "block": 50}},
        "a plan that is none": {"plan": {"rule": {"names": ["left"]}}},
        "expected format 1, got 7": {"format": 7},
    }
    for place, (text, change) in enumerate(wrong.items()):
        out = Path(shutil.copytree(written, tmp_path / str(place)))
        kept = {**found, **change}
        kept = {name: value for name, value in kept.items() if value is not ...}
        (out / "race.json").write_text(json.dumps(kept))
        checked = tdcollect.verify(out)
        assert text in str(checked)
        assert not checked.passed


def test_refusals(written: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"policies": [None, None]}, "expected policies by name, .*, got list"),
        ({"policies": {"a": None}}, "expected names of two or more policies"),
        ({"policies": {"a/b": None, "c": None}}, "as it names a folder, got 'a/b'"),
        ({"policies": {"A": None, "a": None}}, "names of their own"),
        ({"env": tdcollect.make_env(Walk)}, "pass a function"),
        ({"block": 0}, "expected block to be a positive int"),
        ({"max_episodes": 0}, "expected max_episodes to be a positive int"),
        ({"margin": 3.0}, "expected a range of returns with a margin"),
        (
            {"policies": {"a": POLICIES["left"], "b": POLICIES["left"]}},
            "one policy as 'a' and as 'b'",
        ),
        ({"on": "cost"}, r"one of metrics, \[\], got 'cost'"),
        ({"maxepisodes": 3}, "did you mean max_episodes"),
        ({"out": written, "block": 5}, r"another race: block is 4 there and 5 here"),
    ]
    for given, text in cases:
        with pytest.raises((TypeError, ValueError), match=text):
            race(**{"out": tmp_path / "race", **given})
    assert not (tmp_path / "race").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"which holds file; choose another"):
        race(tmp_path)


def test_the_command(typed: Callable[[str], tuple[int, str, str]]) -> None:
    status, out, _ = typed(
        "race @:short --policy lean=@:lean --policy net=random --max-episodes 99 --num-envs 4 "
        '--return-range 0 40 --env-kwargs {"length":40} --json --quiet'
    )
    found = json.loads(out)
    assert (status, found["winner"]) == (0, "lean")
    assert found["plan"]["rule"]["value_range"] == [0, 40]
    for wrong, text in (
        ("--policy a=random --policy b", "expected NAME=VALUE"),
        ("--policy a=random --policy b=random --checkpoint c=x", "expected a name of --policy"),
        ("--policy a=random --policy b=random --keep-trajectories", "needs a directory"),
        ("--policy a=random --policy b=random --alpha 2", "expected alpha to be between 0 and 1"),
        ("--policy a=@:lean --policy b=@:lean", "got one policy as 'a' and as 'b'"),
    ):
        status, _, err = typed(f"race CartPole-v1 {wrong}")
        assert status in (1, 2)
        assert text in err


def test_a_race_is_viewed(written: Path, tmp_path: Path) -> None:
    index, (found,) = view(written.parent, tmp_path / "pages")
    assert (found.kind, found.path, found.status) == ("race", "race", "finished")
    page = (tmp_path / "pages" / "pages" / "race" / "report.html").read_text()
    for link in ("./policies/left/report.html", "./../../index.html"):
        assert f'href="{link}"' in page
    assert "left, right" in index.read_text()
    settings = page.partition("<h2>The rule</h2>")[2].partition("</section>")[0]
    assert not re.search("None|False", settings)
    result = RaceResult.load(written)
    played = len(result.results["left"].episodes)
    assert f'Episodes of a policy</dt><dd class="value">{played}</dd>' in page
    assert f"of {result.plan.max_episodes} at most" in page
    legend = re.findall(r"</svg> (.*?)</span>", page)
    assert legend == ["difference", "95% confidence sequence", "no difference"]
    zero = page.partition("no difference</span>")[0].rpartition("<path")[2]
    assert 'stroke="var(--muted)"' in zero
    assert "dasharray" in zero
    out = Path(shutil.copytree(written, tmp_path / "runs" / "race"))
    (out / "policies" / "left" / "manifest.json").unlink()
    _, found = view(out.parents[1], tmp_path / "others")
    assert [one.status.partition(":")[0] for one in found if one.kind == "race"] == [
        "unfinished or unreadable"
    ]


def test_each_policy_of_a_race_is_audited(written: Path) -> None:
    audits = tdcollect.audit(written, Walk, sample=3, seed=0)
    assert [audit.directory.name for audit in audits] == [*POLICIES]
    assert not any(audit.wrong for audit in audits)
    for audit in tdcollect.audit(written):
        assert "not audited: expected --env ENV (env=), as Walk is not" in str(audit)
