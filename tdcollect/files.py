"""Writes that are safe: a file or a folder is complete, or not there; no link is followed."""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
        with beside.open("xb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not (path.is_file() and filecmp.cmp(path, beside, shallow=False)):
            beside.replace(path)
    except OSError as error:  # a full disk does not say of which file
        if error.errno is not None:  # an error without a number shows its text alone
            error.filename = error.filename or os.fspath(path)
        raise
    finally:
        beside.unlink(missing_ok=True)
    return path


def remove(path: Path) -> None:
    """Remove a file that :func:`write_atomically` wrote, if it is there, and what it left over."""
    if path.parent.is_dir():
        _sweep(path)
    path.unlink(missing_ok=True)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Give a new folder to write to, which takes the place of another one at the end.

    It is made beside the other one, so nothing that lies there is written to, or through. If the
    body raises, all stays as it was.
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
    """Refuse links below a folder where files are to be written.

    The folder may come from somebody else, and its links may lead anywhere. A file that is
    replaced needs no check: :func:`write_atomically` replaces a link, too.

    Args:
        root: the folder; it may be a link itself, as the user has named it.
        names: files or folders, relative to it, which may be missing; each part is looked at.

    Raises:
        ValueError: naming the link.
    """
    for path in (root / name for name in names):
        if (leads := path.resolve()) != root.resolve() / path.relative_to(root):
            raise ValueError(
                f"expected {path} to be no link, and behind none, as what is written there would "
                f"end up elsewhere, got {leads}; remove the link"
            )


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
