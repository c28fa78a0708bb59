"""Cost of statistics and hooks: collectors with and without them take turns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import workloads
from bench import QUICK, Effort, Program, alternate, ratios, spread

import tdcollect

TARGET = 1.02


class Ends(tdcollect.Hooks):
    """A hook on episode ends."""

    def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
        """Do nothing."""


class Steps(tdcollect.Hooks):
    """A hook on steps."""

    def stepped(self, slots: Any, step: Any) -> None:
        """Do nothing."""


OFF = "nothing"
OPTIONS: dict[str, dict[str, Any]] = {
    OFF: {"statistics": False},
    "statistics": {},
    "statistics, timers": {"timers": True},
    "hooks that override nothing": {"statistics": False, "hooks": tdcollect.Hooks()},
    "a hook on episode ends": {"statistics": False, "hooks": Ends()},
    "a hook on steps": {"statistics": False, "hooks": Steps()},
}


def monitoring(effort: Effort) -> list[dict[str, Any]]:
    """Ratios of each option to a collector without any, on CartPole-v1 with few and many slots."""
    rows = []
    for slots, steps in [(8, 16)] if effort == QUICK else [(8, 128), (64, 32)]:
        torch.manual_seed(0)
        programs = {name: _program(slots, steps, options) for name, options in OPTIONS.items()}
        # The effect is about as small as the spread of a round.
        times = alternate(programs, effort._replace(rounds=3 * effort.rounds))
        against = {name: spread(values) for name, values in ratios(times, OFF).items()}
        for program in programs.values():
            program.close()
        rows.append(
            {
                "N": slots,
                "T": steps,
                "us_per_frame": spread(times[OFF]).median * 1e6,
                "ratios": {name: value._asdict() for name, value in against.items()},
                "targets": {"statistics": TARGET},
            }
        )
    return rows


def _program(slots: int, steps: int, options: dict[str, Any]) -> Program:
    env = tdcollect.make_env("CartPole-v1", slots, categorical_action_encoding=True)
    policy = workloads.discrete_actor(workloads.mlp(4, 2))
    frames = slots * steps
    collector = tdcollect.Collector(
        env, policy, frames_per_batch=frames, total_frames=-1, **options
    )
    return Program(partial(next, iter(collector)), frames, collector.shutdown)
