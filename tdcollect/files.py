"""Safe files: complete or not there, written through no link, by one process at a time."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tdcollect.display import listed_text
from tdcollect.packages import check_posix

LOCK = ".lock"

# Process ids say nothing about a process of another machine, or of another container.
_HOST = re.sub(r"[^\w-]", "-", platform.node())[:16]
_PART = re.compile(r"\.(?P<file>.+)\.(?:\d+|[\w-]*-\d+-[0-9a-f]{8})\.part")  # once: the pid alone
_OLD = 3600.0  # seconds after which nobody is writing a file any more
_LOOK = 0.05  # seconds between two looks at a lock
_FULL = (errno.ENOSPC, errno.EDQUOT)
_held: set[Path] = set()  # directories that this process has locked


def write_atomically(path: Path, data: bytes | Callable[[BinaryIO], object]) -> Path:
    """Write a file beside ``path`` and move it there; returns ``path``.

    A reader sees the old file or the new one, also after a crash. One that holds the data already
    is left as it is. ``data`` may be a function that writes to an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    if isinstance(data, bytes) and path.is_file() and path.read_bytes() == data:
        return path
    beside = path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        with naming(path), beside.open("xb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not (path.is_file() and filecmp.cmp(path, beside, shallow=False)):
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write a value as JSON, as :func:`write_atomically` writes a file."""
    return write_atomically(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the errors of writing a file name it; those of a full disk say what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        code = cause.errno if isinstance(cause, OSError) else None
        if code in _FULL or os.strerror(errno.ENOSPC) in str(error):
            code = code or errno.ENOSPC
            text = f"{os.strerror(code)}; free some space: the same command goes on"
            raise OSError(code, text, os.fspath(path)) from error
        if isinstance(error, OSError) and code is not None:  # without one, the text shows alone
            error.filename = error.filename or os.fspath(path)
        raise


def remove(path: Path) -> None:
    """Remove a file that :func:`write_atomically` wrote, if it is there, and what it left over."""
    if path.parent.is_dir():
        _sweep(path)
    path.unlink(missing_ok=True)


def is_leftover(name: str, files: Container[str]) -> bool:
    """Return whether a name is that of a lock, or of one of the files half-written."""
    part = _PART.fullmatch(name)
    return name == LOCK or (part is not None and part["file"] in files)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which takes the place of another one unless the body raises.

    It is made beside the other one, so nothing there is written to, or through.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
        new = Path(beside, "new")
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(Path(beside, "old"))
        new.rename(folder)


def check_no_links(root: Path, *names: str | Path) -> None:
    """Raise ValueError for a link below a folder where files are to be written.

    The folder may come from somebody else, and its links may lead anywhere. ``root`` may be a link
    itself; ``names`` are relative to it, and may be missing. A file that
    :func:`write_atomically` replaces needs no check.
    """
    for path in (root / name for name in names):
        if (leads := path.resolve()) != root.resolve() / path.relative_to(root):
            raise ValueError(
                f"expected {path} to be no link, and behind none, as what is written there would "
                f"end up elsewhere, got {leads}; remove the link"
            )


_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def folder_name(name: Any, what: str) -> str:
    """Return a name that is to be a folder's; raise ValueError for one that cannot be."""
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise ValueError(
            f"expected the {what} to be letters, digits, '.', '-' and '_', 100 at most, as it "
            f"names a folder, got {name!r}"
        )
    return name


def distinct_names(names: Iterable[str], things: str) -> None:
    """Raise ValueError for names that recur; those of folders may not differ in case alone."""
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen:
            both = listed_text([seen[name.lower()], name])
            raise ValueError(f"expected {things} with names of their own, got {both}; rename one")
        seen[name.lower()] = name


def check_output(
    path: Path,
    of: str,
    files: Container[str],
    is_folder: Callable[[str], object] = lambda name: False,
) -> None:
    """Raise ValueError for an output directory that is a file, or that holds anything else.

    Args:
        path: the directory, which may be missing.
        of: the kind of its contents, for the message.
        files: the files that may be there, complete or half-written.
        is_folder: whether a name is that of a folder that may be there.
    """
    check_writable(path)
    for entry in path.iterdir() if path.is_dir() else ():
        if not (entry.name in files or is_leftover(entry.name, files) or is_folder(entry.name)):
            raise ValueError(
                f"expected output_dir to be empty, or the directory of {of}, got {path}, which "
                f"holds {entry.name}; choose another"
            )


def check_writable(path: Path) -> None:
    """Raise ValueError for an output directory that cannot be made, or written to."""
    place = Path(os.path.abspath(path))
    there = next(at for at in (place, *place.parents) if at.exists())
    if not there.is_dir():
        raise ValueError(f"expected output_dir to be a directory, got the file {there}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"expected output_dir to be writable, got {path}: {there} is read-only")


def existing(path: Path, what: str, suffix: str = "") -> Path:
    """Return the path of a file, whose suffix may be left out; FileNotFoundError without one."""
    for file in (path, path.with_name(path.name + suffix)):
        if file.is_file():
            return file
    raise FileNotFoundError(f"expected {what}, got {path}, which is no file")


def _sweep(path: Path) -> None:
    """Remove old leftovers of this file; all, if this process has locked the directory."""
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if is_leftover(entry.name, (path.name,))]
    locked = not _held.isdisjoint(path.parents)
    for name in names:
        with suppress(FileNotFoundError):  # its process has just moved it
            beside = path.with_name(name)
            if name != LOCK and (locked or time.time() - beside.lstat().st_mtime > _OLD):
                beside.unlink()


@contextmanager
def locked(path: Path, wait: float = 0.0) -> Iterator[None]:
    """Make a directory, and lock it for writing: for this thread, among all on all machines.

    The lock ends with the process; its file may stay, and locks nothing. RuntimeError if another
    has the lock after ``wait`` seconds.
    """
    until = time.monotonic() + wait
    while (opened := _lock(path)) is None:
        if time.monotonic() >= until:
            raise RuntimeError(
                f"another process is writing to {path}; wait for it, or choose another directory"
            )
        time.sleep(_LOOK)
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        opened.close()


def _lock(path: Path) -> ExitStack | None:
    """Return what ends the lock; None if another has it.

    Machines that share the directory see locks of the file (POSIX), not those of the directory
    (``flock``). With the threads of a process it is the other way round, so both are taken: the
    directory first, as a process that closes any descriptor of the file loses its lock of it.
    """
    check_posix("an output_dir, which one process writes to at a time, needs", "leave it out")
    import fcntl

    while True:
        with suppress(FileExistsError):
            path.resolve().mkdir(parents=True)  # the end of a link, too
        try:
            with ExitStack() as opened:
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                opened.callback(os.close, directory)
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                file = os.open(LOCK, flags, 0o666, dir_fd=directory)
                opened.callback(os.close, file)
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EACCES, errno.EAGAIN):
                        return None
                    warnings.warn(
                        f"the file system of {path} has no locks ({error.strerror}); do not let "
                        "two machines write there at the same time",
                        stacklevel=4,
                    )
                there = os.fstat(file)
                if there.st_nlink and os.path.samestat(there, os.stat(LOCK, dir_fd=directory)):
                    opened.callback(_unlock, directory, os.getpid())
                    return opened.pop_all()
        except BlockingIOError:
            return None
        except OSError as error:
            # Whoever had the lock has just removed the file, or the directory.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                error.filename = os.fspath(path / LOCK)
                raise


def _unlock(directory: int, process: int) -> None:
    """Remove the lock's file, while it is locked; a fork of the process has no lock."""
    if os.getpid() == process:
        with suppress(OSError):  # nothing is locked by a file that stays
            os.unlink(LOCK, dir_fd=directory)
