"""Private names of gymnasium's wrappers and of EnvPool; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class FlatPool(NamedTuple):
    """The methods of a pool below its ``step`` and ``reset``, which nest its arrays.

    A step is ``pool.send(actions, slots)``, then ``receive()``; a reset, ``reset(slots)``, then
    ``receive()``.
    """

    names: list[str]
    """Of the arrays that ``receive`` gives."""
    reset: Callable[[Any], None]
    """Starts episodes in slots, an int32 array."""
    receive: Callable[[], list[Any]]
    """Waits for the slots that were sent something; gives their arrays."""
    nest: Callable[..., Any]
    """Nests arrays as ``pool.step`` gives them: ``nest(arrays, True, True)[0]`` is observations."""


def flat_pool(pool: Any) -> FlatPool:
    """The methods of a pool of ``envpool.make_gymnasium``, bound to it."""
    return FlatPool(list(pool._state_keys), pool._reset, pool._recv, pool._to)


__all__ = [
    "WRAPPER_STATE",
    "FlatPool",
    "flat_pool",
    "steps_of_time_limit",
]
