"""TorchRL's own rollout, watched and timed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector as TorchRLCollector

from tdcollect._upstream.collectors import CollectorState, rollout_with_gradients
from tdcollect.collect.monitor import CollectionLog
from tdcollect.keys import Key


def torchrl_rollout(
    collector: Any, log: CollectionLog, has_acted: bool, **settings: Any
) -> TensorDictBase | None:
    """Run the rollout of a collector's parent; None where each step goes to the replay buffer.

    Args:
        collector: whose parent it is.
        log: notes the steps.
        has_acted: the carried step has the policy's outputs already.
        **settings: attributes of the collector, set for this batch.
    """
    parent = CollectorState(collector)
    policy = call = parent.wrapped_policy
    if has_acted:
        calls = chain([lambda tensordict: tensordict], repeat(policy))
        call = lambda tensordict: next(calls)(tensordict)  # noqa: E731
    call = log.timed("policy_seconds", call)
    wrapped = {} if call is policy else {"policy_call": call}
    with changed(collector, **settings), changed(parent, **wrapped), _watched_env(collector, log):
        if torch.is_grad_enabled():
            return rollout_with_gradients(collector)
        return TorchRLCollector.rollout(collector)


@contextmanager
def _watched_env(collector: Any, log: CollectionLog) -> Iterator[None]:
    """Note the steps that TorchRL's loop takes: it may end early, and may keep no batch."""
    if not log.wanted and log.watch is None:
        yield
        return
    env = collector.env
    step = log.timed("env_seconds", env.step_and_maybe_reset)
    own = env.__dict__.get("step_and_maybe_reset")  # a user may have replaced it

    def noting(tensordict: TensorDictBase) -> Any:
        if log.watch is not None:
            log.watch.begin(tensordict)
        stepped = step(tensordict)
        try:
            log.note(stepped, env)
        except BaseException:
            collector._runner.stale = True  # the loop has yet to go on to the env's step
            raise
        return stepped

    env.__dict__["step_and_maybe_reset"] = noting
    try:
        yield
    finally:
        del env.__dict__["step_and_maybe_reset"]
        if own is not None:
            env.__dict__["step_and_maybe_reset"] = own


def warn_of_lost(parent: CollectorState, entries: Iterable[Key]) -> None:
    """Warn of entries that the parent's buffers, made before they came, do not take."""
    held = parent.preallocated.keys(True) if parent.preallocates else entries
    lost = [key for key in entries if key not in held]
    if lost:
        warnings.warn(
            f"the policy's entries {lost} are no dense tensors, and are not in the batches: "
            "TorchRL's buffers do not hold them; pass use_buffers=False to keep them",
            stacklevel=2,
        )


@contextmanager
def changed(thing: Any, **settings: Any) -> Iterator[None]:
    """Change attributes of something for a while."""
    before = {name: getattr(thing, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
