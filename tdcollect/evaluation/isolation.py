"""Nothing outside an evaluation changes by it, and nothing outside changes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcollect.collect.transforms import transforms_of
from tdcollect.evaluation.errors import NotReproducibleError


class GlobalRandomness:
    """The global random states of torch, NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._states = _states()

    def restore(self) -> None:
        """Set them to what they were."""
        torch.set_rng_state(self._states["torch"])
        if "cuda" in self._states:
            torch.cuda.set_rng_state_all(self._states["cuda"])
        np.random.set_state(self._states["numpy"])  # noqa: NPY002
        random.setstate(self._states["random"])

    def moved(self) -> list[str]:
        """The names of those that have moved since: ``"torch"``, ``"numpy"``, ``"random"``..."""
        now = _states()
        return [name for name, state in self._states.items() if not _equal(state, now[name])]

    def check(self, who: str) -> None:
        """Raise where one of them has moved since.

        Raises:
            NotReproducibleError: naming it, and ``who`` ran meanwhile.
        """
        moved = self.moved()
        if moved:
            raise NotReproducibleError(
                f"{who} drew from the global random numbers of {', '.join(moved)}, which no seed "
                "of an episode reaches: its episodes would depend on what runs beside them. Draw "
                "from env.np_random in envs, and with torch operations on whole batches in policies"
            )


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "random": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, list):  # one tensor a device
        return len(state) == len(other) and all(map(_equal, state, other))
    if isinstance(state[1], np.ndarray):
        return bool((state[1] == other[1]).all() and state[2:] == other[2:])
    return bool(state == other)


@contextmanager
def isolated(env: EnvBase, exploration_type: ExplorationType) -> Iterator[GlobalRandomness]:
    """Run with an exploration type and without gradients; global random states are as before.

    Transforms of the env that learn statistics keep them as they are. Gives the states.
    """
    before = GlobalRandomness()
    learning = [t for t in transforms_of(env) if getattr(t, "frozen", None) is False]
    for transform in learning:
        transform.freeze()
    try:
        with torch.no_grad(), set_exploration_type(exploration_type):
            yield before
    finally:
        for transform in learning:
            transform.unfreeze()
        before.restore()
