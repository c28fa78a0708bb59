"""Atomic writes: a file is complete, or not there."""

from __future__ import annotations

import errno
import filecmp
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, data: bytes | Callable[[BinaryIO], object]) -> Path:
    """Write a file beside ``path`` and move it there; returns ``path``.

    A reader sees the old file or the new one, never a part of it, also after a crash. A file that
    holds the data already is left as it is.

    Args:
        path: the file; missing folders are made.
        data: the contents, or a function that writes them to the open file that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    if isinstance(data, bytes) and path.is_file() and path.read_bytes() == data:
        return path
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)  # a link there would lead elsewhere
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the errors of writing a file name it; those of a full disk say what to do.

    Raises:
        OSError: for a full disk, also in place of torch's errors for it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = error if isinstance(error, OSError) else error.__context__
        code = found.errno if isinstance(found, OSError) else None
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


def _sweep(path: Path) -> None:
    """Remove the leftovers of processes that were killed while they wrote this file."""
    prefix, suffix = f".{path.name}.", ".part"
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
    for name in names:
        pid = name.removeprefix(prefix).removesuffix(suffix)
        if name.endswith(suffix) and pid.isdecimal() and not _alive(int(pid)):
            path.with_name(name).unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
