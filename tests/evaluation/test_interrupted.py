"""Evaluations that are killed and resumed: their files equal those of an uninterrupted one."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import directory as files
from tdcollect.evaluation.ledger import read_manifest

from ..forkserver import forkserver, start
from .ledgers import manifest, unfinished

COMMAND = ["evaluate", "CartPole-v1", "--policy", "random", "--num-envs", "4", "--quiet"]
TIMES = "run.json"  # the one file that holds times


def command(out: Path, *more: str, episodes: int = 40) -> list[str]:
    return [*COMMAND, f"--episodes={episodes}", f"--output-dir={out}", *more]


def contents(out: Path) -> dict[str, bytes]:
    """All files by name, except that of the times."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != TIMES
    }


def lines(out: Path) -> int:
    file = out / "episodes.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at_random_moments(
    typed: list[str], out: Path, kills: int, rng: random.Random
) -> list[int]:
    """Kill the command repeatedly at random moments; the ledger's length after each."""
    found = []
    for _ in range(kills):
        process = start(main, typed)
        before = lines(out)
        aim = rng.choice([0, 1, 1, 5, 10])  # lines more than there are, before the clock starts
        while process.is_alive() and lines(out) < before + aim:
            time.sleep(0.001)
        time.sleep(rng.choice([0, 0.005, 0.02]) * rng.random())
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
        found.append(lines(out))
    return found


def check_kills(path: Path, kills: int, seed: int, *more: str) -> None:
    typed = [
        command(path / name, *more, "--num-envs=2", episodes=20 * kills)
        for name in ("whole", "killed")
    ]
    assert main(typed[0]) == 0
    found = kill_at_random_moments(typed[1], path / "killed", kills, random.Random(seed))
    assert main(typed[1]) == 0
    assert contents(path / "killed") == contents(path / "whole")
    assert len({*found} - {0, 20 * kills}) >= kills // 3  # so many in the midst of it


@pytest.mark.parametrize("more", [(), ("--keep-trajectories",)], ids=["ledger", "keep"])
def test_killed_at_random_moments_and_run_again(tmp_path: Path, more) -> None:
    check_kills(tmp_path, 6, 0, *more)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("more", [(), ("--keep-trajectories",)], ids=["ledger", "keep"])
def test_killed_very_often_and_run_again(tmp_path: Path, more, seed: int) -> None:
    check_kills(tmp_path, 20, seed + 1, *more)


def die_at_second_file(arguments: list[str]) -> None:
    """Run the command, and die when the second new file is written but not yet in place."""
    from tdcollect.files import Path as Moved

    moves = itertools.count()
    replace = Moved.replace

    def dying(path: Path, target: Path) -> Path:
        if next(moves) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Moved.replace = dying
    os._exit(main(arguments))


def test_killed_between_each_file_and_the_next(tmp_path: Path) -> None:
    """Manifest, ledger in order, results, figures, page, the notes on the run, the request."""
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert main(command(whole, episodes=6)) == 0
    kills = 0
    while True:
        process = start(die_at_second_file, command(out, episodes=6))
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert contents(out) == contents(whole)
    assert kills >= len(contents(whole)) - 1  # one file at a time


def test_a_last_line_that_is_torn_is_run_again(tmp_path: Path) -> None:
    assert main(command(tmp_path / "whole", episodes=6)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    file = tmp_path / "torn" / "episodes.jsonl"
    for cut in (1, 30):
        unfinished(tmp_path / "torn", 6)
        file.write_bytes(file.read_bytes()[:-cut])
        assert main(command(tmp_path / "torn", episodes=6)) == 0
        assert contents(tmp_path / "torn") == contents(tmp_path / "whole")
    ran = [run["episodes"] for run in json.loads((tmp_path / "torn" / TIMES).read_text())]
    assert ran == [6, 1, 1]


def test_a_line_that_is_no_record_is_told(tmp_path: Path, capsys) -> None:
    assert main(command(tmp_path / "out", episodes=3)) == 0
    unfinished(tmp_path / "out", 3)
    file = tmp_path / "out" / "episodes.jsonl"
    first, _, last = file.read_text().splitlines(keepends=True)
    file.write_text(first + '{"index": 1, "env\n' + last)
    assert main(command(tmp_path / "out", episodes=3)) == 1
    assert "line 2 of" in capsys.readouterr().err


def hold(path: Path, held: Any, done: Any) -> None:
    directory = files.Directory(path, manifest())
    held.set()
    done.wait(60)
    directory.close()


def test_a_second_process_is_refused(tmp_path: Path, capsys) -> None:
    context = forkserver()
    held, done = context.Event(), context.Event()
    process = start(hold, tmp_path / "out", held, done)
    try:
        assert held.wait(60)
        before = contents(tmp_path / "out")
        assert main(command(tmp_path / "out")) == 1
        assert f"another process is writing to {tmp_path / 'out'}; wait for it" in (
            capsys.readouterr().err
        )
        assert contents(tmp_path / "out") == before
    finally:
        done.set()
        process.join()
    assert process.exitcode == 0


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    context = forkserver()
    held, never = context.Event(), context.Event()
    process = start(hold, tmp_path / "out", held, never)
    assert held.wait(60)
    process.kill()
    process.join()
    files.Directory(tmp_path / "out", manifest()).close()


def test_the_function_goes_on_where_the_command_was(tmp_path: Path) -> None:
    """Episodes run in parts equal those of one call."""
    policy = torch.nn.Linear(4, 2)

    def act(td: Any) -> Any:
        return td.set(
            "action", policy(td["observation"]) == policy(td["observation"]).amax(-1, True)
        )

    whole = tdcollect.evaluate(
        "CartPole-v1", act, 12, progress=False, output_dir=tmp_path / "whole"
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    file = tmp_path / "half" / "episodes.jsonl"
    text = file.read_text().splitlines(keepends=True)
    unfinished(tmp_path / "half", 0)
    file.write_text("".join(text[7:2:-1]))  # as they ended, in another order
    again = tdcollect.evaluate("CartPole-v1", act, 12, progress=False, output_dir=tmp_path / "half")
    assert again.digest == whole.digest
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")


def test_a_directory_that_is_opened_reads_its_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = manifest(episodes=3)
    files.Directory(tmp_path, described).close()
    read = []
    monkeypatch.setattr(
        files, "read_manifest", lambda path: read.append(path) or read_manifest(path)
    )
    files.Directory(tmp_path, described).close()
    assert read == [tmp_path]
