"""Collecting into replay buffers: the stored data, and setups that are refused beforehand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

import tdcollect
from tdcollect import Collector
from tdcollect.collect.arguments import check_arrival_buffer, check_replay_buffer

from ..counting import CountingRules, StatelessCountingPolicy, counting_env
from .oracle import UPSTREAM

pytestmark = pytest.mark.filterwarnings(UPSTREAM)
both_loops = pytest.mark.usefixtures("arrays")

IDS = ("collector", "traj_ids")
RULES = CountingRules(lengths=(6, 9, 5))


def slices(length: int = 4) -> SliceSampler:
    return SliceSampler(slice_len=length, traj_key=IDS, strict_length=True)


def fill(buffer: ReplayBuffer, slots: int | None, batches: int = 6, **options: Any) -> None:
    """Collect into a buffer, 10 steps per slot and batch."""
    collector = Collector(
        counting_env(slots, rules=RULES),
        StatelessCountingPolicy(RULES),
        frames_per_batch=10 * (slots or 1),
        total_frames=10 * (slots or 1) * batches,
        replay_buffer=buffer,
        **options,
    )
    for nothing in collector:
        assert nothing is None


# --------------------------------------------------------------------------------- what is stored


@both_loops
@pytest.mark.behaviour(22)
@pytest.mark.parametrize(("slots", "kept"), [(None, 3), (1, 10), (3, 3), (3, 10)])
def test_slices_are_of_one_slot_and_one_episode(slots: int | None, kept: int) -> None:
    """The observation counts steps and names episode and slot; the buffer wraps around."""
    ndim, n = (1, 1) if slots is None else (2, slots)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10 * n * kept, ndim=ndim), sampler=slices(), batch_size=64
    )
    fill(buffer, slots)
    assert len(buffer) == 10 * n * min(kept, 6)
    sample = buffer.sample()
    before, after = sample["observation"], sample["next", "observation"]
    assert torch.equal(after, before + torch.tensor([1, 0, 0]))
    observation = before.reshape(-1, 4, 3)
    step, episode, slot = observation.unbind(-1)
    assert (step.diff(dim=1) == 1).all()
    assert (episode.diff(dim=1) == 0).all()
    assert (slot.diff(dim=1) == 0).all()
    assert slot.unique().numel() == n


@both_loops
@pytest.mark.behaviour(22)
def test_whole_trajectories_are_stored_one_behind_the_other() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    fill(buffer, 3, trajs_per_batch=1)
    data = buffer[:]
    ends = data["next", "done"].squeeze(-1)
    assert ends[-1]
    assert (data["observation"][1:, 0][ends[:-1]] == 0).all()
    lengths = data["next", "observation"][ends][:, 0]
    assert set(lengths.tolist()) == {5.0, 6.0, 9.0}
    assert lengths.sum() == len(buffer)


# -------------------------------------------------------------------------------- what is refused


def of(storage: Any, **kwargs: Any) -> Callable[[], ReplayBuffer]:
    return lambda: ReplayBuffer(storage=storage, batch_size=8, **kwargs)


REFUSED: dict[str, tuple[Any, int | None, dict[str, Any], str]] = {
    "a-list": (list, 3, {}, "expected replay_buffer to be a replay buffer .*got list"),
    "read-only": (
        of(LazyTensorStorage(90), writer=ImmutableDatasetWriter()),
        *(3, {}, "expected a replay buffer that can be written to"),
    ),
    "too-many-dims": (
        of(LazyTensorStorage(900, ndim=3)),
        *(3, {}, r"at most 2 dimensions for batches \[N, T\].*got ndim=3; make it .*ndim=2\)"),
    ),
    "too-many-dims-unbatched": (
        of(LazyTensorStorage(900, ndim=2)),
        *(None, {}, r"at most 1 dimensions for batches \[T\].*got ndim=2"),
    ),
    "too-many-dims-for-trajectories": (
        of(LazyTensorStorage(900, ndim=2)),
        *(3, {"trajs_per_batch": 2}, r"at most 1 dimensions for trajectories \[length\].*ndim=2"),
    ),
    "slices-of-slots": (
        of(LazyTensorStorage(900), sampler=slices()),
        *(3, {}, r"expected a storage of steps for a SliceSampler, got ndim=1.*ndim=2\)"),
    ),
    "too-small": (
        of(LazyTensorStorage(27, ndim=2)),
        *(3, {}, r"holds a batch, 30 items of batches \[N, T\] with \[3, 10\], got max_size=27"),
    ),
    "too-small-for-slots": (
        of(ListStorage(2)),
        *(3, {}, r"holds a batch, 3 items of batches \[N, T\] with \[3, 10\], got max_size=2"),
    ),
    "too-small-unbatched": (
        of(LazyTensorStorage(9)),
        *(None, {}, r"holds a batch, 10 items of batches \[T\] with \[10\], got max_size=9"),
    ),
}


@pytest.mark.behaviour(22)
@pytest.mark.parametrize("case", REFUSED)
def test_a_buffer_that_cannot_take_the_batches(case: str) -> None:
    make, slots, options, message = REFUSED[case]
    made: list[Any] = []

    def make_env() -> Any:
        made.append(tdcollect.make_env("CartPole-v1", slots))
        made[0]._reset = lambda *args, **kwargs: pytest.fail("the env was started")
        return made[0]

    frames = 10 * (slots or 1)
    with pytest.raises((TypeError, ValueError), match=message):
        Collector(make_env, frames_per_batch=frames, replay_buffer=make(), **options)
    assert made[0].is_closed


TAKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "exactly-a-batch": (of(LazyTensorStorage(30, ndim=2)), {}),
    "rounded-up-to-a-batch": (of(LazyTensorStorage(28, ndim=2)), {}),
    "slots": (of(LazyTensorStorage(3)), {}),
    "single-steps": (of(LazyTensorStorage(2)), {"extend_buffer": False}),
    "flattened": (of(LazyTensorStorage(30)), {"postproc": lambda td: td.reshape(-1)}),
    "thinned": (of(LazyTensorStorage(3)), {"postproc": lambda td: td[:, -1]}),
    "thinned-by-itself": (of(LazyTensorStorage(2), transform=lambda td: td[:1, -1]), {}),
    "trajectories": (of(LazyTensorStorage(20)), {"trajs_per_batch": 1}),
    "best-of": (
        lambda: TensorDictReplayBuffer(
            storage=LazyTensorStorage(5),
            writer=TensorDictMaxValueWriter(rank_key=("next", "reward")),
            batch_size=2,
        ),
        {"postproc": lambda td: td.reshape(-1)},
    ),
}


def test_an_ensemble_that_takes_nothing_says_so_itself() -> None:
    parts = [ReplayBuffer(storage=LazyTensorStorage(90)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="ReplayBufferEnsemble writes are disabled"):
        fill(ReplayBufferEnsemble(*parts), 3)


@pytest.mark.parametrize("case", TAKEN)
def test_a_buffer_that_can(case: str) -> None:
    make, options = TAKEN[case]
    buffer = make()
    fill(buffer, 3, batches=3, **options)
    assert len(buffer)


def test_a_foreign_buffer_that_does_not_say_how_large_it_is_passes() -> None:
    methods = dict.fromkeys(("add", "extend", "sample"), print)
    for said in ({"max_size": 1}, {"ndim": 9}):
        buffer: Any = SimpleNamespace(storage=SimpleNamespace(**said), **methods)
        buffer.transform, buffer.writer = None, RoundRobinWriter()
        check_replay_buffer(buffer, torch.Size([3]), 10)
    check_arrival_buffer(SimpleNamespace(storage=SimpleNamespace(max_size=1)), 3)
