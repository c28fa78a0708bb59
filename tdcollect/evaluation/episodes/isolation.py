"""Isolation: an evaluation changes nothing outside, and nothing outside changes it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrl.envs import Transform
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcollect.states import global_states, set_global_states
from tdcollect.threads import Elsewhere, busy_threads, other_threads


class NotReproducibleError(RuntimeError):
    """The policy or the env does not give the same episode for the same seeds.

    Attributes:
        may_be_draws: True if draws of an env from the global generators may be the cause.
    """

    may_be_draws = False


class GlobalRandomness:
    """The global random states of torch, NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._elsewhere = Elsewhere()
        self._beside = other_threads()
        self._states = global_states()

    def restore(self) -> None:
        """Set them to what they were."""
        set_global_states(self._states)

    def settle(self) -> bool:
        """Set them to what they were; False if another thread may draw from them."""
        if not self.moved():
            return True
        if self._suspects():
            return False
        self.restore()
        return True

    def moved(self) -> list[str]:
        """Return the modules whose states have moved: ``"torch"``, ``"numpy"``, ``"random"``..."""
        now = global_states()
        # CUDA has no state before its first use, which moves nothing.
        held = {name: state for name, state in self._states.items() if len(state)}
        moved = [name for name, state in held.items() if not _equal(state, now[name])]
        return ["random" if name == "python" else name for name in moved]  # its module

    def check(self, who: str) -> None:
        """Raise if one of them has moved since.

        Raises:
            NotReproducibleError: naming it, and ``who`` ran meanwhile.
            RuntimeError: if another thread draws from it.
        """
        moved = self.moved()
        if not moved:
            return
        suspects = self._suspects()
        if suspects:
            check_alone(0.1)
        message = (
            f"{who} drew from the global random numbers of {', '.join(moved)}, which no seed "
            "of an episode reaches: its episodes would depend on what runs beside them. Draw "
            "from env.np_random in envs; put transforms that draw over one slot, in a function "
            "that makes one; and draw with torch operations on whole batches in policies"
        )
        if suspects:
            message += (
                f". Or another thread drew from them ({', '.join(suspects)}): then evaluate while "
                "none does"
            )
        raise NotReproducibleError(message)

    def _suspects(self) -> list[str]:
        """Return the names of other threads that may have drawn since; empty if none has run."""
        return sorted(self._beside | other_threads()) if self._elsewhere.computed() else []


def check_alone(seconds: float = 0.005) -> None:
    """Raise if another thread draws from the global random states.

    Args:
        seconds: the time that this thread waits and watches them, if another one is busy.

    Raises:
        RuntimeError: if they move.
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
                "Evaluate between two batches in the thread that trains, with workers=1, or beside "
                "training with tdcollect.Evaluator"
            )


_LOOKS = 5


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, list):  # one tensor per device
        return len(state) == len(other) and all(map(_equal, state, other))
    if isinstance(state[1], np.ndarray):
        return bool((state[1] == other[1]).all() and state[2:] == other[2:])
    return bool(state == other)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run torch's operations on the CPU with ``count`` threads: sums round by how they are split.

    This sets the threads of torch and MKL in this process, not those of NumPy.
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
    """Run with all parts of a module in eval mode; each returns to its own mode afterwards."""
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
    """Return the mode of a policy's modules, ``"eval"``, ``"train"`` or ``"mixed"``, or None."""
    modes = {m.training for m in policy.modules()} if isinstance(policy, nn.Module) else set()
    if len(modes) == 2:
        return "mixed"
    return {True: "train", False: "eval"}[modes.pop()] if modes else None


@contextmanager
def isolated(
    transforms: Sequence[Transform], exploration_type: ExplorationType
) -> Iterator[GlobalRandomness]:
    """Run with an exploration type and without gradients; set global random states back.

    The transforms are in eval mode, with their running statistics frozen. Yields the states
    as they were. If another thread may have drawn from them, they are not set back, as that would
    repeat its random numbers.
    """
    before = GlobalRandomness()
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
