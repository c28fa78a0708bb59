"""Evaluations that are killed and resumed: their files equal those of an uninterrupted one."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from tdcollect.cli import main
from tdcollect.evaluation import directory as files

from ..forkserver import start
from ..zoo.reports import shrink
from .ledgers import contents, manifest

COMMAND = ["evaluate", "CartPole-v1", "--policy", "random", "--num-envs", "4", "--quiet"]


def command(out: Path, *more: str, episodes: int = 40) -> list[str]:
    return [*COMMAND, f"--episodes={episodes}", f"--output-dir={out}", *more]


def lines(out: Path) -> int:
    file = out / "episodes.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
)
def test_killed_at_random_moments_and_run_again(tmp_path: Path, seed: int) -> None:
    """Very often, in the slow ones."""
    rng, out, kills, found = random.Random(seed), tmp_path / "killed", 20 if seed else 3, []
    more = ["--num-envs=2", *["--keep-trajectories"][: 1 - seed % 2]]
    whole, typed = (command(tmp_path / n, *more, episodes=20 * kills) for n in ("whole", "killed"))
    assert main(whole) == 0
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
    assert main(typed) == 0
    assert contents(out) == contents(tmp_path / "whole")
    assert len({*found} - {0, 20 * kills}) >= kills // 3  # so many in the midst of it


def die(kind: str, number: int, arguments: list[str]) -> None:
    """Run the command, and die before the file or folder of this number is in its place."""
    from tdcollect.files import Path as Moved

    shrink(pytest.MonkeyPatch())
    moves, move = itertools.count(), getattr(Moved, kind)

    def dying(path: Path, target: Path) -> Path:
        if next(moves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(path, target)

    setattr(Moved, kind, dying)
    os._exit(main(arguments))


def killed(kind: str, number: int, arguments: list[str]) -> bool:
    """Run the command; tell whether it was killed."""
    process = start(die, kind, number, arguments)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def kills(arguments: list[str]) -> int:
    """Run the command until it is not killed at its second file; the number of kills."""
    return next(number for number in itertools.count() if not killed("replace", 1, arguments))


@pytest.mark.parametrize("more", [(), ("--shard=1/2",)], ids=["whole", "shard"])
def test_killed_between_each_file_and_the_next(tmp_path: Path, monkeypatch, more) -> None:
    """Manifest, mark, ledger in order, results, figure, page, the notes on the run."""
    shrink(monkeypatch)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert main(command(whole, *more, episodes=6)) == 0
    assert kills(command(out, *more, episodes=6)) >= len(contents(whole)) - 1  # one at a time
    assert contents(out) == contents(whole)


def test_a_second_writer_is_refused(tmp_path: Path, capsys) -> None:
    with closing(files.Directory(tmp_path / "out", manifest())):
        before = contents(tmp_path / "out")
        assert main(command(tmp_path / "out")) == 1
        told = f"another process is writing to {tmp_path / 'out'}; wait for it"
        assert told in capsys.readouterr().err
        assert contents(tmp_path / "out") == before
