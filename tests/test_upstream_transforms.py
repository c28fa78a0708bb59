"""The private names that tdcollect uses of TorchRL's transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl import envs as E

from tdcollect._upstream import torchrl as of_torchrl
from tdcollect._upstream import transforms as of_transforms
from tdcollect.collect.step_dict import StepDict

UPSTREAM = "ignore:::(torchrl|tensordict|torch|gymnasium)"
pytestmark = pytest.mark.filterwarnings(UPSTREAM)


def env_with(transform: E.Transform) -> E.EnvBase:
    env = E.TransformedEnv(E.GymEnv("Pendulum-v1"), transform)
    env.set_seed(0)
    return env


def test_vec_norm_sums_are_those_that_a_step_updates() -> None:
    norm = E.VecNorm(["observation"], decay=0.5)
    sums = of_transforms.VecNormSums(norm)
    assert sums.kept is None
    assert sums.of("observation") is None
    sums.begin("observation", TensorDict(observation=torch.ones(3)))
    found = sums.of("observation")
    assert found is not None
    assert [value.tolist() for value in found] == [[0.0] * 3, [0.0] * 3, [0.0]]
    env_with(norm).reset()
    total, squares, count = found
    assert sums.kept is not None
    assert torch.equal(norm.loc["observation"], total / count)
    assert torch.equal(squares, total**2)
    assert count.item() == 1


def test_vec_norm_sums_of_nested_entries() -> None:
    norm = E.VecNorm([("a", "b")])
    sums = of_transforms.VecNormSums(norm)
    sums.begin(("a", "b"), TensorDict({("a", "b"): torch.ones(3)}))
    assert sums.of(("a", "b")) is not None


def test_vec_norm_v2_statistics_are_those_that_a_step_updates() -> None:
    norm = E.VecNormV2(["observation"], decay=1.0)
    statistics = of_transforms.VecNormV2Statistics(norm)
    assert not statistics.on_cpu(["observation"])
    env = env_with(norm)
    assert statistics.on_cpu(["observation"])
    assert not statistics.on_cpu(["observation", "other"])
    loc, var, count = statistics.of("observation")
    assert (loc.shape, var.shape, count.item()) == ((3,), (3,), 0)
    env.reset()
    assert count.item() == 1
    assert torch.equal(norm.loc["observation"], loc)
    assert torch.equal(var, loc**2)


def test_casts_integers_once_a_spec_has_them() -> None:
    norm = E.VecNormV2(["observation"])
    assert not of_transforms.casts_integers(norm)
    assert E.TransformedEnv(E.GymEnv("FrozenLake-v1"), norm).observation_spec
    assert of_transforms.casts_integers(norm)


@pytest.mark.parametrize("key", ["observation", ("inner", "part")])
def test_restart_stacks_fills_the_buffer_of_that_name(key: Any) -> None:
    frames = E.CatFrames(2, -1, [key])
    entries = StepDict({key: torch.arange(2.0)[:, None]})
    of_transforms.restart_stacks(frames, entries, torch.tensor([True, True]))
    assert entries[key].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    entries[key] = torch.ones(2, 1) * 5
    of_transforms.restart_stacks(frames, entries, torch.tensor([False, True]))
    assert entries[key].tolist() == [[0.0, 0.0], [5.0, 5.0]]
    name = of_transforms.stack_buffer_name(key)
    assert torch.equal(dict(frames.named_buffers())[name], entries[key])


class Steps(E.Transform):
    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        return next_tensordict


class Scaled(E.ObservationNorm):
    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return obs


class Hooked(E.Transform):
    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        return tensordict, tensordict_


class Prepares(E.Transform):
    def _reset_env_preprocess(self, tensordict: Any) -> Any:
        return tensordict


def test_what_a_transform_overrides() -> None:
    clip = E.ClipTransform(in_keys_inv=["action"], low=0.0)
    assert of_torchrl.inverts(clip)
    assert of_torchrl.inverts(E.ExcludeTransform("a", inverse=True))
    assert not of_torchrl.inverts(Steps())
    assert of_torchrl.reads_step(Steps())
    assert not of_torchrl.reads_step(clip)
    assert of_torchrl.changes_loop(Hooked())
    assert not of_torchrl.changes_loop(clip)
    assert of_torchrl.preparation_of(Prepares()) is not None
    assert of_torchrl.preparation_of(clip) is None
    norm = E.ObservationNorm
    assert of_torchrl.only_applies(Scaled(0.0, 1.0, in_keys=["a"]), [norm])
    assert not of_torchrl.only_applies(Steps(), [norm])


def test_step_of_and_reset_of_are_what_an_env_calls() -> None:
    transform = E.StepCounter()
    env = env_with(transform)
    begun = of_torchrl.reset_of(transform)(TensorDict(), env.base_env.reset())
    assert begun["step_count"].item() == 0
    following = of_torchrl.step_of(transform)(begun, begun.clone())
    assert following["step_count"].item() == 1


def test_replaced_calls_are_those_on_the_object() -> None:
    norm: Any = E.ObservationNorm(0.0, 1.0, in_keys=["observation"])
    assert of_transforms.replaced_calls(norm) == []
    norm._apply_transform = lambda value: value
    assert of_transforms.replaced_calls(norm) == ["_apply_transform"]


def test_skipped_step_repeats_the_step_that_is_skipped() -> None:
    env = env_with(E.StepCounter())
    given = env.reset().set("action", torch.zeros(1))
    following = of_transforms.skipped_step(env, given)
    assert torch.equal(following["observation"], given["observation"])
    assert following["reward"].item() == 0


def test_lives_are_read_off_the_env() -> None:
    transform = E.EndOfLifeTransform(eol_attribute="unwrapped.lives")
    env = env_with(E.RewardSum()).append_transform(transform)
    env.base_env._env.unwrapped.lives = lambda: 3
    assert of_transforms.lives_of(transform) == 3
