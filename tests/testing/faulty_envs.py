"""Counting envs that fail as specified, once per slot, in any process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect.envs import GymnasiumEnv
from tdcollect.envs.backends import SerialBackend
from tdcollect.envs.process.backend import ProcessBackend
from tdcollect.envs.slots import Stepper
from tdcollect.envs.spaces import Bookkeeping

from ..counting import (
    CountingEnv,
    CountingRules,
)

RULES = CountingRules(lengths=(5, 8, 6))
IN_STEP = ("raise", "shape", "dtype", "nan", "infinite reward", "four")
IN_WORKERS = ("kill", "hang")


class Faulty(CountingEnv):
    """Fails at a step or reset of its life, unless a file says that this slot has failed already.

    Args:
        slot: its number.
        what: what it does: one of ``IN_STEP`` or ``IN_WORKERS``, with `` at reset`` behind it for
            the reset that follows; ``""`` for nothing.
        folder: where that file is.
        at: the number of the step, counted from 1 over all of its episodes.
        rules: of its episodes.
    """

    def __init__(
        self, slot: int, what: str, folder: Path, at: int = 7, rules: CountingRules = RULES
    ):
        super().__init__(slot, rules, wrong_action="record")
        self.what, self.at, self.marker = what, at, folder / str(slot)
        self.taken = 0

    def _due(self) -> bool:
        if not self.what or self.marker.exists():
            return False
        self.marker.touch()
        return True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        if self.what.endswith(" at reset") and self.taken >= self.at and self._due():
            return self.fail(self.what.removesuffix(" at reset"), result)
        return result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.taken += 1
        if self.taken == self.at and not self.what.endswith(" at reset") and self._due():
            return self.fail(self.what, result)
        return result

    def fail(self, what: str, result: Any) -> Any:
        """Return something in place of a result, or raise."""
        observation, *rest = result
        if what == "raise":
            raise ZeroDivisionError("the pole fell through the cart")
        if what == "shape":
            return (observation[:2], *rest)
        if what == "dtype":
            return (observation.astype(str), *rest)
        if what == "nan":
            return (observation * np.nan, *rest)
        if what == "infinite reward":
            return (observation, np.inf, *rest[1:])
        if what == "four":
            return result[:-1]
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
        raise AssertionError(what)


def faulty_env(
    folder: Path,
    faults: Mapping[int, str],
    num_envs: int = 3,
    *,
    backend: str = "serial",
    max_restarts: int | None = 10,
    bookkeeping: Bookkeeping = Bookkeeping(),
    num_workers: int | None = None,
    at: int = 7,
) -> GymnasiumEnv:
    """A batch of faulty envs; faults by slot. ``max_restarts=None`` has them raise."""
    folder.mkdir(exist_ok=True)
    factories = [
        partial(Faulty, slot, faults.get(slot, ""), folder, at) for slot in range(num_envs)
    ]
    return env_of(factories, backend, num_workers or num_envs, max_restarts, bookkeeping)


def env_of(
    factories: Sequence[Any],
    backend: str,
    num_workers: int,
    max_restarts: int | None,
    bookkeeping: Bookkeeping = Bookkeeping(),
) -> GymnasiumEnv:
    """A batch of envs that are checked for finite numbers, and may take 0.4 seconds for a call."""
    made: Any = SerialBackend(factories)
    if backend != "serial":
        made = ProcessBackend(factories, num_workers=num_workers, timeout=0.4, start_method="fork")
    options: Any = {"name": "faulty", "check_finite": True, "max_restarts": max_restarts}
    return GymnasiumEnv(Stepper(made, bookkeeping, **options), batched=True)
