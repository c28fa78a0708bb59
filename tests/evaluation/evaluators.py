"""Evaluators whose process is forked, and envs and functions for them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torchrl.envs import EnvBase, GymEnv, TransformedEnv
from torchrl.envs.transforms import Compose, StepCounter, VecNormV2

from .envs import Walk


class Gated(Walk):
    """Waits at each reset until a file is there; ``gate.resets`` beside it has a line per reset."""

    def __init__(self, gate: str):
        super().__init__()
        self.gate = gate

    def reset(self, **kwargs: Any) -> Any:
        with open(f"{self.gate}.resets", "a") as file:
            file.write(f"{os.getpid()}\n")
        while not os.path.exists(self.gate):
            time.sleep(0.002)
        return super().reset(**kwargs)


def normalized() -> EnvBase:
    """A TorchRL env whose observations are normalised by running statistics."""
    env = GymEnv("CartPole-v1")
    return TransformedEnv(env, Compose(VecNormV2(in_keys=["observation"]), StepCounter(20)))


def statistics(seed: int) -> VecNormV2:
    """Statistics of some random steps."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        env = normalized()
        env.set_seed(seed)
        env.rollout(30, break_when_any_done=False)
        return env.transform[0]


def shape_of(batch: Any) -> dict[str, Any]:
    """Metrics that tell what a metrics function is given."""
    mask, ids = batch["collector", "mask"], batch["collector", "traj_ids"]
    return {
        "episodes": batch.shape[0],
        "longest": batch.shape[1],
        "steps": mask.sum(),
        "in_order": bool((ids[:, 0].diff() > 0).all()),
        "rewards": (batch["next", "reward"].squeeze(-1) * mask).sum().double(),
        "process": os.getpid(),
    }
