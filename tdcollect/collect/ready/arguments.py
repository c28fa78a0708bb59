"""Collecting by arrival: the arguments that it allows, and replay buffers that keep slots apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl.data import ReplayBufferEnsemble, SliceSampler

from tdcollect import keys

_REFUSED = {
    "split_trajs": "rows of several slots come in turn; split_trajectories is for batches [N, T]",
    "reset_at_each_iter": "no slot waits for the end of a batch",
    "interruptor": "a batch has as many rows as were asked for",
    "trajs_per_batch": "for whole episodes, use collect(episodes=...)",
    "compact_obs": "the row after a row is another slot's, as a rule",
    "set_truncated": "a batch has no last step of each slot",
    "return_same_td": "each batch has memory of its own",
}


def check_by_arrival(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a collector that have no meaning by arrival."""
    for name, why in _REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"expected no {name} with by_arrival=True, got {name}={value!r}: {why}; leave one "
                "of the two out"
            )
    if options.get("extend_buffer") is False:
        raise ValueError(
            "expected no extend_buffer=False with by_arrival=True: rows are written together; "
            "leave it out"
        )


def by_arrival_needs(reason: str | None) -> ValueError:
    """The error for an env whose slots step together.

    Args:
        reason: why they do; empty for an env without ``wait_num``.
    """
    return ValueError(
        "by_arrival=True is for slots that go on when they are ready: expected an env of "
        "tdcollect.make_env(..., backend='process', wait_num=...), got one whose slots step "
        f"together{f', since {reason}' if reason else ''}; "
        + ("do without it" if reason else "pass wait_num")
    )


def check_arrival_buffer(buffer: Any, slots: int) -> None:
    """Refuse a replay buffer that rows by arrival cannot go into.

    Args:
        buffer: the replay buffer.
        slots: N.

    Raises:
        ValueError: for an ensemble that does not route rows by their slot to N replay buffers, for
            a storage of several dimensions, and for a sampler of slices, which would join rows of
            different slots.
    """
    apart = f"a ReplayBufferEnsemble of {slots} replay buffers with routing_key={keys.SLOT}"
    if isinstance(buffer, ReplayBufferEnsemble):
        if buffer.routing_key != keys.SLOT:
            raise ValueError(
                f"expected {apart}, one per slot, got routing_key={buffer.routing_key}; pass "
                f"routing_key={keys.SLOT}"
            )
        return
    ndim = getattr(getattr(buffer, "storage", None), "ndim", 1)
    if ndim != 1:
        raise ValueError(
            f"expected a storage of one dimension for rows by arrival, got ndim={ndim}; leave ndim "
            f"out, or pass {apart}, which keeps slots apart"
        )
    if isinstance(getattr(buffer, "sampler", None), SliceSampler):
        raise ValueError(  # noqa: TRY004
            f"expected no {type(buffer.sampler).__name__} for rows by arrival, where rows of "
            f"several slots lie side by side; pass {apart}, which keeps slots apart"
        )
