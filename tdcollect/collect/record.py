"""One collection as its statistics need it: rewards, done flags, and times on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect._upstream.collector import CollectorState
from tdcollect.collect.episodes import Block, Piece
from tdcollect.collect.fast.loop import ArrayEnv
from tdcollect.collect.fast.policy import Program
from tdcollect.collect.hooks import Watch, marked_slots
from tdcollect.collect.statistics import Bools, Floats, Ints
from tdcollect.collect.step_dict import Key, StepDict, under_next
from tdcollect.collect.tensordict_env import TensorDictEnv

Env = TypeVar("Env", ArrayEnv, TensorDictEnv, ArrayEnv | TensorDictEnv)
Lower = Callable[[StepDict], Program]


class Record:
    """What one collection collected, and the time that it took.

    Args:
        batch_size: the env's.
        wanted: whether to note anything.
        timers: whether to time the env and the policy.
        watch: is told of each step; None for nobody.

    Attributes:
        batch: what was collected; to be set.
        env_seconds: time in the env's steps and resets; None without timers.
        policy_seconds: time in calls of the policy; None without timers.
    """

    def __init__(
        self, batch_size: torch.Size, wanted: bool, timers: bool, watch: Watch | None = None
    ):
        self.env_seconds = 0.0 if timers else None
        self.policy_seconds = 0.0 if timers else None
        self.batch: TensorDictBase | None = None
        self.watch = watch
        self._slots = batch_size.numel()
        self._time_dim = len(batch_size)
        self._wanted = wanted
        self._timers = timers
        self._columns: list[torch.Tensor] = []
        self._done: torch.Tensor | None = None
        self._failed: torch.Tensor | None = None
        self._ended: list[Piece] = []
        self._rewards: list[list[torch.Tensor]] = []
        self._dones: list[list[torch.Tensor]] = []
        self._failures: list[list[torch.Tensor]] = []

    def timed(self, env: Env, lower: Lower) -> tuple[Env, Lower]:
        """The env and the policy of a collection on rows, timed where that was asked for."""
        if not self._timers:
            return env, lower
        for name in ("advance", "begin"):
            setattr(env, name, self._timing("env_seconds", getattr(env, name)))
        return env, lambda rows: cast(Program, _TimedProgram(lower(rows), self._timing))

    def noting(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """The blocks of a collection by episodes, whose slots are noted."""
        for block in blocks:
            self._ended += [piece for piece in block.pieces if piece.ended]
            yield block

    def take(self, columns: dict[Key, torch.Tensor], reward_keys: Sequence[Key]) -> None:
        """What a collection on rows gave, as the env gave it.

        Args:
            columns: entries ``[*N, T, *feature]``; ``[F, *feature]`` if by episodes.
            reward_keys: those of the env.
        """
        if self._wanted:
            self._columns = [columns[under_next(key)] for key in reward_keys]
            self._done = columns[keys.NEXT_DONE]
            self._failed = columns.get(under_next(keys.ENV_ERROR))

    @contextmanager
    def watching(self, collector: Any) -> Iterator[None]:
        """Note the steps that TorchRL's loop takes: it may end early, and may keep no batch."""
        if not self._wanted and self.watch is None:
            yield
            return
        env = collector.env
        step = env.step_and_maybe_reset
        own = env.__dict__.get("step_and_maybe_reset")  # a user may have replaced it
        if self._timers:
            step = self._timing("env_seconds", step)

        def noting(tensordict: TensorDictBase) -> Any:
            if self.watch is not None:
                self.watch.begin(tensordict)
            given = step(tensordict)
            try:
                self._note(given, env)
            except BaseException:
                collector._stale = True  # it has yet to go on to the row that the env is at
                raise
            return given

        env.__dict__["step_and_maybe_reset"] = noting
        try:
            with self._timing_policy(collector):
                yield
        finally:
            del env.__dict__["step_and_maybe_reset"]
            if own is not None:
                env.__dict__["step_and_maybe_reset"] = own

    def _note(self, given: tuple[TensorDictBase, TensorDictBase], env: EnvBase) -> None:
        following = given[0].get(keys.NEXT)
        rewards = [following.get(key) for key in env.reward_keys]
        flags = [following.get(key, None) for key in env.done_keys]
        flags = [flag.reshape(self._slots, -1) for flag in flags if flag is not None]
        failed = following.get(keys.ENV_ERROR, None)
        if self._wanted:
            self._rewards.append(rewards)
            self._dones.append(flags)
            if failed is not None:
                self._failures.append([failed])
        if self.watch is not None:
            done = torch.cat(flags, -1).any(-1)
            ended: list[int] = done.nonzero().reshape(-1).tolist()
            lost = marked_slots(failed)
            whole = [slot for slot in ended if slot not in lost]
            self.watch.stepped(None, whole, lambda: given[0], rewards, lost)
            if ended:
                self.watch.started(ended, lambda: given[1])

    @contextmanager
    def _timing_policy(self, collector: Any) -> Iterator[None]:
        if not self._timers:
            yield
            return
        state = CollectorState(collector)
        policy = state.policy_call

        def timed(tensordict: TensorDictBase) -> Any:
            nonlocal policy
            given = self._timing("policy_seconds", policy)(tensordict)
            if state.policy_call is not timed:
                # What was called has put something quicker in its place.
                policy = state.policy_call
                state.policy_call = timed
            return given

        state.policy_call = timed
        try:
            yield
        finally:
            state.policy_call = policy

    def _timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its time added to an attribute of this record."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - start)

        return timed

    def arrays(self) -> tuple[Floats, Bools]:
        """Rewards and done flags ``[N, T]``; ``[1, F]`` if by episodes, one behind the other.

        The reward of a slot is the sum over its reward entries and their features (the agents of
        one, say); it is done where any flag of it is, which is where TorchRL's collector starts a
        trajectory.
        """
        if self._done is None:
            reward, done = self._stacked(self._rewards), self._stacked(self._dones)
        else:
            slots = 1 if self.by_episodes else self._slots
            shape = (slots, self._done.shape[0 if self.by_episodes else self._time_dim])
            rewards = [as_array(column, *shape) for column in self._columns]
            reward = rewards[0] if len(rewards) == 1 else np.concatenate(rewards, -1)
            done = as_array(self._done, *shape)
        return summed(reward), done.any(-1)

    def failed(self) -> Bools | None:
        """The steps that are marked as failed, ``[N, T]``; None where the env marks none."""
        if self.by_episodes:
            return None  # episodes that failed are left out
        if self._failures:
            return self._stacked(self._failures).any(-1)
        if self._failed is None:
            return None
        return as_array(self._failed, self._slots, self._failed.shape[self._time_dim]).any(-1)

    @property
    def by_episodes(self) -> bool:
        """Whether whole episodes were collected."""
        return bool(self._ended)

    @property
    def slots(self) -> Ints:
        """``[E]`` int64, of whole episodes in the order in which they started."""
        order = sorted(self._ended, key=lambda piece: piece.start.number)
        return np.array([piece.slot for piece in order], np.int64)

    def _stacked(self, steps: Sequence[Sequence[torch.Tensor]]) -> Any:
        """A list of entries ``[*N, *feature]`` for each of T steps, as an array ``[N, T, F]``."""
        parts = [
            torch.stack([value.reshape(self._slots, -1) for value in values], 1)
            for values in zip(*steps, strict=True)
        ]
        if not parts:
            return np.zeros((self._slots, 0, 0))
        return torch.cat(parts, -1).detach().cpu().numpy()


def as_array(column: torch.Tensor, slots: int, steps: int) -> Any:
    """``[N, T, F]``."""
    return column.detach().cpu().numpy().reshape(slots, steps, -1)


def summed(values: Any) -> Floats:
    """``[N, T, F]`` over its features."""
    if values.shape[-1] == 1:
        return values[..., 0].astype(np.float64)
    return values.sum(-1, dtype=np.float64)


class _TimedProgram:
    """A policy on rows, timed."""

    def __init__(self, program: Program, timing: Callable[..., Callable[..., Any]]):
        self._program = program
        self._call = timing("policy_seconds", program)

    def __call__(self, rows: StepDict) -> None:
        self._call(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)
