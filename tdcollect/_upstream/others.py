"""Private names of gymnasium's wrappers, EnvPool and Ray; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
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


steps_of_time_limit: Callable[[TimeLimit], int] = attrgetter("_max_episode_steps")
"""The number of steps after which the wrapper truncates."""


class FlatPool(NamedTuple):
    """The methods of a pool below its ``step`` and ``reset``; ``receive()`` follows either."""

    names: list[str]
    reset: Callable[[Any], None]
    """Starts episodes in slots, an int32 array."""
    receive: Callable[[], list[Any]]
    """Waits for the slots that were sent something; gives their arrays."""
    nest: Callable[..., Any]
    """Nests arrays as ``pool.step`` gives them: ``nest(arrays, True, True)[0]`` is observations."""


def flat_pool(pool: Any) -> FlatPool:
    return FlatPool(list(pool._state_keys), pool._reset, pool._recv, pool._to)


def takes_reset_mask(env: Any) -> bool:
    """Return whether a vector env of ale-py's resets single slots, right after an end too.

    ``reset(options={"reset_mask": ...})`` does so in all modes; the next step is then a real one.
    """
    names = {(kind.__module__, kind.__name__) for kind in type(env).__mro__}
    return ("ale_py.vector_env", "AtariVectorEnv") in names


def bounded(items: int) -> dict[str, Any]:
    """The options of a stream whose actor waits while nobody has read so many of its items."""
    return {"num_returns": "streaming", "_generator_backpressure_num_objects": items}


def started_here() -> bool:
    """Return whether this process has started the Ray that it is connected to."""
    from ray._private import worker

    node = worker._global_node
    return node is not None and bool(node.is_head())


class ActorState(NamedTuple):
    """The cluster's record of an actor."""

    name: str
    """Ray's name of its state, such as ``"ALIVE"`` or ``"DEAD"``."""
    pid: int
    """0 before it has a process."""
    host: str
    reason: str
    """Why it is dead; empty if it is not, or if nobody knows."""


def state_of(actor: Any) -> ActorState:
    """The state of an actor, from the cluster: it takes a quarter of a millisecond."""
    from ray._private import state

    record = state.actors(actor._actor_id.hex())
    cause = record.get("DeathCause")
    died = getattr(cause, "actor_died_error_context", None)
    failed = getattr(cause, "creation_task_failure_context", None)
    reason = getattr(died, "error_message", "") or getattr(failed, "formatted_exception_string", "")
    return ActorState(record["State"], record["Pid"], record["Address"]["IPAddress"], reason)
