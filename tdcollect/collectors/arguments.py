"""Checks of the arguments of collectors with workers, before any worker is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl.envs import EnvBase

from tdcollect import check
from tdcollect.collect import Collector
from tdcollect.collect.arguments import check_arguments, check_positive_int

ON_WORKER_LOST = ("raise", "restart")
_SINGLE = (None, "single")


def check_workers(
    args: Sequence[Any], kwargs: Mapping[str, Any], on_worker_lost: str, workers: int | None
) -> None:
    """Raise for arguments that cannot be used.

    Args:
        args: the envs and the policy.
        kwargs: arguments by name.
        on_worker_lost: one of :data:`ON_WORKER_LOST`.
        workers: how many there are to be; None if nothing says.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for no workers, and for values that cannot be used.
    """
    check_arguments(args, kwargs)
    if workers is None:
        raise ValueError(
            "expected a list of functions that make envs, one per worker, or num_workers, got one "
            f"function and no number; pass [{getattr(args[0], '__name__', 'make')}] * 2"
        )
    check_positive_int("the number of workers", workers)
    check_on_worker_lost(on_worker_lost)


def check_on_worker_lost(on_worker_lost: Any) -> None:
    """Raise ValueError for another answer to a lost worker than ``"raise"`` and ``"restart"``."""
    check.one_of(ON_WORKER_LOST, on_worker_lost=on_worker_lost)


def check_restartable(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for options with which no worker can take a lost one's place."""
    for name in ("weight_sync_schemes", "weight_recv_schemes", "weight_updater"):
        if kwargs.get(name):
            raise ValueError(
                f"expected no {name} with on_worker_lost='restart', got one: it is bound to the "
                "workers that it was started with; leave it out, or choose on_worker_lost='raise'"
            )
    threshold = kwargs.get("preemptive_threshold")
    if threshold is not None and threshold < 1:
        raise ValueError(
            "expected no preemptive_threshold with on_worker_lost='restart', got "
            f"{threshold}; leave it out, or choose on_worker_lost='raise'"
        )


def collector_class(given: Any) -> Any:
    """The class of the collectors in the workers: tdcollect's for None and ``"single"``.

    Raises:
        ValueError: for another name.
        TypeError: for what makes no collector.
    """
    if given in _SINGLE:
        return Collector
    if isinstance(given, str):
        raise ValueError(  # noqa: TRY004
            f"expected collector_class to be 'single', a class or a function, got {given!r}; leave "
            "it out for tdcollect.Collector"
        )
    if not callable(given):
        raise TypeError(
            f"expected collector_class to be a class or a function, got {type(given).__name__}; "
            "leave it out for tdcollect.Collector"
        )
    return given


def check_shared_buffer(
    buffer: Any,
    env: Callable[..., EnvBase] | EnvBase,
    env_kwargs: Mapping[str, Any],
    *,
    trajectories: bool = False,
) -> None:
    """Refuse a one-dimensional replay buffer, shared by workers, for an env of several slots.

    The env is made once to know its slots, and closed, if the buffer has one dimension and has not
    been written to.

    Args:
        buffer: the replay buffer.
        env: makes the env of a worker.
        env_kwargs: its arguments.
        trajectories: trajectories ``[length]`` are written, rather than batches ``[N, T]``.

    Raises:
        ValueError: for such a buffer, naming ``ndim=2``.
    """
    storage = getattr(buffer, "storage", None)
    if trajectories or getattr(storage, "ndim", None) != 1:
        return
    if getattr(storage, "initialized", True) or getattr(buffer, "transform", None):
        return
    if isinstance(env, EnvBase):
        batch_size = env.batch_size
    else:
        made = env(**env_kwargs)
        batch_size = made.batch_size
        made.close()
    if batch_size:
        name = type(storage).__name__
        raise ValueError(
            "expected a replay buffer with a storage of 2 dimensions, for the batches [N, T] that "
            f"workers with envs of {batch_size.numel()} slots write, got ndim=1; make it "
            f"{name}(max_size, ndim=2), or pass trajs_per_batch to write whole trajectories"
        )
