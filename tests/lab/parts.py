"""A small suite for tests: quick envs, policies with and without weights, and its tables."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from tdcollect.lab.suite import Suite

from ..evaluation.envs import Walk
from ..evaluation.policies import categorical, deterministic


class Short(Walk):
    """Walks of at most five steps, of another size."""

    def __init__(self, longest: int = 5):
        super().__init__(longest=longest, size=3)


class Deadly(Walk):
    """Ends its process in the episode of a seed."""

    def __init__(self, deadly: int):
        super().__init__()
        self.deadly = deadly

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed == self.deadly:
            os._exit(3)
        return super().reset(seed=seed)


def net() -> TensorDictModule:
    return deterministic()


def sampling() -> Any:
    return categorical()


def broken() -> Any:
    raise RuntimeError("this policy is broken")


def leaving() -> Any:
    raise SystemExit(3)


def wrong_shape() -> Any:
    return deterministic(ins=7)


HERE = "tests.lab.parts"
FILE = """
[suite]
name = "small"
version = 1
episodes = 6
seed = 3
[defaults]
num_envs = 4
[[tasks]]
name = "walk"
env = "tests.evaluation.envs:Walk"
score = { low = "random", high = 20.0, source = "made up" }
group = "long"
[[tasks]]
name = "short"
env = "tests.lab.parts:Short"
score = { low = -3.0, high = 5.0 }
[[policies]]
name = "random"
factory = "random"
[[policies]]
name = "net"
factory = "tests.lab.parts:net"
checkpoints = "runs/{policy}/{task}/{run}.pt"
runs = [0, 1]
"""


def tables() -> dict[str, Any]:
    return tomllib.loads(FILE)


def changed(where: str, value: Any) -> dict[str, Any]:
    """The tables with an entry set, such as ``tasks.0.name``, or without it for None."""
    found = tables()
    *path, last = where.split(".")
    at: Any = found
    for part in path:
        at = at[int(part)] if part.isdecimal() else at.setdefault(part, {})
    if value is None:
        del at[last]
    else:
        at[int(last) if last.isdecimal() else last] = value
    return found


def save_runs(folder: Path, runs: int = 2) -> None:
    """Write the checkpoints of the policy ``net``."""
    for task in ("walk", "short"):
        for run in range(runs):
            module = net()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.1 * run)
            file = folder / "runs" / "net" / task / f"{run}.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(module.state_dict(), file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of the small suite."""
    save_runs(tmp_path)
    return tmp_path


def small(folder: Path, **changes: Any) -> Suite:
    """The suite of the tables, with some of them changed."""
    return Suite.of({**tables(), **changes}, folder)
