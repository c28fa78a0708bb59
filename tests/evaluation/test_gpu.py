"""Evaluation with a policy on a GPU: a real one, or one that is played on the CPU.

On the played one the arithmetic is the CPU's, so that ledgers equal those of the CPU.
"""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import GRUModule, LSTMModule

from tdcollect import EvaluationCollector
from tdcollect.evaluation import EvaluationSettings
from tdcollect.evaluation.episodes.inference import DrawByRow, Inference, LikeRows, draws
from tdcollect.evaluation.manifest import describe
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.workers.worker import Job, set_policy, snapshot

from ..simulated_cuda import Crossings, simulated
from .envs import Walk
from .ledger import RANDOM, digest
from .policies import (
    DRAWS,
    attention,
    categorical,
    deterministic,
    drawn_by_row,
    epsilon_greedy,
    recurrent,
    tanh_normal,
)
from .torchrl_envs import Drift

push = partial(Walk, spaces.Box(-1, 1, (1,)))


def hooked() -> nn.Module:
    """The actor that draws, called as it is because of a hook."""
    policy = categorical()
    policy.register_forward_hook(lambda *_: None)
    return policy


lstm = partial(recurrent, partial(LSTMModule, python_based=True))
POLICIES: dict[str, tuple[Callable[[], Any], Any]] = {
    "hooked": (hooked, Walk),
    "tanh-normal": (tanh_normal, push),
    "epsilon-greedy": (epsilon_greedy, Walk),
    "lstm": (lstm, Walk),
    "attention": (attention, Walk),
    "random": (lambda: None, push),
}


@pytest.mark.parametrize("name", POLICIES)
def test_any_number_of_slots_gives_one_ledger(name: str, cuda: torch.device) -> None:
    make, env = POLICIES[name]
    policy = make()
    other = {digest(env, policy, 5, num_envs=2, **RANDOM)} if simulated() else set()
    if policy is not None:
        policy.to(cuda)
    slots = (5,) if simulated() else (1, 2, 5)
    found = {digest(env, policy, 5, device=cuda, num_envs=count, **RANDOM) for count in slots}
    if name == "hooked":  # taken apart or not
        found.add(digest(env, categorical().to(cuda), 5, **RANDOM))
    assert len(found | other) == 1


TAG = torch.Tag.nondeterministic_seeded
TAGGED = {
    name: func
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::")
    for packet in [getattr(torch.ops.aten, name[6:].partition(".")[0], None)]
    for func in [getattr(packet, name.partition(".")[2] or "default", None)]
    if func is not None and TAG in func.tags
}
"""All operations of torch that have the tag of random ones."""


def kind_of(name: str, arguments: set[str]) -> str:
    if re.search("_backward|_sdp_choice|softmax_with_shape|_no_dropout_inplace", name):
        return "never: it chooses a kernel, or takes draws of before"
    if "dropout_p" in arguments:
        return "attention: by its dropout_p"
    if "dropout" in arguments:
        return "a recurrent layer or its dropout: by its dropout, in training"
    if "dropout" in name:
        return "dropout: by its p, in training"
    return "rrelu: in training" if "training" in arguments else "a distribution: always"


@pytest.mark.parametrize("name", TAGGED)
def test_operations_draw_if_their_dropout_and_training_say_so(name: str) -> None:
    func = TAGGED[name]
    arguments = {argument.name for argument in func._schema.arguments}
    kind = kind_of(name, arguments)
    rates = arguments & {"dropout", "dropout_p", *(["p"] if "dropout" in name else [])}
    trains = arguments & {"train", "training"}
    for rate, train in product((0.0, 0.5), (False, True)):
        given = {**dict.fromkeys(rates, rate), **dict.fromkeys(trains, train)}
        if "p" in arguments - rates:
            given["p"] = 0.0  # a probability, of bernoulli say
        expected = not (rates and not rate) and not (trains and not train)
        assert draws(func, (), given) == (expected and not kind.startswith("never")), kind
    assert rates | trains or kind.startswith(("a distribution", "never"))
    if kind.startswith("a distribution"):
        assert "generator" in arguments or re.search(r"rand|normal|uniform|dropout_mask", name)


def test_what_an_operation_draws_by_default_is_read_off_its_schema() -> None:
    assert not draws(torch.ops.aten.rrelu.default, [torch.ones(2)])
    assert draws(torch.ops.aten.native_dropout.default, [torch.ones(2), 0.5, None])
    assert not draws(torch.ops.aten.relu.default, [torch.ones(2)])
    attend = attention().get_submodule("module.0.module")
    with DrawByRow(4) as by_row:
        attend(torch.ones(4, 3))
    assert by_row.draws == 0


def test_weights_that_an_operation_hands_back_are_no_rows() -> None:
    schema = torch.ops.aten._cudnn_rnn.default._schema
    for change, unlike in ((0.0, False), (torch.arange(16.0)[:, None], True)):
        watch, rows, weights = LikeRows(16), torch.ones(16, 4), torch.arange(13440.0)
        watch.follow([rows])
        # Recurrent operations hand back the batch and the weights beside what they compute.
        watch.note(schema, (rows, weights), (rows, rows * 2 + change, weights))
        assert watch.unlike is unlike
    watch, rows, kept = LikeRows(16), torch.ones(16, 1), torch.arange(16.0)[:, None]
    watch.follow([rows])
    # What is written to is computed.
    watch.note(torch.ops.aten.add_.Tensor._schema, (kept, rows), kept.add_(rows))
    assert watch.unlike


class There(Drift):
    """The drift, on any device; its noise comes from that device's generator too."""

    longest = 4

    def __init__(self, device: Any = None):
        super().__init__()
        self.to(device or "cpu")

    def noise(self) -> torch.Tensor:
        scale = 1 + random.random() + np.random.normal()  # noqa: NPY002
        return torch.randn(3, device=self.device) * scale


def test_torchrl_envs_and_policies_may_be_on_any_device(cuda: torch.device) -> None:
    on_cpu = digest(There, categorical(), 2, **RANDOM)
    for env_device, policy_device in (("cpu", cuda), (cuda, "cpu"), (cuda, cuda)):
        env, policy = partial(There, env_device), categorical().to(policy_device)
        slots = (2,) if simulated() else (1, 2)
        found = {digest(env, policy, 2, num_envs=count, **RANDOM) for count in slots}
        assert len(found) == 1
        assert not simulated() or found == {on_cpu}


@contextmanager
def crossings_by_step() -> Iterator[list[list[int]]]:
    """Count the copies up, copies down and waits from one call of the policy to the next."""
    counted: list[tuple[int, int, int]] = []
    found: list[list[int]] = []
    call = Inference.act
    with pytest.MonkeyPatch.context() as patch, Crossings() as crossings:

        def watched(self: Inference, *args: Any) -> None:
            counted.append((len(crossings.ups), len(crossings.downs), len(crossings.waits)))
            call(self, *args)

        patch.setattr(Inference, "act", watched)
        yield found
    for before, after in pairwise(counted):
        found.append([b - a for a, b in zip(before, after, strict=True)])


CARTPOLE = "CartPole-v1"  # its observations are of 16 bytes, as all CPUs place them
STEPS: dict[str, tuple[Callable[[], Any], Any, int]] = {
    # The observation and, drawn, the noise of each group of 16 slots go up; the action comes down.
    "deterministic": (partial(deterministic, 4), CARTPOLE, 1),
    "categorical": (partial(categorical, 4), CARTPOLE, 1 + 2),
    "torchrl-env": (partial(deterministic, 4), partial(GymEnv, CARTPOLE, device="cpu"), 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_once_for_the_gpu_however_many_slots_there_are(
    name: str, cuda: torch.device
) -> None:
    make, env, ups = STEPS[name]
    policy = make().to(cuda)
    with crossings_by_step() as found:
        digest(env, policy, 32, num_envs=32, max_episode_steps=5, **RANDOM)
    assert found[3] == [ups, 1, 1]


def test_random_numbers_go_on_as_without_an_evaluation(cuda: torch.device) -> None:
    generators = torch.default_generator, torch.cuda.default_generators[0]
    before = [generator.get_state() for generator in generators]
    digest(partial(There, cuda), categorical().to(cuda), 2, num_envs=2, **RANDOM)
    for generator, state in zip(generators, before, strict=True):
        assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("name", [name for name in DRAWS if name != "generator"])
def test_numbers_are_drawn_on_the_cpu(name: str, cuda: torch.device) -> None:
    logits = torch.linspace(-1, 1, 16).view(8, 2)

    there, here = drawn_by_row(name, logits.to(cuda)), drawn_by_row(name, logits)
    assert there.device == cuda
    # Where the numbers' parameters are computed on the device, they may round otherwise.
    torch.testing.assert_close(there.cpu(), here)
    if simulated():
        assert torch.equal(there.cpu(), here)


def test_the_manifest_names_the_gpu_and_its_settings(cuda: torch.device) -> None:
    def platform(policy: Any) -> Any:
        with EvaluationCollector(Walk, policy, 1) as collector:
            return describe(collector)["platform"]

    policy = deterministic()
    assert "gpu" not in platform(policy)
    assert platform(policy.to(cuda))["gpu"]["name"] == torch.cuda.get_device_name(cuda)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, in_tf32 in (("highest", False), ("high", True)):
            torch.set_float32_matmul_precision(precision)
            assert platform(policy)["gpu"]["tf32"]["matmul"] is in_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_policy_elsewhere_than_its_device_is_refused(cuda: torch.device) -> None:
    expected = r"expected a policy on cuda:0, as device says, got one on cpu; move it: policy.to\("
    with pytest.raises(ValueError, match=expected):
        EvaluationCollector(Walk, deterministic(), 2, device="cuda")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"got device='cuda', and torch sees 0 GPUs"):
        EvaluationCollector(Walk, deterministic(), 2, device="cuda")


def test_commands_and_workers_move_their_own_policy(cuda: torch.device) -> None:
    name = "tests.evaluation.policies:deterministic"
    _, policy = Request(CARTPOLE, name, device="cuda").make()
    assert {value.device for value in policy.parameters()} == {cuda}
    job = Job(Walk, deterministic(), EvaluationSettings(2, device="cuda"))
    with job.open() as collector:
        assert {value.device for value in collector.policy.parameters()} == {cuda}
        for finished in collector.run(keep_trajectories=True):
            assert {one.device.type for one in finished.data.values(True, True)} == {"cpu"}
    weights = pickle.loads(snapshot(policy, "policy"))
    assert {value.device.type for value in weights.tensors.values(True, True)} == {"cpu"}


@pytest.mark.kernels
def test_weights_that_are_set_go_up(cuda: torch.device) -> None:
    given, policy = deterministic(), deterministic().to(cuda)
    for parameter in policy.parameters():
        parameter.data.zero_()
    weights = pickle.loads(snapshot(given, "policy"))
    set_policy(policy, weights)
    for one, other in zip(given.parameters(), policy.parameters(), strict=True):
        assert other.device == cuda
        assert torch.equal(one, other.cpu())


def made(cells: int, convolves: bool = False) -> nn.Module:
    """An actor with two layers of so many cells, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, cells), nn.Tanh(), nn.Linear(cells, cells), nn.Tanh()]
        if convolves:
            layers = [nn.Unflatten(-1, (1, 4)), nn.Conv1d(1, cells, 4), nn.Flatten()]
        return categorical(4, network=nn.Sequential(*layers, nn.Linear(cells, 2)))


REAL: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "64 cells, drawn": (partial(made, 64), RANDOM),
    "512 cells": (partial(made, 512), {}),
    "convolution": (partial(made, 64, convolves=True), RANDOM),
    "GRU": (partial(recurrent, GRUModule, 4), RANDOM),
    "LSTM": (partial(recurrent, LSTMModule, 4), RANDOM),
    "attention": (partial(attention, 4), RANDOM),
}


@pytest.fixture(params=[False, True], ids=["default", "deterministic"])
def algorithms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's default algorithms, and those that are deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(request.param)
        yield
        torch.use_deterministic_algorithms(before)


@pytest.mark.kernels
@pytest.mark.usefixtures("algorithms")
@pytest.mark.parametrize("name", REAL)
def test_kernels_of_the_gpu_give_one_ledger(name: str, cuda: torch.device) -> None:
    make, settings = REAL[name]
    policy = make().to(cuda)
    run = partial(digest, "CartPole-v1", policy, 64, max_episode_steps=30, **settings)
    ledgers = [run(num_envs=slots) for slots in (1, 7, 64, 64)]
    assert len(set(ledgers)) == 1
