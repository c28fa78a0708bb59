"""Players: they play an env on a seed with random actions, and record its rows."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Generic, TypeAlias, TypeVar

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.checks.registry import Failed, Skipped
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.workers.slots import old_api
from tdcollect.workers.values import Array

Env: TypeAlias = gym.Env[Any, Any]
Key: TypeAlias = str | tuple[str, ...]
E = TypeVar("E")

_EPISODES = 3
_MORE_STEPS = 2  # of TorchRL envs, after each slot has ended once


@dataclass(frozen=True)
class Row:
    """The record of one reset or step.

    Attributes:
        entries: copies of the values that two runs are compared by, in this order.
        ends: True if an episode ended here.
        is_reset: True for a reset of a gymnasium env.
        extra: a copy of the rest: gymnasium's info; the entries of TorchRL's next root, in which
            ended slots are reset.
        given: the objects that the env returned.
    """

    entries: Mapping[Key, Any]
    ends: bool = False
    is_reset: bool = False
    extra: Any = None
    given: tuple[Any, ...] = ()

    def __getitem__(self, key: Key) -> Any:
        """Return the entry of that name."""
        return self.entries[key]


class Player(abc.ABC, Generic[E]):
    """Plays one env, and others like it.

    Args:
        env: the env; :meth:`close` closes it.
        make: makes another env like it; None if nothing does.
        policy: maps an observation (gymnasium) or a root (TorchRL) to an action; None for random
            actions, which are the same for every seed: so a seed shows in the env alone.
        max_episode_steps: the most steps that are played.
        seed: the first seed.

    Attributes:
        failed: names of the checks that failed so far.
    """

    env: E

    def __init__(
        self,
        env: E | None,
        make: Callable[[], E] | None,
        policy: Callable[[Any], Any] | None,
        max_episode_steps: int,
        seed: int,
    ):
        if env is not None:
            self.env = env
        self.make = make
        self.policy = policy
        self.max_episode_steps = max_episode_steps
        self.seed = seed
        self.failed: list[str] = []
        self.is_closed = False

    @abc.abstractmethod
    def rows(self, env: E, seed: int) -> Iterator[Row]:
        """Reset an env with a seed and play it, row by row."""

    @abc.abstractmethod
    def close_env(self, env: E) -> None:
        """Close an env."""

    def play(self, env: E, seed: int) -> list[Row]:
        """Play an env to the end of its episode."""
        return list(self.rows(env, seed))

    def another(self) -> E:
        """Return a new env; the same one if nothing makes another."""
        return self.env if self.make is None else self.make()

    def done_with(self, env: E) -> None:
        """Close an env of :meth:`another`, if it was a new one."""
        if env is not self.env:
            self.close_env(env)

    def play_another(self, seed: int) -> list[Row]:
        """Play a new env, if one can be had."""
        env = self.another()
        try:
            return self.play(env, seed)
        finally:
            self.done_with(env)

    def leave_unfinished(self, env: E, seed: int) -> None:
        """Reset an env with a seed, and make two steps."""
        unfinished = self.rows(env, seed)
        for _ in range(3):
            next(unfinished, None)

    @cached_property
    def episodes(self) -> list[list[Row]]:
        """The env played on three seeds."""
        return [self.play(self.env, self.seed + i) for i in range(_EPISODES)]

    def all_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows of these episodes, each with its seed and step for messages."""
        for i, episode in enumerate(self.episodes):
            for step, row in enumerate(episode):
                yield f"seed {self.seed + i}, step {step}", row

    def require(self, *checks: str) -> None:
        """Raise ``Skipped`` if one of these checks found a fault that would show again."""
        for name in checks:
            if name in self.failed:
                raise Skipped(f"a fault reported above would show here too (see {name})")

    def close(self) -> None:
        """Close the env, once."""
        if not self.is_closed:
            self.is_closed = True
            self.close_env(self.env)


class GymnasiumPlayer(Player[Env]):
    """Plays episodes of gymnasium envs."""

    def rows(self, env: Env, seed: int | None, action_seed: int | None = None) -> Iterator[Row]:
        """Yield the rows of one episode, first its reset.

        Args:
            env: the env.
            seed: for its reset; None to reset without a seed.
            action_seed: for random actions that differ from the usual ones.
        """
        actions = deepcopy(env.action_space)
        actions.seed(self.seed if action_seed is None else action_seed)
        given: Any = env.reset(seed=seed)
        _check_tuple(given, 2, "reset")
        observation = given[0]
        yield gymnasium_row(given)
        for _ in range(self.max_episode_steps):
            action = actions.sample() if self.policy is None else self.policy(observation)
            given = env.step(action)
            _check_tuple(given, 5, "step")
            observation = given[0]
            row = gymnasium_row(given)
            yield row
            if row.ends:
                return

    def forever(self, env: Env, seed: int, later_seed: int | None = None) -> Iterator[Row]:
        """Yield the rows of one episode after the other, on a seed and then on another or none."""
        for start in chain([seed], repeat(later_seed)):
            yield from self.rows(env, start)

    @property
    def ended(self) -> list[tuple[int, list[Row]]]:
        """The episodes that ended, with their seeds.

        Raises:
            Skipped: if none did.
        """
        ended = [(self.seed + i, e) for i, e in enumerate(self.episodes) if e[-1].ends]
        if not ended:
            raise Skipped(f"no episode ended in {self.max_episode_steps} steps")
        return ended

    def close_env(self, env: Env) -> None:
        env.close()


def gymnasium_row(given: tuple[Any, ...]) -> Row:
    """Record what ``reset`` (two values) or ``step`` (five values) returned."""
    reward, terminated, truncated = given[1:-1] or (None, False, False)
    entries: dict[Key, Any] = {
        keys.OBSERVATION: deepcopy(given[0]),
        keys.REWARD: deepcopy(reward),
        keys.TERMINATED: deepcopy(terminated),
        keys.TRUNCATED: deepcopy(truncated),
    }
    ends = bool(terminated) or bool(truncated)
    return Row(entries, ends, len(given) == 2, _copy_info(given[-1]), given)


def _copy_info(info: Any) -> Any:
    try:
        return deepcopy(info)
    except Exception:  # infos may hold anything; values that cannot be copied are not compared
        return copy(info)


def _check_tuple(given: Any, count: int, call: str) -> None:
    expected = {
        2: "(observation, info)",
        5: "(observation, reward, terminated, truncated, info)",
    }[count]
    advice = "make it as gymnasium.Env has it"
    if not isinstance(given, tuple) or len(given) != count:
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        found = f"{call} gave {got}, expected {expected}"
        raise Failed(found, advice=old_api(found) or advice)
    if not isinstance(given[-1], dict):
        got = type(given[-1]).__name__
        raise Failed(f"{call} gave an info that is {got}, expected a dict", advice=advice)


class TorchRLPlayer(Player[EnvBase]):
    """Plays TorchRL envs: rows of all slots, through the resets of slots that end."""

    def act(self, env: EnvBase, root: TensorDictBase, seed: int) -> TensorDictBase:
        """Return the root with an action, which depends on nothing but ``seed`` and the root."""
        if self.policy is not None:
            return self.policy(root)
        # The action's draw must neither disturb nor follow an env that uses torch's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return env.rand_action(root)

    def start(self, env: EnvBase, seed: int) -> TensorDictBase:
        """Seed and reset an env; return its root."""
        env.set_seed(seed)
        return env.reset()

    def rows(self, env: EnvBase, seed: int) -> Iterator[Row]:
        """Yield the rows from a seeded reset on; entries are those of ``step``, by their keys."""
        root = self.start(env, seed)
        for i in range(self.max_episode_steps):
            given = env.step_and_maybe_reset(self.act(env, root, self.seed + i))
            step, after = (tensordict.clone() for tensordict in given)
            ends = bool(ended_slots(env, step).any())
            yield Row(_tensors(step), ends, extra=_tensors(after), given=given)
            root = given[1].clone()

    def play(self, env: EnvBase, seed: int) -> list[Row]:
        """Play until each slot has ended once, and two more steps."""
        rows: list[Row] = []
        ended = torch.zeros(env.batch_size, dtype=torch.bool)
        more = _MORE_STEPS
        for row in self.rows(env, seed):
            rows.append(row)
            if ended.all():
                more -= 1
                if not more:
                    break
            ended |= ended_slots(env, row)
        return rows

    def close_env(self, env: EnvBase) -> None:
        if not env.is_closed:
            env.close()


def next_key(key: Key) -> Key:
    """Return the key under ``"next"``."""
    return (keys.NEXT, key) if isinstance(key, str) else (keys.NEXT, *key)


def ended_slots(env: EnvBase, step: Row | TensorDictBase) -> torch.Tensor:
    """Return the slots that ended in a step: bool ``[N]``, on the CPU."""
    ended = torch.zeros(env.batch_size, dtype=torch.bool)
    for key in env.done_keys:
        ended |= step[next_key(key)].cpu().reshape(*env.batch_size, -1).any(-1)
    return ended


def _tensors(values: TensorDictBase) -> dict[Key, torch.Tensor]:
    """Return the leaves that are tensors, by their keys; text and other data is left out."""
    leaves = {key: values[key] for key in values.keys(True, True)}
    return {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


class SlotPlayer(Player[GymnasiumEnv]):
    """Plays episodes in slot 0 of an env of ``make_env``, below TorchRL, alone or beside others.

    Args:
        env: the env; it is left open.
        act: gives the env's actions of a step, from the step, the seed and the slots.
        max_episode_steps: the most steps that are played.
    """

    def __init__(
        self,
        env: GymnasiumEnv,
        act: Callable[[int, int, Sequence[int]], list[Array]],
        max_episode_steps: int,
    ):
        super().__init__(env, None, None, max_episode_steps, 0)
        self.act = act

    def rows(self, env: GymnasiumEnv, seed: int, slots: int = 1) -> Iterator[Row]:
        """Yield the rows of slot 0, of its episode or its first steps.

        Args:
            env: the env.
            seed: of slot 0; slot i is reset with ``seed + i``.
            slots: how many slots run; all of them if they cannot be stepped singly.

        Raises:
            SlotError: where an env raises.
        """
        stepper, backend = env.stepper, env.stepper.backend
        alone = backend.steps_subset and backend.seeds_subset
        running = list(range(min(slots, env.num_envs) if alone else env.num_envs))
        (buffers,) = env.allocate(1)
        raw = buffers.raw
        views = {"/".join(e.path): b for e, b in zip(stepper.entries, buffers.entries, strict=True)}
        views |= {
            keys.REWARD: raw.reward,
            keys.TERMINATED: raw.terminated,
            keys.TRUNCATED: raw.truncated,
        }
        stepper.reset(running, buffers, seeds=[seed + slot for slot in running])
        for step in range(self.max_episode_steps):
            ends = bool(buffers.done[0])
            yield Row({name: view[0].copy() for name, view in views.items()}, ends)
            if ends:
                return
            others = [slot for slot in running if buffers.done[slot]]
            if others:
                stepper.reset(others, buffers)
            given = self.act(step, seed, running)
            stepper.step(given, running if alone else None, buffers, restart=False)

    def close_env(self, env: GymnasiumEnv) -> None:
        """Leave the env open: it is the caller's."""
