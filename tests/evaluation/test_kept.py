"""Kept data are read as written, and run no code, whoever wrote them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdcollect
from tdcollect.evaluation.directory import read_arrays, read_trajectory, write_trajectory

from .ledgers import alter

DTYPES = [torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.complex64]
SINCE_0_15 = {"_format_version": 1, "_class": "tensordict:TensorDict", "_names": ["time"]}


def data() -> TensorDict:
    """Three steps, with unusual names and shapes."""
    entries = {
        "a/b": torch.arange(6).view(3, 2),
        "..": torch.ones(3),
        ' %?\n\x7f:"é': torch.ones(3),
        "": torch.ones(3, 1),
        "none": torch.zeros(3, 0),
        "next": {"deep": {"done": torch.tensor([[False], [False], [True]])}},
    }
    return TensorDict({**entries, **{str(d): torch.ones(3).to(d) for d in DTYPES}}, [3])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    data().memmap(tmp_path / "data")
    change(tmp_path / "data" / "next", **SINCE_0_15)
    return tmp_path / "data"


def test_what_was_written_is_read(path: Path) -> None:
    """From files that need not be writable and do not stay open; what is written reaches none."""
    before = {file: file.read_bytes() for file in path.rglob("*.memmap")}
    for file in path.rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    opened = len(os.listdir("/proc/self/fd"))
    kept = [read_trajectory(path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= opened  # others may have been closed since
    read, expected = kept[0], TensorDict.load_memmap(path, allow_pickle=False)
    assert {*read.keys(True, True)} == {*expected.keys(True, True)} == {*data().keys(True, True)}
    for key, value in expected.items(True, True):
        assert (read[key].dtype, read[key].shape) == (value.dtype, value.shape)
        assert read[key].flatten().tolist() == value.flatten().tolist()
        read[key].zero_()
    assert read.names == ["time"]
    assert read.device == expected.device
    assert {file: file.read_bytes() for file in path.rglob("*.memmap")} == before


def test_arrays_are_the_same_bits(path: Path) -> None:
    """As they are read where torch is not installed."""
    arrays, tensors = read_arrays(path), read_trajectory(path)
    assert {*arrays} == {*tensors.keys()}
    found = {**arrays, "deep": arrays["next"]["deep"]["done"]}
    for name in ["a/b", "..", "", "none", *map(str, DTYPES), "deep"]:
        tensor = tensors["next", "deep", "done"] if name == "deep" else tensors[name]
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["shape", "device", "_type"])
def test_names_that_memory_maps_lose_are_refused(tmp_path: Path, name: str) -> None:
    """TorchRL's own reader gives the data without them."""
    lost = TensorDict({"a": torch.zeros(3), name: torch.zeros(3)}, [3])
    for data, said in [(lost, f"['{name}']"), (TensorDict({"b": lost}, [3]), f"[('b', '{name}')]")]:
        with pytest.raises(ValueError, match="which memory maps of TorchRL lose") as refused:
            write_trajectory(tmp_path / "data", data)
        assert said in str(refused.value)
    assert not (tmp_path / "data").exists()
    lost.memmap(tmp_path / "data")
    assert set(TensorDict.load_memmap(tmp_path / "data", allow_pickle=False).keys()) == {"a"}


def test_what_is_no_tensor_is_not_kept(tmp_path: Path) -> None:
    """So that no file needs pickles."""

    def note(td: TensorDict) -> TensorDict:
        td["note"] = NonTensorData(object(), batch_size=td.batch_size)
        action = torch.zeros(*td.shape, 2, dtype=torch.int64)
        action[..., 0] = 1
        return td.set("action", action)

    out = tmp_path / "run"
    with pytest.warns(UserWarning, match=r"entries \['note'\] are no dense tensors, and are not"):
        result = tdcollect.evaluate(
            "CartPole-v1", note, 1, output_dir=out, keep_trajectories=True, progress=False
        )
    assert "note" not in result.trajectory(0)
    assert {file.suffix for file in out.glob("trajectories/**/*.*")} == {".memmap", ".json"}


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return open, (self.mark, "w")


def change(folder: Path, **entries: Any) -> None:
    alter(folder / "meta.json", entries)


def entry(name: str, shape: Any, dtype: Any = "torch.uint8", **more: Any) -> Callable[[Path], None]:
    """Have meta.json name a tensor."""
    return lambda folder: change(folder, **{name: {"shape": shape, "dtype": dtype, **more}})


def sizes(*shape: Any, dtype: Any = "torch.int64", **more: Any) -> Callable[[Path], None]:
    return entry("a/b", list(shape), dtype, **more)


def meta(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "meta.json").write_text(text)


def pickled(folder: Path, mark: Path | None = None) -> None:
    payload = Payload(mark or folder.parent / "mark")
    (folder / "other.pickle").write_bytes(pickle.dumps(payload))


def tensorclass(folder: Path, mark: Path | None = None) -> None:
    """A file as tensordict writes it for a value that is no tensor."""
    kind = "<class 'tensordict.tensorclass.NonTensorData'>"
    pickled(folder, mark)
    meta(json.dumps({"_type": kind, "data": None}))(folder)


def nested(kind: str, mark: Path | None = None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "extra").mkdir()
        change(folder, extra={"type": kind})
        tensorclass(folder / "extra", mark or folder.parent / "mark")

    return make


def outside(folder: Path) -> None:
    (folder.parent / "secret.memmap").write_bytes(b"secret")
    entry("../secret", [3, 2])(folder)


def link(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"secret")
    (folder / "linked.memmap").symlink_to(folder.parent / "secret")
    entry("linked", [3, 2])(folder)


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def pipe(name: str) -> Callable[[Path], None]:
    """Reading it would wait for ever."""

    def make(folder: Path) -> None:
        entry("pipe", [3, 2])(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (pickled, "other.pickle is there, which meta.json does not name"),
        (tensorclass, "describes no TensorDict"),
        (nested("NonTensorData"), "'extra' is of 'NonTensorData', which is no tensor"),
        (nested("TensorDict"), "describes no TensorDict"),
        (outside, "No such file"),
        (entry("/etc/passwd", [3, 2]), "No such file"),
        (link, "linked.memmap is not a file"),
        (linked_folder, "data is not a folder"),
        (pipe("pipe.memmap"), "pipe.memmap is not a file"),
        (pipe("meta.json"), "meta.json is not a file"),
        (sizes(2**62, 2**62), "has 48 bytes, not those of"),
        (sizes(3, 0, 2**62, 2**62), "overflow"),
        (sizes(3, -2), "is no shape"),
        (sizes(3, True), "is no shape"),
        (sizes(*[1] * 65), "is no shape"),
        (sizes(3, 2, is_nested=True), "is no plain tensor"),
        (sizes(3, 2, dtype="torch.load"), "is no plain tensor"),
        (sizes(3, 2, dtype=["torch.int64"]), "is no plain tensor"),
        (sizes(2, 3), "does not hold the data"),  # another length than the episode's
        (lambda folder: change(folder, none=3), "says 3 of 'none'"),
        (lambda folder: change(folder, _format_version=2), "says 2 of '_format_version'"),
        (lambda folder: change(folder, shape=[4]), "does not hold the data"),
        (lambda folder: change(folder, shape={}), "is no shape"),
        (meta("[1]"), "describes no TensorDict"),
        (meta("{"), "does not hold the data"),
        (meta("[" * 100_000), "does not hold the data"),
        (meta(" " * (1 << 20) + "{}"), "has 1048578 bytes"),
        (lambda folder: (folder / "meta.json").unlink(), "No such file"),
    ],
)
def test_anything_else_is_refused(path: Path, tamper: Callable[[Path], None], told: str) -> None:
    tamper(path)
    with pytest.raises(ValueError, match="and run the episode again with replay") as refused:
        read_trajectory(path)
    assert told in str(refused.value)
    assert not (path.parent / "mark").exists()


def test_the_payload_would_run(path: Path) -> None:
    """TorchRL's own reader runs it: the tests above are not empty."""
    tensorclass(path)
    with pytest.raises(OSError, match="not readable"):  # what the payload gives is no dict
        TensorDict.load_memmap(path, allow_pickle=True)
    assert (path.parent / "mark").exists()
