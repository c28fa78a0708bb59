"""Files of arrays keep every bit, are the same whenever written, and are no danger, whoever's."""

from __future__ import annotations

import copy
import errno
import io
import itertools
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tdcollect.evaluation import step_files
from tdcollect.evaluation.step_files import key_of, member_name, read_arrays, write_arrays

from .ledgers import Payload, pipe

DTYPES = [*"?bBhHiIqQefdFD", ">f4"]
SMALL = {"action": np.arange(6, dtype="u1").reshape(3, 2), "next/done": np.array([0, 0, 1], bool)}
ODD_NAMES = ["file", "allow_pickle", "", "a.npy", "é", "../../etc/passwd", "/x", "a" * 1000]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(ODD_NAMES) | st.text(st.characters(min_codepoint=32, codec="ascii")),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
        ),
        max_size=4,
    ).filter(lambda found: not any("\x7f" in name for name in found))
)
def test_what_is_written_is_read(tmp_path_factory, held: dict[str, Any]) -> None:
    """By NumPy, too, where it tells names apart; arrays lie where processors like them."""
    path = tmp_path_factory.mktemp("npz") / "some.npz"
    write_arrays(path, {name: np.asarray(array, order="F") for name, array in held.items()})
    before, read = path.read_bytes(), read_arrays(path)
    assert [*read] == [*held]
    for name, array in held.items():
        assert same(read[name], array)
        assert read[name].flags.aligned
        read[name][...] = 0  # which no file is told
    assert path.read_bytes() == before
    with np.load(path) as other:
        assert all(same(other[f"{name}.npy"], array) for name, array in held.items())


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "numpy.npz"
    held = {"a": np.asfortranarray(np.arange(12.0).reshape(3, 4)), "b": np.ones(2), "c": np.eye(2)}
    np.savez(path, a=held["a"], b=held["b"])
    second = io.BytesIO()  # the other version of an array's header
    np.lib.format.write_array(second, held["c"], (2, 0))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("c.npy", second.getvalue())
    read = read_arrays(path)
    assert [*read] == [*held]
    assert all(same(read[name], array) for name, array in held.items())
    assert read["a"].flags.f_contiguous


def test_the_same_arrays_are_the_same_bytes_later(tmp_path: Path, monkeypatch) -> None:
    write_arrays(tmp_path / "now", SMALL)
    monkeypatch.setattr("time.time", lambda: 2e9)
    write_arrays(tmp_path / "later", {name: array.copy() for name, array in SMALL.items()})
    (tmp_path / "later.part").symlink_to(tmp_path / "now")  # is replaced, not followed
    write_arrays(tmp_path / "later", SMALL)
    assert (tmp_path / "later").read_bytes() == (tmp_path / "now").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["later", "now"]


def test_large_members_have_sizes_of_64_bits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(step_files, "_BIG", 0)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 5)  # in the list, too
    write_arrays(tmp_path / "big", SMALL)
    assert (tmp_path / "big").read_bytes().count(b"\xff" * 8) == 4
    read = read_arrays(tmp_path / "big")
    assert all(
        same(read[name], array) and read[name].flags.aligned for name, array in SMALL.items()
    )


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.zeros(2, [("a", "O")]), np.zeros(2, [("a", "f4")]), np.array(["a"])]
    + [np.zeros(2, "M8[s]"), np.zeros(2, "V3"), np.zeros(2, np.longdouble)],
)
def test_other_arrays_are_refused(tmp_path: Path, array: Any) -> None:
    path = tmp_path / "some.npz"
    with pytest.raises(ValueError, match=r"expected arrays of bool, integers, .* got 'a' of"):
        write_arrays(path, {"b": np.ones(2), "a": array})
    assert not path.exists()
    if array.dtype.hasobject:
        array = np.full(array.shape, Payload(tmp_path / "mark"), array.dtype)
    np.savez(path, a=array)
    with pytest.raises(ValueError, match=r"'a\.npy' is no plain array, but"):
        read_arrays(path)
    assert not (tmp_path / "mark").exists()
    if array.dtype.hasobject:  # so that this is not empty
        np.load(path, allow_pickle=True)["a"]
        assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\ud800", "a" * 1001])
def test_names_that_cannot_be_kept_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"control characters, .*; use member_name\(\)"):
        write_arrays(tmp_path / "some", {name: np.ones(1)})
    with pytest.raises(ValueError, match=r"expected at most 4096 arrays, .* got 4097"):
        write_arrays(tmp_path / "some", dict.fromkeys(map(str, range(4097)), np.ones(1)))
    assert not [*tmp_path.iterdir()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text() | st.sampled_from(["%2F", "bfloat16:a", "\ud800"]), min_size=1))
def test_names_are_those_of_one_key(names: list[str]) -> None:
    key = tuple(names) if len(names) > 1 else names[0]
    name = member_name(key)
    assert key_of(name) == key
    assert name.isascii()
    assert name.isprintable()
    assert ":" not in name


def test_other_names_are_those_of_no_key() -> None:
    assert (member_name(("a", "b")), member_name("a/b")) == ("a/b", "a%2Fb")
    for name in ("a%2fb", "a%61", "é", "a:b", "%", "%FF", "a\nb"):
        with pytest.raises(ValueError, match=r"expected the name of an entry|can't decode"):
            key_of(name)


# Files that are not as they were written


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "some.npz", SMALL)
    return tmp_path / "some.npz"


def read_or_refused(path: Path) -> bool:
    """Tell whether a file was refused; if not, it gives no other arrays."""
    with suppress(ValueError):
        assert all(same(array, SMALL[name]) for name, array in read_arrays(path).items())
        return False
    return True


def test_a_file_that_was_cut_is_refused_at_every_length(small: Path) -> None:
    whole = small.read_bytes()
    assert not read_or_refused(small)
    for length in range(len(whole)):
        small.write_bytes(whole[:length])
        assert read_or_refused(small)


def test_no_altered_byte_gives_other_arrays(small: Path) -> None:
    whole = small.read_bytes()
    for at, bits in itertools.product(range(len(whole)), (1, 0x80)):
        altered = bytearray(whole)
        altered[at] ^= bits
        small.write_bytes(altered)
        read_or_refused(small)


def stored(name: str, content: bytes, how: int = zipfile.ZIP_STORED) -> Callable[[Path], object]:
    """Write a file with one member more."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "a", how) as archive:
            archive.writestr(name, content)

    return write


def npy(text: str, data: bytes = b"\0" * 8) -> bytes:
    """An array as it is stored, with any header."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + data


def header(shape: Any, dtype: Any = "|u1", data: bytes = b"\0" * 8, more: str = "") -> bytes:
    return npy(f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, {more}}}", data)


SOUND = header((8,))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def overlapping(path: Path) -> None:
    """A thousand members that are the same bytes: a small file would take much memory."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", SOUND)
        archive.filelist *= 1000


def bomb(path: Path) -> None:
    """Members of other names that are the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", SOUND)
        for index in range(100):
            archive.filelist.append(copy.copy(archive.filelist[0]))
            archive.filelist[-1].filename = f"{index}.npy"
            archive.filelist[-1].file_size = archive.filelist[-1].compress_size = 1000


def long_list(path: Path) -> None:
    """A list of members of terabytes, in a file with a hole."""
    size = 1 << 42
    with path.open("r+b") as file:
        file.seek(size)
        file.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, 0))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, size, 1))
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", *[0xFFFF] * 4, *[0xFFFFFFFF] * 2, 0))


def many(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(4097):
            archive.writestr(str(index) + ".npy", SOUND)


def encrypted(path: Path) -> None:
    whole = path.read_bytes()
    at = whole.index(b"PK\1\2")
    path.write_bytes(whole[: at + 8] + b"\1" + whole[at + 9 :])


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (linked, "it is a link, a folder, a pipe or a device"),
        (pipe, "it is a link, a folder, a pipe or a device"),
        (lambda path: path.write_text("no archive"), "File is not a zip file"),
        (stored("a.npy", SOUND, zipfile.ZIP_DEFLATED), "'a.npy' is compressed"),
        (stored("a.npy", bytes(1 << 24), zipfile.ZIP_DEFLATED), "longer than the file"),
        (encrypted, "'action.npy' is compressed or encrypted"),
        (stored("run.py", SOUND), "'run.py' is no plain array"),
        (stored("a.npy", b"print()"), "'a.npy' does not begin as a plain array"),
        (stored("a.npy", pickle.dumps([1])), "'a.npy' does not begin as a plain array"),
        (stored("action.npy", SOUND), "two of its members have one name"),
        (stored("a.npy", header((9,))), "has 76 bytes, and by its shape 77"),
        (stored("a.npy", header((1 << 62, 1 << 62))), "and by its shape"),
        (stored("a.npy", header((0, 1 << 62, 1 << 62), data=b"")), "array is too big"),
        (stored("a.npy", header((1,) * 65, data=b"\0")), "maximum supported dimension"),
        *(
            (stored("a.npy", content), "'a.npy' does not begin as a plain array")
            for content in [
                header("open('mark', 'w')"),
                header((8,), more="'more': 1"),
                header("(" * 4000),
                header((8,), more=" " * 5000),
                npy("[1]"),
                SOUND.replace(b"NUMPY\1", b"NUMPY\3"),
                SOUND[:8] + b"\0\0" + SOUND[10:],
            ]
        ),
        (stored("a.npy", header((-8,))), "and by its shape"),
        (stored("a.npy", header((8,), "|O")), "'a.npy' is no plain array, but object"),
        (stored("a.npy", header((8,), [("a", "|u1")])), "'a.npy' is no plain array"),
        (overlapping, "two of its members have one name"),
        (bomb, "its members are longer than the file"),
        (many, "expected at most 4096 arrays, with names of at most 1000 characters, no"),
        (long_list, ""),
    ],
)
def test_anything_else_is_refused_before_memory_is_taken(
    small: Path, monkeypatch, tamper: Callable[[Path], object], told: str
) -> None:
    tamper(small)
    monkeypatch.chdir(small.parent)
    with pytest.raises(ValueError, match=r"to be an \.npz file of plain arrays") as refused:
        read_arrays(small)
    assert told in str(refused.value)
    assert not Path("mark").exists()


def test_a_disk_that_is_full_leaves_the_file_as_it_was(small: Path, monkeypatch) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 1000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    before = small.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(path, mode))
        with pytest.raises(OSError, match=r"No space left on device; .*: '.*some\.npz'"):
            write_arrays(small, {"a": np.zeros(10_000)})
    assert (small.read_bytes(), os.listdir(small.parent)) == (before, ["some.npz"])
    write_arrays(small, {"a": np.zeros(10_000)})
    assert [*read_arrays(small)] == ["a"]


def test_a_file_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none")
