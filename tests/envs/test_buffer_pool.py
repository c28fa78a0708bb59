"""Buffers of steps are lent again, and only where nobody has a part of them any more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from tdcollect import Collector, make_env
from tdcollect.envs.slots import Stepper
from tdcollect.envs.wrapper import GymnasiumEnv

STEPS = 16


def lent(env: GymnasiumEnv) -> Any:
    return env.allocate(STEPS, again=True)


def place(chunk: Any) -> int:
    """Where the observation of its first step lies."""
    return int(chunk[0].tensors[0].data_ptr())


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "steps": list,
    "the last step": lambda chunk: chunk[-1],
    "an observation": lambda chunk: chunk[3].tensors[0],
    "a flag": lambda chunk: chunk[3].tensors[-1],
    "a view": lambda chunk: chunk[3].tensors[0].view(-1),
    "a detached reward": lambda chunk: chunk[3].tensors[1].detach(),
    "its array": lambda chunk: chunk[3].tensors[1].numpy(),
    "the env's array": lambda chunk: chunk[3].entries[0],
    "rows of it": lambda chunk: chunk[3].entries[0][1:],
    "the env's reward": lambda chunk: torch.from_numpy(chunk[3].raw.reward),
    "its storage": lambda chunk: chunk[3].tensors[0].untyped_storage(),
    "a graph": lambda chunk: (chunk[3].tensors[0] * torch.ones(4, requires_grad=True)).sum(),
    "a mask in a graph": lambda chunk: torch.where(
        chunk[3].tensors[-1], torch.ones(2, 1, requires_grad=True), 0.0
    ),
}


@pytest.mark.parametrize("held", HOLDERS)
def test_buffers_are_lent_again_once_nobody_has_a_part_of_them(held: str) -> None:
    env = make_env("CartPole-v1", 2)
    chunk = lent(env)
    at, holder = place(chunk), HOLDERS[held](chunk)
    assert place(lent(env)) != at  # the chunk is held
    del chunk
    assert place(lent(env)) != at
    del holder
    assert place(lent(env)) == at


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "asked for a gradient": lambda entry: entry.requires_grad_(),
    "written to": lambda entry: entry.add_(1),
    "reshaped in place": lambda entry: entry.unsqueeze_(0),
    "moved to shared memory": lambda entry: entry.share_memory_(),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_buffers_that_somebody_has_changed_are_not_lent_again(changed: str) -> None:
    env = make_env("CartPole-v1", 2)
    chunk = lent(env)
    at = place(chunk)
    CHANGES[changed](chunk[3].tensors[0])
    del chunk
    assert place(lent(env)) != at


def test_what_is_lent_again_is_zero() -> None:
    env = make_env("CartPole-v1", 2)
    chunk = lent(env)
    for array in (*chunk[0].entries, chunk[0].reward, chunk[0].done):
        array[...] = 1
    at = place(chunk)
    del chunk, array
    again = lent(env)
    assert place(again) == at
    assert not any(tensor.any() for step in again for tensor in step.tensors)


def random_batch(env: GymnasiumEnv) -> Any:
    torch.manual_seed(0)
    collector = Collector(env, env.rand_action, frames_per_batch=200, total_frames=-1)
    collector.set_seed(0)
    return collector.rollout()


def by_value(env: GymnasiumEnv) -> Any:
    return pickle.loads(cloudpickle.dumps(env))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_value])
def test_a_copy_of_an_env_has_buffers_of_its_own(copied: Callable[[Any], Any]) -> None:
    env = make_env("CartPole-v1", 2)
    env.stepper.pool.spare += lent(env)
    there, here = random_batch(copied(env)), random_batch(make_env("CartPole-v1", 2))
    assert here["next", "done"].sum() > 4
    assert (there == here).all()


class Keeps(nn.Module):
    """Keeps what it is given, and asks for its gradient if that is wanted."""

    def __init__(self, gradients: bool = False):
        super().__init__()
        self.gradients = gradients
        self.kept: list[torch.Tensor] | None = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.gradients and self.kept is not None:
            with torch.enable_grad():
                assert observation.grad is None
                (observation.requires_grad_() ** 2).sum().backward()
        if self.kept is not None:
            self.kept.append(observation)
        return (observation[..., :1] > 0).long().squeeze(-1)


def collected(policy: Any, steps: int, batches: int) -> tuple[list[Any], int]:
    """Batches, and how often buffers were allocated for the second half of them."""
    env = make_env("CartPole-v1", 3, categorical_action_encoding=True)
    env.set_seed(0)
    collector = Collector(env, policy, frames_per_batch=3 * steps, total_frames=3 * steps * batches)
    for module in policy.modules():
        if isinstance(module, Keeps):
            module.kept = []  # not yet what the collector's making has shown it
    found: list[Any] = []
    calls: list[int] = []
    allocate = Stepper.allocate

    def counted(stepper: Stepper, count: int, *options: bool) -> Any:
        calls.append(count)
        return allocate(stepper, count, *options)

    with pytest.MonkeyPatch.context() as patch:
        for batch in collector:
            found.append(batch)
            if len(found) == batches // 2:
                patch.setattr(Stepper, "allocate", counted)
    return found, len(calls)


@pytest.mark.parametrize("steps", [20, 300])
def test_a_collector_goes_on_in_the_memory_of_earlier_batches(steps: int) -> None:
    torch.manual_seed(0)
    policy = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    act = TensorDictModule(partial(torch.argmax, dim=-1), ["logits"], ["action"])
    _, allocated = collected(TensorDictSequential(policy, act), steps, 20)
    assert allocated < 3  # in ten batches: resets may need one more where an episode is long


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_policy_keeps_does_not_change(gradients: bool) -> None:
    keeps = Keeps(gradients)
    batches, _ = collected(TensorDictModule(keeps, ["observation"], ["action"]), 150, 4)
    assert keeps.kept is not None
    kept = torch.stack([seen.detach() for seen in keeps.kept], 1)
    assert torch.equal(kept, torch.cat([batch["observation"] for batch in batches], 1))


def test_the_latest_rewards_are_given_as_the_envs_gave_them() -> None:
    env = make_env("Pendulum-v1", 2)
    stored = env.rollout(1)["next", "reward"][:, 0]
    assert torch.equal(env.exact_reward(), stored)
    with env.exact_rewards():
        stored = env.rollout(1)["next", "reward"][:, 0]
    assert env.exact_reward().dtype is torch.float64
    assert torch.equal(env.exact_reward().float(), stored)
