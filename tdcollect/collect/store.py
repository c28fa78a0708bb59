"""Store: steps stacked into a batch; Placement: each tensor crosses once between devices.

gymnasium's arrays live on the CPU. With a policy on another device, an observation is copied there
once (from pinned memory, asynchronously), actions come back once, and nothing else waits. The batch
is made of the copies that are on its device already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tdcollect import keys
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.policy import LoweredPolicy
from tdcollect.collect.step_dict import NotReset, StepDict, chunk_steps, sent, with_index
from tdcollect.keys import Key, is_next, under_next

_CPU = torch.device("cpu")


@dataclass
class Store:
    """Takes the steps of a loop, and stacks them chunk by chunk, or all at once.

    ``steps`` is T, where all slots step together. It is None for rows that arrive one by one;
    ``slots`` then holds the slot of each.
    """

    env: SteppedEnv
    left_out: frozenset[Key]
    place: Placement
    in_one_piece: bool
    steps: int | None

    def __post_init__(self) -> None:
        self._dim = len(self.env.batch_size)
        self._count = self.env.batch_size.numel()
        self._held: list[tuple[StepDict, StepDict]] = []
        self._rows: list[torch.Tensor] = []  # of the steps held, those that have arrived
        self._names: list[tuple[Key, Key, bool]] | None = None
        self._filled = 0
        self._devices: dict[Key, torch.device] = {}
        self._entries: dict[Key, torch.Tensor] = {}
        self._parts: dict[Key, list[torch.Tensor]] = {}
        self.slots: list[int] = []

    def allocate(self) -> Iterator[Any]:
        """The buffers of each step, without end for rows; steps are stacked chunk by chunk."""
        chunk = chunk_steps(self.env.step_bytes, on_cpu=self.env.home == _CPU)
        left = math.inf if self.steps is None else self.steps
        while left > 0:
            count = int(min(chunk, left))
            yield from self.env.allocate(count, self.place.pinned)
            left -= count
            if not self.in_one_piece:
                self._flush()

    def append(self, step: StepDict, following: StepDict, slots: list[int]) -> None:
        """Hold a step, and what it led to; where rows arrive, the rows of these slots alone."""
        if self.steps is None:
            if not slots:
                return
            self._rows.append(len(self._held) * self._count + torch.tensor(slots))
            self.slots += slots
        self._held.append((step, following))

    def rows(self) -> dict[Key, torch.Tensor]:
        """All rows, ``[F, ...]`` per entry, in the order of their arrival."""
        self._flush()
        return {k: v[0] if len(v) == 1 else torch.cat(v) for k, v in self._parts.items()}

    def grid(self) -> dict[Key, torch.Tensor]:
        """The entries ``[N, t, ...]``; rows that a slot lacks are zero."""
        if self.steps is not None:
            if not self._filled:
                self.steps = len(self._held)  # the loop has ended within its first chunk
            self._flush()
            if self._filled == self.steps:
                return self._entries
            return {k: v.narrow(self._dim, 0, self._filled) for k, v in self._entries.items()}
        slots = torch.tensor(self.slots)
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=self._count).tolist()
        return {
            key: pad_sequence(value[order.to(value.device)].split(counts), batch_first=True)
            for key, value in self.rows().items()
        }

    def _flush(self) -> None:
        if not self._held:
            return
        if self._names is None:
            step, following = self._held[0]
            if lacking := [k for k in self.env.carried if k in following and k not in step]:
                raise NotReset(
                    f"expected the entries {lacking} from resets, as steps give them, got resets "
                    "without: an episode's first row has no value for them; write them in _reset, "
                    "too, of the transform or env that writes them in steps"
                )
            names = [(key, key, False) for key in step if not is_next(key)]
            names += [(under_next(key), key, True) for key in following]
            self._names = [one for one in names if one[0] not in self.left_out]
        brought: dict[Key, list[torch.Tensor]] = {}
        try:
            for name, key, led_to in self._names:
                values = [held[led_to][key] for held in self._held]
                device = self._devices.get(name)
                brought[name] = self.place.bring(name, values, device)
            self.place.finish()
            for name, values in brought.items():
                self._devices[name] = values[0].device
                self._stack(name, values)
        except KeyError as error:
            raise RuntimeError(
                f"expected the entry {error} in every step of a batch, as in its first, got steps "
                "without it; have the policy write it at every call"
            ) from error
        except RuntimeError as error:
            for _, key, led_to in self._names:
                shapes = [held[led_to][key].shape for held in self._held]
                odd = [shape for shape in shapes if shape != shapes[0]]
                if odd:
                    raise ValueError(
                        f"expected the entry {key!r} in one shape at every step of a batch, got "
                        f"{list(shapes[0])}, then {list(odd[0])}; pad it"
                    ) from error
            raise
        self._filled += len(self._held)
        self.place.forget(self._held[-1][1].values())
        self._held, self._rows = [], []

    def _stack(self, name: Key, values: list[torch.Tensor]) -> None:
        dim, steps = self._dim, self.steps
        if steps is None:
            rows = torch.stack(values).flatten(0, 1)[torch.cat(self._rows).to(values[0].device)]
            self._parts.setdefault(name, []).append(rows)
            return
        if len(values) == steps:
            # Steps in another memory format (channels last) would make the batch one, too.
            self._entries[name] = torch.stack(values, dim).contiguous()
            return
        first = values[0]
        if name not in self._entries:
            shape = (*first.shape[:dim], steps, *first.shape[dim:])
            self._entries[name] = _empty(shape, first)
        torch.stack(values, dim, out=self._entries[name].narrow(dim, self._filled, len(values)))


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor, on huge pages where NumPy gives them: first writes cost less."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.empty(shape, torch.empty((), dtype=like.dtype).numpy().dtype))


class Placement:
    """Leaves all tensors where they are: on the CPU."""

    moves = False
    pinned = False  # whether buffers should lie in pinned memory
    policy: Any = None  # the device of the policy; None where all is on the CPU
    # The device of the batch; None to leave entries where TorchRL has them.
    storing: torch.device | None = None

    def enter(self, step: StepDict, entries: Iterable[Key]) -> None:
        """Move a step of TorchRL's to the loop's devices: these entries to the env's."""

    def leave(self, step: StepDict) -> StepDict:
        """The loop's step for TorchRL: its entries on TorchRL's devices."""
        return step

    def run(self, policy: LoweredPolicy, step: StepDict) -> None:
        """Run the policy on its device; its outputs, which stay there, join the step."""
        policy(step)

    def for_env(self, step: StepDict) -> StepDict:
        """The step with its actions on the env's device."""
        return step

    def keep_apart(self, entries: StepDict, of_reset: bool = False) -> None:
        """Copy the entries of a step or a reset if the next one may overwrite their memory."""

    def bring(
        self, key: Key, values: list[torch.Tensor], device: torch.device | None
    ) -> list[torch.Tensor]:
        """The values of one entry, one per step, on the device where the batch keeps it.

        Those brought to the CPU have no values before :meth:`finish`. ``device`` is that of earlier
        steps of the batch.
        """
        return values

    def finish(self) -> None:
        """Wait for what is being brought to the CPU."""

    def forget(self, coming: Iterable[torch.Tensor]) -> None:
        """Drop copies that no later step can ask for: of all tensors but those."""


class Devices(Placement):
    """Moves tensors between an env, the policy's device and the batch's.

    An env's entries are on one device, where its transforms see them: the CPU, or the device that
    the env names if it steps there itself, or if a transform has tensors there or would round
    otherwise.
    """

    moves = True

    def __init__(self, env: SteppedEnv, policy: torch.device | None, storing: torch.device | None):
        named = env.transformed.device
        self.env = named and with_index(named)
        self.policy = with_index(policy or named or _CPU)
        self.home = with_index(env.home)
        self.storing = storing and with_index(storing)
        self.pinned = "cuda" in (self.policy.type, self.home.type)
        self._carried = (*env.carried, *keys.FLAGS)
        self._actions = env.transformed.action_keys
        self._reuses_memory = env.base is None  # tdcollect's slots write each step into new memory
        # Copies by the identity of their source, which is held so that it stays its own, and by
        # their device.
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        # The env's own tensors of the latest step, and of the latest reset.
        self._latest: dict[bool, StepDict] = {}
        self._late: set[torch.device] = set()  # from which copies to the CPU are under way

    def __repr__(self) -> str:
        return f"policy on {self.policy}, env on {self.env}, batch on {self.storing}"

    def enter(self, step: StepDict, entries: Iterable[Key]) -> None:
        for key in entries:
            if key in step:
                step[key] = step[key].to(self.home)
        if keys.TRAJ_IDS in step:
            step[keys.TRAJ_IDS] = step[keys.TRAJ_IDS].cpu()
        self.keep_apart(step)

    def leave(self, step: StepDict) -> StepDict:
        placed = StepDict(step)
        for key in self._carried:
            if key in placed and self.env is not None:
                placed[key] = placed[key].to(self.env)
        if keys.TRAJ_IDS in placed and self.storing is not None:
            placed[keys.TRAJ_IDS] = placed[keys.TRAJ_IDS].to(self.storing)
        return placed

    def run(self, policy: LoweredPolicy, step: StepDict) -> None:
        # Beside what it needs, what lies there already: its outputs of the step before, perhaps.
        inputs = StepDict(
            (key, self._sent(value, self.policy))
            for key, value in step.items()
            if key in policy.reads_first or value.device == self.policy
        )
        before = dict(inputs)
        policy(inputs)
        for key, value in inputs.items():
            if before.get(key) is not value:
                step[key] = value

    def for_env(self, step: StepDict) -> StepDict:
        if self.home != _CPU:  # such an env gets all entries there
            return StepDict((key, self._sent(value, self.home)) for key, value in step.items())
        away = [key for key in self._actions if key in step and step[key].device != _CPU]
        if not away:
            return step
        placed = StepDict(step)
        for key in away:
            placed[key] = self._keep(step[key], self._down(step[key], late=len(away) > 1))
        self.finish()  # one wait for all of them
        return placed

    def keep_apart(self, entries: StepDict, of_reset: bool = False) -> None:
        if not self._reuses_memory:
            return
        before, latest = self._latest.get(of_reset, StepDict()), StepDict(entries)
        self._latest[of_reset] = latest
        for key, value in latest.items():
            known = before.get(key)  # the first are copied, as it is not known yet
            if known is None or known.data_ptr() == value.data_ptr():
                entries[key] = value.clone()

    def bring(
        self, key: Key, values: list[torch.Tensor], device: torch.device | None
    ) -> list[torch.Tensor]:
        devices = {value.device for value in values}
        target = device or self._target(key, devices)
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

    def finish(self) -> None:
        for device in self._late:
            torch.cuda.current_stream(device).synchronize()
        self._late.clear()

    def forget(self, coming: Iterable[torch.Tensor]) -> None:
        identities = {id(value) for value in coming}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] in identities}

    def _sent(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if value.device == device:
            return value
        there = self._copies.get((id(value), device))
        return self._keep(value, sent(value, device)) if there is None else there[1]

    def _down(self, value: torch.Tensor, late: bool) -> torch.Tensor:
        """A copy on the CPU; a late one has no values before :meth:`finish`."""
        late = late and value.device.type == "cuda"
        if late:
            self._late.add(value.device)
        return value.to(_CPU, non_blocking=late)

    def _keep(self, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        self._copies[id(value), copy.device] = value, copy
        return copy

    def _target(self, key: Key, devices: set[torch.device]) -> torch.device | None:
        """The device for an entry; None to leave it where it is."""
        target = self.storing
        if target is None and (is_next(key) or key in self._carried):
            # One that the policy overwrites at every step is where the policy is.
            overwritten = not is_next(key) and devices == {self.policy} != {self.home}
            target = None if overwritten else self.env
        if target is None and len(devices) > 1:  # a hidden state begins in the env
            target = self.policy
        return target


def placement(
    env: SteppedEnv, policy: torch.device | None, storing: torch.device | None
) -> Placement:
    """Moves tensors between the devices of an env, its policy and its batches."""
    devices = (policy, env.transformed.device, storing)
    on_cpu = all(device is None or device.type == "cpu" for device in devices)
    return Placement() if on_cpu else Devices(env, policy, storing)
