"""Envs without rewards, and envs of words: TorchRL's batches, and statistics of what there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import DatasetChatEnv
from torchrl.envs.llm.transforms import SimpleToolTransform

from tdcollect import Collector, Hooks

from .oracle import check_same


class Walk(EnvBase):
    """Adds up actions; an episode ends after a number of steps that its first action decides."""

    def __init__(self, slots: tuple[int, ...]):
        super().__init__(batch_size=slots)
        self.observation_spec = Composite(at=Unbounded((*slots, 2)), shape=slots)
        self.action_spec = Unbounded((*slots, 2))
        self.full_reward_spec = Composite(shape=slots)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"at": torch.zeros(*self.batch_size, 2)}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        at = tensordict["at"] + tensordict["action"].abs()
        done = at.sum(-1, keepdim=True) > 6
        return TensorDict({"at": at, "done": done, "terminated": done}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


class Ends(Hooks):
    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.returns: list[float] = []

    def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
        self.lengths += lengths.tolist()
        self.returns += returns.tolist()


@pytest.mark.parametrize("arrays", [True, False])
@pytest.mark.parametrize("slots", [(), (3,)])
def test_an_env_without_rewards_has_lengths_alone(
    slots: tuple[int, ...], arrays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", arrays)
    make = lambda: TransformedEnv(Walk(slots), StepCounter())  # noqa: E731
    check_same(make, lambda env: None)
    hook = Ends()
    frames = 20 * max(1, *slots, 1)
    collector = Collector(make(), None, frames_per_batch=frames, hooks=hook)
    batch = next(iter(collector))
    latest = collector.stats.latest
    ended = batch["next", "step_count"][batch["next", "done"]].tolist()
    assert sorted(latest.lengths.tolist()) == sorted(ended) == sorted(hook.lengths)
    assert latest.episodes == collector.stats.lifetime.episodes == len(ended) > 0
    assert latest.return_stats is collector.stats.window.return_stats is None
    assert hook.returns == [] == latest.returns.tolist()
    assert collector.stats.window.lengths.tolist() == latest.lengths.tolist()
    assert "episodes" in str(collector.stats)


def answer(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy of words: it counts the words of the last message, and calls a tool on them."""
    prompt = tensordict["history"].prompt
    words = f'<tool>add\n{{"number": {len(prompt[0, -1].content.split())}}}</tool>'
    response = History(role=[["assistant"]], content=[[words]], batch_size=(1, 1))
    tensordict["history"].response = response
    tensordict["history"].full = prompt.extend(response, inplace=False, dim=-1)
    return tensordict


def questions() -> EnvBase:
    data = [{"query": [f"what is {i} + 2, {'please ' * i}?"]} for i in range(64)]
    return DatasetChatEnv.from_dataloader(dataloader=data, batch_size=(1,), data_key="query")


def tools() -> EnvBase:
    adds = SimpleToolTransform({"add": lambda number: f"it is {number + 2}"})
    return TransformedEnv(questions(), adds)


@pytest.mark.parametrize(
    "make", [questions, tools, lambda: TransformedEnv(questions(), StepCounter())]
)
def test_a_chat_has_torchrls_batches(make: Callable[[], EnvBase]) -> None:
    check_same(make, lambda env: answer, make_options=lambda: {"frames_per_batch": 3})
    collector = Collector(make(), answer, frames_per_batch=3, total_frames=6)
    assert "entries that are no tensors" in str(collector.explain())
    first, second = collector
    history = first["history"][0, 0]
    asked = history.prompt[-1].content
    assert f'"number": {len(asked.split())}}}' in history.response.content[0]
    said = first["next", "history"][0, 0].prompt
    assert (said[-1].role == "tool") is (make is tools)
    assert (f"it is {len(asked.split()) + 2}" in said[-1].content) is (make is tools)
    assert second.shape == (1, 3)
    assert collector.stats.latest.steps == 3
    assert collector.stats.latest.returns.size == 0
