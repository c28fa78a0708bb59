"""Devices: each tensor crosses once between the env, the policy and the batch.

gymnasium's arrays live on the CPU. With a policy on another device, an observation is copied there
once (from pinned memory, without waiting), actions come back once, and nothing else waits. The
batch is made of the copies that are on its device already.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.collect.policies import Policy
from tdcollect.collect.step_dict import Key, StepDict, flat, is_next

_CPU = torch.device("cpu")


class Placement:
    """Moves tensors between an env on the CPU, the policy's device and the batch's.

    Args:
        policy: the device of the policy; None for the env's.
        env: the device that the env names, on which TorchRL keeps its entries; None for the CPU.
        storing: the device of the batch; None to leave every entry where TorchRL has it.
    """

    def __init__(
        self,
        policy: torch.device | None,
        env: torch.device | None,
        storing: torch.device | None,
    ):
        self.policy = policy or env or _CPU
        self.env = env
        self.storing = storing
        # Copies by the identity of their source, which is held so that the identity stays its own.
        self._sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __repr__(self) -> str:
        return f"policy on {self.policy}, env on {self.env}, batch on {self.storing}"

    @property
    def pinned(self) -> bool:
        """True if buffers should lie in pinned memory."""
        return self.policy.type == "cuda"

    def enter(self, carrier: TensorDictBase, carried: Iterable[Key]) -> StepDict:
        """TorchRL's step for the loop: the env's entries and trajectory ids on the CPU."""
        step = flat(carrier)
        for key in (*carried, *keys.FLAGS, keys.TRAJ_IDS):
            if key in step:
                step[key] = step[key].cpu()
        return step

    def leave(self, step: StepDict, carried: Iterable[Key]) -> StepDict:
        """The loop's step for TorchRL: its entries on TorchRL's devices."""
        placed = StepDict(step)
        for key in (*carried, *keys.FLAGS):
            if key in placed and self.env is not None:
                placed[key] = self.copy(placed[key], self.env)
        if keys.TRAJ_IDS in placed and self.storing is not None:
            placed[keys.TRAJ_IDS] = self.copy(placed[keys.TRAJ_IDS], self.storing)
        return placed

    def run(self, policy: Policy, step: StepDict) -> None:
        """Run the policy on its device; its outputs, which stay there, join the step."""
        given = StepDict((key, self._send(step[key])) for key in policy.reads_first if key in step)
        before = dict(given)
        policy(given)
        for key, value in given.items():
            if before.get(key) is not value:
                step[key] = value

    def _send(self, value: torch.Tensor) -> torch.Tensor:
        if value.device == self.policy:
            return value
        sent = self._sent.get(id(value))
        if sent is None:
            sent = self._sent[id(value)] = (value, self.copy(value, self.policy))
        return sent[1]

    def copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """One crossing. It waits only where the CPU is going to read."""
        return value.to(device, non_blocking=device.type == "cuda")

    def bring(
        self, key: Key, values: list[torch.Tensor], carried: Iterable[Key]
    ) -> list[torch.Tensor]:
        """The values of one entry, one per step, on the device where the batch keeps it."""
        target = self._target(key, carried)
        if target is None or all(value.device == target for value in values):
            return values
        if target != self.policy:
            return self._together(values, target)
        # The policy's inputs are there already; the rest (the ends of episodes) goes together.
        missing = [v for v in values if v.device != target and id(v) not in self._sent]
        if missing:
            for value, copy in zip(missing, self._together(missing, target), strict=True):
                self._sent[id(value)] = (value, copy)
        return [self._send(value) for value in values]

    def _together(self, values: list[torch.Tensor], target: torch.device) -> list[torch.Tensor]:
        return list(self.copy(torch.stack(values), target).unbind(0))

    def _target(self, key: Key, carried: Iterable[Key]) -> torch.device | None:
        if self.storing is not None:
            return self.storing
        of_env = is_next(key) or key in carried or key in keys.FLAGS
        return self.env if of_env else None

    def forget(self) -> None:
        """Let go of copies that no later step can ask for."""
        self._sent.clear()
