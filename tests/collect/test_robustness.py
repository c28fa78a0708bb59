"""Errors that a collector survives, its end, and envs rebuilt with other settings."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.envs import GymEnv, RewardSum, TransformedEnv

from tdcollect import Collector, evaluate, make_env
from tdcollect.envs.slots import SlotError

from ..counting import StatelessCountingPolicy, check_counting_batch, counting_env
from .policies import tiring

# -------------------------------------------------------------------------------------- exceptions


def test_an_exception_between_batches_loses_nothing(arrays: bool) -> None:
    collector = Collector(counting_env(3), StatelessCountingPolicy(), frames_per_batch=30)
    seen = None

    def train() -> None:
        nonlocal seen
        for batch in collector:
            check_counting_batch(batch, previous=seen)
            seen = batch.clone()
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            train()
    assert collector.stats.lifetime.steps == 90


@pytest.mark.parametrize("call", ["rollout", "collect"])
def test_an_exception_in_a_batch_leaves_the_collector_usable(call: str, arrays: bool) -> None:
    collector = Collector(counting_env(3), tiring(15), frames_per_batch=30)
    collect = {"rollout": collector.rollout, "collect": lambda: collector.collect(frames=30)}[call]
    collect()
    with pytest.raises(ValueError, match="tired"):
        collect()
    collector.reset()  # the counting env is strict, and TorchRL's loop loses a step there
    check_counting_batch(collect())


def test_an_exception_while_iterating_closes_the_collector(arrays: bool) -> None:
    """As TorchRL's does; what it says then is ours."""
    env = counting_env(3)
    collector = Collector(env, tiring(15), frames_per_batch=30)
    batches = iter(collector)
    check_counting_batch(next(batches))
    with pytest.raises(ValueError, match="tired"):
        next(batches)
    assert collector.closed
    assert env.is_closed
    for call in (collector.rollout, lambda: collector.collect(frames=30), lambda: list(collector)):
        with pytest.raises(RuntimeError, match="the collector is shut down, as an exception while"):
            call()


def another_collector(env: Any) -> Any:
    other = Collector(env, StatelessCountingPolicy(), frames_per_batch=30)
    return [0, 1, 2], other.rollout(), other  # which closes the env when it is gone


def a_rollout(env: Any) -> Any:
    return [0, 1, 2], env.rollout(2, StatelessCountingPolicy())


def a_reset_of_one_slot(env: Any) -> Any:
    marks = torch.tensor([[False], [True], [False]])
    return [1], env.reset(TensorDict({"_reset": marks}, [3]))


MOVES = (another_collector, a_rollout, a_reset_of_one_slot)


@pytest.mark.parametrize("move", MOVES)
def test_slots_that_somebody_else_moves_begin_new_trajectories(
    move: Callable[[Any], Any], arrays: bool
) -> None:
    collector = Collector(counting_env(3), StatelessCountingPolicy(), frames_per_batch=30)
    before = collector.rollout().clone()  # TorchRL's loop writes into it again
    slots, *kept = move(collector.env)
    assert f"slots {slots} begin new trajectories" in str(collector.explain())
    with pytest.warns(UserWarning, match="somebody else has") as told:
        check_counting_batch(batch := collector.rollout())
    assert told[0].filename == __file__
    last, first = before["collector", "traj_ids"][:, -1], batch["collector", "traj_ids"][:, 0]
    ended = before["next", "done"][:, -1, 0].nonzero()[:, 0].tolist()
    assert (last != first).nonzero()[:, 0].tolist() == sorted({*slots, *ended})
    kept += move(collector.env)  # a second time, without a word
    check_counting_batch(collector.collect(frames=30))


def test_an_evaluation_on_the_collectors_env_leaves_no_false_row() -> None:
    collector = Collector(make_env("CartPole-v1", 2), None, frames_per_batch=20)
    collector.rollout()
    evaluate(collector.env, None, 2, progress=False)
    with pytest.warns(UserWarning, match="somebody else has"):
        batch = collector.rollout()
    env: Any = gym.make("CartPole-v1").unwrapped
    for row in batch[:, 0]:
        env.reset()
        env.state = row["observation"].tolist()
        reached = env.step(int(row["action"].argmax()))[0]
        assert np.allclose(reached, row["next", "observation"], atol=1e-5)


def test_a_hook_before_a_batch_may_use_the_env_and_a_state_knows_that_it_was_moved() -> None:
    def made(**options: Any) -> Collector:
        env = counting_env(3, resumable=True)
        return Collector(env, StatelessCountingPolicy(), frames_per_batch=30, **options)

    collector = made(pre_collect_hook=lambda: a_rollout(collector.env))
    with pytest.warns(UserWarning, match="somebody else"):
        check_counting_batch(collector.rollout())
    a_rollout(collector.env)
    other = made()
    other.load_state_dict(collector.state_dict())
    check_counting_batch(other.rollout())


def test_a_killed_worker_fails_each_collection_until_the_envs_are_made_anew() -> None:
    env = make_env(Tuned, 2, backend="process", num_workers=2, start_method="fork")
    collector = Collector(env, frames_per_batch=20)
    collector.rollout()
    lost = env.stepper.backend._pool.processes[1]  # type: ignore[attr-defined]
    os.kill(lost.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(SlotError, match=r"slot 1, .* WorkerLost: .* was killed by SIGKILL"):
            collector.rollout()
    collector.rebuild_env()
    assert collector.rollout().shape == (2, 10)
    collector.shutdown()


def test_reaching_total_frames_is_no_error(arrays: bool) -> None:
    collector = Collector(make_env("CartPole-v1", 2), frames_per_batch=20, total_frames=50)
    assert [batch.numel() for batch in collector] == [20, 20, 20]
    for again in (lambda: collector.collect(frames=20), lambda: list(collector)):
        with pytest.raises(RuntimeError, match="has yielded its total_frames=50"):
            again()
    collector.shutdown()


# ------------------------------------------------------------------------------------------ closing


def test_an_env_that_fails_to_close_loses_no_batch_and_no_evaluation(arrays: bool) -> None:
    class Unclosed(gym.Wrapper):
        def close(self) -> None:
            raise OSError("cannot close")

    def make() -> gym.Env:
        return Unclosed(gym.make("CartPole-v1"))

    collector = Collector(make_env(make, 2), None, frames_per_batch=20, total_frames=60)
    with pytest.warns(UserWarning, match="closing the env raised OSError: cannot close"):
        assert len(list(collector)) == 3
    with pytest.warns(UserWarning, match="closing the env raised OSError: cannot close"):
        result = evaluate(make, None, 2, max_episode_steps=3, progress=False)
    assert result.lengths.tolist() == [3, 3]


@pytest.mark.behaviour(31)
@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("fails", [False, True])
def test_closing_twice_is_safe_also_after_a_failure(backend: str, fails: bool) -> None:
    workers = {} if backend == "serial" else {"start_method": "fork"}  # spawned, they import torch
    kwargs = {"step": np.nan} if fails else {}
    env = make_env(Tuned, 2, backend=backend, env_kwargs=kwargs, check_finite=True, **workers)
    collector = Collector(env, frames_per_batch=20, total_frames=20)
    if fails:
        with pytest.raises(SlotError, match="expected finite numbers"):
            collector.rollout()
    else:
        list(collector)
    for _ in range(2):
        collector.shutdown()
        env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match=r"cannot rebuild .* the env is closed"):
        env.rebuild()


# -------------------------------------------------------------------------------- other settings


class Tuned(gym.Env[Any, Any]):
    """Counts in steps of its own."""

    def __init__(self, step: float = 1.0, start: float = 0.0, size: int = 1):
        self.by, self.start = step, start
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,))
        self.action_space = spaces.Discrete(2)
        self.closed = False

    def _observe(self) -> Any:
        return np.full(self.observation_space.shape, self.value, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.value = self.start + (seed or 0)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.value += self.by
        return self._observe(), 1.0, False, False, {}

    def close(self) -> None:
        self.closed = True


@pytest.mark.behaviour(31)
@pytest.mark.parametrize(
    ("arrays", "backend"),
    [("arrays", "serial"), ("arrays", "process"), ("parent", "serial")],
    indirect=["arrays"],
)
def test_envs_are_made_anew_with_other_settings(backend: str, arrays: bool) -> None:
    forked = {"start_method": "fork"} if backend == "process" else {}
    made = make_env(Tuned, 2, backend=backend, env_kwargs={"start": 5.0}, **forked)
    env = TransformedEnv(made, RewardSum())
    collector = Collector(env, frames_per_batch=6)
    stream = iter(collector)
    before = next(stream).clone()
    assert before["next", "observation"][0, :, 0].tolist() == [6, 7, 8]
    collector.rebuild_env(step=10.0)
    after = next(stream).clone()
    assert after["observation"][0, :, 0].tolist() == [5, 15, 25]  # start is as it was
    assert after["next", "episode_reward"][0, :, 0].tolist() == [1, 2, 3]
    ids = torch.cat([before["collector", "traj_ids"], after["collector", "traj_ids"]], 1)
    assert len(ids.unique()) == 4
    assert collector.stats.lifetime.steps == 12
    collector.shutdown()


@pytest.mark.behaviour(31)
def test_old_envs_are_closed_new_ones_take_seeds_and_restarts_of_both_are_counted() -> None:
    env = make_env(Tuned, 2, on_env_error="restart", max_restarts=9, check_finite=True)
    old = env.stepper.backend.envs  # type: ignore[attr-defined]
    env.rebuild(step=np.nan)
    assert all(one.closed for one in old)
    env.rollout(2, break_when_any_done=False)
    env.rebuild(step=2.0)
    env.set_seed([7, 8])
    assert env.rollout(2)["observation"][..., 0].tolist() == [[7, 9], [8, 10]]
    env.rebuild(step=np.nan)
    env.rollout(2, break_when_any_done=False)
    assert env.restarts == 8


def test_envs_with_other_spaces_are_refused_and_the_old_ones_go_on() -> None:
    env = make_env(Tuned, 2)
    collector = Collector(env, frames_per_batch=6)
    collector.rollout()
    with pytest.raises(ValueError, match=r"the observation space Box\(.*\(1,\).* as before, got B"):
        collector.rebuild_env(size=3)
    with pytest.raises(TypeError, match="unexpected keyword"):
        collector.rebuild_env(colour="red")
    assert collector.rollout()["observation"][0, :, 0].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: GymEnv("CartPole-v1"), "expected an env of tdcollect.make_env, got a GymEnv"),
        (lambda: make_env(Tuned()), "make_env was given an env that is made already; give it an"),
    ],
)
def test_envs_that_cannot_be_made_anew_are_refused(make: Any, told: str) -> None:
    collector = Collector(make(), frames_per_batch=6)
    with pytest.raises(TypeError, match=re.escape(told)):
        collector.rebuild_env()


def test_an_envpool_is_made_anew() -> None:
    pytest.importorskip("envpool")
    env = make_env("CartPole-v1", 2, backend="envpool", env_kwargs={"max_episode_steps": 9})
    env.rebuild(max_episode_steps=3)
    ends = env.rollout(3, break_when_any_done=False)["next", "truncated"]
    assert ends[..., 0].tolist() == [[False, False, True]] * 2
