"""The steps of an episode, small enough to keep: actions, rewards, and one number of all else.

They tell two runs of one episode apart, step by step. Each is a structured array ``[L]`` whose
fields are named for what they hold, in the order in which one thing of a step leads to the next:

- ``observation/NAME`` and ``output/NAME``: float64, the *sketch* of what the policy saw, and of
  what else it gave (logits, a value, a hidden state). A sketch is the product of the entry with a
  fixed vector, so that entries that differ have sketches that differ;
- ``action/NAME``: the action as the policy gave it; ``env_action/NAME``: as the env got it, where
  it is under transforms that are known;
- ``reward/NAME``: float64, after transforms; ``[agents]`` where there are several.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tdcollect import keys
from tdcollect.envs.process.values import Array
from tdcollect.keys import Key, entry_path, name_of

Steps: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
"""A structured array ``[L]``, one row per step."""

MOST = 1000
"""The steps of an episode that runs again, and that a witness has, at most."""

OBSERVATION, OUTPUT, ACTION, ENV_ACTION, REWARD = (
    "observation",
    "output",
    "action",
    "env_action",
    "reward",
)
_SKETCH_KEY = 7  # of the seeds from root 0 that no episode has
_AT_ONCE = 2**18  # numbers that are widened to float64 at a time
_UNNAMED = re.compile(r"mask_\d{9,}")  # TorchRL names a dropout's mask by a place in memory


@lru_cache(maxsize=64)
def _weights(size: int) -> Array:
    """The fixed vector ``[size]`` of float64 numbers in [-1, 1)."""
    words = np.random.SeedSequence(0, spawn_key=(_SKETCH_KEY,)).generate_state(size, np.uint32)
    return words * 2.0**-31 - 1


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def sketch(rows: Array) -> Array:
    """Return the sketch of each row of an entry ``[n, t, ...]``, float64 ``[n, t]``.

    The sum over a row does not depend on the other rows, as a matrix product's would. That of a
    text is the first 53 bits of its SHA-256, as a number.
    """
    lead = rows.shape[:2]
    if rows.dtype == object:
        digests = (hashlib.sha256(utf8(text)).digest() for text in rows.reshape(-1))
        numbers = [int.from_bytes(digest[:7]) >> 3 for digest in digests]
        return np.array(numbers, np.float64).reshape(lead)
    if rows.dtype.kind == "c":
        rows = rows.view(rows.real.dtype)
    flat = rows.reshape(lead[0] * lead[1], -1)
    weights = _weights(flat.shape[1])
    sums = np.empty(len(flat))
    at_once = max(1, _AT_ONCE // max(1, flat.shape[1]))
    with np.errstate(all="ignore"):  # infinite entries have the sketches that they have
        for at in range(0, len(flat), at_once):
            (flat[at : at + at_once] * weights).sum(-1, out=sums[at : at + at_once])
    return sums.reshape(lead)


def is_sketched(key: Key) -> bool:
    """Return whether an entry of a step has a sketch: all but flags, ids and unstable names."""
    bookkeeping = key == keys.TRAJ_IDS or name_of(key) in keys.FLAGS or keys.is_next(key)
    return not (bookkeeping or _UNNAMED.fullmatch(name_of(key)))


def joined(columns: Mapping[str, Sequence[Array]]) -> Steps:
    whole = {
        name: parts[0] if len(parts) == 1 else np.concatenate(parts)
        for name, parts in columns.items()
    }
    return from_columns(whole)


@lru_cache(maxsize=64)
def _dtype(kinds: tuple[Any, ...]) -> np.dtype[np.void]:
    """The dtype of these fields; one for all episodes, as it takes more memory than a step."""
    return np.dtype([*kinds])


def from_columns(columns: Mapping[str, Array]) -> Steps:
    """Return steps whose fields are these arrays ``[L, ...]``."""
    kinds = tuple((name, array.dtype, array.shape[1:]) for name, array in columns.items())
    steps = np.empty(len(next(iter(columns.values()))), _dtype(kinds))
    for name, array in columns.items():
        steps[name] = array
    return steps


class StepDifference(NamedTuple):
    """The first step, from 0, and the field in which two runs of an episode differ.

    ``length`` is a field, too: one of the two ended at the step before.
    """

    step: int
    field: str
    first: Any
    second: Any

    @property
    def of_policy(self) -> bool:
        """True if the policy saw the same at the step, and did another thing."""
        return self.field.startswith((OUTPUT, ACTION))

    @property
    def size(self) -> float:
        """Its size, as a share of the larger value; infinite of lengths, and of unlike shapes."""
        one, other = np.asarray(self.first, float), np.asarray(self.second, float)
        if self.field == "length" or one.shape != other.shape:
            return np.inf
        with np.errstate(all="ignore"):
            size = np.abs(one - other).max() / max(np.abs(one).max(), np.abs(other).max())
        return float(np.nan_to_num(size, nan=np.inf))

    def __str__(self) -> str:
        name = self.field.removeprefix(f"{OUTPUT}/")
        a, b = (_shown(value) for value in (self.first, self.second))
        return f"at step {self.step}, {name} is {a} and {b}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def first_difference(first: Steps, second: Steps, cut: bool = False) -> StepDifference | None:
    """Return the first difference of two runs of an episode in the fields that both have.

    ``cut``: they may end at unlike steps, as one or both were cut there.
    """
    common = min(len(first), len(second))
    differences: list[tuple[int, int, str]] = []
    names = [name for name in first.dtype.names or () if name in (second.dtype.names or ())]
    for place, name in enumerate(names):
        one, other = first[name][:common], second[name][:common]
        if one.dtype != other.dtype or one.shape != other.shape:
            differences.append((0, place, name))
        elif (rows := np.flatnonzero(_unlike_rows(one, other))).size:
            differences.append((int(rows[0]), place, name))
    if differences:
        step, _, name = min(differences)
        values = [steps[name][step].tolist() if common else None for steps in (first, second)]
        return StepDifference(step, name, *values)
    if len(first) != len(second) and not cut:
        return StepDifference(common, "length", len(first), len(second))
    return None


def policy_difference(first: Steps, second: Steps) -> tuple[int, StepDifference | None]:
    """Compare what policies did in two envs, as long as they saw the same.

    Returns:
        The number of steps from the first one on in which all observations are equal; and the first
        of these in which something else that the policies gave is not, if there is one.
    """
    names = [*(first.dtype.names or ())]
    observed = [name for name in names if name.startswith(f"{OBSERVATION}/")]
    acted = [name for name in names if name.startswith((f"{OUTPUT}/", f"{ACTION}/"))]
    if not observed or any(name not in (second.dtype.names or ()) for name in observed):
        return 0, None
    unlike = first_difference(first[observed], second[observed], cut=True)
    alike = min(len(first), len(second)) if unlike is None else unlike.step
    if not alike:
        return 0, None
    return alike, first_difference(first[acted][:alike], second[acted][:alike], cut=True)


def _unlike_rows(one: Array, other: Array) -> Array:
    """Mark the rows ``[L]`` that differ in a bit."""
    size = one.dtype.itemsize * int(np.prod(one.shape[1:], dtype=np.int64))
    if not size or not len(one):
        return np.zeros(len(one), bool)
    a, b = (np.ascontiguousarray(rows).view(np.uint8).reshape(-1, size) for rows in (one, other))
    return (a != b).any(-1)


def fields_under(steps: Steps, kind: str) -> Iterator[str]:
    return (name for name in steps.dtype.names or () if name.startswith(f"{kind}/"))


def field(kind: str, key: Key | str) -> str:
    return f"{kind}/{entry_path(key)}"
