"""Transforms that run on arrays: each gives what it gives under TorchRL, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl import envs as E
from torchrl.data import Unbounded
from torchrl.envs.transforms import _timer as timer

from tdcollect import Collector, make_env
from tdcollect.collect.lowering import LOWERED, exact_reward_of
from tdcollect.envs.traits import TRAITS, of_kind

from . import policies, transforms
from .envs import ENVS
from .oracle import UPSTREAM, check_same
from .transforms import primer

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

OBS = "observation"
MASK = spaces.Box(0, 1, (3,), np.int8)


def rnd() -> E.Transform:
    torch.manual_seed(4)
    nets = {"target_network": nn.Linear(3, 2), "predictor_network": nn.Linear(3, 2)}
    return E.transforms.RNDTransform(**nets, in_keys=[OBS])


def sums(*more: E.Transform) -> E.Transform:
    return E.Compose(E.RewardSum(), *more, E.StepCounter())


def twin() -> E.Transform:
    return E.RenameTransform([OBS], ["twin"], create_copy=True)


KNOWN: dict[str, tuple[str, Callable[[], E.Transform]]] = {
    "rename": ("toy", lambda: E.RenameTransform([OBS], ["state"])),
    "rename-nested": (
        "toy-nested",
        lambda: E.RenameTransform(["position", ("inner", "grid")], [("inner", "p"), "grid"]),
    ),
    "rename-copy": ("toy", lambda: E.RenameTransform([OBS], [("a", "b")], create_copy=True)),
    "rename-reward": ("toy", lambda: E.RenameTransform(["reward"], [("money", "now")])),
    "rename-action": ("toy", lambda: E.RenameTransform([OBS], ["state"], ["action"], ["deed"])),
    "rename-sum": ("toy", lambda: sums(E.RenameTransform(["episode_reward"], ["return"]))),
    "rename-sum-copy": (
        "toy",
        lambda: sums(
            E.RenameTransform(["episode_reward"], ["copy"], create_copy=True),
            E.ObservationNorm(0.0, 2.0, in_keys=["copy"]),
        ),
    ),
    "rename-then-norm": (
        "toy",
        lambda: E.Compose(
            E.RenameTransform([OBS], ["state"]), E.ObservationNorm(0.5, 2.0, in_keys=["state"])
        ),
    ),
    "exclude": ("toy-nested", lambda: E.ExcludeTransform(("inner", "grid"))),
    "exclude-sum": ("toy", lambda: sums(E.ExcludeTransform("observation"))),
    "select": ("toy-nested", lambda: E.SelectTransform("position")),
    "select-nested": ("toy-nested", lambda: E.SelectTransform("position", ("inner", "flag"))),
    "device": ("toy", lambda: E.DeviceCastTransform("cpu")),
    "device-keys": ("toy", lambda: E.DeviceCastTransform("cpu", in_keys=[OBS])),
    "device-of-env": ("cartpole-device", lambda: E.DeviceCastTransform("cpu", "cpu")),
    "empty-specs": ("toy-nested", E.RemoveEmptySpecs),
    "finite": ("toy", E.FiniteTensorDictCheck),
    "frame-skip": ("pendulum", lambda: E.FrameSkipTransform(3)),
    "frame-skip-one": ("toy", lambda: E.FrameSkipTransform(1)),
    "frame-skip-unbatched": ("pendulum-unbatched", lambda: E.FrameSkipTransform(2)),
    "frame-skip-in-the-middle": (
        "pendulum",
        lambda: E.Compose(
            E.ActionScaling(), E.CatFrames(2, -1, [OBS]), E.FrameSkipTransform(2), E.RewardSum()
        ),
    ),
    "frame-skip-over-sum": (
        "pendulum",
        lambda: E.Compose(transforms.books(), E.FrameSkipTransform(3), E.FrameSkipTransform(2)),
    ),
    "frame-skip-gym": ("torchrl-gym-pendulum", lambda: E.FrameSkipTransform(2)),
    "frame-skip-over-norm": (
        "pendulum",
        lambda: E.Compose(E.VecNormV2([OBS], reduce_batch_dims=True), E.FrameSkipTransform(2)),
    ),
    "max-pool": ("toy", lambda: E.TimeMaxPool([OBS], T=3)),
    "max-pool-named": ("toy-nested", lambda: E.TimeMaxPool(["position"], [("inner", "m")], T=2)),
    "max-pool-unbatched": ("toy-unbatched", lambda: E.TimeMaxPool([OBS], T=2)),
    "random-truncation": (
        "cartpole",
        lambda: E.Compose(E.StepCounter(), E.RandomTruncationTransform(2, 6)),
    ),
    "random-truncation-seldom": (
        "pendulum",
        lambda: E.Compose(
            E.StepCounter(),
            E.RandomTruncationTransform(2, 6, prob=0.5, first_episode_prob=0.2),
            E.InitTracker(),
        ),
    ),
    "random-truncation-never": (
        "pendulum",
        lambda: E.Compose(
            E.StepCounter(), E.RandomTruncationTransform(2, 6, prob=0.0, first_episode_prob=0.0)
        ),
    ),
    "target-return": ("pendulum", lambda: E.TargetReturn(10.0)),
    "target-return-constant": ("toy", lambda: E.TargetReturn(10.0, mode="constant")),
    "target-return-unbatched": ("toy-unbatched", lambda: E.TargetReturn(10.0)),
    "discretized": ("pendulum", lambda: E.ActionDiscretizer(num_intervals=5)),
    "discretized-compose": (
        "pendulum",
        lambda: E.Compose(E.ActionDiscretizer(5, out_action_key="choice"), E.RewardSum()),
    ),
    "discretized-named": ("pendulum", lambda: E.ActionDiscretizer(5, out_action_key="choice")),
    "discretized-random": (
        "pendulum",
        lambda: E.ActionDiscretizer(5, sampling=E.ActionDiscretizer.SamplingStrategy.RANDOM),
    ),
    "discretized-one-hot": (
        "pendulum-unbatched",
        lambda: E.ActionDiscretizer(torch.tensor([5]), categorical=False),
    ),
    "rnd": ("toy", rnd),
    "rnd-unbatched": ("toy-unbatched", rnd),
    "rnd-then-sum": ("toy", lambda: E.Compose(rnd(), E.RewardSum(in_keys=["reward"]))),
    "trajectories": ("toy", E.TrajCounter),
    "trajectories-named": ("toy-unbatched", lambda: E.TrajCounter(out_key="episode")),
    "clip": ("toy", lambda: E.ClipTransform([OBS], low=-0.5, high=0.5)),
    "noise": ("cartpole", lambda: E.gSDENoise(shape=(3, 2, 4), state_dim=4, action_dim=2)),
    "primer-random": ("cartpole", lambda: primer(True)),
    "primer-function": (
        "toy-unbatched",
        lambda: E.TensorDictPrimer(
            memory=Unbounded((2,)), default_value={"memory": lambda: torch.rand(2)}
        ),
    ),
    "unary": ("toy", lambda: E.UnaryTransform([OBS], ["cube"], fn=lambda value: value**3)),
    "stack": ("toy", lambda: E.Compose(twin(), E.Stack([OBS, "twin"], "pair", dim=-1))),
    "stack-kept": (
        "toy",
        lambda: E.Compose(twin(), E.Stack([OBS, "twin"], "pair", dim=-1, del_keys=False)),
    ),
    "linearised": ("toy", lambda: E.LineariseRewards(["reward"])),
    "linearised-weights": ("toy", lambda: E.LineariseRewards(["reward"], weights=[0.5])),
    "flat-action": ("pendulum", lambda: E.FlattenAction(-1, -1)),
    "projected": ("toy", lambda: E.DiscreteActionProjection(2, 5)),
}


# Their envs have two actions, or none that an actor can make.
DRAWN = ("rename-action", "discretized-compose", "discretized-named", "discretized-one-hot")


@pytest.mark.parametrize("case", KNOWN)
def test_a_known_transform_is_torchrls_to_the_bit(case: str) -> None:
    env, transform = KNOWN[case]
    policy = policies.random_policy if case in DRAWN else policies.actor
    check_same(lambda: E.TransformedEnv(ENVS[env](), transform()), policy)


@pytest.mark.parametrize("case", KNOWN)
def test_a_known_transform_needs_no_tensordict(case: str) -> None:
    env, transform = KNOWN[case]
    # It writes to the step itself where it is alone.
    single = E.Compose if case == "discretized-named" else lambda transform: transform
    made = E.TransformedEnv(ENVS[env](), single(transform()))
    collector = Collector(made, policies.actor(made), frames_per_batch=made.batch_size.numel())
    plan = collector._runner.plan(iterating=True)
    assert plan.env is not None, plan.reasons
    assert {part.how for part in plan.env.parts} == {"on arrays"}


class Masked(gym.Env[Any, Any]):
    """Its observation has a mask of the actions that may be taken."""

    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": MASK})
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 6))
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._observation(), float(action), self.left == 0, False, {}

    def _observation(self) -> Any:
        self.mask = self.np_random.permutation(np.array([0, 1, 1], np.int8))
        x = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"x": x, "action_mask": self.mask}


def masked(batched: bool) -> E.EnvBase:
    env = make_env(Masked, 3 if batched else None)
    to_bool = E.DTypeCastTransform(torch.int8, torch.bool, in_keys=["action_mask"])
    return E.TransformedEnv(env, E.Compose(to_bool, E.ActionMask()))


@pytest.mark.filterwarnings("ignore:random actions ignore the env's action masks")
@pytest.mark.parametrize("batched", [True, False])
def test_masks_of_actions_reach_the_action_spec(batched: bool) -> None:
    check_same(lambda: masked(batched), policies.random_policy)


def test_the_timer_is_asked_as_often_as_by_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> E.EnvBase:
        ticks = itertools.count()
        monkeypatch.setattr(timer, "time", SimpleNamespace(time=lambda: float(next(ticks))))
        return E.TransformedEnv(ENVS["toy"](), E.Compose(timer.Timer(), E.RewardSum()))

    check_same(make, policies.random_policy)


def test_a_finite_check_names_what_is_not() -> None:
    env = E.TransformedEnv(
        ENVS["toy"](),
        E.Compose(
            E.UnaryTransform([OBS], [OBS], fn=lambda value: value / 0), E.FiniteTensorDictCheck()
        ),
    )
    with pytest.raises(ValueError, match="non-finite"):
        next(iter(Collector(env, None, frames_per_batch=9)))


def test_a_rename_names_the_entry_that_is_missing() -> None:
    env = E.TransformedEnv(ENVS["toy"](), E.RenameTransform(["nothing"], ["something"]))
    with pytest.raises(KeyError, match="expected an entry 'nothing' for RenameTransform"):
        next(iter(Collector(env, None, frames_per_batch=9)))


@pytest.mark.parametrize(
    ("transform", "exact"),
    [
        (lambda: E.RenameTransform([OBS], ["state"]), True),
        (lambda: E.RenameTransform([OBS], ["reward2"], create_copy=True), True),
        (lambda: E.RenameTransform(["reward"], ["gain"], create_copy=True), False),
        (lambda: E.ExcludeTransform(OBS), True),
        (lambda: E.TrajCounter(), True),
        (lambda: E.LineariseRewards(["reward"], weights=[0.3]), False),
        (lambda: E.FrameSkipTransform(2), False),
    ],
)
def test_rewards_are_exact_where_a_transform_leaves_them_alone(transform: Any, exact: bool) -> None:
    env = E.TransformedEnv(ENVS["toy"](), transform())
    assert (exact_reward_of(env) is not None) is exact


def test_what_is_written_out_is_in_the_table_and_the_rest_runs_by_its_own_code() -> None:
    own_code = set(of_kind("own_code"))
    assert not own_code & set(LOWERED)
    assert set(TRAITS) - own_code - set(LOWERED) == {E.transforms.Reward2GoTransform}
    assert set(LOWERED) <= set(TRAITS)
