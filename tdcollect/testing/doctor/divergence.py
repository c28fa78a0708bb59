"""The first place where two runs that should agree differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tdcollect.display import one_line
from tdcollect.testing.gymnasium_probe import Row

ENTRIES = ("observation", "reward", "terminated", "truncated")

Run = Sequence[Sequence[Row]]
"""Episodes of one env, one after the other: the first after ``reset(seed)``."""


@dataclass(frozen=True)
class Divergence:
    """Where two runs part.

    Attributes:
        seed: the seed that both were reset with.
        episode: 0 for the episode after ``reset(seed)``, 1 for the one after that.
        step: 0 for the reset, 1 for the first step.
        entry: ``"observation"``, ``"reward"``, ``"terminated"``, ``"truncated"``, with the place in
            it that differs most; or ``"length"``.
        first: the value in the one run.
        second: the value in the other.
        size: how far apart these are; None where they are no numbers.
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
        """Whether it is of the size of rounding."""
        if self.size is None or self.entry == "length":
            return False
        return self.size <= 1e-4 * max(1.0, abs(float(self.first)), abs(float(self.second)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        at = "the reset" if self.step == 0 else f"step {self.step}"
        size = "" if self.size is None else f" ({self.size:.2g} apart)"
        return (
            f"seed {self.seed}, episode {self.episode}, {at}: {self.entry} is "
            f"{shown(self.first)} and {shown(self.second)}{size}"
        )


def first_divergence(seed: int, first: Run, second: Run) -> Divergence | None:
    """Where two runs on one seed first differ, or None. NaNs are equal; infos are left out."""
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        for step, (a, b) in enumerate(zip(one, other, strict=False)):
            found = row_difference(a, b)
            if found is not None:
                return Divergence(seed, number, step, *found)
        if len(one) != len(other):
            lengths = len(one) - 1, len(other) - 1
            return Divergence(
                seed, number, min(lengths), "length", *lengths, float(abs(lengths[0] - lengths[1]))
            )
    return None


Difference = tuple[str, Any, Any, float | None]
"""An entry, its two values, and how far apart these are."""


def row_difference(first: Row, second: Row) -> Difference | None:
    """The first entry in which two rows differ, or None."""
    for name in ENTRIES:
        found = next(differences(name, getattr(first, name), getattr(second, name)), None)
        if found is not None:
            return found
    return None


def differences(entry: str, first: Any, second: Any) -> Iterator[Difference]:
    """Where two (nested) values differ, leaf by leaf; in a leaf, the largest difference."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        for key in first:
            yield from differences(f"{entry}[{key!r}]", first[key], second[key])
    elif (
        isinstance(first, (tuple, list))
        and isinstance(second, (tuple, list))
        and len(first) == len(second)
    ):
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from differences(f"{entry}[{i}]", a, b)
    else:
        found = _leaf_difference(entry, first, second)
        if found is not None:
            yield found


def _leaf_difference(entry: str, first: Any, second: Any) -> Difference | None:
    a, b = np.asarray(first), np.asarray(second)
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf":
        if a.dtype == object or b.dtype == object:
            same = first is second or repr(first) == repr(second)
        else:
            same = a.shape == b.shape and bool((a == b).all())
        return None if same else (entry, _short(first), _short(second), None)
    if a.shape != b.shape:
        return f"the shape of {entry}", list(a.shape), list(b.shape), None
    if a.tobytes() == b.tobytes():
        return None
    wide_a, wide_b = (x.astype(np.float64) for x in (a, b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(wide_a - wide_b)
    apart = np.where((a == b) | ((a != a) & (b != b)), 0.0, apart)
    if not apart.any():
        return None
    apart = np.where(np.isnan(apart), np.inf, apart)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    place = "".join(f"[{i}]" for i in at)
    return f"{entry}{place}", a[at].item(), b[at].item(), float(apart[at])


def shown(value: Any) -> str:
    """A value as texts have it: floats to eight digits."""
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
