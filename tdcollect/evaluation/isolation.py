"""Nothing outside an evaluation changes by it, and nothing outside changes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcollect.collect.env_parts import transforms_of
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.randomness import global_states, set_global_states
from tdcollect.threads import Elsewhere, busy_threads, other_threads


class GlobalRandomness:
    """The global random states of torch, NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._elsewhere = Elsewhere()
        self._beside = other_threads()
        self._states = global_states()

    def restore(self) -> None:
        """Set them to what they were."""
        set_global_states(self._states)

    def settle(self) -> None:
        """Set them to what they were, unless another thread may draw from them."""
        if self.moved() and not self._suspects():
            self.restore()

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
            RuntimeError: where another thread draws from it.
        """
        moved = self.moved()
        if not moved:
            return
        suspects = self._suspects()
        if suspects:
            check_alone(0.1)
        told = (
            f"{who} drew from the global random numbers of {', '.join(moved)}, which no seed "
            "of an episode reaches: its episodes would depend on what runs beside them. Draw "
            "from env.np_random in envs, and with torch operations on whole batches in policies"
        )
        if suspects:
            told += (
                f". Or another thread drew from them ({', '.join(suspects)}): then evaluate where "
                "none does"
            )
        raise NotReproducibleError(told)

    def _suspects(self) -> list[str]:
        """Names of the other threads that may have drawn since; none where none has computed."""
        return sorted(self._beside | other_threads()) if self._elsewhere.computed() else []


def check_alone(seconds: float = 0.005) -> None:
    """Raise where another thread draws from the global random states.

    Args:
        seconds: for which this thread waits and watches them, if another one is busy.

    Raises:
        RuntimeError: where they move.
    """
    busy = busy_threads()
    if not busy:
        return
    before = GlobalRandomness()
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        if before.moved():
            names = ", ".join(sorted(busy))
            raise RuntimeError(
                "expected no other thread to draw random numbers during an evaluation, but the "
                f"global random states move while this thread waits; busy threads: {names}. "
                "Evaluate between two batches in the thread that trains, or in a process of its own"
            )


_LOOKS = 5


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, list):  # one tensor a device
        return len(state) == len(other) and all(map(_equal, state, other))
    if isinstance(state[1], np.ndarray):
        return bool((state[1] == other[1]).all() and state[2:] == other[2:])
    return bool(state == other)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run torch's operations on the CPU with so many threads, as sums round by how they are split.

    Of this process, and of torch's own and MKL's threads; NumPy's are its own.
    """
    before = torch.get_num_threads()
    try:
        if before != count:
            torch.set_num_threads(count)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def in_eval_mode(module: Any) -> Iterator[None]:
    """Run with all modules in a module in eval mode; each is then in the mode that it was in."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    before = [(part, part.training) for part in modules]
    changing = any(training for _, training in before)
    try:
        if changing:
            module.eval()
        yield
    finally:
        if changing:
            # Modules may do more than set the flag; parents come before their children.
            for part, training in before:
                if part.training is not training:
                    part.train(training)
            for part, training in before:
                part.training = training


def mode_of(policy: Any) -> str | None:
    """``"eval"``, ``"train"`` or ``"mixed"``: the mode of a policy's modules; None without any."""
    modes = {m.training for m in policy.modules()} if isinstance(policy, nn.Module) else set()
    if len(modes) == 2:
        return "mixed"
    return {True: "train", False: "eval"}[modes.pop()] if modes else None


@contextmanager
def isolated(env: EnvBase, exploration_type: ExplorationType) -> Iterator[GlobalRandomness]:
    """Run with an exploration type and without gradients; global random states are as before.

    Transforms of the env are in eval mode, and keep statistics that they learn as they are. Gives
    the states. Where
    another thread may have drawn from them, they are not set back, which would repeat its numbers.
    """
    before = GlobalRandomness()
    transforms = transforms_of(env)
    learning = [t for t in transforms if getattr(t, "frozen", None) is False]
    with ExitStack() as stack:
        stack.callback(before.settle)
        for transform in transforms:
            stack.enter_context(in_eval_mode(transform))
        for transform in learning:
            stack.callback(transform.unfreeze)
            transform.freeze()
        with torch.no_grad(), set_exploration_type(exploration_type):
            yield before
