"""Altered, torn or foreign files of an evaluation are detected, and not changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tdcollect
from tdcollect import files as write_files
from tdcollect.cli import main
from tdcollect.evaluation import directory as files
from tdcollect.evaluation.step_files import read_arrays

from .envs import Strict, Walk
from .ledgers import GONE, alter, change_data, contents, flip_in, manifest, pipe, unfinished
from .policies import deterministic

pytestmark = pytest.mark.usefixtures("small_reports")

EPISODES = 4
FREE = "free some space: the same command goes on"
LEDGER, RESULTS, DATA = "episodes.jsonl", "results.json", "trajectories"


@pytest.fixture(scope="module")
def written(tmp_path_factory, small_reports) -> Path:
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


def load(out: Path) -> Any:
    return tdcollect.EvaluationResult.load(out)


# Records that were altered


def test_compare_refuses_what_was_altered_or_is_unfinished_and_twins(run, written, capsys) -> None:
    def told(status: int, *of: Any) -> str:
        assert main(["compare", str(written), *map(str, of)]) == status
        return capsys.readouterr().err

    assert "expected directories that differ, got one of them twice" in told(2, f"{written}/")
    alter(run / LEDGER, {"return": 999.0})
    assert "was altered" in told(1, run)
    unfinished(run, EPISODES)
    assert f"{run} is unfinished: it lacks its results; run" in told(1, run)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "env seed": ({"env_seed": 7}, r"expected the seeds \d+ and \d+ of episode 1, .* got 7 and"),
    "policy seed": ({"policy_seed": 7}, r"expected the seeds .* of episode 1, as the manifest"),
    "foreign index": ({"index": 9}, "the manifest asks for no episode 9"),
    "status": ({"status": "won"}, "expected status to be 'completed', 'failed' or 'lost', got"),
    "return": ({"return": "9"}, "expected return to be a float, got '9'"),
    "length": ({"length": 0}, r"expected length to be a positive int below 2\*\*63, got 0"),
    "long": ({"length": 10**400}, r"expected length to be a positive int below 2\*\*63, got 1000"),
    "flag": ({"terminated": 1}, "expected terminated to be true or false, got 1"),
    "success": ({"success": "yes"}, "expected success to be true, false or null, got 'yes'"),
    "digest": ({"digest": "ab"}, "expected digest to be a SHA-256 in hexadecimal, got 'ab'"),
    "restarts": ({"restarts": -1}, r"expected restarts to be an int from 0 to below 2\*\*63, got"),
    "more": ({"note": 1}, "expected the record of an episode, with the keys index, env_seed"),
    "failed": ({"status": "failed"}, "expected return to be null in an episode that did not"),
}


@pytest.mark.parametrize(("changed", "reason"), WRONG.values(), ids=WRONG)
def test_a_line_that_is_wrong_is_named(run: Path, changed: Any, reason: str) -> None:
    unfinished(run, EPISODES)
    alter(run / LEDGER, changed)
    with pytest.raises(ValueError, match=rf"line 2 of .*episodes\.jsonl: {reason}") as error:
        load(run)
    assert "; remove the line, and the same command runs the episode again" in str(error.value)


def test_a_line_that_is_no_record_is_named_until_it_is_removed(run: Path, written: Path) -> None:
    unfinished(run, 1)
    kept = (run / LEDGER).read_text()
    for line in ("[]", "3", "", "nonsense", "[" * 100_000, '{"index": 1', kept.rstrip()):
        (run / LEDGER).write_text(f"{kept}{line}\n")
        told = r"line 2 of .* (expected the record of an episode, |episode 0 has a record already)"
        for reader in (load, again):
            with pytest.raises(ValueError, match=told) as error:
                reader(run)
            assert len(str(error.value)) < 1000
    (run / LEDGER).write_text(kept)
    again(run, keep_trajectories=True)
    assert contents(run) == contents(written)


WRITES = "as tdcollect writes it, got "
MANIFESTS: list[tuple[Any, str]] = [
    ('{"format": 2, "prot', r"expected .*manifest\.json to hold a JSON object, got something"),
    ("[]", "to hold a JSON object, got list"),
    ("{}", "expected the manifest of an evaluation, got"),
    ('{"name": "an app", "manifest_version": 3}', "which is something else's"),
    ('{"protocol": 3, "episodes": 1, "format": 4}', "expected format 3, got 4"),
    ('{"protocol": 2, "episodes": 1, "format": 2}', "expected format 3, got 2 in .* read it with"),
    ('{"protocol": 2, "episodes": 1, "format": 3}', f"{WRITES}env.id None"),
    ({"episodes": -1}, f"{WRITES}episodes -1"),
    ({"episodes": [1, 1]}, rf"{WRITES}episodes \[1, 1\]"),
    ({"episodes": 10**12}, f"{WRITES}episodes 1000000000000"),
    ({"seeds": {"root": "0"}}, f"{WRITES}seeds.root '0'"),
    ({"seeds": {"root": 0, "env": [1]}}, "a seed of its own for each of 4 episodes, got 1 seeds"),
    ({"seeds": {"root": 0, "env": [1, 2, 2, 3]}}, "got 4 seeds, 3 of them distinct"),
    ({"policy": []}, f"{WRITES}policy.class None"),
    ({("policy", "exploration"): "any"}, f"{WRITES}policy.exploration 'any'"),
    ({"inference_threads": 0}, f"{WRITES}inference_threads 0"),
    ({("entries", "observation"): [1]}, rf"{WRITES}entries.observation \[1\]"),
]


def test_a_manifest_that_is_wrong_is_told(run: Path) -> None:
    kept = (run / "manifest.json").read_text()
    altered = ({"device": "cuda"}, r"manifest\.json: its digest is .* was altered")
    for how, reason in [*MANIFESTS, altered]:
        alter(run / "manifest.json", how)
        before = contents(run)
        for reader in (load, again):
            with pytest.raises(ValueError, match=reason):
                reader(run)
        assert contents(run) == before
        (run / "manifest.json").write_text(kept)


# Data that were kept


def test_each_bit_of_an_episode_is_checked(run: Path) -> None:
    result = load(run)
    file = run / DATA / "000000.npz"
    kept, names = file.read_bytes(), [*read_arrays(file)]
    assert len(names) == 11
    for name in names:
        flip_in(file, name)
        with pytest.raises(ValueError, match="data kept of episode 0 are not those of its record"):
            result.trajectory(0)
        assert len(result.trajectory(2)) == result.episodes[2].length
        file.write_bytes(kept)
    assert len(result.trajectory(0)) == result.episodes[0].length


def test_a_run_that_finds_the_evaluation_done_takes_no_altered_data_for_its_own(run: Path) -> None:
    flip_in(run / DATA / "000001.npz", "next/done")
    alter(run / RESULTS, {(DATA, "000003.npz"): GONE})
    again(run, keep_trajectories=True)
    alter(run / DATA / "000002.npz", None)
    with pytest.raises(ValueError, match=r"got 1 without \(episode 2 first\): data are kept as"):
        again(run, keep_trajectories=True)
    again(run)
    with pytest.warns(UserWarning, match=r"1 files of data .* are missing, 000002\.npz first"):
        result = load(run)
    for index, told in [
        (2, "does not hold the data"),
        (3, r"the digest of their file is .* none"),
    ]:
        with pytest.raises(ValueError, match=told):
            result.trajectory(index)
    told = [problem.file.name for problem in tdcollect.verify(run).problems]
    assert told == ["000001.npz", "000002.npz", "000003.npz"]


def test_data_that_were_altered_before_their_digest_are_refused(run: Path, written: Path) -> None:
    unfinished(run, 2)
    file = run / DATA / "000001.npz"
    data = file.read_bytes()
    flip_in(file, "action")
    with pytest.raises(ValueError, match="data kept of episode 1 are not those of its record"):
        again(run, keep_trajectories=True)
    file.write_bytes(data)
    assert (run / DATA / "000002.npz").exists()  # and its line was never written
    again(run, keep_trajectories=True)
    assert contents(run) == contents(written)


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


def test_what_a_killed_process_left_becomes_the_same_files(run: Path, written: Path) -> None:
    """A torn last line, or episodes that ended in another order."""
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    whole = "".join(lines)
    for left in (whole[:-1], whole[:-30], "".join(lines[:1:-1])):
        (run / RESULTS).unlink()
        (run / LEDGER).write_text(left)
        again(run, keep_trajectories=True)
        assert contents(run) == contents(written)
    ran = [entry["episodes"] for entry in json.loads((run / "run.json").read_text())]
    assert ran == [4, 1, 1, 2]


# verify


def test_data_that_numpy_wrote_are_as_good(run: Path) -> None:
    """As another program would, by docs/protocol.md."""
    file, result = run / DATA / "000000.npz", load(run)
    arrays, before = read_arrays(file), result.trajectory(0).clone()
    np.savez(file, **arrays)
    alter(run / RESULTS, {(DATA, file.name): hashlib.sha256(file.read_bytes()).hexdigest()})
    assert tdcollect.verify(run).passed
    assert (load(run).trajectory(0) == before).all()


def test_verify_finds_nothing_wrong(run: Path, tmp_path: Path, capsys) -> None:
    found = tdcollect.verify(run)
    assert found.passed
    assert (found.episodes, found.kept) == (EPISODES, EPISODES)
    assert len(repr(found)) < 200
    assert main(["verify", str(run)]) == 0
    passed = f"{run}: 4 records and the data of 4 checked: passed"
    assert passed in capsys.readouterr().out
    none, told = tmp_path / "none", "expected the directory of an evaluation, got"
    with pytest.raises(FileNotFoundError, match=told):
        tdcollect.verify(none)
    assert main(["verify", str(none), str(run)]) == 1
    printed = capsys.readouterr().out
    assert f"{none}: {told} none" in printed
    assert passed in printed


def changed(how: Any) -> Any:
    return lambda file: change_data(
        file, lambda found: found.update({name: how(name, rows) for name, rows in found.items()})
    )


def widened(name: str, rows: Any) -> Any:
    return np.repeat(rows, 2, 1) if name == "next/terminated" else rows


FILE = f"{DATA}/000003.npz"
NONE = "the evaluation is unfinished: "
ALTERED: dict[str, tuple[str, Any, str]] = {
    "seed": (LEDGER, {"env_seed": 1}, r"line 2 of .*episodes\.jsonl: expected the seeds"),
    "a number deep in them": (RESULTS, {("returns", "mean"): 999.0}, "returns is .*'mean': 999"),
    "resamples": (RESULTS, {"resamples": 10**12}, r"be computed again \(resamples is 10000000"),
    "mark": ("shard.json", '{"shard": [0, 2]}', "it marks a shard, and .*: one was added"),
    "no data at all": (DATA, None, r"trajectories/000000\.npz: .*No such file"),
    "listed data": (RESULTS, {(DATA, "000001.npz"): GONE}, r"in results\.json or shard\.json none"),
    "no digests of data": (RESULTS, {DATA: {"../x": "ab"}}, "to have a digest for each file"),
    "results": (RESULTS, "[]", r"results\.json: expected .* to hold a JSON object, got list"),
    "no results": (RESULTS, None, rf"results\.json: {NONE}without this file"),
    "refusal": ("refused.json", "[", r"refused\.json: expected .* to hold a JSON object"),
    "pipe": (LEDGER, pipe, r"episodes\.jsonl: it is not a file"),
    "manifest": ("manifest.json", "{", r"manifest\.json: expected .* to hold a JSON object"),
    "data without steps": (FILE, changed(lambda name, rows: rows[:0]), ".* the data lack steps"),
    "a flag that is none": (FILE, changed(widened), r"000003\.npz: .*truth value of an array"),
    "data of another": (
        FILE,
        lambda file: file.rename(file.with_name("000007.npz")),
        r"000007\.npz: the ledger has no completed episode of this index",
    ),
    "unfinished": (".", lambda run: unfinished(run, 3), rf"jsonl: {NONE}it lacks 1 episode"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_verify_names_what_is_wrong(run: Path, capsys, name: str) -> None:
    of, how, reason = ALTERED[name]
    alter(run / of, how)
    found = tdcollect.verify(run)
    assert not found.passed
    assert re.search(reason, str(found)), str(found)


def test_what_others_left_is_no_problem_but_for_times_that_are_none(run: Path) -> None:
    """File managers, and processes that were killed."""
    for folder in (run, run / DATA):
        (folder / ".DS_Store").touch()
    before = contents(run)
    for name in (".lock", ".results.json.node7-12-0123abcd.part"):
        (run / name).touch()
    assert tdcollect.verify(run).passed
    again(run)
    assert contents(run) == before
    unfinished(run, 3)
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"run\.json to hold a JSON list, .* remove the file"):
        again(run)
    (run / "run.json").unlink()
    again(run)
    assert tdcollect.verify(run).passed


def test_a_ledger_and_its_digest_altered_together_are_found_by_the_data(run, capsys) -> None:
    alter(run / LEDGER, {"return": 999.0})
    alter(run / RESULTS, {"ledger": hashlib.sha256((run / LEDGER).read_bytes()).hexdigest()})
    (problem,) = [p for p in tdcollect.verify(run).problems if DATA in str(p.file)]
    assert "return" in problem.text
    for line in (0, 2):
        alter(run / LEDGER, {"status": "won"}, line)
    assert main(["verify", str(run), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert [problem["line"] for problem in told["problems"] if problem["line"]] == [1, 3]
    assert main(["verify", str(run)]) == 1
    assert "line 3 of" in capsys.readouterr().out


# replay


def test_replay_compares_all_that_the_record_says(run: Path) -> None:
    unfinished(run, EPISODES)  # no digest tells on it
    record = load(run).record(1)
    alter(
        run / LEDGER,
        {"return": 9.0, "length": 7, "success": None, "truncated": not record.truncated},
    )
    result = tdcollect.EvaluationResult.load(run, Walk, deterministic())
    with pytest.raises(RuntimeError, match="episode 1 is not what the ledger says: ") as error:
        result.replay(1)
    told = str(error.value)
    for name, value in [("return", "9.0"), ("length", "7"), ("success", "None"), ("truncated", "")]:
        assert re.search(f"{name} is [^;]*, in the ledger {value}", told)
    assert "Its data are the same to the bit: the ledger was altered" in told
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
    ours = tmp_path / "ours"  # where the first file was half-written
    ours.mkdir()
    (ours / ".manifest.json.99999999.part").write_text("{")
    assert again(ours).missing == []
    assert not list(ours.glob(".*"))


def test_only_names_of_ours_are_swept(run: Path) -> None:
    unfinished(run, 2)
    others = [run / "work" / ".notes.part", run / ".notes.part", run / DATA / "mine.part"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    (run / DATA / "000003.npz.part").touch()
    again(run)  # which keeps no data, and leaves none of an episode without a line
    assert all(path.read_text() == "precious" for path in others)
    assert {path.name for path in (run / DATA).iterdir()} == {
        *("000000.npz", "000001.npz", "mine.part")
    }
    assert tdcollect.verify(run).passed


# Evaluations that were refused


def test_an_evaluation_that_is_refused_or_raises_at_once_leaves_no_directory(tmp_path) -> None:
    def policy(td: Any) -> Any:
        raise ZeroDivisionError

    out = tmp_path / "run"
    for there in (False, True):
        if there:
            out.mkdir()
        for env, acts, error in [
            (lambda: Strict(noise=True), None, tdcollect.NotReproducibleError),
            (Walk, policy, ZeroDivisionError),
        ]:
            with pytest.raises(error):
                tdcollect.evaluate(env, acts, 4, output_dir=out, progress=False)
            assert [*tmp_path.rglob("*")] == [out] * there


def test_a_directory_that_was_not_begun_goes_only_if_it_was_made_here(tmp_path: Path) -> None:
    for there in (False, True):
        (tmp_path / "run").mkdir() if there else None
        with closing(files.Directory(tmp_path / "run", manifest())) as directory:
            directory.give_up(ValueError())
        assert (tmp_path / "run").exists() == there


def test_an_evaluation_that_is_refused_late_says_so(tmp_path: Path) -> None:
    class Drawing(Walk):
        lives = 0

        def reset(self, **kwargs: Any) -> Any:
            Drawing.lives += 1
            if Drawing.lives > 300:  # the trial has ended well long before
                torch.rand(1)
            return super().reset(**kwargs)

    out = tmp_path / "run"
    with pytest.raises(tdcollect.NotReproducibleError):
        tdcollect.evaluate(Drawing, None, 400, num_envs=2, output_dir=out, progress=False)
    assert (out / "episodes.jsonl").read_bytes()
    for reader in (load, lambda path: tdcollect.evaluate(Drawing, None, 400, output_dir=path)):
        with pytest.raises(ValueError, match=r"refused\.json: the evaluation was refused: .* drew"):
            reader(out)
    assert "the evaluation was refused" in str(tdcollect.verify(out))


def test_a_disk_that_is_full_at_the_first_data_keeps_nobody_out(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def full(file: Any, *given: Any) -> None:
        file.write(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(path: Path, data: Any) -> None:
        patch.setattr(np.lib.format, "write_array", full)
        write_trajectory(path, data)

    write_trajectory = files.write_trajectory
    for owner, name, value, file in [
        (np.lib.format, "write_array", full, "witness"),  # which comes before the data
        (files, "write_trajectory", write, r"trajectories/00000\d"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            told = rf"No space left on device; {FREE}: '.*{file}\.npz'"
            with pytest.raises(OSError, match=told):
                again(out, keep_trajectories=True)
        assert not out.exists()
    again(out, keep_trajectories=True)
    assert tdcollect.verify(out).passed


def test_a_disk_that_is_full_at_a_line_names_the_ledger(tmp_path: Path, monkeypatch) -> None:
    def full(self: Any) -> None:
        begin(self)
        self._journal.close()
        self._journal = journal

    begin = files.Directory.begin
    with monkeypatch.context() as patch, open("/dev/full", "wb", buffering=0) as journal:
        patch.setattr(files.Directory, "begin", full)
        with pytest.raises(OSError, match=FREE) as error:
            again(tmp_path)
    assert error.value.filename == str(tmp_path / LEDGER)
    assert again(tmp_path).missing == []


@pytest.mark.parametrize("name", ["run.json", RESULTS])
def test_a_disk_that_is_full_at_the_end_takes_no_note_of_a_run(tmp_path: Path, name: str) -> None:
    def full(path: Path, data: Any) -> Path:
        with write_files.naming(path):
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, data)

    write = write_files.write_atomically
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_files, "write_atomically", full)
        with pytest.raises(OSError, match=rf"{FREE}: '.*{name}'"):
            again(tmp_path)
    again(tmp_path)
    (run,) = json.loads((tmp_path / "run.json").read_text())
    assert run["episodes"] == (0 if name == "run.json" else EPISODES)


def test_a_torn_first_line_is_no_episode(run: Path, monkeypatch) -> None:
    for name in (RESULTS, "run.json", DATA):
        alter(run / name, None)
    (run / LEDGER).write_text('{"index": 0')
    monkeypatch.setattr(files.Directory, "add", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again(run)
    assert not (run / "manifest.json").exists()
