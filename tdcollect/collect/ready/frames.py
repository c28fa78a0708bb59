"""Batches of frames where slots that are ready go on: ``[N, T]``, or by arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.collect.policies import Policy
from tdcollect.collect.ready.rows import Rows
from tdcollect.collect.ready.slots import ReadySlots
from tdcollect.collect.step_dict import Key, StepDict, flat, forgotten_entries
from tdcollect.collect.watch import Watch
from tdcollect.envs.spaces import nested

if TYPE_CHECKING:
    from tdcollect.collect.fast.array_env import ArrayEnv
    from tdcollect.collect.fast.devices import Placement

Keep = Callable[[TensorDict, bool], None]


class _Frames:
    """Steps slots, each at its own pace; see :func:`collect_at_own_pace` for the arguments."""

    def __init__(
        self,
        env: ArrayEnv,
        lower: Callable[[StepDict], Policy],
        carrier: TensorDictBase,
        left_out: frozenset[Key],
        place: Placement | None,
        in_one_piece: bool = False,
        watch: Watch | None = None,
    ):
        self._env = env
        self._place = place
        self._watch = watch
        self._carrier = carrier
        step = flat(carrier) if place is None else place.enter(carrier, env.carried)
        self._policy = lower(step)
        self.slots = ReadySlots(env, self._act, step, self._remembered)
        self.rows = Rows(env, left_out, place, in_one_piece)

    def _act(self, step: StepDict, slots: list[int]) -> None:
        if self._place is None:
            self._policy(step)
        else:
            self._place.run(self._policy, step)

    def _remembered(self, step: StepDict) -> list[Key]:
        policy = self._policy
        return forgotten_entries(step, self._env.carried, policy.reads_first, policy.writes)

    def turn(
        self,
        acting: list[int],
        buffers: Any,
        renew: Callable[[list[int]], torch.Tensor | None],
    ) -> list[int]:
        """Have slots act, and take in those that come back.

        Args:
            acting: ascending, of those that are ready and idle.
            buffers: are written.
            renew: gives the trajectory ids of the episodes that begin in these slots, once they
                have ended in all that have stepped.

        Returns:
            The slots that have stepped.
        """
        slots, env = self.slots, self._env
        arrived = slots.turn(acting, buffers)
        received = arrived.received
        for error in (received.failed, received.failed_resets):
            if error is not None:
                raise error
        step, stepped = slots.present, received.stepped
        done = arrived.following[keys.DONE].numpy(force=True).reshape(-1)
        ended = [slot for slot in stepped if done[slot]]
        self.rows.append(step, arrived.following, stepped)
        slots.move_on(arrived)
        if ended:
            slots.ready = [slot for slot in slots.ready if slot not in ended]
            ids = renew(ended)
            if ids is not None:
                slots.set_rows(slots.present, [keys.TRAJ_IDS], ended, ids)
            env.send_reset(ended, None, None)
        if self._watch is not None:
            if stepped:
                self._watch.step_taken(step, arrived.following, slots.present, ended, stepped, [])
            if received.begun:
                present = slots.present
                self._watch.started(received.begun, lambda: nested(present.items(), env.batch_size))
        return stepped

    def leave(self) -> TensorDict:
        """The present step, as TorchRL's collector carries it."""
        step = self.slots.leave()
        if self._place is not None:
            step = self._place.leave(step, self._env.carried)
        return nested(step.items(), self._env.batch_size, self._carrier.device)

    def check(self) -> None:
        """Raise where a draw had parameters that its distribution refuses."""
        self._policy.check()


def collect_at_own_pace(
    env: ArrayEnv,
    lower: Callable[[StepDict], Policy],
    carrier: TensorDictBase,
    steps: int,
    new_ids: Callable[[int], torch.Tensor] | None,
    left_out: frozenset[Key],
    place: Placement | None,
    keep: Keep,
    in_one_piece: bool = False,
    watch: Watch | None = None,
) -> dict[Key, torch.Tensor]:
    """Collect ``steps`` steps of every slot; one that has taken them waits for the others.

    The arguments are those of ``collect_frames``, and so are the entries: to the bit, where the
    policy draws nothing.
    """
    frames = _Frames(env, lower, carrier, left_out, place, in_one_piece, watch)
    slots, count = frames.slots, env.batch_size.numel()
    slots.ready = list(range(count))
    at = np.zeros(count, np.int64)
    begun: list[tuple[int, int]] = []  # trajectories in the order of arrival: steps before, slot

    def renew(ended: list[int]) -> torch.Tensor | None:
        if new_ids is None:
            return None
        # Their places in the order of arrival, below zero: ids follow once all have begun.
        first = -1 - len(begun)
        begun.extend((int(at[slot]), slot) for slot in ended)
        return torch.arange(first, first - len(ended), -1)

    away = True
    try:
        for buffers in frames.rows.allocate():
            waiting = [slot for slot in slots.ready if at[slot] < steps]
            acting = slots.idle(waiting)
            if not acting and not slots.in_flight:
                break
            at[acting] += 1
            frames.turn(acting, buffers, renew)
        frames.check()
        entries = frames.rows.grid(steps)
        if begun and new_ids is not None:
            final = new_ids(len(begun)).cpu()
            by_steps = sorted(range(len(begun)), key=lambda place: begun[place])
            ids = torch.empty_like(final)
            ids[by_steps] = final
            for step in (entries, slots.present):
                step[keys.TRAJ_IDS] = _numbered(step[keys.TRAJ_IDS], ids)
        away = False
    finally:
        keep(frames.leave(), away)
    return entries


def _numbered(found: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Trajectory ids, with those that were below zero in their places."""
    new = found < 0
    ids = ids.to(found.device)
    return torch.where(new, ids[(-1 - found).clamp(min=0)], found)
