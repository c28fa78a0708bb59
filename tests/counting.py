"""The counting env, whose observation is its step, episode and slot; its policies and batches.

A batch of this env shows where each row came from. So each fault of a collector shows: a row that
is lost, doubled, shifted, or swapped with another slot's. tests/testing/test_counting.py tests it.
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
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, TensorDictPrimer

from tdcollect import keys
from tdcollect.envs import GymnasiumEnv, make_env
from tdcollect.keys import Key
from tdcollect.seeding import slot_seeds

Number = TypeVar("Number", int, torch.Tensor)
WrongAction = Literal["raise", "record"]

ALTERNATE = "alternate"
WRONG_ACTIONS = "wrong_actions"
"""Info of :class:`CountingEnv`: the number of wrong actions since the env was made."""

HIDDEN = "counting_hidden"
"""Entry of the recurrent policy's hidden state, float32 ``[N, 1]``: the step count, if correct."""
_FAILED = (keys.NEXT, keys.ENV_ERROR)
_EPISODES = 2**20
_MOST = 2**24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class CountingRules:
    """Settings that the envs, their policies and the check of their batches share.

    Args:
        lengths: of episodes: an int, or a sequence, of which episode ``e`` of slot ``i`` has the
            entry ``(e + i) % len(lengths)``.
        ends: ``"terminated"``, ``"truncated"``, or ``"alternate"``: even episodes terminate.
        num_actions: the action of a step that starts at step count ``s`` is ``s % num_actions``.
    """

    lengths: int | Sequence[int] = (3, 7, 1, 4, 2)
    ends: str = ALTERNATE
    num_actions: int = 5

    def __post_init__(self) -> None:
        lengths = (self.lengths,) if isinstance(self.lengths, int) else tuple(self.lengths)
        object.__setattr__(self, "lengths", lengths)

    def length(self, slot: int, episode: int) -> int:
        assert isinstance(self.lengths, tuple)
        return self.lengths[(slot + episode) % len(self.lengths)]

    def length_of(self, slot: torch.Tensor, episode: torch.Tensor) -> torch.Tensor:
        table = torch.tensor(self.lengths, device=episode.device).reshape(-1)
        return table[(slot + episode) % len(table)]

    def terminates(self, episode: Number) -> Any:
        even = episode % 2 == 0
        return (even & (self.ends == ALTERNATE)) | (self.ends == keys.TERMINATED)

    def action(self, step: Number) -> Number:
        return step % self.num_actions

    def reward(self, slot: Number, episode: Number, step: Number) -> Number:
        """The reward of the step that reaches ``step``: its decimals read ``sss ee tt``."""
        return 10_000 * (slot % 1000) + 100 * (episode % 100) + step % 100


class CountingEnv(gym.Env[np.ndarray[Any, Any], np.int64]):
    """A gymnasium env whose observation is ``(step, episode, slot)``, float32 ``[3]``.

    ``episode`` goes up by one at each reset; ``reset(seed=s)`` makes it ``s % 2**20``. A step after
    an episode's end raises, and so does a wrong action, unless ``wrong_action="record"``.
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
        self.raises = wrong_action == "raise"
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
        return self._observation(), {WRONG_ACTIONS: self.wrong_actions}

    def step(
        self, action: np.int64
    ) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise RuntimeError(
                f"slot {self.slot}: expected a reset after the end of episode {self._episode}, got "
                "a step"
            )
        expected = self.rules.action(self._count)
        if int(action) != expected:
            _note_wrong(self, 1, self.slot, self._episode, self._count, expected, int(action))
        self._count += 1
        ended = self._count >= self.rules.length(self.slot, self._episode)
        self._running = not ended
        terminates = self.rules.terminates(self._episode)
        reward = float(self.rules.reward(self.slot, self._episode, self._count))
        flags = ended and terminates, ended and not terminates
        return self._observation(), reward, *flags, {WRONG_ACTIONS: self.wrong_actions}

    def _observation(self) -> np.ndarray[Any, Any]:
        return np.array([self._count, self._episode, self.slot], np.float32)


def first_episode(seed: int) -> int:
    """The index of the episode that ``reset(seed=seed)`` starts."""
    return seed % _EPISODES


def next_episode(episode: Number) -> Number:
    return (episode + 1) % _EPISODES


def _note_wrong(env: Any, count: int, *seen: float) -> None:
    """Count wrong actions; a strict env raises with what is seen of the first one."""
    env.wrong_actions += count
    if env.raises:
        raise AssertionError(
            "the action is the one that the state asks for: slot {}, episode {}, step {}: expected "
            "{}, got {}".format(*seen)
        )


def make_counting_envs(
    num_envs: int, rules: CountingRules = CountingRules(), *, wrong_action: WrongAction = "raise"
) -> list[Callable[[], CountingEnv]]:
    """One factory per slot, for ``SyncVectorEnv`` or ``AsyncVectorEnv``."""
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
    **kwargs: Any,
) -> GymnasiumEnv:
    """A tdcollect env of counting envs: ``"serial"``, or on gymnasium's SyncVectorEnv."""
    factories = make_counting_envs(num_envs or 1, rules, wrong_action=wrong_action)
    if backend == "serial":
        # make_env makes its slots one after the other from one callable.
        in_turn = itertools.cycle(factories)

        def counting() -> CountingEnv:
            return next(in_turn)()

        return make_env(counting, num_envs, **kwargs)
    return make_env(SyncVectorEnv(factories, autoreset_mode=autoreset_mode), **kwargs)


class _Predicting(TensorDictModuleBase):
    def __init__(self, rules: CountingRules = CountingRules()):
        super().__init__()
        self.rules = rules

    def _action(self, step: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(self.rules.action(step.long()), self.rules.num_actions)


class CountingPolicy(_Predicting):
    """A recurrent policy that predicts the counting env from its hidden state alone.

    A hidden state that is lost, carried over an episode's end, reset too often or handed to another
    slot shows as a wrong action.
    """

    in_keys = (HIDDEN, keys.IS_INIT)
    out_keys = (keys.ACTION, (keys.NEXT, HIDDEN))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        hidden = tensordict[HIDDEN].masked_fill(tensordict[keys.IS_INIT], 0)
        tensordict[keys.ACTION] = self._action(hidden.squeeze(-1))
        tensordict[keys.NEXT, HIDDEN] = hidden + 1
        return tensordict

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({HIDDEN: Unbounded(shape=(1,))}, expand_specs=True)


class StatelessCountingPolicy(_Predicting):
    """Predicts the counting env from its observation."""

    in_keys = (keys.OBSERVATION,)
    out_keys = (keys.ACTION,)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict[keys.ACTION] = self._action(tensordict[keys.OBSERVATION][..., 0])
        return tensordict


class TorchCountingEnv(EnvBase):
    """The counting env as a batched ``EnvBase``, with partial resets and partial steps.

    Slots are numbered through the flattened batch; slot i takes the seed ``seed + i``.
    """

    slot: torch.Tensor
    episode: torch.Tensor
    count: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    seeded: torch.Tensor

    def __init__(
        self,
        batch_size: Sequence[int] = (),
        rules: CountingRules = CountingRules(),
        *,
        wrong_action: WrongAction = "raise",
    ):
        batch_size = torch.Size(batch_size)
        super().__init__(batch_size=batch_size)
        self.rules = rules
        self.raises = wrong_action == "raise"
        self.wrong_actions = 0
        batch, n = self.batch_size, rules.num_actions
        observation = Bounded(0, _MOST, (*batch, 3), dtype=torch.float32)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool)
        flags = {name: flag.clone() for name in keys.FLAGS}
        self.observation_spec = Composite({keys.OBSERVATION: observation}, shape=batch)
        self.action_spec = OneHot(n, shape=(*batch, n), dtype=torch.int64)
        self.reward_spec = Unbounded((*batch, 1), dtype=torch.float32)
        self.done_spec = Composite(flags, shape=batch)
        slots = torch.arange(batch_size.numel()).reshape(batch_size)
        self.register_buffer("slot", slots)
        # Seeded: episode numbers that a seed gave, for each slot's next reset; -1 for none.
        begun = {"episode": -1, "count": 0, "terminated": False, "truncated": False, "seeded": -1}
        for name, value in begun.items():
            self.register_buffer(name, torch.full(batch, value))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._keep_seeds(seed, torch.ones_like(self.terminated))

    def _keep_seeds(self, seed: int | Sequence[int], mask: torch.Tensor) -> None:
        slots = self.slot[mask].tolist()
        seeds = [seed + s for s in slots] if isinstance(seed, int) else slot_seeds(seed, slots)
        self.seeded[mask] = torch.tensor([first_episode(s) for s in seeds])

    def _reset(
        self, tensordict: TensorDictBase | None = None, *, seed: int | Sequence[int] | None = None
    ) -> TensorDictBase:
        mask = self._mask(tensordict, keys.RESET)
        if seed is not None:
            self._keep_seeds(seed, mask)
        new = torch.where(self.seeded < 0, next_episode(self.episode), self.seeded)
        self.episode = torch.where(mask, new, self.episode)
        self.seeded = self.seeded.masked_fill(mask, -1)
        self.count = self.count.masked_fill(mask, 0)
        self.terminated = self.terminated & ~mask
        self.truncated = self.truncated & ~mask
        return self._pack({})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = self._mask(tensordict, keys.STEP)
        self._check_running(mask)
        self._check_action(tensordict[keys.ACTION].argmax(-1), mask)
        self.count = self.count + mask.long()
        ended = (self.count >= self.rules.length_of(self.slot, self.episode)) & mask
        terminates = self.rules.terminates(self.episode)
        self.terminated = torch.where(mask, ended & terminates, self.terminated)
        self.truncated = torch.where(mask, ended & ~terminates, self.truncated)
        reward = self.rules.reward(self.slot, self.episode, self.count) * mask
        return self._pack({keys.REWARD: reward.float().unsqueeze(-1)})

    def _mask(self, tensordict: TensorDictBase | None, key: str) -> torch.Tensor:
        mask = None if tensordict is None else tensordict.get(key, None)
        if mask is None:
            return torch.ones_like(self.terminated)
        return mask.reshape(self.batch_size)

    def _check_running(self, mask: torch.Tensor) -> None:
        stopped = mask & (self.terminated | self.truncated | (self.episode < 0))
        if stopped.any():
            raise RuntimeError(
                f"slots {self.slot[stopped].tolist()}: expected a reset after the end of an "
                "episode, got a step"
            )

    def _check_action(self, action: torch.Tensor, mask: torch.Tensor) -> None:
        expected = self.rules.action(self.count)
        wrong = mask & (action != expected)
        if wrong.any():
            about = (self.slot, self.episode, self.count, expected, action)
            _note_wrong(self, int(wrong.sum()), *(values[wrong][0].item() for values in about))

    def _pack(self, source: dict[str, torch.Tensor]) -> TensorDictBase:
        observation = torch.stack([self.count, self.episode, self.slot], -1).float()
        terminated, truncated = self.terminated.unsqueeze(-1), self.truncated.unsqueeze(-1)
        source[keys.OBSERVATION] = observation
        source[keys.TERMINATED] = terminated.clone()
        source[keys.TRUNCATED] = truncated.clone()
        source[keys.DONE] = terminated | truncated
        return TensorDict(source, batch_size=self.batch_size)


def check_counting_batch(
    batch: TensorDictBase,
    rules: CountingRules = CountingRules(),
    *,
    num_envs: int | None = None,
    slots: Sequence[int] | None = None,
    previous: TensorDictBase | None = None,
    predicted: bool = True,
    max_episode_steps: int | None = None,
    require: Sequence[Key] = (),
) -> None:
    """Check every row of a batch of the counting env against the truth in its observations.

    Rows marked as failed (``("next", "env_error")``) must repeat their observation, have reward 0
    and truncate; any episode may follow them.

    Args:
        batch: ``[N, T]``; ``[T]`` of an unbatched env; or with more batch dims before T.
        rules: the rules of the env.
        num_envs: N, for a flat batch ``[N * T]``, slot by slot.
        slots: the N slots of the batch; ``0 .. N-1`` by default.
        previous: the batch before, which this one must continue.
        predicted: the actions must be right.
        max_episode_steps: the time limit around the env.
        require: optional entries that must be there.
    """
    about = (rules, num_envs, slots, max_episode_steps)
    rows = _Rows(batch, *about)
    missing = {*_ENTRIES, *require} - rows.present
    assert not missing, f"the batch lacks {missing}, and has {sorted(map(str, rows.present))}"
    for key, expected in rows.expected().items():
        if key in rows.present and (predicted or key != keys.ACTION):
            rows.check(key, expected)
    before = rows.batch[:, :0] if previous is None else _Rows(previous, *about).batch[:, -1:]
    joined = _Rows(torch.cat([before, rows.batch], 1), *about)
    joined.check_joints(rows.batch.shape[1] - joined.batch.shape[1])
    if keys.TRAJ_IDS in rows.present:
        seen = None if previous is None else previous[keys.TRAJ_IDS]
        rows.check_new_ids(seen)


_NEXT = {name: (keys.NEXT, name) for name in (*keys.FLAGS, keys.IS_INIT, keys.STEP_COUNT, HIDDEN)}
_NEXT_OBSERVATION, _NEXT_REWARD = (keys.NEXT, keys.OBSERVATION), (keys.NEXT, keys.REWARD)
_NEXT_TOTAL = (keys.NEXT, keys.EPISODE_REWARD)
_ENTRIES = (keys.ACTION, keys.OBSERVATION, _NEXT_OBSERVATION, _NEXT_REWARD)
_ENTRIES += (*keys.FLAGS, *(_NEXT[flag] for flag in keys.FLAGS))


class _Rows:
    """A batch as ``[N, T]``, with the counters in its observations (int64 ``[N, T]`` each)."""

    def __init__(
        self,
        batch: TensorDictBase,
        rules: CountingRules,
        num_envs: int | None,
        slots: Sequence[int] | None,
        max_episode_steps: int | None,
    ):
        if batch.batch_dims == 1:
            batch = batch.reshape(num_envs or 1, -1)
        self.batch = batch.reshape(-1, batch.shape[-1])
        self.rules = rules
        self.present = set(self.batch.keys(True, True))
        n, t = self.batch.shape
        observation = self.batch[keys.OBSERVATION]
        self.step, self.episode, _ = observation.long().unbind(-1)
        numbers = torch.tensor(range(n) if slots is None else slots, device=observation.device)
        self.slot = numbers.unsqueeze(-1).expand(n, t)
        own_length = rules.length_of(self.slot, self.episode)
        limit = _MOST if max_episode_steps is None else max_episode_steps
        self.length = own_length.clamp(max=limit)
        self.at_limit = self.step + 1 >= limit
        self.failed = torch.zeros_like(self.at_limit)
        if _FAILED in self.present:
            self.failed = self.batch[_FAILED].squeeze(-1)
        self.at_end = (self.step + 1 >= own_length) & ~self.failed
        self.last = self.at_end | self.at_limit | self.failed

    def observation(self, step: torch.Tensor, episode: torch.Tensor) -> torch.Tensor:
        return torch.stack([step, episode, self.slot], -1).float()

    def expected(self) -> dict[Key, torch.Tensor]:
        """The entries that follow from the step and the episode of each row, ``[N, T, ...]``."""
        step, failed, no = self.step, self.failed, torch.zeros_like(self.failed)
        terminates = self.rules.terminates(self.episode)
        reward = self.rules.reward(self.slot, self.episode, step + 1) * ~failed
        # No action follows the observation that ends an episode.
        latest = torch.minimum(step, self.length - 1)
        scalars: dict[Key, torch.Tensor] = {
            _NEXT_REWARD: reward.float(),
            _NEXT[keys.TERMINATED]: self.at_end & terminates,
            _NEXT[keys.TRUNCATED]: (self.at_end & ~terminates) | self.at_limit | failed,
            _NEXT[keys.DONE]: self.last,
            **dict.fromkeys(keys.FLAGS, no),
            keys.IS_INIT: step == 0,
            _NEXT[keys.IS_INIT]: no,
            keys.STEP_COUNT: step,
            _NEXT[keys.STEP_COUNT]: step + 1,
            HIDDEN: step.float(),
            _NEXT[HIDDEN]: (step + 1).float(),
        }
        return {
            keys.OBSERVATION: self.observation(latest, self.episode),
            _NEXT_OBSERVATION: self.observation(step + (~failed).long(), self.episode),
            keys.ACTION: self.rules.action(step),
            **{key: value.unsqueeze(-1) for key, value in scalars.items()},
        }

    def check(
        self,
        key: Key,
        expected: torch.Tensor,
        got: torch.Tensor | None = None,
        where: torch.Tensor | bool = True,
        first: int = 0,
    ) -> None:
        """Fail at the first row, of those in ``where``, that is not as expected."""
        if got is None:
            got = self.batch[key]
            if key == keys.ACTION:
                got = got.long().argmax(-1) if got.ndim > 2 else got
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), (
                f"entry {key!r}: expected {expected.shape}, {expected.dtype}, got {got.shape}, "
                f"{got.dtype}"
            )
        wrong = (got != expected).flatten(2).any(-1) if got.ndim > 2 else got != expected
        wrong = wrong & where
        if wrong.any():
            step = int(wrong.any(0).nonzero()[0])
            slot = int(wrong[:, step].nonzero()[0])
            raise AssertionError(
                f"slot {int(self.slot[slot, 0])}, step {step + first}, entry {key!r}: expected "
                f"{expected[slot, step].tolist()}, got {got[slot, step].tolist()}"
            )

    def check_joints(self, first: int) -> None:
        """Check that each row goes on where the one before ended; any may follow a failed one."""
        batch, last, new = self.batch, self.last[:, :-1], self.step[:, 1:] == 0
        shown = batch[keys.OBSERVATION][:, 1:]
        step = torch.where(self.last, 0, self.step + 1)
        episode = torch.where(self.last, next_episode(self.episode), self.episode)
        expected = self.observation(step, episode)[:, :-1]
        expected[..., 1] = torch.where(self.failed[:, :-1], shown[..., 1], expected[..., 1])
        self.check(keys.OBSERVATION, expected, shown, first=first + 1)
        if keys.TRAJ_IDS in self.present:
            ids = batch[keys.TRAJ_IDS]
            self.check(keys.TRAJ_IDS, ids[:, :-1], ids[:, 1:], ~new, first + 1)
            self.check(keys.TRAJ_IDS, last, ids[:, :-1] != ids[:, 1:], new, first + 1)
        if {keys.EPISODE_REWARD, _NEXT_TOTAL} <= self.present:
            before, after = batch[keys.EPISODE_REWARD].squeeze(-1), batch[_NEXT_TOTAL].squeeze(-1)
            self.check(keys.EPISODE_REWARD, torch.zeros_like(before), before, self.step == 0, first)
            self.check(keys.EPISODE_REWARD, after[:, :-1], before[:, 1:], ~new, first + 1)
            self.check(_NEXT_TOTAL, before + batch[_NEXT_REWARD].squeeze(-1), after, True, first)

    def check_new_ids(self, seen: torch.Tensor | None) -> None:
        """Check that the ids of episodes that start in this batch are new, and differ."""
        ids, starts = self.batch[keys.TRAJ_IDS], self.step == 0
        # An episode that went on from before the batch has its id in its first row only.
        chunks = starts.clone()
        chunks[:, 0] = True
        _, index, counts = ids[chunks].unique(return_inverse=True, return_counts=True)
        repeated = torch.zeros_like(chunks)
        repeated[chunks] = counts[index] > 1
        if seen is not None:
            repeated |= starts & torch.isin(ids, seen)
        self.check(keys.TRAJ_IDS, torch.zeros_like(repeated), repeated)
