"""Files of arrays, ``.npz``: the same bytes whenever written, checked before they are read.

They are as NumPy writes them, and ``numpy.load`` reads them, but for what NumPy's writer and reader
do not do. Any name of an array is kept. Each member is stored, at a multiple of 64 bytes, so that
it can be mapped in place. A file may be anybody's: nothing in it is evaluated or run, and no memory
is taken before all of it is known to be as long as it says.
"""

from __future__ import annotations

import io
import re
import stat
import string
import struct
import sys
import zlib
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np

from tdcollect import files
from tdcollect.keys import Key, as_path

_END = ".npy"
_PLAIN = " " + string.punctuation.translate(dict.fromkeys(map(ord, "%/:")))  # in a member's name
_DTYPE = r"[|<>](?:b1|[iu][1248]|f[248]|c8|c16)"
# The beginning of a member, in the two versions of it that plain arrays have.
_HEADER = re.compile(
    rb"\x93NUMPY(?P<size>\x01\0..|\x02\0....)(?P<text>\{'descr': '(?P<dtype>" + _DTYPE.encode() +
    rb")', 'fortran_order': (?P<fortran>False|True), "
    rb"'shape': \((?P<shape>(?:\d{1,19}, ?)*(?:\d{1,19})?)\),? ?\} *\n)",
    re.DOTALL,
)  # fmt: skip
_LOCAL = struct.Struct("<4s2x2H4x3I2H")  # the header of a member, before its name
_MOST, _LONGEST = 4096, 1000  # arrays in a file, and characters of a name
_MOST_LISTED = _MOST * 5000  # bytes of the list of members
_MOST_HEADER = 4096  # bytes
_BIG = 1 << 30  # bytes from which a member's size has 64 bits
_ALIGNED = 64


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
            big = array.nbytes > _BIG
            names = len(member.filename.encode())
            pad = -(file.tell() + _LOCAL.size + names + 4 + 20 * big) % _ALIGNED
            member.extra = struct.pack("<2H", 0xD935, pad) + bytes(pad)  # as Android pads
            with archive.open(member, "w", force_zip64=big) as opened:
                np.lib.format.write_array(opened, np.asarray(array, order="C"), (1, 0), False)


def read_arrays(path: Path, mapped: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of a file by name, as :func:`write_arrays` or ``numpy.savez`` writes them.

    Args:
        path: the file.
        mapped: map the arrays from the file, which must not change as long as they are used. What
            is written to them stays in memory. Else they are read, and their checksums compared.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: for a link, a file that is damaged, and members that these would not write.
    """
    is_file = stat.S_ISREG(path.lstat().st_mode)
    try:
        if not is_file:
            raise ValueError("it is a link, a folder, a pipe or a device")
        with _File(io.FileIO(path)) as file, ZipFile(file) as archive:
            members = _members(file, archive)
        whole = _mapped(path) if mapped else np.fromfile(path, np.uint8)
        arrays = {}
        for name, (info, begin, how) in members.items():
            if not mapped and zlib.crc32(whole[begin : begin + info.file_size].data) != info.CRC:
                raise ValueError(f"{name!r} is damaged: it has another checksum")
            arrays[name] = np.ndarray(buffer=whole, **how)
    except (ValueError, BadZipFile, struct.error, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(
            f"expected {path} to be an .npz file of plain arrays that are stored, but {error}; ask "
            "for the file as it was"
        ) from error
    return arrays


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


class _File(io.BufferedReader):
    """A file of which nobody reads more at once than a list of members may take."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # of what follows the list of members, which is short
            size = _MOST_LISTED
        if size > _MOST_LISTED:
            raise ValueError(f"its list of members has {size} bytes")
        return super().read(size)


def _check_names(names: Collection[str]) -> None:
    odd = [n for n in names if len(n) > _LONGEST or re.search(r"[\0-\x1f\x7f\ud800-\udfff]", n)]
    if odd or len(names) > _MOST:
        raise ValueError(
            f"expected at most {_MOST} arrays, with names of at most {_LONGEST} characters, no "
            f"control characters, got {len(names)}, {ascii(odd)[:100]}; use member_name()"
        )


_Member = tuple[ZipInfo, int, dict[str, Any]]
"""A member, where its content begins, and the array that it holds, as NumPy takes it."""


def _members(file: _File, archive: ZipFile) -> dict[str, _Member]:
    """Return the arrays of a file, which lie in it one after the other from its beginning."""
    members: dict[str, _Member] = {}
    at = 0
    for info in archive.infolist():
        name = info.orig_filename.removesuffix(_END)
        if name in members:
            raise ValueError(f"two members are called {info.orig_filename!r}")
        members[name] = member = _member(file, info, at)
        at = member[1] + info.file_size
    if at != archive.start_dir:
        raise ValueError(f"its members end at {at}, and their list begins at {archive.start_dir}")
    _check_names(members)
    return members


def _member(file: _File, info: ZipInfo, begin: int) -> _Member:
    name, size = info.orig_filename, info.file_size
    if info.compress_type or info.flag_bits & ~0x800 or info.compress_size != size:
        raise ValueError(f"{name!r} is compressed, encrypted or streamed")
    file.seek(begin)
    mark, *plain, packed, unpacked, names, more = _LOCAL.unpack(file.read(_LOCAL.size))
    encoded = name.encode("utf-8" if info.flag_bits else "ascii")
    if (
        (info.header_offset, mark) != (begin, b"PK\3\4")
        or plain != [info.flag_bits, 0, info.CRC]
        or not {packed, unpacked} <= {size, 0xFFFFFFFF}
        or file.read(names) != encoded
        or not name.endswith(_END)
    ):
        raise ValueError(f"{name!r} is no array, or not where and what the list of members says")
    start = begin + _LOCAL.size + names + more
    file.seek(start)
    head = _HEADER.match(file.read(min(size, _MOST_HEADER)))
    if head is None or int.from_bytes(head["size"][2:], "little") != len(head["text"]):
        raise ValueError(f"{name!r} does not begin as a plain array")
    shape = tuple(int(length) for length in head["shape"].replace(b",", b" ").split())
    dtype, order = np.dtype(head["dtype"].decode()), "F" if head["fortran"] == b"True" else "C"
    if (wanted := head.end() + prod(shape) * dtype.itemsize) != size:
        raise ValueError(f"{name!r} has {size} bytes, and by its shape {shape} {wanted}")
    how = {"shape": shape, "dtype": dtype, "order": order, "offset": start + head.end()}
    return info, start, how


def _mapped(path: Path) -> Any:
    """Map a file; where torch is there, as its maps need no open file, of which few are allowed."""
    if (torch := sys.modules.get("torch")) is None:
        return np.memmap(path, np.uint8, "c")
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
