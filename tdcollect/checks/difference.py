"""The first place where two runs that should agree differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from tdcollect.checks.player import Row
from tdcollect.display import one_line

Episodes: TypeAlias = Sequence[Sequence[Row]]
"""Episodes of one env, one after the other: the first after ``reset(seed)``."""

_MANY = 1000  # items of a container that is compared as an attribute
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


class Mismatch(NamedTuple):
    """One value that differs.

    Attributes:
        entry: the entry, with the place in it that differs most.
        first, second: its two values.
        size: how far apart they are; None if they are not numbers.
    """

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
        """True if the difference is of the size of rounding."""
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


def first_divergence(
    seed: int, first: Episodes, second: Episodes, exact: bool = False
) -> Divergence | None:
    """Return the first difference of two runs on one seed, or None.

    Args:
        seed: the seed of both runs.
        first, second: as many episodes each.
        exact: tell 0.0 from -0.0, and NaNs by their bits; otherwise these are equal.
    """
    for episode, (one, other) in enumerate(zip(first, second, strict=True)):
        for step, (a, b) in enumerate(zip(one, other, strict=False)):
            found = row_mismatch(a, b, exact)
            if found is not None:
                return Divergence(seed, episode, step, *found)
        if len(one) != len(other):
            lengths = len(one) - 1, len(other) - 1
            apart = float(abs(lengths[0] - lengths[1]))
            return Divergence(seed, episode, min(lengths), "length", *lengths, apart)
    return None


def row_mismatch(first: Row, second: Row, exact: bool = False) -> Mismatch | None:
    """Return the first entry in which two rows differ, or None."""
    for key, value in first.entries.items():
        name = key if isinstance(key, str) else repr(key)
        if key not in second.entries:
            return Mismatch(name, "there", "gone", None)
        found = mismatch(name, value, second.entries[key], exact)
        if found is not None:
            return found
    return None


def mismatch(entry: str, first: Any, second: Any, exact: bool = False) -> Mismatch | None:
    """Return the first leaf in which two (nested) values differ, or None."""
    return next(_mismatches(entry, first, second, exact), None)


def _mismatches(entry: str, first: Any, second: Any, exact: bool) -> Iterator[Mismatch]:
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            a, b = (short(sorted(map(str, value))) for value in (first, second))
            yield Mismatch(f"the keys of {entry}", a, b, None)
            return
        for key in first:
            yield from _mismatches(f"{entry}[{key!r}]", first[key], second[key], exact)
    elif isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        if len(first) != len(second):
            yield Mismatch(f"the length of {entry}", len(first), len(second), None)
            return
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _mismatches(f"{entry}[{i}]", a, b, exact)
    else:
        found = _leaf_mismatch(entry, _as_array(first), _as_array(second), exact)
        if found is not None:
            yield found


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _leaf_mismatch(entry: str, a: Any, b: Any, exact: bool) -> Mismatch | None:
    if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        if a.dtype == object or b.dtype == object:
            same = _are_same_objects(a, b)
        else:
            same = a.shape == b.shape and bool((a == b).all())
        return None if same else Mismatch(entry, short(a.tolist()), short(b.tolist()), None)
    if a.shape != b.shape:
        return Mismatch(f"the shape of {entry}", list(a.shape), list(b.shape), None)
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return None
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(wide) - b.astype(wide))
    different = (a != b) & ~((a != a) & (b != b))
    if exact:
        bits = [x.tobytes() != y.tobytes() for x, y in zip(a.flat, b.flat, strict=True)]
        different = np.array(bits, bool).reshape(a.shape)
    if not different.any():
        return None
    apart = np.where(different, apart, -1.0)
    apart = np.where(np.isnan(apart), np.inf, apart)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    place = "".join(f"[{i}]" for i in at)
    return Mismatch(f"{entry}{place}", a[at].item(), b[at].item(), float(apart[at]))


def _are_same_objects(a: Any, b: Any) -> bool:
    """Compare what is not numbers or text: by equality, or by repr where there is none."""
    first, second = a.tolist(), b.tolist()
    if first is second:
        return True
    has_value: bool = type(first).__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
    if has_value:
        try:
            if first == second:
                return True
        except Exception:  # of arrays in it, say: their reprs can still be compared
            pass
    if repr(first) == repr(second):
        return True
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


def unlike_attributes(first: Any, second: Any) -> list[str]:
    """Return the plain attributes in which two envs, or their wrappers, differ, with both values.

    Numbers, strings, arrays, random generators, and lists, tuples and dicts of these are compared.
    Other attributes (a simulator, say) are left out.
    """
    unlike = []
    for one, other in zip(_layers(first), _layers(second), strict=True):
        # An attribute that one of them has not set yet may stand in its class.
        for name in vars(one) | vars(other):
            mine, its = getattr(one, name, None), getattr(other, name, None)
            if not (_is_plain(mine) and _is_plain(its)):
                continue
            found = mismatch(name, _settled(mine), _settled(its))
            if found is not None:
                values = f" ({shown(found.first)} and {shown(found.second)})"
                drawn = isinstance(mine, np.random.Generator)
                unlike.append(f"{type(one).__name__}.{found.entry}{'' if drawn else values}")
    return unlike


def _layers(env: Any) -> Iterator[Any]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < _MANY and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) < _MANY and all(map(_is_plain, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (int, float, str, np.generic, np.random.Generator))


def _settled(value: Any) -> Any:
    return repr(value.bit_generator.state) if isinstance(value, np.random.Generator) else value
