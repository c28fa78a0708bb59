"""Statistics of an env's transforms: read from a file, loaded and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrl.envs import transforms as T

from tdcollect._upstream.transforms import VecNormSums, VecNormV2Statistics
from tdcollect.envs.transforms import HOLD_EPISODES, flat_transforms

_FIRST = "transforms.0."


def read_state(file: Path) -> dict[str, Any]:
    """Read the ``state_dict`` of an env, without running code from the file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that holds something else.
    """
    if not file.is_file():
        raise FileNotFoundError(f"expected the state of an env, got {file}, which is no file")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} is no state of an env (written by torch.save(env.state_dict(), file)): {error}"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(
            f"expected {file} to hold a state_dict, got {type(state).__name__}; write it by "
            "torch.save(env.state_dict(), file)"
        )
    if not state:
        raise ValueError(
            f"expected {file} to hold statistics, got an empty state_dict: the state of a "
            "SerialEnv or a ParallelEnv has none of its envs; save the state of one of them"
        )
    return dict(state)


def load_state(transform: T.Transform, state: Mapping[str, Any], file: str) -> None:
    """Load the state of an env into its transforms.

    Entries that hold the latest steps are left out. A transform alone, and in a ``Compose``, takes
    the same state.

    Args:
        transform: all transforms of the env.
        state: their ``state_dict``, or that of the env.
        file: the name of the file, for messages.

    Raises:
        ValueError: if the state does not fit, naming the entries.
    """
    held = _held(transform)
    wanted = transform.state_dict(keep_vars=True).keys() - held
    given = {name: value for name, value in state.items() if name not in held}
    if given.keys() != wanted:
        alone = {name.removeprefix(_FIRST): value for name, value in given.items()}
        composed = {_FIRST + name: value for name, value in given.items()}
        given = next((s for s in (alone, composed) if s.keys() == wanted), given)
    faults = [f"it lacks {sorted(wanted - given.keys())}"] if wanted - given.keys() else []
    faults += [f"they have no {sorted(given.keys() - wanted)}"] if given.keys() - wanted else []
    names = ", ".join(type(part).__name__ for part in flat_transforms(transform))
    if faults:
        raise ValueError(
            f"{file} does not fit the env's transforms, {names}: {', and '.join(faults)}; name all "
            "transforms of the env that was saved, in their order"
        )
    _materialize(transform, given)
    try:
        transform.load_state_dict(given, strict=not held)
    except Exception as error:
        raise ValueError(f"{file} does not fit the env's transforms, {names}: {error}") from error


def check_statistics(transform: T.Transform, file: str) -> None:
    """Refuse statistics that are missing, or of several slots; other transforms pass.

    Raises:
        ValueError: naming the transform.
    """
    name = type(transform).__name__
    found = dict(_statistics(transform))
    if not found:
        return
    if missing := [key for key, shape in found.items() if shape is None]:
        raise ValueError(
            f"the transform {name} has no statistics of {missing} yet; pass the file that "
            "torch.save(env.state_dict(), file) wrote (--env-state FILE)"
        )
    parent = transform.parent
    leaves = {
        key: leaf
        for spec in (parent.full_observation_spec_unbatched, parent.full_reward_spec_unbatched)
        for key, leaf in spec.items(True, True)
    }
    for key, shape in found.items():
        if key in leaves and shape is not None and not _fits(shape, leaves[key].shape):
            raise ValueError(
                f"expected statistics of {key!r} of shape {list(leaves[key].shape)} in {name}, "
                f"those of one slot, got {list(shape)} from {file}; where each slot has its own, "
                "a new one has none: train with VecNormV2(reduce_batch_dims=True), or save one "
                "slot's"
            )


def _held(transform: T.Transform, prefix: str = "") -> set[str]:
    """Return the entries of a state that hold the latest steps."""
    return {
        f"{name}.{entry}" if name else entry
        for name, part in transform.named_modules(prefix=prefix)
        if isinstance(part, HOLD_EPISODES)
        for entry in part.state_dict(keep_vars=True)  # some have no shape yet
    }


def _materialize(transform: T.Transform, state: Mapping[str, Any]) -> None:
    """Give buffers that have no shape yet the shape and dtype of the state's."""
    for name, buffer in transform.named_buffers():
        value = state.get(name)
        if nn.parameter.is_lazy(buffer) and isinstance(value, torch.Tensor):
            if nn.parameter.is_lazy(value):
                continue  # never initialised: refused as statistics that are missing
            buffer.materialize(value.shape, dtype=value.dtype)


def _statistics(transform: T.Transform) -> Iterator[tuple[Any, torch.Size | None]]:
    """Yield the shape of a transform's statistics by key; None for those that are missing."""
    kind = type(transform)
    if kind is T.ObservationNorm:
        for key in transform.in_keys or [""]:
            yield key, transform.loc.shape if transform.initialized else None
    elif kind is T.VecNormV2 and transform.stateful:
        for key in transform.in_keys:
            loc, _, count = VecNormV2Statistics(transform).of(key)
            yield key, loc.shape if count.any() else None
    elif kind is T.VecNorm:
        for key in transform.in_keys:
            sums = VecNormSums(transform).of(key)
            yield key, None if sums is None else sums[0].shape


def _fits(shape: torch.Size, leaf: torch.Size) -> bool:
    """Tell whether a leaf keeps its shape under statistics of a shape."""
    try:
        return torch.broadcast_shapes(shape, leaf) == leaf
    except RuntimeError:
        return False
