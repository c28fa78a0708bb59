"""Devices: each tensor crosses once between the env, the policy and the batch.

gymnasium's arrays live on the CPU. With a policy on another device, an observation is copied there
once (from pinned memory, without waiting), actions come back once, and nothing else waits. The
batch is made of the copies that are on its device already.

An env's entries have a home, where its transforms see them: the CPU, or the device that the env
names if it steps there itself, or if a transform has tensors there or would round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.collect.policies import Policy
from tdcollect.collect.step_dict import Key, StepDict, flat, is_next, sent

_CPU = torch.device("cpu")


class Placement:
    """Moves tensors between an env, the policy's device and the batch's.

    Args:
        policy: the device of the policy; None for the env's.
        env: the device that the env names, on which TorchRL keeps its entries; None for the CPU.
        storing: the device of the batch; None to leave every entry where TorchRL has it.
        home: the device on which the loop has the env's entries.
    """

    def __init__(
        self,
        policy: torch.device | None,
        env: torch.device | None,
        storing: torch.device | None,
        home: torch.device = _CPU,
    ):
        self.policy = policy or env or _CPU
        self.env = env
        self.home = home
        self.storing = storing
        # Copies by the identity of their source, which is held so that it stays its own, and by
        # their device.
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        # The env's own tensors of the latest step, and of the latest reset.
        self._latest: dict[bool, StepDict] = {}
        self._late: set[torch.device] = set()  # from which copies to the CPU are under way

    def __repr__(self) -> str:
        return f"policy on {self.policy}, env on {self.env}, batch on {self.storing}"

    @property
    def pinned(self) -> bool:
        """True if buffers should lie in pinned memory."""
        return "cuda" in (self.policy.type, self.home.type)

    def enter(self, carrier: TensorDictBase, carried: Iterable[Key]) -> StepDict:
        """TorchRL's step for the loop: the env's entries at home, trajectory ids on the CPU."""
        step = flat(carrier)
        for key in (*carried, *keys.FLAGS):
            if key in step:
                step[key] = step[key].to(self.home)
        if keys.TRAJ_IDS in step:
            step[keys.TRAJ_IDS] = step[keys.TRAJ_IDS].cpu()
        return step

    def leave(self, step: StepDict, carried: Iterable[Key]) -> StepDict:
        """The loop's step for TorchRL: its entries on TorchRL's devices."""
        placed = StepDict(step)
        for key in (*carried, *keys.FLAGS):
            if key in placed and self.env is not None:
                placed[key] = placed[key].to(self.env)
        if keys.TRAJ_IDS in placed and self.storing is not None:
            placed[keys.TRAJ_IDS] = placed[keys.TRAJ_IDS].to(self.storing)
        return placed

    def run(self, policy: Policy, step: StepDict) -> None:
        """Run the policy on its device; its outputs, which stay there, join the step."""
        # Beside what it needs, what lies there already: its outputs of the step before, perhaps.
        given = StepDict(
            (key, self._sent(value, self.policy))
            for key, value in step.items()
            if key in policy.reads_first or value.device == self.policy
        )
        before = dict(given)
        policy(given)
        for key, value in given.items():
            if before.get(key) is not value:
                step[key] = value

    def for_env(self, step: StepDict, actions: Iterable[Key]) -> StepDict:
        """The step as an env takes it: with actions at home; there is one wait for all of them.

        An env on another device than the CPU gets all entries there.
        """
        if self.home != _CPU:
            return StepDict((key, self._sent(value, self.home)) for key, value in step.items())
        away = [key for key in actions if key in step and step[key].device != _CPU]
        if not away:
            return step
        given = StepDict(step)
        for key in away:
            given[key] = self._keep(step[key], self._down(step[key], late=len(away) > 1))
        self.finish()
        return given

    def _sent(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if value.device == device:
            return value
        found = self._copies.get((id(value), device))
        return self._keep(value, sent(value, device)) if found is None else found[1]

    def keep_apart(self, entries: StepDict, of_reset: bool = False) -> None:
        """Copy entries of an env that writes each step into the same memory: they cross later.

        To be called with those of each step, and of each reset. The first are copied, as it is not
        known yet.
        """
        before, latest = self._latest.get(of_reset, StepDict()), StepDict(entries)
        self._latest[of_reset] = latest
        for key, value in latest.items():
            known = before.get(key)
            if known is None or known.data_ptr() == value.data_ptr():
                entries[key] = value.clone()

    def _down(self, value: torch.Tensor, late: bool) -> torch.Tensor:
        """A copy on the CPU; a late one has no values before :meth:`finish`."""
        late = late and value.device.type == "cuda"
        if late:
            self._late.add(value.device)
        return value.to(_CPU, non_blocking=late)

    def _keep(self, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        self._copies[id(value), copy.device] = value, copy
        return copy

    def bring(
        self,
        key: Key,
        values: list[torch.Tensor],
        carried: Iterable[Key],
        device: torch.device | None = None,
    ) -> list[torch.Tensor]:
        """The values of one entry, one per step, on the device where the batch keeps it.

        Those brought to the CPU have no values before :meth:`finish`.

        Args:
            key: of the entry.
            values: of its steps.
            carried: the env's entries that a step hands on.
            device: of earlier steps of the batch; None for the first.
        """
        devices = {value.device for value in values}
        target = device or self._target(key, devices, carried)
        if target is None or devices == {target}:
            return values
        # Those that have crossed are there; the others cross together.
        missing: dict[torch.device, list[torch.Tensor]] = {}
        for value in values:
            if value.device != target and (id(value), target) not in self._copies:
                missing.setdefault(value.device, []).append(value)
        for group in missing.values():
            together = torch.stack(group)
            down = target == _CPU
            copies = self._down(together, late=True) if down else sent(together, target)
            for value, copy in zip(group, copies, strict=True):
                self._keep(value, copy)
        return [v if v.device == target else self._copies[id(v), target][1] for v in values]

    def _target(
        self, key: Key, devices: set[torch.device], carried: Iterable[Key]
    ) -> torch.device | None:
        """The device for an entry; None to leave it where it is."""
        target = self.storing
        if target is None and (is_next(key) or key in carried or key in keys.FLAGS):
            # One that the policy overwrites at every step is where the policy is.
            overwritten = not is_next(key) and devices == {self.policy} != {self.home}
            target = None if overwritten else self.env
        if target is None and len(devices) > 1:  # a hidden state begins in the env
            target = self.policy
        return target

    def finish(self) -> None:
        """Wait for what is being brought to the CPU."""
        for device in self._late:
            torch.cuda.current_stream(device).synchronize()
        self._late.clear()

    def forget(self, coming: Iterable[torch.Tensor] = ()) -> None:
        """Let go of copies that no later step can ask for: of all tensors but those."""
        kept = {id(value) for value in coming}
        self._copies = {key: found for key, found in self._copies.items() if key[0] in kept}
