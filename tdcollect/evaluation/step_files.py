"""The files of what is kept of steps: of all episodes, a thousand to a file; and of the witness.

``steps/000000.npz`` has the steps of the episodes 0 to 999, in the order of their index: the fields
of :mod:`tdcollect.evaluation.episodes.steps`, and ``episode``, the index of each. While episodes
run, they are appended to ``steps/journal``. ``witness.npz`` has the first 1,000 steps of the first
listed episode that completed, and its ``record`` as the ledger has it, in UTF-8.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tdcollect import files
from tdcollect.check import is_count
from tdcollect.evaluation.episodes.data import Finished, combined
from tdcollect.evaluation.episodes.steps import MOST, REWARD, Steps, fields_under, from_columns
from tdcollect.evaluation.ledger import (
    CUT,
    Episode,
    Files,
    Problem,
    record_differences,
    sha256,
)
from tdcollect.evaluation.npz import read_arrays, write_arrays

STEPS = "steps"
WITNESS = "witness.npz"
_JOURNAL = "journal"
_EPISODE, _RECORD = "episode", "record"
_BLOCK = 1000
_NAME = re.compile("[0-9]{6,18}[.]npz")
_MOST_HEAD = 1 << 20  # bytes of the line before the rows of an episode
_DTYPE = re.compile(r"[|<>](b1|[iu][1248]|f[248]|c8|c16)")


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
            plain = all(_DTYPE.fullmatch(kind) for _, kind, _ in kinds)
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
