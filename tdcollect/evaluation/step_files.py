"""Files of arrays, ``.npz``: how they are written and read, and those of what is kept of steps.

They are as NumPy writes them, and ``numpy.load`` reads them: the same bytes whenever written. Any
name of an array is kept, and each member is stored. A file may be anybody's:
nothing in it is evaluated or run, and no memory is taken for an array before it is known to be as
long as it says.

``steps/000000.npz`` has the steps of the episodes 0 to 999, in the order of their index: the fields
of :mod:`tdcollect.evaluation.episodes.data`, and ``episode``, the index of each. While episodes
run, they are appended to ``steps/journal``. ``witness.npz`` has the first 1,000 steps of the first
listed episode that completed, and its ``record`` as the ledger has it, in UTF-8.
"""

from __future__ import annotations

import json
import os
import re
import stat
import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, unquote
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np

from tdcollect import files
from tdcollect.check import is_count
from tdcollect.evaluation.episodes.data import (
    MOST,
    REWARD,
    Finished,
    Steps,
    combined,
    fields_under,
    from_columns,
)
from tdcollect.evaluation.ledger import (
    CUT,
    Episode,
    Files,
    Problem,
    record_differences,
    sha256,
)
from tdcollect.keys import Key, as_path

_END = ".npy"
_PLAIN = " " + string.punctuation.translate(dict.fromkeys(map(ord, "%/:")))  # in a member's name
_DTYPE = r"[|<>](?:b1|[iu][1248]|f[248]|c8|c16)"
_HEADERS: Any = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_MOST, _LONGEST = 4096, 1000  # arrays in a file, and characters of a name
_MOST_HEADER = 4096  # bytes
_BIG = 1 << 30  # bytes from which a member's size has 64 bits


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays to a file as :func:`dump`; it takes the place of another once it is complete."""
    part = path.with_name(path.name + ".part")
    with files.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # it may be a link
        try:
            with part.open("xb") as file:
                dump(arrays, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def dump(arrays: Mapping[str, np.ndarray[Any, Any]], file: BinaryIO) -> None:
    """Write arrays of bool, integers, floats or complex numbers to an open file, by name.

    The same arrays give the same bytes. Raises ValueError for other dtypes, such as objects, for
    names that are long or have control characters, and for too many arrays.
    """
    _check_names(arrays)
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            if not re.fullmatch(_DTYPE, array.dtype.str):
                raise ValueError(
                    "expected arrays of bool, integers, floats of up to 64 bits, or complex "
                    f"numbers of up to 128, got {name!r} of {array.dtype}; convert or omit it"
                )
            member = ZipInfo(name + _END)  # dated 1980, always
            member.create_system = 3
            with archive.open(member, "w", force_zip64=array.nbytes > _BIG) as opened:
                np.lib.format.write_array(opened, np.asarray(array, order="C"), (1, 0), False)


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of a file by name, as :func:`write_arrays` or ``numpy.savez`` writes them.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: for a link, a file that is damaged, and members that these would not write.
    """
    at = path.lstat()
    try:
        if not stat.S_ISREG(at.st_mode):
            raise ValueError("it is a link, a folder, a pipe or a device")
        with ZipFile(path) as archive:
            members = {one.orig_filename.removesuffix(_END): one for one in archive.infolist()}
            _check_names(members)
            if len(members) < len(archive.infolist()):
                raise ValueError("two of its members have one name")
            if sum(one.file_size for one in members.values()) > at.st_size:
                raise ValueError("its members are longer than the file")
            return {name: _read_member(archive, one) for name, one in members.items()}
    except (ValueError, BadZipFile, NotImplementedError, EOFError, OSError, MemoryError) as error:
        raise ValueError(
            f"expected {path} to be an .npz file of plain arrays that are stored, but {error}; ask "
            "for the file as it was"
        ) from error


def _read_member(archive: ZipFile, info: ZipInfo) -> np.ndarray[Any, Any]:
    name = info.orig_filename
    if info.compress_type or info.flag_bits & 1:
        raise ValueError(f"{name!r} is compressed or encrypted")
    with archive.open(info) as member:
        try:
            version = np.lib.format.read_magic(member)
            shape, is_fortran, dtype = _HEADERS[version](member, max_header_size=_MOST_HEADER)
        except Exception as error:  # whatever NumPy's parser meets
            raise ValueError(f"{name!r} does not begin as a plain array") from error
        if not (name.endswith(_END) and re.fullmatch(_DTYPE, dtype.str)):
            raise ValueError(f"{name!r} is no plain array, but {dtype}")
        if (wanted := member.tell() + prod(shape) * dtype.itemsize) != info.file_size:
            raise ValueError(f"{name!r} has {info.file_size} bytes, and by its shape {wanted}")
        content = bytearray(member.read())  # which compares the checksum
    return np.ndarray(shape, dtype, content, order="F" if is_fortran else "C")


def member_name(key: Key) -> str:
    """Return the name of an entry's array: of ``("a", "b")`` ``"a/b"``, of ``"a/b"`` ``"a%2Fb"``.

    ``%``, ``/``, ``:`` and all that is not printable ASCII become ``%XX`` for each byte in UTF-8.
    """
    return "/".join(quote(name, _PLAIN, errors="surrogatepass") for name in as_path(key))


def key_of(name: str) -> Key:
    """Return the key that :func:`member_name` gave a name; raise ValueError for any other name."""
    key = tuple(unquote(part, errors="surrogatepass") for part in name.split("/"))
    if member_name(key) != name:
        raise ValueError(f"expected the name of an entry, as a/b or a%2Fb, got {name!r}")
    return key[0] if len(key) == 1 else key


def _check_names(names: Collection[str]) -> None:
    odd = [n for n in names if len(n) > _LONGEST or re.search(r"[\0-\x1f\x7f\ud800-\udfff]", n)]
    if odd or len(names) > _MOST:
        raise ValueError(
            f"expected at most {_MOST} arrays, with names of at most {_LONGEST} characters, no "
            f"control characters, got {len(names)}, {ascii(odd)[:100]}; use member_name()"
        )


# --- what is kept of steps

STEPS = "steps"
WITNESS = "witness.npz"
_JOURNAL = "journal"
_EPISODE, _RECORD = "episode", "record"
_BLOCK = 1000
_NAME = re.compile("[0-9]{6,18}[.]npz")
_MOST_HEAD = 1 << 20  # bytes of the line before the rows of an episode


def file_of(root: Path, index: int) -> Path:
    """Return the file with the steps of an episode, once the evaluation is finished."""
    return root / STEPS / f"{index // _BLOCK * _BLOCK:06d}.npz"


class Journal:
    """The steps of episodes as they end; what a process wrote in part as it died is cut off."""

    def __init__(self, root: Path):
        self._root = root
        self._path = root / STEPS / _JOURNAL
        self._places: dict[int, _Place] = {}
        self._file: Any = None
        if self._path.exists():
            files.check_no_links(root, STEPS)
            self._open()

    def _open(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        files.check_no_links(self._path.parent, _JOURNAL)
        self._file = self._path.open("a+b")
        self._file.seek(0)
        size = os.fstat(self._file.fileno()).st_size
        end = 0
        for place in _places(self._file, size):
            self._places[place.episode] = place
            end = place.start + place.size
        self._file.truncate(end)

    def add(self, index: int, steps: Steps) -> None:
        """Append the steps of an episode."""
        if self._file is None:
            self._open()
        kinds = [(name, *_plain(steps.dtype[name])) for name in steps.dtype.names or ()]
        head = json.dumps([index, len(steps), kinds]).encode() + b"\n"
        with files.naming(self._path):
            self._file.seek(0, os.SEEK_END)
            start = self._file.tell() + len(head)
            self._file.write(head + steps.tobytes())
            self._file.flush()
        self._places[index] = _Place(index, start, steps.nbytes, len(steps), steps.dtype)

    def read(self, index: int) -> Steps | None:
        """Return the steps of an episode, if they are here."""
        place = self._places.get(index)
        if place is None:
            return None
        self._file.seek(place.start)
        return np.frombuffer(self._file.read(place.size), place.dtype)

    def pack(self, indices: Iterable[int]) -> None:
        """Write the files of these episodes, and remove the journal."""
        for first, block in groupby(sorted(indices), lambda index: index // _BLOCK):
            path = file_of(self._root, first * _BLOCK)
            before = read_block(path) if path.exists() else {}
            read = {index: self.read(index) for index in block}
            added = {index: steps for index, steps in read.items() if steps is not None}
            there = {index: steps for index, steps in before.items() if index in read} | added
            if there and (added or there.keys() != before.keys()):
                _write_block(path, there)
        self.close()
        self._path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all steps, where no episode has ended."""
        self.close()
        (self._root / WITNESS).unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # of what is not ours there
            self._path.parent.rmdir()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Place(NamedTuple):
    """The place of an episode's rows in a journal."""

    episode: int
    start: int
    size: int
    rows: int
    dtype: np.dtype[Any]


def _plain(kind: np.dtype[Any]) -> tuple[str, list[int]]:
    return kind.base.str, list(kind.shape)


def _places(file: Any, size: int) -> Iterator[_Place]:
    """Yield the episodes of a journal, up to the first that is not whole."""
    while True:
        head = file.readline(_MOST_HEAD)
        try:
            index, rows, kinds = json.loads(head)
            plain = all(re.fullmatch(_DTYPE, kind) for _, kind, _ in kinds)
            dtype = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in kinds])
            place = _Place(int(index), file.tell(), int(rows) * dtype.itemsize, int(rows), dtype)
        except (ValueError, TypeError, RecursionError):
            return
        if not plain or not head.endswith(b"\n") or not 0 < place.size <= size - place.start:
            return
        file.seek(place.size, os.SEEK_CUR)
        yield place


def _write_block(path: Path, steps: Mapping[int, Steps]) -> None:
    """Write the steps of some episodes, in the fields that all of them have."""
    parts = [steps[index] for index in sorted(steps)]
    kinds = [dict(part.dtype.fields or {}) for part in parts]
    names = [
        name
        for name, (kind, *_) in kinds[0].items()
        if all(name in other and other[name][0] == kind for other in kinds)
    ]
    lengths = [len(part) for part in parts]
    columns = {_EPISODE: np.repeat(np.array(sorted(steps), np.int64), lengths)}
    columns |= {name: np.concatenate([part[name] for part in parts]) for name in names}
    write_arrays(path, columns)


def read_block(path: Path) -> dict[int, Steps]:
    """Read a file of steps: those of each episode, by index; raise ValueError for another file."""
    columns = read_arrays(path)
    episodes = columns.pop(_EPISODE, None)
    if episodes is None or episodes.ndim != 1 or episodes.dtype != np.int64:
        raise ValueError(f"expected {path} to name the episode of each step, got none")
    if (
        not columns
        or any(len(column) != len(episodes) for column in columns.values() if column.ndim)
        or not all(column.ndim for column in columns.values())
    ):
        raise ValueError(f"expected {path} to have a row of each field for each step")
    if (np.diff(episodes) < 0).any():
        raise ValueError(f"expected {path} to have episodes in the order of their index")
    steps = from_columns(columns)
    indices, starts = np.unique(episodes, return_index=True)
    return dict(zip(indices.tolist(), np.split(steps, starts[1:]), strict=True))


def read_steps(root: Path, indices: Iterable[int]) -> dict[int, Steps]:
    """Read the steps of episodes of a finished evaluation, as far as they were kept."""
    steps: dict[int, Steps] = {}
    for path, several in groupby(sorted(indices), partial(file_of, root)):
        block = read_block(path) if path.exists() else {}
        steps |= {index: block[index].copy() for index in several if index in block}
    return steps


def paths(root: Path) -> list[Path]:
    """Return the files of steps, in the order of the episodes."""
    folder = root / STEPS
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name)) if folder.is_dir() else []


def digests(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of steps, by name."""
    return {path.name: sha256(path) for path in paths(root)}


def altered(read: Files) -> Iterator[Problem]:
    """Yield the files of steps, and the witness, that are not as they were written."""
    root, last = read.root, read.last
    if last is None:
        return
    listed, there = last.get(STEPS, {}), digests(root)
    for name in sorted({*listed, *there}):
        if listed.get(name) != there.get(name):
            yield Problem(root / STEPS / name, "it is missing, or not the file that was written")
    witness = root / WITNESS
    if last.get("witness") != (sha256(witness) if witness.exists() else None):
        yield Problem(witness, "it is missing, or not the file that was written")


def problems(read: Files) -> Iterator[Problem]:
    """Check the steps and the witness of an evaluation against its records; yield what is wrong."""
    root = read.root
    wrong = [*altered(read)]
    yield from wrong
    if wrong:
        return
    records = {record.index: record for record in read.episodes if record.completed}
    try:
        path = root / WITNESS
        witness = read_witness(root)
        if witness is not None and (record := records.get(witness.record.index)) is not None:
            for name, a, b in record_differences(record, witness.record):
                yield Problem(path, f"its {name} is {b!r}, in the ledger {a!r}")
        for path in paths(root):
            yield from (Problem(path, text) for text in _block_problems(path, records))
    except ValueError as error:
        yield Problem(path, str(error))


def _block_problems(path: Path, records: Mapping[int, Episode]) -> Iterator[str]:
    block = read_block(path)
    for index, steps in block.items():
        record = records.get(index)
        if record is None or file_of(path.parents[1], index) != path:
            yield f"it has steps of episode {index}, which do not belong there"
            continue
        if len(steps) != record.length:
            yield f"episode {index} has {len(steps)} steps, in the ledger {record.length}"
        rewards = {
            name: steps[name].reshape(len(steps), -1) for name in fields_under(steps, REWARD)
        }
        total, _ = combined(rewards)
        if repr(total) != repr(record.episode_return):
            there = record.episode_return
            yield f"the rewards of episode {index} give {total}, in the ledger {there}"
    own = {index for index in records if file_of(path.parents[1], index) == path}
    if missing := sorted(own - block.keys()):
        yield f"it lacks the steps of episode {missing[0]}"


def write_witness(root: Path, witness: Finished) -> None:
    """Write the steps and the record of the witness."""
    assert witness.steps is not None
    line = witness.record.to_json().encode()
    columns = {name: witness.steps[name][:MOST] for name in witness.steps.dtype.names or ()}
    write_arrays(root / WITNESS, {_RECORD: np.frombuffer(line, np.uint8), **columns})


def read_witness(root: Path) -> Finished | None:
    """Read the witness of an evaluation; None if it has none."""
    path = root / WITNESS
    if not path.exists():
        return None
    columns = read_arrays(path)
    try:
        record = _record(columns.pop(_RECORD).tobytes())
        lengths = {column.shape[0] for column in columns.values()}
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"expected {path} to hold the witness of an evaluation: {error}"
        ) from error
    if lengths != {min(record.length or 0, MOST)}:
        raise ValueError(f"expected {path} to hold the first steps of episode {record.index}")
    return Finished(record, None, from_columns(columns))


def _record(line: bytes) -> Episode:
    """Read the record of a witness, which a shard that it is not of may have cut."""
    told = json.loads(line)
    if isinstance(told, dict) and told.get("status") == CUT:
        counts: list[Any] = [told.get(n) for n in ("index", "env_seed", "policy_seed", "length")]
        if all(map(is_count, counts)):
            index, env_seed, policy_seed, length = counts
            return Episode(index, env_seed, policy_seed, CUT, length=length)
    return Episode.from_json(line.decode())
