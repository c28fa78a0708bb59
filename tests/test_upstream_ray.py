"""The private names of Ray, held against its own code.

tests/evaluation/test_ray.py and tests/collectors/test_ray_collectors.py run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tdcollect._upstream.ray import ActorState, bounded, started_here, state_of

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")


def test_streams_can_be_bounded() -> None:
    @ray.method(**bounded(3))
    def stream() -> Iterator[int]:
        yield 1

    assert stream.__ray_generator_backpressure_num_objects__ == 3
    assert stream.__ray_num_returns__ == "streaming"


def test_a_process_without_ray_has_started_none() -> None:
    if not ray.is_initialized():
        assert not started_here()


def test_the_state_of_an_actor_is_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of lost workers reads the state of a real one."""
    from ray._private import state

    context = SimpleNamespace(error_message="it was killed")
    cause = SimpleNamespace(actor_died_error_context=context)
    found = {"State": "DEAD", "Pid": 7, "Address": {"IPAddress": "here"}, "DeathCause": cause}
    monkeypatch.setattr(state, "actors", {"ab": found}.__getitem__)
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "ab"))
    told = state_of(actor)
    assert told == ActorState("DEAD", 7, "here", "it was killed")
    assert (told.name, told.pid, told.host, told.reason) == tuple(told)
