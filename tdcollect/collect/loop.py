"""The collection loop on arrays: one batch ``[N, T]``, the same to the bit as TorchRL's.

The env writes into arrays, the policy runs on rows, and the batch is stacked once at its end (or in
chunks, where it is large). The loop holds no options: what varies is decided in its constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from tdcollect import keys
from tdcollect.collect.policy import Program
from tdcollect.collect.rows import Key, Rows, flat, from_next, is_next, nested, under_next
from tdcollect.collect.transforms import RowTransform, lower_transforms
from tdcollect.envs.wrapper import ArrayFrame, GymnasiumEnv

_CHUNK_BYTES = 8 * 2**20


class ArrayEnv:
    """A tdcollect env, its transforms included, on rows.

    Args:
        env: the env itself.
        transforms: what stands around it, innermost first.
    """

    def __init__(self, env: GymnasiumEnv, transforms: list[RowTransform]):
        self.env = env
        self.transforms = transforms
        self._inverse = list(reversed(transforms))
        self._entries: list[Key] = [
            entry.path[0] if len(entry.path) == 1 else entry.path for entry in env.stepper.entries
        ]
        self.batch_size = env.batch_size
        self.not_done = torch.zeros((*env.batch_size, 1), dtype=torch.bool)

    def step(self, rows: Rows) -> tuple[Rows, Rows | None]:
        """Step all slots, and start an episode in those that end.

        Returns:
            The following step's entries, and those of them that begin the next row where slots
            were reset (None where none was).
        """
        given = rows
        if self.transforms:
            given = Rows(rows)
            for transform in self._inverse:
                transform.inv(given)
        frame = self.env.step_arrays(given)
        following = self._rows(frame)
        following[keys.REWARD] = self.env.tensor(frame.reward)
        following[keys.TERMINATED] = self.env.tensor(frame.terminated)
        following[keys.TRUNCATED] = self.env.tensor(frame.truncated)
        done = frame.terminated | frame.truncated
        following[keys.DONE] = self.env.tensor(done)
        for key, value in rows.items():
            if is_next(key):
                following[from_next(key)] = value
        if self.transforms:
            for transform in self.transforms:
                transform.step(rows, following)
            done = following[keys.DONE].numpy().reshape(done.shape)
        if not done.any():
            return following, None
        return following, self._restart(following, done)

    def _rows(self, frame: ArrayFrame) -> Rows:
        tensor = self.env.tensor
        return Rows(zip(self._entries, map(tensor, frame.entries), strict=True))

    def _restart(self, following: Rows, done: np.ndarray[Any, Any]) -> Rows:
        fresh = self._rows(self.env.reset_arrays(np.flatnonzero(done).tolist()))
        if not self.transforms:
            return fresh
        first = following[keys.DONE]
        begun = Rows(following)
        begun.pop(keys.REWARD)
        begun.update(fresh)
        for transform in self.transforms:
            transform.reset(begun, first)
        return begun


class ArrayLoop:
    """Collects batches for a collector whose env runs on rows.

    Args:
        env: the env on rows.
        observation_keys: the entries that a step hands on to the next row.
    """

    def __init__(self, env: ArrayEnv, observation_keys: list[Key]):
        self.env = env
        self._carried = observation_keys
        self.program: Program | None = None

    def collect(
        self,
        carrier: TensorDictBase,
        policy: Callable[..., Any],
        steps: int,
        new_ids: Callable[[int], torch.Tensor] | None,
        left_out: frozenset[Key],
        device: torch.device | None,
    ) -> tuple[TensorDict, TensorDict]:
        """Collect ``steps`` steps of every slot.

        Args:
            carrier: the row to begin with, as TorchRL's collector keeps it.
            policy: called on every row.
            steps: T.
            new_ids: gives so many new trajectory ids; None where they are not tracked.
            left_out: entries that the batch does without.
            device: the device that the batch names, if any.

        Returns:
            The batch ``[N, T]`` and the row that follows it.
        """
        env = self.env
        rows = flat(carrier)
        self.program = program = Program(policy, rows, env.batch_size, carrier.device)
        batch = _Batch(env.batch_size, steps, left_out)
        for _ in range(steps):
            program(rows)
            following, begun = env.step(rows)
            batch.append(rows, following)
            rows = self._advance(rows, following, begun, new_ids)
        for module in program.checks:
            batch.validate(module)
        following_row = nested(rows.items(), env.batch_size, carrier.device)
        return batch.finish(device), following_row

    def _advance(
        self,
        rows: Rows,
        following: Rows,
        begun: Rows | None,
        new_ids: Callable[[int], torch.Tensor] | None,
    ) -> Rows:
        """The next row: what the env shows, and what the policy and the collector carry."""
        source = following if begun is None else begun
        advanced = Rows((key, value) for key, value in rows.items() if not is_next(key))
        for key in self._carried:
            if key in source:
                advanced[key] = source[key]
        advanced[keys.DONE] = self.env.not_done
        advanced[keys.TERMINATED] = self.env.not_done
        advanced[keys.TRUNCATED] = self.env.not_done
        if begun is not None and new_ids is not None:
            ended = following[keys.DONE].squeeze(-1)
            ids = rows[keys.TRAJ_IDS]
            fresh = new_ids(int(ended.sum()))
            advanced[keys.TRAJ_IDS] = ids.masked_scatter(ended, fresh).reshape(ids.shape)
        return advanced


class _Batch:
    """Rows on their way into a batch ``[N, T]``."""

    def __init__(self, batch_size: torch.Size, steps: int, left_out: frozenset[Key]):
        self._batch_size = batch_size
        self._dim = len(batch_size)
        self._steps = steps
        self._left_out = left_out
        self._rows: list[Rows] = []
        self._following: list[Rows] = []
        self._columns: dict[Key, torch.Tensor] = {}
        self._filled = 0
        self._chunk = 0

    def append(self, rows: Rows, following: Rows) -> None:
        self._rows.append(rows)
        self._following.append(following)
        if not self._chunk:
            row_bytes = sum(v.nbytes for part in (rows, following) for v in part.values())
            self._chunk = max(1, _CHUNK_BYTES // max(1, row_bytes))
        if len(self._rows) == self._chunk and self._filled + self._chunk < self._steps:
            self._flush()

    def _flush(self) -> None:
        """Move the rows held so far into columns ``[N, T, ...]``."""
        count = len(self._rows)
        whole = count == self._steps
        for key in self._rows[0]:
            if key not in self._left_out and not is_next(key):
                self._store(key, [rows[key] for rows in self._rows], whole)
        for key in self._following[0]:
            if under_next(key) not in self._left_out:
                self._store(under_next(key), [rows[key] for rows in self._following], whole)
        self._filled += count
        self._rows, self._following = [], []

    def _store(self, key: Key, values: list[torch.Tensor], whole: bool) -> None:
        if whole:
            # Rows in another memory format (channels last) would make the batch one, too.
            self._columns[key] = torch.stack(values, self._dim).contiguous()
            return
        column = self._columns.get(key)
        if column is None:
            first = values[0]
            shape = (*self._batch_size, self._steps, *first.shape[self._dim :])
            column = self._columns[key] = torch.empty(shape, dtype=first.dtype, device=first.device)
        target = column.narrow(self._dim, self._filled, len(values))
        target.copy_(torch.stack(values, self._dim))

    def validate(self, module: Any) -> None:
        """Validate the parameters that a distribution was given, all at once."""
        self._flush_rest()
        params = {}
        for name, key in zip(module.dist_keys, module.in_keys, strict=True):
            if key not in self._columns:
                return
            params[name] = self._columns[key].movedim(self._dim, 0)
        module.distribution_class(**params, **module.distribution_kwargs)

    def _flush_rest(self) -> None:
        if self._rows:
            self._flush()

    def finish(self, device: torch.device | None) -> TensorDict:
        self._flush_rest()
        batch = nested(self._columns.items(), (*self._batch_size, self._steps), device)
        batch.refine_names(..., keys.TIME)
        return batch


def array_env(env: EnvBase) -> ArrayEnv | str:
    """The env on rows, or the reason why it is stepped as TorchRL does."""
    transforms: list[RowTransform] = []
    if type(env) is TransformedEnv:
        transforms, reason = lower_transforms(env.transform)
        if reason is not None:
            return reason
        env = env.base_env
    if type(env) is not GymnasiumEnv:
        return (
            f"the env is a {type(env).__name__}; tdcollect.make_env makes envs that run on arrays"
        )
    if env.device is not None and env.device.type != "cpu":
        return f"the env is on {env.device}"
    return ArrayEnv(env, transforms)
