"""Checkpoints of a training run: the states of its parts, in one file written atomically."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torchrl.collectors import BaseCollector

from tdcollect.files import write_atomically


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
    states = {name: _state(part) for name, part in parts.items()}
    return write_atomically(Path(os.path.abspath(path)), lambda file: torch.save(states, file))


def _state(part: Any) -> Any:
    return part.state_dict() if callable(getattr(part, "state_dict", None)) else part


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
    for name in sorted(parts, key=lambda name: isinstance(parts[name], BaseCollector)):
        parts[name].load_state_dict(states[name])
    return states
