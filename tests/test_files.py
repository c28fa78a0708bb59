"""One process writes to a directory, also if machines share it; and what the killed leave is swept.

Machines are simulated: ``flock`` of a directory does nothing, as on NFS, where it is local to each.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tdcollect import files
from tdcollect.evaluation.curve import check_folder as check_curve
from tdcollect.evaluation.directory import check_directory
from tdcollect.files import locked, write_atomically
from tdcollect.lab.results import check_folder as check_suite

from .forkserver import forkserver, start

BUSY = "another process is writing to .*; wait for it, or choose another directory"


def elsewhere(function: Callable[..., Any], *arguments: Any) -> None:
    """Run a function as on another machine."""
    fcntl.flock = lambda *_: None
    function(*arguments)


def hold(path: Path, held: Any, done: Any) -> None:
    with locked(path):
        held.set()
        done.wait(60)


@pytest.mark.parametrize("machines", [1, 2])
def test_another_process_is_kept_out_until_it_ends_or_is_killed(tmp_path: Path, machines) -> None:
    context = forkserver()
    held, done = context.Event(), context.Event()
    where = (hold,) if machines == 1 else (elsewhere, hold)
    process = start(*where, tmp_path, held, done)
    assert held.wait(60)
    for wait in (0.0, 0.1):
        with pytest.raises(RuntimeError, match=BUSY), locked(tmp_path, wait):
            pass
    if machines == 1:
        process.kill()
        process.join()
    else:
        done.set()
    with locked(tmp_path, wait=60):
        assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]
    process.join()
    assert not list(tmp_path.iterdir())


def take(path: Path) -> None:
    with pytest.raises(RuntimeError, match=BUSY), locked(path):
        pass


def test_threads_keep_each_other_out(tmp_path: Path) -> None:
    with locked(tmp_path):
        for _ in range(2):
            take(tmp_path)
        # And none of these attempts has given the lock away.
        process = start(elsewhere, take, tmp_path)
        process.join()
        assert process.exitcode == 0
        waiting = threading.Thread(target=lambda: locked(tmp_path, 60).__enter__())
        waiting.start()
    waiting.join()


def count(path: Path, counter: Path, rounds: int) -> None:
    """Add to a number, read first and written later; and remove the directory if it is empty."""
    files._LOOK = 0.001
    for _ in range(rounds):
        with locked(path, math.inf):
            number = int(counter.read_text())
            time.sleep(0.0005)
            counter.write_text(str(number + 1))
        with suppress(OSError):
            path.rmdir()


def test_machines_that_come_and_go_keep_each_other_out(tmp_path: Path) -> None:
    """Files and directories that are removed, while others have opened them, lock nothing."""
    counter = tmp_path / "number"
    counter.write_text("0")
    processes = [start(elsewhere, count, tmp_path / "run", counter, 50) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert counter.read_text() == "150"
    assert not (tmp_path / "run").exists()


def leave_in_a_fork(path: Path) -> None:
    with locked(path):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert (path / ".lock").exists()
    if not child:
        os._exit(0)


def test_a_fork_does_not_end_the_lock(tmp_path: Path) -> None:
    process = start(leave_in_a_fork, tmp_path)
    process.join()
    assert process.exitcode == 0


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    said = r"the file system of .* has no locks \(No locks available\); do not let two machines"
    with pytest.warns(UserWarning, match=said), locked(tmp_path):
        take(tmp_path)  # this machine has locks


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"run/\.lock"), locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "elsewhere").exists()


# Half-written files


PARTS = [".a.csv.other-host-1-0123abcd.part", ".a.csv.1.part", f".a.csv.{os.getppid()}.part"]
OTHERS = [".b.csv.1.part", ".a.csv.part", ".a.csv.mine.part", "a.csv.1.part", ".lock"]


def test_half_written_files_are_swept_when_they_are_old(tmp_path: Path) -> None:
    """Nobody can tell if a process of another machine lives."""
    for name in (*PARTS, *OTHERS):
        (tmp_path / name).touch()
    write_atomically(tmp_path / "a.csv", b"here")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.csv", *PARTS, *OTHERS}
    for name in (*PARTS, *OTHERS):
        os.utime(tmp_path / name, (0, time.time() - 3700))
    write_atomically(tmp_path / "a.csv", b"here")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.csv", *OTHERS}

    # At once, where nobody else writes.
    figures = tmp_path / "figures"
    figures.mkdir()
    for name in PARTS:
        (figures / name).touch()
    with locked(tmp_path):
        write_atomically(figures / "a.csv", b"here")
    assert [entry.name for entry in figures.iterdir()] == ["a.csv"]


def test_temporary_names_are_of_one_machine_and_one_write(tmp_path: Path) -> None:
    seen: list[str] = []
    for _ in range(2):
        write_atomically(tmp_path / "a.csv", lambda file: seen.append(os.path.basename(file.name)))
    assert len(set(seen)) == 2
    assert all(str(os.getpid()) in name for name in seen)
    assert all(files.is_leftover(name, ["a.csv"]) for name in seen)


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "a.csv", b"old")
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, lambda file: file.write(b"new") and 1 / 0)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (check_directory, "manifest.json"),
        (check_curve, "curve.csv"),
        (lambda path: check_suite(path, {}), "suite.json"),
    ],
    ids=["evaluation", "curve", "suite"],
)
def test_what_the_killed_leave_is_no_file_of_others(
    tmp_path: Path, check: Callable[[Path], object], name: str
) -> None:
    for left in (".lock", f".{name}.12.part", f".{name}.host-12-0123abcd.part"):
        (tmp_path / left).touch()
    check(tmp_path)
    (tmp_path / ".notes.txt.12.part").touch()
    with pytest.raises(ValueError, match="expected output_dir to be empty, or the directory of a"):
        check(tmp_path)
