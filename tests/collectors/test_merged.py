"""What several workers say of themselves; their seeds and trajectory ids."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdcollect.collect.run import Part
from tdcollect.collectors.asking import Asking, TrajectoryIds, WorkerFacts, seeded, worker_of


def test_an_explanation_names_workers_that_are_unlike() -> None:
    parts = [Part("env", "Toy", how) for how in ("steps on arrays", "else")]
    asking_ = SimpleNamespace(
        _facts=[WorkerFacts(2, True, (part,)) for part in parts], _slots=[2, 2], num_workers=2
    )
    text = str(Asking.explain(asking_))  # type: ignore[arg-type]
    assert "worker 1: env" in text
    assert "2 workers of 2 slots" in text
    asking_._facts = asking_._facts[:1] * 2
    assert "worker 0" not in str(Asking.explain(asking_))  # type: ignore[arg-type]


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
