"""The data of episodes in files, read safely whoever wrote them.

TorchRL's memory maps may hold pickles, which run code as they are read, and shapes that do not fit
their files. Here each file holds one plain tensor, and nothing else is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tdcollect import keys
from tdcollect._upstream.modules import MEMMAP_TYPE, encode_key_for_filesystem
from tdcollect.files import naming

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
    """Write the data ``[L]`` of an episode: a folder of plain files of tensors.

    Raises:
        ValueError: for an entry whose name TorchRL's memory maps cannot keep.
        OSError: for a full disk.
    """
    lost = [
        key for key in data.keys(True) if (key if isinstance(key, str) else key[-1]) in _NOT_ENTRIES
    ]
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

    Args:
        path: the directory of the episode.

    Raises:
        ValueError: for anything but plain files of tensors: a pickle, a link, a shape that does
            not fit its file.
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
    """Return the SHA-256 of the names and contents of all files of an episode's data.

    Raises:
        ValueError: for anything but plain files and folders.
    """
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
