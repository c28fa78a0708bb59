"""The collection loop on arrays: one batch ``[N, T]``, the same to the bit as TorchRL's.

The env writes into arrays, the policy runs on StepDicts, and the batch is stacked once at its end
(or in chunks, where it is large). The loop holds no options: what varies is decided before it
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.collect.batch_builder import BatchBuilder
from tdcollect.collect.fast.array_env import ArrayEnv
from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.fast.masked_ends import MaskedEnds
from tdcollect.collect.policies import Policy
from tdcollect.collect.step_dict import (
    Key,
    StepDict,
    check_tensors,
    flat,
    forgotten_entries,
    is_next,
    next_step,
    sent,
    zero_rows,
)
from tdcollect.envs.spaces import nested

StepWatch = Callable[[StepDict, StepDict, StepDict, list[int]], None]
"""Called with a step, what followed, the next step, and the slots whose episodes ended."""


class Ends:
    """Resets the slots that have ended, by their numbers.

    Args:
        env: the env on arrays.
        new_ids: gives new trajectory ids; None where they are not tracked.

    Attributes:
        ended: the slots whose episodes ended in the latest step.
    """

    def __init__(self, env: ArrayEnv, new_ids: Callable[[int], torch.Tensor] | None):
        self._env = env
        self._new_ids = new_ids
        self._slots = env.batch_size.numel()
        self._renewed: list[int] = []
        self.ended: list[int] = []

    def begin(self, following: StepDict) -> StepDict:
        """The entries that begin the next step, given those that the latest step led to."""
        self.ended, self._renewed = self._env.ends(following)
        if not self.ended:
            return following
        return self._env.begin(following, following[keys.DONE], self.ended)

    def renew(self, upcoming: StepDict, forgotten: Sequence[Key]) -> None:
        """Write new trajectory ids into the next step, and zero what the policy forgets."""
        if not self._renewed:
            return
        if self._new_ids is not None:
            ids = upcoming[keys.TRAJ_IDS] = upcoming[keys.TRAJ_IDS].clone()
            new = self._new_ids(len(self._renewed)).cpu().numpy()
            ids.numpy().reshape(-1)[self._renewed] = new
        if 0 < len(self.ended) < self._slots:
            zero_rows(upcoming, forgotten, self._env.batch_size, self.ended)

    def number(self, entries: dict[Key, torch.Tensor]) -> None:
        """Give trajectories their ids; they have them already."""


def collect_frames(
    env: ArrayEnv,
    lower: Callable[[StepDict], Policy],
    carrier: TensorDictBase,
    steps: int,
    new_ids: Callable[[int], torch.Tensor] | None,
    left_out: frozenset[Key],
    place: Placement | None,
    keep: Callable[[TensorDict, bool], None],
    in_one_piece: bool = False,
    watch: StepWatch | None = None,
) -> dict[Key, torch.Tensor]:
    """Collect ``steps`` steps of every slot.

    Args:
        env: the env on arrays.
        lower: gives the policy on StepDicts, for the entries that it first finds.
        carrier: the step to begin with, as TorchRL's collector keeps it.
        steps: T.
        new_ids: gives so many new trajectory ids; None where they are not tracked.
        left_out: entries that the batch does without.
        place: moves tensors between devices; None where all is on the CPU.
        keep: is given the step to go on with, and whether the env has raised since: it is then no
            longer where that step says.
        in_one_piece: stack all steps at once, which gradients pass through.
        watch: called with each step; None for no hooks.

    Returns:
        The entries of the batch, ``[N, T, ...]`` each.

    Raises:
        NotTensors: where the policy writes something else; nothing has been stepped, and the step
            that is kept has its outputs.
    """
    step = flat(carrier) if place is None else place.enter(carrier, env.carried)
    policy = lower(step)
    batch = BatchBuilder(env, steps, left_out, place, in_one_piece)
    next_keys: list[Key] | None = None
    actions = env.transformed.action_keys
    foreign = None if env.base is not None else place  # slots write each step into new memory
    ends: Ends | MaskedEnds = Ends(env, new_ids)
    if env.resets_by_mask:
        ids_on = torch.device("cpu") if place is None else place.storing or torch.device("cpu")
        if keys.TRAJ_IDS in step:
            step[keys.TRAJ_IDS] = sent(step[keys.TRAJ_IDS], env.home)
        ends = MaskedEnds(env, new_ids, ids_on, asks=watch is not None)
    stepping = False
    if foreign is not None:
        foreign.keep_apart(step)
    try:
        for buffers in batch.allocate():
            if place is None:
                policy(step)
            else:
                place.run(policy, step)
            if next_keys is None:
                check_tensors(step)
                next_keys = [key for key in step if is_next(key)]
                forgotten = forgotten_entries(step, env.carried, policy.reads_first, policy.writes)
            stepping = True
            given = step if place is None else place.for_env(step, actions)
            following, error = env.advance(given, next_keys, buffers)
            if error is not None:
                raise error
            if foreign is not None:
                foreign.keep_apart(following)
            begun = ends.begin(following)
            if foreign is not None and begun is not following:
                foreign.keep_apart(begun, of_reset=True)
            stepping = False
            batch.append(step, following)
            upcoming = next_step(step, begun, env.carried, next_keys)
            ends.renew(upcoming, forgotten)
            taken, step = step, upcoming
            if watch is not None:
                watch(taken, following, step, ends.ended)
        policy.check()
        ends.number(batch.entries)
    finally:
        # Also where the policy or the env raised: the next loop goes on from the last whole step.
        ends.number(step)
        if place is not None:
            step = place.leave(step, env.carried)
        keep(nested(step.items(), env.batch_size, carrier.device), stepping)
    return batch.entries
