"""Devices: each tensor crosses once, and the batch is the same wherever its parts run.

Where there is no second device, one is played: tensors of class Away say that they are on it, can
be computed with like others, and cannot be read without being brought down.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import Compose, InitTracker, RewardSum, TransformedEnv
from torchrl.modules import GRUModule, OneHotCategorical, ProbabilisticActor

import tdcollect
from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.runner import Runner

AWAY = torch.device("cuda", 0)
NO_CUDA = "no CUDA device on this machine"


class Away(torch.Tensor):
    """A tensor that claims to be on another device."""

    downs = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return AWAY

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError("read on the CPU without being brought down")

    def cpu(self) -> torch.Tensor:
        Away.downs += 1
        return self.as_subclass(torch.Tensor).clone()


class Played(Placement):
    """Moves tensors to and from the simulated device, and counts the moves."""

    pinned = False

    def __init__(self, storing: torch.device | None):
        super().__init__(AWAY, None, storing)
        self.ups: list[tuple[int, ...]] = []

    def copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return value.cpu()
        assert not isinstance(value, Away)
        self.ups.append(tuple(value.shape))
        return value.clone().as_subclass(Away)


def actor() -> Any:
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


def batches(place: Placement | None, count: int = 2, steps: int = 40) -> list[Any]:
    env = TransformedEnv(
        tdcollect.make_env("CartPole-v1", 3, seed=0), Compose(RewardSum(), InitTracker())
    )
    collector = tdcollect.Collector(env, actor(), frames_per_batch=3 * steps)
    torch.manual_seed(1)
    iterator = iter(collector)
    with mock.patch.object(Runner, "place", place):
        return [next(iterator) for _ in range(count)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


@pytest.mark.behaviour(23)
@pytest.mark.behaviour(23)
@pytest.mark.behaviour(23)
@pytest.mark.parametrize("storing", [None, torch.device("cpu"), AWAY], ids=str)
def test_the_batch_is_the_same(storing: torch.device | None) -> None:
    for expected, got in zip(batches(None), batches(Played(storing)), strict=True):
        assert set(expected.keys(True, True)) == set(got.keys(True, True))
        for key, value in expected.items(True, True):
            assert torch.equal(value, plain(got[key])), key


def test_an_observation_goes_up_once() -> None:
    place = Played(None)
    batches(place, count=1)
    assert place.ups == [(3, 4)] * 40  # one for each step, and nothing else


def test_actions_come_down_once() -> None:
    Away.downs = 0
    batches(Played(None), count=1)
    assert Away.downs == 40


def test_what_is_up_is_not_sent_again_to_be_stored() -> None:
    place = Played(AWAY)
    (batch,) = batches(place, count=1)
    singles = [shape for shape in place.ups if shape == (3, 4)]
    together = [shape for shape in place.ups if shape[1:] == (3, 4)]
    ends = int(batch["next", "done"].any(0).sum())
    assert len(singles) == 40
    # What no policy call was given: final observations, and the row after the batch.
    assert [shape[0] for shape in together] == [ends + (not batch["next", "done"][:, -1].any())]


def test_policy_outputs_stay_where_they_are_unless_stored_elsewhere() -> None:
    (batch,) = batches(Played(None), count=1)
    assert isinstance(batch["logits"], Away)
    assert not isinstance(batch["observation"], Away)
    (batch,) = batches(Played(torch.device("cpu")), count=1)
    assert not isinstance(batch["logits"], Away)


def test_no_placement_where_all_is_on_the_cpu() -> None:
    env = tdcollect.make_env("CartPole-v1", 2, device="cpu")
    collector = tdcollect.Collector(env, actor(), frames_per_batch=8, device="cpu")
    assert collector._runner.place is None


@pytest.mark.behaviour(23)
def whole_episodes(**options: Any) -> Any:
    collector = tdcollect.Collector(
        tdcollect.make_env("CartPole-v1", 3), actor(), frames_per_batch=30, **options
    )
    torch.manual_seed(3)
    return collector.collect(episodes=7, seed=1)


@pytest.mark.parametrize("storing", [None, AWAY, torch.device("cpu")])
def test_whole_episodes_are_the_same_where_the_policy_is_elsewhere(
    storing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole_episodes()
    place = Played(storing)
    monkeypatch.setattr(Runner, "place", place)
    monkeypatch.setattr("tdcollect.collect.by_count._on", lambda indices, _: indices)
    batch = whole_episodes()
    for key, value in expected.items(True, True):
        assert torch.equal(value, batch[key].as_subclass(torch.Tensor)), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
@pytest.mark.parametrize("storing_device", [None, "cpu", "cuda:0"])
def test_whole_episodes_with_a_cuda_policy(storing_device: str | None) -> None:
    batch = whole_episodes(policy_device="cuda:0", storing_device=storing_device)
    assert batch["next", "done"].sum() == 7
    inside = ~batch["next", "done"].squeeze(-1)[:-1]
    following, shown = batch["next", "observation"][:-1], batch["observation"][1:]
    assert torch.equal(following[inside], shown[inside])


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
@pytest.mark.parametrize("env_device", [None, "cpu", "cuda:0"])
@pytest.mark.parametrize("storing_device", [None, "cpu", "cuda:0"])
@pytest.mark.parametrize("kind", ["actor", "recurrent"])
def test_cuda_policies_give_the_parents_batches(
    env_device: str | None, storing_device: str | None, kind: str
) -> None:
    policy = actor() if kind == "actor" else recurrent()

    def run(cls: Any) -> list[Any]:
        collector = cls(
            tdcollect.make_env("CartPole-v1", 3, seed=0),
            copy.deepcopy(policy),
            frames_per_batch=120,
            policy_device="cuda:0",
            env_device=env_device,
            storing_device=storing_device,
            auto_register_policy_transforms=True,
        )
        torch.manual_seed(1)
        iterator = iter(collector)
        return [next(iterator) for _ in range(3)]

    for expected, got in zip(run(TorchRLCollector), run(tdcollect.Collector), strict=True):
        for key, value in expected.items(True, True):
            assert value.device == got[key].device, key
            assert torch.equal(value, got[key]), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
@pytest.mark.parametrize("option", ["compile_policy", "cudagraph_policy"])
def test_compiled_cuda_policies_run(option: str) -> None:
    env = tdcollect.make_env("CartPole-v1", 3, seed=0)
    collector = tdcollect.Collector(
        env, actor(), frames_per_batch=120, policy_device="cuda:0", **{option: True}
    )
    iterator = iter(collector)
    for _ in range(4):
        assert next(iterator)["action"].shape == (3, 40, 2)


@pytest.mark.slow
def test_a_compiled_policy_gives_the_parents_batches() -> None:
    def run(cls: Any) -> Any:
        env = tdcollect.make_env("CartPole-v1", 3, seed=0)
        torch.manual_seed(0)
        net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
        collector = cls(env, net, frames_per_batch=120, compile_policy=True)
        iterator = iter(collector)
        return [next(iterator) for _ in range(3)]

    for expected, got in zip(run(TorchRLCollector), run(tdcollect.Collector), strict=True):
        assert (expected == got).all()


def recurrent() -> Any:
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=4,
        hidden_size=5,
        in_keys=["observation", "h"],
        out_keys=["f", ("next", "h")],
        python_based=True,  # the simulated device has no kernels of cuDNN
    )
    head = TensorDictModule(nn.Linear(5, 2), in_keys=["f"], out_keys=["logits"])
    return ProbabilisticActor(
        TensorDictSequential(gru, head),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
