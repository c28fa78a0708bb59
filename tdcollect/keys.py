"""Names of the entries that tdcollect reads and writes, and the axis letters of its docstrings.

Every module takes its entry names from here; they are TorchRL's own.

Axis letters: **N** env slots, **T** steps, **B** trajectories, **L** longest trajectory,
**E** episodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

Key: TypeAlias = str | tuple[str, ...]  # of an entry; a tuple for a nested one

OBSERVATION = "observation"
PIXELS = "pixels"
ACTION = "action"
REWARD = "reward"
EXACT_REWARD = "_exact_reward"  # under "next": in float64, for the ledger's returns alone
SENT = "_sent"  # under "next": the actions as the env got them, for what is kept of steps alone
RAW_REWARD = "raw_reward"  # under "next": the env's, where learners are shown a shaped one
DONE = "done"
TERMINATED = "terminated"
TRUNCATED = "truncated"
FLAGS = (DONE, TERMINATED, TRUNCATED)
NEXT = "next"

COLLECTOR = "collector"
TRAJ_IDS = (COLLECTOR, "traj_ids")
SLOT = (COLLECTOR, "slot")  # of each row, where rows come as they arrive
MASK = "mask"  # beside the trajectory ids
LOOKBACK = "lookback"  # beside the trajectory ids
NEXT_DONE = (NEXT, DONE)
TIME = "time"
FULL_ACTION_SPEC = "full_action_spec"  # of an env's input_spec

RESET = "_reset"
STEP = "_step"

STEP_COUNT = "step_count"
EPISODE_REWARD = "episode_reward"
IS_INIT = "is_init"
ENV_ERROR = "env_error"  # under "next": the step failed, and the env was made again
POLICY_VERSION = "policy_version"

RESERVED = frozenset(
    {ACTION, REWARD, EXACT_REWARD, SENT, DONE, TERMINATED, TRUNCATED, NEXT, COLLECTOR, RESET, STEP}
)
"""Names that an observation or info entry cannot take, since the batch uses them already."""


def as_path(key: Key) -> tuple[str, ...]:
    """The names from the root to an entry."""
    return (key,) if isinstance(key, str) else tuple(key)


def entry_path(key: Key) -> str:
    """The key as text: ``"agents/observation"`` for a nested entry."""
    return key if isinstance(key, str) else "/".join(key)


def name_of(key: Key) -> str:
    """The last name of a key."""
    return key if isinstance(key, str) else key[-1]


def key_of(path: tuple[str, ...]) -> Key:
    """The key of an entry, from the names from the root to it."""
    return path[0] if len(path) == 1 else path


def under(parent: str, key: Key) -> tuple[str, ...]:
    """The key of an entry in the TensorDict that a parent nests."""
    return (parent, key) if isinstance(key, str) else (parent, *key)


def beside(key: Key, name: str) -> Key:
    """The entry called ``name`` in the same TensorDict as ``key``."""
    return name if isinstance(key, str) else (*key[:-1], name)


def is_next(key: Key) -> bool:
    """Return whether the entry belongs to the following step."""
    return key[0] == NEXT


def under_next(key: Key) -> tuple[str, ...]:
    """The key of an entry in the following step."""
    return under(NEXT, key)


def from_next(key: Key) -> Key:
    """The key of an entry of the following step, once that step is the present one."""
    return key[1] if len(key) == 2 else tuple(key[1:])


def by_name(entries: Iterable[tuple[Key, Any]]) -> dict[str, Any]:
    """Entries by name; nested ones in dicts of their own."""
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
