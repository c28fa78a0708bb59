"""States to save: nested values as flat dicts of tensors, and checkpoints of a training run.

Nested Python and NumPy values are packed into tensors and one string. ``torch.save`` and
``torch.load(weights_only=True)`` take these, as do TorchRL's checkpoints and the pipes of its
collectors in other processes. Reading one runs no code.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdcollect.files import write_atomically

_FORM = "form"
_TENSOR_KINDS = "biuf"


def pack(value: Any) -> dict[str, Any]:
    """Flatten dicts, lists and tuples of arrays, tensors, numbers, strings, bytes, bools and None.

    Returns ``"form"``, a string that describes the nesting, and tensors under ``"0"``, ``"1"``...
    TypeError for values of other types.
    """
    tensors: dict[str, torch.Tensor] = {}
    return {_FORM: json.dumps(_encode(value, tensors)), **tensors}


def unpack(packed: Mapping[str, Any]) -> Any:
    """The value that :func:`pack` was given; arrays and tensors have memory of their own."""
    return _decode(json.loads(packed[_FORM]), packed)


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return ["tensor", _put(value.detach().clone(), tensors)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Mapping):
        items = [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]
        return ["dict", items]
    if type(value) in (list, tuple):
        name = type(value).__name__
        return [name, [_encode(item, tensors) for item in value]]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _TENSOR_KINDS:
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        raw = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return [name, value.dtype.str, list(value.shape), _put(raw, tensors)]
    raise TypeError(
        "expected dicts, lists and tuples of numbers, strings, bytes, tensors and arrays of "
        f"numbers, got {type(value).__name__} {value!r}"
    )


def _put(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Any:
    """Store a tensor; returns its place. Empty ones stay in the form: not every format has them."""
    if not tensor.numel():
        return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
    tensors[str(len(tensors))] = tensor
    return len(tensors) - 1


def _get(where: Any, tensors: Mapping[str, Any]) -> torch.Tensor:
    if isinstance(where, list):
        return torch.zeros(where[0], dtype=getattr(torch, where[1]))
    return tensors[str(where)].detach().clone()


def _decode(form: Any, tensors: Mapping[str, Any]) -> Any:
    if not isinstance(form, list):
        return form
    kind, *rest = form
    if kind == "tensor":
        return _get(rest[0], tensors)
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in rest[0]}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in rest[0]]
        return items if kind == "list" else tuple(items)
    dtype, shape, where = rest
    raw = _get(where, tensors).cpu().numpy().tobytes()
    array = np.frombuffer(raw, dtype).reshape(shape).copy()
    return array if kind == "array" else array[()]


def equal(one: Any, other: Any) -> bool:
    """Return whether two nested values are equal, in types, dtypes and values; NaN never is."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> Path:
    """Write the states of the parts of a training to one file.

    The file is written beside ``path`` and then moved there. Whenever the process dies, the
    previous checkpoint or this one is there, complete.

    Args:
        path: of the file.
        **parts: under names of your choice: the collector, the loss module, the optimizer, the
            replay buffer. A part with a ``state_dict()`` is saved as that, any other as it is.

    Returns:
        The path.

    Examples:
        >>> save_checkpoint("run.pt", collector=collector, optimizer=optimizer, updates=120)
        >>> updates = load_checkpoint("run.pt", collector=collector, optimizer=optimizer)["updates"]
    """
    if not parts:
        raise TypeError("expected parts to save, by name: save_checkpoint(path, collector=...)")
    states = {
        name: part.state_dict() if callable(getattr(part, "state_dict", None)) else part
        for name, part in parts.items()
    }
    return write_atomically(Path(os.path.abspath(path)), lambda file: torch.save(states, file))


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    map_location: Any = None,
    weights_only: bool = True,
    **parts: Any,
) -> dict[str, Any]:
    """Read a file of :func:`save_checkpoint`, and load the states of parts from it.

    Collectors are loaded last, so that the random states that they restore are in force on return.

    Args:
        path: of the file.
        map_location: where tensors go, as in ``torch.load``.
        weights_only: refuse a file that would run code as it is read, as ``torch.load`` does.
        **parts: the parts to load, under the names that they were saved with.

    Returns:
        All saved states, by name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file of another kind, or one that was cut off.
        KeyError: if a part was not saved.
        TypeError: if a part cannot load a state.
    """
    with open(path, "rb") as file:
        is_ours = zipfile.is_zipfile(file)  # others end in errors of pickle's
    if not is_ours:
        raise ValueError(
            f"expected {path} to be as save_checkpoint() writes it, got a file of another kind, or "
            "one that was cut off; name a checkpoint"
        )
    states: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=weights_only)
    missing = [name for name in parts if name not in states]
    if missing:
        raise KeyError(f"expected some of the parts {list(states)} of {path}, got {missing}")
    for name, part in parts.items():
        if not callable(getattr(part, "load_state_dict", None)):
            raise TypeError(
                f"expected {name} to have a load_state_dict(), got {type(part).__name__}; read it "
                "off what load_checkpoint returns"
            )
    from torchrl.collectors import BaseCollector  # takes seconds, and states are for all

    for name in sorted(parts, key=lambda name: isinstance(parts[name], BaseCollector)):
        parts[name].load_state_dict(states[name])
    return states
