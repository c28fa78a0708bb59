"""The private names that tdcollect uses of TorchRL's envs: ``ParallelEnv``, ``GymEnv``..."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import multiprocessing as mp
from torchrl import _utils
from torchrl.envs import (
    EnvCreator,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
    batched_envs,
)
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.libs import gym as gym_library

from tdcollect._upstream import batched_envs as of_batched
from tdcollect._upstream.torchrl import wrapped_env

plain = partial(GymEnv, "CartPole-v1")


def test_metaclasses_deal_with_arguments_that_give_another_env() -> None:
    assert "serial_for_single" in inspect.getsource(of_batched.ParallelEnvMeta.__call__)
    assert "num_workers" in inspect.getsource(of_batched.GymEnvMeta.__call__)
    assert type(GymEnv) is of_batched.GymEnvMeta


@pytest.mark.parametrize("name", of_batched.READING_METHODS)
def test_a_gym_wrapper_has_the_reading_methods(name: str) -> None:
    assert callable(getattr(GymWrapper, name))


def test_fast_encoding_replaces_a_reading_method() -> None:
    env = plain()
    env.fast_encoding()
    assert set(vars(env)).intersection(of_batched.READING_METHODS) == {"read_obs", "read_reward"}


def test_transient_attributes_are_set_when_the_env_runs() -> None:
    counter = StepCounter()
    before = {name: vars(counter).get(name) for name in of_batched.TRANSIENT_ATTRIBUTES}
    env = TransformedEnv(plain(), counter)
    env.rollout(2)
    after = {name: vars(counter).get(name) for name in of_batched.TRANSIENT_ATTRIBUTES}
    assert before != after


def test_envs_are_stepped_and_reset_within_others() -> None:
    env = plain()
    begun = of_batched.reset_inside(env, None, seed=3)
    assert torch.equal(begun["observation"], plain().reset(seed=3)["observation"])
    following = of_batched.step_inside(env, env.rand_action(env.reset()))
    assert {"observation", "reward", "done"} <= set(following.keys())
    assert "next" not in following


def test_settings_of_a_parallel_env() -> None:
    env = ParallelEnv(2, plain)
    assert of_batched.start_method(env) in mp.get_all_start_methods()
    assert of_batched.start_method(ParallelEnv(2, plain, mp_start_method="fork")) == "fork"
    assert of_batched.seeds_torch(env)
    assert of_batched.uses_buffers(env)
    assert not of_batched.uses_buffers(ParallelEnv(2, plain, use_buffers=False))
    assert not of_batched.seeds_torch(ParallelEnv(2, plain, use_buffers=False))
    assert not of_batched.has_metadata_from_workers(env)
    assert of_batched.shares_memory(env)
    assert not of_batched.shares_memory(ParallelEnv(2, plain, shared_memory=False))
    assert not of_batched.is_view(env)
    assert of_batched.chain_of_seeds(env) is None


def test_only_workers_with_buffers_seed_torch() -> None:
    run = {
        name: getattr(batched_envs, f"_run_worker_pipe_{name}") for name in ("shared_mem", "direct")
    }
    seeding = {
        name: "\n            torch.manual_seed" in inspect.getsource(f) for name, f in run.items()
    }
    assert seeding == {"shared_mem": True, "direct": False}


def test_threads_are_limited_as_torchrl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    of_batched.limit_threads(ParallelEnv(3, plain))
    of_batched.limit_threads(ParallelEnv(3, plain, num_threads=2))
    of_batched.limit_threads(ParallelEnv(3, plain, num_threads=8))
    assert given == [5, 2]
    assert "torch.get_num_threads() - self.num_workers" in inspect.getsource(
        ParallelEnv._start_workers
    )


def test_the_timeout_of_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_batched.pipe_timeout() is None
    assert '"BATCHED_PIPE_TIMEOUT", "10000.0"' in inspect.getsource(_utils)
    monkeypatch.setattr(_utils, "BATCHED_PIPE_TIMEOUT", 5.0)
    assert of_batched.pipe_timeout() == 5.0


class Answers:
    """Notes the commands that it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def recv(self) -> Any:
        name, _ = self.sent[-1]
        return ("seeded", 7) if name == "seed" else (name, OrderedDict())


def test_commands_go_over_the_channels_that_are_set() -> None:
    env, channels = ParallelEnv(2, plain), [Answers(), Answers()]
    of_batched.set_channels(env, channels)
    env.is_closed = False
    assert env.set_seed(3) == 7
    assert of_batched.chain_of_seeds(env) == [3, 7]
    assert list(env.state_dict()) == ["worker0", "worker1"]
    env.load_state_dict({})
    env.get_wrapper_attr("spec")
    names = [name for name, _ in channels[0].sent]
    assert names == ["seed", "state_dict", "load_state_dict", "get_wrapper_attr"]
    of_batched.drop_channels(env)
    env.is_closed = True
    assert not {"parent_channels", "_workers", "_events"} & set(vars(env))


def test_a_method_of_the_env_stands_for_it_by_a_word() -> None:
    assert of_batched.stands_for_env("_self")
    assert not of_batched.stands_for_env("self")
    assert '"_self"' in inspect.getsource(batched_envs._dispatch_caller_parallel.__call__)


@pytest.mark.parametrize("shared", [True, False])
def test_creators_share_statistics(shared: bool) -> None:
    transform = partial(VecNormV2, ["observation"]) if shared else RewardSum
    creator = EnvCreator(lambda: TransformedEnv(plain(), transform()))
    assert of_batched.shared_values(creator) is shared


def test_locks_are_left_out_of_state_dicts() -> None:
    state = OrderedDict(a=1, inner=OrderedDict(lock=mp.Lock()))
    assert of_batched.without_locks(state) == OrderedDict(a=1, inner=OrderedDict(lock=None))


def test_settings_of_a_gym_wrapper() -> None:
    env = plain()
    assert of_batched.converts_actions(env)
    assert not of_batched.converts_actions(plain(convert_actions_to_numpy=False))
    assert not of_batched.is_categorical(env)
    assert of_batched.is_categorical(plain(categorical_action_encoding=True))
    assert not of_batched.is_vectorised(env)
    vector = gym.make_vec(
        "CartPole-v1",
        2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.DISABLED},
    )
    assert of_batched.is_vectorised(GymWrapper(vector))


def test_another_env_inside_a_gym_wrapper_is_stepped() -> None:
    env, other = plain(), gym.make("CartPole-v1")
    of_batched.set_wrapped_env(env, other)
    assert wrapped_env(env) is other
    begun = env.reset(seed=4)
    assert begun["observation"].tolist() == other.unwrapped.state.astype("float32").tolist()


def test_a_view_does_not_own_its_workers() -> None:
    view = object.__new__(ParallelEnv)
    view.__dict__["_owns_workers"] = False
    assert of_batched.is_view(view)
    assert "view._owns_workers = False" in inspect.getsource(BatchedEnvBase)


def test_frames_that_a_gym_env_skips_itself() -> None:
    """The slots of a ParallelEnv repeat actions as often as ``wrapper_frame_skip`` says."""
    assert plain(frame_skip=3).wrapper_frame_skip == 3
    assert "range(self.wrapper_frame_skip)" in inspect.getsource(gym_library.GymLikeEnv._step)
