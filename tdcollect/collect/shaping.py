"""Reward shaping: one call of the user's function per batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, InitTracker, RewardSum, StepCounter, TensorDictPrimer, Transform
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect import keys
from tdcollect.envs.traits import EnvAction, transforms_of
from tdcollect.keys import Key

_BOOKKEEPING = (keys.STEP_COUNT, keys.EPISODE_REWARD, keys.IS_INIT)


class RewardShaping(Protocol):
    """A function ``f(observation, action, reward, done)`` that gives the rewards to learn from.

    It is called once per batch, without gradients, on all its steps: all have the batch's size
    in front, ``[N, T]``.
    """

    def __call__(self, observation: Any, action: Any, reward: Any, done: Any, /) -> Any:
        """The rewards that learners see.

        Args:
            observation: what the step led to, at an episode's end its true last observation:
                ``[N, T, *obs]``, or a TensorDict ``[N, T]`` where the env shows several entries.
            action: the policy's action ``[N, T, *action]``, or a TensorDict of several.
            reward: the env's reward, ``[N, T, 1]``; a copy.
            done: whether the episode ended with the step, bool ``[N, T, 1]``.

        Returns:
            A tensor of the shape of ``reward``.
        """


class Shaper:
    """Puts shaped rewards in the place of the env's, which stay under ``("next", "raw_reward")``.

    Raises:
        TypeError: if the function cannot be called.
        ValueError: for an env with several rewards, or whose batches use the name already; where
            there is no batch with the following observations to be shaped.
    """

    def __init__(
        self,
        function: RewardShaping,
        env: EnvBase,
        compact_obs: bool = False,
        in_batches: bool = True,
    ):
        if not callable(function):
            raise TypeError(
                "expected reward_shaping to be a function (observation, action, reward, done) -> "
                f"reward, got {type(function).__name__}"
            )
        if env.reward_keys != [keys.REWARD] or keys.DONE not in env.done_keys:
            raise ValueError(
                "expected an env with one reward and one done flag at its root, got rewards "
                f"{env.reward_keys} and flags {env.done_keys}; shape them in a postproc instead"
            )
        if keys.RAW_REWARD in env.observation_spec.keys(True, True):
            raise ValueError(
                f"expected no entry {keys.RAW_REWARD!r} in the env, which reward_shaping keeps the "
                "env's reward in; rename it (torchrl.envs.RenameTransform)"
            )
        self._function = function
        if compact_obs:
            raise ValueError(
                "reward_shaping is given the observation that a step led to, which "
                "compact_obs=True leaves out: expected one of the two"
            )
        if not in_batches:
            raise ValueError(
                "reward_shaping is given whole batches, and extend_buffer=False writes steps one "
                "by one: expected extend_buffer=True, the default"
            )
        counted = {*_BOOKKEEPING, *(key for t in transforms_of(env) for key in _counted(t))}
        self._observations = [key for key in env.observation_keys if key not in counted]
        self._actions = env.action_keys

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """A copy of a batch, which shares all other entries with it."""
        following = batch.get(keys.NEXT)
        reward = following.get(keys.REWARD)
        shaped = self._function(
            _only(following, self._observations),
            _only(batch, self._actions),
            reward.clone(),
            following.get(keys.DONE),
        )
        if not isinstance(shaped, torch.Tensor) or shaped.shape != reward.shape:
            got = list(shaped.shape) if isinstance(shaped, torch.Tensor) else type(shaped).__name__
            raise ValueError(
                f"expected reward_shaping to return a tensor of the reward's shape "
                f"{list(reward.shape)}, got {got}"
            )
        shaped = shaped.to(reward.device)
        if not _goes_into(shaped, reward.dtype):
            raise ValueError(
                "expected reward_shaping to return numbers that go into the reward's "
                f"{reward.dtype} without loss, got {shaped.dtype}; cast what it returns, or the "
                "env's reward (torchrl.envs.DTypeCastTransform)"
            )
        batch = batch.copy()
        batch.set((keys.NEXT, keys.RAW_REWARD), reward)
        batch.set((keys.NEXT, keys.REWARD), shaped.to(reward.dtype))
        return batch


def _goes_into(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether values go into a dtype without loss; floats may lose digits."""
    if values.is_complex() or dtype.is_floating_point:
        return not values.is_complex()
    return torch.equal(values.to(dtype).to(values.dtype), values)


def _counted(transform: Transform) -> list[Key]:
    """The entries that a transform writes beside the observation: counts, states, actions."""
    if isinstance(transform, EnvAction):
        return [key for _, key in transform.pairs]
    if isinstance(transform, PolicyVersion):
        return [keys.POLICY_VERSION]
    if isinstance(transform, TensorDictPrimer):
        return list(transform.primers.keys(True, True))
    if isinstance(transform, InitTracker):
        return [transform.init_key]
    if isinstance(transform, StepCounter):
        return [transform.step_count_key]
    return list(transform.out_keys) if isinstance(transform, RewardSum) else []


def _only(entries: TensorDictBase, wanted: list[Key]) -> Any:
    return entries.get(wanted[0]) if len(wanted) == 1 else entries.select(*wanted)
