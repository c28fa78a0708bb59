"""Hooks, called with the steps of a collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.collect.hooks import EVENTS, Hooks
from tdcollect.collect.statistics import Bools, Ints, Statistics, Tally
from tdcollect.collect.step_dict import StepDict, under_next
from tdcollect.envs.spaces import nested


class Watch:
    """Calls hooks with a collection's steps.

    Args:
        hooks: at least one.

    Attributes:
        steps: whether a hook asks for steps or episodes.
    """

    def __init__(self, hooks: list[Hooks]):
        self._calls = {
            event: [
                getattr(hook, event)
                for hook in hooks
                if getattr(type(hook), event) is not getattr(Hooks, event)
            ]
            for event in EVENTS
        }
        self.steps = any(
            self._calls[event] for event in ("episodes_started", "stepped", "episodes_ended")
        )

    def attach(self, env: EnvBase) -> None:
        """Attach to the collector's env, once it is made."""
        self._batch_size = env.batch_size
        self._reward_keys = list(env.reward_keys)
        self._every = np.arange(env.batch_size.numel())
        self._starting = np.ones(len(self._every), bool)  # slots about to start an episode
        self._tally = Tally(len(self._every))
        self._call("env_created", env)

    def drop(self, slots: Bools | None = None) -> None:
        """Drop the episodes in flight: of all slots (None), or of these."""
        marked: Any = slice(None) if slots is None else slots
        self._starting[marked] = True
        self._tally.drop(marked)

    def begin(self, step: TensorDictBase) -> None:
        """A loop begins with this step."""
        if self._starting.any():
            self.started(self._starting.nonzero()[0], lambda: step)

    def started(self, slots: Ints | list[int], step: Callable[[], TensorDictBase]) -> None:
        """Episodes begin in these slots, with the step given."""
        self._starting[slots] = False
        if self._calls["episodes_started"]:
            self._call("episodes_started", np.asarray(slots, np.int64), step())

    def stepped(
        self,
        slots: list[int] | None,
        ended: list[int],
        step: Callable[[], TensorDictBase],
        rewards: Iterable[torch.Tensor],
        broken: Sequence[int] = (),
    ) -> None:
        """Slots have taken a step.

        Args:
            slots: that took it; None for all.
            ended: slots whose episodes ended with it.
            step: gives it as a TensorDict.
            rewards: the env's reward entries.
            broken: slots in which the step failed: their episodes have no end.
        """
        taken = self._every if slots is None else np.asarray(slots, np.int64)
        which = np.asarray(ended, np.int64)
        if self._calls["episodes_ended"]:  # before hooks that may raise
            self._tally.add(taken, [reward.detach().cpu().numpy() for reward in rewards])
        returns, lengths = self._tally.take(which)
        self._starting[which] = True
        if broken:
            self._starting[list(broken)] = True
            self._tally.drop(list(broken))
        if self._calls["stepped"]:
            self._call("stepped", taken, step())
        if ended:
            self._call("episodes_ended", which, returns, lengths)

    def step_taken(
        self,
        step: StepDict,
        following: StepDict,
        upcoming: StepDict,
        ended: list[int],
        slots: list[int] | None = None,
        begun: list[int] | None = None,
    ) -> None:
        """As :meth:`stepped`, on StepDicts; then :meth:`started` where episodes start.

        Args:
            step: the step taken.
            following: the entries that it led to.
            upcoming: the next step.
            ended: slots whose episodes ended.
            slots: that took the step; None for all.
            begun: slots where an episode starts; None for those where one ended.
        """

        def packed() -> TensorDictBase:
            entries = {**step, **{under_next(key): value for key, value in following.items()}}
            return nested(entries.items(), self._batch_size)

        begun = ended if begun is None else begun
        broken = marked_slots(following.get(keys.ENV_ERROR)) if ended else []
        unbroken = [slot for slot in ended if slot not in broken] if broken else ended
        rewards = (following[key] for key in self._reward_keys)
        self.stepped(slots, unbroken, packed, rewards, broken)
        if begun:
            self.started(begun, lambda: nested(upcoming.items(), self._batch_size))

    def collected(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """A collection has ended."""
        self._call("collection_ended", batch, stats)

    def save_state(self) -> dict[str, Any]:
        """The sums of episodes in flight, and which slots are about to start one."""
        returns, lengths = self._tally.sums
        return {"_fresh": self._starting.copy(), "_returns": returns, "_lengths": lengths}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        self._starting = state["_fresh"]
        self._tally.sums = state["_returns"], state["_lengths"]

    def _call(self, event: str, *arguments: Any) -> None:
        for call in self._calls[event]:
            try:
                call(*arguments)
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
