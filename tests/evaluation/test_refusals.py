"""Envs and policies whose episodes do not repeat are detected and refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TransformObservation
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType, GymWrapper, TransformedEnv
from torchrl.envs import transforms as T

import tdcollect
import tdcollect.policies
from tdcollect import Collector, make_env
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.policies import from_function
from tdcollect.randomness import NotReproducibleError, global_states

from .envs import (
    Leaking,
    Masked,
    Raising,
    SeedsGlobal,
    Sharing,
    Strict,
    Touching,
    Unseeded,
    Walk,
    Watched,
)
from .ledger import digest, records
from .policies import categorical, deterministic, drawing, net

COUPLES = (
    "gives a row other outputs .* couples rows, as batch norm in training mode .*eval_mode=True"
)
KEEPS = "gives other outputs .* for the same rows and random streams: it keeps a state that is no"
UNSEEN = np.random.default_rng(0)


class Then(nn.Module):
    """Changes logits by a function."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.network, self.change = net(3, 2), change

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.change(self.network(observation)).float()


UNFIT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "batch-norm": (
        nn.BatchNorm1d(2),
        "changes its own buffers .*running_mean.*batch norm in training.*eval_mode=True",
    ),
    "batch-norm-without-statistics": (nn.BatchNorm1d(2, track_running_stats=False), COUPLES),
    "own-numpy-generator": (lambda x: x + torch.from_numpy(UNSEEN.normal(size=x.shape)), KEEPS),
    "python-random": (lambda x: x + random.random() * torch.arange(2), KEEPS),
    "numpy-global": (lambda x: x + torch.from_numpy(np.random.normal(size=x.shape)), KEEPS),  # noqa: NPY002
    "minus-mean": (lambda x: x - x.mean(0), COUPLES),
    "minus-first": (lambda x: x - x[0], COUPLES),
    "reversed": (lambda x: x + x.flip(0), COUPLES),
    "weight-noise": (lambda x: x.repeat(1, 8) @ torch.randn(16, 2), COUPLES),
    "odd-draw": (
        lambda x: x + torch.randn(3).sum(),
        r"draws random numbers of shape \[3\] .* which cannot be assigned to rows: "
        "expected a batch of 16 rows in front.*Draw for each row",
    ),
    "permutation": (
        lambda x: x[torch.randperm(len(x))],
        "draws random numbers .* which cannot be assigned to rows",
    ),
}


def zeros() -> Any:
    """The walk, whose observations hide whatever multiplies them."""
    return TransformObservation(Walk(), lambda observation: 0 * observation, None)


@pytest.mark.parametrize(("name", "slots"), [*zip(UNFIT, (1, 16) * len(UNFIT), strict=False)])
def test_a_policy_whose_rows_are_not_each_their_own_is_refused(name: str, slots: int) -> None:
    change, text = UNFIT[name]
    make = Watched(zeros if slots == 1 else Walk)
    policy = categorical(network=Then(change)).train()
    before = repr([policy.state_dict(), global_states()])
    with pytest.raises(NotReproducibleError, match=f"(?s)the policy.*{text}"):
        records(make, policy, 20, num_envs=slots, eval_mode=False)
    assert make.made
    assert not make.open
    assert policy.training
    assert repr([policy.state_dict(), global_states()]) == before


def test_draws_that_begin_late_are_refused() -> None:
    """Operations that did not draw at first are not watched again."""

    policy = drawing(lambda x: x)
    with EvaluationCollector(Walk, policy, 1000) as collector:
        run = collector.run()
        for _ in range(20):
            next(run)
        policy.module.draw = lambda x: x + torch.randn_like(x)
        with pytest.raises(
            NotReproducibleError, match=r"drew from the global random .* of torch|runs again"
        ):
            list(run)


AGAIN = r"episode \d+ of .* \(seed \d+\) is another one when it runs again"
SEEDLESS = f"{AGAIN} on a new env: at step 0, observation/.*: the env draws random numbers that"


@pytest.mark.parametrize("env", [Unseeded, Sharing, Touching])
def test_an_env_whose_seed_does_not_decide_is_refused(env: Any) -> None:
    make = Watched(env)
    with pytest.raises(NotReproducibleError, match=f"the env .* drew from|{AGAIN}"):
        records(make, deterministic(), 12, num_envs=4)
    assert make.made
    assert not make.open
    if env is Unseeded:
        for how in ({"fresh_envs": True}, {"backend": "process", "num_envs": 1}):
            with pytest.raises(NotReproducibleError, match=SEEDLESS):
                records(Unseeded, None, 2, **how)
        made = make_env(Unseeded, 1, backend="process", start_method="fork")
        with pytest.raises(NotReproducibleError, match=f"{AGAIN} after others on the same env"):
            records(made, None)
        made.close()
        told = "env SeedsGlobal .* drew from the global random numbers of numpy, .*Draw from env.np"
        with pytest.raises(NotReproducibleError, match=told):
            records(make_env(SeedsGlobal, 3), None)


@pytest.mark.parametrize("fresh_envs", [None, True])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_an_env_that_carries_something_on_is_made_anew(slots: int, fresh_envs: bool | None) -> None:
    whole = digest(Strict, None)
    assert digest(partial(Strict, resets=1), None, num_envs=slots) == whole
    found = tdcollect.evaluate(
        Leaking, deterministic(), 20, num_envs=slots, fresh_envs=fresh_envs, progress=False
    )
    assert found.manifest["fresh_envs"] is True
    assert found.digest == digest(Walk, deterministic(), 20)


def test_an_env_that_carries_something_on_is_refused_where_it_cannot_be_made_anew() -> None:
    for env, settings in (
        (Leaking, {"fresh_envs": False}),
        (lambda: make_env(SyncVectorEnv([Leaking] * 2, autoreset_mode=AutoresetMode.DISABLED)), {}),
    ):
        told = f"{AGAIN} after others on the same env: .* keeps something from one"
        with pytest.raises(NotReproducibleError, match=told):
            records(env, deterministic(), **settings)


@pytest.mark.parametrize("slots", [1, 2, 4, 6])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_what_an_env_shows_after_some_episodes_is_found(slots: int, before: int) -> None:
    class Late(Walk):
        begun = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            shown, info = super().reset(seed=seed)
            self.begun += 1
            return shown + (self.begun > before), info

    for root in range(3):
        right = digest(Walk, deterministic(), 24, seed=root)
        with contextlib.suppress(NotReproducibleError):
            found = tdcollect.evaluate(
                Late, deterministic(), 24, root, num_envs=slots, progress=False
            )
            assert found.digest == right
        if before < 3:  # as the second or the third of an env
            assert digest(Late, deterministic(), 24, seed=root, num_envs=slots) == right


def test_an_env_that_is_given_is_tried_once() -> None:
    begun = []

    class Counted(Walk):
        noisy = False

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            begun.append(seed)
            shown, info = super().reset(seed=seed)
            return shown + self.noisy * len(begun), info

    def resets(env: Any, **settings: Any) -> int:
        before = len(begun)
        records(env, deterministic(), 5, **settings)
        return len(begun) - before

    with contextlib.closing(make_env(Counted, 2)) as env:
        Counted.noisy = True
        for _ in range(2):  # a refusal is no verdict
            with pytest.raises(NotReproducibleError, match=AGAIN):
                resets(env)
        Counted.noisy = False
        first, *others = (resets(env) for _ in range(3))
        assert first > 5
        assert others == [5, 5]
        env.rebuild()
        assert resets(env) > 5
        assert resets(env) == 5
    assert all(resets(Counted) > 5 for _ in range(2))


def test_slots_unlike_each_other_are_refused() -> None:
    longest = itertools.cycle([12, 3])
    with pytest.raises(NotReproducibleError, match=f"{AGAIN} .*unlike them"):
        records(make_env(lambda: Walk(longest=next(longest)), 2), deterministic())


def box(low: float, size: int) -> spaces.Box:
    return spaces.Box(low, low + 1, (size,), np.float32)


# Spaces whose order is not that of their names; of unlike shapes, and of like ones.
INNER = spaces.Dict([("b", box(0, 1)), ("a", box(2, 1))])
COMPOSITE = {
    "dict": spaces.Dict([("z", INNER), ("m", box(3, 3)), ("a", box(4, 2))]),
    "tuple": spaces.Tuple([box(i, 1 + i % 2) for i in range(12)]),
}


@pytest.mark.parametrize("name", COMPOSITE)
def test_composite_actions_reach_the_env_as_its_space_has_them(name: str) -> None:
    make = partial(Strict, COMPOSITE[name])
    found = records(make, None, 3, on_env_error="raise")
    assert all(record.completed for record in found)
    assert found == records(make, None, 3, num_envs=2, on_env_error="raise")
    with pytest.raises(NotReproducibleError, match=f"{AGAIN} on a new env: at step 1, obs"):
        records(partial(make, noise=True), None, 5)


def test_an_env_that_always_raises_has_failed_episodes() -> None:
    for fresh_envs in (None, True, False):
        how = {"fresh_envs": fresh_envs, "env_kwargs": {"step": 1}, "max_restarts": 0}
        assert not any(record.completed for record in records(Raising, None, 3, **how))


def test_an_env_that_raises_now_and_then_is_evaluated_and_its_noise_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Raising, "dice", np.random.default_rng(0))
    chances = {"step": 1, "chance": 0.02}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may raise wherever an episode of it runs again
        found = records(Raising, None, 10, env_kwargs=chances, max_restarts=1000)
    assert all(record.completed for record in found)
    assert any(record.restarts for record in found)
    with pytest.raises(NotReproducibleError, match=f"{AGAIN} on a new env: at step 1, obs"):
        records(Raising, None, env_kwargs={**chances, "noise": True}, max_restarts=1000)


@pytest.mark.parametrize("space", [spaces.Discrete(7, start=2), spaces.MultiDiscrete([3, 4])])
def test_an_env_that_tells_valid_actions_is_looked_at_with_those(space: Any) -> None:
    def act(observation: torch.Tensor) -> torch.Tensor:
        choices = [7] if isinstance(space, spaces.Discrete) else [3, 4]
        parts = torch.zeros(len(observation), sum(choices), dtype=torch.long).split(choices, -1)
        for part in parts:
            part[:, 0] = 1  # the first choice, which is always valid
        return torch.cat(parts, -1)

    make = partial(Masked, space)
    assert all(record.completed for record in records(make, act, 5, on_env_error="raise"))
    with pytest.raises(NotReproducibleError, match=f"{AGAIN} on a new env: at step 1, obs"):
        records(partial(make, noise=True), act, 5)


class Noise(T.ObservationTransform):
    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        return observation + torch.randn_like(observation)

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)


class Features(T.ObservationTransform):
    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.network = net(3, 3)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: Noise(["observation"], ["observation"]),
            "drew from the global random numbers of torch",
        ),
        (
            lambda: T.VecNormV2(in_keys=["observation"]),
            "VecNormV2 keeps .* make it with reduce_batch",
        ),
        (Features, "Features runs a network.*into the policy"),
    ],
)
def test_transforms_that_an_episode_would_depend_on_are_refused(make: Any, told: str) -> None:
    with pytest.raises(NotReproducibleError, match=told):
        records(TransformedEnv(make_env(Walk, 3), make()), deterministic())


def normalizing(kind: Any = NormalizeReward, frozen: bool = False) -> Any:
    env = NormalizeObservation(Walk()) if kind is NormalizeObservation else kind(Walk(), gamma=0.9)
    env.update_running_mean = not frozen
    return TransformObservation(env, lambda x: x, env.observation_space)


def test_normalizing_wrappers_are_warned_of_unless_they_are_frozen() -> None:
    for make in (
        partial(normalizing, NormalizeObservation),
        lambda: GymWrapper(normalizing()),
        make_env(normalizing, 2),
        make_env(normalizing, 2, backend="process", start_method="fork"),
    ):
        with pytest.warns(UserWarning, match="running statistics are not those of the") as warned:
            EvaluationCollector(make, None, 2)
        assert sum("statistics" in str(one.message) for one in warned) == 1
    EvaluationCollector(partial(normalizing, frozen=True), None, 2)


def test_a_gymnasium_env_that_is_made_is_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tdcollect.evaluation.workers.local.LocalWorkers", None)
    calls: list[Any] = [EvaluationCollector, partial(tdcollect.evaluate, workers=1)]
    for env, call in zip((SyncVectorEnv([Walk]), Walk()), calls, strict=True):
        with pytest.raises(TypeError, match=r"made already goes through tdcollect.make_env"):
            call(env, None, 2)


def unmakeable() -> gym.Env[Any, Any]:
    raise AssertionError


def test_a_directory_that_cannot_be_written_to_is_refused_before_an_env_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and path != read_only)
    calls: list[Any] = [tdcollect.evaluate, tdcollect.Evaluator, tdcollect.race]
    for call, below in itertools.product(calls, (read_only, read_only / "runs" / "one")):
        policy: Any = from_function(int)
        policies = {"a": policy, "b": None} if call is tdcollect.race else policy
        with pytest.raises(ValueError, match=f"writable, got {below}: {read_only} is read-only"):
            call(unmakeable, policies, output_dir=below)


POLICY = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("env", ["CartPole-v1", make_env("CartPole-v1"), gym.make("CartPole-v1")])
@pytest.mark.parametrize("policy", [POLICY, from_function(int), SimpleNamespace(predict=None)])
def test_an_env_and_a_policy_in_each_others_place(env: Any, policy: Any) -> None:
    calls: list[Any] = [tdcollect.evaluate, tdcollect.Evaluator, EvaluationCollector]
    calls += [partial(tdcollect.Collector, frames_per_batch=10)]
    for call in calls:
        with pytest.raises(TypeError, match=r"the env first, then the policy, got a .*; swap them"):
            call(policy, env)


def test_a_vec_env_of_stable_baselines3_is_refused() -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.env_util").make_vec_env(Walk, 2)
    calls: list[Any] = [tdcollect.evaluate, partial(tdcollect.Evaluator, policy=from_function(int))]
    calls += [make_env, partial(tdcollect.Collector, frames_per_batch=10)]
    for call in calls:
        with pytest.raises(TypeError, match="of a VecEnv of Stable-Baselines3, pass the id or the"):
            call(vec_env)


def test_a_closed_env_is_refused() -> None:
    env = make_env(Walk, 2)
    env.close()
    with pytest.raises(RuntimeError, match="the env Walk is closed; make a new one"):
        EvaluationCollector(env, None)
    collector = EvaluationCollector(Walk, None)
    collector.close()
    with pytest.raises(RuntimeError, match="the env Walk is closed; make a new one"):
        next(collector.run())


def test_two_runs_at_a_time_are_refused() -> None:
    with EvaluationCollector(partial(Walk, longest=1), None, 40) as collector:
        first = collector.run()
        next(first)
        next(collector.run())
        with pytest.raises(RuntimeError, match="another run of this collector has begun since"):
            list(first)


COUNT, POSITIVE = "expected episodes to be a count, or indices", "to be a positive int"
BAD: list[tuple[str, Any, str]] = [
    ("episodes", -1, COUNT),
    ("episodes", [1.5], COUNT),
    ("episodes", [1, 1], "do not recur"),
    ("episodes", [2**63], r"below 2\*\*63"),
    ("episodes", 2**63, r"below 2\*\*63"),
    ("episodes", True, COUNT),
    ("seed", -1, "expected seed to be an int and not negative, got -1"),
    ("seed", 0.5, "expected seed to be an int"),
    ("env_seeds", [1, 2], "expected a seed for each .* up to index 4, got 2 seeds"),
    ("env_seeds", 5, "expected env_seeds to be one int per episode, or a function"),
    ("env_seeds", [0, 1, -1, 3, 4], "got -1 for episode 2"),
    ("env_seeds", [3, 1, 4, 1, 5], "got 1 for episodes 1 and 3: one would count twice"),
    ("env_seeds", lambda i: i % 4, "got 0 for episodes 0 and 4"),
    ("env_seeds", lambda i: i / 2, "got 0.0 for episode 0"),
    ("max_episode_steps", 0, f"expected max_episode_steps {POSITIVE} or None, got 0"),
    ("num_envs", 0, f"expected num_envs {POSITIVE} or None, got 0"),
    ("inference_batch_size", 0, f"expected inference_batch_size {POSITIVE}"),
    ("inference_threads", 0, f"expected inference_threads {POSITIVE}"),
    ("eval_mode", "eval", "expected eval_mode to be a bool, got 'eval'"),
    ("on_env_error", "ignore", "expected on_env_error to be 'restart' or 'raise'"),
    ("max_restarts", -1, "expected max_restarts to be an int and not negative, got -1"),
    ("backend", "threads", "expected backend to be 'serial', 'process'"),
    ("exploration_type", "random", "expected exploration_type to be one of"),
    ("device", "no such device", "expected device to be one of torch"),
]


@pytest.mark.parametrize(("name", "value", "told"), BAD)
def test_bad_arguments_are_told_before_an_env_is_made(name: str, value: Any, told: str) -> None:
    make = Watched(Walk)
    with pytest.raises((ValueError, TypeError), match=told):
        EvaluationCollector(make, deterministic(), **{"episodes": 5, name: value})
    assert make.made == 0


def test_settings_of_an_env_that_is_made_are_refused() -> None:
    env = make_env(Walk, 2)
    for given in ({"num_envs": 4}, {"backend": "serial"}, {"env_kwargs": {}}):
        with pytest.raises(ValueError, match=f"is made already: expected no {next(iter(given))}"):
            EvaluationCollector(env, None, **given)
    with pytest.raises(ValueError, match="the callable makes an env whose slots are fixed"):
        EvaluationCollector(lambda: env, None, num_envs=4)
    assert env.is_closed
    env = make_env(SyncVectorEnv([Walk] * 2))
    with pytest.raises(ValueError, match="the backend 'gymnasium' cannot build single slots again"):
        EvaluationCollector(env, None, fresh_envs=True)


NO_POLICIES: dict[str, tuple[Any, type[Exception], str]] = {
    "linear": (nn.Linear(3, 2), TypeError, r"got a Linear, which takes \(input\); wrap it"),
    "text": ("random", TypeError, "called with a TensorDict, got 'random'; leave it out"),
    "model of SB3": (SimpleNamespace(predict=None), TypeError, "sb3.load_policy"),
    "no action": (
        TensorDictModule(net(3, 2), ["observation"], ["value"]),
        KeyError,
        "the entry 'action'",
    ),
    "class": (nn.Linear, TypeError, "got the class Linear; pass an instance"),
    "number": (lambda observation: 1, ValueError, r"entry 'action' to have a row for each.*\[\]"),
    "row": (lambda observation: np.ones(2), ValueError, r"'action' to have a row for each.*\[2\]"),
    "list": (lambda observation: [1, 0], ValueError, r"'action' to have the batch size.*a list"),
}


@pytest.mark.parametrize("name", NO_POLICIES)
def test_what_is_no_policy_is_told(name: str) -> None:
    policy, error, message = NO_POLICIES[name]
    with pytest.raises(error, match=f"expected .*{message}"):
        records(Walk, policy)


@pytest.mark.parametrize("error", [ArithmeticError, TypeError, ValueError])
def test_an_error_of_the_policy_is_its_own_and_the_env_closed(error: type[Exception]) -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        raise error("the policy's own")

    make = Watched(Walk)
    with pytest.raises(
        error, match=r"^the policy's own\nits argument is named like .*from_function\(policy\)$"
    ):
        records(make, policy)
    assert make.made
    assert not make.open


# --- advice that works as printed -------------------------------------------------------------


def of_one_observation(obs: Any) -> int:
    """As functions of gymnasium's users are."""
    return int(obs[2] + obs[1] > 0)


class Agent(nn.Module):
    """Has no forward, as agents of CleanRL."""

    def __init__(self) -> None:
        super().__init__()
        self.network = net(3, 2)

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).mean(-1)

    def get_action(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).argmax(-1)


class AgentOfPPO(Agent):
    def get_action_and_value(self, x: torch.Tensor) -> Any:
        drawn = torch.distributions.Categorical(logits=self.network(x))
        action = drawn.sample()
        return action, drawn.log_prob(action), drawn.entropy(), self.get_value(x)


def acting() -> Any:
    return SimpleNamespace(act=of_one_observation)


SPEC, WRAPPED = r"NumPy observation: (.*), with spec", r"wrap the method that acts: (.*)$"
ON_ONE = r"one NumPy observation: (tdcollect\.policies\..*)$"
ADVICE = {  # in evaluations, and in collections
    "a function of one observation": (lambda: of_one_observation, ON_ONE, SPEC),
    "an object that acts": (acting, None, SPEC),  # evaluations find it out
    "an agent": (Agent, WRAPPED, WRAPPED),
    "an agent of PPO": (AgentOfPPO, WRAPPED, WRAPPED),
}


@pytest.mark.parametrize(("name", "encoded"), [*zip(ADVICE, (False, True) * 2, strict=True)])
def test_advice_on_how_to_wrap_a_policy_works_as_printed(name: str, encoded: bool) -> None:
    make, evaluating, collecting = ADVICE[name]
    policy = make()
    env = make_env(Walk, 2, categorical_action_encoding=encoded)

    def wrapped(pattern: str, refusing: Callable[[], Any]) -> Any:
        with pytest.raises(TypeError, match=f"expected .*{pattern}") as raised:
            refusing()
        (line,) = re.findall(pattern, str(raised.value))
        named = {"policy": policy, "env": env, "torch": torch, "TensorDictModule": TensorDictModule}
        named |= {"tdcollect": tdcollect, "spec": env.action_spec_unbatched}
        return eval(line, named)

    advised = policy
    if evaluating:
        advised = wrapped(evaluating, lambda: records(env, policy))
    assert len(records(env, advised, 5)) == 5
    frames = {"frames_per_batch": 10, "total_frames": 10}
    advised = wrapped(collecting, lambda: Collector(env, policy, **frames))
    assert len(records(env, advised, 5)) == 5
    for slots in (None, 2):
        made = make_env(Walk, slots, categorical_action_encoding=encoded)
        (batch,) = Collector(made, advised, **frames)
        assert batch.numel() == 10


def test_a_network_of_another_size_is_told_with_the_observations() -> None:
    policy = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"])
    text = r"expected a policy for observations 'observation' \[3\], .*mat1 and mat2.*make its netw"
    with pytest.raises(ValueError, match=text) as raised:
        records(Walk, policy)
    assert type(raised.value.__cause__) is RuntimeError
    with pytest.raises(ValueError, match=text):
        Collector(make_env(Walk), policy, frames_per_batch=10, total_frames=10)


class NaNs(Walk):
    """Observations are no numbers from a step on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.steps = at, 0

    def noise(self) -> Any:
        self.steps += 1
        return super().noise() * (np.nan if self.steps > self.at else 1)


@pytest.mark.parametrize(
    ("at", "how"), [(0, ExplorationType.RANDOM), (3, ExplorationType.DETERMINISTIC)]
)
def test_the_env_is_blamed_for_its_nans(at: int, how: ExplorationType) -> None:
    text = r"got NaN from the env in \['observation'\], on which the policy fails; correct the env"
    with pytest.raises(ValueError, match=text):
        records(partial(NaNs, at), categorical(), 10, exploration_type=how)
