"""The files of an evaluation, read as data and checked against each other."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType

from tdcollect import keys
from tdcollect._upstream.torchrl import MEMMAP_TYPE, encode_key_for_filesystem
from tdcollect.check import is_count
from tdcollect.display import count_text, one_line
from tdcollect.evaluation.episodes.data import disagreements
from tdcollect.evaluation.ledger.manifest import MIXED, may_be_mixed
from tdcollect.evaluation.ledger.records import FORMAT, Episode, Shard, is_digest
from tdcollect.files import naming
from tdcollect.seeding import env_seed, policy_seed

_META = "meta.json"
_NOT_ENTRIES = ("shape", "device", MEMMAP_TYPE)  # in meta.json, beside the entries
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
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
    with naming(path):
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
    for file in sorted(source.iterdir()):
        if file.name.startswith("."):  # which is never read
            continue
        if stat.S_ISDIR(file.lstat().st_mode):
            link_trajectory(file, path / file.name)
            continue
        try:
            os.link(file, path / file.name, follow_symlinks=False)
        except OSError:
            shutil.copyfile(file, path / file.name, follow_symlinks=False)


def read_trajectory(path: Path) -> TensorDict:
    """Read the data ``[L]`` of an episode that :func:`write_trajectory` wrote.

    Tensors are mapped from their files when they are used; writes to them stay in memory and never
    reach a file. No code is run, whatever the files hold.
    """
    try:
        data = _read(path)
        if data.ndim != 1:
            raise ValueError(f"its shape is {list(data.shape)}, and not [L]")
        return data.refine_names(keys.TIME)
    except (OSError, ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold the data of an episode as an evaluation keeps them: {error}; "
            "remove the directory, and run the episode again with replay()"
        ) from error


def trajectory_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files of an episode's data."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):  # which is never read
            continue
        if stat.S_ISDIR(file.lstat().st_mode):
            part = trajectory_digest(file)
        else:
            _check_kind(file, stat.S_ISREG, "a file")
            with file.open("rb") as opened:
                part = hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(os.fsencode(file.name) + f"\0{part}\n".encode())
    return digest.hexdigest()


def _read(folder: Path) -> TensorDict:
    _check_kind(folder, stat.S_ISDIR, "a folder")
    meta = _meta(folder / _META)
    found: dict[str, Any] = {}
    files = {_META}
    for key, entry in meta.items():
        if key in _NOT_ENTRIES:
            continue
        name = _file_name(key)
        if not isinstance(entry, dict):
            raise ValueError(f"{folder / _META} says {entry!r} of {key!r}")  # noqa: TRY004
        if "type" in entry:
            if entry != {"type": "TensorDict"}:
                raise ValueError(f"{key!r} is of {entry['type']!r}, which is no tensor")
            found[key] = _read(folder / name)
        else:
            name += ".memmap"
            found[key] = _tensor(folder / name, entry)
        files.add(name)
    # Other files are not read, but a file that may belong to the data is not ignored.
    for file in sorted(folder.iterdir()):
        if file.name not in files and not file.name.startswith("."):
            raise ValueError(f"{file.name} is there, which {_META} does not name")
    return TensorDict(found, _shape(meta.get("shape")), device="cpu")


def _meta(file: Path) -> Mapping[str, Any]:
    size = _check_kind(file, stat.S_ISREG, "a file").st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{file.name} has {size} bytes")
    meta = json.loads(file.read_bytes())
    if not isinstance(meta, dict) or meta.get(MEMMAP_TYPE) != str(TensorDict):
        raise ValueError(f"{file} describes no TensorDict")
    return meta


def _tensor(file: Path, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES.get(str(entry.get("dtype"))), _shape(entry.get("shape"))
    if dtype is None or entry.get("is_nested", False) is not False:
        raise ValueError(f"{file.name} is no plain tensor: {dict(entry)!r}")
    count = prod(shape)
    if not count:  # has no file
        return torch.empty(shape, dtype=dtype)
    size = _check_kind(file, stat.S_ISREG, "a file").st_size
    if size != count * dtype.itemsize:
        raise ValueError(
            f"{file.name} has {size} bytes, not those of shape {shape} and dtype {entry['dtype']}"
        )
    return torch.from_file(str(file), shared=False, size=count, dtype=dtype).view(shape)


def _shape(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        raise ValueError(f"{value!r} is no shape")
    if not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError(f"{value!r} is no shape")
    return value


def _file_name(key: str) -> str:
    """Return the name of the entry's file or folder, within its folder."""
    name: str = encode_key_for_filesystem(key)
    if Path(name).name != name:
        raise ValueError(f"{key!r} names no file")
    return name


def _check_kind(path: Path, kind: Any, called: str) -> Any:
    """Refuse links, which lead elsewhere, and pipes and devices, which have no end."""
    found = path.lstat()
    if not kind(found.st_mode):
        raise ValueError(f"{path.name} is not {called}")
    return found


MANIFEST, EPISODES, RESULTS, RUN = "manifest.json", "episodes.jsonl", "results.json", "run.json"
REFUSED = "refused.json"
SHARD = "shard.json"
SUITE = "suite.json"
TRAJECTORIES = "trajectories"
RECHECK = "recheck"
"""The entry of the last file, false, of a run that ran no episode once more; else it is absent."""

_KEPT = re.compile("[0-9]{6}|[1-9][0-9]{6,17}")  # as trajectory_name() names a folder
_MOST_EPISODES = 10**9
_EXPLORATIONS = [name.lower() for name in ExplorationType.__members__]


class Problem(NamedTuple):
    """A problem in a file of an evaluation.

    Attributes:
        file: the file.
        text: the problem.
        line: the line, from 1; None if the problem is not in a single line.
    """

    file: Path
    text: str
    line: int | None = None

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        where = self.file if self.line is None else f"line {self.line} of {self.file}"
        return f"{where}: {self.text}"


def read_directory(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Episode]]:
    """Read the manifest and the records of an evaluation, which may be unfinished."""
    root = Path(path)
    manifest = read_manifest(root)
    return manifest, read_records(root, manifest)


def read_records(root: Path, manifest: Mapping[str, Any]) -> list[Episode]:
    """Read the records of an evaluation, by index."""

    def refuse(problem: Problem) -> None:
        raise ValueError(str(problem))

    return sorted(read_ledger(root, manifest, refuse), key=lambda episode: episode.index)


def read_manifest(root: Path) -> dict[str, Any]:
    """Read the manifest of an evaluation."""
    file = root / MANIFEST
    if not file.is_file():
        what = f"has no {MANIFEST}" if root.is_dir() else "is no directory"
        raise FileNotFoundError(
            f"expected the directory of an evaluation, got {root}, which {what}; name the one that "
            "the evaluation was written to"
        )
    found = read_object(file)
    if not isinstance(found.get("protocol"), int) or "episodes" not in found:
        raise ValueError(
            f"expected the manifest of an evaluation, got {file}, which is something else's; name "
            "another directory"
        )
    if found.get("format") != FORMAT:
        raise ValueError(
            f"expected format {FORMAT}, got {found.get('format')!r} in {file}: another version of "
            "tdcollect wrote it; read it with that one"
        )
    for name, accepts in _MANIFEST.items():
        value: Any = found
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not accepts(value):
            raise ValueError(
                f"expected {file} as tdcollect writes it, got {name} {value!r}; ask for the file "
                "as it was, or evaluate again in another directory"
            )
    given = found["seeds"].get("env")
    if given is None:
        return found
    count = number_of_episodes(found)
    if len(given) != count or len({*given}) < count:
        raise ValueError(
            f"expected {file} to have a seed of its own for each of {count_text(count, 'episode')},"
            f" got {len(given)} seeds, {len({*given})} of them distinct; ask for the file as it "
            "was, or evaluate again in another directory"
        )
    return found


def is_finished(root: Path) -> bool:
    """Tell whether an evaluation is finished, so that its ledger has a digest."""
    return (root / RESULTS).exists()


def was_rechecked(root: Path) -> bool | None:
    """Tell whether a finished evaluation or shard ran an episode once more; None if unfinished."""
    found = _last_file(root)
    return found.get(RECHECK) is not False if found else None


def _last_file(root: Path) -> dict[str, Any]:
    """Read the file that finishes an evaluation or a shard; empty if it is unfinished."""
    file = root / (RESULTS if is_finished(root) else SHARD)
    found = read_object(file) if file.exists() else {}
    return found if found.keys() & _DIGESTED.keys() else {}


def refusal_of(root: Path) -> str | None:
    """Return why an evaluation was refused, and what to do; None if it was not."""
    file = root / REFUSED
    if not file.exists():
        return None
    try:
        why = read_object(file).get("reason")
    except ValueError as error:
        return str(error)
    return f"the evaluation was refused: {why}; remove the directory to start anew"


def number_of_episodes(manifest: Mapping[str, Any]) -> int:
    """Return the number of episodes that a manifest asks for."""
    return len(asked_indices(manifest))


def asked_indices(manifest: Mapping[str, Any]) -> Sequence[int]:
    """Return the indices of the episodes that a manifest asks for, in its order."""
    asked: int | list[int] = manifest["episodes"]
    return range(asked) if isinstance(asked, int) else asked


class ShardFile(NamedTuple):
    """The mark of a directory that holds a shard, and not the whole evaluation.

    Attributes:
        shard: the shard.
        digests: the digests of its files by their name in ``results.json``; None until it is
            finished.
    """

    shard: Shard
    digests: Mapping[str, str] | None


def read_shard(root: Path) -> ShardFile | None:
    """Read which shard of an evaluation a directory holds; None if it is no shard's."""
    file = root / SHARD
    if not file.exists():
        return None
    found = read_object(file)
    digests = {name: found[name] for name in _DIGESTED if name in found}
    given = found.get("shard")
    whole = digests.keys() == _DIGESTED.keys() and all(map(is_digest, digests.values()))
    shard = None
    with suppress(ValueError):
        shard = Shard.of(given)
    if shard is None or (digests and not whole):
        raise ValueError(
            f"expected {file} as tdcollect writes it, got shard {given!r} and digests {digests}; "
            "ask for the file as it was, or evaluate again in another directory"
        )
    return ShardFile(shard, digests or None)


def trajectory_path(root: Path, index: int) -> Path:
    """Return the path of the data of an episode."""
    return root / TRAJECTORIES / trajectory_name(index)


def trajectory_name(index: int) -> str:
    """Return the name of the folder with the data of an episode."""
    return f"{index:06d}"


def kept_trajectories(root: Path) -> frozenset[int]:
    """Return the indices of the episodes that have a folder of data; it may hold anything."""
    folder = root / TRAJECTORIES
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return frozenset(int(name) for name in names if _KEPT.fullmatch(name))


def kept_digests(root: Path) -> dict[str, str] | None:
    """Return the digests of the folders with data, by name, as a finished evaluation lists them."""
    if not (last := _last_file(root)):
        return None
    found = last.get(TRAJECTORIES, {})
    if not isinstance(found, dict) or not all(
        _KEPT.fullmatch(name) and is_digest(value) for name, value in found.items()
    ):
        file = root / (RESULTS if is_finished(root) else SHARD)
        raise ValueError(
            f"expected {file} to have a digest for each folder in {TRAJECTORIES}, got something "
            "else; ask for the file as it was, or evaluate again in another directory"
        )
    return found


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    advice = "ask for the file as it was, or remove the directory and evaluate again"
    found: dict[str, Any] = read_json(file, dict, advice)
    return found


def read_json(file: Path, kind: type[dict[str, Any]] | type[list[Any]], advice: str) -> Any:
    """Read a file that holds one JSON value of a kind."""
    expected = f"expected {file} to hold a JSON {'object' if kind is dict else 'list'}, got"
    if file.exists() and not file.is_file():  # a pipe has no end
        raise ValueError(f"{expected} a thing that is no file; {advice}")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected} something else ({error}); {advice}") from error
    if not isinstance(found, kind):
        raise ValueError(  # noqa: TRY004, the file's content is wrong and no argument's type
            f"{expected} {type(found).__name__}; {advice}"
        )
    return found


def complete_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a journal, except a last one that its writer did not end."""
    if file.exists():
        with file.open("rb") as opened:
            yield from (line for line in opened if line.endswith(b"\n"))


def read_ledger(
    root: Path, manifest: Mapping[str, Any], report: Callable[[Problem], None]
) -> list[Episode]:
    """Read the valid records, in the order of their lines; report all problems."""
    file = root / EPISODES
    for name in (EPISODES, RESULTS, REFUSED, SHARD):  # a pipe has no end, nor has /dev/zero
        if (root / name).exists() and not (root / name).is_file():
            report(Problem(root / name, "it is not a file; ask for the directory as it was"))
            return []
    if (why := refusal_of(root)) is not None:
        report(Problem(root / REFUSED, why))
    if is_finished(root) and (root / SHARD).exists():
        why = f"it marks a shard, and {RESULTS} the whole evaluation: one was added; remove it"
        report(Problem(root / SHARD, why))
    digests = _digests(root, report)
    advice = (
        "ask for the directory as it was, or evaluate again in another one"
        if digests is not None
        else "remove the line, and the same command runs the episode again"
    )
    episode_seeds = _seeds(manifest)
    episodes: dict[int, Episode] = {}
    valid = True
    for line_number, line in enumerate(complete_lines(file), 1):
        wrong = None
        try:
            record = Episode.from_json(line.decode())
        except ValueError as error:
            wrong = str(error)
        else:
            seeds = episode_seeds(record.index)
            if seeds is None:
                wrong = f"the manifest asks for no episode {record.index}"
            elif record.index in episodes:
                wrong = f"episode {record.index} has a record already"
            elif seeds != (record.env_seed, record.policy_seed):
                wrong = (
                    f"expected the seeds {seeds[0]} and {seeds[1]} of episode {record.index}, as "
                    f"the manifest says, got {record.env_seed} and {record.policy_seed}"
                )
        if wrong is None:
            episodes[record.index] = record
        else:
            valid = False
            report(Problem(file, f"{wrong}; {advice}", line_number))
    if valid and digests is not None:
        _check_digests(root, *digests, report)
    return list(episodes.values())


def _digests(root: Path, report: Callable[[Problem], None]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the file with the digests of a finished evaluation or shard, and its content."""
    name = RESULTS if is_finished(root) else SHARD
    try:
        if name == RESULTS:
            return name, read_object(root / name)
        shard = read_shard(root)
    except ValueError as error:
        report(Problem(root / name, str(error)))
        return None
    return None if shard is None or shard.digests is None else (name, shard.digests)


def _check_digests(
    root: Path,
    name: str,
    digests: Mapping[str, Any],
    report: Callable[[Problem], None],
) -> None:
    """Check the files of a finished evaluation or shard against their digests in a file."""
    for entry, of in _DIGESTED.items():
        now = sha256(root / of) if (root / of).exists() else "none, as it is missing"
        if digests.get(entry) != now:
            report(
                Problem(
                    root / of,
                    f"its digest is {now}, and {digests.get(entry)} in {name}: one of the two "
                    "files was altered; ask for the directory as it was, or evaluate again in "
                    "another one",
                )
            )


def read_data(
    root: Path, record: Episode, manifest: Mapping[str, Any], listed: Mapping[str, str] | None
) -> TensorDict:
    """Read the data ``[L]`` that were kept of an episode, and check them against its record."""
    path = trajectory_path(root, record.index)
    data = read_trajectory(path)
    try:
        counted = (manifest.get("returns") or {}).get("rewards")
        found = disagreements(record, data, manifest["entries"], counted)
    except (TypeError, RuntimeError) as error:  # of a dtype or a shape that no episode has
        found = [str(error)]
    if listed is not None and (now := trajectory_digest(path)) != listed.get(path.name):
        then = listed.get(path.name, "none")
        found.append(f"the digest of their files is {now}, in {RESULTS} or {SHARD} {then}")
    if found:
        raise ValueError(
            f"the data kept of episode {record.index} are not those of its record: "
            f"{'; '.join(found)}. Run the episode again instead: replay({record.index})"
        )
    return data


def _seeds(manifest: Mapping[str, Any]) -> Callable[[int], tuple[int, int] | None]:
    """Return a function from index to seeds; None for episodes that are not asked for."""
    asked, root = manifest["episodes"], manifest["seeds"]["root"]
    given = manifest["seeds"].get("env")
    positions: Mapping[int, int] = {}
    if not isinstance(asked, int):
        positions = {index: position for position, index in enumerate(asked)}

    def seeds(index: int) -> tuple[int, int] | None:
        if (index >= asked) if isinstance(asked, int) else (index not in positions):
            return None
        own = env_seed(root, index) if given is None else given[positions.get(index, index)]
        return own, policy_seed(root, index)

    return seeds


Accepts = Callable[[Any], bool]


def _a(kind: Any) -> Accepts:
    return lambda value: isinstance(value, kind)


def _or_none(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


def _list_of(accepts: Accepts) -> Accepts:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _is_asked(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_count, value)) and len({*value}) == len(value)
    return is_count(value) and value <= _MOST_EPISODES


def _is_mixed(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        may_be_mixed(path) and isinstance(values, list) and len(values) > 1
        for path, values in value.items()
    )


_is_object, _is_text, _is_names = _a(Mapping), _a(str), _list_of(_a(str))
_is_positive = partial(is_count, least=1)

# The check of each entry of a manifest.
_MANIFEST: dict[str, Accepts] = {
    "env": _is_object,
    "env.id": _is_text,
    "episodes": _is_asked,
    "seeds": _is_object,
    "seeds.root": is_count,
    "seeds.env": _or_none(_list_of(is_count)),
    "max_episode_steps": _or_none(is_count),
    "policy": _is_object,
    "policy.class": _is_text,
    "policy.digest": _or_none(is_digest),
    "policy.exploration": lambda value: value in _EXPLORATIONS,
    "policy.mode": lambda value: value in (None, "eval", "train", "mixed"),
    "inference_batch_size": _is_positive,
    "inference_threads": _is_positive,
    "device": _is_text,
    "versions": _is_object,
    "platform": _is_object,
    MIXED: _or_none(_is_mixed),
    "git": _or_none(_is_object),
    "entries.observation": _is_names,
    "entries.action": _is_names,
    "entries.reward": _or_none(_is_names),
    "returns": _or_none(_is_object),
    "returns.rewards": _or_none(_is_names),
}
_DIGESTED = {"ledger": EPISODES, "manifest": MANIFEST}
