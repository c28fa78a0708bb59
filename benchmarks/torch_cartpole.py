"""CartPole as a batched env in torch: state, physics and resets stay on its device.

Nothing here reads a tensor from the host, so a step on a GPU waits for nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
"""Of gymnasium's CartPole: m/s^2, kg, kg, m, N, s."""

FARTHEST, STEEPEST = 2.4, 12 * math.pi / 180
"""The bounds at which an episode terminates: position in m, angle in rad."""

STEPS = 500
"""Episodes are truncated at this length."""


class TorchCartPole(EnvBase):
    """gymnasium's CartPole-v1 in float32, all slots at once.

    Args:
        num_envs: N.
        device: of all tensors.
    """

    resets_by_mask = True  # a reset that marks no slot changes nothing but the random numbers

    def __init__(self, num_envs: int, device: Any = "cpu"):
        super().__init__(device=torch.device(device), batch_size=[num_envs])
        batch, place = self.batch_size, self.device
        self.observation_spec = Composite(
            observation=Unbounded((*batch, 4), dtype=torch.float32, device=place),
            steps=Unbounded((*batch, 1), dtype=torch.int64, device=place),
            shape=batch,
            device=place,
        )
        self.action_spec = Categorical(2, shape=batch, dtype=torch.int64, device=place)
        self.reward_spec = Unbounded((*batch, 1), dtype=torch.float32, device=place)
        flags = {
            name: Binary(1, (*batch, 1), dtype=torch.bool, device=place)
            for name in ("done", "terminated", "truncated")
        }
        self.done_spec = Composite(flags, shape=batch, device=place)
        self._reward = torch.ones((*batch, 1), device=place)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        fresh = self.fresh()
        steps = torch.zeros((*self.batch_size, 1), dtype=torch.int64, device=self.device)
        none = torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device)
        # TorchRL may give the marks alone; it then takes over the marked rows itself.
        if tensordict is not None and {"_reset", "observation"} <= set(tensordict.keys()):
            marked = tensordict["_reset"].reshape(none.shape)
            fresh = torch.where(marked, fresh, tensordict["observation"])
            steps = torch.where(marked, steps, tensordict["steps"])
        return self._packed(
            observation=fresh, steps=steps, done=none, terminated=none, truncated=none.clone()
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, terminated = physics(tensordict["observation"], tensordict["action"])
        steps = tensordict["steps"] + 1
        truncated = steps >= STEPS
        return self._packed(
            observation=observation,
            steps=steps,
            reward=self._reward,
            done=terminated | truncated,
            terminated=terminated,
            truncated=truncated,
        )

    def _packed(self, **entries: Tensor) -> TensorDictBase:
        return TensorDict(entries, self.batch_size, device=self.device)

    def fresh(self) -> Tensor:
        """States ``[N, 4]`` to begin an episode with, for every slot."""
        return torch.rand((*self.batch_size, 4), device=self.device) * 0.1 - 0.05

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            torch.manual_seed(seed)


def physics(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a step of ``[N, 4]`` states, and whether each pole fell ``[N, 1]``."""
    x, speed, angle, spin = state.unbind(-1)
    force = action.to(state.dtype) * (2 * FORCE) - FORCE
    cos, sin = torch.cos(angle), torch.sin(angle)
    both = CART + POLE
    push = (force + POLE * HALF_LENGTH * spin.square() * sin) / both
    turn = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE * cos.square() / both))
    pull = push - POLE * HALF_LENGTH * turn * cos / both
    following = torch.stack(
        [x + TAU * speed, speed + TAU * pull, angle + TAU * spin, spin + TAU * turn], -1
    )
    fell = (following[:, 0].abs() > FARTHEST) | (following[:, 2].abs() > STEEPEST)
    return following, fell.unsqueeze(-1)
