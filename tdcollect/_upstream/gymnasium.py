"""Private names of gymnasium."""

from __future__ import annotations

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

WRAPPER_STATE: dict[type, tuple[str, ...]] = {
    TimeLimit: ("_elapsed_steps",),
    OrderEnforcing: ("_has_reset",),
    PassiveEnvChecker: (),
}
"""The wrappers that ``gymnasium.make`` puts around an env, and the attributes of their state.

A plain dict of classes: it goes to worker processes by value, without this module.
"""


def steps_of_time_limit(wrapper: TimeLimit) -> int:
    """The number of steps after which the wrapper truncates."""
    return int(wrapper._max_episode_steps)


__all__ = ["WRAPPER_STATE", "steps_of_time_limit"]
