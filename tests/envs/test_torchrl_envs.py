"""TorchRL's env classes under tdcollect's names: the same data, several slots per process."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torchrl.envs
from tensordict import TensorDict
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, EnvCreator, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs import transforms as T
from torchrl.envs.transforms import StepCounter
from torchrl.testing.mocking_classes import CountingEnv

import tdcollect
from tdcollect.envs import GymEnv, GymnasiumEnv, ParallelEnv
from tdcollect.envs.traits import base_of
from tdcollect.seeding import slot_seed

from ..collect.oracle import assert_same
from ..forkserver import forkserver
from ..zoo import torchrl_envs
from ..zoo.torchrl_envs import MAKERS

ours = partial(ParallelEnv, mp_start_method="fork")
"""Starts workers at once, where spawned ones would import torch."""


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(forkserver().get_start_method(), force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def played(env: EnvBase) -> dict[str, Any]:
    """All that a ``ParallelEnv`` of two slots gives in one life."""
    found: dict[str, Any] = {"specs": env.specs, "before the start": env.is_closed}
    found["next seed"] = env.set_seed(11)
    torch.manual_seed(0)
    found["rollout"] = env.rollout(45, break_when_any_done=False)
    found["second rollout"] = env.rollout(5)
    entries = found["second rollout"][:, -1]["next"].clone()
    marks = torch.tensor([[False], [True]])
    found["reset of one"] = env.reset(entries.exclude("reward").set("_reset", marks))
    bare = TensorDict({"_reset": marks}, [2], device=env.device)
    found["reset of one, bare"] = env.reset(bare)
    found["seeded reset"] = env.reset(list_of_kwargs=[{"seed": 5}, {"seed": 3}])
    found["one seed"] = env.reset(seed=7)
    action = env.rand_action(found["one seed"].clone())
    found["step of one"] = env.step(action.set("_step", torch.tensor([True, False])))
    found["static seed"] = env.set_seed(4, static_seed=True)
    found["static"] = env.rollout(3)
    found["wrapped"] = env.get_wrapper_attr("render_mode")
    found["classes"] = [type(one).__name__ for one in env.unwrapped]
    found["device"], found["batch size"] = env.device, env.batch_size
    torch.manual_seed(1)
    collector = TorchRLCollector(
        TransformedEnv(env, StepCounter(step_count_key="outer")), None, frames_per_batch=40
    )
    found["batch"] = next(iter(collector)).clone()
    found["random state"] = torch.get_rng_state()
    collector.shutdown(close_env=False)
    return found


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_a_parallel_env_shares_processes_and_gives_what_torchrls_gives(made: Any) -> None:
    theirs, env = torchrl.envs.ParallelEnv(2, made), ours(2, made)
    expected = played(theirs)
    theirs.close(raise_if_closed=False)
    assert env.fallback_reason is None
    assert env.inner is None
    got = played(env)
    assert isinstance(base_of(env.inner), GymnasiumEnv)
    assert base_of(env.inner).backend_name == "process"
    check_env_specs(env)
    env.close(raise_if_closed=False)
    assert env.is_closed
    assert env.inner is None
    assert_same(got, expected)


@pytest.mark.slow
def test_atari_to_the_bit() -> None:
    pytest.importorskip("ale_py")
    found = []
    for cls in (torchrl.envs.ParallelEnv, ours):
        env = cls(2, torchrl_envs.breakout)
        env.set_seed(3)
        torch.manual_seed(0)
        found.append(env.rollout(150, break_when_any_done=False))
        env.close()
    assert_same(*found)
    assert found[0]["next", "end-of-life"].any()


# --- what is understood, and what is not


def scaled() -> EnvBase:
    return TransformedEnv(GymEnv("Pendulum-v1"), T.ActionScaling())


def scaled_reward(scale: float) -> EnvBase:
    return TransformedEnv(GymEnv("Pendulum-v1"), T.RewardScaling(0.0, scale))


def normed() -> EnvBase:
    return TransformedEnv(GymEnv("Pendulum-v1"), T.VecNormV2(in_keys=["observation"]))


def counted_noops() -> EnvBase:
    return TransformedEnv(GymEnv("Pendulum-v1"), T.Compose(StepCounter(), T.NoopResetEnv(2)))


@pytest.mark.filterwarnings("ignore")
def test_the_reason_for_torchrls_workers_is_given() -> None:
    for made, reason in (
        (torchrl_envs.unknown, "a Unknown is no GymEnv"),
        (scaled, "the transform ActionScaling is not known"),
        (normed, "the transform VecNormV2 is not known to be the same once for all slots"),
        (counted_noops, "NoopResetEnv and EndOfLifeTransform are not the first"),
        (EnvCreator(normed), "its EnvCreator shares the state"),
        ([partial(scaled_reward, s) for s in (1.0, 2.0)], "its slots have different envs"),
    ):
        assert reason in ours(2, made).fallback_reason
    for options in ({"share_individual_td": True}, {"shared_memory": False, "memmap": True}):
        assert next(iter(options)) in ours(2, torchrl_envs.plain, **options).fallback_reason


def test_what_is_not_understood_is_torchrls() -> None:
    found = []
    for cls in (torchrl.envs.SerialEnv, ParallelEnv):
        env = cls(2, torchrl_envs.unknown)
        env.set_seed(0)
        torch.manual_seed(0)
        found.append(env.rollout(20, break_when_any_done=False))
        if cls is ParallelEnv:
            assert env.inner is None
            assert repr(env) == "ParallelEnv(2 slots, in TorchRL's workers)"
        env.close()
    assert_same(*found)
    env = ParallelEnv(1, torchrl_envs.plain, metadata_from_workers=True, use_buffers=False)
    assert "metadata_from_workers=True" in env.fallback_reason
    assert env.rollout(3).shape[0] == 1
    env.close()


def test_settings_that_differ_between_slots_run_in_torchrls_workers() -> None:
    env = ours(2, torchrl_envs.normed_by_process)
    assert env.fallback_reason is None
    env.reset()
    assert "different settings" in env.fallback_reason
    assert env.inner is None
    env.close()


@pytest.mark.parametrize("count", [1, 2])
def test_serial_for_single(count: int) -> None:
    options = {"serial_for_single": True, "mp_start_method": "fork"}
    made = ParallelEnv(count, create_env_fn=torchrl_envs.plain, **options)
    assert type(made) is (SerialEnv if count == 1 else ParallelEnv)
    assert made.batch_size == (count,)


@pytest.mark.parametrize(
    ("made", "kwargs"),
    [
        ("creator", {"num_threads": 1, "num_sub_threads": 2}),
        ([lambda: GymEnv("CartPole-v1"), torchrl_envs.plain], {"device": "cpu"}),
        (torchrl_envs.plain, {"create_env_kwargs": {"name": "CartPole-v1"}}),
        (torchrl_envs.plain, {"create_env_kwargs": [{}, {"frame_skip": 1}]}),
    ],
    ids=["creator", "list", "kwargs", "kwargs per slot"],
)
@pytest.mark.filterwarnings("ignore:A lambda function")
def test_functions_and_arguments(made: Any, kwargs: dict[str, Any]) -> None:
    made = EnvCreator(lambda: GymEnv("CartPole-v1")) if made == "creator" else made
    env = ParallelEnv(2, made, **{"mp_start_method": "fork", **kwargs})
    options = {key: kwargs.get(key) for key in ("create_env_kwargs", "device")}
    serial = SerialEnv(2, made, **options)
    assert env.fallback_reason is None
    found = []
    for one in (env, serial):
        one.set_seed(1)
        torch.manual_seed(0)
        found.append(one.rollout(12, break_when_any_done=False))
        one.close()
    assert found[0].device == (torch.device("cpu") if "device" in kwargs else None)
    assert_same(*found)


# --- a ParallelEnv of TorchRL's, turned into one of ours


def test_a_parallel_env_of_torchrls_is_turned_in_place() -> None:
    env = torchrl.envs.ParallelEnv(2, torchrl_envs.atari_like, mp_start_method="fork")
    around = TransformedEnv(env, StepCounter(step_count_key="outer"))
    before = torch.get_rng_state()
    assert ParallelEnv.adopt(env) is None
    assert torch.equal(before, torch.get_rng_state())
    assert type(env) is ParallelEnv
    around.set_seed(11)
    torch.manual_seed(0)
    assert around.rollout(9).shape == (2, 9)
    assert env.inner is not None
    around.close()


@pytest.mark.parametrize("why", ["it is a SerialEnv", "its workers have started", "Unknown"])
def test_other_envs_stay_as_they_are(why: str) -> None:
    cls = SerialEnv if "Serial" in why else torchrl.envs.ParallelEnv
    env = cls(1, torchrl_envs.unknown if why == "Unknown" else torchrl_envs.plain)
    if "started" in why:
        env.start()
    assert why in ParallelEnv.adopt(env)
    assert type(env) is cls
    env.close(raise_if_closed=False)


# --- random states


def test_workers_that_are_forked_begin_with_the_random_state_of_their_parent() -> None:
    found = []
    for cls in (torchrl.envs.ParallelEnv, ParallelEnv):
        torch.manual_seed(5)
        env = cls(2, torchrl_envs.draws, mp_start_method="fork")
        found.append(env.reset())
        env.close()
    assert_same(*found)


@pytest.mark.slow
def test_slots_of_spawned_workers_draw_apart() -> None:
    env = ParallelEnv(3, torchrl_envs.draws, mp_start_method="spawn")
    first = env.reset()["observation"]
    assert len(set(first.flatten().tolist())) == 3
    env.close()


# --- errors, and the end


def test_a_closed_view_starts_nothing_and_says_what_torchrl_says() -> None:
    env = ours(2, CountingEnv)
    env.reset()
    view = env[1:]
    view.close()
    before = {*multiprocessing.active_children()}
    for use in (view.reset, view.rand_step, lambda: view.set_seed(0)):
        with pytest.raises(RuntimeError, match="Cannot use a closed indexed batched environment"):
            use()
    assert not {*multiprocessing.active_children()} - before
    assert not env.is_closed
    env.close()


def test_an_error_names_its_slot_and_a_hang_ends_after_torchrls_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchrl._utils, "BATCHED_PIPE_TIMEOUT", 0.2)
    for make, told in (
        (torchrl_envs.fails, r"slot 0.*three"),
        (partial(torchrl_envs.slow, "step"), r"took more than 0\.2 s"),
    ):
        env = ours(1, make)
        with pytest.raises(tdcollect.envs.SlotError, match=told):
            env.rollout(5)
        env.close()


def test_an_env_may_take_its_time_to_close() -> None:
    env = ours(1, partial(torchrl_envs.slow, "close"), shutdown_timeout=0.2)
    env.rollout(1)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 20


def test_options_may_differ_between_slots_and_what_it_cannot_do_is_refused() -> None:
    env = ours(3, torchrl_envs.atari_like)
    options = [{"options": {"lives": lives}, "seed": 0} for lives in (9, 7)] + [{}]
    lives = env.reset(list_of_kwargs=options)["lives"]
    assert (lives <= torch.tensor([9, 7, 3])).all()
    assert (lives >= torch.tensor([3, 1, 0])).all()
    with pytest.raises(ValueError, match="expected one seed per slot, 3, got 1"):
        env.reset(seed=[1])
    with pytest.raises(ValueError, match="list_of_kwargs with one dict per slot, 3, got 1"):
        env.reset(list_of_kwargs=[{}])
    with pytest.raises(TypeError, match=r"reset\(\) takes seed and options"):
        env.reset(list_of_kwargs=[{"lives": 1}] * 3)
    with pytest.raises(NotImplementedError, match="expected a whole ParallelEnv"):
        env[0]
    env.close()


def test_seeds_are_torchrls_chain() -> None:
    env = ours(3, torchrl_envs.plain)
    assert env.seeds is None
    following = env.set_seed(4)
    chain = [4]
    for _ in range(3):
        chain.append(GymEnv("CartPole-v1").set_seed(chain[-1]))
    assert [*env.seeds, following] == chain
    begun = env.reset(seed=env.seeds)["observation"]
    for row, seed in zip(begun, chain[:3], strict=True):
        assert torch.equal(row, GymEnv("CartPole-v1").reset(seed=seed)["observation"])
    env.close()


def test_a_closed_env_starts_again_with_other_arguments_or_where_it_is_unpickled() -> None:
    env = ours(2, torchrl_envs.lifted)
    found = []
    for one in (env, env, pickle.loads(pickle.dumps(env))):
        one.set_seed(0)
        torch.manual_seed(0)
        found.append(one.rollout(5))
        one.close()
        with pytest.raises(RuntimeError, match="closed"):
            one.close()
    assert_same(*found[:2])
    assert_same(*found[1:])
    env = ours(2, torchrl_envs.plain)
    assert env.fallback_reason is None
    env.update_kwargs({"render_mode": "rgb_array"})
    env.reset()
    assert env.get_wrapper_attr("render_mode") == ["rgb_array"] * 2
    env.close()


def test_state_dicts_reach_transforms_that_run_once() -> None:
    env, other = (ours(2, torchrl_envs.lifted) for _ in range(2))
    state = env.state_dict()
    for worker in state.values():
        worker["transforms.0.loc"] = torch.tensor(100.0)
    before = env.reset(seed=3)["observation"]
    env.load_state_dict(state)
    after = env.reset(seed=3)["observation"]
    assert torch.allclose(after, before - 0.5 * 2 + 100.0) or torch.allclose(
        after, before - 0.5 + 100.0
    )
    state["worker1"]["transforms.0.loc"] = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="expected the same transforms in all slots"):
        other.load_state_dict(state)
    env.close()
    other.close()


# --- GymEnv


@pytest.mark.parametrize(
    ("kwargs", "count"),
    [
        ({"device": "cpu"}, 3),
        ({"from_pixels": True, "pixels_only": False, "categorical_action_encoding": True}, 1),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_num_envs_gives_true_final_observations(kwargs: dict[str, Any], count: int) -> None:
    """TorchRL's gives zeros, a row from there to the next episode, and the state as pixels."""
    name = "CartPole-v1"
    env = GymEnv(name, num_envs=count, **kwargs)
    theirs = torchrl.envs.GymEnv(name, num_envs=count, **kwargs)
    for key in ("full_action_spec", "full_reward_spec", "full_done_spec", "batch_size", "device"):
        assert getattr(env, key) == getattr(theirs, key), key
    for key, spec in env.observation_spec.items(True, True) if len(kwargs) < 2 else ():
        assert theirs.observation_spec[key] == spec
    theirs.close()
    env.set_seed(3)
    torch.manual_seed(0)
    rollout = env.rollout(25, break_when_any_done=False)
    for slot, rows in enumerate(rollout.unbind(0)):
        one = torchrl.envs.GymEnv(name, **kwargs)
        row = one.reset(seed=slot_seed(3, slot))
        for expected in rows.unbind(0):
            row = one.step(row.set("action", expected["action"]))
            assert_same(row["next"].clear_device_(), expected["next"].clear_device_())
            row = one.step_mdp(row)
            if row["done"]:
                row = one.reset()
    env.close()


@pytest.mark.usefixtures("quick_children")
def test_num_workers_gives_a_parallel_env_that_has_started_and_closes() -> None:
    assert type(GymEnv("CartPole-v1", num_workers=1)) is GymEnv
    env = GymEnv("CartPole-v1", num_workers=2, frame_skip=2)
    assert type(env) is ParallelEnv
    assert env.batch_size == (2,)
    assert env.fallback_reason is None
    assert not env.is_closed
    env.close()
    assert env.is_closed


class Plain(gym.Env):
    """Without a constructor; each step pays the frames that an action is repeated for."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    frames = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), self.frames, False, False, {}


class Frames(Plain):
    def __init__(self, frameskip: int = 1) -> None:
        self.frames = float(frameskip)


gym.register("tdcollect-tests/Plain-v0", Plain)
gym.register("tdcollect-tests/Frames-v0", Frames, kwargs={"frameskip": 4})


@pytest.mark.parametrize(
    ("name", "kwargs", "ours", "theirs"),
    [
        ("Frames", {}, 4, 1),
        ("Frames", {"frameskip": 3}, 3, 1),
        ("Frames", {"frame_skip": 1}, 1, 1),
        ("Frames", {"frame_skip": 2}, 2, 2),
        ("Plain", {}, 1, None),
        ("Plain", {"frame_skip": 2}, 2, None),
    ],
)
def test_an_id_says_how_often_an_action_is_repeated_unless_frame_skip_does(
    name: str, kwargs: dict[str, Any], ours: float, theirs: float | None
) -> None:
    """TorchRL's plays each frame, and takes no env without a constructor."""
    name = f"tdcollect-tests/{name}-v0"
    env = GymEnv(name, **kwargs)
    assert env.rollout(1)["next", "reward"].item() == ours
    assert next(iter(tdcollect.Collector(env, frames_per_batch=1)))["next", "reward"].item() == ours
    if theirs is None:
        with pytest.raises(TypeError, match="takes no arguments"):
            torchrl.envs.GymEnv(name, **kwargs)
    else:
        assert torchrl.envs.GymEnv(name, **kwargs).rollout(1)["next", "reward"].item() == theirs


def test_torchrls_env_of_several_slots_is_warned_of() -> None:
    env = torchrl.envs.GymEnv("CartPole-v1", num_envs=2)
    with pytest.warns(UserWarning, match="final observations are zeros.*from tdcollect.envs"):
        collector = tdcollect.Collector(env, frames_per_batch=2, total_frames=2)
    assert "final observations are zeros" in str(collector.explain())
    collector.shutdown()
    ours = tdcollect.Collector(
        GymEnv("CartPole-v1", num_envs=2), frames_per_batch=2, total_frames=2
    )
    assert "final" not in str(ours.explain())
    ours.shutdown()
