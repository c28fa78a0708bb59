"""The steps of a loop become the entries of a batch, stacked once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tdcollect.collect.step_dict import Key, StepDict, is_next, under_next
from tdcollect.collect.tensordict_env import SteppedEnv

if TYPE_CHECKING:
    from tdcollect.collect.fast.devices import Placement

_CHUNK_BYTES = 2**20
"""Steps are moved into the batch in chunks of about so many bytes of observations."""

_GPU_CHUNK_BYTES = 2**26
"""The same where they are on a GPU: a chunk costs some launches, and has no cache to fit into."""

_CHUNK_STEPS = 128
"""The most steps of a chunk."""


class BatchBuilder:
    """Collects the steps of a loop, and stacks them.

    Args:
        env: allocates the buffers.
        steps: T.
        left_out: entries that the batch does without.
        place: moves tensors between devices; None where all is on the CPU.
        in_one_piece: stack all steps at once, which gradients pass through.

    Attributes:
        entries: those of the batch, ``[N, T, ...]`` each.
    """

    def __init__(
        self,
        env: SteppedEnv,
        steps: int,
        left_out: frozenset[Key],
        place: Placement | None,
        in_one_piece: bool = False,
    ):
        self._env = env
        self._place = place
        self._dim = len(env.batch_size)
        self._steps = steps
        self._left_out = left_out
        self._in_one_piece = in_one_piece
        self._held: list[StepDict] = []
        self._following: list[StepDict] = []
        self.entries: dict[Key, torch.Tensor] = {}
        self._keys: list[Key] | None = None
        self._next_keys: list[Key] = []
        self._filled = 0

    def allocate(self) -> Iterator[Any]:
        """The buffers of each step, allocated, and later stacked, chunk by chunk."""
        chunk = chunk_steps(self._env.step_bytes, self._env.home.type == "cpu")
        chunk = self._steps if self._in_one_piece else chunk
        while self._filled < self._steps:
            count = min(chunk, self._steps - self._filled)
            pinned = self._place is not None and self._place.pinned
            yield from self._env.allocate(count, pinned)
            self._flush()

    def append(self, step: StepDict, following: StepDict) -> None:
        """Hold a step, and the following step's entries."""
        self._held.append(step)
        self._following.append(following)

    def _flush(self) -> None:
        """Move the steps held into entries ``[N, T, ...]``."""
        if not self._held:
            return
        if self._keys is None:
            step, following = self._held[0], self._following[0]
            self._keys = [key for key in step if not (is_next(key) or key in self._left_out)]
            self._next_keys = [key for key in following if under_next(key) not in self._left_out]
        try:
            values = {key: [step[key] for step in self._held] for key in self._keys}
            for key in self._next_keys:
                values[under_next(key)] = [step[key] for step in self._following]
            if self._place is not None:
                values = self._brought(values, self._place)
            for key, of_steps in values.items():
                self._store(key, of_steps)
        except KeyError as error:
            raise RuntimeError(
                f"expected the entry {error} in every step of a batch, as in its first, got steps "
                "without it; have the policy write it at every call"
            ) from error
        except RuntimeError as error:
            steps = [{**s, **f} for s, f in zip(self._held, self._following, strict=True)]
            for key, value in steps[0].items():
                odd = [step[key].shape for step in steps if step[key].shape != value.shape]
                if odd:
                    raise ValueError(
                        f"expected the entry {key!r} in one shape at every step of a batch, got "
                        f"{list(value.shape)}, then {list(odd[0])}; pad it"
                    ) from error
            raise
        self._filled += len(self._held)
        if self._place is not None:
            self._place.forget(self._following[-1].values())
        self._held, self._following = [], []

    def _brought(
        self, values: dict[Key, list[torch.Tensor]], place: Placement
    ) -> dict[Key, list[torch.Tensor]]:
        """The values where the batch keeps them."""
        brought = {}
        for key, of_steps in values.items():
            entry = self.entries.get(key)
            device = None if entry is None else entry.device
            brought[key] = place.bring(key, of_steps, self._env.carried, device)
        place.finish()
        return brought

    def cut(self) -> dict[Key, torch.Tensor]:
        """The entries of the steps held so far, ``[N, t, ...]``, where the batch ends early."""
        if not self._filled:
            self._steps = len(self._held)
        if self._held:
            self._flush()
        filled, dim = self._filled, self._dim
        return {key: entry.narrow(dim, 0, filled) for key, entry in self.entries.items()}

    def _store(self, key: Key, values: list[torch.Tensor]) -> None:
        first, dim, count = values[0], self._dim, len(values)
        repeated = None
        if count > 1 and not self._in_one_piece and all(value is first for value in values):
            # An entry that no step has changed, as the step's own flags: stacking it costs more.
            repeated = first.unsqueeze(dim).expand(*first.shape[:dim], count, *first.shape[dim:])
        if count == self._steps:
            # Steps in another memory format (channels last) would make the batch one, too.
            stacked = torch.stack(values, dim) if repeated is None else repeated
            self.entries[key] = stacked.contiguous()
            return
        entry = self.entries.get(key)
        if entry is None:
            shape = (*first.shape[:dim], self._steps, *first.shape[dim:])
            entry = self.entries[key] = _empty(shape, first)
        part = entry.narrow(dim, self._filled, count)
        if repeated is None:
            torch.stack(values, dim, out=part)
        else:
            part.copy_(repeated)


def chunk_steps(step_bytes: int, on_cpu: bool = True) -> int:
    """The steps of a chunk, given the bytes of one step's observations."""
    size = _CHUNK_BYTES if on_cpu else _GPU_CHUNK_BYTES
    return max(1, min(_CHUNK_STEPS, size // max(1, step_bytes)))


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor, on huge pages where NumPy gives them: first writes cost less."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.empty(shape, torch.empty((), dtype=like.dtype).numpy().dtype))
