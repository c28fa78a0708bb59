"""Shares of the collector's time, measured by timers around its calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bench import Program

from tdcollect.collect.policy import LoweredPolicy
from tdcollect.envs.slots import Stepper

NETWORK, SAMPLING = "network", "sampling and log-prob"
STEPS, RESETS, LOOP = "env steps", "env resets", "the loop"


def shares(program: Program, seconds: float) -> dict[str, float]:
    """Shares of a batch's time, for tdcollect's collector on arrays.

    Env steps and resets include reading actions and writing observations. The policy's last call is
    its sampling, the others are its network. Time outside all timers is the loop.
    """
    spent: Counter[str] = Counter()
    with _timers(spent):
        program.run()
        spent.clear()
        start = time.perf_counter()
        while True:
            program.run()
            total = time.perf_counter() - start
            if total >= seconds:
                break
    found = {name: spent[name] / total for name in (STEPS, RESETS, NETWORK, SAMPLING)}
    return {**found, LOOP: 1 - sum(found.values())}


@contextmanager
def _timers(spent: Counter[str]) -> Iterator[None]:
    def policy(self: LoweredPolicy, step: Any) -> None:
        last = len(self.calls) - 1
        for i, call in enumerate(self.calls):
            start = time.perf_counter()
            call(step)
            spent[SAMPLING if i == last else NETWORK] += time.perf_counter() - start

    step = _timed(Stepper.step, STEPS, spent)
    reset = _timed(Stepper.reset, RESETS, spent)
    with (
        mock.patch.object(LoweredPolicy, "__call__", policy),
        mock.patch.object(Stepper, "step", step),
        mock.patch.object(Stepper, "reset", reset),
    ):
        yield


def _timed(call: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start

    return timed
