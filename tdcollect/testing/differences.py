"""The first difference of two runs of an env, or of any two nested values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from tdcollect.display import one_line
from tdcollect.keys import Key


@dataclass(frozen=True)
class Row:
    """One reset or step: copies of what two runs are compared by, and the returned objects.

    ``extra`` has a copy of the rest: gymnasium's info, or TorchRL's next root.
    """

    entries: Mapping[Key, Any]
    ends: bool = False
    is_reset: bool = False
    extra: Any = None
    returned: tuple[Any, ...] = ()

    def __getitem__(self, key: Key) -> Any:
        return self.entries[key]


Episodes: TypeAlias = Sequence[Sequence[Row]]
"""Episodes of one env, one after the other: the first after ``reset(seed)``."""

SUMS = "a difference of the size of rounding: sums in another order, as that of a set of objects"

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


class Mismatch(NamedTuple):
    """One value that differs: its entry, both values, and their distance if they are numbers."""

    entry: str
    first: Any
    second: Any
    size: float | None

    def __str__(self) -> str:
        size = "" if self.size is None else f" ({self.size:.2g} apart)"
        return f"{self.entry} is {shown(self.first)} and {shown(self.second)}{size}"


@dataclass(frozen=True)
class Divergence:
    """The first place where two runs differ.

    Attributes:
        seed: the seed that both were reset with.
        episode: 0 for the episode after ``reset(seed)``, 1 for the one after that.
        step: 0 for the reset, 1 for the first step.
        entry: ``"observation"``, ``"reward"``, ``"terminated"``, ``"truncated"``, with the place in
            it that differs most; or ``"length"``.
        first: the value in the first run.
        second: the value in the second run.
        size: how far apart they are; None if they are not numbers.
    """

    seed: int
    episode: int
    step: int
    entry: str
    first: Any
    second: Any
    size: float | None

    @property
    def is_small(self) -> bool:
        """True for a difference of the size of rounding."""
        if self.size is None or self.entry == "length":
            return False
        return self.size <= 1e-4 * max(1.0, abs(self.first), abs(self.second))

    @property
    def mismatch(self) -> Mismatch:
        """The value that differs."""
        return Mismatch(self.entry, self.first, self.second, self.size)

    def to_dict(self) -> dict[str, Any]:
        """Return the divergence for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        at = "the reset" if self.step == 0 else f"step {self.step}"
        return f"seed {self.seed}, episode {self.episode}, {at}: {self.mismatch}"


def first_divergence(seed: int, first: Episodes, second: Episodes) -> Divergence | None:
    """Return the first difference of two runs on one seed, or None."""
    for episode, (one, other) in enumerate(zip(first, second, strict=True)):
        for step, (a, b) in enumerate(zip(one, other, strict=False)):
            if different := row_mismatch(a, b):
                return Divergence(seed, episode, step, *different)
        if len(one) != len(other):
            lengths = len(one) - 1, len(other) - 1
            apart = float(abs(lengths[0] - lengths[1]))
            return Divergence(seed, episode, min(lengths), "length", *lengths, apart)
    return None


def row_mismatch(first: Row, second: Row) -> Mismatch | None:
    """Return the first entry in which two rows differ, or None."""
    for key, value in first.entries.items():
        name = key if isinstance(key, str) else repr(key)
        if key not in second.entries:
            return Mismatch(name, "there", "gone", None)
        if different := mismatch(name, value, second.entries[key]):
            return different
    return None


def mismatch(entry: str, first: Any, second: Any) -> Mismatch | None:
    """Return the first leaf in which two (nested) values differ, or None; NaNs are equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            a, b = (short(sorted(map(str, value))) for value in (first, second))
            return Mismatch(f"the keys of {entry}", a, b, None)
        parts = [(key, value, second[key]) for key, value in first.items()]
    elif isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        if len(first) != len(second):
            return Mismatch(f"the length of {entry}", len(first), len(second), None)
        parts = list(zip(range(len(first)), first, second, strict=True))
    else:
        return _leaf_mismatch(entry, _as_array(first), _as_array(second))
    return next(filter(None, (mismatch(f"{entry}[{key!r}]", a, b) for key, a, b in parts)), None)


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _leaf_mismatch(entry: str, a: Any, b: Any) -> Mismatch | None:
    if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        are_objects = object in (a.dtype, b.dtype)
        same = _are_same_objects(a, b) if are_objects else np.array_equal(a, b)
        return None if same else Mismatch(entry, short(a.tolist()), short(b.tolist()), None)
    if a.shape != b.shape:
        return Mismatch(f"the shape of {entry}", list(a.shape), list(b.shape), None)
    different = (a != b) & ~((a != a) & (b != b))
    if not different.any():
        return None
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(wide) - b.astype(wide))
    apart = np.where(different, np.where(np.isnan(apart), np.inf, apart), -1.0)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    place = "".join(f"[{i}]" for i in at)
    return Mismatch(f"{entry}{place}", a[at].item(), b[at].item(), float(apart[at]))


def _are_same_objects(a: Any, b: Any) -> bool:
    """Compare objects by equality, or by repr where there is none."""
    first, second = a.tolist(), b.tolist()
    with suppress(Exception):  # of arrays in it, say: their reprs can still be compared
        if first == second:
            return True
    if repr(first) == repr(second):
        return True
    has_value: bool = type(first).__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
    # A repr with an address says nothing about the object.
    return not has_value and type(first) is type(second) and bool(_ADDRESS.search(repr(first)))


def leaves(entry: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value, each with its place in the entry."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{entry}[{key!r}]", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(f"{entry}[{i}]", item)
    else:
        yield entry, value


def shown(value: Any) -> str:
    """Format a value for a message: floats to eight digits."""
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def short(value: Any) -> str:
    """Format any value for a message, in at most 80 characters."""
    text = " ".join(repr(value.tolist() if isinstance(value, torch.Tensor) else value).split())
    return text if len(text) <= 80 else text[:77] + "..."
