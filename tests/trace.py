"""The part of the package that one step, one batch and one test episode enter.

``python tests/trace.py`` prints the figures as JSON; ``--functions`` the functions of each, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tdcollect

PACKAGE = os.path.dirname(tdcollect.__file__) + os.sep
STEPS = 64


class Trace:
    """The calls of the package's functions while something runs in this thread."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.stack: list[tuple[str, str]] = []
        self.to_the_env: list[tuple[str, str]] = []  # at its latest step
        sys.setprofile(self._note)
        try:
            run()
        finally:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: object) -> None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event != "call" or not (name == "step" or file.startswith(PACKAGE)):
            return
        stack = []
        outer = frame
        while outer is not None:
            code, outer = outer.f_code, outer.f_back
            if code.co_filename.startswith(PACKAGE):
                stack.append((code.co_filename[len(PACKAGE) :], code.co_qualname))
        if file.startswith(PACKAGE):
            self.calls[stack[0]] += 1
            self.stack = max(self.stack, stack, key=len)
        else:
            self.to_the_env = stack


def traced() -> tuple[Trace, Trace]:
    """One batch of `STEPS` steps of 8 slots, and one test episode, with the README's policy."""
    torch.manual_seed(0)
    env = tdcollect.make_env("CartPole-v1", num_envs=8, episode_reward=True)
    policy = ProbabilisticActor(
        TensorDictModule(MLP(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    collector = tdcollect.Collector(env, policy, frames_per_batch=8 * STEPS, total_frames=-1)
    collector.set_seed(0)
    batches = iter(collector)
    next(batches)
    next(batches)
    batch = Trace(lambda: next(batches))
    collector.shutdown()

    def evaluate(episodes: int) -> object:
        return tdcollect.evaluate("CartPole-v1", policy, episodes=episodes, seed=0)

    evaluate(2)
    return batch, Trace(lambda: evaluate(1))


def figures(batch: Trace, episode: Trace) -> dict[str, int]:
    """The figures of ``tests/limits.toml``: a function of a step is one called by nearly all."""
    step = [function for function, calls in batch.calls.items() if calls >= STEPS - 4]
    return {
        "files of one step": len({file for file, _ in step}),
        "functions of one step": len(step),
        "frames from iteration to the env": len(batch.to_the_env),
        "functions of one batch": len(batch.calls),
        "files of one test episode": len({file for file, _ in episode.calls}),
        "functions of one test episode": len(episode.calls),
        "stack of one test episode": len(episode.stack),
    }


if __name__ == "__main__":
    traces = traced()
    if "--functions" in sys.argv:
        for title, trace in zip(("batch", "test episode"), traces, strict=True):
            for (file, function), calls in sorted(trace.calls.items()):
                print(f"{title}: {calls:6} {file}: {function}")
            print(f"{title}, deepest stack:", *map(": ".join, reversed(trace.stack)), sep="\n    ")
    print(json.dumps(figures(*traces)))
