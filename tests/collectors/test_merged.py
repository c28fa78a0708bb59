"""Statistics of several workers, merged; their seeds and trajectory ids."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdcollect.collect.run import Part
from tdcollect.collect.statistics import Collection, Statistics
from tdcollect.collectors.asking import (
    TrajectoryIds,
    WorkerReport,
    merged_explanation,
    merged_states,
    seeded,
    worker_of,
)

RETURNS = st.lists(st.lists(st.floats(-100, 100), max_size=5), min_size=1, max_size=4)


def collection(returns: list[float], seconds: float = 1.0) -> Collection:
    count = len(returns)
    return Collection(
        steps=10 * max(count, 1),
        seconds=seconds,
        seconds_between=None,
        env_seconds=None,
        policy_seconds=None,
        slots=np.arange(count) % 2,
        returns=np.array(returns, np.float64),
        lengths=np.arange(1, count + 1),
    )


def filled(collections: list[Collection]) -> Statistics:
    statistics = Statistics(100, True, dict)
    for one in collections:
        statistics.add(one)
    return statistics


@given(st.lists(RETURNS, min_size=1, max_size=3))
def test_merged_statistics_are_those_of_one(workers: list[list[list[float]]]) -> None:
    collections = [[collection(returns) for returns in worker] for worker in workers]
    states = [filled(of_worker).save_state() for of_worker in collections]
    merged = Statistics(100, True, dict)
    merged.load_state(merged_states(states, [2] * len(workers), 100))
    whole = filled([one for of_worker in collections for one in of_worker])
    assert merged.lifetime.steps == whole.lifetime.steps
    assert merged.lifetime.episodes == whole.lifetime.episodes
    for name in ("return_stats", "length_stats"):
        ours, expected = getattr(merged.lifetime, name), getattr(whole.lifetime, name)
        assert ours == (expected and pytest.approx(expected, abs=1e-9))
    assert sorted(merged.window.returns) == sorted(whole.window.returns)
    latest = [of_worker[-1] for of_worker in collections]
    assert merged.latest is not None
    assert merged.latest.steps == sum(one.steps for one in latest)
    slots = [slot + 2 * w for w, one in enumerate(latest) for slot in one.slots]
    assert merged.latest.slots.tolist() == slots


def test_a_window_holds_the_latest_of_each_in_turn() -> None:
    states = [filled([collection([1, 2, 3])]).save_state(), filled([collection([9])]).save_state()]
    returns, _ = merged_states(states, [2, 2], 3)["window"]
    assert returns.tolist() == [2, 9, 3]
    assert merged_states([filled([]).save_state()] * 2, [1, 1], 100)["latest"] is None


def test_the_returns_of_groups_are_merged() -> None:
    ones = [
        replace(collection(returns), group_returns={"a/reward": np.array(returns) + 1})
        for returns in ([1.0, 2.0], [], [9.0])
    ]
    merged = Statistics(100, True, dict)
    merged.load_state(merged_states([filled([one]).save_state() for one in ones], [2] * 3, 100))
    assert merged.latest is not None
    assert merged.latest.group_returns["a/reward"].tolist() == [2, 3, 10]


def report(seconds: float, how: str = "steps on arrays") -> WorkerReport:
    state = filled([collection([1.0], seconds)]).save_state()
    return WorkerReport(state, (Part("env", "Toy", how),))


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([report(1.0)] * 2, "a batch takes one 1e+03 ms: several processes pay"),
        (
            [report(1e-4)] * 2,
            "takes one 0.1 ms: larger batches, or one process with 4 slots, would be",
        ),
        ([report(1e-4)], "takes one 0.1 ms"),
        ([WorkerReport(None, ())], "whether they pay is known after the first batch"),
        ([report(1.0), report(1.0, "else")], "worker 1: env"),
    ],
)
def test_explanation(reports: list[WorkerReport], text: str) -> None:
    assert text in str(merged_explanation(reports, [2] * len(reports)))


# ------------------------------------------------------------------------------------------ seeds


def test_generators_are_seeded() -> None:
    env = SimpleNamespace(set_seed=lambda seed, static_seed: seed, env=None)

    def drawn() -> tuple[Any, ...]:
        numpys = np.random.random()  # noqa: NPY002
        return torch.rand(()).item(), numpys, random.random()

    seeded(env, 0, 3, 1)
    first = drawn()
    seeded(env, 0, 3, 1)
    assert drawn() == first
    for root, worker in ((3, 2), (4, 1)):
        seeded(env, 0, root, worker)
        assert not {*drawn()} & {*first}


# --------------------------------------------------------------------------------- trajectory ids


@given(st.integers(0, 1000), st.lists(st.integers(1, 50), max_size=5))
def test_ids_count_from_the_worker(worker: int, counts: list[int]) -> None:
    ids = TrajectoryIds(worker)
    given_ = [ids.get_traj_and_increment(count) for count in counts]
    again = TrajectoryIds(0)
    again.load_state_dict(ids.state_dict())
    got = torch.cat([*given_, again.get_traj_and_increment()])
    assert torch.equal(got, (worker << 40) + torch.arange(sum(counts) + 1))
    assert (worker_of(got) == worker).all()
