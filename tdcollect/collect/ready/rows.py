"""Rows of slots that step at their own pace become the entries of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tdcollect.collect.batch_builder import chunk_steps
from tdcollect.collect.step_dict import Key, StepDict, is_next, under_next

if TYPE_CHECKING:
    from tdcollect.collect.fast.array_env import ArrayEnv
    from tdcollect.collect.fast.devices import Placement


class Rows:
    """Collects rows in the order of their arrival.

    Args:
        env: allocates the buffers.
        left_out: entries that the rows do without.
        place: moves tensors between devices; None where all is on the CPU.
        in_one_piece: stack all rows at once, which gradients pass through.

    Attributes:
        slots: the slot of each row.
    """

    def __init__(
        self,
        env: ArrayEnv,
        left_out: frozenset[Key],
        place: Placement | None,
        in_one_piece: bool = False,
    ):
        self._env = env
        self._left_out = left_out
        self._place = place
        self._in_one_piece = in_one_piece
        self._count = env.batch_size.numel()
        self._held: list[tuple[StepDict, StepDict, list[int]]] = []
        self._parts: list[dict[Key, torch.Tensor]] = []
        self.slots: list[int] = []

    def __len__(self) -> int:
        return len(self.slots)

    def allocate(self) -> Iterator[Any]:
        """Buffers for the turns to come, without end; rows are stacked chunk by chunk."""
        chunk = chunk_steps(self._env.step_bytes)
        while True:
            yield from self._env.allocate(chunk, self._place is not None and self._place.pinned)
            if not self._in_one_piece:
                self._flush()

    def append(self, step: StepDict, following: StepDict, slots: list[int]) -> None:
        """Hold the rows of some slots: of a step, and of the entries that it led to."""
        if slots:
            self._held.append((step, following, slots))
            self.slots += slots

    def entries(self) -> dict[Key, torch.Tensor]:
        """All rows, ``[F, ...]`` per entry, in the order of their arrival."""
        self._flush()
        if len(self._parts) == 1:
            return self._parts[0]
        return {key: torch.cat([part[key] for part in self._parts]) for key in self._parts[0]}

    def grid(self, steps: int) -> dict[Key, torch.Tensor]:
        """All rows by slot, ``[N, steps, ...]`` per entry; those that a slot lacks are zero."""
        if not self.slots:
            return {}
        entries, slots = self.entries(), np.asarray(self.slots)
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=self._count)
        index = torch.from_numpy(order)
        if (counts == steps).all():
            return {
                key: value[index.to(value.device)].unflatten(0, (self._count, steps))
                for key, value in entries.items()
            }
        within = np.arange(len(slots)) - np.repeat(counts.cumsum() - counts, counts)
        place = torch.from_numpy(slots[order] * steps + within)
        spread = {}
        for key, value in entries.items():
            whole = value.new_zeros((self._count * steps, *value.shape[1:]))
            whole[place.to(value.device)] = value[index.to(value.device)]
            spread[key] = whole.unflatten(0, (self._count, steps))
        return spread

    def _flush(self) -> None:
        """Stack the rows that are held."""
        if not self._held:
            return
        step, following, _ = self._held[0]
        kept = [key for key in step if not (is_next(key) or key in self._left_out)]
        led_to = [key for key in following if under_next(key) not in self._left_out]
        index = torch.cat(
            [
                turn * self._count + torch.tensor(slots)
                for turn, (_, _, slots) in enumerate(self._held)
            ]
        )
        taken = [step for step, _, _ in self._held]
        came_to = [following for _, following, _ in self._held]
        part = {key: self._picked(key, key, taken, index) for key in kept}
        for key in led_to:
            part[under_next(key)] = self._picked(under_next(key), key, came_to, index)
        self._parts.append(part)
        self._held = []
        if self._place is not None:
            self._place.forget()

    def _picked(
        self, name: Key, key: Key, steps: list[StepDict], index: torch.Tensor
    ) -> torch.Tensor:
        """The rows of one entry."""
        try:
            values = [step[key] for step in steps]
        except KeyError as error:
            raise RuntimeError(
                f"expected the entry {error} in every step of a batch, as in its first, got steps "
                "without it; have the policy write it at every call"
            ) from error
        if self._place is not None:
            values = self._place.bring(name, values, self._env.carried)
            self._place.finish()
        odd = [value.shape for value in values if value.shape != values[0].shape]
        if odd:
            raise ValueError(
                f"expected the entry {key!r} in one shape at every step of a batch, got "
                f"{list(values[0].shape)}, then {list(odd[0])}; pad it"
            )
        return torch.stack(values).flatten(0, 1)[index.to(values[0].device)]
