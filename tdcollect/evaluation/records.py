"""The ledger of an evaluation: one record an episode."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COMPLETED = "completed"
FAILED = "failed"


@dataclass(frozen=True)
class Episode:
    """What the ledger holds of one test episode.

    Attributes:
        index: its number in the evaluation, from 0.
        env_seed: what its env was reset with.
        policy_seed: what the policy's random numbers started from.
        status: ``"completed"``, or ``"failed"`` where the env raised at every try.
        restarts: how many times it was started again because the env raised.
        episode_return: the sum of its rewards after transforms, carried in float64 and rounded
            once; None where it failed.
        length: its number of steps; None where it failed.
        terminated: whether the env said that its last step is terminal.
        truncated: whether it was cut off at its last step, by a time limit, say.
        success: what the env said in its last info's ``is_success`` or ``success``; None where it
            says nothing.
        digest: SHA-256 of its observations, actions, rewards and flags as they are stored (rewards
            in float32); None where it failed.
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

    @property
    def completed(self) -> bool:
        """Whether the episode ran to its end."""
        return self.status == COMPLETED

    def to_json(self) -> str:
        """The record as one line, keys in a fixed order; floats read back to the same bits."""
        return json.dumps({_written(name): value for name, value in vars(self).items()})

    @classmethod
    def from_json(cls, line: str | Mapping[str, Any]) -> Episode:
        """The record of a line that :meth:`to_json` wrote."""
        fields = json.loads(line) if isinstance(line, str) else line
        return cls(**{_NAMES.get(name, name): value for name, value in fields.items()})


_NAMES = {"return": "episode_return"}  # a keyword of Python's


def _written(name: str) -> str:
    return "return" if name == _NAMES["return"] else name


def ledger_digest(episodes: Iterable[Episode]) -> str:
    """SHA-256 of the records in the order of their index: one number for a whole evaluation."""
    ordered = sorted(episodes, key=lambda episode: episode.index)
    return hashlib.sha256("".join(e.to_json() + "\n" for e in ordered).encode()).hexdigest()
