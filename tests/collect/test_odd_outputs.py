"""Policies that write other values than dense tensors: same as the parent, and never lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, tensorclass
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import Composite, ListStorage, ReplayBuffer, Unbounded
from torchrl.modules import OneHotCategorical, ProbabilisticActor, RandomPolicy

from tdcollect import Collector, Hooks, evaluate, make_env

from . import mocks
from .envs import ENVS
from .oracle import UPSTREAM, assert_same, batches, check_same

pytestmark = pytest.mark.filterwarnings(UPSTREAM, "ignore:.*use_buffers=False to keep them")


@tensorclass
class Thought:
    value: torch.Tensor
    text: str


def unlike(call: int, batch: torch.Size) -> TensorDictBase:
    rows = [TensorDict({"x": torch.full((*batch, size), float(call))}, batch) for size in (1, 2)]
    return LazyStackedTensorDict(*rows, stack_dim=len(batch))


EXTRAS: dict[str, Callable[[int, torch.Size], Any]] = {
    "text": lambda call, batch: f"call {call}",
    "none": lambda call, batch: None,
    "object": lambda call, batch: NonTensorData(frozenset([call]), batch_size=batch),
    "array": lambda call, batch: torch.full((*batch, 1), call).numpy(),
    "tensordict": lambda call, batch: TensorDict({"a": torch.full((*batch, 1), call)}, batch),
    "dict": lambda call, batch: {"text": "a", "number": torch.full((*batch, 2), call)},
    "tensorclass": lambda call, batch: Thought(
        torch.full((*batch, 1), call), "a", batch_size=batch
    ),
    "unlike": unlike,
}


class Acts(nn.Module):
    """Random actions, and something else."""

    def __init__(self, env: Any, extra: Callable[[int, torch.Size], Any]):
        super().__init__()
        self.action_spec, self.batch, self.extra = env.action_spec, env.batch_size, extra
        self.calls = 0

    def forward(self, observation: torch.Tensor) -> Any:
        self.calls += 1
        return self.action_spec.rand(), self.extra(self.calls, self.batch)


def module(env: Any, extra: str) -> TensorDictModule:
    return TensorDictModule(Acts(env, EXTRAS[extra]), ["observation"], ["action", "extra"])


def function(env: Any, extra: str) -> Callable[[TensorDictBase], TensorDictBase]:
    acts = Acts(env, EXTRAS[extra])

    def policy(td: TensorDictBase) -> TensorDictBase:
        td["action"], td["extra"] = acts(td["observation"])
        return td

    return policy


class Prefers(Acts):
    """Logits of the first action, and something else."""

    def forward(self, observation: torch.Tensor) -> Any:
        self.calls += 1
        return self.action_spec.zero().float(), self.extra(self.calls, self.batch)


def scored(env: Any, extra: str) -> ProbabilisticActor:
    """Draws last, and scores the draw."""
    net = TensorDictModule(Prefers(env, EXTRAS[extra]), ["observation"], ["logits", "extra"])
    return ProbabilisticActor(
        net, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


WAYS = [
    *(("toy", module, None), ("toy", function, False), ("torchrl-gym", scored, None)),
    *(("toy-unbatched", module, False), ("torchrl-gym", function, None)),
]


@pytest.mark.parametrize(("env", "made", "buffers"), WAYS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_parents_batches(env: str, extra: str, made: Any, buffers: Any) -> None:
    check_same(
        ENVS[env],
        lambda env: made(env, extra),
        batches(2),
        lambda: {"use_buffers": buffers, "frames_per_batch": 6},
        catch=True,
    )


def test_text_is_in_the_replay_buffer() -> None:
    env = ENVS["toy"]()
    buffer = ReplayBuffer(storage=ListStorage(100), batch_size=1)
    collector = Collector(
        env, module(env, "text"), frames_per_batch=6, total_frames=12, replay_buffer=buffer
    )
    list(collector)
    texts = buffer[:].get("extra").tolist()
    assert texts == [["call 1", "call 2"]] * 3 + [["call 3", "call 4"]] * 3


def test_text_collected_by_frames() -> None:
    env = ENVS["toy"]()
    collector = Collector(env, module(env, "text"), frames_per_batch=6, use_buffers=False)
    texts = [collector.collect(frames=6).get("extra").tolist() for _ in range(2)]
    assert texts == [[["call 1", "call 2"]] * 3, [["call 3", "call 4"]] * 3]
    assert "no dense tensors" in str(collector.explain())


def test_by_episodes_it_is_refused() -> None:
    env = ENVS["toy"]()
    collector = Collector(env, module(env, "text"), frames_per_batch=6, use_buffers=False)
    with pytest.raises(TypeError, match=r"expected the policy to write dense tensors, got .*extra"):
        collector.collect(episodes=2)


def test_evaluation_leaves_it_out() -> None:
    spec = make_env("CartPole-v1", 16).action_spec
    policy = TensorDictModule(lambda _: (spec.rand(), "text"), ["observation"], ["action", "extra"])
    result = evaluate("CartPole-v1", policy, 2, num_envs=2, progress=False)
    assert [episode.status for episode in result.episodes] == ["completed"] * 2


def test_shapes_that_change_within_a_batch() -> None:
    env = ENVS["toy"]()
    acts = Acts(env, lambda call, batch: torch.zeros(*batch, call))
    policy = TensorDictModule(acts, ["observation"], ["action", "extra"])
    collector = Collector(env, policy, frames_per_batch=6, use_buffers=False)
    with pytest.raises(ValueError, match=r"'extra' in one shape .* got \[3, 1\], then \[3, 2\]"):
        next(iter(collector))


def test_hooks_see_each_step_once() -> None:
    class Seen(Hooks):
        steps = 0
        starts = 0

        def stepped(self, slots: Any, step: TensorDictBase) -> None:
            assert step["extra"]
            Seen.steps += len(slots)

        def episodes_started(self, slots: Any, row: TensorDictBase) -> None:
            Seen.starts += len(slots)

    env = ENVS["toy-unbatched"]()
    collector = Collector(
        env, module(env, "text"), frames_per_batch=6, hooks=Seen(), timers=True, total_frames=12
    )
    assert sum(batch.numel() for batch in collector) == Seen.steps == 12
    assert collector.stats.lifetime.episodes <= Seen.starts <= collector.stats.lifetime.episodes + 1


@pytest.mark.parametrize("name", ["HeterogeneousCountingEnv", "CountingEnv"])
def test_lazily_stacked_entries_and_tensorclasses_are_explained(name: str) -> None:
    env = mocks.ENVS[name]()
    if name == "CountingEnv":
        thought = Composite(value=Unbounded(1), data_cls=Thought)
        env.observation_spec = Composite({**env.observation_spec, "thought": thought})
    collector = Collector(env, mocks.Keyless(env), frames_per_batch=6, use_buffers=False)
    assert "Keyless" in str(collector.explain())
    assert "no tensors of one shape" in str(collector.explain())


def test_vmas_with_unlike_agents() -> None:
    pytest.importorskip("vmas")
    from torchrl.envs import VmasEnv
    from torchrl.envs.utils import MarlGroupMapType

    def made() -> Any:
        group = MarlGroupMapType.ALL_IN_ONE_GROUP
        return VmasEnv("simple_adversary", num_envs=2, group_map=group, max_steps=3, seed=0)

    def script(collector: Any) -> Iterator[Any]:
        if isinstance(collector, Collector):
            assert "no tensors of one shape" in str(collector.explain())
        yield from batches(2)(collector)

    check_same(made, mocks.Keyless, script, lambda: {"frames_per_batch": 10})


def test_neighbours_leave_a_vmas_env_in_a_collector_alone() -> None:
    """VMAS has one random state for all envs of a process, which each that is made sets anew."""
    pytest.importorskip("vmas")
    from torchrl.envs import VmasEnv

    make = partial(VmasEnv, "navigation", n_agents=2, max_steps=5)

    def collected(between: Callable[[], Any], kind: Any = Collector) -> list[TensorDictBase]:
        torch.manual_seed(0)
        env = make(num_envs=2, seed=0)
        policy = RandomPolicy(env.full_action_spec)
        stream = iter(kind(env, policy, frames_per_batch=20, total_frames=60))
        found = [next(stream).clone()]
        between()
        return [*found, *(batch.clone() for batch in stream)]

    def tests() -> None:
        evaluate(partial(make, num_envs=1), None, episodes=1, seed=0, max_episode_steps=5)

    alone = collected(lambda: None, ParentCollector)
    for between in (lambda: make(num_envs=2, seed=7), tests):
        for one, other in zip(collected(between), alone, strict=True):
            assert_same(one, other)
