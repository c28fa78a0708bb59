"""Hooks: what a user's object is told while a collector works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.collect.statistics import Bools, Floats, Ints, Statistics
from tdcollect.collect.step_dict import StepDict, under_next
from tdcollect.envs.wrapper import nested


class Hooks:
    """Override what is of interest, and pass an instance as ``Collector(..., hooks=...)``.

    Each method is called once for all the slots that it concerns: ``slots`` is int64 ``[K]``,
    ascending, counted over all batch dims of the env. Methods that are not overridden cost nothing.
    TensorDicts that they are given share memory with the batch: do not write into them.

    Where a method raises, collection stops with a ``RuntimeError`` that names it.
    """

    def env_created(self, env: EnvBase) -> None:
        """The collector has its env, with all its transforms; nothing has been collected.

        Args:
            env: of the collector.
        """

    def episodes_started(self, slots: Ints, row: TensorDictBase) -> None:
        """The next step of these slots is the first of an episode.

        Args:
            slots: ``[K]``.
            row: what all slots show before that step, of the env's batch size.
        """

    def stepped(self, slots: Ints, step: TensorDictBase) -> None:
        """These slots have taken a step.

        Args:
            slots: ``[K]``; all of them, but for the last steps of ``collect(episodes=...)``.
            step: of the env's batch size, as a step of a batch; what followed is under ``"next"``.
                Its rows of other slots mean nothing.
        """

    def episodes_ended(self, slots: Ints, returns: Floats, lengths: Ints) -> None:
        """Episodes have ended with the step just told of; none that an env's failure broke off.

        Args:
            slots: ``[K]``.
            returns: ``[K]`` float64, sums of the env's rewards as batches hold them (float32).
            lengths: ``[K]`` int64, in steps.
        """

    def collection_ended(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """A batch has been collected, or what a call of ``collect`` asked for.

        Args:
            batch: before reward shaping and ``postproc``; None where each step went to the replay
                buffer by itself.
            stats: of the collector, with this collection in it.
        """


AnyHooks: TypeAlias = Hooks | Sequence[Hooks] | None

_EVENTS = tuple(name for name in vars(Hooks) if not name.startswith("_"))


def as_hooks(given: AnyHooks) -> list[Hooks]:
    """A list of hooks.

    Raises:
        TypeError: for what is none.
    """
    listed = [] if given is None else [given] if isinstance(given, Hooks) else given
    if not isinstance(listed, Sequence) or not all(isinstance(hook, Hooks) for hook in listed):
        raise TypeError(
            "expected hooks to be an instance of a subclass of tdcollect.Hooks, or a list of them, "
            f"got {given!r}"
        )
    return list(listed)


_SUMS = ("_fresh", "_returns", "_lengths")


class Watch:
    """Tells hooks of a collection's steps.

    Args:
        hooks: at least one.
    """

    def __init__(self, hooks: list[Hooks]):
        self._calls = {
            event: [
                getattr(hook, event)
                for hook in hooks
                if getattr(type(hook), event) is not getattr(Hooks, event)
            ]
            for event in _EVENTS
        }
        self.steps = any(
            self._calls[event] for event in ("episodes_started", "stepped", "episodes_ended")
        )

    def attach(self, env: EnvBase) -> None:
        """The collector's env, once it is made."""
        self._batch_size = env.batch_size
        self._reward_keys = list(env.reward_keys)
        self._every = np.arange(env.batch_size.numel())
        self._fresh = np.ones(len(self._every), bool)
        self._returns = np.zeros(len(self._every))
        self._lengths = np.zeros(len(self._every), np.int64)
        self._tell("env_created", env)

    def drop(self, slots: Bools | None = None) -> None:
        """Episodes are about to start in all slots, or in these; those in flight have no end."""
        marked: Any = slice(None) if slots is None else slots
        self._fresh[marked] = True
        self._forget(marked)

    def begin(self, row: TensorDictBase) -> None:
        """A loop begins, with this row."""
        if self._fresh.any():
            self.started(self._fresh.nonzero()[0], lambda: row)

    def started(self, slots: Ints | list[int], row: Callable[[], TensorDictBase]) -> None:
        """Episodes begin in these slots, with the row given."""
        self._fresh[slots] = False
        if self._calls["episodes_started"]:
            self._tell("episodes_started", np.asarray(slots, np.int64), row())

    def stepped(
        self,
        slots: list[int] | None,
        ended: list[int],
        step: Callable[[], TensorDictBase],
        rewards: Iterable[torch.Tensor],
        lost: Sequence[int] = (),
    ) -> None:
        """Slots (None for all) have taken a step, with which the episodes of some ended.

        In those of ``lost`` it failed: their episodes have no end.
        """
        stepped = self._every if slots is None else np.asarray(slots, np.int64)
        which = np.asarray(ended, np.int64)
        returns, lengths = self._add(stepped, which, rewards)
        self._fresh[which] = True
        if lost:
            self._fresh[list(lost)] = True
            self._forget(list(lost))
        if self._calls["stepped"]:
            self._tell("stepped", stepped, step())
        if ended:
            self._tell("episodes_ended", which, returns, lengths)

    def _add(
        self, stepped: Ints, ended: Ints, rewards: Iterable[torch.Tensor]
    ) -> tuple[Floats, Ints]:
        """Add a step up, before hooks that may raise; the sums of the episodes that end."""
        if self._calls["episodes_ended"]:
            self._lengths[stepped] += 1
            for reward in rewards:
                values = reward.detach().cpu().numpy().reshape(len(self._every), -1)
                self._returns[stepped] += values.sum(-1, dtype=np.float64)[stepped]
        sums = self._returns[ended], self._lengths[ended]
        self._forget(ended)
        return sums

    def stepped_rows(
        self,
        rows: StepDict,
        following: StepDict,
        advanced: StepDict,
        ended: list[int],
        slots: list[int] | None = None,
        begun: list[int] | None = None,
    ) -> None:
        """As :meth:`stepped`, on rows; then :meth:`started` where episodes did.

        Args:
            rows: the step taken.
            following: what it led to.
            advanced: the next row.
            ended: slots whose episodes ended.
            slots: that took the step; None for all.
            begun: slots where an episode starts; None for those where one ended.
        """

        def step() -> TensorDictBase:
            entries = {**rows, **{under_next(key): value for key, value in following.items()}}
            return nested(entries.items(), self._batch_size)

        begun = ended if begun is None else begun
        lost = marked_slots(following.get(keys.ENV_ERROR)) if ended else []
        whole = [slot for slot in ended if slot not in lost] if lost else ended
        self.stepped(slots, whole, step, (following[key] for key in self._reward_keys), lost)
        if begun:
            self.started(begun, lambda: nested(advanced.items(), self._batch_size))

    def collected(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """A collection has ended."""
        self._tell("collection_ended", batch, stats)

    def save_state(self) -> dict[str, Any]:
        """The sums of episodes in flight, and which slots are about to start one."""
        return {name: getattr(self, name).copy() for name in _SUMS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`save_state` gave."""
        for name in _SUMS:
            setattr(self, name, state[name])

    def _forget(self, slots: Any) -> None:
        self._returns[slots] = 0
        self._lengths[slots] = 0

    def _tell(self, event: str, *what: Any) -> None:
        for call in self._calls[event]:
            try:
                call(*what)
            except Exception as error:
                name = type(call.__self__).__name__
                raise RuntimeError(
                    f"the hook {name}.{event} raised {type(error).__name__}: {error}"
                ) from error


def marked_slots(mask: torch.Tensor | None) -> list[int]:
    """The slots that a mask ``[*N, 1]`` marks; none where there is no mask."""
    if mask is None or not mask.any():
        return []
    slots: list[int] = mask.reshape(-1).nonzero().reshape(-1).tolist()
    return slots
