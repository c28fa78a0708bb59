"""MultiSyncCollector, MultiAsyncCollector, AsyncCollector: seeds, ids, statistics, states."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torchrl.collectors as upstream
from tensordict.nn import TensorDictModule
from torchrl import service_backend
from torchrl.collectors import distributed
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv

import tdcollect
from tdcollect import Collector, make_env
from tdcollect.collectors import (
    AsyncCollector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    worker_of,
)
from tdcollect.envs.adopted import chain
from tdcollect.seeding import slot_seeds

from ..collect.mocks import ENVS
from ..collect.oracle import UPSTREAM
from .made import assert_same, batches, drawing, ending, noisy, two_slots

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

OBSERVATION, DONE, IDS = "observation", ("next", "done"), ("collector", "traj_ids")
VERSION = ("next", "policy_version")


@pytest.fixture(scope="module")
def pair() -> Iterator[MultiSyncCollector]:
    """Two workers of two slots, whose policy draws."""
    with ending(MultiSyncCollector([two_slots] * 2, drawing(), frames_per_batch=64)) as collector:
        yield collector


# ------------------------------------------------------------------------------------------ seeds


def first_observations(seeds: Iterable[int]) -> torch.Tensor:
    env = gym.make("CartPole-v1")
    return torch.stack([torch.from_numpy(env.reset(seed=seed)[0]) for seed in seeds])


def test_slots_go_on_over_workers_and_a_policy_that_draws_repeats(
    pair: MultiSyncCollector,
) -> None:
    assert pair.set_seed(5, static_seed=True) == 5
    runs = []
    for seed in (3, 3, 4):
        assert pair.set_seed(seed) == chain(seed, 3)[-1]
        runs.append(torch.stack(batches(pair, 3)))
    first = runs[0][OBSERVATION][0, :, :, 0].flatten(0, 1)
    assert torch.equal(first, first_observations(slot_seeds(3, range(4))))
    assert_same(runs[0], runs[1], ids=False)
    assert not torch.equal(runs[0]["action"], runs[2]["action"])
    same = runs[0]["action"][:, 0] == runs[0]["action"][:, 1]
    assert not same.all()  # the workers draw from generators of their own


def test_one_worker_is_one_collector() -> None:
    policy = drawing()
    alone = Collector(two_slots, policy, frames_per_batch=32)
    of_torch, *_ = np.random.SeedSequence(9, spawn_key=(0,)).generate_state(4).tolist()
    torch.manual_seed(of_torch)
    alone.set_seed(9)
    expected = batches(alone, 3)
    with ending(
        MultiSyncCollector([two_slots], policy, frames_per_batch=32, cat_results=0)
    ) as made:
        made.set_seed(9)
        for batch, one in zip(batches(made, 3), expected, strict=True):
            ids = batch[IDS] - batch[IDS].min(), one[IDS] - one[IDS].min()
            assert torch.equal(*ids)
            assert_same(batch, one, ids=False)


def test_envs_of_torchrl_keep_its_chain_of_seeds() -> None:
    env = partial(GymEnv, "CartPole-v1")
    with ending(MultiSyncCollector([env] * 2, noisy(), frames_per_batch=8)) as collector:
        assert collector.set_seed(7) == chain(7, 3)[-1]
        (batch,) = batches(collector, 1)
        expected = [first_observations([seed])[0] for seed in chain(7, 2)]
        assert torch.equal(batch[OBSERVATION][:, 0], torch.stack(expected))


# ------------------------------------------------------------------------- ids, statistics, repr


def test_ids_and_statistics_are_those_of_all_workers(pair: MultiSyncCollector) -> None:
    before = pair.stats.lifetime.steps, pair.stats.lifetime.episodes
    pair.set_seed(0)
    got = torch.stack(batches(pair, 4))
    workers = torch.tensor([0, 1])[None, :, None, None]
    assert torch.equal(worker_of(got[IDS]), workers.expand_as(got[IDS]))
    firsts = got[IDS][0, :, :, 0]
    assert (firsts[:, 1] - firsts[:, 0] == 1).all()
    lifetime, latest = pair.stats.lifetime, pair.stats.latest
    assert lifetime.steps - before[0] == got.numel()
    assert lifetime.episodes - before[1] == int(got[DONE].sum())
    assert latest.steps == 64
    assert set(latest.slots.tolist()) <= {0, 1, 2, 3}
    assert pair.stats.window.episodes == lifetime.episodes
    assert lifetime.return_stats.mean == pytest.approx(pair.stats.window.returns.mean())
    counters = pair.stats()
    assert counters["workers"] == counters["workers_alive"] == 2
    assert pair.stats(workers="per_worker")["worker_1/requested_frames_per_batch"] == 32
    pair.set_seed(0)
    (again,) = batches(pair, 1)
    assert not torch.isin(again[IDS], got[IDS]).any()
    explanation = pair.explain()
    assert [part.name for part in explanation] == ["env", "policy", "policy", "batch", "workers"]
    assert re.search("one process with 4 slots, would be faster|pay", str(explanation))
    assert repr(pair) == (
        "MultiSyncCollector(2 workers, slots=[2, 2], frames_per_batch=64, total_frames=inf)"
    )


# --------------------------------------------------------------------------------- async, versions


@pytest.mark.skipif(
    not hasattr(upstream.Evaluator, "evaluate_episodes"), reason="TorchRL counts these from 0.15 on"
)
def test_versions_that_all_workers_have_go_on_from_a_state_dict() -> None:
    options: dict[str, Any] = {"frames_per_batch": 64, "track_policy_version": True}
    with ending(MultiSyncCollector([two_slots] * 2, drawing(), **options)) as collector:
        collector.update_policy_weights_()
        state = collector.state_dict()
        assert state["policy_version"] == collector.policy_version == 1
    with ending(MultiSyncCollector([two_slots] * 2, drawing(), **options)) as collector:
        collector.load_state_dict(state)
        assert collector.policy_version == 1
        collector.update_policy_weights_()
        assert collector.policy_version == 2
        batch = next(iter(collector))
        assert (batch[VERSION] == 2).all()


def test_async_rows_carry_their_version() -> None:
    made = AsyncCollector(two_slots, drawing(), frames_per_batch=64, track_policy_version=True)
    with ending(made) as collector:
        assert collector.set_seed(2) == chain(2, 2)[-1]
        stream = iter(collector)
        versions = []
        for _ in range(6):
            batch = next(stream)
            assert collector.stats.lifetime.steps >= batch.numel()  # asked while it collects
            versions.append(batch[VERSION])
            collector.update_policy_weights_()
        seen = torch.cat([version[0] for version in versions])
        assert (seen.diff() >= 0).all()
        assert seen[0] == 0
        assert 0 < seen[-1] <= 6
        collector.set_seed(2)
        seeds = first_observations(slot_seeds(2, range(2)))
        assert torch.equal(next(stream)[OBSERVATION][:, 0], seeds)
        assert "AsyncCollector(1 worker, slots=[2]" in repr(collector)


# ----------------------------------------------------------------------------------------- resume


def test_a_collection_goes_on_to_the_bit() -> None:
    env = partial(make_env, "CartPole-v1", 2, resumable=True)

    def made() -> Any:
        return ending(MultiSyncCollector([env] * 2, drawing(), frames_per_batch=40))

    with made() as first, made() as second:
        first.set_seed(3)
        stream = iter(first)
        next(stream)
        state = first.state_dict()
        expected = [next(stream).clone() for _ in range(3)]
        second.load_state_dict(state)
        for one, other in zip(expected, batches(second, 3), strict=True):
            assert_same(one, other)
        assert first.stats.lifetime.episodes == second.stats.lifetime.episodes
        del state["worker1"]
        with pytest.raises(ValueError, match=r"expected the state of 2 workers, got that of 1"):
            second.load_state_dict(state)


# -------------------------------------------------------------------------------------- arguments


SYNC, ASYNC = MultiSyncCollector, MultiAsyncCollector


@pytest.mark.parametrize(
    ("cls", "envs", "options", "error", "text"),
    [
        (SYNC, [two_slots], {"collector_class": "multi"}, ValueError, "function, got 'multi'"),
        (SYNC, [two_slots], {"collector_class": 3}, TypeError, "a class or a function, got 3"),
        (SYNC, [two_slots], {"sync": True}, TypeError, "no sync for a MultiSyncCollector"),
        (SYNC, [two_slots], {"frames_per_batch": 0}, ValueError, "to be a positive int"),
        (SYNC, two_slots, {}, ValueError, "or num_workers, got one function"),
        (ASYNC, [], {}, ValueError, "expected"),
        (ASYNC, ["CartPole-v1"], {}, TypeError, "expected"),
        (MultiCollector, [two_slots], {}, TypeError, "sync to be True or False, got None"),
    ],
)
def test_refused_before_a_worker_starts(
    cls: Any, envs: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        cls(envs, noisy(), **{"frames_per_batch": 8, **options})


def test_a_shared_buffer_of_one_dimension_is_refused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    text = r"got ndim=1; make it LazyTensorStorage\(max_size, ndim=2"
    with pytest.raises(ValueError, match=text):
        MultiSyncCollector([two_slots], noisy(), frames_per_batch=8, replay_buffer=buffer)


def test_single_is_ours_and_arguments_are_given_once() -> None:
    def made(**options: Any) -> Any:
        both = {"num_collectors": 1, "sync": True, "backend_options": options}
        return Collector(two_slots, noisy(), frames_per_batch=8, **both)

    with ending(made(collector_class="single")) as collector:
        assert type(collector) is MultiSyncCollector
        assert isinstance(collector, upstream.MultiSyncCollector)
        assert collector.explain()
    for twice in ({"sync": True}, {"frames_per_batch": 3}):
        with pytest.raises(ValueError, match="expected each argument once"):
            made(**twice)
    for more in ({}, {"backend": "process"}, {"num_collectors": 2}):
        with pytest.raises(TypeError, match="create_env_fn and policy as the only positional"):
            Collector(two_slots, None, 3, frames_per_batch=8, **more)
    with service_backend("thread"), pytest.raises(ValueError, match="by an enclosing torchrl"):
        Collector(two_slots, frames_per_batch=8)


# ------------------------------------------------ uses of workers that TorchRL's own tests make


def pushing(side: int) -> TensorDictModule:
    """A policy that pushes to one side."""
    action = torch.eye(2, dtype=torch.long)[side]
    return TensorDictModule(partial(_always, action), ["observation"], ["action"])


def _always(action: torch.Tensor, observation: torch.Tensor) -> torch.Tensor:
    return action.expand(*observation.shape[:-1], 2)


def test_each_worker_may_have_a_policy_factory_of_its_own() -> None:
    factories = [partial(pushing, side) for side in (0, 1)]
    made = MultiSyncCollector([two_slots] * 2, policy_factory=factories, frames_per_batch=16)
    with ending(made) as collector:
        (batch,) = batches(collector, 1)
    assert batch["action"].argmax(-1).flatten(1).tolist() == [[0] * 8, [1] * 8]


def _texts(rows: Any) -> list[str]:
    return [rows] if isinstance(rows, str) else [text for row in rows for text in _texts(row)]


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_strings_are_those_of_each_batch(cls: Any) -> None:
    """TorchRL's parent shows those of the first batch again, unless use_buffers=False."""
    env = ENVS["CountingEnvWithString"]
    with ending(cls([env] * 2, None, frames_per_batch=8)) as collector:
        found = _texts([batch["string"] for batch in batches(collector, 4)])
    assert len(set(found)) > len(found) - 4  # each is drawn at random
    with pytest.raises(ValueError, match="pass use_buffers=False"):
        cls([env], frames_per_batch=8, use_buffers=True)


def test_rows_of_unlike_agents_reach_the_parent() -> None:
    env = ENVS["HeterogeneousCountingEnv[2]"]
    with ending(MultiSyncCollector([env] * 2, None, frames_per_batch=8)) as collector:
        assert [batch.numel() for batch in batches(collector, 2)] == [8, 8]


# ---------------------------------------------------------------------------------- reset options


def low(slot: int, episode: int) -> dict[str, float]:
    """CartPole starts between these bounds, which tell slot and episode."""
    place = 0.01 * slot + 0.001 * episode
    return {"low": place, "high": place}


def test_signatures_show_the_arguments_by_name() -> None:
    for name in tdcollect.collectors.__all__:
        if name.endswith("Collector"):
            shown = inspect.signature(getattr(tdcollect.collectors, name)).parameters
            assert {"create_env_fn", "frames_per_batch"} <= shown.keys()
            if name.startswith("Multi"):
                assert ("sync" in shown) == (name == "MultiCollector")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["distributed", "rpc"])
def test_on_torch_distributed_they_are_torchrls_collectors_with_ours_in_each_worker(
    backend: str,
) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    collector: Any = Collector(
        [two_slots] * 2,
        noisy(),
        frames_per_batch=40,
        total_frames=80,
        backend=backend,
        backend_options={"launcher": "mp", "tcp_port": port},
        sync=True,
    )
    known = {"distributed": DistributedCollector, "rpc": distributed.RPCCollector}
    assert type(collector) is known[backend]
    assert DistributedCollector is distributed.DistributedCollector
    assert collector.collector_class is Collector
    assert [batch.numel() for batch in collector] == [40] * 2
    collector.shutdown()
