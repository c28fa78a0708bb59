"""TorchRL's own envs on arrays: the bits are the parent's, and the env stays the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl import envs as E
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import Binary, Composite
from torchrl.modules import EGreedyModule
from torchrl.testing.mocking_classes import NestedCountingEnv

from tdcollect import Collector, evaluate
from tdcollect.envs import ParallelEnv
from tdcollect.envs.adopted import chain
from tdcollect.keys import FLAGS

from ..evaluation.torchrl_envs import Drift
from ..zoo.torchrl_envs import atari_like
from . import policies, transforms
from .oracle import assert_same_record, batches, check_same, run


def cartpole(**kwargs: Any) -> Any:
    return E.GymEnv("CartPole-v1", max_episode_steps=12, **kwargs)


def cheetah() -> Any:
    return E.GymEnv("HalfCheetah-v5", max_episode_steps=7)


def under(env: Any, *transforms: E.Transform) -> Any:
    return E.TransformedEnv(env, E.Compose(*transforms))


def norm() -> E.Transform:
    return E.ObservationNorm(0.1, 2.0, in_keys=["observation"])


def counted() -> Any:
    return under(cartpole(), norm(), E.StepCounter(9))


def atari_stack() -> list[E.Transform]:
    return [
        E.ToTensorImage(),
        E.GrayScale(),
        E.CatFrames(4, dim=-3),
        E.StepCounter(),
        E.DoubleToFloat(),
        E.VecNorm(in_keys=["pixels"]),
        E.SignTransform(in_keys=["reward"]),
    ]


LEVEL_1: dict[str, Callable[[], Any]] = {
    "gym": cartpole,
    "gym-categorical": lambda: cartpole(device="cpu", categorical_action_encoding=True),
    "gym-frame-skip": lambda: cartpole(frame_skip=3),
    "wrapper": lambda: E.GymWrapper(gym.make("CartPole-v1", max_episode_steps=12)),
    "gym-transforms": lambda: under(
        cheetah(), E.DoubleToFloat(), norm(), E.RewardSum(), E.StepCounter(5)
    ),
    "gym-vecnorm": lambda: under(cheetah(), E.VecNormV2(in_keys=["observation", "reward"])),
    "gym-noops": lambda: under(atari_like(), *atari_stack()),
    "serial": lambda: E.SerialEnv(3, cartpole),
    "serial-one": lambda: E.SerialEnv(1, cartpole, device="cpu"),
    "serial-creators": lambda: E.SerialEnv(2, [E.EnvCreator(cartpole), cartpole]),
    "serial-kwargs": lambda: E.SerialEnv(
        2, cartpole, create_env_kwargs=[{"frame_skip": 1}, {"frame_skip": 2}]
    ),
    "parallel-for-single": lambda: E.ParallelEnv(1, cartpole, serial_for_single=True),
    "serial-outside": lambda: under(E.SerialEnv(3, cartpole), norm(), E.RewardSum()),
    "serial-inside": lambda: E.SerialEnv(3, lambda: under(cartpole(), norm(), E.StepCounter())),
    "serial-inside-outside": lambda: under(
        E.SerialEnv(3, lambda: under(cartpole(), norm(), E.StepCounter(9), E.InitTracker())),
        E.RewardSum(),
        E.VecNorm(in_keys=["observation"]),
    ),
    "serial-inside-names": lambda: under(
        E.SerialEnv(
            3,
            lambda: under(
                cartpole(),
                E.RenameTransform(["observation"], ["seen"], create_copy=True),
                E.SelectTransform("observation", "seen"),
                E.StepCounter(),
            ),
        ),
        E.ExcludeTransform("seen"),
    ),
    "serial-inside-axes": lambda: E.SerialEnv(
        3,
        lambda: under(
            cartpole(),
            E.UnsqueezeTransform(0, in_keys=["observation"], allow_positive_dim=True),
        ),
    ),
    "serial-inside-catframes": lambda: E.SerialEnv(
        3, lambda: under(cartpole(), E.CatFrames(2, dim=-1, in_keys=["observation"]))
    ),
    "serial-inside-vecnorm": lambda: under(
        E.SerialEnv(2, lambda: under(cartpole(), E.VecNorm(in_keys=["observation"]))),
        E.RewardSum(),
    ),
    "serial-inside-steps-alone": lambda: E.SerialEnv(
        2, lambda: under(cartpole(), transforms.OneSided("step"))
    ),
    "serial-inside-resets-alone": lambda: E.SerialEnv(
        2, lambda: under(cartpole(), transforms.OneSided("reset"))
    ),
    "serial-atari": lambda: under(E.SerialEnv(3, atari_like), *atari_stack()),
}


@pytest.mark.parametrize("name", LEVEL_1)
def test_batches_are_the_parents_on_arrays(name: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        if isinstance(collector, Collector):
            assert "as TorchRL does" not in str(collector.explain())
        yield from batches()(collector)

    check_same(LEVEL_1[name], policies.actor, script)


PARALLEL: dict[str, Callable[[Any], Any]] = {
    "plain": lambda kind: kind(3, cartpole),
    "outside": lambda kind: under(
        kind(3, cartpole), norm(), E.RewardSum(), E.VecNorm(in_keys=["observation"])
    ),
    "inside": lambda kind: under(
        kind(2, counted),
        E.VecNormV2(in_keys=["observation"]),
    ),
    "atari": lambda kind: under(kind(2, atari_like), *atari_stack()),
}


@pytest.mark.slow  # the quick run compares tdcollect's ParallelEnv: tests/envs/test_torchrl_envs.py
@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_envs_give_the_parents_batches(name: str) -> None:
    def started() -> Any:
        env = PARALLEL[name](E.ParallelEnv)
        env.start() if isinstance(env, E.ParallelEnv) else env.base_env.start()
        return env

    script = batches(2)
    theirs = run(ParentCollector, started, policies.actor, script)
    for make in (lambda: PARALLEL[name](E.ParallelEnv), lambda: PARALLEL[name](ParallelEnv)):
        assert_same_record(run(Collector, make, policies.actor, script), theirs)


def serial() -> Any:
    return under(E.SerialEnv(3, counted), E.RewardSum(), E.VecNorm(in_keys=["observation"]))


def test_the_env_stays_the_users_between_batches() -> None:
    """Rollouts, seeds, states and new transforms in between mean what they meant."""

    def script(collector: Any) -> Iterator[Any]:
        stream, env = iter(collector), collector.env
        yield next(stream)
        yield env.rollout(5, break_when_any_done=False)
        yield {"state": env.state_dict()["transforms.1._extra_state"]}
        collector.reset()
        yield next(stream)
        yield env.set_seed(11)
        yield env.step(env.rand_action(env.reset()))
        env.transform[1].freeze()
        collector.reset()
        yield next(stream)
        env.transform[1].unfreeze()
        env.append_transform(E.StepCounter(step_count_key="more"))
        collector.reset()
        yield {"observation": next(stream)["observation"]}

    check_same(serial, policies.actor, script)


def test_slots_are_those_of_the_users_env() -> None:
    env = E.SerialEnv(2, cartpole)
    collector = Collector(env, policies.actor(env), frames_per_batch=10)
    batch = next(iter(collector))
    present = [member.unwrapped.state for member in env._envs]
    ended = batch["next", "done"][:, -1, 0]
    for slot, state in enumerate(present):
        if not ended[slot]:
            last = batch["next", "observation"][slot, -1].numpy()
            assert np.array_equal(np.asarray(state, np.float32), last)
    env.close()
    assert env.is_closed


@pytest.mark.parametrize("name", ["gym", "gym-transforms", "serial", "serial-inside"])
def test_each_slot_starts_from_its_seed_in_the_chain(name: str) -> None:
    """A plain gymnasium env, reset with that seed, shows the same."""
    env = LEVEL_1[name]()
    collector = Collector(env, policies.actor(env), frames_per_batch=12)
    assert collector.set_seed(5) == env.set_seed(5)
    collector.set_seed(5)
    frames = collector.collect(frames=12)
    episodes = collector.collect(episodes=2 * env.batch_size.numel(), seed=5)
    seeds = chain(5, env.batch_size.numel())
    assert torch.equal(episodes["observation"][0], frames["observation"].flatten(0, -2)[0])
    if name not in ("gym", "serial"):
        return
    frames = frames if env.batch_size else frames[None]
    for slot, seed in enumerate(seeds):
        plain = gym.make("CartPole-v1").reset(seed=seed)[0]
        shown = frames["observation"][slot, 0]
        assert torch.equal(shown, torch.from_numpy(plain))


class Own(Drift):
    """A user's own env: three slots that walk, an entry without a spec, an end without ``done``."""

    def __init__(self, extra: bool = False, cuts: bool = False):
        super().__init__((3,))
        self.extra, self.cuts = extra, cuts
        flags = {key: Binary(1, shape=(3, 1), dtype=torch.bool) for key in FLAGS}
        self.done_spec = Composite(flags, shape=(3,))

    def _step(self, tensordict: Any) -> TensorDict:
        following = super()._step(tensordict)
        following["terminated"] = following["done"].clone()
        following["truncated"] = torch.full((3, 1), self.cuts and self.steps % 4 == 0)
        return following.set("extra", self.place * 2) if self.extra else following


class Adds(E.Transform):
    """A user's transform, which writes an entry without a spec."""

    def _call(self, next_tensordict: Any) -> Any:
        return next_tensordict.set("more", next_tensordict["observation"] * 3)


OWN: dict[str, Callable[[], Any]] = {
    "own": Own,
    "own-transforms": lambda: under(Own(), E.StepCounter(), E.VecNorm(in_keys=["observation"])),
    "extra": lambda: Own(extra=True),
    "extra-transforms": lambda: under(Own(extra=True), E.StepCounter()),
    "cuts": lambda: Own(cuts=True),
    "cuts-transforms": lambda: under(Own(cuts=True), E.RewardSum()),
    "serial-writes": lambda: E.SerialEnv(3, lambda: under(cartpole(), Adds())),
}


@pytest.mark.parametrize(
    ("name", "buffers"), [*((name, None) for name in OWN), ("extra", False), ("cuts", False)]
)
def test_envs_of_a_users_own_give_the_parents_batches(name: str, buffers: bool | None) -> None:
    check_same(OWN[name], policies.actor, make_options=lambda: {"use_buffers": buffers})


def agents() -> Any:
    """Two slots of three agents, with nested entries of a batch size of their own."""
    return NestedCountingEnv(max_steps=4, nest_done=False, batch_size=[2])


def exploring(env: Any) -> Any:
    """Each agent decides by itself whether it explores."""
    key = ("data", "action")
    still = TensorDictModule(torch.zeros_like, [("data", "states")], [key])
    spec = env.full_action_spec_unbatched
    return TensorDictSequential(still, EGreedyModule(spec, eps_init=0.5, action_key=key))


@pytest.mark.parametrize("summed", [False, True])
def test_agents_keep_their_batch_size_from_batch_to_batch(summed: bool) -> None:
    total = [("data", "reward")], [("data", "total")]
    check_same(lambda: under(agents(), E.RewardSum(*total)) if summed else agents(), exploring)


# -------------------------------------------------------------------------- the start of a space


class Paying(gym.Env):
    """A step pays the action that the env receives."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(3, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), np.sum(list(np.atleast_1d(action))), True, False, {}


class PayingPairs(Paying):
    action_space = gym.spaces.MultiDiscrete([3, 2], start=[2, 3])


def paying() -> Any:
    return under(E.GymWrapper(Paying()), E.NoopResetEnv(1), E.FrameSkipTransform(1))


def paying_alone() -> Any:
    return under(E.GymWrapper(Paying()), E.NoopResetEnv(1))


STARTING: dict[str, Callable[[], Any]] = {
    "adopted": lambda: E.GymWrapper(Paying()),
    "pairs": lambda: E.GymWrapper(PayingPairs()),
    "loop": lambda: E.GymWrapper(Paying()),
    "own-step": lambda: E.GymWrapper(Paying()).set_info_dict_reader(),
    "serial": lambda: E.SerialEnv(2, paying),
    "parallel": lambda: ParallelEnv(2, paying_alone),
}


@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize("name", STARTING)
def test_the_start_of_an_action_space_is_honoured_in_training_and_tests(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchRL hands its env the action 0 for the first one."""
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", name != "loop")
    first = TensorDictModule(
        lambda seen: (
            torch.eye(5 if name == "pairs" else 3, dtype=torch.int64)[0]
            .add(torch.eye(5, dtype=torch.int64)[3] if name == "pairs" else 0)
            .expand(*seen.shape[:-1], -1)
        ),
        ["observation"],
        ["action"],
    )
    env = STARTING[name]()
    collector = Collector(env, first, frames_per_batch=4, total_frames=8)
    assert {5.0} == {*torch.cat([*collector])["next", "reward"].flatten().tolist()}
    result = evaluate(STARTING[name], first, episodes=2, seed=0)
    assert [one.episode_return for one in result.episodes] == [5, 5]
    theirs = E.GymWrapper(Paying())
    taken = theirs.step(theirs.reset().set("action", torch.tensor([1, 0, 0])))
    assert taken["next", "reward"].item() == 0
