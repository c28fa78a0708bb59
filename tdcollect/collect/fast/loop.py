"""The collection loop on arrays: one batch ``[N, T]``, the same to the bit as TorchRL's.

The env writes into arrays, the policy runs on rows, and the batch is stacked once at its end (or in
chunks, where it is large). The loop holds no options: what varies is decided before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from tdcollect import keys
from tdcollect._upstream.torchrl import STEPPING_METHODS, carried_entries
from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.fast.policy import Program
from tdcollect.collect.fast.transforms import (
    ExactReward,
    RowTransform,
    exact_reward,
    lower_transforms,
    transforms_of,
)
from tdcollect.collect.step_dict import (
    Key,
    StepDict,
    check_tensors,
    flat,
    from_next,
    is_next,
    under_next,
)
from tdcollect.envs.buffers import StepBuffers
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import key_of
from tdcollect.envs.wrapper import GymnasiumEnv, nested

_CHUNK_BYTES = 2**20
"""StepDict are moved into the batch in chunks of about so many bytes of observations."""

_CHUNK_STEPS = 128
"""And of no more steps."""

_SPARE_BYTES = 2**16
"""Buffers for resets are allocated in advance where an observation takes no more than this."""


class Steps(Protocol):
    """Slots on rows, as a batch sees them: an :class:`ArrayEnv` or its like."""

    batch_size: torch.Size
    carried: list[Key]
    row_bytes: int

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """What so many steps write."""


NewIds = Callable[[int], torch.Tensor]

StepWatch = Callable[[StepDict, StepDict, StepDict, list[int]], None]
"""Is told of a step: its row, what followed, the next row, and the slots whose episodes ended."""


class ArrayEnv:
    """A tdcollect env, its transforms included, on rows.

    Args:
        env: the env itself.
        transforms: what stands around it, innermost first.
        whole: the env with its transforms.
        exact: carries float64 rewards through the transforms; they are shown beside the others,
            under ``"_exact_reward"``. None for nobody who asks for them.
    """

    def __init__(
        self,
        env: GymnasiumEnv,
        transforms: list[RowTransform],
        whole: EnvBase,
        exact: ExactReward | None = None,
    ):
        self.env = env
        self._exact = exact
        self.transforms = transforms
        self.whole = whole
        self.carried = carried_entries(whole)
        self.batch_size = env.batch_size
        self._inverse = list(reversed(transforms))
        entries = env.stepper.entries
        self._entries: list[Key] = [key_of(entry.path) for entry in entries]
        self.row_bytes = env.num_envs * sum(e.dtype.itemsize * math.prod(e.shape) for e in entries)
        self._spare: list[StepBuffers] = []
        self._written = [*self._entries, keys.REWARD, keys.TERMINATED, keys.TRUNCATED, keys.DONE]

    def allocate(self, count: int, pinned: bool = False) -> list[StepBuffers]:
        """What so many steps write; see :meth:`GymnasiumEnv.allocate`."""
        return self.env.allocate(count, pinned, self._exact is not None)

    def step(
        self, rows: StepDict, next_keys: list[Key], buffers: StepBuffers
    ) -> tuple[StepDict, StepDict | None, list[int]]:
        """Step all slots, and start an episode in those that end.

        Args:
            rows: the step to take, the policy's outputs included.
            next_keys: those of the policy's outputs that belong to the following step.
            buffers: is written.

        Returns:
            The following step's entries; those that begin the next row where slots were reset,
            None where none was; and the slots that were reset.
        """
        following, error = self.advance(rows, next_keys, buffers)
        if error is not None:
            raise error
        # Transforms may end episodes, too.
        done = following[keys.DONE].numpy().reshape(-1) if self.transforms else buffers.done
        if not np.count_nonzero(done):  # the quickest way to ask
            return following, None, []
        ended = done.nonzero()[0].tolist()
        return following, self.begin(following, following[keys.DONE], ended), ended

    def advance(
        self,
        rows: StepDict,
        next_keys: list[Key],
        buffers: StepBuffers,
        slots: list[int] | None = None,
    ) -> tuple[StepDict, SlotError | None]:
        """Step ``slots`` (None for all).

        Returns:
            The following step's entries, of all slots; and what the envs of some slots raised,
            whose rows mean nothing.
        """
        given = rows
        if self.transforms:
            given = StepDict(rows)
            for transform in self._inverse:
                transform.inv(given)
        error = None
        try:
            self.env.stepper.step(self.env.read_actions(given), slots, buffers)
        except SlotError as raised:
            error = raised
        following = StepDict(zip(self._written, buffers.tensors, strict=True))
        for key in next_keys:
            following.setdefault(from_next(key), rows[key])  # what the env says holds
        for transform in self.transforms:
            transform.step(given, following)
        if self._exact is not None:
            following[keys.EXACT_REWARD] = self._exact(self.env.exact_reward(buffers))
        return following, error

    def begin(
        self,
        following: StepDict,
        first: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``.

        Args:
            following: the entries that the latest step led to.
            first: bool ``[N, 1]`` (``[1]`` unbatched), true for these slots.
            slots: ascending.
            seeds: one a slot in ``slots``.
            options: gymnasium's reset options.

        Returns:
            The entries that begin the next row, of all slots.
        """
        if not self._spare:
            # Several at once cost little more than one; large ones would take memory for nothing.
            self._spare = self.allocate(1 if self.row_bytes > _SPARE_BYTES else 32)
        buffers = self._spare.pop()
        self.env.stepper.reset(slots, buffers, seeds, options)
        begun = StepDict(zip(self._entries, buffers.tensors, strict=False))
        if self.transforms:
            begun = StepDict({**following, **begun})
            del begun[keys.REWARD]
            for transform in self.transforms:
                transform.reset(begun, first)
        return begun


def array_env(env: EnvBase, exact: ExactReward | None = None) -> ArrayEnv | str:
    """The env on rows, or the reason why it is stepped as TorchRL does; see :class:`ArrayEnv`."""
    transforms, reason = lower_transforms(transforms_of(env))
    if reason is not None:
        return reason
    base = env.base_env if type(env) is TransformedEnv else env
    if replaced := _replaced(env, base):
        return f"the env has a {replaced[0]} of its own"
    if type(base) is not GymnasiumEnv:
        return f"the env is a {type(base).__name__}; those of tdcollect.make_env run on arrays"
    return ArrayEnv(base, transforms, env, exact)


def _replaced(*parts: EnvBase) -> list[str]:
    """The stepping methods that the user has replaced on an env."""
    return [name for part in parts for name in STEPPING_METHODS if name in part.__dict__]


def exact_reward_of(env: EnvBase) -> ExactReward | None:
    """Carries the rewards of an env through its transforms in float64.

    None where only the env itself knows what becomes of them.
    """
    base = env.base_env if type(env) is TransformedEnv else env
    if type(base) is not GymnasiumEnv or _replaced(env, base):
        return None
    return exact_reward(transforms_of(env))


def collect_frames(
    env: ArrayEnv,
    lower: Callable[[StepDict], Program],
    carrier: TensorDictBase,
    steps: int,
    new_ids: NewIds | None,
    left_out: frozenset[Key],
    place: Placement | None,
    keep: Callable[[TensorDict, bool], None],
    whole: bool = False,
    watch: StepWatch | None = None,
) -> dict[Key, torch.Tensor]:
    """Collect ``steps`` steps of every slot.

    Args:
        env: the env on rows.
        lower: gives the policy on rows, for the entries that it first finds.
        carrier: the row to begin with, as TorchRL's collector keeps it.
        steps: T.
        new_ids: gives so many new trajectory ids; None where they are not tracked.
        left_out: entries that the batch does without.
        place: moves tensors between devices; None where all is on the CPU.
        keep: is given the row that follows, and whether the env has raised since: it is then no
            longer where the row says.
        whole: stack the batch in one go, which gradients pass through.
        watch: is told of each step; None for nobody.

    Returns:
        The entries of the batch, ``[N, T, ...]`` each.

    Raises:
        NotTensors: where the policy writes something else; nothing has been stepped, and the row
            that is kept has its outputs.
    """
    rows = flat(carrier) if place is None else place.enter(carrier, env.carried)
    program = lower(rows)
    batch = Batch(env, steps, left_out, place, whole)
    next_keys: list[Key] | None = None
    slots = env.batch_size.numel()
    stepping = False
    try:
        for buffers in batch.allocate():
            if place is None:
                program(rows)
            else:
                place.run(program, rows)
            if next_keys is None:
                check_tensors(rows)
                next_keys = [key for key in rows if is_next(key)]
                forgotten = forgotten_entries(rows, env, program)
            stepping = True
            following, begun, ended = env.step(rows, next_keys, buffers)
            stepping = False
            batch.append(rows, following)
            advanced = next_row(rows, following if begun is None else begun, env, next_keys)
            if ended and new_ids is not None:
                ids = advanced[keys.TRAJ_IDS] = advanced[keys.TRAJ_IDS].clone()
                ids.numpy().reshape(-1)[ended] = new_ids(len(ended)).cpu().numpy()
            if 0 < len(ended) < slots:
                for key in forgotten:
                    value = advanced[key] = advanced[key].clone()
                    value[ended] = 0
            stepped, rows = rows, advanced
            if watch is not None:
                watch(stepped, following, rows, ended)
        program.check()
    finally:
        # Also where the policy or the env raised: what comes next goes on from the last whole step.
        if place is not None:
            rows = place.leave(rows, env.carried)
        keep(nested(rows.items(), env.batch_size, carrier.device), stepping)
    return batch.columns


def forgotten_entries(rows: StepDict, env: Steps, program: Program) -> list[Key]:
    """The policy's entries of the step before that it reads or leaves be.

    TorchRL zeroes them where some slots, but not all, are reset; the loop by episodes, wherever one
    starts.
    """
    kept = {*env.carried, *keys.FLAGS, keys.TRAJ_IDS}
    return [
        key
        for key in rows
        if key not in kept
        and not is_next(key)
        and (key in program.reads_first or key not in program.writes)
    ]


def next_row(rows: StepDict, source: StepDict, env: Steps, next_keys: list[Key]) -> StepDict:
    """The next row: what the env shows, and what the policy and the collector carry.

    The row's own flags stay as they are: no row starts in an episode that has ended.
    """
    advanced = StepDict(rows)
    for key in next_keys:
        del advanced[key]
    for key in env.carried:
        if key in source:
            advanced[key] = source[key]
    return advanced


class Batch:
    """StepDict on their way into a batch.

    Args:
        env: allocates the buffers (:class:`ArrayEnv` and its like).
        steps: T.
        left_out: entries that the batch does without.
        place: moves tensors between devices; None where all is on the CPU.
        whole: stack it in one go, which gradients pass through.

    Attributes:
        columns: the entries of the batch, ``[N, T, ...]`` each.
    """

    def __init__(
        self,
        env: Steps,
        steps: int,
        left_out: frozenset[Key],
        place: Placement | None,
        whole: bool = False,
    ):
        self._env = env
        self._place = place
        self._dim = len(env.batch_size)
        self._steps = steps
        self._left_out = left_out
        self._whole = whole
        self._rows: list[StepDict] = []
        self._following: list[StepDict] = []
        self.columns: dict[Key, torch.Tensor] = {}
        self._kept: list[Key] | None = None
        self._kept_next: list[Key] = []
        self._filled = 0

    def allocate(self) -> Iterator[StepBuffers]:
        """The buffers of each step, allocated, and later stacked, chunk by chunk."""
        chunk = max(1, min(_CHUNK_STEPS, _CHUNK_BYTES // max(1, self._env.row_bytes)))
        chunk = self._steps if self._whole else chunk
        while self._filled < self._steps:
            count = min(chunk, self._steps - self._filled)
            pinned = self._place is not None and self._place.pinned
            yield from self._env.allocate(count, pinned)
            self._flush()

    def append(self, rows: StepDict, following: StepDict) -> None:
        """Hold a step: its row, and the following step's entries."""
        self._rows.append(rows)
        self._following.append(following)

    def _flush(self) -> None:
        """Move the steps held into columns ``[N, T, ...]``."""
        if not self._rows:
            return
        if self._kept is None:
            first, after = self._rows[0], self._following[0]
            self._kept = [key for key in first if not (is_next(key) or key in self._left_out)]
            self._kept_next = [key for key in after if under_next(key) not in self._left_out]
        try:
            for key in self._kept:
                self._store(key, [rows[key] for rows in self._rows])
            for key in self._kept_next:
                self._store(under_next(key), [rows[key] for rows in self._following])
        except KeyError as error:
            raise RuntimeError(
                f"expected the entry {error} in every step of a batch, as in its first, got steps "
                "without it; have the policy write it at every call"
            ) from error
        except RuntimeError as error:
            rows = [{**r, **f} for r, f in zip(self._rows, self._following, strict=True)]
            for key, value in rows[0].items():
                odd = [row[key].shape for row in rows if row[key].shape != value.shape]
                if odd:
                    raise ValueError(
                        f"expected the entry {key!r} in one shape at every step of a batch, got "
                        f"{list(value.shape)}, then {list(odd[0])}; pad it"
                    ) from error
            raise
        self._filled += len(self._rows)
        self._rows, self._following = [], []
        if self._place is not None:
            self._place.forget()

    def cut(self) -> dict[Key, torch.Tensor]:
        """The columns of the steps held so far, ``[N, t, ...]``, where the batch ends early."""
        if not self._filled:
            self._steps = len(self._rows)
        if self._rows:
            self._flush()
        filled, dim = self._filled, self._dim
        return {key: column.narrow(dim, 0, filled) for key, column in self.columns.items()}

    def _store(self, key: Key, values: list[torch.Tensor]) -> None:
        if self._place is not None:
            values = self._place.gather(key, values, self._env.carried)
        first, dim, count = values[0], self._dim, len(values)
        repeated = None
        if count > 1 and not self._whole and all(value is first for value in values):
            # What no step has changed, as the row's own flags: to stack it costs more.
            repeated = first.unsqueeze(dim).expand(*first.shape[:dim], count, *first.shape[dim:])
        if count == self._steps:
            # StepDict in another memory format (channels last) would make the batch one, too.
            stacked = torch.stack(values, dim) if repeated is None else repeated
            self.columns[key] = stacked.contiguous()
            return
        column = self.columns.get(key)
        if column is None:
            shape = (*first.shape[:dim], self._steps, *first.shape[dim:])
            column = self.columns[key] = _empty(shape, first)
        part = column.narrow(dim, self._filled, count)
        if repeated is None:
            torch.stack(values, dim, out=part)
        else:
            part.copy_(repeated)


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor, on huge pages where NumPy gives them: first writes cost less."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.empty(shape, torch.empty((), dtype=like.dtype).numpy().dtype))
