"""``Collector(..., backend=, num_collectors=)``: the class that it leads to; one of TorchRL's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torchrl.collectors as upstream

from tdcollect._upstream.collectors import drop_generic_defaults, one_env_each, service_backend
from tdcollect.collect.arguments import check_arguments, check_positive_int
from tdcollect.collect.collector import extends
from tdcollect.display import count_text, one_line

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


class AsyncBatchedCollector(upstream.AsyncBatchedCollector):
    """Single envs, each on its own, whose actions one server computes in batches.

    TorchRL's class as it is: its loop steps the envs, and :class:`tdcollect.Collector` has no part
    in it. Envs of ``make_env(...)`` without ``num_envs`` run in it; those with several slots are
    refused. Where envs take unlike times per step, ``make_env(..., wait_num=)`` serves several
    slots.

    Args:
        create_env_fn: makes the env of each; a list of one function per env.
        **kwargs: as :class:`torchrl.collectors.AsyncBatchedCollector` has them.
    """

    @extends(upstream.AsyncBatchedCollector.__init__)
    def __init__(self, create_env_fn: Any, **kwargs: Any):
        check_arguments((create_env_fn,), kwargs)
        if isinstance(create_env_fn, Sequence) and create_env_fn:
            _check_single(create_env_fn[0], kwargs.get("create_env_kwargs") or {})
        self._envs = len(create_env_fn) if isinstance(create_env_fn, Sequence) else 0
        self._described = f"frames_per_batch={kwargs.get('frames_per_batch')}"
        super().__init__(create_env_fn, **kwargs)

    def __repr__(self) -> str:
        return one_line(self, count_text(self._envs, "env"), self._described)


def _check_single(env: Any, env_kwargs: Any) -> None:
    """Raise ValueError for a function that makes an env of several slots."""
    made = env(**(env_kwargs if isinstance(env_kwargs, Mapping) else env_kwargs[0]))
    batch_size = made.batch_size
    made.close()
    if batch_size:
        raise ValueError(
            f"expected functions that make one env without batch size, got one of "
            f"{count_text(batch_size.numel(), 'slot')}; leave num_envs out of make_env, and pass "
            "as many functions, or choose MultiAsyncCollector"
        )
