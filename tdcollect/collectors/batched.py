"""AsyncBatchedCollector: single envs that share one policy server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torchrl.collectors as upstream

from tdcollect.collect.arguments import check_arguments
from tdcollect.collect.construction import extends
from tdcollect.display import count_text, one_line


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
