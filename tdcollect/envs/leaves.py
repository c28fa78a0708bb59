"""Array entries of gymnasium spaces, with the specs that TorchRL gives them.

Where TorchRL's conversion is right, specs are TorchRL's to the letter. It goes further in four
places: ``start`` of ``Discrete`` and ``MultiDiscrete`` is honoured, ``MultiBinary`` and
``MultiDiscrete`` may have any shape, a ``Tuple`` of unlike spaces becomes entries ``"0"``,
``"1"``, ... and unsigned integers that torch cannot compute with are widened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)

from tdcollect._upstream.torchrl import gym_space_to_spec
from tdcollect.workers.values import Array, keeps, kinds_for, limits

# torch stores these but hardly computes with them, and TorchRL has no spec for them.
WIDENED: dict[type, type[np.int32 | np.int64]] = {
    np.uint16: np.int32,
    np.uint32: np.int64,
    np.uint64: np.int64,
}


class Leaf:
    """One array entry of a space.

    ``shape`` and ``dtype`` are those of the entry, ``spec`` is its unbatched TorchRL spec. Values
    of the dtype ``exact`` always fit; it is None if those of the space's own dtype may not.
    """

    space: spaces.Space[Any] | None = None

    def __init__(
        self, spec: TensorSpec, space_dtype: np.dtype[Any], space_shape: tuple[int, ...] = ()
    ):
        self.spec = spec
        self.shape = tuple(spec.shape)
        self.dtype: np.dtype[Any] = torch.empty((), dtype=spec.dtype).numpy().dtype
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape))
        self.space_dtype = space_dtype
        self.space_shape = space_shape
        self.kinds = kinds_for(space_dtype)
        self.exact = space_dtype if np.can_cast(space_dtype, self.dtype, "safe") else None

    def write(self, value: Any, out: Array) -> None:
        """Encode ``value`` ``[*lead, *space.shape]`` into ``out`` ``[*lead, *shape]``."""
        raise NotImplementedError

    def read(self, entry: Array) -> Array:
        """Decode ``entry`` ``[*lead, *shape]`` into a new array ``[*lead, *space.shape]``."""
        raise NotImplementedError

    def _checked(self, value: Any, out: Array) -> Array:
        """``value`` as an array, which must have the space's shape behind the lead of ``out``."""
        value = np.asarray(value)
        got = value.shape[out.ndim - len(self.shape) :]
        if got != self.space_shape:
            raise ValueError(
                f"expected an observation of shape {self.space_shape}, as the env's space says, "
                f"got {got}; correct the env or its observation_space"
            )
        if value.dtype is not self.exact and not self.takes(value):
            raise ValueError(
                f"expected an observation of dtype {self.space_dtype}, as the env's space says, "
                f"got {self._misfit(value)}, which does not go into {_shortened(self.space)} "
                "without loss; correct the env or its observation_space"
            )
        return value

    def takes(self, value: Array) -> bool:
        """Tell whether the numbers go into the entry as they are; floats may lose digits."""
        return value.dtype.kind in self.kinds and keeps(value, self.space_dtype)

    def _misfit(self, value: Array) -> str:
        """The dtype of values that do not fit; of integers, also the first one and its place."""
        if value.dtype.kind not in "biu":
            return str(value.dtype)
        low, high = limits(self.space_dtype)
        most = min(high, limits(self.dtype)[1])
        odd = np.argwhere((value < low) | (value > most))[0]
        return f"{value.dtype} {value[tuple(odd)]} at {odd.tolist()}"


class BoxLeaf(Leaf):
    """``Box`` and ``MultiBinary``: the values themselves."""

    def __init__(self, space: spaces.Box | spaces.MultiBinary, spec: TensorSpec):
        assert space.shape is not None
        assert space.dtype is not None
        super().__init__(spec, np.dtype(space.dtype), space.shape)
        self.space = space
        self._recast = self.dtype != self.space_dtype

    def write(self, value: Any, out: Array) -> None:
        out[...] = self._checked(value, out).reshape(out.shape)

    def takes(self, value: Array) -> bool:
        # A widened entry may still be narrower than its space: uint64 goes into int64.
        return super().takes(value) and (not self._recast or keeps(value, self.dtype))

    def read(self, entry: Array) -> Array:
        lead = entry.shape[: entry.ndim - len(self.shape)]
        if self._recast:
            check_action(entry, self.space_dtype)
        # A copy: an env may keep or change the array that it is given.
        value = np.array(entry, dtype=self.space_dtype if self._recast else None)
        return value.reshape(*lead, *self.space_shape)


class _CategoricalLeaf(Leaf):
    """``Discrete`` and ``MultiDiscrete`` as integers that count from zero."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete, spec: TensorSpec):
        self.n = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        self.start = np.asarray(space.start)
        super().__init__(spec, np.dtype(space.dtype), self.n.shape)
        self.space = space
        self._offset = self.start.astype(np.int64)
        self._counts_from_zero = not self.start.any()

    def index(self, value: Any, out: Array) -> Array:
        """Integers counting from zero, checked to lie in the space."""
        index = self._checked(value, out) - self.start
        if ((index < 0) | (index >= self.n)).any():
            raise ValueError(
                f"expected values in [{self.start}, {self.start + self.n}), got {value}; "
                "correct the env or its space"
            )
        return index

    def write(self, value: Any, out: Array) -> None:
        out[...] = self.index(value, out).reshape(out.shape)

    def read(self, entry: Array) -> Array:
        lead = entry.shape[: entry.ndim - len(self.shape)]
        index = entry.reshape(*lead, *self.space_shape)
        if self._counts_from_zero and index.dtype is self.space_dtype:
            return index.copy()
        value = index + self._offset
        check_action(value, self.space_dtype)
        return value.astype(self.space_dtype)


def _whole(entry: Array) -> Array:
    """One-hot actions as integers, to which TorchRL's spec cuts them."""
    return entry.astype(np.int64) if entry.dtype.kind == "f" else entry


class _OneHotLeaf(_CategoricalLeaf):
    """``Discrete`` and evenly sized ``MultiDiscrete``, one-hot over a last dimension."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete, spec: TensorSpec):
        super().__init__(space, spec)
        self._range = np.arange(self.shape[-1])

    def write(self, value: Any, out: Array) -> None:
        out[...] = self.index(value, out)[..., None] == self._range

    def read(self, entry: Array) -> Array:
        index = _whole(entry).argmax(-1)
        if self._counts_from_zero and index.dtype is self.space_dtype:
            return index
        return (index + self.start).astype(self.space_dtype)


class _MultiOneHotLeaf(_CategoricalLeaf):
    """Unevenly sized ``MultiDiscrete``: one-hot blocks side by side."""

    def __init__(self, space: spaces.MultiDiscrete, spec: TensorSpec):
        super().__init__(space, spec)
        sizes = self.n.reshape(-1)
        self._component = np.repeat(np.arange(sizes.size), sizes)
        self._range = np.concatenate([np.arange(size) for size in sizes])
        stops = np.cumsum(sizes)
        self._blocks = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]

    def write(self, value: Any, out: Array) -> None:
        index = self.index(value, out)
        index = index.reshape(*index.shape[: index.ndim - self.n.ndim], -1)
        out[...] = index[..., self._component] == self._range

    def read(self, entry: Array) -> Array:
        whole = _whole(entry)
        index = np.stack([whole[..., block].argmax(-1) for block in self._blocks], axis=-1)
        index = index.reshape(*entry.shape[:-1], *self.n.shape)
        return (index + self.start).astype(self.space_dtype)


class _StackLeaf(Leaf):
    """A ``Tuple`` of like spaces, stacked as TorchRL stacks it."""

    def __init__(self, parts: Sequence[Leaf], spec: TensorSpec):
        super().__init__(spec, parts[0].space_dtype)
        self._parts = parts
        self._axis = -len(parts[0].shape) - 1

    def write(self, value: Any, out: Array) -> None:
        check_length(value, len(self._parts))
        for part, item, target in zip(self._parts, value, self._split(out), strict=True):
            part.write(item, target)

    def read(self, entry: Array) -> Any:
        return tuple(
            part.read(item) for part, item in zip(self._parts, self._split(entry), strict=True)
        )

    def _split(self, entry: Array) -> list[Array]:
        """Views of the parts."""
        parts = np.moveaxis(entry, self._axis, 0)
        return [parts[i, ...] for i in range(len(parts))]


def check_length(value: Any, expected: int) -> None:
    if len(value) != expected:
        raise ValueError(
            f"expected a tuple of {expected} parts, as the env's space says, got {len(value)}; "
            "correct the env or its observation_space"
        )


def _box_leaf(space: spaces.Box, where: str) -> Leaf:
    widened = WIDENED.get(space.dtype.type)
    if widened is None:
        try:
            return BoxLeaf(space, gym_space_to_spec(space))
        except (KeyError, TypeError) as error:
            raise TypeError(
                f"{where} is a Box of dtype {space.dtype}, which torch has no type for; use a "
                "wrapper (gymnasium.wrappers.TransformObservation, say) to give it another dtype"
            ) from error
    shape = space.shape or (1,)
    most = np.uint64(np.iinfo(widened).max)
    bounds = [
        torch.from_numpy(np.minimum(bound.astype(np.uint64), most).astype(widened).reshape(shape))
        for bound in (space.low, space.high)
    ]
    return BoxLeaf(space, Bounded(*bounds, shape, dtype=bounds[0].dtype))


def _multi_discrete_leaf(space: spaces.MultiDiscrete, categorical: bool) -> Leaf:
    sizes = space.nvec.reshape(-1)
    even = bool((sizes == sizes[0]).all())
    dtype = torch.from_numpy(np.empty((), space.dtype)).dtype if categorical else torch.long
    size, shape = int(sizes[0]), tuple(space.nvec.shape)
    if categorical:
        spec = (
            Categorical(size, shape=shape, dtype=dtype)
            if even
            else MultiCategorical(sizes, dtype=dtype)
        )
        return _CategoricalLeaf(space, spec)
    if even:
        return _OneHotLeaf(space, OneHot(size, shape=(*shape, size), dtype=dtype))
    return _MultiOneHotLeaf(space, MultiOneHot(sizes, dtype=dtype))


def leaf_of(space: spaces.Space[Any], where: str, categorical: bool) -> Leaf:
    if isinstance(space, spaces.Box):
        return _box_leaf(space, where)
    if isinstance(space, spaces.Discrete):
        spec = gym_space_to_spec(space, categorical_action_encoding=categorical)
        return (_CategoricalLeaf if categorical else _OneHotLeaf)(space, spec)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_leaf(space, categorical)
    if isinstance(space, spaces.MultiBinary):
        spec = Binary(space.shape[-1], shape=space.shape, dtype=torch.int8)
        return BoxLeaf(space, spec)
    raise TypeError(
        f"{where} is a {type(space).__name__} space, which has no fixed-size array form; expected "
        "Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these. Wrap the env to "
        "encode it (gymnasium.wrappers.TransformObservation), or to drop it (FilterObservation)"
    )


def stacked_leaf(parts: Sequence[Leaf]) -> Leaf | None:
    """The leaf of a ``Tuple`` of leaves, or None if these are too unlike to stack."""
    first = parts[0]
    alike = all(
        type(part.spec) is type(first.spec)
        and part.shape == first.shape
        and part.dtype == first.dtype
        and part.spec.space.__class__ is first.spec.space.__class__
        for part in parts
    )
    if not alike:
        return None
    spec = torch.stack([part.spec for part in parts], 0)
    if tuple(spec.shape) != (len(parts), *first.shape) or type(spec) is not type(first.spec):
        return None
    return _StackLeaf(parts, spec)


def _shortened(space: spaces.Space[Any] | None) -> str:
    text = str(space)
    return text if len(text) <= 80 else f"{type(space).__name__} of dtype {space.dtype}"  # type: ignore[union-attr]


def check_action(value: Array, dtype: np.dtype[Any]) -> None:
    """Raise ValueError if an integer dtype cannot hold an action as it is."""
    if value.dtype is dtype or keeps(value, dtype):
        return
    with np.errstate(invalid="ignore"):
        odd = np.argwhere(value.astype(dtype) != value)
    if odd.size:
        raise ValueError(
            f"expected an action of dtype {dtype}, as the env's space says, got {value.dtype} "
            f"{value[tuple(odd[0])]} at {odd[0].tolist()}, which does not go into it without loss; "
            "compare the policy's output with env.action_spec"
        )
