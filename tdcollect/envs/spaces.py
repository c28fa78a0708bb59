"""gymnasium spaces as flat lists of array entries with TorchRL's specs, and buffers for these.

A :class:`SpaceCodec` knows, for one space, which entries a TensorDict holds, and copies values
between gymnasium's form (nested dicts and tuples, integers, arrays) and those entries. Both
directions accept any leading dimensions, so one slot and a batch of slots take the same code.

Where TorchRL's conversion is right, specs are TorchRL's to the letter. It goes further in four
places: ``start`` of ``Discrete`` and ``MultiDiscrete`` is honoured, ``MultiBinary`` and
``MultiDiscrete`` may have any shape, a ``Tuple`` of unlike spaces becomes entries ``"0"``,
``"1"``, ... and unsigned integers that torch cannot compute with are widened.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    Binary,
    Bounded,
    BoundedContinuous,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
)

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect.envs.process.agents import Flags
from tdcollect.envs.process.values import Array, keeps, limits, nest, unstack
from tdcollect.keys import key_of

Path = tuple[str, ...]


# --- the entries of a space --------------------------------------------------------------------

# torch stores these but hardly computes with them, and TorchRL has no spec for them.
WIDENED: dict[type, type[np.int32 | np.int64]] = {
    np.uint16: np.int32,
    np.uint32: np.int64,
    np.uint64: np.int64,
}


class Leaf(abc.ABC):
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
        self.exact = space_dtype if np.can_cast(space_dtype, self.dtype, "safe") else None

    @abc.abstractmethod
    def write(self, value: Any, out: Array) -> None:
        """Encode ``value`` ``[*lead, *space.shape]`` into ``out`` ``[*lead, *shape]``."""

    @abc.abstractmethod
    def read(self, entry: Array) -> Array:
        """Decode ``entry`` ``[*lead, *shape]`` into a new array ``[*lead, *space.shape]``."""

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
            space = str(self.space)
            if len(space) > 80:
                space = f"{type(self.space).__name__} of dtype {self.space_dtype}"
            raise ValueError(
                f"expected an observation of dtype {self.space_dtype}, as the env's space says, "
                f"got {self._misfit(value)}, which does not go into {space} without loss; correct "
                "the env or its observation_space"
            )
        return value

    def takes(self, value: Array) -> bool:
        """Return whether the numbers go into the entry as they are; floats may lose digits."""
        return keeps(value, self.space_dtype)

    def _misfit(self, value: Array) -> str:
        """The dtype of values that do not fit; of integers, also the first one and its place."""
        if value.dtype.kind not in "biu":
            return str(value.dtype)
        low, high = limits(self.space_dtype)
        most = min(high, limits(self.dtype)[1])
        odd = np.argwhere((value < low) | (value > most))[0]
        return f"{value.dtype} {value[tuple(odd)]} at {odd.tolist()}"


class BoxLeaf(Leaf):
    """``Box``: the values themselves."""

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
            _check_action(entry, self.space_dtype)
        # A copy: an env may keep or change the array that it is given.
        value = np.array(entry, dtype=self.space_dtype if self._recast else None)
        return value.reshape(*lead, *self.space_shape)


class _BinaryLeaf(BoxLeaf):
    """``MultiBinary``: 0 and 1."""

    def __init__(self, space: spaces.MultiBinary, spec: TensorSpec):
        super().__init__(space, spec)
        self.exact = None  # the dtype holds other numbers, too

    def takes(self, value: Array) -> bool:
        return super().takes(value) and bool(((value == 0) | (value == 1)).all())

    def _misfit(self, value: Array) -> str:
        odd = np.argwhere((value != 0) & (value != 1))
        if not len(odd):
            return super()._misfit(value)
        return f"{value.dtype} {value[tuple(odd[0])]} at {odd[0].tolist()}"


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
        index = entry
        if self.shape != self.space_shape:
            index = entry.reshape(*entry.shape[: entry.ndim - len(self.shape)], *self.space_shape)
        if self._counts_from_zero and index.dtype is self.space_dtype:
            return index.copy()
        value = index + self._offset
        _check_action(value, self.space_dtype)
        return value.astype(self.space_dtype)


def _whole(entry: Array) -> Array:
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
        _check_length(value, len(self._parts))
        for part, item, target in zip(self._parts, value, self._split(out), strict=True):
            part.write(item, target)

    def read(self, entry: Array) -> Any:
        return tuple(
            part.read(item) for part, item in zip(self._parts, self._split(entry), strict=True)
        )

    def _split(self, entry: Array) -> list[Array]:
        parts = np.moveaxis(entry, self._axis, 0)
        return [parts[i, ...] for i in range(len(parts))]


_FEW_TEXTS = 10_000


class TextLeaf(Leaf):
    """``Text``, and other spaces of strings: a number for each text; 0 is the empty one."""

    def __init__(self, space: spaces.Space[Any]):
        super().__init__(NonTensor((), example_data="a string"), np.dtype(str))
        self.space, self.dtype = space, np.dtype(np.int64)
        self._numbers, self._texts, self._count = {"": 0}, {0: ""}, count(1)

    def _number(self, text: Any) -> int:
        if not isinstance(text, str):
            raise ValueError(  # noqa: TRY004 - as of other spaces
                f"expected text, as the space says, got {text!r}; correct the env or the policy"
            )
        if text not in self._numbers:
            number = self._numbers[str(text)] = next(self._count)
            self._texts[number] = str(text)
        return self._numbers[text]

    def write(self, value: Any, out: Array) -> None:
        out[...] = list(map(self._number, value)) if out.ndim else self._number(value)

    def read(self, entry: Any) -> Array:
        texts = [self._texts[number] for number in entry.reshape(-1).tolist()]
        return np.array(texts, object).reshape(entry.shape)

    def numbers(self, texts: Any) -> torch.Tensor:
        """The numbers of texts as TorchRL holds them, for each slot or for one."""
        numbers = np.empty(texts.shape, self.dtype)
        self.write(texts.tolist(), numbers)
        return torch.from_numpy(numbers)

    def keep(self, arrays: Iterable[Any]) -> None:
        """Forget texts whose numbers are in none of these arrays, once they are many."""
        if len(self._texts) > _FEW_TEXTS:
            kept = {0, *(number for array in arrays for number in array.reshape(-1).tolist())}
            for number in self._texts.keys() - kept:
                del self._numbers[self._texts.pop(number)]


def told(texts: Mapping[Any, TextLeaf], entries: Any, device: torch.device | None = None) -> Any:
    """Entries with texts, as TorchRL stacks them, in the place of their numbers."""
    here = {key: leaf.read(entries[key])[()] for key, leaf in texts.items() if key in entries}
    stacks = {key: upstream.stacked_texts(read, device) for key, read in here.items()}
    return {**entries, **stacks} if stacks else entries


def _check_length(value: Any, expected: int) -> None:
    if len(value) != expected:
        raise ValueError(
            f"expected a tuple of {expected} parts, as the env's space says, got {len(value)}; "
            "correct the env or its observation_space"
        )


def _box_leaf(space: spaces.Box, where: str) -> Leaf:
    widened = WIDENED.get(space.dtype.type)
    if widened is None:
        try:
            return BoxLeaf(space, upstream.gym_space_to_spec(space))
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
    size, shape = int(sizes[0]), tuple(space.nvec.shape)
    if categorical:
        dtype = torch.from_numpy(np.empty((), space.dtype)).dtype
        if even:
            return _CategoricalLeaf(space, Categorical(size, shape=shape, dtype=dtype))
        return _CategoricalLeaf(space, MultiCategorical(sizes, dtype=dtype))
    if even:
        return _OneHotLeaf(space, OneHot(size, shape=(*shape, size), dtype=torch.long))
    return _MultiOneHotLeaf(space, MultiOneHot(sizes, dtype=torch.long))


def _leaf_of(space: spaces.Space[Any], where: str, categorical: bool) -> Leaf:
    if isinstance(space, spaces.Box):
        return _box_leaf(space, where)
    if isinstance(space, spaces.Discrete):
        spec = upstream.gym_space_to_spec(space, categorical_action_encoding=categorical)
        return (_CategoricalLeaf if categorical else _OneHotLeaf)(space, spec)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_leaf(space, categorical)
    if isinstance(space, Flags):
        return BoxLeaf(space, Categorical(2, shape=torch.Size(space.shape), dtype=torch.bool))
    if isinstance(space, spaces.MultiBinary):
        return _BinaryLeaf(space, Binary(space.shape[-1], shape=space.shape, dtype=torch.int8))
    if type(space).__module__.partition(".")[0] == "gym":
        raise TypeError(
            f"{where} is a {type(space).__name__} of the package gym, which gymnasium does not "
            f"know; make it with gymnasium.spaces.{type(space).__name__}"
        )
    raise TypeError(
        f"{where} is a {type(space).__name__} space, which has no fixed-size array form; expected "
        "Box, Discrete, MultiDiscrete, MultiBinary, Text, or Dict and Tuple of these. Wrap the env "
        "to encode it (gymnasium.wrappers.TransformObservation), or to drop it (FilterObservation)"
    )


def _stacked_leaf(parts: Sequence[Leaf]) -> Leaf | None:
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


def _check_action(value: Array, dtype: np.dtype[Any]) -> None:
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


# --- spaces ------------------------------------------------------------------------------------


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
        texts: those that are text, by key, present and under ``"next"``.
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
        self._keys: list[keys.Key] = []
        self.leaves: list[Leaf] = []
        self.texts: dict[keys.Key, TextLeaf] = {}
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
            several = (spaces.Dict, spaces.Tuple, spaces.Text)
            nested = any(isinstance(part, several) for part in space.spaces)
            if space.spaces and not nested:
                parts = [
                    _leaf_of(part, f"{where}[{i}]", self._categorical)
                    for i, part in enumerate(space.spaces)
                ]
                stacked = _stacked_leaf(parts)
                if stacked is not None:
                    return self._add(stacked, at)
            return tuple(
                self._build(part, (*at, str(i)), f"{where}[{i}]")
                for i, part in enumerate(space.spaces)
            )
        if space.dtype == np.str_:
            self.texts[key_of(at)] = self.texts[keys.under_next(key_of(at))] = TextLeaf(space)
            return self._add(self.texts[key_of(at)], at)
        return self._add(_leaf_of(space, where, self._categorical), at)

    def _add(self, leaf: Leaf, at: Path) -> int:
        self.paths.append(at)
        self._keys.append(key_of(at))
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _entry(self, name: Any, space: spaces.Dict) -> str:
        if not isinstance(name, str):
            raise TypeError(f"expected Dict spaces with names that are strings, got {name!r}")
        if self._rename_state and name == "state" and keys.OBSERVATION not in space.spaces:
            return keys.OBSERVATION
        return name

    @property
    def specs(self) -> list[tuple[Path, TensorSpec]]:
        return [(path, leaf.spec) for path, leaf in zip(self.paths, self.leaves, strict=True)]

    def empty(self, *lead: int) -> list[Array]:
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

    def write_rows(self, value: Any, out: Sequence[Array], rows: Array) -> None:
        """Encode the values of some slots into their rows of arrays ``[N, *shape]``."""
        held = self.empty(len(rows))
        self.write(value, held)
        for array, part in zip(out, held, strict=True):
            array[rows] = part

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
            _check_length(value, len(tree))
            for part, item in zip(tree, value, strict=True):
                self._write(part, item, out)

    def of_step(self, step: Mapping[Any, Any] | TensorDictBase, lead: torch.Size) -> list[Array]:
        """The entries of a step ``[*lead, *shape]`` as arrays ``[N, *shape]`` on the CPU.

        They are in the order of the space, as backends take them; specs sort them by name.
        """
        arrays = []
        for key, leaf in zip(self._keys, self.leaves, strict=True):
            entry = step.get(key, None)
            if entry is None:
                raise lacks_action(key, step.keys())
            if entry.shape != (*lead, *leaf.shape):
                raise ValueError(
                    f"expected {key!r} of shape {[*lead, *leaf.shape]}, as the action spec says, "
                    f"got {list(entry.shape)}; compare the policy's output with env.action_spec"
                )
            if isinstance(leaf, TextLeaf) and isinstance(step, TensorDictBase):
                leaf.keep(())
                entry = leaf.numbers(entry)
            plain = entry.is_cpu and not entry.requires_grad
            array: Array = entry.numpy() if plain else entry.numpy(force=True)  # takes longer
            arrays.append(array if lead else array[None])
        return arrays

    def read(self, entries: Sequence[Array]) -> Any:
        """Decode the entries' arrays ``[N, *shape]`` into gymnasium's batched form."""
        if isinstance(self._tree, int):  # one entry, at every step of most envs
            (entry,) = entries
            return self.leaves[0].read(entry)
        values = [leaf.read(entry) for leaf, entry in zip(self.leaves, entries, strict=True)]
        return nest(self._tree, values)

    def read_slots(self, entries: Sequence[Array]) -> Sequence[Any]:
        """Decode the entries' arrays ``[N, *shape]`` into one gymnasium value per slot."""
        return unstack(self.read(entries), len(entries[0]))


def lacks_action(key: keys.Key, present: Iterable[keys.Key]) -> KeyError:
    return KeyError(
        f"expected the entry {key!r} in the input of step(), got the entries "
        f"{', '.join(map(keys.entry_path, present))}; have the policy write it (its out_keys)"
    )


class _KeepsClass(upstream.BoundedMeta):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        spec = super().__call__(*args, **kwargs)
        spec.__class__ = cls
        return spec

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, BoundedContinuous)  # TorchRL stacks specs of like classes alone


class DrawableBox(BoundedContinuous, metaclass=_KeepsClass):
    """A spec whose random values are finite, whatever its bounds; equal to the one without.

    They are drawn by axis as gymnasium's ``Box.sample`` draws them: normal without bounds, at an
    exponential distance from a single bound, uniform between two.
    """

    def rand(self, shape: Iterable[int] | None = None) -> torch.Tensor:
        low, high = self.space
        size = (*(shape or ()), *low.shape)
        uniform, normal, distance = (
            fill(torch.empty(size, dtype=self.dtype, device=self.device))
            for fill in (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_)
        )
        below = torch.where(high.isfinite(), high - distance, normal)
        above = torch.where(high.isfinite(), low * (1 - uniform) + high * uniform, low + distance)
        return torch.where(low.isfinite(), above, below).clamp(low, high)

    def to(self, dest: Any) -> TensorSpec:
        spec = super().to(dest)
        if type(spec) is BoundedContinuous:
            spec.__class__ = DrawableBox
        return spec

    def __eq__(self, other: object) -> bool:
        known = isinstance(other, BoundedContinuous)
        return known and bool(_parts_of_box(self) == _parts_of_box(other))


_parts_of_box = operator.attrgetter("shape", "device", "dtype", "space")


def overflows(spec: TensorSpec) -> bool:
    """Return whether TorchRL draws infinite values or NaN: a bound or the width is infinite."""
    plain = type(spec) is BoundedContinuous
    return plain and not bool((spec.space.high - spec.space.low).isfinite().all())


class DrawableText(NonTensor):
    """A spec of texts that are drawn as a gymnasium space draws them; the space is its example."""

    def rand(self, shape: Iterable[int] | None = None) -> Any:
        size = (*(shape or ()), *self.shape)
        texts = np.array([sample_of(self.example_data) for _ in range(math.prod(size))], object)
        return upstream.stacked_texts(texts.reshape(size)[()], self.device)

    def zero(self, shape: Iterable[int] | None = None) -> Any:
        return NonTensor(self.shape, self.device, example_data="").zero(shape)


def sample_of(space: spaces.Space[Any]) -> Any:
    """A sample of a space, which is seeded by torch's generator first."""
    space.seed(int(torch.randint(2**31, ())))
    return space.sample()


def drawable(leaf: Leaf) -> TensorSpec:
    """Return the spec of an action, of which any random value can be sent to an env."""
    spec = leaf.spec
    if isinstance(leaf, TextLeaf):
        return DrawableText(spec.shape, example_data=deepcopy(leaf.space))
    if not overflows(spec):
        return spec
    return DrawableBox(*spec.space, spec.shape, spec.device, spec.dtype)


def compose(specs: Iterable[tuple[Path, TensorSpec]], batch_size: Sequence[int]) -> Composite:
    """Unbatched specs, each at its path, as one nested ``Composite`` of the given batch size."""
    expanded = ((path, spec.expand(*batch_size, *spec.shape)) for path, spec in specs)
    return Composite(keys.by_name(expanded), shape=batch_size)


def nested(
    entries: Iterable[tuple[str | Path, torch.Tensor]],
    batch_size: Iterable[int],
    device: torch.device | None = None,
) -> TensorDict:
    """Entries, each with its name or path, as a TensorDict that shares their memory."""
    # Of tensors that fit, it is made several times as fast as by TensorDict's constructor.
    pairs, size = list(entries), torch.Size(batch_size)
    dims = len(size)
    for _, value in pairs:
        if type(value) is not torch.Tensor or value.is_nested or value.shape[:dims] != size:
            break
        if device is not None and value.device != device:
            break
    else:
        return nested_unchecked(pairs, size, device)
    return TensorDict(keys.by_name(pairs), batch_size=size, device=device)


def nested_unchecked(
    entries: Iterable[tuple[str | Path, torch.Tensor]],
    batch_size: torch.Size,
    device: torch.device | None,
) -> TensorDict:
    """The same, of tensors that are known to fit the batch size, and to be on the device."""
    return upstream.unchecked_tensordict(
        keys.by_name(entries), batch_size=batch_size, device=device
    )


# --- buffers of a step ----------------------------------------------------------------------------


ALIGNMENT = 64  # bytes


class SlotBuffers(NamedTuple):
    """The arrays that a backend writes one step of N slots to. All belong to the caller.

    ``observation`` and ``info`` hold one array ``[N, *shape]`` per entry, ``reward`` is float32
    ``[N]``, or float64 for a caller that needs it as the env gave it; ``terminated`` and
    ``truncated`` are bool ``[N]``.
    """

    observation: Sequence[Array]
    info: Sequence[Array]
    reward: Array
    terminated: Array
    truncated: Array


class Bookkeeping(NamedTuple):
    """The entries to add to the env's own, under the names of TorchRL's transforms."""

    step_count: bool = False
    episode_reward: bool = False
    is_init: bool = False
    max_episode_steps: int | None = None


class Entry(NamedTuple):
    """An array that every step and every reset writes, beside reward and flags."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    spec: TensorSpec


class StepBuffers(NamedTuple):
    """The arrays and tensors that one step or reset of N slots writes, in memory of their own.

    ``entries`` are arrays ``[N, *shape]``, in the order of the stepper's: ``raw`` holds those that
    the backend writes, ``bookkeeping`` those that the stepper writes. ``reward`` is float32
    ``[N]``: the backend's own array, or its rounding where the backend writes float64. ``done`` is
    bool ``[N]``, and ``flags`` are terminated, truncated and done in one, ``[3, N]``. ``tensors``
    share the memory of the entries, then reward, terminated, truncated and done ``[N, 1]``;
    ``raw_reward`` that of the reward as the backend writes it ``[N, 1]``. ``memory`` are the bytes
    of the :attr:`state`.
    """

    raw: SlotBuffers
    bookkeeping: Sequence[Array]
    entries: Sequence[Array]
    reward: Array
    done: Array
    flags: Array
    tensors: Sequence[torch.Tensor]
    raw_reward: torch.Tensor
    memory: Array

    @property
    def state(self) -> list[Array]:
        """The arrays ``[N, ...]`` that say where slots are: all but the reward."""
        return [*self.entries, self.raw.terminated, self.raw.truncated, self.done]

    def copy_state(self, arrays: Iterable[Array], slots: list[int]) -> None:
        """Copy the :attr:`state` of other buffers, of ``slots``."""
        for target, array in zip(self.state, arrays, strict=True):
            target[slots] = array[slots]


def aligned_zeros(
    count: int, entries: Iterable[tuple[Sequence[int], Any]], pinned: bool = False
) -> tuple[list[Array], Array]:
    """Zeros ``[count, *shape]`` of each shape and dtype; their memory, bytes ``[count, size]``.

    Those of one index lie together. Each ``[i]`` is aligned as a tensor of torch's own would be: a
    policy's products round by the alignment of their input, and must not depend on whether it lies
    in the buffers or in a copy.
    """
    arrays, end = [], 0
    for shape, dtype in entries:
        strides, last = [], np.dtype(dtype).itemsize
        for size in reversed(shape):
            strides.append(last)
            last *= size
        arrays.append(((count, *shape), dtype, end, reversed(strides)))
        end += -(-last // ALIGNMENT) * ALIGNMENT
    memory = np.zeros(count * end + ALIGNMENT, np.uint8)
    if pinned:
        memory = torch.from_numpy(memory).pin_memory().numpy()
    start = -memory.ctypes.data % ALIGNMENT
    return [
        np.ndarray(shape, dtype, memory, start + at, (end, *strides))
        for shape, dtype, at, strides in arrays
    ], np.ndarray((count, end), np.uint8, memory, start)


NOT_TAKEN = frozenset({"", "device", "dtype", "shape", "space"})
"""Names that TorchRL's ``Composite`` takes for no entry."""


def check_names(entries: Sequence[Path], actions: Sequence[Path]) -> None:
    """Raise ValueError if an entry has a name that it cannot have in a batch."""
    paths = [*entries, *actions]
    for i, path in enumerate(paths):
        acts, why = i >= len(entries), ""
        others = [p for p in paths[:i] if path[: len(p)] == p or p[: len(path)] == path]
        if NOT_TAKEN.intersection(path) or any(name.startswith("_") for name in path):
            why = "no TensorDict of TorchRL's has an entry of this name"
        elif others:
            both = acts and others[0] in entries
            why = (
                f"{'both the observations and the actions have' if both else 'two entries have'} it"
            )
        elif path[0] in keys.RESERVED and not (acts and path[0] == keys.ACTION):
            why = "the batch uses it for something else"
        if why:
            raise ValueError(
                f"expected another name for the entry {'/'.join(path)!r} of the "
                f"{'action space' if acts else 'observation space or info_keys'}: {why}; rename it "
                "in the env"
            )
