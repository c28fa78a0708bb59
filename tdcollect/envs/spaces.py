"""gymnasium spaces as flat lists of array entries.

A :class:`SpaceCodec` knows, for one space, which entries a TensorDict holds, and copies values
between gymnasium's form (nested dicts and tuples, integers, arrays) and those entries. Both
directions accept any leading dimensions, so one slot and a batch of slots take the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import Composite, TensorSpec

from tdcollect import keys
from tdcollect._upstream.modules import unchecked_tensordict
from tdcollect.envs.leaves import BoxLeaf, Leaf, check_length, leaf_of, stacked_leaf
from tdcollect.workers.values import Array, unstack

Path = tuple[str, ...]


def key_of(path: Path) -> str | Path:
    """A path as a TensorDict key: a string if it has a single name."""
    return path[0] if len(path) == 1 else path


def observation_name(space: spaces.Space[Any]) -> str:
    """The entry of an observation that is no ``Dict``: TorchRL calls RGB images ``"pixels"``."""
    is_rgb = (
        isinstance(space, spaces.Box)
        and len(space.shape) == 3
        and space.shape[-1] == 3
        and bool((space.low == 0).all() and (space.high == 255).all())
    )
    return keys.PIXELS if is_rgb else keys.OBSERVATION


class SpaceCodec:
    """The array entries of one gymnasium space.

    Args:
        space: the space of a single slot.
        root: name of the entry for a space that is not a ``Dict``.
        categorical: integers rather than one-hot for ``Discrete`` and ``MultiDiscrete``.
        rename_state: call a ``"state"`` entry ``"observation"``, as TorchRL does, unless the same
            ``Dict`` has an ``"observation"``.

    Attributes:
        paths: the path of each entry in the TensorDict.
        leaves: the entries, in the order of ``paths``.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        root: str,
        *,
        categorical: bool = False,
        rename_state: bool = False,
    ):
        self.space = space
        self.paths: list[Path] = []
        self.leaves: list[Leaf] = []
        self._categorical = categorical
        self._rename_state = rename_state
        at = () if isinstance(space, spaces.Dict) else (root,)
        self._tree = self._build(space, at, f"the {root} space")
        if not self.leaves:
            raise TypeError(f"the {root} space is empty: {space}; a TensorDict needs an entry")
        self.direct = isinstance(self._tree, int) and isinstance(self.leaves[0], BoxLeaf)
        """Whether the space is one plain array, which needs no walk."""

    def _build(self, space: spaces.Space[Any], at: Path, where: str) -> Any:
        if isinstance(space, spaces.Dict):
            return {
                name: self._build(part, (*at, self._entry(name, space)), f"{where}[{name!r}]")
                for name, part in space.spaces.items()
            }
        if isinstance(space, spaces.Tuple):
            nested = any(isinstance(part, (spaces.Dict, spaces.Tuple)) for part in space.spaces)
            if space.spaces and not nested:
                parts = [
                    leaf_of(part, f"{where}[{i}]", self._categorical)
                    for i, part in enumerate(space.spaces)
                ]
                stacked = stacked_leaf(parts)
                if stacked is not None:
                    return self._add(stacked, at)
            return tuple(
                self._build(part, (*at, str(i)), f"{where}[{i}]")
                for i, part in enumerate(space.spaces)
            )
        return self._add(leaf_of(space, where, self._categorical), at)

    def _add(self, leaf: Leaf, at: Path) -> int:
        self.paths.append(at)
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _entry(self, name: Any, space: spaces.Dict) -> str:
        if not isinstance(name, str):
            raise TypeError(f"expected Dict spaces with names that are strings, got {name!r}")
        if self._rename_state and name == "state" and keys.OBSERVATION not in space.spaces:
            return keys.OBSERVATION
        return name

    def empty(self, *lead: int) -> list[Array]:
        """Uninitialized arrays ``[*lead, *shape]``, one per entry."""
        return [np.empty((*lead, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def write(self, value: Any, out: Sequence[Array]) -> None:
        """Encode a (nested) value with any leading dimensions into the entries' arrays."""
        self._write(self._tree, value, out)

    def write_slot(self, value: Any, out: Sequence[Array], slot: int) -> None:
        """Encode one slot's value into row ``slot`` of arrays ``[N, *shape]``."""
        if self.direct:
            self.leaves[0].write(value, out[0][slot])
        else:
            self._write(self._tree, value, [array[slot, ...] for array in out])

    def _write(self, tree: Any, value: Any, out: Sequence[Array]) -> None:
        if isinstance(tree, int):
            self.leaves[tree].write(value, out[tree])
        elif isinstance(tree, dict):
            if not isinstance(value, Mapping) or not tree.keys() <= value.keys():
                got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
                raise ValueError(f"expected a dict with the entries {sorted(tree)}, got {got}")
            for name, part in tree.items():
                self._write(part, value[name], out)
        else:
            check_length(value, len(tree))
            for part, item in zip(tree, value, strict=True):
                self._write(part, item, out)

    def read(self, entries: Sequence[Array]) -> Any:
        """Decode the entries' arrays ``[N, *shape]`` into gymnasium's batched form."""
        return self._read(self._tree, entries)

    def _read(self, tree: Any, entries: Sequence[Array]) -> Any:
        if isinstance(tree, int):
            return self.leaves[tree].read(entries[tree])
        if isinstance(tree, dict):
            return {name: self._read(part, entries) for name, part in tree.items()}
        return tuple(self._read(part, entries) for part in tree)

    def read_slots(self, entries: Sequence[Array]) -> Sequence[Any]:
        """Decode the entries' arrays ``[N, *shape]`` into one gymnasium value per slot."""
        return unstack(self.read(entries), len(entries[0]))


def compose(
    paths: Sequence[Path], specs: Sequence[TensorSpec], batch_size: Sequence[int]
) -> Composite:
    """Unbatched specs, each at its path, as one nested ``Composite`` of the given batch size."""
    composite = Composite(shape=batch_size)
    for path, spec in zip(paths, specs, strict=True):
        parent = composite
        for name in path[:-1]:
            if name not in parent:
                parent[name] = Composite(shape=batch_size)
            parent = parent[name]
        parent[path[-1]] = spec.expand(*batch_size, *spec.shape)
    return composite


def nested(
    entries: Iterable[tuple[str | Path, torch.Tensor]],
    batch_size: Iterable[int],
    device: torch.device | None = None,
) -> TensorDict:
    """Entries, each with its name or path, as a TensorDict that shares their memory."""
    return TensorDict(_by_name(entries), batch_size=tuple(batch_size), device=device)


def nested_unchecked(
    entries: Iterable[tuple[str | Path, torch.Tensor]],
    batch_size: torch.Size,
    device: torch.device | None,
) -> TensorDict:
    """The same, ten times as fast, of tensors that fit the batch size, and are on the device."""
    return unchecked_tensordict(_by_name(entries), batch_size, device)


def _by_name(entries: Iterable[tuple[str | Path, torch.Tensor]]) -> dict[str, Any]:
    """Entries by name; those of nested TensorDicts in dicts of their own."""
    source: dict[str, Any] = {}
    for key, value in entries:
        if isinstance(key, str):
            source[key] = value
        else:
            parent = source
            for name in key[:-1]:
                parent = parent.setdefault(name, {})
            parent[key[-1]] = value
    return source
