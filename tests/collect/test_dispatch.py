"""``backend=`` and ``num_collectors=``: worker processes run tdcollect's collector."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torchrl
from torchrl.collectors import BaseCollector, MultiCollector
from torchrl.collectors import Collector as ParentCollector

from tdcollect import Collector, SyncDataCollector, make_env

from .envs import make_toy
from .oracle import UPSTREAM

pytestmark = [pytest.mark.filterwarnings(UPSTREAM)]

make_toy_env = partial(make_env, make_toy, 2)


class SubCollector(Collector):
    """A user's subclass."""


# --------------------------------------------------------------------------------------- direct


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((make_toy_env,), {"backend": "direct"}),
        (([make_toy_env],), {"num_collectors": 1, "backend": "direct"}),
        (((make_toy_env,),), {}),
        ((), {"create_env_fn": [make_toy_env]}),
    ],
)
def test_direct_collector_of_one_env(args: Any, options: dict[str, Any]) -> None:
    collector = Collector(*args, frames_per_batch=8, **options)
    assert type(collector) is Collector
    assert next(iter(collector)).shape == (2, 4)


DIRECT = r"backend='direct' is one collector.*backend='process'"


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (make_toy_env, {"backend": "direct", "num_collectors": 2}, DIRECT),
        (make_toy_env, {"backend": "direct", "sync": True}, DIRECT),
        (make_toy_env, {"backend": "direct", "sync": False}, DIRECT),
        (make_toy_env, {"backend": "direct", "backend_options": {"x": 0.5}}, DIRECT),
        ([make_toy_env] * 2, {}, "expected one env.*got 2; pass one env"),
        (make_toy_env, {"backend": "threads"}, "'threads'"),
        (make_toy_env, {"num_collectors": 0}, "num_collectors"),
    ],
)
def test_it_is_refused(env: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collector(env, frames_per_batch=8, **options)


# ------------------------------------------------------------------------------------- subclasses


@pytest.mark.parametrize("options", [{"backend": "process"}, {"num_collectors": 2}])
def test_subclass_is_made_directly_and_not_dispatched(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"not for its subclass SubCollector.*collector_class"):
        SubCollector(make_toy_env, frames_per_batch=8, **options)
    collector = SubCollector(make_toy_env, frames_per_batch=8)
    assert type(collector) is SubCollector
    assert next(iter(collector)).shape == (2, 4)


def test_collector_is_the_parents_by_type() -> None:
    assert issubclass(Collector, ParentCollector)
    assert isinstance(Collector(make_toy_env, frames_per_batch=8), BaseCollector)
    assert not isinstance(ParentCollector(make_toy_env, frames_per_batch=8), Collector)
    assert SyncDataCollector is Collector


def test_signatures_have_all_of_the_parents_parameters() -> None:
    ours = inspect.signature(Collector).parameters
    theirs = inspect.signature(ParentCollector).parameters
    assert {name: ours[name].kind for name in theirs} == {n: p.kind for n, p in theirs.items()}
    assert {n: ours[n].default for n in theirs} == {n: p.default for n, p in theirs.items()}
    for name, method in inspect.getmembers(ParentCollector, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(Collector, name)).parameters
            missing = set(inspect.signature(method).parameters) - set(own)
            assert not missing, f"{name} lacks {missing}"


# -------------------------------------------------------------------------------------- processes


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("context", "options", "ours"),
    [
        (nullcontext(), {"num_collectors": 2, "sync": False}, True),
        (torchrl.service_backend("process"), {"sync": True}, True),
        (
            nullcontext(),
            {
                "backend": "process",
                "sync": True,
                "backend_options": {"collector_class": ParentCollector},
            },
            False,
        ),
    ],
)
def test_workers_run_ours(context: Any, options: dict[str, Any], ours: bool) -> None:
    with context:
        collector = Collector(make_toy_env, frames_per_batch=16, **options)
    assert isinstance(collector, MultiCollector)
    stream = iter(collector)
    try:
        for _ in range(2):
            assert next(stream).numel() == 16
        if ours:
            assert "steps on arrays" in str(collector.explain())
        else:
            with pytest.raises(RuntimeError, match=r"expected workers with tdcollect\.Collector"):
                collector.explain()
    finally:
        collector.shutdown()
