"""collector.explain(): which parts run on arrays, and why the others do not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    GymEnv,
    NextObservationDelta,
    ObservationNorm,
    PendulumEnv,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)

import tdcollect

from . import policies
from .envs import cartpole


def actor() -> Any:
    return policies.actor(cartpole())


def explain(env: Any, policy: Any = None, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        collector = tdcollect.Collector(env, policy, frames_per_batch=9, **kwargs)
    return collector.explain()


def how(explanation: Any, name: str) -> list[str]:
    return [part.how for part in explanation if part.name == name]


def test_an_actor_and_known_transforms_on_a_gymnasium_env_run_on_arrays_throughout() -> None:
    norm = ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"])
    env = TransformedEnv(cartpole(), Compose(norm, RewardSum(), StepCounter(max_steps=9)))
    explanation = explain(env, actor())
    assert how(explanation, "env") == ["steps on arrays"]
    assert how(explanation, "transform") == ["on arrays"] * 3
    assert how(explanation, "policy") == [
        "called straight",
        "computed straight, checked once per batch",
    ]
    assert how(explanation, "batch") == ["no copy"]
    lines = str(explain(cartpole(), actor())).splitlines()
    assert [line.split()[0] for line in lines] == ["env", "policy", "policy", "batch"]


class OwnStep(GymEnv):
    def step(self, tensordict: Any) -> Any:
        return super().step(tensordict)


def test_an_env_with_a_step_of_its_own_is_left_to_torchrl_under_transforms_too() -> None:
    env = TransformedEnv(OwnStep("CartPole-v1"), StepCounter())
    (part,) = how(explain(env), "env")
    assert part.endswith("steps in a way of its own")


class Unknown(Transform):
    def _call(self, next_tensordict: Any) -> Any:
        return next_tensordict


def test_an_unknown_transform_or_env_is_the_only_obstacle() -> None:
    explanation = explain(PendulumEnv())
    assert [part.what for part in explanation.obstacles] == ["PendulumEnv"]
    assert "steps by its own code, on TensorDicts" in how(explanation, "env")[0]
    explanation = explain(TransformedEnv(cartpole(), Compose(RewardSum(), Unknown())), actor())
    (part,) = explanation.obstacles
    assert part.what == "Unknown"
    assert "on a TensorDict of its own: it is not known to run on arrays" in part.how


def test_all_obstacles_are_named() -> None:
    env = TransformedEnv(cartpole(), NextObservationDelta())
    env.step_and_maybe_reset = env.step_and_maybe_reset
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=1), batch_size=4)
    text = str(explain(env, replay_buffer=buffer, extend_buffer=False))
    for reason in ("extend_buffer", "step_and_maybe_reset of its own", "the env's own loop"):
        assert reason in text


def test_what_is_not_known_costs_no_neighbour() -> None:
    policy = actor()
    policy.module[0].register_forward_hook(lambda *_: None)
    assert how(explain(cartpole(), policy), "policy") == [
        "on a TensorDict: has hooks",
        "computed straight, checked once per batch",
    ]

    class Own(TensorDictModule):
        def forward(self, tensordict: Any) -> Any:
            return tensordict.set("hidden", tensordict["observation"] * 2)

    first = Own(nn.Identity(), in_keys=["observation"], out_keys=["hidden"])
    policy = TensorDictSequential(
        first, TensorDictModule(nn.Linear(4, 2), ["hidden"], ["logits"]), actor().module[1]
    )
    assert how(explain(cartpole(), policy), "policy") == [
        "on a TensorDict: has a forward of its own",
        "called straight",
        "computed straight, checked once per batch",
    ]


def test_random_frames_come_first_and_a_replay_buffer_takes_batches() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    explanation = explain(cartpole(), actor(), init_random_frames=16, replay_buffer=buffer)
    assert how(explanation, "policy")[0] == "drawn from the action spec, on arrays"
    (first, *_) = [part.what for part in explanation if part.name == "policy"]
    assert first == "random actions(action), until init_random_frames"
    assert how(explanation, "batch") == ["no copy"]


def test_a_loop_of_a_subclass_is_named_and_the_last_batch_is_what_is_explained() -> None:
    class Own(tdcollect.Collector):
        def rollout(self) -> Any:
            return super().rollout()

    collector = Own(GymEnv("CartPole-v1"), None, frames_per_batch=9, total_frames=9)
    before = collector.explain()
    assert "Own.rollout()" in before.obstacles[0].what
    assert how(before, "slots") == ["not noticed between batches, as in TorchRL"]
    list(collector)
    assert collector.explain() == before
    assert how(before, "env") == ["steps on arrays"]


def test_explaining_runs_nothing() -> None:
    collector = tdcollect.Collector(cartpole(seed=0), actor(), frames_per_batch=9)
    before = torch.get_rng_state()
    print(collector.explain())
    assert torch.equal(torch.get_rng_state(), before)
    other = tdcollect.Collector(cartpole(seed=0), actor(), frames_per_batch=9)
    observation = next(iter(collector))["observation"][:, 0]
    assert torch.equal(observation, next(iter(other))["observation"][:, 0])
