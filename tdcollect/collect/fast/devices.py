"""Devices: what crosses between the env, the policy and the batch crosses once.

gymnasium's arrays live on the CPU. With a policy on another device, an observation goes up once
(from pinned memory, without waiting), actions come down once, and nothing else waits. Whatever is
up already is what the batch is made of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.collect.fast.policy import Program
from tdcollect.collect.step_dict import Key, StepDict, flat, is_next

_CPU = torch.device("cpu")


class Placement:
    """Where the policy runs and where the batch is kept, for an env on the CPU's arrays.

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
        """Whether rows should be written into pinned memory."""
        return self.policy.type == "cuda"

    def enter(self, carrier: TensorDictBase, carried: Iterable[Key]) -> StepDict:
        """TorchRL's row as the loop has it: the env's entries and trajectory ids on the CPU."""
        rows = flat(carrier)
        for key in (*carried, *keys.FLAGS, keys.TRAJ_IDS):
            if key in rows:
                rows[key] = rows[key].cpu()
        return rows

    def leave(self, rows: StepDict, carried: Iterable[Key]) -> StepDict:
        """The loop's row as TorchRL has it."""
        placed = StepDict(rows)
        for key in (*carried, *keys.FLAGS):
            if key in placed and self.env is not None:
                placed[key] = self.copy(placed[key], self.env)
        if keys.TRAJ_IDS in placed and self.storing is not None:
            placed[keys.TRAJ_IDS] = self.copy(placed[keys.TRAJ_IDS], self.storing)
        return placed

    def run(self, program: Program, rows: StepDict) -> None:
        """Run the policy on its device; its outputs, which stay there, join the rows."""
        given = StepDict((key, self._send(rows[key])) for key in program.reads_first if key in rows)
        before = dict(given)
        program(given)
        for key, value in given.items():
            if before.get(key) is not value:
                rows[key] = value

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

    def gather(
        self, key: Key, values: list[torch.Tensor], carried: Iterable[Key]
    ) -> list[torch.Tensor]:
        """The rows of one entry, on the device where the batch keeps it."""
        target = self._target(key, carried)
        if target is None or all(value.device == target for value in values):
            return values
        if target != self.policy:
            return self._together(values, target)
        # What the policy was given is up already; the rest (the ends of episodes) goes together.
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
        """Let go of copies that no later row can ask for."""
        self._sent.clear()
