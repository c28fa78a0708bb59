"""Checkpoints are complete or absent, and hold plain values."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as numpy_st
from torch import nn

from tdcollect import load_checkpoint, save_checkpoint
from tdcollect.states import pack, unpack

from .forkserver import start

pytestmark = pytest.mark.behaviour(29)


def save_for_ever(path: Path, number: int) -> None:
    for i in itertools.count(number):
        save_checkpoint(path, number=i, tensor=torch.full((500_000,), float(i)))


@pytest.mark.parametrize("content", [b"some text", b"", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_checkpoint_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notes.txt").write_bytes(content)
    message = r"expected .*notes\.txt to be as save_checkpoint\(\) writ"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "notes.txt")


def test_a_full_disk_names_the_checkpoint(tmp_path: Path, monkeypatch) -> None:
    """Torch has an error of its own for it, without a path."""
    path = save_checkpoint(tmp_path / "run.pt", number=1)

    def full(states: Any, file: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672]")  # noqa: B904

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="free some space: the same command goes on") as error:
        save_checkpoint(path, number=2)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert load_checkpoint(path) == {"number": 1}


def test_killed_while_saving_the_previous_checkpoint_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save_checkpoint(path, number=0, tensor=torch.zeros(500_000))
    torn = 0
    for _ in range(20):
        before = int(load_checkpoint(path)["number"])
        child = start(save_for_ever, path, before + 1)
        while load_checkpoint(path)["number"] == before:  # whole at each moment, too
            time.sleep(0.01)
        while not list(tmp_path.glob(".*.part")):
            time.sleep(0.0001)
        child.kill()
        child.join()
        torn += len(list(tmp_path.glob(".*.part")))
        found = load_checkpoint(path)
        assert found["number"] > before
        assert (found["tensor"] == found["number"]).all()
        if torn == 2:
            break
    assert torn, "no kill came amid a save; the test shows nothing"
    for left in tmp_path.glob(".*.part"):
        os.utime(left, (0, time.time() - 3700))
    save_checkpoint(path, number=-1)
    assert list(tmp_path.iterdir()) == [path]  # what the dead left long ago is gone


def test_an_error_while_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_checkpoint("run.pt", number=1)
    monkeypatch.chdir("/")  # its path holds wherever the process goes
    with pytest.raises(AttributeError, match="local object"):
        save_checkpoint(path, number=2, odd=lambda: None)
    assert load_checkpoint(path) == {"number": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_parts_are_saved_and_loaded_by_name(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(3, 2)
        return net, torch.optim.Adam(net.parameters())

    net, optimizer = parts()
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path / "deep" / "run.pt", net=net, optimizer=optimizer, updates=7)
    other, other_optimizer = parts()
    states = load_checkpoint(path, net=other, optimizer=other_optimizer)
    assert states["updates"] == 7
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
    found, expected = other_optimizer.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "run.pt", updates=7)
    with pytest.raises(KeyError, match=r"expected some of the parts \['updates'\]"):
        load_checkpoint(path, net=nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"expected updates to have a load_state_dict\(\), got int"):
        load_checkpoint(path, updates=8)
    with pytest.raises(TypeError, match="expected parts to save, by name"):
        save_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "nowhere.pt")


# ------------------------------------------------------------------------------------ plain values

ARRAYS = numpy_st.arrays(
    st.sampled_from(["?", "u1", "<i4", "<u8", ">i8", "<f2", "<f4", "<f8"]),
    numpy_st.array_shapes(min_dims=0, max_dims=3, min_side=0),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | ARRAYS
    | ARRAYS.filter(lambda array: array.ndim == 0).map(lambda array: array[()])
    | ARRAYS.map(lambda array: torch.tensor(array.astype("=f8")))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    """Return whether two values are bit-identical, with types and shapes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and alike(one.numpy(), other.numpy())
    if isinstance(one, (np.ndarray, np.generic)):
        same = one.dtype == other.dtype and one.shape == other.shape
        return bool(same and one.tobytes() == other.tobytes())
    return repr(one) == repr(other)


@settings(max_examples=50)
@given(VALUES)
def test_plain_values_come_back_from_one_string_and_tensors(value: Any) -> None:
    packed = pack(value)
    assert alike(unpack(packed), value)
    assert isinstance(packed.pop("form"), str)
    assert all(isinstance(tensor, torch.Tensor) and tensor.numel() for tensor in packed.values())


@pytest.mark.parametrize("odd", [object(), {1, 2}, np.array([None]), np.array(["a"]), OrderedDict])
def test_other_values_are_refused(odd: Any) -> None:
    with pytest.raises(TypeError, match="expected dicts, lists and tuples of numbers, strings"):
        pack({"deep": [odd]})
