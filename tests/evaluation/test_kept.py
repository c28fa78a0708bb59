"""Kept data are read as written, and run no code, whoever wrote them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdcollect
from tdcollect.evaluation.directory import read_entries, read_trajectory, write_trajectory

from .ledgers import change_data, pickled

DTYPES = {
    *(torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64),
}
NAMES = ["a/b", "..", ' %?\n\x7f:"é', "", "bfloat16:x", "shape", "device", "_type", "file"]
DEEP = ("next", "deep", "done")
NESTED = [("a", "b"), DEEP, ("next", "file"), ("next", "allow_pickle"), ("", "")]


def data() -> TensorDict:
    """Three steps, with unusual names and shapes."""
    entries: dict[Any, Any] = {"none": torch.zeros(3, 0), "turned": torch.arange(6).view(2, 3).T}
    entries |= {"row": torch.arange(3).expand(3, 3), "conj": torch.full((3,), 1j).conj()}
    for place, key in enumerate(NAMES):
        entries[key] = torch.full((3, place), float(place))
    entries[""] = {"": torch.ones(3)}
    entries |= {str(dtype): torch.tensor([0, 1, 2.5]).to(dtype) for dtype in DTYPES}
    made = TensorDict(entries, [3])
    for place, nested in enumerate(NESTED[:-1]):
        made[nested] = torch.full((3, 1), float(place), requires_grad=True)
    return made.refine_names("time")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_trajectory(tmp_path / "data.npz", data())
    return tmp_path / "data.npz"


def test_what_was_written_is_read(path: Path) -> None:
    """From files that need not be writable and do not stay open; what is written reaches none."""
    before = path.read_bytes()
    path.chmod(0o444)
    opened = len(os.listdir("/proc/self/fd"))
    kept = [read_trajectory(path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= opened  # others may have been closed since
    read, expected = kept[0], data()
    assert {*read.keys(True, True)} == {*expected.keys(True, True)} > {*NAMES[:3], *NESTED}
    for key, value in expected.items(True, True):
        assert (read[key].dtype, read[key].shape) == (value.dtype, value.shape)
        assert read[key].flatten().tolist() == value.flatten().tolist()
        assert not read[key].requires_grad
        read[key].zero_()
    assert (read.names, read["next"].names) == (expected.names, expected["next"].names)
    assert read.device == torch.device("cpu")
    assert path.read_bytes() == before


def test_the_same_data_are_the_same_bytes(path: Path) -> None:
    """In whatever order a policy and an env have made their entries."""
    entries = [*data().items(True, True)]
    turned = TensorDict(dict(reversed(entries)), [3])
    write_trajectory(path.with_name("turned"), turned)
    assert path.with_name("turned").read_bytes() == path.read_bytes()


def test_arrays_are_the_same_bits(path: Path) -> None:
    """As they are read where torch is not installed."""
    arrays, tensors = read_entries(path), data()
    assert {*arrays} == {*tensors.keys(True, True)}
    for key, array in arrays.items():
        tensor = tensors[key].detach().resolve_conj().contiguous()
        assert array.shape == tensor.shape
        assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert bool(array.dtype.metadata) == (tensor.dtype == torch.bfloat16)
    with np.load(path) as found:  # by the names that docs/protocol.md says
        names = {*found.files}
    assert {"a/b", "a%2Fb", "next/deep/done", "bfloat16:torch.bfloat16", "bfloat16%3Ax"} <= names


def test_what_is_no_tensor_is_not_kept(tmp_path: Path) -> None:
    """So that no file needs pickles."""

    def note(td: TensorDict) -> TensorDict:
        td["note"] = NonTensorData(object(), batch_size=td.batch_size)
        td["file"] = td["observation"]
        action = torch.zeros(*td.shape, 2, dtype=torch.int64)
        action[..., 0] = 1
        return td.set("action", action)

    out = tmp_path / "run"
    with pytest.warns(UserWarning, match=r"entries \['note'\] are no dense tensors, and are not"):
        result = tdcollect.evaluate(
            "CartPole-v1", note, 1, output_dir=out, keep_trajectories=True, progress=False
        )
    assert "note" not in result.trajectory(0)
    assert torch.equal(result.trajectory(0)["file"], result.trajectory(0)["observation"])
    assert [file.name for file in out.glob("trajectories/*")] == ["000000.npz"]


def test_what_numpy_has_no_dtype_for_is_refused(tmp_path: Path) -> None:
    odd = TensorDict({"odd": torch.zeros(3, dtype=torch.float8_e5m2)}, [3])
    with pytest.raises(TypeError, match="Float8") as refused:
        write_trajectory(tmp_path / "data.npz", odd)
    assert refused.value.__notes__[0].startswith("in 'odd': convert")
    assert not [*tmp_path.iterdir()]


def added(name: str, shape: Any = (3,), dtype: Any = np.float32) -> Callable[[Path], None]:
    new = {name: np.zeros(shape, dtype)}
    return lambda path: change_data(path, lambda found: found.update(new))


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (pickled, "'observation.npy' is no plain array, but object"),
        (added("more", (4,)), "its entries have no length in common"),
        (added("none", (2, 0)), "its entries have no length in common"),
        (added("more", ()), "more is float32 [], or there twice"),
        (added("more", dtype=">f4"), "more is >f4 [3], or there twice"),
        (added("bfloat16:more"), "bfloat16:more is float32 [3], or there twice"),
        (
            added("bfloat16:turned", dtype=np.uint16),
            "turned is uint16 [3], or there twice",
        ),
        (added("next"), "next is an entry, and has entries within"),
        (added("next/deep/done/more"), "next/deep/done is an entry, and has entries within"),
        (added("a%62"), "expected the name of an entry, as a/b or a%2Fb, got 'a%62'"),
        (added("float32:more"), "expected the name of an entry"),
        (lambda path: change_data(path, dict.clear), "its entries have no length in common"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not a zip file"),
        (Path.unlink, "No such file"),
    ],
)
def test_anything_else_is_refused(path: Path, tamper: Callable[[Path], Any], told: str) -> None:
    tamper(path)
    for reader in (read_trajectory, read_entries):
        with pytest.raises(ValueError, match="and run the episode again with replay") as refused:
            reader(path)
        assert told in str(refused.value)
    assert not (path.parent / "mark").exists()
