"""Ray: private options and state, under plain names."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["ActorState", "bounded", "started_here", "state_of"]


def bounded(items: int) -> dict[str, Any]:
    """Return the options of a stream that holds so many items that nobody has read yet.

    Its actor waits before it makes more. Without, a stream takes memory without bound.
    """
    return {"num_returns": "streaming", "_generator_backpressure_num_objects": items}


def started_here() -> bool:
    """Tell whether this process has started the Ray that it is connected to."""
    from ray._private import worker

    node = worker._global_node
    return node is not None and bool(node.is_head())


class ActorState(NamedTuple):
    """The cluster's record of an actor.

    Attributes:
        name: Ray's name of its state, such as ``"ALIVE"`` or ``"DEAD"``.
        pid: of its process; 0 before it has one.
        host: the address of its machine.
        reason: why it is dead; empty if it is not, or if nobody knows.
    """

    name: str
    pid: int
    host: str
    reason: str


def state_of(actor: Any) -> ActorState:
    """Return the state of an actor, from the cluster: it takes a quarter of a millisecond."""
    from ray._private import state

    found = state.actors(actor._actor_id.hex())
    cause = found.get("DeathCause")
    died = getattr(cause, "actor_died_error_context", None)
    failed = getattr(cause, "creation_task_failure_context", None)
    reason = getattr(died, "error_message", "") or getattr(failed, "formatted_exception_string", "")
    return ActorState(found["State"], found["Pid"], found["Address"]["IPAddress"], reason)
