"""Cases that TorchRL gets wrong; our behaviour is beside it, or in tests/envs/test_backends.py.

Where TorchRL's half of a test fails, TorchRL has mended it: say so in the documentation.
Tests of one case share its number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymEnv, GymWrapper

from tdcollect import Collector, make_env


class Counting(gym.Env):
    """Observation (step, episode), from 1; each step of an episode is rewarded with 1."""

    observation_space = spaces.Box(0, 1000, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length, self.episode = length, 0

    def _observe(self) -> np.ndarray:
        return np.array([self.time, self.episode], np.float32)

    def _info(self) -> dict[str, int]:
        return {"left": 1 + self.length - self.time}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.episode = 1, self.episode + 1
        return self._observe(), self._info()

    def step(self, action: Any) -> Any:
        self.time += 1
        return self._observe(), 1.0, self.time > self.length, False, self._info()


def vector(mode: AutoresetMode) -> SyncVectorEnv:
    """Slot 0 counts to 3 and slot 1 to 4, so they end at different steps."""
    return SyncVectorEnv([Counting, partial(Counting, 4)], autoreset_mode=mode)


# --- 1: final observations of a vector env in NEXT_STEP mode -----------------------------------


def test_1_torchrl_gives_zeros_and_a_junk_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of the AsyncVectorEnv that GymEnv builds: the same default mode, without workers.
    monkeypatch.setattr(gym.vector, "AsyncVectorEnv", lambda _: vector(AutoresetMode.NEXT_STEP))
    slot = GymEnv("CartPole-v1", num_envs=2).rollout(8, break_when_any_done=False)[0]
    before, after = slot["observation"], slot["next", "observation"]
    end = int(slot["next", "done"].flatten().nonzero()[0])
    assert after[end].tolist() == [0, 0]  # in place of the final observation
    final, first = before[end + 1], after[end + 1]
    assert (final[0], first[0]) == (4, 1)  # a row from one episode to the next
    assert first[1] == final[1] + 1
    assert slot["next", "reward"][end + 1] == 0


# --- 2: vector envs that declare their mode in metadata only -----------------------------------


class Declaring(gym.vector.VectorEnv):
    """A SAME_STEP vector env that declares its mode in its metadata only."""

    def __init__(self, inner: SyncVectorEnv) -> None:
        self.inner = inner
        self.num_envs = inner.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        for name in ("observation_space", "action_space"):
            setattr(self, name, getattr(self.inner, name))
            setattr(self, f"single_{name}", getattr(self.inner, f"single_{name}"))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)


def test_2_the_mode_of_an_env_is_before_the_metadata_that_its_class_shares() -> None:
    modes = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
    one, other = (Declaring(vector(AutoresetMode.SAME_STEP)) for _ in modes)
    one.metadata = other.metadata
    for env, env.autoreset_mode in zip((one, other), modes, strict=True):  # type: ignore[attr-defined]
        env.metadata["autoreset_mode"] = env.autoreset_mode
    for mode in reversed(modes):
        one.metadata["autoreset_mode"] = mode
        assert not make_env(one).can.only_by_arrival
        assert "NEXT_STEP" in make_env(other).can.only_by_arrival


def test_2_torchrl_refuses_next_step_and_does_not_read_metadata() -> None:
    with pytest.raises(RuntimeError, match="must be one of SAME_STEP or DISABLED"):
        GymWrapper(vector(AutoresetMode.NEXT_STEP))
    with pytest.raises(AttributeError, match="autoreset_mode"):
        GymWrapper(Declaring(vector(AutoresetMode.SAME_STEP)))
    with pytest.raises(AttributeError, match="autoreset_mode"):
        GymWrapper(CartPoleVectorEnv(2))


def test_2_what_cannot_keep_the_contract_is_refused_naming_what_can() -> None:
    for vector_env in (
        CartPoleVectorEnv(2),
        gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"),
    ):
        with pytest.raises(ValueError, match=r"CartPoleVectorEnv.*late.*by_arrival=True.*'serial'"):
            Collector(make_env(vector_env), None, frames_per_batch=2)


# --- 5: infos that are Python numbers ----------------------------------------------------------


def test_5_torchrl_fails_on_python_numbers() -> None:
    with pytest.raises(AttributeError, match="'int' object has no attribute"):
        GymWrapper(Counting()).auto_register_info_dict()


# --- 6: EnvPool --------------------------------------------------------------------------------


@pytest.fixture
def envpool() -> Any:
    return pytest.importorskip("envpool", reason="the envpool extra is not installed")


@pytest.mark.usefixtures("envpool")
def test_6_torchrls_envpool_wrapper_cannot_be_made() -> None:
    from torchrl.envs import MultiThreadedEnv

    with pytest.raises((ImportError, KeyError)):  # without gym, and with it
        MultiThreadedEnv(2, env_name="CartPole-v1")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_6_envpool_itself_ignores_seeds_of_reset(envpool: Any) -> None:
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=5)
    first, second = pool.reset(seed=7)[0], pool.reset(seed=7)[0]
    assert not np.array_equal(first, second)


@pytest.mark.usefixtures("envpool")
def test_6_envpool_runs_and_gives_true_final_observations_and_real_first_steps() -> None:
    env = make_env("CartPole-v1", 3, backend="envpool", info_keys=["elapsed_step"], seed=0)
    batch = env.rollout(200, break_when_any_done=False)
    assert batch["next", "done"].sum() > 10
    position, _, angle, _ = batch["next", "observation"].abs().unbind(-1)
    fallen = (position > 2.4) | (angle > 12 * 2 * np.pi / 360)
    assert torch.equal(fallen, batch["next", "terminated"][..., 0])
    assert (batch["next", "elapsed_step"] == batch["elapsed_step"] + 1).all()
    starts = torch.cat([torch.ones(3, 1, dtype=torch.bool), batch["next", "done"][:, :-1, 0]], 1)
    assert torch.equal(batch["elapsed_step"] == 0, starts)
