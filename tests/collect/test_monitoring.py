"""Loggers, rendering."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from torchrl.envs import EnvBase, GymEnv, StepCounter, TransformedEnv
from torchrl.record.loggers import CSVLogger

from tdcollect import Collector, LogStatistics, Render, slot_seed

from .envs import cartpole
from .oracle import UPSTREAM

pytestmark = [pytest.mark.filterwarnings(UPSTREAM)]

both_ways = pytest.mark.usefixtures("arrays")


# ---------------------------------------------------------------------------------------- loggers


def logged(folder: Path, prefix: str) -> dict[str, list[tuple[int, float]]]:
    """The values that a CSVLogger wrote below a prefix: (step, value) by name."""
    return {
        file.stem: [(int(step), float(value)) for step, value in csv.reader(file.open())]
        for file in folder.glob(f"*/scalars/{prefix}/*.csv")
    }


@pytest.mark.behaviour(24)
def test_statistics_to_a_csv_logger(tmp_path: Path) -> None:
    collector = Collector(
        cartpole(max_episode_steps=5),
        frames_per_batch=3 * 4,
        timers=True,
        reward_shaping=lambda observation, action, reward, done: 2 * reward,
    )
    hooks = LogStatistics(CSVLogger("run", log_dir=str(tmp_path)))
    with pytest.raises(RuntimeError, match="expected a collector that has collected something"):
        hooks.write(collector.stats)
    for _ in itertools.islice(collector, 2):
        hooks.write(collector.stats)
    written = logged(tmp_path, "collect")
    for name in ("return", "length"):
        for figure, value in (("mean", 5), ("std", 0), ("min", 5), ("max", 5)):
            assert written[f"{name}_{figure}"] == [(24, value)]  # none ended before
    assert written["shaped_return_mean"] == [(24, 10)]
    assert written["steps"] == [(12, 12), (24, 24)]
    assert written["episodes"] == [(12, 0), (24, 3)]
    assert written["window_return_mean"] == [(24, 5)]
    for name in ("seconds", "steps_per_second", "env_seconds", "policy_seconds"):
        assert len(written[name]) == 2
        assert min(value for _, value in written[name]) > 0
    assert [step for step, _ in written["seconds_between"]] == [24]
    hooks.write(collector.stats, step=7)
    assert logged(tmp_path, "collect")["steps"][-1] == (7, 24)


def test_a_hook_logs_every_so_many_collections(tmp_path: Path) -> None:
    hooks = LogStatistics(CSVLogger("run", log_dir=str(tmp_path)), every=2, prefix="c")
    collector = Collector(cartpole(), frames_per_batch=3 * 4, hooks=hooks)
    for _ in itertools.islice(collector, 5):
        pass
    assert logged(tmp_path, "c")["steps"] == [(24, 24), (48, 48)]
    with pytest.raises(ValueError, match="expected every to be a positive int, got 0"):
        LogStatistics(CSVLogger("run", log_dir=str(tmp_path)), every=0)


# -------------------------------------------------------------------------------------- rendering


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that advances by sleeping, or when set."""
    pytest.importorskip("pygame")
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    def sleep(seconds: float) -> None:
        assert seconds > 0
        clock.now += seconds

    clock.sleep = sleep
    monkeypatch.setattr("tdcollect.collect.hooks.time", clock)
    return clock


def rendered(num_envs: int | None = 2, mode: str = "rgb_array") -> EnvBase:
    return cartpole(num_envs, max_episode_steps=5, env_kwargs={"render_mode": mode})


@both_ways
@pytest.mark.behaviour(9)
def test_frames_are_kept_step_by_step() -> None:
    pytest.importorskip("pygame")
    render = Render(keep_frames=True)
    collector = Collector(rendered(), frames_per_batch=2 * 3, hooks=render)
    collector.set_seed(0)
    batch = collector.rollout()
    assert len(render.frames) == 3
    for slot in range(2):
        env = gym.make("CartPole-v1", render_mode="rgb_array")
        env.reset(seed=slot_seed(0, slot))
        for step in range(3):
            env.step(int(batch["action"][slot, step].argmax()))
            assert (render.frames[step][slot] == env.render()).all()


@pytest.mark.behaviour(9)
@pytest.mark.parametrize(
    "make",
    [lambda: rendered(None), lambda: GymEnv("CartPole-v1", render_mode="rgb_array")],
    ids=["ours", "torchrl"],
)
def test_an_unbatched_env_renders_one_frame(make: Any) -> None:
    pytest.importorskip("pygame")
    render = Render(keep_frames=True)
    env = TransformedEnv(make(), StepCounter())
    Collector(env, frames_per_batch=3, hooks=render).rollout()
    assert [frame.shape for frame in render.frames] == [(400, 600, 3)] * 3


@both_ways
@pytest.mark.behaviour(9)
@pytest.mark.parametrize(("fps", "takes", "apart"), [(10, 0.02, 0.1), (10, 0.5, 0.5), (None, 0, 0)])
def test_the_frame_rate_is_held_and_nobody_waits_for_a_slow_policy(
    clock: SimpleNamespace, fps: int | None, takes: float, apart: float
) -> None:
    times: list[float] = []

    def policy(tensordict: Any) -> Any:
        times.append(clock.now)
        clock.now += takes
        return tensordict.set("action", env.action_spec.rand())

    env, render = rendered(), Render(fps=fps)
    collector = Collector(env, policy, frames_per_batch=2 * 6, hooks=render)
    start = len(times)  # the collector tries the policy at construction
    collector.rollout()
    assert np.diff(times[start:])[1:] == pytest.approx([apart] * 4)
    assert render.frames == []


def test_an_env_that_does_not_render_and_a_rate_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="expected fps to be positive, or None, got 0"):
        Render(fps=0)
    with pytest.raises(RuntimeError, match=r"Render.env_created raised ValueError.*'rgb_array'"):
        Collector(cartpole(), frames_per_batch=30, hooks=Render())
    with pytest.raises(RuntimeError, match=r"'rgb_array', got render_mode='human'"):
        Collector(rendered(mode="human"), frames_per_batch=30, hooks=Render(keep_frames=True))
