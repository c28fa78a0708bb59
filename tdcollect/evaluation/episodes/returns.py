"""From the rewards of an episode to its return, and to those of groups of agents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.collect.step_dict import Key, entry_path

COMBINED = "mean over the agents of a group, then over groups"
"""The rule by which several rewards of a step make one return, as the manifest says it."""


class Returns:
    """The reward entries of an env, and how they make a return.

    The only entry ``"reward"`` with one value per step is summed. Elsewhere the return of an entry
    (of a group of agents, say) is the mean over its values (the agents) of their sums over the
    episode, and the return of the episode is the mean over entries.

    Args:
        env: the env with its transforms.
        chosen: the entries that count, as paths like ``"agents/reward"``; None for all.

    Attributes:
        entries: all reward entries, in the order of their paths.
        counted: those that count.
        is_plain: True for the only entry ``"reward"`` with one value per step.

    Raises:
        ValueError: if the env has no such entry.
    """

    def __init__(self, env: EnvBase, chosen: Sequence[str] | None = None):
        of = {entry_path(key): key for key in env.reward_keys}
        unknown = [path for path in chosen or () if path not in of]
        if unknown:
            raise ValueError(
                f"expected reward_keys among the env's, {', '.join(sorted(of))}, got "
                f"{', '.join(unknown)}"
            )
        self.entries: list[Key] = [of[path] for path in sorted(of)]
        self.counted: list[Key] = [of[path] for path in sorted(chosen or of)]
        shape = env.full_reward_spec_unbatched[self.entries[0]].shape
        self.is_plain = self.entries == [keys.REWARD] and shape.numel() == 1

    def described(self) -> dict[str, Any] | None:
        """Return the entry of the manifest; None for a plain return."""
        if self.is_plain:
            return None
        return {"rewards": [entry_path(key) for key in self.counted], "combined": COMBINED}


def combined(rewards: Mapping[str, np.ndarray[Any, Any]]) -> tuple[float, dict[str, float]]:
    """Return an episode's return, and that of each reward entry.

    Args:
        rewards: float64 ``[L, agents]``, by path.
    """
    returns = {path: exact_sum(values) / values.shape[1] for path, values in rewards.items()}
    return exact_sum(np.array([*returns.values()])) / len(returns), returns


def exact_sum(rewards: np.ndarray[Any, Any]) -> float:
    """Return the sum of float64 values, rounded once; infinite or NaN if it has no other."""
    rewards = rewards.reshape(-1)
    odd = rewards[~np.isfinite(rewards)]
    if odd.size:
        return sum(odd.tolist())
    try:
        return math.fsum(rewards.tolist())
    except OverflowError:  # maybe of a partial sum only
        return math.fsum((rewards * 2.0**-64).tolist()) * 2.0**64
