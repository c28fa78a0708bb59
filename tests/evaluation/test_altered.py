"""Altered, torn or foreign files of an evaluation are detected, and not changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import directory as files
from tdcollect.evaluation.ledger import Episode, ledger_digest

from .envs import Walk
from .ledgers import manifest, unfinished
from .policies import deterministic

EPISODES = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A finished evaluation with its data; copy it before you alter it."""
    out = tmp_path_factory.mktemp("written") / "run"
    tdcollect.evaluate(
        Walk, deterministic(), EPISODES, output_dir=out, keep_trajectories=True, progress=False
    )
    return out


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def again(out: Path, **settings: Any) -> Any:
    return tdcollect.evaluate(
        Walk, deterministic(), EPISODES, output_dir=out, progress=False, **settings
    )


def contents(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


def alter(file: Path, line: int, **changed: Any) -> None:
    """Change entries of a record in place."""
    lines = file.read_text().splitlines(keepends=True)
    lines[line] = json.dumps(json.loads(lines[line]) | changed) + "\n"
    file.write_text("".join(lines))


def rewrite(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def load(out: Path) -> Any:
    return tdcollect.EvaluationResult.load(out)


# Records that were altered


@pytest.mark.parametrize("reader", [load, again], ids=["load", "rerun"])
def test_a_record_that_was_altered_is_refused_and_nothing_is_rewritten(run: Path, reader) -> None:
    alter(run / "episodes.jsonl", 1, **{"return": 999.0})
    before = contents(run)
    with pytest.raises(ValueError, match=r"episodes\.jsonl: its digest is .* was altered"):
        reader(run)
    assert contents(run) == before


def test_compare_refuses_a_record_that_was_altered(run: Path, written: Path, capsys) -> None:
    alter(run / "episodes.jsonl", 1, **{"return": 999.0})
    assert main(["compare", str(written), str(run)]) == 1
    assert "was altered" in capsys.readouterr().err


def test_compare_refuses_one_directory_twice(written: Path, capsys) -> None:
    assert main(["compare", str(written), f"{written}/"]) == 2
    assert "expected directories that differ, got one of them twice" in capsys.readouterr().err


def test_compare_refuses_a_ledger_without_its_digest(run: Path, written: Path, capsys) -> None:
    unfinished(run, EPISODES)
    assert main(["compare", str(written), str(run)]) == 1
    assert f"{run} is unfinished: it lacks its results; run" in capsys.readouterr().err


def test_a_manifest_that_was_altered_is_refused(run: Path) -> None:
    rewrite(run / "manifest.json", device="cuda")
    with pytest.raises(ValueError, match=r"manifest\.json: its digest is .* was altered"):
        load(run)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "env seed": ({"env_seed": 7}, r"expected the seeds \d+ and \d+ of episode 1, .* got 7 and"),
    "policy seed": ({"policy_seed": 7}, r"expected the seeds .* of episode 1, as the manifest"),
    "foreign index": ({"index": 9}, "the manifest asks for no episode 9"),
    "duplicate": ({"index": 0}, "episode 0 has a record already"),
    "status": ({"status": "won"}, "expected status to be 'completed', 'failed' or 'lost', got"),
    "return": ({"return": "9"}, "expected return to be a float, got '9'"),
    "no return": ({"return": None}, "expected return to be a float, got None"),
    "length": ({"length": 0}, "expected length to be a positive int, got 0"),
    "flag": ({"terminated": 1}, "expected terminated to be true or false, got 1"),
    "success": ({"success": "yes"}, "expected success to be true, false or null, got 'yes'"),
    "digest": ({"digest": "ab"}, "expected digest to be a SHA-256 in hexadecimal, got 'ab'"),
    "restarts": ({"restarts": -1}, "expected restarts to be an int, and not negative, got -1"),
    "more": ({"note": 1}, "expected the record of an episode, with the keys index, env_seed"),
    "failed": ({"status": "failed"}, "expected return to be null in an episode that did not"),
    "list": ({"index": [1]}, r"expected index to be an int, and not negative, got \[1\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_that_is_wrong_is_named(run: Path, name: str) -> None:
    wrong_line(run, name, load)


@pytest.mark.parametrize("name", ["policy seed", "duplicate", "return"])
def test_a_rerun_refuses_a_wrong_line_until_it_is_removed(run: Path, name: str) -> None:
    kept = wrong_line(run, name, again)
    (run / "episodes.jsonl").write_text("".join(kept[:1] + kept[2:]))  # as the message says
    assert again(run).missing == []


def wrong_line(run: Path, name: str, reader: Callable[[Path], Any]) -> list[str]:
    """Check that a reader refuses an altered second line; return the lines of the ledger."""
    changed, reason = WRONG[name]
    unfinished(run, EPISODES)
    alter(run / "episodes.jsonl", 1, **changed)
    with pytest.raises(ValueError, match=rf"line 2 of .*episodes\.jsonl: {reason}") as error:
        reader(run)
    assert "; remove the line, and the same command runs the episode again" in str(error.value)
    return (run / "episodes.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize("line", ["[]", "3", "", "nonsense", "[" * 100_000, '{"index": 1'])
def test_a_line_that_is_no_record_is_named(run: Path, line: str) -> None:
    unfinished(run, 1)
    with (run / "episodes.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .* expected the record of an episode, ") as e:
        load(run)
    assert len(str(e.value)) < 1000


def test_seeds_that_were_given_are_those_of_the_manifest(tmp_path: Path) -> None:
    out = tmp_path / "run"
    tdcollect.evaluate(Walk, None, [3, 5], env_seeds=range(10, 16), output_dir=out, progress=False)
    assert [episode.env_seed for episode in load(out).episodes] == [13, 15]
    unfinished(out, 2)
    alter(out / "episodes.jsonl", 1, env_seed=14)
    with pytest.raises(ValueError, match=r"line 2 of .*expected the seeds 15 and"):
        load(out)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"format": 2, "prot', r"expected .*manifest\.json to hold a JSON object, got something"),
        ("[]", "to hold a JSON object, got list"),
        ("{}", "expected the manifest of an evaluation, got"),
        ('{"name": "an app", "manifest_version": 3}', "which is something else's"),
        ('{"protocol": 3, "episodes": 1, "format": 3}', "expected format 2, got 3"),
        ('{"protocol": 1, "episodes": 1}', "expected format 2, got None"),
        ('{"protocol": 2, "episodes": 1, "format": 2}', "as tdcollect writes it, got env None"),
    ],
)
@pytest.mark.parametrize("reader", [load, again], ids=["load", "rerun"])
def test_a_manifest_that_is_none_is_told(run: Path, reader, text: str, reason: str) -> None:
    (run / "manifest.json").write_text(text)
    before = contents(run)
    with pytest.raises(ValueError, match=reason):
        reader(run)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"episodes": -1}, "got episodes -1"),
        ({"episodes": [1, 1]}, r"got episodes \[1, 1\]"),
        ({"episodes": 10**12}, "got episodes 1000000000000"),
        ({"seeds": {"root": "0"}}, "got seeds.root '0'"),
        ({"seeds": {"root": 0, "env": [1]}}, "for each of 4 episodes, got 1 seeds"),
        ({"seeds": {"root": 0, "env": [1, 2, 2, 3]}}, "got 4 seeds, 3 of them distinct"),
        ({"policy": []}, r"got policy \[\]"),
        (
            {"policy": {"class": "x", "digest": None, "exploration": "any"}},
            r"got policy.exploration 'any'",
        ),
        ({"inference_threads": 0}, "got inference_threads 0"),
        ({"inference_threads": None}, "got inference_threads None"),
        ({"entries": {"observation": [1], "action": []}}, r"got entries.observation \[1\]"),
    ],
)
def test_an_entry_of_the_manifest_that_is_wrong_is_named(run: Path, changed, reason: str) -> None:
    rewrite(run / "manifest.json", **changed)
    with pytest.raises(ValueError, match=reason):
        load(run)


def load_records(run: Path) -> list[Episode]:
    lines = (run / "episodes.jsonl").read_text().splitlines()
    return [Episode.from_json(line) for line in lines]


# Data that were kept


def test_data_that_were_altered_are_refused(run: Path) -> None:
    file = run / "trajectories" / "000001" / "action.memmap"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    result = load(run)
    with pytest.raises(ValueError, match=r"data kept of episode 1 are not those of its record"):
        result.trajectory(1)
    assert len(result.trajectory(2)) == result.episodes[2].length


@pytest.mark.parametrize(
    "name",
    [
        *("observation", "next/observation", "action", "next/reward", "next/terminated"),
        *("done", "terminated", "truncated", "next/done", "next/truncated", "collector/traj_ids"),
    ],
)
def test_each_bit_of_an_episode_is_checked(run: Path, name: str) -> None:
    file = run / "trajectories" / "000000" / f"{name}.memmap"
    whole = bytearray(file.read_bytes())
    whole[np.random.default_rng(0).integers(len(whole))] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="data kept of episode 0 are not those of its record"):
        load(run).trajectory(0)


def test_data_that_are_missing_are_told(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "trajectories" / "000002")
    with pytest.warns(UserWarning, match="1 folders of data .* are missing, 000002 first"):
        result = load(run)
    with pytest.raises(ValueError, match=r"trajectories/000002 does not hold the data"):
        result.trajectory(2)
    again(run)  # which finds the evaluation done, and what is missing is still missing
    assert not tdcollect.verify(run).passed


def test_a_run_that_finds_the_evaluation_done_takes_no_altered_data_for_its_own(run: Path) -> None:
    file = run / "trajectories" / "000001" / "next" / "done.memmap"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    again(run, keep_trajectories=True)
    assert [str(problem.file)[-6:] for problem in tdcollect.verify(run).problems] == ["000001"]


def test_data_that_were_altered_before_their_digest_are_refused(run: Path, written: Path) -> None:
    unfinished(run, 2)
    file = run / "trajectories" / "000001" / "action.memmap"
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match="data kept of episode 1 are not those of its record"):
        again(run, keep_trajectories=True)
    file.write_bytes(data)
    assert (run / "trajectories" / "000002").exists()  # and its line was never written
    again(run, keep_trajectories=True)
    names = contents(written).keys() - {"run.json"}
    assert {name: contents(run)[name] for name in names} == {
        name: contents(written)[name] for name in names
    }


def test_a_run_that_keeps_no_data_leaves_none_of_an_episode_without_a_line(run: Path) -> None:
    unfinished(run, 2)
    again(run)
    assert sorted(path.name for path in (run / "trajectories").iterdir()) == ["000000", "000001"]
    assert tdcollect.verify(run).passed


def test_data_without_digests_are_refused_and_not_certified(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    del results["trajectories"]
    text = json.dumps(results, indent=1, sort_keys=True) + "\n"
    (run / "results.json").write_text(text)
    again(run)  # which finds them done, and gives them none
    assert (run / "results.json").read_text() == text
    with pytest.raises(ValueError, match=r"the digest of their files is .* or shard\.json none"):
        load(run).trajectory(1)
    assert len(tdcollect.verify(run).problems) == 4


def test_an_evaluation_that_keeps_no_data_lists_none(tmp_path: Path) -> None:
    again(tmp_path / "run")
    assert "trajectories" not in json.loads((tmp_path / "run" / "results.json").read_text())


def test_a_relative_directory_holds_wherever_the_process_goes(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def restless(**kwargs: Any) -> Walk:
        os.chdir(tmp_path / "elsewhere")
        return Walk(**kwargs)

    result = tdcollect.evaluate(
        restless, None, 2, output_dir="run", keep_trajectories=True, progress=False
    )
    os.chdir(tmp_path)
    loaded = load(Path("run"))
    os.chdir(tmp_path / "elsewhere")
    assert len(result.trajectory(0)) == len(loaded.trajectory(0)) == result.episodes[0].length
    assert [path.name for path in tmp_path.iterdir() if any(path.iterdir())] == ["run"]


def test_a_digest_is_what_the_docs_say(run: Path) -> None:
    result = load(run)
    entries = result.manifest["entries"]
    shown, acted = entries["observation"], entries["action"]
    names = [*shown, *acted, "next/reward", "next/terminated", "next/truncated"]
    for record in result.episodes:
        data = result.trajectory(record.index)
        parts = []
        for name in names:
            rows = data[tuple(name.split("/"))].numpy()
            part = f"{name} {rows.dtype.str} {rows.shape[1:]}\n".encode() + rows.tobytes()
            if name in shown:
                part += data["next", name][-1].numpy().tobytes()
            parts.append(hashlib.sha256(part).digest())
        assert hashlib.sha256(b"".join(parts)).hexdigest() == record.digest
    ledger = (run / "episodes.jsonl").read_bytes()
    assert hashlib.sha256(ledger).hexdigest() == result.digest


def test_data_that_were_not_kept_cannot_be_kept_afterwards(run: Path) -> None:
    again(run, keep_trajectories=True)
    shutil.rmtree(run / "trajectories" / "000002")
    with pytest.raises(ValueError, match=r"got 1 without \(episode 2 first\): data are kept as"):
        again(run, keep_trajectories=True)
    again(run)


# verify


def test_verify_finds_nothing_wrong(run: Path, capsys) -> None:
    found = tdcollect.verify(run)
    assert found.passed
    assert (found.episodes, found.kept) == (EPISODES, EPISODES)
    assert main(["verify", str(run)]) == 0
    assert f"{run}: 4 records and the data of 4 checked: passed" in capsys.readouterr().out
    assert len(repr(found)) < 200


def higher(run: Path) -> Any:
    return json.loads((run / "results.json").read_text())["returns"] | {"mean": 999.0}


def without(run: Path, entry: str, name: str) -> dict[str, str]:
    listed = json.loads((run / "results.json").read_text())[entry]
    return {key: value for key, value in listed.items() if key != name}


def shrink(run: Path) -> None:
    file = run / "trajectories" / "000003" / "action.memmap"
    file.write_bytes(file.read_bytes()[:8])


def widen(run: Path) -> None:
    folder = run / "trajectories" / "000003" / "next"
    file = folder / "terminated.memmap"
    length = len(file.read_bytes())
    file.write_bytes(bytes(2 * length))
    told = json.loads((folder / "meta.json").read_text())["terminated"]
    rewrite(folder / "meta.json", terminated=told | {"shape": [length, 2]})


ALTERED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "return": (
        lambda run: alter(run / "episodes.jsonl", 2, **{"return": 999.0}),
        r"episodes\.jsonl: its digest is",
    ),
    "seed": (
        lambda run: alter(run / "episodes.jsonl", 2, env_seed=1),
        r"line 3 of .*episodes\.jsonl: expected the seeds",
    ),
    "statistics": (
        lambda run: rewrite(run / "results.json", completed=3),
        r"results\.json: completed is 3, and by the ledger 4",
    ),
    "a number deep in the statistics": (
        lambda run: rewrite(run / "results.json", returns=higher(run)),
        r"results\.json: returns is .*'mean': 999",
    ),
    "report": (
        lambda run: (run / "report.html").write_text("<b>Mean return 999</b>"),
        r"report\.html: it is missing, or is not the file that was written with the others",
    ),
    "an entry of files that was removed": (
        lambda run: rewrite(run / "results.json", files=without(run, "files", "report.html")),
        r"results\.json: it lists no digest of report\.html",
    ),
    "a figure that was removed from files": (
        lambda run: rewrite(
            run / "results.json", files=without(run, "files", "figures/returns.svg")
        ),
        r"results\.json: it lists no digest of figures/returns\.svg",
    ),
    "a name with a NUL": (
        lambda run: rewrite(run / "results.json", files={"a\0b": "ab"}),
        r"names the file .*a.*b', which is not in the directory",
    ),
    "a name that is too long": (
        lambda run: rewrite(run / "results.json", files={"a" * 5000: "ab"}),
        r"which is not in the directory",
    ),
    "a mark of a shard": (
        lambda run: (run / "shard.json").write_text('{"shard": [0, 2]}'),
        r"shard\.json: it marks a shard, and results\.json the whole evaluation: one was added",
    ),
    "no folder of data": (
        lambda run: shutil.rmtree(run / "trajectories" / "000002"),
        r"trajectories/000002: .*No such file",
    ),
    "no data at all": (
        lambda run: shutil.rmtree(run / "trajectories"),
        r"trajectories/000000: .*No such file",
    ),
    "an entry of the data that was removed": (
        lambda run: rewrite(
            run / "results.json", trajectories=without(run, "trajectories", "000001")
        ),
        r"trajectories/000001: .* in results\.json or shard\.json none",
    ),
    "digests of data that are none": (
        lambda run: rewrite(run / "results.json", trajectories={"../x": "ab"}),
        r"trajectories: expected .*results\.json to have a digest for each folder",
    ),
    "files": (
        lambda run: rewrite(run / "results.json", files={"../run.json": "ab"}),
        r"names the file '\.\./run\.json', which is not in the directory",
    ),
    "figure": (
        lambda run: (run / "figures" / "returns.svg").unlink(),
        r"returns\.svg: it is missing",
    ),
    "results": (
        lambda run: (run / "results.json").write_text("[]"),
        r"results\.json: expected .* to hold a JSON object, got list",
    ),
    "no digests of files": (
        lambda run: rewrite(run / "results.json", files=[]),
        r"results\.json: files is \[\]",
    ),
    "resamples": (
        lambda run: rewrite(run / "results.json", resamples=10**12),
        r"cannot be computed again \(resamples is 1000000000000",
    ),
    "no results": (
        lambda run: (run / "results.json").unlink(),
        r"results\.json: the evaluation is unfinished: without this file",
    ),
    "refusal": (
        lambda run: (run / "refused.json").write_text("["),
        r"refused\.json: expected .* to hold a JSON object",
    ),
    "pipe": (
        lambda run: ((run / "episodes.jsonl").unlink(), os.mkfifo(run / "episodes.jsonl")),
        r"episodes\.jsonl: it is not a file",
    ),
    "manifest": (
        lambda run: (run / "manifest.json").write_text("{"),
        r"manifest\.json: expected .* to hold a JSON object",
    ),
    "data": (shrink, r"trajectories/000003: "),
    "data without steps": (
        lambda run: rewrite(run / "trajectories" / "000003" / "meta.json", shape=[]),
        r"trajectories/000003: .*its shape is \[\], and not \[L\]",
    ),
    "a flag that is none": (widen, r"trajectories/000003: .*Boolean value of Tensor"),
    "data of another": (
        lambda run: (run / "trajectories" / "000003").rename(run / "trajectories" / "000007"),
        r"000007: the ledger has no completed episode of this index",
    ),
    "unfinished": (
        lambda run: unfinished(run, 3),
        r"episodes\.jsonl: the evaluation is unfinished: it lacks 1 episode",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_verify_names_what_is_wrong(run: Path, capsys, name: str) -> None:
    change, reason = ALTERED[name]
    change(run)
    found = tdcollect.verify(run)
    assert not found.passed
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr().out
    assert re.search(reason, printed), printed
    assert main(["verify", str(run), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert len(told["problems"]) == len(found.problems)


def test_verify_passes_over_what_a_file_manager_left(run: Path) -> None:
    for folder in (run, run / "trajectories", run / "trajectories" / "000000"):
        (folder / ".DS_Store").touch()
    assert tdcollect.verify(run).passed


@pytest.mark.parametrize("text", ["nonsense", "{}"])
def test_times_that_are_none_are_told_with_their_file(tmp_path: Path, text: str) -> None:
    again(tmp_path)
    unfinished(tmp_path, 3)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json to hold a JSON list, .* remove the file"):
        again(tmp_path)
    assert tdcollect.verify(tmp_path).passed


def test_verify_lists_every_line(run: Path) -> None:
    for line in (0, 2):
        alter(run / "episodes.jsonl", line, status="won")
    assert [problem.line for problem in tdcollect.verify(run).problems if problem.line] == [1, 3]


def test_a_ledger_and_its_digest_altered_together_are_found_by_the_data(run: Path) -> None:
    alter(run / "episodes.jsonl", 1, **{"return": 999.0})
    digest = ledger_digest(load_records(run))
    rewrite(run / "results.json", ledger=digest)
    (problem,) = [p for p in tdcollect.verify(run).problems if "trajectories" in str(p.file)]
    assert "return" in problem.text


def test_verify_of_no_evaluation_is_told(run: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(FileNotFoundError, match="expected the directory of an evaluation, got"):
        tdcollect.verify(tmp_path / "none")
    assert main(["verify", str(tmp_path / "none"), str(run)]) == 1
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'none'}: expected the directory of an evaluation, got none" in printed
    assert f"{run}: 4 records and the data of 4 checked: passed" in printed


# replay


@pytest.mark.parametrize(
    "changed", [{"return": 999.0}, {"length": 7}, {"success": None}, {"truncated": True}]
)
def test_replay_compares_all_that_the_record_says(run: Path, changed: dict[str, Any]) -> None:
    unfinished(run, EPISODES)  # no digest tells on it
    (name,) = changed
    was = json.loads((run / "episodes.jsonl").read_text().splitlines()[1])[name]
    changed = {name: not was} if isinstance(was, bool) and name != "success" else changed
    alter(run / "episodes.jsonl", 1, **changed)
    result = tdcollect.EvaluationResult.load(run, Walk, deterministic())
    with pytest.raises(
        RuntimeError, match=rf"episode 1 is not .*: {name} is .*, in the ledger"
    ) as e:
        result.replay(1)
    assert "Its data are the same to the bit: the ledger was altered" in str(e.value)
    assert result.replay(2) is not None


# Directories of others


def test_a_directory_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text('{"a": 1}\n{"no": "newline"}')
    deep = tmp_path / "work" / "deep"
    deep.mkdir(parents=True)
    (deep / ".download.part").write_text("precious")
    (tmp_path / ".episodes.jsonl.1.part").write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(
        ValueError, match="expected output_dir to be empty, or the directory of an eval"
    ):
        again(tmp_path)
    assert contents(tmp_path) == before


def test_only_names_of_ours_are_swept(run: Path) -> None:
    unfinished(run, 2)
    others = [run / "work" / ".notes.part", run / ".notes.part", run / "trajectories" / "mine.part"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    half = run / "trajectories" / "000003.part"
    half.mkdir()
    again(run)
    assert all(path.read_text() == "precious" for path in others)
    assert not half.exists()


def test_a_directory_whose_first_file_is_half_written_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.99999999.part").write_text("{")
    again(tmp_path)
    assert load(tmp_path).missing == []
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_process_left_is_no_problem(run: Path) -> None:
    before = contents(run)
    for name in (".lock", ".results.json.node7-12-0123abcd.part"):
        (run / name).touch()
    assert tdcollect.verify(run).passed
    again(run)
    assert contents(run) == before


# Evaluations that were refused


class Noisy(Walk):
    """Adds noise that no seed reaches."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        noise = np.random.default_rng().random(observation.shape, np.float32)
        return observation + noise, reward, terminated, truncated, info


def test_a_refused_evaluation_leaves_no_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(tdcollect.NotReproducibleError):
        tdcollect.evaluate(Noisy, None, 4, output_dir=out, progress=False)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(tdcollect.NotReproducibleError):
        tdcollect.evaluate(Noisy, None, 4, output_dir=out, progress=False)
    assert not list(out.iterdir())


def test_an_evaluation_that_is_refused_late_says_so(tmp_path: Path) -> None:
    class Drawing(Walk):
        lives = 0

        def reset(self, **kwargs: Any) -> Any:
            Drawing.lives += 1
            if Drawing.lives > 300:
                torch.rand(1)
            return super().reset(**kwargs)

    out = tmp_path / "run"
    with pytest.raises(tdcollect.NotReproducibleError):
        tdcollect.evaluate(Drawing, None, 2000, num_envs=2, output_dir=out, progress=False)
    assert (out / "episodes.jsonl").read_bytes()
    for reader in (load, lambda path: tdcollect.evaluate(Drawing, None, 2000, output_dir=path)):
        with pytest.raises(ValueError, match=r"refused\.json: the evaluation was refused: .* drew"):
            reader(out)
    assert "the evaluation was refused" in str(tdcollect.verify(out))


def test_a_disk_that_is_full_at_the_first_data_keeps_nobody_out(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def full(path: Path, data: Any) -> None:
        path.mkdir(parents=True)
        (path / "action.memmap").write_bytes(b"")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_trajectory", full)
        with pytest.raises(OSError, match="No space left"):
            again(out, keep_trajectories=True)
    assert not out.exists()
    with pytest.MonkeyPatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        told = r"No space left on device; free some space: the same command goes on: '.*\.part'"
        with pytest.raises(OSError, match=told):
            again(out, keep_trajectories=True)
    again(out, keep_trajectories=True)
    assert tdcollect.verify(out).passed


def test_a_disk_that_is_full_at_a_line_names_the_ledger(tmp_path: Path) -> None:
    out = tmp_path / "run"

    class Full:
        def __init__(self, file: Any):
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make = files.Directory.__init__

    def made(self: Any, *given: Any) -> None:
        make(self, *given)
        self._journal = Full(self._journal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Directory, "__init__", made)
        with pytest.raises(OSError, match="the same command goes on") as error:
            again(out)
        assert error.value.filename == str(out / "episodes.jsonl")
    assert again(out).missing == []


def test_a_torn_first_line_is_no_episode(tmp_path: Path) -> None:
    out = tmp_path / "run"
    again(out)
    for name in ("results.json", "run.json"):
        (out / name).unlink()
    (out / "episodes.jsonl").write_text('{"index": 0')

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Directory, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            again(out)
    assert not (out / "manifest.json").exists()


def test_an_evaluation_that_raises_at_once_leaves_no_directory(tmp_path: Path) -> None:
    def policy(td: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tdcollect.evaluate(Walk, policy, 4, output_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_ledger_is_written_in_pieces(tmp_path: Path) -> None:
    """Lines in the order of ending become the ledger by index."""
    out = tmp_path / "run"
    directory = files.Directory(out, manifest(episodes=3))
    records = [Episode(index, *seeds(index), status="failed") for index in (2, 0, 1)]
    for record in records:
        directory.add(record)
    directory.finish(records)
    directory.close()
    assert [episode.index for episode in load_records(out)] == [0, 1, 2]


def seeds(index: int) -> tuple[int, int]:
    return tdcollect.env_seed(0, index), tdcollect.policy_seed(0, index)
