"""The record of one episode, and the ledger's lines."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tdcollect.check import is_count
from tdcollect.display import one_line

COMPLETED = "completed"
FAILED = "failed"
LOST = "lost"

GROUPS = "group_returns"
"""The key of the returns of reward entries, in records that have several."""

FORMAT = 2
"""Version of the files of an evaluation."""


@dataclass(frozen=True, slots=True)  # there may be millions of them
class Episode:
    """The record of one test episode in the ledger.

    Attributes:
        index: its index in the evaluation, from 0.
        env_seed: the seed that its env was reset with.
        policy_seed: the seed of the policy's random numbers.
        status: ``"completed"``; ``"failed"`` if the env raised at every try; ``"lost"`` if it was
            given up because its workers ended again and again.
        restarts: the number of times that it was started again because the env raised.
        episode_return: the sum of its rewards after transforms, carried in float64 and rounded
            once; None if it did not complete, and so for all that follow.
        length: its number of steps.
        terminated: True if its last step is terminal.
        truncated: True if it was cut off at its last step, by a time limit for example.
        success: ``is_success`` or ``success`` of its last info; None if it has neither.
        digest: SHA-256 of its observations, actions, rewards and flags as they are stored (rewards
            in float32).
        group_returns: the return of each reward entry (``"agents/reward"``), of which
            ``episode_return`` is the mean; None if the only one is ``"reward"``.
    """

    index: int
    env_seed: int
    policy_seed: int
    status: str = COMPLETED
    restarts: int = 0
    episode_return: float | None = None
    length: int | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    success: bool | None = None
    digest: str | None = None
    group_returns: dict[str, float] | None = field(default=None, hash=False)

    @property
    def completed(self) -> bool:
        """True if the episode ran to its end."""
        return self.status == COMPLETED

    @property
    def lost(self) -> bool:
        """True if it was given up because its workers ended."""
        return self.status == LOST

    def __repr__(self) -> str:
        outcome = f"return {self.episode_return}, {self.length} steps"
        if not self.completed:
            outcome = f"{self.restarts} restarts"
        return one_line(
            self,
            str(self.index),
            f"{self.status}, {outcome}",
            f"digest {(self.digest or 'none')[:16]}",
        )

    def to_json(self) -> str:
        """Return the record as one line, keys in a fixed order; floats keep their bits."""
        values = {key: getattr(self, name) for name, key in KEYS.items()}
        if self.group_returns is not None:
            values[GROUPS] = self.group_returns
        return json.dumps(values)

    @classmethod
    def from_json(cls, line: str) -> Episode:
        """Read a line that :meth:`to_json` wrote.

        Raises:
            ValueError: for anything else, with the key that is wrong.
        """
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected the record of an episode, got no JSON ({error})") from error
        groups = found.pop(GROUPS, None) if isinstance(found, dict) else None
        if not isinstance(found, dict) or found.keys() != set(KEYS.values()):
            raise ValueError(
                f"expected the record of an episode, with the keys {', '.join(KEYS.values())}, "
                f"got {_shortened(line)}"
            )
        record = cls(**{name: found[key] for name, key in KEYS.items()}, group_returns=groups)
        if groups is not None and not (record.completed and _are_returns(groups)):
            raise ValueError(
                f"expected {GROUPS} to be one float per reward entry, in an episode that "
                f"completed, got {_shortened(groups)}"
            )
        for name, (accepts, expected) in _CHECKS[record.status in (FAILED, LOST)].items():
            value = getattr(record, name)
            if not accepts(value):
                raise ValueError(f"expected {KEYS[name]} to be {expected}, got {_shortened(value)}")
        return record


def ledger_digest(episodes: Iterable[Episode]) -> str:
    """Return the SHA-256 of the records in the order of their index."""
    digest = hashlib.sha256()
    for episode in sorted(episodes, key=lambda episode: episode.index):
        digest.update(episode.to_json().encode() + b"\n")
    return digest.hexdigest()


KEYS = {entry.name: entry.name for entry in fields(Episode) if entry.name != GROUPS}
KEYS["episode_return"] = "return"  # a keyword of Python's
"""The key of each attribute of an :class:`Episode` in a ledger's lines."""


def is_digest(value: Any) -> bool:
    """Tell whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _are_returns(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(returned, float) for returned in value.values())
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


_COUNT = (is_count, "an int, and not negative")
_BOOL = (lambda value: isinstance(value, bool), "true or false")
_NONE = (lambda value: value is None, "null in an episode that did not complete")
_ALWAYS = {
    "index": _COUNT,
    "env_seed": _COUNT,
    "policy_seed": _COUNT,
    "status": (
        lambda value: value in (COMPLETED, FAILED, LOST),
        f"{COMPLETED!r}, {FAILED!r} or {LOST!r}",
    ),
    "restarts": _COUNT,
}
_MEASURED = {
    "episode_return": (lambda value: isinstance(value, float), "a float"),
    "length": (lambda value: is_count(value) and value > 0, "a positive int"),
    "terminated": _BOOL,
    "truncated": _BOOL,
    "success": (lambda value: value is None or isinstance(value, bool), "true, false or null"),
    "digest": (is_digest, "a SHA-256 in hexadecimal"),
}
# The check of each attribute, by whether the episode did not complete.
_CHECKS: dict[bool, dict[str, Any]] = {
    False: {**_ALWAYS, **_MEASURED},
    True: {**_ALWAYS, **dict.fromkeys(_MEASURED, _NONE)},
}


class Shard(NamedTuple):
    """The episodes at every ``shards``-th position of an evaluation, from ``position`` on."""

    position: int
    shards: int

    @classmethod
    def of(cls, value: Any) -> Shard:
        """Return the shard that a pair ``(i, n)`` stands for, checked."""
        if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_count, value)):
            position, shards = map(int, value)
            if position < shards:
                return cls(position, shards)
        raise ValueError(
            "expected shard to be (i, n) with two ints, i from 0 to n - 1, got "
            f"{value!r}; pass (0, 4), (1, 4), (2, 4) and (3, 4) for four shards"
        )

    def select(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the indices of its episodes, out of those of the evaluation."""
        return indices[self.position :: self.shards]

    def __str__(self) -> str:
        return f"shard {self.position}/{self.shards}"
