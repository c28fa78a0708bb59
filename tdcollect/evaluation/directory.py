"""Writing the directory of an evaluation: a journal first, the ledger and its report last.

``manifest.json`` is written first: it marks a directory as an evaluation's, and a directory
without it is left alone. ``episodes.jsonl`` gets one line per episode as they end, and is sorted by
index at the end. ``results.json`` is written last, and marks the evaluation as finished; a shard
has ``shard.json`` in its place. Whenever a process dies, the same command resumes after the last
complete line, and the files are byte for byte those of a run that was never interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect import files, keys
from tdcollect.display import without_process_ids
from tdcollect.evaluation import ledger
from tdcollect.evaluation.episodes.data import disagreements
from tdcollect.packages import extra_module

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tdcollect.evaluation.request import Request
    from tdcollect.evaluation.result import EvaluationResult


class Directory:
    """The directory of one evaluation, open for writing by one process.

    Args:
        path: the directory; made if it is missing.
        manifest: the manifest of the evaluation.
        shard: the part of the evaluation that runs there; None for all of it.
        allow_mixed: go on from a manifest that differs in entries that may be mixed.
        retry_lost: forget the episodes that are recorded as lost.

    Attributes:
        manifest: the manifest found there, or written; what :meth:`note_mixed` adds is in it.
        shard: the shard that runs there, or None.
        episodes: the records found there.
        kept: the digests of the folders with data, by name, as a finished ledger lists them.
        rechecked: True if an episode ran once more there; None if it was unfinished.

    Raises:
        ValueError: for a directory of another evaluation or shard, naming the differences, and for
            one that holds something else, which is left as it is.
        RuntimeError: if another process writes to it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        shard: ledger.Shard | None = None,
        allow_mixed: bool = False,
        retry_lost: bool = False,
    ):
        self.path, self.shard = Path(os.path.abspath(path)), shard
        self._made = not self.path.exists()
        with ExitStack() as opened:
            opened.enter_context(files.locked(self.path))
            if not (self.path / ledger.MANIFEST).exists():
                check_directory(self.path)
                files.write_json(self.path / ledger.MANIFEST, manifest)
            found = ledger.read_directory(self.path)
            self.manifest, self.episodes = found.manifest, found.episodes
            self.kept, self.rechecked = found.kept, found.rechecked
            self._check_manifest(manifest, allow_mixed)
            self._mark(found)
            files.check_no_links(self.path, ledger.EPISODES, ledger.TRAJECTORIES)
            data = ledger.kept_trajectories(self.path) if self.kept is None else frozenset()
            for episode in self.episodes:
                if episode.index in data:  # of a run that was interrupted: a digest is to come
                    check_data(self.path, episode, self.manifest, None)
            batches = ledger.Batches.of(self.manifest)
            there = (episode.index for episode in self.episodes)
            gone = set() if batches is None else batches.partial(there)
            if retry_lost:
                gone |= {episode.index for episode in self.episodes if episode.lost}
            if gone:
                self._forget(gone)
            # From here on it is known to be this evaluation's.
            self._sweep()
            self._journal = opened.enter_context((self.path / ledger.EPISODES).open("a+b"))
            size = sum(map(len, ledger.complete_lines(self.path / ledger.EPISODES)))
            if self._journal.tell() > size:  # a process died as it wrote a line
                self._journal.truncate(size)
                self._journal.seek(size)
            self._opened = opened.pop_all()

    def _check_manifest(self, manifest: Mapping[str, Any], allow_mixed: bool) -> None:
        """Refuse to go on from the manifest found there if it is of another evaluation."""
        found = ledger.differences(self.manifest, manifest)
        mixable = all(ledger.may_be_mixed(path) for path, *_ in found)
        if found and not (allow_mixed and mixable):
            advice = "; or go on with allow_mixed=True (--allow-mixed)" if mixable else ""
            raise ValueError(
                f"{self.path} holds another evaluation: {ledger.differences_text(found)}. Choose "
                f"another directory, or remove this one to start anew{advice}"
            )

    def _mark(self, found: ledger.Files) -> None:
        """Mark the directory as the shard's; refuse one of another shard, or of the whole."""
        self._was_shard = self.shard is None and found.shard is not None
        if self.shard is None:
            return
        there = None if found.shard is None else str(found.shard)
        if there is None and found.last is not None:
            there = "the whole evaluation"
        elif there is None and self.episodes:  # a process may have died before it marked it
            own = {*self.shard.select(ledger.asked_indices(self.manifest))}
            other = [episode.index for episode in self.episodes if episode.index not in own]
            there = f"episode {other[0]}, which is not of this shard" if other else None
        if there not in (None, str(self.shard)):
            raise ValueError(
                f"expected {self.path} to hold {self.shard} or nothing, got {there}; choose a "
                "directory of its own for each shard, or run without shard, which goes on with "
                "the whole evaluation there"
            )
        if found.shard is None:
            files.write_json(self.path / ledger.SHARD, {"shard": self.shard})

    def _unmark(self) -> None:
        """Go on with the whole evaluation where a shard was, once something is written."""
        if self._was_shard:
            files.remove(self.path / ledger.SHARD)
            self._was_shard = False

    def _forget(self, indices: Container[int]) -> None:
        """Forget some episodes; first, that the evaluation or the shard is finished."""
        self._unmark()
        files.remove(self.path / ledger.RESULTS)
        if self.shard is not None:
            files.write_json(self.path / ledger.SHARD, {"shard": self.shard})
        self.episodes = [episode for episode in self.episodes if episode.index not in indices]
        self._write_ledger(self.episodes)

    def cut(self, episodes: Iterable[ledger.Episode], manifest: Mapping[str, Any]) -> None:
        """Keep these episodes alone, all that a manifest asks for, which is from then on its own.

        A process may die between the two files: the ledger is then that of an unfinished run.
        """
        kept = {episode.index: episode for episode in episodes}
        self._write_ledger(kept[index] for index in sorted(kept))
        for index in ledger.kept_trajectories(self.path) - kept.keys():
            shutil.rmtree(ledger.trajectory_path(self.path, index))
        self.manifest = dict(manifest)
        files.write_json(self.path / ledger.MANIFEST, self.manifest)

    def note_mixed(self, manifest: Mapping[str, Any]) -> None:
        """Add to the manifest that episodes run here under another one, too.

        It is rewritten before they run, so that a ledger never has episodes that it does not tell
        of. Values that it has already change nothing.
        """
        mixed = ledger.mixed_entries(self.manifest, manifest)
        if mixed != ledger.mixed_values(self.manifest):
            self._unmark()
            self.manifest[ledger.MIXED] = mixed
            files.write_json(self.path / ledger.MANIFEST, self.manifest)

    def note_repeated(self, found: Mapping[str, int]) -> None:
        """Add to the manifest what came of the batch that ran twice."""
        self.manifest[ledger.REPEATED] = dict(found)
        files.write_json(self.path / ledger.MANIFEST, self.manifest)

    def _sweep(self, data: bool = False) -> None:
        """Remove half-written data; with ``data``, all data of episodes."""
        for part in (self.path / ledger.TRAJECTORIES).glob("*" if data else "*.part"):
            if part.name.removesuffix(".part").isdecimal():
                shutil.rmtree(part)

    def check_kept(self, episodes: Iterable[ledger.Episode]) -> None:
        """Refuse to keep data if some episodes have ended without."""
        there = ledger.kept_trajectories(self.path)
        lacking = [one.index for one in episodes if one.completed and one.index not in there]
        if lacking:
            raise ValueError(
                f"expected the data of the episodes that {self.path} holds, got {len(lacking)} "
                f"without (episode {lacking[0]} first): data are kept as an episode runs. Evaluate "
                "into another directory, or replay single episodes"
            )

    def add(self, episode: ledger.Episode, data: TensorDict | None = None) -> None:
        """Write an episode: its data first, then its line."""
        self._put(episode.index, None if data is None else partial(write_trajectory, data=data))
        self._unmark()
        with files.naming(self.path / ledger.EPISODES):
            self._journal.write(episode.to_json().encode() + b"\n")
            self._journal.flush()

    def take_data(self, index: int, source: Path) -> None:
        """Take the data of an episode from another directory, before the ledger has its line."""
        self._put(index, partial(link_trajectory, source))

    def _put(self, index: int, write: Callable[[Path], None] | None) -> None:
        target = ledger.trajectory_path(self.path, index)
        if target.exists():  # its line was never written
            shutil.rmtree(target)
        if write is not None:
            part = target.with_name(target.name + ".part")
            write(part)
            part.rename(target)

    def finish(self, episodes: Sequence[ledger.Episode]) -> None:
        """Write the ledger again, with its records by index, as they are given."""
        if self.shard is None:
            files.remove(self.path / ledger.SHARD)  # and what a process that was killed left of it
        self._write_ledger(episodes)

    def _write_ledger(self, episodes: Iterable[ledger.Episode]) -> None:
        lines = (episode.to_json().encode() + b"\n" for episode in episodes)
        files.write_atomically(self.path / ledger.EPISODES, lambda file: file.writelines(lines))

    def write_results(self, results: Mapping[str, Any], pages: Sequence[Path]) -> None:
        """Write the statistics and digests of the other files, which finishes the evaluation."""
        digests = {str(file.relative_to(self.path)): ledger.sha256(file) for file in pages}
        found = {**self._digests(), "files": digests, **results}
        files.write_json(self.path / ledger.RESULTS, found)

    def finish_shard(self, **note: Any) -> None:
        """Write the digests of ledger and manifest, which finishes the shard, and a note."""
        files.write_json(self.path / ledger.SHARD, {**note, **self._digests(), "shard": self.shard})

    def _digests(self) -> dict[str, Any]:
        """Return the digests of ledger, manifest, and all data, if there are any.

        Of data, what a finished ledger lists stays, and what it does not list stays out: else a run
        that finds it done would take data that were altered for its own.
        """
        before = [] if self.kept is None else self.episodes
        new = ledger.kept_trajectories(self.path) - {episode.index for episode in before}
        paths = [ledger.trajectory_path(self.path, index) for index in sorted(new)]
        kept = (self.kept or {}) | {path.name: trajectory_digest(path) for path in paths}
        found = {name: ledger.sha256(self.path / file) for name, file in ledger.DIGESTED.items()}
        return {**found, ledger.TRAJECTORIES: kept} if kept else found

    def note_run(self, started: float, ran: int, how: Mapping[str, Any]) -> None:
        """Append the times of this run to the one file that holds times."""
        seconds = round(time.time() - started, 3)
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
        run = {"began": began, "seconds": seconds, "episodes": ran, **how}
        files.write_json(self.path / ledger.RUN, [*read_runs(self.path), run])

    def give_up(self, error: BaseException) -> None:
        """Remove the files if no episode has ever ended; mark a refused evaluation as refused.

        A refused evaluation is not taken for an unfinished one, and the directory is free again
        once env or policy are corrected.
        """
        from tdcollect.randomness import NotReproducibleError  # which needs torch; reading does not

        if not self._journal.tell() and not (self.path / ledger.RUN).exists():
            self._sweep(data=True)
            files.remove(self.path / ledger.SHARD)
            for name in (ledger.EPISODES, ledger.MANIFEST):
                (self.path / name).unlink()
            ends = [(self.path / ledger.TRAJECTORIES).rmdir, self.close, self.path.rmdir]
            for end in ends if self._made else ends[:2]:
                with suppress(OSError):  # of what is not ours there; of a journal on a full disk
                    end()
        elif isinstance(error, NotReproducibleError):
            reason = without_process_ids(str(error))
            files.write_json(self.path / ledger.REFUSED, {"reason": reason})

    def close(self) -> None:
        """Release the directory."""
        with files.naming(self.path / ledger.EPISODES):  # of which a full disk left a part to write
            self._opened.close()


def check_report_extras(what: str) -> None:
    """Raise before anything runs if the report, which the call ``what`` writes, lacks packages."""
    for name in ("scipy", "matplotlib"):
        extra_module(name, what)


def finish(
    directory: Directory, result: EvaluationResult, request: Request | None, recheck: bool = True
) -> None:
    """Sort the ledger, and write all that follows from it; the last file marks it as finished.

    The same result gives the same bytes, whoever ran its episodes.

    Args:
        directory: the directory of the evaluation; data that are kept are there.
        result: all episodes of the directory.
        request: env and policy by name, if they are kept.
        recheck: False if no episode ran once more, which the last file then says.
    """
    note = {} if recheck else {ledger.RECHECK: False}
    directory.finish(result.episodes)
    if request is not None:
        request.write(directory.path)
    if directory.shard is not None:
        directory.finish_shard(**note)
        return
    from tdcollect.pages.evaluation import write_report

    summary = result.summary()
    pages = write_report(directory.path, directory.manifest, result.episodes, summary, request)
    directory.write_results({**note, **summary.to_dict()}, pages)


def check_directory(path: Path) -> None:
    """Refuse a path that neither holds nor can become an evaluation."""
    if (path / ledger.MANIFEST).exists():
        ledger.read_manifest(path)
    else:  # a process may have died as it wrote the first file
        files.check_output(path, "an evaluation", (ledger.MANIFEST,))


def read_runs(path: Path) -> list[Any]:
    """Read the entries of the file of times, one per run; empty if there is none."""
    file = path / ledger.RUN
    advice = "remove the file: all others are written"
    runs: list[Any] = ledger.read_json(file, list, advice) if file.exists() else []
    return runs


_META = "meta.json"
_BFLOAT16 = np.dtype(np.uint16, metadata={"is": "bfloat16"})
_TYPE, _TENSORDICT = "_type", "<class 'tensordict._td.TensorDict'>"
_NOT_ENTRIES = ("shape", "device", _TYPE)  # in meta.json, beside the entries
_FORMAT = {"_format_version": 1, "_class": "tensordict:TensorDict"}  # there since tensordict 0.15
_ENCODED = re.compile(r'[/<>:"|?*\\ %\0-\x1f\x7f]')  # in the names of files, as tensordict has it
_MOST_DIMS = 64  # torch's own limit
_ROOM = 1 << 13  # bytes of a file's blocks besides its contents
_MOST_BYTES = 1 << 20  # of a meta.json


def write_trajectory(path: Path, data: TensorDict) -> None:
    """Write the data ``[L]`` of an episode: a folder of plain files of tensors."""
    lost = [key for key in data.keys(True) if keys.name_of(key) in _NOT_ENTRIES]
    if lost:
        raise ValueError(
            f"expected entries to keep that are called neither {' nor '.join(_NOT_ENTRIES)}, which "
            f"memory maps of TorchRL lose, got {lost}; rename the policy's, or do not keep the data"
        )
    with files.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = [value.numel() * value.element_size() for value in data.values(True, True)]
        # A disk that is full ends a process that writes to a map: ask first.
        if shutil.disk_usage(path.parent).free < sum(sizes) + _ROOM * len(sizes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data.memmap(path)


def link_trajectory(source: Path, path: Path) -> None:
    """Take over the data of an episode: links to the files that :func:`read_trajectory` reads.

    Files are copied where links cannot be made, as from one file system to another. The files of
    an episode are never written again, so that links are as safe as copies.
    """
    path.mkdir(parents=True)
    for file in _files(source):
        if stat.S_ISDIR(file.lstat().st_mode):
            link_trajectory(file, path / file.name)
            continue
        try:
            os.link(file, path / file.name, follow_symlinks=False)
        except OSError:
            shutil.copyfile(file, path / file.name, follow_symlinks=False)


def read_trajectory(path: Path) -> Any:
    """Read the data ``[L]`` of an episode that :func:`write_trajectory` wrote.

    They are mapped from their files when they are used; writes to them stay in memory and never
    reach a file. No code is run, whatever the files hold.

    Returns:
        A TensorDict; where it is not installed, what :func:`read_arrays` returns.
    """
    if find_spec("tensordict") is None or find_spec("torch") is None:
        return read_arrays(path)
    import torch
    from tensordict import TensorDict

    def mapped(file: Path, name: str, shape: list[int]) -> torch.Tensor:
        dtype, size = getattr(torch, name), prod(shape)
        if not size:  # has no file
            return torch.empty(shape, dtype=dtype)
        return torch.from_file(str(file), shared=False, size=size, dtype=dtype).view(shape)

    def made(entries: dict[str, Any], shape: list[int]) -> TensorDict:
        return TensorDict(entries, shape, device="cpu")

    with _reading(path):
        return _read(path, mapped, made).refine_names(keys.TIME)


def read_arrays(path: Path) -> dict[str, Any]:
    """Read the data of an episode as :func:`read_trajectory`, into NumPy arrays in nested dicts.

    ``bfloat16``, which NumPy lacks, is read as the ``uint16`` of the same bits.
    """

    def mapped(file: Path, name: str, shape: list[int]) -> np.ndarray[Any, Any]:
        if not prod(shape):
            return np.empty(shape, _dtype(name))
        return np.memmap(file, _dtype(name), "c", shape=tuple(shape)).view(np.ndarray)

    with _reading(path):
        found: dict[str, Any] = _read(path, mapped, lambda entries, shape: entries)
        return found


def _dtype(name: str) -> np.dtype[Any]:
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold the data of an episode as an evaluation keeps them: {error}; "
            "remove the directory, and run the episode again with replay()"
        ) from error


def trajectory_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files of an episode's data."""
    digest = hashlib.sha256()
    for file in _files(folder):
        if stat.S_ISDIR(file.lstat().st_mode):
            part = trajectory_digest(file)
        else:
            _check_kind(file, stat.S_ISREG, "a file")
            part = ledger.sha256(file)
        digest.update(os.fsencode(file.name) + f"\0{part}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return what lies in a folder of data, but for hidden files, which are never read."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _read(
    folder: Path,
    mapped: Callable[[Path, str, list[int]], Any],
    made: Callable[[dict[str, Any], list[int]], Any],
    within: Sequence[int] | None = None,
) -> Any:
    """Read a folder of entries, whose shapes begin with its own, and that with the one around."""
    _check_kind(folder, stat.S_ISDIR, "a folder")
    meta = _meta(folder / _META)
    shape = _shape(meta.get("shape"))
    if within is None and len(shape) != 1:
        raise ValueError(f"its shape is {shape}, and not [L]")
    _check_shape(folder, shape, within or ())
    found: dict[str, Any] = {}
    known = {_META}
    for key, entry in meta.items():
        named = key == "_names" and isinstance(entry, list)  # of dimensions, since tensordict 0.15
        if key in _NOT_ENTRIES or (key, entry) in _FORMAT.items() or named:
            continue
        name = _file_name(key)
        if not isinstance(entry, dict):
            raise ValueError(f"{folder / _META} says {entry!r} of {key!r}")  # noqa: TRY004
        if "type" in entry:
            if entry != {"type": "TensorDict"}:
                raise ValueError(f"{key!r} is of {entry['type']!r}, which is no tensor")
            found[key] = _read(folder / name, mapped, made, shape)
        else:
            name += ".memmap"
            dtype, size = _checked(folder / name, entry)
            _check_shape(folder / name, size, shape)
            found[key] = mapped(folder / name, dtype, size)
        known.add(name)
    # Other files are not read, but a file that may belong to the data is not ignored.
    for file in _files(folder):
        if file.name not in known:
            raise ValueError(f"{file.name} is there, which {_META} does not name")
    return made(found, shape)


def _file_name(key: str) -> str:
    """Return the name of an entry's file or folder, as tensordict encodes it."""
    name = _ENCODED.sub(lambda match: f"%{ord(match[0]):02X}", key)
    name = {"": "%", ".": "%2E", "..": "%2E%2E"}.get(name, name)
    if Path(name).name != name:
        raise ValueError(f"{key!r} names no file")
    return name


def _meta(file: Path) -> Mapping[str, Any]:
    size = _check_kind(file, stat.S_ISREG, "a file").st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{file.name} has {size} bytes")
    meta = json.loads(file.read_bytes())
    if not isinstance(meta, dict) or meta.get(_TYPE) != _TENSORDICT:
        raise ValueError(f"{file} describes no TensorDict")
    return meta


def _checked(file: Path, entry: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the dtype and the shape of a tensor, once its file is known to fit them."""
    name, shape = str(entry.get("dtype")).removeprefix("torch."), _shape(entry.get("shape"))
    try:
        item = _dtype(name).itemsize
    except TypeError:
        item = 0
    if not item or entry.get("is_nested", False) is not False:
        raise ValueError(f"{file.name} is no plain tensor: {dict(entry)!r}")
    size = _check_kind(file, stat.S_ISREG, "a file").st_size if prod(shape) else 0
    if size != prod(shape) * item:
        raise ValueError(
            f"{file.name} has {size} bytes, not those of shape {shape} and dtype {entry['dtype']}"
        )
    return name, shape


def _check_shape(path: Path, shape: Sequence[int], within: Sequence[int]) -> None:
    if list(shape[: len(within)]) != list(within):
        raise ValueError(f"the shape of {path.name} is {shape}, within {within}")


def _shape(value: Any) -> list[int]:
    if (
        isinstance(value, list)
        and len(value) <= _MOST_DIMS
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    ):
        return value
    raise ValueError(f"{value!r} is no shape")


def _check_kind(path: Path, kind: Any, called: str) -> Any:
    """Refuse links, which lead elsewhere, and pipes and devices, which have no end."""
    found = path.lstat()
    if not kind(found.st_mode):
        raise ValueError(f"{path.name} is not {called}")
    return found


def check_data(
    root: Path,
    record: ledger.Episode,
    manifest: Mapping[str, Any],
    listed: Mapping[str, str] | None,
    folder: str = ledger.TRAJECTORIES,
) -> dict[str, np.ndarray[Any, Any]]:
    """Check the data ``[L]`` that were kept of an episode against its record; return them by path.

    Those of a film, in another ``folder``, are listed nowhere.
    """
    path = ledger.trajectory_path(root, record.index, folder)
    data = dict(_flat(read_arrays(path)))
    try:
        counted = (manifest.get("returns") or {}).get("rewards")
        found = disagreements(record, data, manifest["entries"], counted)
    except (TypeError, ValueError) as error:  # of a dtype or a shape that no episode has
        found = [str(error)]
    if listed is not None and (now := trajectory_digest(path)) != listed.get(path.name):
        then = listed.get(path.name, "none")
        found.append(
            f"the digest of their files is {now}, in {ledger.RESULTS} or {ledger.SHARD} {then}"
        )
    if found:
        raise ValueError(
            f"the data kept of episode {record.index} are not those of its record: "
            f"{'; '.join(found)}. Run the episode again instead: replay({record.index})"
        )
    return data


def _flat(entries: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, entry in entries.items():
        if isinstance(entry, dict):
            yield from _flat(entry, (*path, name))
        else:
            yield keys.entry_path((*path, name)), entry
