"""Resets by mask: slots whose episodes end begin new ones, and the host does not learn which.

Where envs are on a GPU, to ask which slots have ended is to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tdcollect import keys
from tdcollect.collect.fast.array_env import ArrayEnv
from tdcollect.collect.step_dict import Key, StepDict, like_rows, numbered


class MaskedEnds:
    """Resets by the flags of all slots, at every step, without reading them.

    Trajectories are counted on the env's device, below zero, and get their ids once the batch is
    whole.

    Args:
        env: the env on arrays, whose ``resets_by_mask`` is true.
        new_ids: gives new trajectory ids; None where they are not tracked.
        ids_on: the device of trajectory ids in the batch.
        asks: whether to read the flags after all, for hooks.

    Attributes:
        ended: the slots whose episodes ended in the latest step; none unless ``asks``.
    """

    def __init__(
        self,
        env: ArrayEnv,
        new_ids: Callable[[int], torch.Tensor] | None,
        ids_on: torch.device,
        asks: bool = False,
    ):
        self._env = env
        self._new_ids = new_ids
        self._ids_on = ids_on
        self._asks = asks
        # The number of the latest trajectory: -1 of the first that begins in this batch.
        self._latest = torch.zeros((), dtype=torch.int64, device=env.home)
        self._ids: torch.Tensor | None = None
        self.ended: list[int] = []

    def begin(self, following: StepDict) -> StepDict:
        """The entries that begin the next step, given those that the latest step led to."""
        self._done = done = following[keys.DONE]
        self._over = self._env.over(following)
        if self._asks:
            self.ended = done.reshape(-1).nonzero()[:, 0].tolist()
        return self._env.begin(following, done, None)

    def renew(self, upcoming: StepDict, forgotten: Sequence[Key]) -> None:
        """Write new trajectory ids into the next step, and zero what the policy forgets."""
        if self._new_ids is not None:
            over = self._over.reshape(-1)
            ids = upcoming[keys.TRAJ_IDS]
            new = self._latest - over.cumsum(0)
            self._latest = new[-1]
            upcoming[keys.TRAJ_IDS] = torch.where(over, new, ids.reshape(-1)).view_as(ids)
        if not forgotten:
            return
        some = self._done & ~self._done.all()  # where all end, TorchRL zeroes nothing
        for key in forgotten:
            value = upcoming[key]
            upcoming[key] = value.masked_fill(like_rows(some, value), 0)

    def number(self, entries: dict[Key, torch.Tensor]) -> None:
        """Give trajectories their ids; the one wait for the env's device in a batch."""
        if self._new_ids is None or keys.TRAJ_IDS not in entries:
            return
        if self._ids is None:
            count = -int(self._latest)
            self._ids = self._new_ids(count).cpu() if count else torch.empty(0, dtype=torch.int64)
        entries[keys.TRAJ_IDS] = numbered(entries[keys.TRAJ_IDS].to(self._ids_on), self._ids)
