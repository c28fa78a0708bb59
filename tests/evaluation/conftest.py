"""Commands, run in a directory with policies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tdcollect.cli import main

from ..zoo.reports import small_reports

__all__ = ["small_reports"]

torch.set_num_threads(1)

POLICIES = r"""
import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch import nn

print("read")


def lean():
    print("made")
    def push(observation):
        return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)
    return TensorDictModule(push, in_keys=["observation"], out_keys=["action"])


class Net(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.layer = nn.Linear(env.observation_spec["observation"].shape[-1], 2)

    def forward(self, observation):
        return torch.nn.functional.one_hot(self.layer(observation).argmax(-1), 2)


def net(env, hidden=None):
    return TensorDictModule(Net(env), in_keys=["observation"], out_keys=["action"])


class Falling(gym.Wrapper):
    # Raises in long episodes; in none where actions are random.
    def reset(self, **kwargs):
        self.steps = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.steps += 1
        if self.steps == 45:
            raise RuntimeError("the env fell over")
        return super().step(action)


def short(length=9, **kwargs):
    return gym.make("CartPole-v1", max_episode_steps=length, **kwargs)


def falling():
    return Falling(gym.make("CartPole-v1"))


class Unrewarded(gym.Wrapper):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


def unrewarded():
    return Unrewarded(gym.make("CartPole-v1", max_episode_steps=5))


def keyed():
    from tdcollect.policies import from_function

    return from_function(lambda observation: observation["position"])


def breaks():
    raise ZeroDivisionError("in the factory\nof the user")


def nothing(*given):
    return None


number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with policies, of a name that no other test imports."""
    name = f"policies_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(POLICIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def typed(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """Run a command line (``@`` stands for the policies' module); its status, stdout and stderr."""

    def run(command: str) -> tuple[int, str, str]:
        (file,) = here.glob("policies_*.py")
        status = main(command.replace("@", file.stem).split())
        out, err = capsys.readouterr()
        return status, out, err

    return run
