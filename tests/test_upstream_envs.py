"""The private names that tdcollect uses of TorchRL's envs and transforms."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torchrl import envs as E
from torchrl.testing.mocking_classes import CountingEnv

from tdcollect._upstream import torchrl as of_torchrl


def cartpole(**kwargs: Any) -> Any:
    return E.GymEnv("CartPole-v1", **kwargs)


class Plain(E.Transform):
    """Changes nothing."""


class Own(E.Transform):
    """Has all methods of its own."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        return next_tensordict.set("stepped", tensordict["action"])

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset.set("marks", tensordict["_reset"])

    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict

    def _reset_env_preprocess(self, tensordict: Any) -> Any:
        return tensordict

    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        return tensordict, tensordict_


def test_step_of_and_reset_of_are_what_an_env_calls() -> None:
    one, marks = TensorDict({"action": torch.ones(1)}), TensorDict({"_reset": torch.ones(1)})
    assert "stepped" in of_torchrl.step_of(Own())(one, TensorDict())
    assert "marks" in of_torchrl.reset_of(Own())(marks, TensorDict())


def test_own_methods_of_a_transform_are_found() -> None:
    plain, own = Plain(), Own()
    for tell in (of_torchrl.inverts, of_torchrl.reads_step, of_torchrl.changes_loop):
        assert tell(own)
        assert not tell(plain)
    assert of_torchrl.inverts(E.DoubleToFloat(in_keys_inv=["action"]))
    assert of_torchrl.preparation_of(own) is not None
    assert of_torchrl.preparation_of(plain) is None
    assert of_torchrl.does_nothing_in_steps(plain)
    assert of_torchrl.does_nothing_in_steps(E.NoopResetEnv(3))
    assert not of_torchrl.does_nothing_in_steps(own)


def test_only_applies_to_classes_that_map_tensors() -> None:
    class Mapped(E.ObservationNorm):
        def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
            return obs

    class Called(E.ObservationNorm):
        def _call(self, next_tensordict: Any) -> Any:
            return next_tensordict

    known = [E.ObservationNorm]
    assert of_torchrl.only_applies(Mapped(0.0, 1.0, in_keys=["observation"]), known)
    assert not of_torchrl.only_applies(Called(0.0, 1.0, in_keys=["observation"]), known)
    assert not of_torchrl.only_applies(E.StepCounter(), known)


def test_settings_of_a_transform_leave_its_env_out() -> None:
    counter = E.StepCounter(5)
    E.TransformedEnv(cartpole(), counter)
    settings = of_torchrl.settings_of(counter)
    assert settings["max_steps"] == 5
    assert not any(isinstance(value, E.EnvBase) for value in settings.values())


def test_methods_of_an_envs_class() -> None:
    env = CountingEnv()
    assert of_torchrl.env_step_of(env) == env._step
    assert of_torchrl.env_reset_of(env) == env._reset
    entries = TensorDict({"terminated": torch.ones(1, dtype=torch.bool)})
    gym_env = cartpole()
    of_torchrl.complete_done(gym_env, entries)
    assert bool(entries["done"])
    assert of_torchrl.arguments_of_resets(gym_env) == {}
    assert of_torchrl.arguments_of_resets(E.PendulumEnv()) == {"set_state": False}


def test_steps_alone_is_false_for_an_env_with_a_loop_of_its_own() -> None:
    class Looping(CountingEnv):
        def step_and_maybe_reset(self, tensordict: Any) -> Any:
            return super().step_and_maybe_reset(tensordict)

    assert of_torchrl.steps_alone(CountingEnv())
    assert not of_torchrl.steps_alone(Looping())
    assert not of_torchrl.steps_alone(E.ParallelEnv(2, cartpole))


def test_replaced_methods_are_those_on_the_object() -> None:
    env = cartpole()
    assert of_torchrl.replaced_methods(env) == []
    env.read_obs = env.read_obs
    assert of_torchrl.replaced_methods(env) == ["read_obs"]
    fast = cartpole()
    fast.fast_encoding()
    assert "read_obs" in of_torchrl.replaced_methods(fast)


@pytest.mark.parametrize("flag", [False, True])
def test_options_of_a_gym_wrapper(flag: bool) -> None:
    env = cartpole(categorical_action_encoding=flag, convert_actions_to_numpy=flag)
    assert of_torchrl.encodes_integers(env) is flag
    assert of_torchrl.converts_actions(env) is flag


def test_envs_of_a_serial_env_and_what_its_resets_show() -> None:
    env = E.SerialEnv(2, cartpole)
    assert of_torchrl.serial_envs(env) is None
    begun = env.reset()
    found = of_torchrl.serial_envs(env)
    assert found is not None
    assert all(isinstance(member, E.GymEnv) for member in found)
    shown = of_torchrl.shown_by_resets(env)
    assert shown is not None
    assert torch.equal(shown["observation"], begun["observation"])
    partly = TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])
    env.step(env.rand_action(begun))
    again = env._reset(partly)  # what slots that go on show meanwhile
    assert torch.equal(again["observation"][1], begun["observation"][1])
    assert of_torchrl.shown_by_resets(E.SerialEnv(2, cartpole, use_buffers=False)) is None


def test_next_seed_is_the_chain_of_batched_envs() -> None:
    env = E.SerialEnv(2, cartpole)
    begun = env.reset(
        list_of_kwargs=[{"seed": 3}, {"seed": of_torchrl.next_seed(3)}],
    )
    env.set_seed(3)
    first, second = (
        gym.make("CartPole-v1").reset(seed=seed)[0] for seed in (3, of_torchrl.next_seed(3))
    )
    assert begun["observation"][0].tolist() == first.tolist()
    assert begun["observation"][1].tolist() == second.tolist()
    assert env.set_seed(3) == of_torchrl.next_seed(of_torchrl.next_seed(3))


def test_a_function_is_applied_for_a_batch_size_that_is_not_its_results() -> None:
    rows = TensorDict({"a": torch.arange(3.0), "b": {"c": torch.arange(6).view(3, 2)}}, [3])
    nest = lambda values: torch.nested.as_nested_tensor(list(values.split([1, 2])))  # noqa: E731
    found = of_torchrl.apply_unchecked(rows, nest, [2, -1])
    assert found.batch_size == torch.Size([2, -1])
    assert [part.tolist() for part in found["a"].unbind()] == [[0.0], [1.0, 2.0]]
    assert [len(part) for part in found["b", "c"].unbind()] == [1, 2]
