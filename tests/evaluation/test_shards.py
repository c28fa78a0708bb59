"""Shards, and their merge into the directory that one process would have written."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import manifest as manifests
from tdcollect.evaluation import merging
from tdcollect.evaluation.directory import Directory
from tdcollect.evaluation.ledger import Shard, read_last, sha256
from tdcollect.pages.evaluation import named_in

from .envs import Failing, Walk
from .ledgers import GONE, alter, contents, flip_in, ledger, manifest, pipe, unfinished
from .policies import deterministic
from .test_interrupted import killed

pytestmark = pytest.mark.usefixtures("small_reports")

EPISODES = 8
TIMES = "run.json"


def evaluate(out: Path | None, shard: Any = None, episodes: Any = EPISODES, **more: Any) -> Any:
    usual = {"env": Walk, "policy": deterministic(), "num_envs": 3, "progress": False}
    return tdcollect.evaluate(episodes=episodes, output_dir=out, shard=shard, **{**usual, **more})


def shards(folder: Path, n: int, *args: Any, **more: Any) -> list[Path]:
    """Run all shards; their directories, the last one first."""
    for i in range(n):
        evaluate(folder / f"shard-{i}", (i, n), *args, **more)
    return [folder / f"shard-{i}" for i in reversed(range(n))]


@pytest.fixture(scope="module")
def written(tmp_path_factory, small_reports) -> Path:
    """A whole evaluation and its two shards, all with data; copy them before you alter them."""
    folder = tmp_path_factory.mktemp("written")
    evaluate(folder / "whole", keep_trajectories=True)
    shards(folder, 2, keep_trajectories=True)
    return folder


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


def both(runs: Path) -> list[Path]:
    return [runs / "shard-0", runs / "shard-1"]


# The same bytes


def stop(td: Any) -> Any:
    raise KeyboardInterrupt


FAILED = [1, 4]
SEEDS = tuple(tdcollect.env_seed(0, index) for index in FAILED)
CASES = {
    "given seeds": (2, [3, 9, 4, 0, 7], {"env_seeds": lambda index: 100 + index}),
    "more shards than episodes": (3, [5, 1], {"keep_trajectories": True}),
    "failures": (2, 5, {"env": Failing, "policy": None, "env_kwargs": {"seeds": SEEDS}}),
}


@pytest.mark.parametrize(("n", "episodes", "more"), CASES.values(), ids=CASES)
def test_merged_shards_are_the_files_of_one_process(tmp_path: Path, n, episodes, more) -> None:
    evaluate(tmp_path / "whole", None, episodes, **more)
    parts = shards(tmp_path, n, episodes, **more)
    before = list(map(contents, parts))
    result = tdcollect.merge(parts, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert list(map(contents, parts)) == before
    failed = FAILED if "env" in more else []
    assert [episode.index for episode in result.episodes if not episode.completed] == failed
    assert result.digest == tdcollect.EvaluationResult.load(tmp_path / "whole").digest
    assert tdcollect.verify(tmp_path / "merged").passed
    runs = json.loads((tmp_path / "merged" / TIMES).read_text())
    assert sum(run["episodes"] for run in runs) == len(result.episodes)


def test_merging_again_finds_it_done(runs: Path) -> None:
    tdcollect.merge(both(runs), runs / "merged")
    before = {path: path.stat().st_mtime_ns for path in (runs / "merged").rglob("*")}
    tdcollect.merge(reversed(both(runs)), runs / "merged")
    assert {path: path.stat().st_mtime_ns for path in (runs / "merged").rglob("*")} == before
    whole = (runs / "whole" / "manifest.json").read_bytes()
    for part in both(runs):
        assert (part / "manifest.json").read_bytes() == whole
        assert not {"results.json", "report.html"} & {*os.listdir(part)}


def test_any_directories_with_all_episodes_are_merged(runs: Path) -> None:
    """Shards cut in several ways, twins, a whole; into one that one process began, too."""
    evaluate(runs / "quarter", (0, 4), keep_trajectories=True)  # which is half of shard 0/2
    evaluate(runs / "other", (2, 4), keep_trajectories=True)
    shutil.copytree(runs / "shard-1", runs / "twin")
    shutil.copytree(runs / "quarter", runs / "begun")
    (runs / "begun" / "shard.json").unlink()  # as if the whole had stopped there
    for of, out in [
        (("quarter", "shard-1", "other"), "merged"),
        (("shard-0", "shard-1", "twin", "whole"), "more"),
        (("shard-0", "shard-1"), "begun"),
    ]:
        tdcollect.merge([runs / name for name in of], runs / out)
        assert contents(runs / out) == contents(runs / "whole")


def test_data_are_copied(runs: Path) -> None:
    before = contents(tdcollect.merge(both(runs), runs / "merged").directory)
    unfinished(runs / "merged", 0)  # killed when all was copied, and the ledger was empty
    merged = tdcollect.merge(both(runs), runs / "merged")
    assert contents(runs / "merged") == before
    shutil.rmtree(runs / "shard-0")
    assert len(merged.trajectory(0)) == merged.record(0).length


def test_memory_grows_by_less_than_a_kilobyte_for_each_record(tmp_path: Path, monkeypatch) -> None:
    """Beside that of the statistics and the report."""
    monkeypatch.setattr(merging, "finish", lambda *args: None)

    def peak(count: int) -> int:
        parts = [tmp_path / f"{count}-{i}" for i in range(2)]
        for i, part in enumerate(parts):
            directory = Directory(part, manifest(episodes=count), Shard(i, 2))
            directory.begin()
            directory.finish(ledger([1.0] * count)[i::2])
            directory.finish_shard()
            directory.close()
        found = []
        for again in range(2):  # the first may import
            gc.collect()
            tracemalloc.start()
            tdcollect.merge(parts, tmp_path / f"{count}-{again}-merged")
            found.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return min(found)

    assert 100 < (peak(300) - peak(100)) / 200 < 1000


# The argument


@pytest.mark.parametrize(
    "shard", [(4, 4), (-1, 2), (0, 0), "0/4", 3, (1.0, 2), (True, 2), (0, 1, 2), ()], ids=str
)
def test_a_shard_that_cannot_be_is_refused_before_an_env_is_made(shard: Any) -> None:
    with pytest.raises(ValueError, match=r"expected shard to be \(i, n\) with two ints, i from 0"):
        tdcollect.evaluate(lambda: 1 / 0, None, 8, shard=shard)


def test_without_a_directory_the_result_has_the_episodes_of_the_shard(written: Path) -> None:
    whole = tdcollect.EvaluationResult.load(written / "whole")
    result = evaluate(None, (1, 3), keep_trajectories=True)
    assert result.episodes == whole.episodes[1::3]
    assert result.missing == [0, 2, 3, 5, 6]
    assert len(result.trajectory(4)) == len(result.replay(4)) == whole.record(4).length
    with pytest.raises(KeyError, match="episode 0 is not among the 3 of this ledger"):
        result.replay(0)


# The directory of a shard


def test_a_finished_shard_is_found_done(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(runs)
    ran = []
    monkeypatch.setattr(Directory, "add", lambda *args: ran.append(args))
    result = evaluate(runs / "shard-1", (1, 2), keep_trajectories=True)
    assert [episode.index for episode in result.episodes] == [1, 3, 5, 7]
    assert ran == []
    assert contents(runs) == before


def test_an_interrupted_shard_goes_on(runs: Path) -> None:
    before = contents(runs)
    for lines in (0, 2, 4):
        unfinished(runs / "shard-1", lines)
        assert read_last(runs / "shard-1") == (Shard(1, 2), None)
        evaluate(runs / "shard-1", (1, 2), keep_trajectories=True)
        assert contents(runs) == before
    (runs / "shard-1" / "shard.json").unlink()  # its process died before it was marked
    evaluate(runs / "shard-1", (1, 2), keep_trajectories=True)
    assert contents(runs) == before


def test_another_shard_is_refused_there(runs: Path) -> None:
    """Or a shard where the whole evaluation is."""
    unfinished(runs / "shard-1", 2)
    before = contents(runs)
    for name, other, got in [
        *((name, (1, 4), "shard ./2") for name in ("shard-0", "shard-1")),
        ("shard-1", (0, 2), "shard 1/2"),
        ("whole", (0, 1), "the whole evaluation"),
    ]:
        told = f"expected .* to hold shard ./. or nothing, got {got}; choose a direct"
        with pytest.raises(ValueError, match=told):
            evaluate(runs / name, other)
    assert contents(runs) == before
    (runs / "whole" / "results.json").unlink()
    with pytest.raises(ValueError, match="or nothing, got episode 1, which is not of this shard"):
        evaluate(runs / "whole", (0, 2))


def test_the_whole_goes_on_from_a_shard(runs: Path) -> None:
    unfinished(runs / "shard-0", 2)
    for part in both(runs):
        (part / ".shard.json.999999999.part").touch()  # of a process that was killed
    evaluate(runs / "one", (0, 1), keep_trajectories=True)
    for name in ("shard-0", "shard-1", "one"):
        result = evaluate(runs / name, keep_trajectories=True)
        assert len(result.episodes) == EPISODES
        assert contents(runs / name) == contents(runs / "whole")


def test_a_run_that_is_refused_or_never_ran_leaves_all_as_it_was(runs: Path) -> None:
    evaluate(runs / "bare", (0, 2))
    before = contents(runs)
    with pytest.raises(ValueError, match="expected the data of the episodes that"):
        evaluate(runs / "bare", keep_trajectories=True)
    with pytest.raises(ValueError, match="holds another evaluation"):
        evaluate(runs / "shard-1", policy=stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(runs / "out", (0, 2), policy=stop)
    assert contents(runs) == before
    assert not (runs / "out").exists()


# Alterations


WRITES = r"expected .*shard\.json as tdcollect writes it, got shard "
ALTERED: dict[str, tuple[str, Any, str]] = {
    "record": ("episodes.jsonl", {"return": 99.0}, r"its digest is .* in shard\.json: one of the"),
    "no ledger": ("episodes.jsonl", None, "its digest is none, as it is missing"),
    "shard": ("shard.json", "[1, 2]", r"expected .*shard\.json to hold a JSON object"),
    "bounds": ("shard.json", {"shard": [2, 2]}, rf"{WRITES}\[2, 2\] and"),
    "digests": ("shard.json", {"ledger": 3}, rf"{WRITES}\[1, 2\] and digests {{"),
    "pipe": ("shard.json", pipe, "hold a JSON object, got a thing that is no file"),
    "a digest": ("shard.json", {"manifest": GONE}, rf"{WRITES}\[1, 2\] and digests {{"),
}


@pytest.mark.parametrize(("name", "how", "told"), ALTERED.values(), ids=ALTERED)
def test_an_altered_shard_is_refused(runs: Path, name: str, how: Any, told: str) -> None:
    alter(runs / "shard-1" / name, how)
    with pytest.raises(ValueError, match=told):
        tdcollect.merge(both(runs), runs / "merged")
    with pytest.raises(ValueError, match=told):
        tdcollect.EvaluationResult.load(runs / "shard-1")
    assert not (runs / "merged").exists()
    assert not tdcollect.verify(runs / "shard-1").passed


def test_a_shard_of_altered_bounds_is_unfinished(runs: Path) -> None:
    alter(runs / "shard-1" / "shard.json", {"shard": [0, 2]})
    told = str(tdcollect.verify(runs / "shard-1"))
    assert "episodes 1, 3, 5 and 1 more are not of shard 0/2" in told
    assert "shard 0/2 is unfinished: it lacks 4 episodes" in told
    with pytest.raises(ValueError, match=r"shard 0/2 in .* is unfinished: it lacks episodes"):
        tdcollect.merge(both(runs), runs / "merged")


def test_data_of_only_some_shards_are_refused(runs: Path) -> None:
    alter(runs / "shard-1" / "trajectories", None)
    expected = "to have the data of their episodes, or none, but .*shard-0 has data, and .*shard-1"
    with pytest.raises(ValueError, match=expected + r" has none of 4 episodes \(episode 1 first\)"):
        tdcollect.merge(both(runs), runs / "merged")
    alter(runs / "shard-0" / "trajectories", None)
    tdcollect.merge(both(runs), runs / "merged")
    assert not (runs / "merged" / "trajectories").exists()


# What is missing


def test_what_is_missing_is_named_by_shards_that_are_cut_alike(runs: Path) -> None:
    for name, shard in [("third", (0, 3)), ("first", (0, 4)), ("second", (1, 4))]:
        evaluate(runs / name, shard, keep_trajectories=True)
    (runs / "empty").mkdir()
    unfinished(runs / "second", 1)

    def told(*names: str) -> str:
        with pytest.raises(ValueError, match="expected shards that are finished") as refused:
            tdcollect.merge([runs / name for name in names], runs / "merged")
        return str(refused.value)

    assert told("first", "second", "empty") == (
        "expected shards that are finished, and complete together, but "
        f"{runs / 'empty'} holds no evaluation; "
        f"shard 1/4 in {runs / 'second'} is unfinished: it lacks episode 5; "
        "none has shards 2/4 and 3/4: episodes 2, 3, 6 and 1 more. "
        "Run the commands of these shards (again): each goes on where it was; then merge"
    )
    assert "but none has episodes 2 and 4. Run" in told("third", "shard-1")
    assert "but none has shard 0/2: episodes 0, 2, 4 and 1 more." in told("shard-1")
    unfinished(runs / "shard-1", 4)
    assert "shard-1 is unfinished: it has all episodes, and no dig" in told("shard-0", "shard-1")
    assert not (runs / "merged").exists()
    found = str(tdcollect.verify(runs / "shard-1"))
    assert "shard 1/2 is unfinished: this file has no digest" in found


def test_data_are_listed_with_their_shard_and_merged_with_it(runs: Path) -> None:
    listed = [json.loads((path / "shard.json").read_text())["trajectories"] for path in both(runs)]
    tdcollect.merge(both(runs), runs / "merged")
    assert contents(runs / "merged") == contents(runs / "whole")
    merged = json.loads((runs / "merged" / "results.json").read_text())["trajectories"]
    assert merged == {**listed[0], **listed[1]}
    flip_in(runs / "shard-1" / "trajectories" / "000003.npz", "next/done")
    for reader in (
        lambda: tdcollect.merge(both(runs), runs / "other"),
        lambda: tdcollect.EvaluationResult.load(runs / "shard-1").trajectory(3),
    ):
        with pytest.raises(ValueError, match=r"data kept of episode 3 .* the digest of their"):
            reader()
    assert not tdcollect.verify(runs / "shard-1").passed
    assert tdcollect.verify(runs / "merged").passed


# Twins


def forge(out: Path, line: int, **changed: Any) -> None:
    """Change a record of a shard, and its digest."""
    alter(out / "episodes.jsonl", changed, line)
    alter(out / "shard.json", {"ledger": sha256(out / "episodes.jsonl")})


def test_of_two_records_of_an_episode_the_one_with_fewer_restarts_counts(runs: Path) -> None:
    """If they are the same otherwise; else none does."""
    shutil.copytree(runs / "shard-1", runs / "twin")
    of = [*both(runs), runs / "twin"]
    unlike = "episode 5 is not the same in .*shard-1 and in .*twin: its"
    for name, value, told in [
        ("digest", "ab" * 32, f"{unlike} digest is .* and "),
        ("return", 99.0, r"twin.*: the rewards of episode 5 give .*, in the ledger 99\.0"),
    ]:
        forge(runs / "twin", 2, **{name: value})
        with pytest.raises(ValueError, match=told):
            tdcollect.merge(of, runs / "merged")
        assert not (runs / "merged").exists()
        shutil.copytree(runs / "shard-1", runs / "twin", dirs_exist_ok=True)
    forge(runs / "shard-1", 2, restarts=1)
    forge(runs / "twin", 3, restarts=1)
    tdcollect.merge(of, runs / "merged")
    assert contents(runs / "merged") == contents(runs / "whole")


# Manifests that differ


def other_manifest(out: Path, changed: dict[Any, Any]) -> None:
    """Have a finished shard run under another manifest."""
    alter(out / "manifest.json", changed)
    alter(out / "shard.json", {"manifest": sha256(out / "manifest.json")})


def test_shards_of_two_evaluations_are_refused(runs: Path) -> None:
    other_manifest(runs / "shard-1", {("policy", "class"): "lab.Actor", "device": "cuda"})
    with pytest.raises(ValueError, match="merge only shards of one evaluation") as refused:
        tdcollect.merge(both(runs), runs / "merged")
    assert re.search("but device is 'c.*' in .*; policy.class is '.*' in", str(refused.value))
    assert f"'lab.Actor' in {runs / 'shard-1'}" in str(refused.value)
    assert not (runs / "merged").exists()


def test_an_evaluation_does_not_go_on_elsewhere(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = manifests.versions()
    monkeypatch.setattr(manifests, "versions", lambda: versions | {"torch": "9.9"})
    with pytest.raises(ValueError, match=r"versions\.torch is .* and '9\.9' here"):
        evaluate(runs / "shard-1", (1, 2), keep_trajectories=True)


# The arguments of merge


def test_directories_that_cannot_be_merged_are_refused(runs: Path) -> None:
    zero, one = both(runs)
    before = contents(runs)
    cases: list[tuple[Any, Path, str]] = [
        ([], runs / "out", "expected directories to merge, got none"),
        ([zero, zero], runs / "out", "expected directories that differ, got .*shard-0 twice"),
        ([zero, one], one, "expected an output_dir outside of the directories to merge"),
        ([zero, one], one / "out", "expected an output_dir outside of the directories to merge"),
        ([zero], one, "which holds shard 1/2; choose another"),
        ([zero, one], runs, "which holds [a-z0-9-]+; choose another"),
        ([runs / "none"], runs / "out", "none holds no evaluation"),
    ]
    for directories, out, told in cases:
        with pytest.raises(ValueError, match=told):
            tdcollect.merge(directories, out)
    with pytest.raises(TypeError, match="expected a list of directories to merge, got '"):
        tdcollect.merge(str(zero), runs / "out")
    assert contents(runs) == before


def test_another_evaluation_in_the_output_directory_is_left_alone(runs: Path) -> None:
    evaluate(runs / "other", seed=3)
    evaluate(runs / "bare")
    shutil.copytree(runs / "whole", runs / "altered")
    (runs / "altered" / "trajectories" / "000003.npz").write_text("no arrays")
    before = contents(runs)
    for name, told in [
        ("other", r"holds another evaluation: seeds\.root is 3 there and 0 here"),
        ("bare", "to hold this merged evaluation, but it lacks the data of episode 0"),
        ("altered", "does not hold the data of an episode"),
    ]:
        with pytest.raises(ValueError, match=told):
            tdcollect.merge(both(runs), runs / name)
    for part in both(runs):
        shutil.rmtree(part / "trajectories")
    with pytest.raises(ValueError, match="it holds data of episodes, and the shards have none"):
        tdcollect.merge(both(runs), runs / "whole")
    after = contents(runs)
    assert {name: before[name] for name in after} == after


# Killed


@pytest.mark.slow
def test_a_merge_that_is_killed_ends_with_the_same_bytes(runs: Path) -> None:
    """Each time a file later than the last time."""
    out = runs / "merged"
    typed = ["merge", *map(str, both(runs)), f"--output-dir={out}", "--quiet"]
    before = list(map(contents, both(runs)))
    runs_killed = next(n for n in itertools.count() if not killed("replace", n, typed))
    assert runs_killed >= 6  # amid the data, and between the files that follow
    assert contents(out) == contents(runs / "whole")
    assert len(json.loads((out / TIMES).read_text())) == 2
    assert list(map(contents, both(runs))) == before


# The command line


EVALUATE = "evaluate @:short --policy @:net --episodes 5 --num-envs 2 --keep-trajectories"


def test_shards_of_the_command_line_are_merged(typed, here) -> None:
    assert typed(f"{EVALUATE} --output-dir whole --quiet")[0] == 0
    for i in range(2):
        status, out, _ = typed(f"{EVALUATE} --shard {i}/2 --output-dir part-{i}")
        assert status == 0
        assert (
            f"shard {i}/2: {3 - i} episodes ended, {2 + i} are in other shards; when those" in out
        )
        assert f"\ntdcollect merge part-{i} DIR... --output-dir DIR\n" in out
    status, out, _ = typed("merge part-0 part-1 --output-dir merged")
    assert status == 0
    assert str(tdcollect.EvaluationResult.load("whole").summary()) in out
    assert "report merged/report.html" in out
    assert contents(here / "merged") == contents(here / "whole")
    assert named_in(here / "merged") == named_in(here / "whole") != {}
    for command in ("verify part-0 part-1 merged", f"replay part-1 3 --env {EVALUATE[9:31]}"):
        status, out, err = typed(command)
        assert status == 0, err
    (told,) = json.loads(typed("verify part-1 --json")[1])["evaluations"]
    assert (told["shard"], told["episodes"], told["problems"]) == ([1, 2], 2, [])
    told = "part-1: shard 1/2, 2 records and the data of 2 checked: passed"
    assert told in typed("verify part-1")[1]
    status, _, err = typed("compare part-0 part-1")
    assert (status, err.count("\n")) == (1, 1)
    assert "part-0 holds shard 0/2 of an evaluation; make one of all shards" in err
    told = json.loads(typed(f"{EVALUATE} --shard 1/2 --output-dir part-1 --json")[1])
    assert (told["shard"], told["report"]) == ([1, 2], None)
    assert typed(f"{EVALUATE} --shard 0/2")[0] == 2  # no directory


def test_a_shard_that_cannot_be_is_not_understood(capsys) -> None:
    for text in ("4/4", "-1/2", "0/0", "1", "1/2/3", "a/b", "1.0/2", "0 / 2", ""):
        command = ["evaluate", "CartPole-v1", "--policy", "random", f"--shard={text}"]
        assert main([*command, "--output-dir=out"]) == 2
        told = f"i/n with i from 0 to n - 1, such as 0/4 for the first of four shards, got {text!r}"
        assert told in " ".join(capsys.readouterr().err.split())
