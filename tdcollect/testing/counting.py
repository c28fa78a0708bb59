"""The counting env: its observation is its step counter, with its episode and its slot.

A batch of such an env says of itself where each row came from, so that nothing that a collector
can do wrong goes unseen: a row that is lost, doubled, shifted, or swapped with another slot's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from tdcollect import keys
from tdcollect.envs import GymnasiumEnv, make_env

Number = TypeVar("Number", int, torch.Tensor)
WrongAction = Literal["raise", "record"]

ALTERNATE = "alternate"
WRONG_ACTIONS = "wrong_actions"
"""Info of :class:`CountingEnv`: how many wrong actions it was given in its life."""

_EPISODES = 2**20
_MOST = 2**24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class CountingRules:
    """What counting envs, the policies that predict them and the checks of their batches share.

    Args:
        lengths: steps an episode: an int; a sequence, which episode ``e`` of slot ``i`` enters at
            ``(e + i) % len(lengths)``, so that slots end at different times; or a function of the
            episode's number.
        ends: ``"terminated"``, ``"truncated"``, or ``"alternate"``: episodes of even number
            terminate and the others are truncated.
        num_actions: the action of a step that starts at step count ``s`` must be
            ``s % num_actions``.
    """

    lengths: int | Sequence[int] | Callable[[int], int] = (3, 7, 1, 4, 2)
    ends: str = ALTERNATE
    num_actions: int = 5

    def __post_init__(self) -> None:
        if self.ends not in (keys.TERMINATED, keys.TRUNCATED, ALTERNATE):
            raise ValueError(
                f"expected ends to be {keys.TERMINATED!r}, {keys.TRUNCATED!r} or {ALTERNATE!r}, "
                f"got {self.ends!r}"
            )
        if self.num_actions < 2:
            raise ValueError(
                f"expected at least 2 actions, got num_actions={self.num_actions}: with fewer, no "
                "action is ever wrong"
            )
        if not callable(self.lengths):
            lengths = (self.lengths,) if isinstance(self.lengths, int) else tuple(self.lengths)
            if not lengths or any(length < 1 for length in lengths):
                raise ValueError(f"expected lengths of at least one step, got {self.lengths}")
            object.__setattr__(self, "lengths", lengths)

    def length(self, slot: int, episode: int) -> int:
        """Steps of an episode."""
        if callable(self.lengths):
            return self.lengths(episode)
        assert isinstance(self.lengths, tuple)
        return self.lengths[(slot + episode) % len(self.lengths)]

    def length_of(self, slot: torch.Tensor, episode: torch.Tensor) -> torch.Tensor:
        """Steps of many episodes: int64, of the shape of ``slot`` and ``episode``."""
        if callable(self.lengths):
            numbers, index = episode.unique(return_inverse=True)
            table = torch.tensor([self.lengths(e) for e in numbers.tolist()], device=episode.device)
            return table[index]
        assert isinstance(self.lengths, tuple)
        table = torch.tensor(self.lengths, device=episode.device)
        return table[(slot + episode) % len(self.lengths)]

    def terminates(self, episode: Number) -> Any:
        """Whether an episode ends by ``terminated`` (else by ``truncated``): bool, elementwise."""
        even = episode % 2 == 0
        return (even & (self.ends == ALTERNATE)) | (self.ends == keys.TERMINATED)

    def action(self, step: Number) -> Number:
        """The action of the step that starts at step count ``step``; elementwise."""
        return step % self.num_actions

    def reward(self, slot: Number, episode: Number, step: Number) -> Number:
        """The reward of the step that *reaches* step count ``step``; elementwise.

        Its decimals read ``sss ee tt``: slot, episode, step. Whole, and exact in float32.
        """
        return 10_000 * (slot % 1000) + 100 * (episode % 100) + step % 100


class CountingEnv(gym.Env[np.ndarray[Any, Any], np.int64]):
    """A gymnasium env whose observation is ``(step, episode, slot)``, float32 ``[3]``.

    ``step`` counts the steps of the episode and is 0 after a reset. ``episode`` is 0 at the first
    reset and goes up by one at each; ``reset(seed=s)`` makes it ``s % 2**20``, so that the seed
    fixes the episode and the episode shows the seed.

    It is strict: a step after an episode's end raises, and so does a wrong action unless it is to
    be recorded. Its info holds ``"wrong_actions"``, the number of them in the env's life.

    Args:
        slot: the number that it shows as its slot.
        rules: lengths and ends of its episodes, and its actions.
        wrong_action: ``"raise"``, or ``"record"`` to only count them.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it so)

    def __init__(
        self,
        slot: int = 0,
        rules: CountingRules = CountingRules(),
        *,
        wrong_action: WrongAction = "raise",
    ):
        self.slot = slot
        self.rules = rules
        self.raises = _check_wrong_action(wrong_action)
        self.observation_space = spaces.Box(0, _MOST, (3,), np.float32)
        self.action_space = spaces.Discrete(rules.num_actions)
        self.wrong_actions = 0
        self._episode = -1
        self._count = 0
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._episode = next_episode(self._episode) if seed is None else first_episode(seed)
        self._count = 0
        self._running = True
        return self._observation(), self._info()

    def step(
        self, action: np.int64
    ) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise RuntimeError(
                f"slot {self.slot}: expected a reset after the end of episode {self._episode}, got "
                "a step"
            )
        self._check_action(int(action))
        self._count += 1
        ended = self._count >= self.rules.length(self.slot, self._episode)
        self._running = not ended
        terminates = self.rules.terminates(self._episode)
        reward = float(self.rules.reward(self.slot, self._episode, self._count))
        flags = ended and terminates, ended and not terminates
        return self._observation(), reward, *flags, self._info()

    def _check_action(self, action: int) -> None:
        expected = self.rules.action(self._count)
        if action != expected:
            self.wrong_actions += 1
            if self.raises:
                raise AssertionError(
                    f"the action is the one that the state asks for: slot {self.slot}, episode "
                    f"{self._episode}, step {self._count}: expected {expected}, got {action}"
                )

    def _observation(self) -> np.ndarray[Any, Any]:
        return np.array([self._count, self._episode, self.slot], np.float32)

    def _info(self) -> dict[str, Any]:
        return {WRONG_ACTIONS: self.wrong_actions}


def first_episode(seed: int) -> int:
    """Number of the episode that ``reset(seed=seed)`` starts."""
    return seed % _EPISODES


def next_episode(episode: Number) -> Number:
    """Number of the episode after ``episode``; elementwise."""
    return (episode + 1) % _EPISODES


def _check_wrong_action(wrong_action: str) -> bool:
    if wrong_action not in ("raise", "record"):
        raise ValueError(f"expected wrong_action to be 'raise' or 'record', got {wrong_action!r}")
    return wrong_action == "raise"


def make_counting_envs(
    num_envs: int,
    rules: CountingRules = CountingRules(),
    *,
    wrong_action: WrongAction = "raise",
) -> list[Callable[[], CountingEnv]]:
    """One factory a slot, for ``SyncVectorEnv`` or ``AsyncVectorEnv``.

    The factories pickle where ``rules.lengths`` does, so that worker processes can be spawned.
    """
    return [
        partial(CountingEnv, slot, rules, wrong_action=wrong_action) for slot in range(num_envs)
    ]


def counting_env(
    num_envs: int | None = None,
    *,
    backend: str = "serial",
    autoreset_mode: AutoresetMode = AutoresetMode.DISABLED,
    rules: CountingRules = CountingRules(),
    wrong_action: WrongAction = "raise",
    context: str | None = None,
    **kwargs: Any,
) -> GymnasiumEnv:
    """A tdcollect env of counting envs; row i of its batches is slot i.

    Args:
        num_envs: the number of slots N; None for one slot with ``batch_size=[]``.
        backend: ``"serial"``, or ``"sync"`` or ``"async"`` for gymnasium's vector envs.
        autoreset_mode: of the vector env.
        rules: lengths and ends of the episodes, and the actions.
        wrong_action: ``"raise"``, or ``"record"`` to only count them.
        context: how ``"async"`` starts its processes: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **kwargs: passed to :func:`tdcollect.make_env`.
    """
    factories = make_counting_envs(num_envs or 1, rules, wrong_action=wrong_action)
    if backend == "serial":
        # make_env makes its slots one after the other from one callable.
        in_turn = itertools.cycle(factories)

        def counting() -> CountingEnv:
            return next(in_turn)()

        return make_env(counting, num_envs, **kwargs)
    if backend not in ("sync", "async"):
        raise ValueError(f"expected a backend of serial, sync, async, got {backend!r}")
    if num_envs is None:
        raise ValueError(f"expected num_envs to be a number with backend={backend!r}, got None")
    vector_env: VectorEnv[Any, Any, Any]
    if backend == "sync":
        vector_env = SyncVectorEnv(factories, autoreset_mode=autoreset_mode)
    else:
        vector_env = AsyncVectorEnv(factories, autoreset_mode=autoreset_mode, context=context)
    return make_env(vector_env, **kwargs)
