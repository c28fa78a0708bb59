"""The oracle detects each kind of difference, and names its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tdcollect import Collector, make_env

from . import policies
from .envs import ENVS
from .oracle import UPSTREAM, assert_same_record, batches, difference, run

NAN = float("nan")

pytestmark = pytest.mark.filterwarnings(UPSTREAM)


def batch() -> TensorDict:
    content = {
        "a": torch.tensor([[0.0, NAN], [1.0, 2.0]]),
        "next": {"b": torch.arange(12).reshape(2, 2, 3)},
    }
    return TensorDict(content, [2, 2], names=[None, "time"])


def with_transposed(td: TensorDict) -> TensorDict:
    value = td["next", "b"].transpose(1, 2).contiguous().transpose(1, 2)
    td.get("next")._tensordict["b"] = value
    return td


CHANGES: dict[str, tuple[Callable[[TensorDict], TensorDict], str]] = {
    "value": (
        lambda td: td.set(("next", "b"), td["next", "b"] + torch.eye(3)[0].long()),
        r"batch\['next'\]\['b'\]: 4 of 12 values differ, first at \[0, 0, 0\]: 1, the",
    ),
    "sign-of-zero": (
        lambda td: td.set("a", td["a"] * -1 * torch.tensor([[1.0, 1], [-1, -1]])),
        r"batch\['a'\]: 1 of 4 values differ, first at \[0, 0\]: -0.0",
    ),
    "nan-lost": (lambda td: td.set("a", td["a"].nan_to_num()), r"batch\['a'\]: 1 of 4"),
    "dtype": (lambda td: td.set("a", td["a"].double()), r"batch\['a'\]: dtype torch.float64"),
    "shape": (lambda td: td.set("a", td["a"][..., None]), r"batch\['a'\]: shape"),
    "extra": (lambda td: td.set("c", td["a"]), r"lacks \[\], has beyond the parent's \['c'\]"),
    "missing": (lambda td: td.exclude(("next", "b")), r"batch\['next'\]: lacks \['b'\]"),
    "names": (lambda td: TensorDict(td.to_dict(), [2, 2]), r"batch: names"),
    "device": (lambda td: td.to("cpu"), r"batch: device cpu, the parent's has None"),
    "batch-size": (lambda td: TensorDict(td.to_dict(), [2]), r"batch: batch_size"),
    "contiguity": (with_transposed, r"batch\['next'\]\['b'\]: is not contiguous"),
    "kind": (lambda td: lazy_stack(list(td.unbind(0))), r"type LazyStackedTensorDict"),
    "gradient": (lambda td: td.set("a", td["a"].requires_grad_()), r"\['a'\]: requires_grad True"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_difference_is_found_and_named(change: str) -> None:
    make, message = CHANGES[change]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(difference(make(batch()), batch(), "batch"))


def test_a_random_number_too_many_is_noticed() -> None:
    def wasteful(env: object, policy: object, **options: object) -> Collector:
        torch.rand(1)
        return Collector(env, policy, **options)

    runs = [run(c, ENVS["toy"], policies.ones, batches()) for c in (wasteful, Collector)]
    with pytest.raises(AssertionError, match=r"random state after construction\['torch'\]"):
        assert_same_record(*runs)


def test_another_env_is_noticed() -> None:
    makers = [ENVS["cartpole"], lambda: make_env("CartPole-v1", 3, max_episode_steps=2)]
    runs = [run(Collector, make, policies.ones, batches()) for make in makers]
    with pytest.raises(AssertionError, match=r"yield 0\['collector'\]\['traj_ids'\]"):
        assert_same_record(*runs)
