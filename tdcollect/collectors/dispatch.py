"""Arguments of collectors with workers: their checks, and the class that ``Collector`` leads to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torchrl.collectors as upstream
from torchrl.envs import EnvBase

from tdcollect import check
from tdcollect._upstream.collectors import drop_generic_defaults, one_env_each, service_backend
from tdcollect.collect import Collector
from tdcollect.collect.arguments import whole_trajectories

_SELECTORS = ("backend_options", "num_collectors", "num_workers", "sync")


def collector_of_workers(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    backend: str,
    options: Mapping[str, Any],
    num_collectors: int | None,
    sync: bool | None,
) -> Any:
    """Make the collector that runs others in workers, for ``Collector(..., backend=)``."""
    check.positive_int_or_none(num_collectors=num_collectors)
    if sync is not None and not isinstance(sync, bool):
        raise TypeError(f"expected sync to be True, False or None, got {sync!r}")
    twice = sorted({*_SELECTORS, *kwargs, *("create_env_fn", "policy")[: len(args)]} & {*options})
    if twice:
        raise ValueError(
            f"expected each argument once, got {twice} in backend_options, which have an argument "
            "of their own; pass them there alone"
        )
    if backend not in ("process", "ray"):
        # On torch.distributed and its RPC the collectors are TorchRL's, with ours in workers.
        # Of others, TorchRL names those that there are.
        chosen = None if backend == service_backend() else backend
        how = {"backend_options": options, "num_collectors": num_collectors, "sync": sync}
        return upstream.Collector(*args, backend=chosen, **how, **kwargs)
    args, kwargs, count = one_env_each(args, {**kwargs, **options}, num_collectors)
    name = "MultiCollector" if backend == "process" else "RayCollector"
    cls = getattr(import_module("tdcollect.collectors"), name)
    drop_generic_defaults(cls, kwargs)
    if backend == "ray":
        kwargs["num_collectors"] = count
    return cls(*args, sync=bool(sync), **kwargs)


def _batch_size(env: Any, env_kwargs: Any) -> torch.Size:
    """The batch size of the first worker's env, which is made and closed for that."""
    if isinstance(env, EnvBase):
        return env.batch_size
    env_kwargs = env_kwargs or {}
    one = env(**(env_kwargs if isinstance(env_kwargs, Mapping) else env_kwargs[0]))
    one.close()
    return one.batch_size


def check_on_worker_lost(on_worker_lost: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown answer to a lost worker, and for options that forbid it."""
    check.one_of(("raise", "restart"), on_worker_lost=on_worker_lost)
    if on_worker_lost == "raise":
        return
    for name in ("weight_sync_schemes", "weight_recv_schemes", "weight_updater"):
        if options.get(name):
            raise ValueError(
                f"expected no {name} with on_worker_lost='restart', got one: it is bound to the "
                "workers that it was started with; leave it out, or choose on_worker_lost='raise'"
            )
    threshold = options.get("preemptive_threshold")
    if threshold is not None and threshold < 1:
        raise ValueError(
            "expected no preemptive_threshold with on_worker_lost='restart', got "
            f"{threshold}; leave it out, or choose on_worker_lost='raise'"
        )


def class_of_collectors(chosen: Any) -> Any:
    """Return the class of the collectors in the workers: tdcollect's for None and ``"single"``."""
    if chosen in (None, "single"):
        return Collector
    if not callable(chosen):
        kind = ValueError if isinstance(chosen, str) else TypeError
        raise kind(
            f"expected collector_class to be 'single', a class or a function, got {chosen!r}; "
            "leave it out for tdcollect.Collector"
        )
    return chosen


def check_shared_buffer(env: Any, policy: Any, options: Mapping[str, Any]) -> None:
    """Refuse a one-dimensional replay buffer, shared by workers, for an env of several slots.

    The env is made once to know its slots, and closed, unless its batches fit in any case.
    """
    buffer = options.get("replay_buffer")
    storage = getattr(buffer, "storage", None)
    if getattr(storage, "ndim", None) != 1 or getattr(storage, "initialized", True):
        return
    if getattr(buffer, "transform", None) or not options.get("extend_buffer", True):
        return
    made_inside = policy is None and options.get("policy_factory") is not None
    if made_inside or whole_trajectories(options):
        return
    batch_size = _batch_size(env, options.get("create_env_kwargs"))
    if batch_size:
        name = type(storage).__name__
        raise ValueError(
            "expected a replay buffer with a storage of 2 dimensions, for the batches [N, T] that "
            f"workers with envs of {batch_size.numel()} slots write, got ndim=1; make it "
            f"{name}(max_size, ndim=2), or pass trajs_per_batch to write whole trajectories"
        )
