"""TorchRL's own rollout: watched, timed, and with the policy on StepDicts where that is known."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.modules import RandomPolicy

from tdcollect._upstream.collectors import CollectorState, rollout_with_gradients
from tdcollect.collect.arguments import missing_entries
from tdcollect.collect.policy import Policy
from tdcollect.collect.statistics import CollectionLog
from tdcollect.collect.step_dict import StepDict, flat, is_plain
from tdcollect.keys import Key

Lower = Callable[[StepDict], Policy]


class CollectorPart:
    """A part of a collector, which it does not keep alive."""

    def __init__(self, collector: Any):
        self._ref = weakref.ref(collector)

    @property
    def _collector(self) -> Any:
        return self._ref()

    @property
    def _parent(self) -> CollectorState:
        """The private state of the collector's parent."""
        return CollectorState(self._collector)


class TorchRLLoop(CollectorPart):
    """Runs the rollout of a collector's parent.

    Args:
        collector: is not kept alive.
        lost: called where a step is lost: the carried step does not say where the envs are.
    """

    def __init__(self, collector: Any, lost: Callable[[], None]):
        super().__init__(collector)
        self._lost = lost

    def rollout(
        self,
        log: CollectionLog,
        lower: Lower | None,
        has_acted: bool,
        **settings: Any,
    ) -> TensorDictBase | None:
        """Collect one batch; None where each step goes to the replay buffer by itself.

        Args:
            log: notes the steps.
            lower: gives the policy on StepDicts; None where it must be called as it is.
            has_acted: the carried step has the policy's outputs already.
            **settings: attributes of the collector, set for this batch.
        """
        collector = self._collector
        with (
            changed(collector, **settings),
            self._wrapped_policy(log, lower, has_acted),
            self._watched_env(log),
        ):
            if torch.is_grad_enabled():
                return rollout_with_gradients(collector)
            return TorchRLCollector.rollout(collector)

    @contextmanager
    def _wrapped_policy(
        self, log: CollectionLog, lower: Lower | None, has_acted: bool
    ) -> Iterator[None]:
        """Wrap the policy while TorchRL's loop calls it: on StepDicts, and timed."""
        parent = self._parent
        policy = call = parent.wrapped_policy
        if has_acted:
            call = _SkipsFirstCall(policy)
        elif lower is not None and isinstance(policy, (TensorDictModuleBase, RandomPolicy)):
            call = _PolicyOnSteps(policy, lower, self.warn_of_lost)
        call = log.timed("policy_seconds", call)
        if call is policy:
            yield
            return
        parent.policy_call = call
        try:
            yield
        finally:
            parent.policy_call = policy

    @contextmanager
    def _watched_env(self, log: CollectionLog) -> Iterator[None]:
        """Note the steps that TorchRL's loop takes: it may end early, and may keep no batch."""
        if not log.wanted and log.watch is None:
            yield
            return
        env = self._collector.env
        step = log.timed("env_seconds", env.step_and_maybe_reset)
        own = env.__dict__.get("step_and_maybe_reset")  # a user may have replaced it

        def noting(tensordict: TensorDictBase) -> Any:
            if log.watch is not None:
                log.watch.begin(tensordict)
            stepped = step(tensordict)
            try:
                log.note(stepped, env)
            except BaseException:
                self._lost()  # the loop has yet to go on to the step that the env is at
                raise
            return stepped

        env.__dict__["step_and_maybe_reset"] = noting
        try:
            yield
        finally:
            del env.__dict__["step_and_maybe_reset"]
            if own is not None:
                env.__dict__["step_and_maybe_reset"] = own

    def warn_of_lost(self, entries: Iterable[Key]) -> None:
        """Warn of entries that the parent's buffers, made before they came, do not take."""
        parent = self._parent
        held = parent.preallocated.keys(True) if parent.preallocates else entries
        lost = [key for key in entries if key not in held]
        if lost:
            warnings.warn(
                f"the policy's entries {lost} are no dense tensors, and are not in the batches: "
                "TorchRL's buffers do not hold them; pass use_buffers=False to keep them",
                stacklevel=2,
            )


class _SkipsFirstCall:
    """A policy that has acted on the first step already."""

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]):
        self._policy = policy
        self._acted = True

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._acted:
            self._acted = False
            return tensordict
        return self._policy(tensordict)


class _PolicyOnSteps:
    """A policy of TensorDict modules without the bookkeeping between them.

    Args:
        policy: called as it is where its modules are not known.
        lower: gives the policy on StepDicts.
        warn_of_lost: called with entries that are no dense tensors.
    """

    def __init__(
        self, policy: TensorDictModuleBase, lower: Lower, warn_of_lost: Callable[[list[Key]], None]
    ):
        self._policy = policy
        self._lower = lower
        self._warn_of_lost = warn_of_lost
        self._lowered: Policy | None = None
        self._as_it_is = False

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._as_it_is:
            return self._policy(tensordict)
        step = flat(tensordict)
        if self._lowered is None:
            self._lowered = self._lower(step)
            if not self._lowered.straight:
                self._as_it_is = True
                try:
                    return self._policy(tensordict)
                except KeyError as error:
                    missing = missing_entries(self._policy, step)
                    raise error if missing is None else KeyError(missing) from error
        given = dict(step)
        self._lowered(step)
        for key, value in step.items():
            if given.get(key) is not value:
                tensordict.set(key, value)
                if not is_plain(value):  # the next steps could not have it
                    self._as_it_is = True
                    self._warn_of_lost([key])
        return tensordict


@contextmanager
def changed(collector: Any, **settings: Any) -> Iterator[None]:
    """Change attributes of a collector for a while."""
    before = {name: getattr(collector, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(collector, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(collector, name, value)
