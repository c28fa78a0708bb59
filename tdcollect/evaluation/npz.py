"""Files of arrays, ``.npz``: the same bytes whenever written, checked before they are read.

They are as NumPy writes them, and ``numpy.load`` reads them. Any name of an array is kept. Each
member is stored, at a multiple of 64 bytes. A file may be anybody's: nothing in it is evaluated or
run, and no memory is taken for an array before it is known to be as long as it says.
"""

from __future__ import annotations

import re
import stat
import string
import struct
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
_HEADERS: Any = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LOCAL = struct.Struct("<4s2x2H4x3I2H")  # the header of a member, before its name
_MOST, _LONGEST = 4096, 1000  # arrays in a file, and characters of a name
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
