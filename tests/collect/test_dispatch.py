"""``backend=`` and ``num_collectors=``: worker processes run tdcollect's collector."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torchrl
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, MultiCollector
from torchrl.collectors import Collector as ParentCollector

from tdcollect import Collector, SyncDataCollector, make_env

from .envs import make_toy
from .oracle import UPSTREAM

pytestmark = [pytest.mark.filterwarnings(UPSTREAM)]

make_toy_env = partial(make_env, make_toy, 2)


class NamesItsCollector(nn.Module):
    """Acts, and records whether its collector is tdcollect's."""

    ours = -1.0

    def register_collector(self, collector: Any) -> None:
        self.ours = float(isinstance(collector, Collector))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        choice = (tensordict["observation"].sum(-1) > 0).long()
        tensordict["action"] = nn.functional.one_hot(choice, 2)
        return tensordict.set("ours", torch.full(tensordict.shape, self.ours))


class SubCollector(Collector):
    """A user's subclass."""


# --------------------------------------------------------------------------------------- direct


@pytest.mark.parametrize("env", [make_toy_env, [make_toy_env], (make_toy_env,)])
@pytest.mark.parametrize("options", [{}, {"backend": "direct"}, {"num_collectors": 1}])
def test_direct_collector_of_one_env(env: Any, options: dict[str, Any]) -> None:
    options = {"backend": "direct", **options}
    collector = Collector(env, frames_per_batch=8, **options)
    assert type(collector) is Collector
    assert next(iter(collector)).shape == (2, 4)


def test_env_by_keyword_and_in_a_list() -> None:
    collector = Collector(create_env_fn=[make_toy_env], frames_per_batch=8)
    assert next(iter(collector)).shape == (2, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_collectors": 2},
        {"sync": True},
        {"sync": False},
        {"backend_options": {"preemptive_threshold": 0.5}},
    ],
)
def test_direct_refuses_what_needs_workers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"backend='direct' is one collector.*backend='process'"):
        Collector(make_toy_env, frames_per_batch=8, backend="direct", **options)


@pytest.mark.parametrize("count", [0, 2])
def test_direct_refuses_another_number_of_envs(count: int) -> None:
    with pytest.raises(ValueError, match=f"expected one env.*got {count}; pass one env"):
        Collector([make_toy_env] * count, frames_per_batch=8)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'threads'"):
        Collector(make_toy_env, frames_per_batch=8, backend="threads")


@pytest.mark.parametrize("count", [0, -1])
def test_number_of_collectors_that_is_not_positive(count: int) -> None:
    with pytest.raises(ValueError, match="num_collectors"):
        Collector(make_toy_env, frames_per_batch=8, num_collectors=count)


# ------------------------------------------------------------------------------------- subclasses


@pytest.mark.parametrize("options", [{"backend": "process"}, {"num_collectors": 2}])
def test_subclass_cannot_be_dispatched(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"not for its subclass SubCollector.*collector_class"):
        SubCollector(make_toy_env, frames_per_batch=8, **options)


def test_subclass_is_made_directly() -> None:
    collector = SubCollector(make_toy_env, frames_per_batch=8)
    assert type(collector) is SubCollector
    assert next(iter(collector)).shape == (2, 4)


def test_collector_is_the_parents_by_type() -> None:
    collector = Collector(make_toy_env, frames_per_batch=8)
    assert isinstance(collector, ParentCollector)
    assert isinstance(collector, BaseCollector)
    assert issubclass(Collector, ParentCollector)
    assert not isinstance(ParentCollector(make_toy_env, frames_per_batch=8), Collector)


def test_sync_data_collector_is_collector() -> None:
    assert SyncDataCollector is Collector


def test_signature_has_all_of_the_parents_parameters() -> None:
    ours = inspect.signature(Collector).parameters
    theirs = inspect.signature(ParentCollector).parameters
    assert {name: ours[name].kind for name in theirs} == {n: p.kind for n, p in theirs.items()}
    assert {n: ours[n].default for n in theirs} == {n: p.default for n, p in theirs.items()}


def test_methods_have_all_of_the_parents_parameters() -> None:
    for name, theirs in inspect.getmembers(ParentCollector, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(Collector, name)).parameters
            missing = set(inspect.signature(theirs).parameters) - set(ours)
            assert not missing, f"{name} lacks {missing}"


# -------------------------------------------------------------------------------------- processes


def drain(collector: BaseCollector, count: int) -> list[TensorDictBase]:
    stream = iter(collector)
    try:
        return [next(stream).clone() for _ in range(count)]
    finally:
        collector.shutdown()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("sync", [True, False])
def test_workers_run_ours(sync: bool) -> None:
    collector = Collector(
        make_toy_env, NamesItsCollector(), frames_per_batch=16, num_collectors=2, sync=sync
    )
    assert isinstance(collector, MultiCollector)
    for batch in drain(collector, 2):
        assert batch.numel() == 16
        assert (batch["ours"] == 1).all()


@pytest.mark.usefixtures("forked_workers")
def test_backend_from_the_context() -> None:
    with torchrl.service_backend("process"):
        collector = Collector(make_toy_env, NamesItsCollector(), frames_per_batch=8, sync=True)
    assert isinstance(collector, MultiCollector)
    (batch,) = drain(collector, 1)
    assert (batch["ours"] == 1).all()


@pytest.mark.usefixtures("forked_workers")
def test_collector_class_in_the_backend_options_is_kept() -> None:
    collector = Collector(
        [make_toy_env],
        NamesItsCollector(),
        frames_per_batch=8,
        backend="process",
        sync=True,
        backend_options={"collector_class": ParentCollector},
    )
    (batch,) = drain(collector, 1)
    assert (batch["ours"] == 0).all()
