"""Nothing outside an evaluation changes by it, and nothing outside changes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcollect.collect.transforms import transforms_of
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.randomness import global_states, set_global_states


class GlobalRandomness:
    """The global random states of torch, NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._states = global_states()

    def restore(self) -> None:
        """Set them to what they were."""
        set_global_states(self._states)

    def moved(self) -> list[str]:
        """The names of those that have moved since: ``"torch"``, ``"numpy"``, ``"random"``..."""
        now = global_states()
        # No state is held of CUDA where it was not in use yet: its first use moves nothing.
        held = {name: state for name, state in self._states.items() if len(state)}
        moved = [name for name, state in held.items() if not _equal(state, now[name])]
        return ["random" if name == "python" else name for name in moved]  # its module

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
