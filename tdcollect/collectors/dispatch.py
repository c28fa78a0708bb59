"""``tdcollect.Collector(..., backend=, num_collectors=)``: the class that it leads to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torchrl.collectors as upstream

from tdcollect._upstream.collector import service_backend
from tdcollect._upstream.multi import drop_generic_defaults, one_env_each
from tdcollect.collect.arguments import check_positive_int

_REMOTE = "torchrl.collectors.distributed"
_CLASSES = {
    "process": ("MultiCollector", "torchrl.collectors"),
    "ray": ("RayCollector", _REMOTE),
    "rpc": ("RPCCollector", _REMOTE),
    "distributed": ("DistributedCollector", _REMOTE),
    "submitit": ("DistributedCollector", _REMOTE),
}
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
    """Make the collector that runs others in workers.

    Args:
        args: the env and the policy.
        kwargs: the other arguments of ``Collector``.
        backend: the one that was chosen, not ``"direct"``.
        options: the ``backend_options``, with the class of the collectors inside.
        num_collectors: how many workers; None for one per env.
        sync: whether they collect one batch together; None for not.

    Raises:
        TypeError: for a ``sync`` that is no bool, and a count that is no int.
        ValueError: for options that have an argument of their own, and an unknown backend.
    """
    if num_collectors is not None:
        check_positive_int("num_collectors", num_collectors)
    if sync is not None and not isinstance(sync, bool):
        raise TypeError(f"expected sync to be True, False or None, got {sync!r}")
    twice = sorted({*_SELECTORS, *kwargs, *("create_env_fn", "policy")[: len(args)]} & {*options})
    if twice:
        raise ValueError(
            f"expected each argument once, got {twice} in backend_options, which have an argument "
            "of their own; pass them there alone"
        )
    if backend not in _CLASSES:  # TorchRL names those that there are
        given = None if backend == service_backend() else backend
        return upstream.Collector(*args, backend=given, **kwargs)
    args, kwargs, count = one_env_each(args, {**kwargs, **options}, num_collectors)
    name, pool = _CLASSES[backend]
    drop_generic_defaults(getattr(import_module(pool), name), kwargs)
    if backend == "ray":
        kwargs["num_collectors"] = count
    if backend == "submitit" and kwargs.setdefault("launcher", "submitit") != "submitit":
        raise ValueError(
            f"expected launcher='submitit' for backend='submitit', got {kwargs['launcher']!r}; "
            "choose backend='distributed'"
        )
    # Nothing of ours is around TorchRL's collector on RPC, which torch no longer develops.
    cls = getattr(import_module(pool if backend == "rpc" else "tdcollect.collectors"), name)
    return cls(*args, sync=bool(sync), **kwargs)
