"""Slots stepped on arrays, without TensorDicts and without a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
from bench import Program


def slots_alone(env: Any, steps: int) -> Program:
    """Steps and restarts of an env of ``make_env``, with actions drawn beforehand.

    The env stays open.
    """
    stepper = env.stepper
    (buffers,) = stepper.allocate(1)
    stepper.reset(None, buffers)
    drawn = [env.full_action_spec.rand() for _ in range(steps)]
    actions = [[value.numpy() for value in each.values(True, True)] for each in drawn]

    def run() -> None:
        for action in actions:
            stepper.step(action, None, buffers)
            if buffers.done.any():
                stepper.reset(np.flatnonzero(buffers.done).tolist(), buffers)

    return Program(run, env.batch_size.numel() * steps)
