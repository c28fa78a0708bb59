"""The floor of the Atari pipelines: a game's steps, the transforms' arithmetic, and the network.

No loop can take less for the same arithmetic: there are no TensorDicts, batches, resets or
trajectories here, and nothing is stored but the stacked frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench import Program
from torch import nn
from torch.nn import functional
from torchrl.modules import MLP
from torchrl_scripts.modules import atari_cnn

PONG, ACTIONS = "ALE/Pong-v5", 6
SLOTS = {"dqn_atari": 1, "impala": 1, "ppo_atari_serial": 4, "ppo_atari": 8, "a2c_atari": 8}


def floor(name: str) -> dict[str, Program]:
    """The floor of an Atari script, in one process; nothing for other scripts."""
    return {"floor": _program(SLOTS[name])} if name in SLOTS else {}


def _program(slots: int) -> Program:
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    envs = [gym.make(PONG, frameskip=4, render_mode="rgb_array") for _ in range(slots)]
    screens = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    torch.manual_seed(0)
    net = nn.Sequential(atari_cnn(), MLP(3136, ACTIONS, num_cells=[512], activation_class=nn.ReLU))
    see = _transforms(slots)

    @torch.no_grad()
    def run() -> None:
        for _ in range(8):
            images = torch.stack([torch.as_tensor(screen) for screen in screens])
            actions = net(see(images)).argmax(-1).tolist()
            for i, (env, action) in enumerate(zip(envs, actions, strict=True)):
                screens[i], _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    screens[i], _ = env.reset()

    return Program(run, 8 * slots, lambda: [env.close() for env in envs])


def _transforms(slots: int) -> Callable[[Any], torch.Tensor]:
    """ToTensorImage, GrayScale, Resize, CatFrames and VecNorm as plain arithmetic."""
    stacked = torch.zeros(slots, 4, 84, 84)
    total, squares = torch.zeros(4, 84, 84), torch.zeros(4, 84, 84)
    weights = torch.tensor([0.2989, 0.587, 0.114]).view(3, 1, 1)
    count = 0.0

    def see(images: torch.Tensor) -> torch.Tensor:
        nonlocal stacked, count
        gray = (images.permute(0, 3, 1, 2).div(255) * weights).sum(-3, keepdim=True)
        small = functional.interpolate(gray, size=(84, 84), mode="bilinear", antialias=True)
        stacked = torch.cat([stacked[:, 1:], small], 1)
        total.mul_(0.9999).add_(stacked.sum(0))
        squares.mul_(0.9999).add_(stacked.pow(2).sum(0))
        count = 0.9999 * count + slots
        mean = total / count
        return (stacked - mean) / (squares / count - mean.pow(2)).clamp_min(1e-4).sqrt()

    return see
