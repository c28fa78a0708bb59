"""docs/walkthrough.md shows the functions that run, and docs/architecture.md the imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import tdcollect

from .. import sizes
from . import listing

PACKAGE = Path(tdcollect.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "walkthrough.md").read_text()

WAYS = dict(re.findall(r"```way ([^\n]*)\n(.*?)```", PAGE, flags=re.DOTALL))
NAMED = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`[^)]*\)", PAGE)
FILES = sorted(set(re.findall(r"\b(?:[a-z_]+/)*[a-z_]+\.py\b", PAGE)))


class Noting(gym.Env[Any, Any]):
    """Notes the stack of tdcollect's functions at each step, outermost first."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    stacks: ClassVar[list[list[tuple[str, str]]]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 3
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        stack = []
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                name = frame.f_code.co_qualname
                stack.append((file.relative_to(PACKAGE).as_posix(), name))
            frame = frame.f_back
        self.stacks.append(stack[::-1])
        self.left -= 1
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), 1.0, self.left == 0, False, {}


def policy() -> Any:
    torch.manual_seed(0)
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


def collect() -> None:
    collector = tdcollect.Collector(
        tdcollect.make_env(Noting, 2), policy(), frames_per_batch=8, total_frames=16
    )
    list(collector)


def evaluate() -> None:
    tdcollect.evaluate(Noting, policy(), 2, progress=False)


@pytest.mark.parametrize(
    ("way", "run"), [("one step", collect), ("one test episode", evaluate)], ids=["step", "episode"]
)
def test_the_way_is_the_stack_of_the_latest_step(way: str, run: Any) -> None:
    Noting.stacks.clear()
    run()
    shown = [tuple(line.split()[:2]) for line in WAYS[way].splitlines()]
    assert Noting.stacks[-1] == shown


def test_the_files_that_the_page_names_are_there_with_the_functions() -> None:
    assert len(FILES) > 15
    assert [file for file in FILES if not (PACKAGE / file).is_file()] == []
    for name, file in NAMED:
        nodes: Any = ast.parse((PACKAGE / file).read_text()).body
        for part in name.split("."):
            found = [node for node in nodes if getattr(node, "name", None) == part]
            assert found, f"expected {name} in {file}; correct docs/walkthrough.md"
            nodes = found[-1].body


def test_the_listing_of_the_architecture_page_is_that_of_the_package() -> None:
    assert listing.shown() == listing.listing(), "python tests/docs/listing.py writes it"


def test_no_folder_imports_one_of_a_later_stage() -> None:
    stage_of = {folder: i for i, stage in enumerate(listing.STAGES) for folder in stage}
    stages = {sizes.module_of(n): stage_of[n.rpartition("/")[0]] for n in sizes.trees()}
    later = [
        f"{module} imports {target}"
        for module, targets in sizes.imports().items()
        for target in targets
        if stages[module] < stages[target] and module != "tdcollect.__main__"
    ]
    assert later == []


def test_the_architecture_page_has_the_stages() -> None:
    page = listing.PAGE.read_text()
    (line,) = re.findall(r"none of a later stage: (.*?)\. ", page)
    shown = [[*re.findall(r"`(\w+)`", stage)] for stage in line.split(" < ")]
    folders = [[folder for folder in stage if "/" not in folder] for stage in listing.STAGES]
    assert shown == [[folder for folder in stage if folder] for stage in folders]
