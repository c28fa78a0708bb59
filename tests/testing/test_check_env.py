"""``check_env``: each rule fails on the env that breaks it, with evidence; no sound env fails."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import GymEnv, SerialEnv

import tdcollect
from tdcollect import keys
from tdcollect.testing import check_env

from ..counting import (
    CountingEnv,
    CountingRules,
    StatelessCountingPolicy,
    TorchCountingEnv,
    make_counting_envs,
)
from . import envs

RUN = "episodes run: reset gives two values, step gives five"
INSIDE, DTYPE = "observations lie in the space", "the dtype is the space's"
REWARDS, FLAGS = "rewards are finite numbers", "terminated and truncated are bools"
SAME, OTHER = "the same seed gives the same episode", "another seed gives another episode"
FRESH = "reset(seed) does not depend on what went before"
APART = "envs do not share state"
FINAL = "the final observation is not the next episode's first"
ALIASING = "entries given out do not change later (no aliasing)"
ACTION, CLOSE = "a step leaves its action as it was", "close can be called twice"
SPECS = "entries match the specs (torchrl.envs.check_env_specs)"
DONE = "done is terminated or truncated"
ZEROS = "the final observation is not filled in with zeros"
PARTIAL = "a partial reset leaves other slots alone"


def check_failures(env: Any, broken: dict[str, str], **kwargs: Any) -> None:
    """``broken`` has a pattern of the evidence for each rule that fails, and for no other."""
    report = check_env(env, **kwargs)
    assert {finding.rule for finding in report.failures} == set(broken), report
    for finding in report.failures:
        assert re.match(broken[finding.rule], finding.evidence), finding


class RestartsItself(CountingEnv):
    def __init__(self) -> None:
        super().__init__(rules=CountingRules(ends="terminated"), wrong_action="record")

    def step(self, action: Any) -> Any:
        return envs.restart(self, *super().step(action))


DIFFERENT = r"step \d+: observation\[\d\] is .* and .* apart"
UNSEEDED = {SAME: DIFFERENT, FRESH: DIFFERENT}


@pytest.mark.parametrize(
    ("env", "broken"),
    [
        (envs.OutOfBounds, {INSIDE: r"seed 0, step \d+: .* at \[\d\] is not in \[-2.0, 2.0\]"}),
        (envs.GivesNaN, {INSIDE: r"seed 0, step 1: nan at \[1\] is not in"}),
        (envs.OtherShape, {INSIDE: r"seed 0, step 1: expected shape \(2,\), got \(1,\)"}),
        (envs.WithOtherText, {INSIDE: "seed 0, step 0, 'mission': 'go right' is not in Text"}),
        (envs.OtherDtype, {DTYPE: "seed 0, step 1: expected float32, got float64"}),
        (envs.GivesAList, {DTYPE: "seed 0, step 1: expected an array of float32, got list"}),
        (envs.NaNReward, {REWARDS: "seed 0, step 1: nan"}),
        (envs.BoolReward, {REWARDS: "seed 0, step 1: bool True"}),
        (envs.ArrayReward, {REWARDS: r"seed 0, step 1: ndarray array\(\[1.\]\)"}),
        (envs.FlagsAreInts, {FLAGS: "seed 0, step 1: terminated is int 0"}),
        (envs.FourValues, {RUN: r"step gave 4 values, expected \(observation, reward, term"}),
        (envs.RaisesInStep, {RUN: "ZeroDivisionError: a step too far"}),
        (RestartsItself, {FINAL: r".* ended the episode of seed 0 and began the one after"}),
        (envs.IgnoresSeed, {OTHER: "seeds 0 to 2 give one and the same", FRESH: DIFFERENT}),
        (envs.OwnGenerator, UNSEEDED),
        (envs.Leaks, {FRESH: DIFFERENT}),
        (envs.SharesState, {APART: DIFFERENT}),
        (envs.ReusesItsBuffer, {ALIASING: "seed 0, step 0: the observation was changed after it"}),
        (envs.ChangesItsAction, {ACTION: "step 0: action"}),
        (envs.ClosesOnce, {CLOSE: "AssertionError: closed already"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_gymnasium_env(env: Any, broken: dict[str, str]) -> None:
    check_failures(env, broken)


def test_env_without_chance() -> None:
    same = {OTHER: "seeds 0 to 2 give .* if the env leaves nothing to chance, skip this rule"}
    check_failures(envs.WithoutChance, same)
    check_failures(envs.WithoutChance, {}, skip=[OTHER])


class SoundBatch(TorchCountingEnv):
    """A batched counting env that takes any action."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__([3], wrong_action="record", **kwargs)


def with_method(name: str, method: Callable[..., Any]) -> type[SoundBatch]:
    class Broken(SoundBatch):
        pass

    setattr(Broken, name, method)
    return Broken


def packed(change: Callable[[Any, TensorDictBase], Any]) -> type[SoundBatch]:
    """Batches whose states pass through ``change``."""
    return with_method("_pack", lambda self, source: change(self, SoundBatch._pack(self, source)))


def observed(change: Callable[[Any, torch.Tensor], Any]) -> type[SoundBatch]:
    return packed(lambda env, td: td.set(keys.OBSERVATION, change(env, td[keys.OBSERVATION])))


def stepped(change: Callable[[Any, TensorDictBase, TensorDictBase], Any]) -> type[SoundBatch]:
    """Batches whose steps pass through ``change``, with the TensorDict that was given."""

    def step(self: Any, given: TensorDictBase) -> Any:
        return change(self, given, SoundBatch._step(self, given))

    return with_method("_step", step)


def final(change: Callable[[Any, torch.Tensor], Any]) -> type[SoundBatch]:
    """Batches whose final observations are others."""

    def replace(env: Any, _: TensorDictBase, step: TensorDictBase) -> TensorDictBase:
        observation = step[keys.OBSERVATION]
        other = change(env, observation)
        return step.set(keys.OBSERVATION, other.where(step[keys.DONE], observation))

    return stepped(replace)


def first_of_the_next(env: Any, observation: torch.Tensor) -> torch.Tensor:
    """As a vector env in SAME_STEP mode gives it."""
    return torch.stack([torch.zeros(3), env.episode + 1.0, env.slot.float()], -1)


def zero_actions(env: Any, given: TensorDictBase, step: TensorDictBase) -> TensorDictBase:
    given[keys.ACTION].zero_()
    return step


def close_once(env: Any) -> None:
    assert not env.is_closed, "closed already"
    SoundBatch.close(env)


BATCHES: dict[str, tuple[type[SoundBatch], dict[str, str]]] = {
    "dtype": (
        observed(lambda env, o: o.double()),
        {SPECS: "AssertionError", DTYPE: ".* expected torch.float32, got torch"},
    ),
    "space": (
        observed(lambda env, o: o - 5),
        {SPECS: "AssertionError", INSIDE: ".*'observation' is not in"},
    ),
    "union": (
        packed(lambda env, td: td.set("done", td["done"] | (env.count == 2).unsqueeze(-1))),
        {DONE: ".* done is True, terminated or truncated is False"},
    ),
    "rewards": (
        stepped(lambda env, given, step: step.set("reward", step["reward"] * torch.nan)),
        {REWARDS: r".*'reward' is \[\[nan"},
    ),
    "seed": (
        with_method("_set_seed", lambda env, seed: None),
        {OTHER: "", FRESH: r"step 0: observation\[1\]\[1\] is 0 and 5 \(5 apart\)"},
    ),
    "zeros": (final(lambda env, o: o * 0), {ZEROS: ".* episodes ended in zeros: their true last"}),
    "first": (final(first_of_the_next), {FINAL: ".* ended an episode and began the one after it"}),
    "partial reset": (
        with_method("_reset", lambda env, td=None, **how: SoundBatch._reset(env, None, **how)),
        {PARTIAL: "'observation' of slots that go on differs in the step"},
    ),
    "buffer": (
        observed(lambda env, o: env.__dict__.setdefault("buffer", o.clone()).copy_(o)),
        {ALIASING: ".*'observation' was changed after it was given", FINAL: ""},
    ),
    "action": (stepped(zero_actions), {ACTION: r"'action'\[0\]\[4\] is 1 and 0"}),
    "close": (with_method("close", close_once), {CLOSE: "AssertionError: closed already"}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_broken_torchrl_env(name: str) -> None:
    check_failures(*BATCHES[name])


@pytest.mark.parametrize(
    "env",
    [
        *("Blackjack-v1", envs.Nested, envs.Sound(), SoundBatch),
        lambda: tdcollect.make_env("CartPole-v1", 3, is_init=True, step_count=True),
        lambda: tdcollect.make_env(envs.Nested, 2),
        lambda: SyncVectorEnv(make_counting_envs(3, wrong_action="record")),
        lambda: GymEnv("CartPole-v1"),
        lambda: SerialEnv(2, lambda: TorchCountingEnv(wrong_action="record")),
    ],
)
def test_sound_env_passes(env: Any) -> None:
    check_failures(env, {}, max_episode_steps=40)


def test_strict_env_is_checked_under_its_policy_and_closed() -> None:
    rules = CountingRules()
    check_failures(CountingEnv, {}, policy=lambda o: np.int64(rules.action(int(o[0]))))
    env = TorchCountingEnv([3], rules)
    check_failures(env, {}, policy=StatelessCountingPolicy(rules))
    assert env.is_closed


def test_torch_randomness_is_left_alone_and_decides_nothing() -> None:
    def leave(env: Any, given: TensorDictBase, step: TensorDictBase) -> TensorDictBase:
        """Leave the space at one action, which a few random steps may or may not take."""
        hit = (given[keys.ACTION][0].argmax() == 0).item()
        return step.set(keys.OBSERVATION, step[keys.OBSERVATION] - 100 * hit)

    statuses = set()
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        statuses.add(check_env(stepped(leave), max_episode_steps=5)[SPECS].status)
        assert torch.equal(torch.get_rng_state(), before)
    assert len(statuses) == 1


def test_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a gymnasium id, an env or a callable that makes"):
        check_env(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a gymnasium env or an EnvBase, got TensorDict"):
        check_env(lambda: TensorDict())  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"the checks to skip to be of .* got \['seeds'\]"):
        check_env(envs.Sound, skip=["seeds"])
    with pytest.raises(ValueError, match="expected max_episode_steps to be a positive int, got 0"):
        check_env(envs.Sound, max_episode_steps=0)


@pytest.mark.skipif(
    "CliffWalking-v1" not in gym.registry, reason="this gymnasium has CliffWalking-v0"
)
def test_page_shows_what_its_code_prints() -> None:
    """The blocks of code in docs/conformance.md run, and print the blocks of text after them."""
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for code, text in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == text
