"""Trajectory ids that are unique over workers, which need not talk to each other for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

ID_BITS = 40
"""Worker w counts its trajectories from ``w << ID_BITS``."""


def worker_of(traj_ids: torch.Tensor) -> torch.Tensor:
    """The workers that collected trajectories, ``[...]`` int64, by their ids ``[...]``.

    Workers that took the place of lost ones have numbers of their own, after those of the first.
    """
    return traj_ids >> ID_BITS


class TrajectoryIds:
    """Counts the trajectory ids of one worker, in TorchRL's place for such a counter.

    Worker w gives the ids ``w << 40``, ``(w << 40) + 1``, ...: worker 0 those that one collector
    would. TorchRL's workers share one counter, so that an id depends on which of them came first;
    these repeat, are unique on several machines too, and those of a worker that takes the place of
    a lost one are new, whatever the lost one gave.

    Args:
        worker: w, the number of the worker.
    """

    def __init__(self, worker: int):
        self._next = worker << ID_BITS

    def get_traj_and_increment(
        self, n: int = 1, device: torch.device | None = None
    ) -> torch.Tensor:
        """The next ``n`` ids, ``[n]`` int64."""
        ids = torch.arange(self._next, self._next + n, device=device)
        self._next += n
        return ids

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The next id, under TorchRL's name for it."""
        return {"traj_id": torch.tensor(self._next)}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        self._next = int(state_dict["traj_id"])
