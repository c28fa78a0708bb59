"""The counting env in torch alone: a batched ``EnvBase`` without gymnasium below it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.seeding import slot_seeds
from tdcollect.testing.counting import (
    _MOST,
    CountingRules,
    WrongAction,
    _check_wrong_action,
    first_episode,
    next_episode,
)


class TorchCountingEnv(EnvBase):
    """The counting env as a batched ``EnvBase``, with partial resets and partial steps.

    Slots are numbered through the flattened batch. Episodes are numbered and seeded as
    :class:`CountingEnv` does it: slot i takes the seed ``seed + i``. Observations are float32
    ``[N, 3]``, rewards float32 ``[N, 1]``, flags bool ``[N, 1]``.

    Args:
        batch_size: ``[N]``, ``[]`` or any other.
        rules: lengths and ends of the episodes, and the actions.
        wrong_action: ``"raise"``, or ``"record"`` to only count wrong actions in
            ``wrong_actions``.
        categorical_action_encoding: actions int64 ``[N]`` rather than one-hot ``[N, num_actions]``.
        device: the device that the env computes on.
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
        categorical_action_encoding: bool = False,
        device: torch.device | str | int | None = None,
    ):
        batch_size = torch.Size(batch_size)
        super().__init__(device=device, batch_size=batch_size)
        self.rules = rules
        self.raises = _check_wrong_action(wrong_action)
        self.wrong_actions = 0
        self.categorical = categorical_action_encoding
        self._make_specs()
        slots = torch.arange(batch_size.numel(), device=device).reshape(batch_size)
        self.register_buffer("slot", slots)
        self.register_buffer("episode", torch.full_like(slots, -1))
        self.register_buffer("count", torch.zeros_like(slots))
        self.register_buffer("terminated", torch.zeros_like(slots, dtype=torch.bool))
        self.register_buffer("truncated", torch.zeros_like(slots, dtype=torch.bool))
        # Episode numbers that a seed gave, for each slot's next reset; -1 for none.
        self.register_buffer("seeded", torch.full_like(slots, -1))

    def _make_specs(self) -> None:
        batch, n, device = self.batch_size, self.rules.num_actions, self.device
        observation = Bounded(0, _MOST, (*batch, 3), dtype=torch.float32, device=device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        flags = {name: flag.clone() for name in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)}
        self.observation_spec = Composite({keys.OBSERVATION: observation}, shape=batch)
        self.action_spec = (
            Categorical(n, shape=batch, dtype=torch.int64, device=device)
            if self.categorical
            else OneHot(n, shape=(*batch, n), dtype=torch.int64, device=device)
        )
        self.reward_spec = Unbounded((*batch, 1), dtype=torch.float32, device=device)
        self.done_spec = Composite(flags, shape=batch)

    def _set_seed(self, seed: int | None) -> None:
        """Seed slot i with ``seed + i`` at its next reset."""
        if seed is not None:
            self._keep_seeds(seed, torch.ones_like(self.terminated))

    def _keep_seeds(self, seed: int | Sequence[int], mask: torch.Tensor) -> None:
        seeds = slot_seeds(seed, self.slot[mask].tolist())
        self.seeded[mask] = torch.tensor([first_episode(s) for s in seeds], device=self.device)

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
        action = tensordict[keys.ACTION]
        self._check_action(action if self.categorical else action.argmax(-1), mask)
        self.count = self.count + mask.long()
        ended = (self.count >= self.rules.length_of(self.slot, self.episode)) & mask
        terminates = self.rules.terminates(self.episode)
        self.terminated = torch.where(mask, ended & terminates, self.terminated)
        self.truncated = torch.where(mask, ended & ~terminates, self.truncated)
        reward = self.rules.reward(self.slot, self.episode, self.count) * mask
        return self._pack({keys.REWARD: reward.float().unsqueeze(-1)})

    def _mask(self, tensordict: TensorDictBase | None, key: str) -> torch.Tensor:
        """Return the slots that a mask entry marks: bool, of the env's batch size."""
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
            self.wrong_actions += int(wrong.sum())
            if self.raises:
                slot, episode, step, wanted, got = (
                    values[wrong][0].item()
                    for values in (self.slot, self.episode, self.count, expected, action)
                )
                raise AssertionError(
                    f"the action is the one that the state asks for: slot {slot}, episode "
                    f"{episode}, step {step}: expected {wanted}, got {got}"
                )

    def _pack(self, source: dict[str, torch.Tensor]) -> TensorDictBase:
        """Return the current state in new tensors."""
        observation = torch.stack([self.count, self.episode, self.slot], -1).float()
        terminated, truncated = self.terminated.unsqueeze(-1), self.truncated.unsqueeze(-1)
        source[keys.OBSERVATION] = observation
        source[keys.TERMINATED] = terminated.clone()
        source[keys.TRUNCATED] = truncated.clone()
        source[keys.DONE] = terminated | truncated
        return TensorDict(source, batch_size=self.batch_size, device=self.device)
