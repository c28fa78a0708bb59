"""Devices: batches are the parent's wherever env, policy and batch are, and tensors cross once.

Where there is no GPU, one is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import (
    ClipTransform,
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import GRUModule, OneHotCategorical, ProbabilisticActor

import tdcollect

from ..simulated_cuda import Crossings, on_gpu
from . import policies, transforms
from .envs import ENVS
from .oracle import UPSTREAM, assert_same_record, batches, check_same, run

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.filterwarnings(UPSTREAM)]

STEPS = 11
GPU = "cuda:0"

# Those that TorchRL takes: without a device of its own, an env of the CPU cannot be reset in part
# there where the policy is on a GPU; with one, the policy needs one, too.
COMBINATIONS = [
    (policy, env, storing)
    for policy, env, storing in product(["cpu", GPU], ["cpu", GPU], [None, "cpu", GPU])
    if GPU in (policy, env, storing)
]


def actor() -> Any:
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


def recurrent() -> Any:
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


class Memory(nn.Module):
    """Reads the output of the step before; called on TensorDicts, as it is of no known class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 2)

    def forward(self, tensordict: Any) -> Any:
        observation = tensordict["observation"]
        memory = tensordict.get("memory", torch.zeros_like(observation[:, :1]))
        logits = self.net(torch.cat([observation, memory], -1))
        memory = 0.9 * memory + logits[:, :1].detach()
        return tensordict.set("memory", memory).set("logits", logits)


def remembering() -> Any:
    sample = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical
    )
    memory = Memory()

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.sample = memory, sample

        def forward(self, tensordict: Any) -> Any:
            return self.sample(self.memory(tensordict))

    return Remembering()


POLICIES: dict[str, Callable[[], Any]] = {
    "actor": actor,
    "recurrent": recurrent,
    "remembering": remembering,
}


def cartpole(*of: Any) -> EnvBase:
    env = tdcollect.make_env("CartPole-v1", 3, seed=0, max_episode_steps=8)
    return TransformedEnv(env, Compose(*of)) if of else env


def collector(
    policy: str | Callable[[], Any] = "actor", env: EnvBase | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    made = POLICIES[policy]() if isinstance(policy, str) else policy()
    env = cartpole() if env is None else env
    frames = env.batch_size.numel() * STEPS
    return tdcollect.Collector(
        env, made, frames_per_batch=frames, auto_register_policy_transforms=True, **options
    )


# ------------------------------------------------------------------------------------ the bits


# Each combination with one of the policies; all of them are slow.
CASES = [
    pytest.param(kind, places, marks=[] if (i + j) % len(POLICIES) == 0 else pytest.mark.slow)
    for i, kind in enumerate(POLICIES)
    for j, places in enumerate(COMBINATIONS)
]


@pytest.mark.behaviour(23)
@pytest.mark.parametrize(("kind", "places"), CASES)
def test_batches_are_the_parents(kind: str, places: tuple[str, str, str | None]) -> None:
    policy, env, storing = places
    if kind == "recurrent" and storing is None and policy != env:
        pytest.skip("TorchRL cannot stack a hidden state that begins on another device")
    check_same(
        lambda: cartpole(RewardSum(), InitTracker()),
        lambda _: POLICIES[kind](),
        batches(2),
        lambda: {
            "policy_device": policy,
            "env_device": env,
            "storing_device": storing,
            "auto_register_policy_transforms": True,
        },
    )


def statistics() -> list[Any]:
    return [
        ObservationNorm(loc=0.3, scale=1.7, in_keys=["observation"]),
        VecNormV2(in_keys=["observation"], decay=0.9),
        RewardScaling(loc=0.5, scale=3.0),
        StepCounter(max_steps=5),
        RewardSum(),
    ]


@pytest.mark.parametrize("options", [{"device": GPU}, {"policy_device": GPU, "env_device": "cpu"}])
def test_transforms_with_tensors_of_their_own(options: dict[str, str]) -> None:
    check_same(
        lambda: cartpole(*statistics()), lambda _: actor(), batches(2), lambda: dict(options)
    )


PLACES = [
    {"policy_device": GPU, "env_device": "cpu"},
    {"policy_device": GPU, "env_device": "cpu", "storing_device": "cpu"},
    {"device": GPU},
]


def same_or_refused(make_env: Any, make_policy: Any, options: dict[str, str]) -> None:
    """Compare with TorchRL where it runs."""
    arguments = make_env, make_policy, batches(2), lambda: dict(options)
    theirs = run(TorchRLCollector, *arguments, catch=True)
    if theirs[-1][0] == "error":
        pytest.skip(f"TorchRL raises {theirs[-1][1][0]}")
    check_same(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("policy", policies.POLICIES)
def test_every_policy(policy: str, options: dict[str, str]) -> None:
    same_or_refused(*policies.case(policy), options)


@pytest.mark.slow
@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("transform", transforms.TRANSFORMS)
def test_every_transform(transform: str, options: dict[str, str]) -> None:
    same_or_refused(lambda: transforms.make(transform), policies.actor, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("env", ENVS)
def test_every_env(env: str, options: dict[str, str]) -> None:
    same_or_refused(ENVS[env], policies.actor, options)


def test_actions_are_waited_for() -> None:
    """TorchRL waits only if it is given ``env_device``, and else steps on what is there."""

    def record(cls: Any, **options: Any) -> Any:
        given = {"policy_device": GPU, "auto_register_policy_transforms": True, **options}
        return run(cls, lambda: GymEnv("CartPole-v1"), lambda _: actor(), batches(2), lambda: given)

    assert_same_record(record(tdcollect.Collector), record(TorchRLCollector, env_device="cpu"))


@pytest.mark.parametrize("kind", POLICIES)
def test_an_env_without_a_device(kind: str) -> None:
    """TorchRL cannot reset its slots in part; the rows are those of an env on the CPU."""
    theirs = collector(kind, policy_device=GPU, env_device="cpu")
    torch.manual_seed(1)
    expected = next(iter(theirs))
    ours = collector(kind, policy_device=GPU)
    torch.manual_seed(1)
    got = next(iter(ours))
    assert set(expected.keys(True, True)) == set(got.keys(True, True))
    for key, value in expected.items(True, True):
        assert torch.equal(value.cpu(), got[key].cpu()), key


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("actor", {"policy_device": GPU, "env_device": "cpu"}),
        ("remembering", {"device": "cuda"}),
        ("recurrent", {"policy_device": GPU, "env_device": "cpu", "storing_device": "cpu"}),
    ],
)
def test_resets_of_some_slots_between_batches(kind: str, options: dict[str, str]) -> None:
    def script(made: Any) -> Iterator[Any]:
        stream = iter(made)
        yield next(stream)
        made.reset(index=[1])
        yield next(stream)
        made.reset()
        yield next(stream)

    check_same(
        lambda: cartpole(RewardSum(), InitTracker()),
        lambda _: POLICIES[kind](),
        script,
        lambda: {**options, "auto_register_policy_transforms": True},
    )


@pytest.mark.parametrize(
    ("storing", "options"), [(None, {}), ("cpu", {"env_device": GPU}), (GPU, {})]
)
def test_whole_episodes(storing: str | None, options: dict[str, str]) -> None:
    def episodes(**options: Any) -> Any:
        made = collector(lambda: nn_policy(), cartpole(StepCounter(max_steps=7)), **options)
        return made.collect(episodes=7, seed=1)

    expected = episodes()
    got = episodes(policy_device=GPU, storing_device=storing, **options)
    for key, value in expected.items(True, True):
        assert torch.equal(value, got[key].cpu()), key


def nn_policy() -> Any:
    """A policy that draws nothing: the GPU has random numbers of its own."""
    net = nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
    net.append(OneHot())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


class OneHot(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(value.argmax(-1), 2)


# ------------------------------------------------------------------------------------ crossings


def crossings(count: int = 1, **options: Any) -> tuple[Any, Crossings]:
    """The last of ``count`` batches, and the crossings while it was collected."""
    stream = iter(collector(**options))
    for _ in range(count - 1):
        next(stream)
    with Crossings() as found:
        batch = next(stream)
    return batch, found


def test_an_observation_goes_up_once_and_an_action_comes_down_once() -> None:
    _, found = crossings(count=2, policy_device=GPU)
    assert found.ups == [(3, 4)] * STEPS
    assert found.downs == [(3, 2)] * STEPS
    # For the actions; and at the end, once, whether the distribution had parameters it refuses.
    assert len(found.waits) == STEPS + 1


def clip() -> ClipTransform:
    return ClipTransform(in_keys=["observation"], low=-0.1, high=0.1)


def waits_per_step(policy: str, of: list[Any], **options: Any) -> float:
    counts = []
    for steps in (10, 14):
        made = collector(policy, cartpole(*(make() for make in of)), **options)
        with Crossings() as found:
            assert made.collect(frames=3 * steps)["next", "done"].any()
        counts.append(len(found.waits))
    return (counts[1] - counts[0]) / 4


@pytest.mark.parametrize(
    ("policy", "named"), [("actor", "policy_device"), ("remembering", "device")]
)
def test_one_wait_per_step(policy: str, named: str) -> None:
    """Ends of episodes, and transforms, add none."""
    assert waits_per_step(policy, [clip, RewardSum], **{named: GPU}) == 1


def test_a_transform_on_the_gpu_that_ends_episodes_is_waited_for() -> None:
    limit = partial(StepCounter, max_steps=5)
    assert waits_per_step("actor", [clip, limit], device=GPU) == 2
    assert waits_per_step("actor", [limit], device=GPU) == 1


def test_what_has_crossed_does_not_cross_again_to_be_stored() -> None:
    batch, found = crossings(policy_device=GPU, storing_device=GPU)
    singles = [shape for shape in found.ups if shape == (3, 4)]
    together = [shape for shape in found.ups if shape[1:] == (3, 4)]
    ends = int(batch["next", "done"].any(0).sum())
    assert len(singles) == STEPS
    # What no policy call was given: final observations, and the row after the batch.
    assert [shape[0] for shape in together] == [ends + (not batch["next", "done"][:, -1].any())]
    _, found = crossings(policy_device=GPU, storing_device="cpu")
    assert [shape for shape in found.downs if shape[-2:] == (3, 2)].count((3, 2)) == STEPS


def test_nor_where_a_batch_has_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdcollect.collect.step_dict._CHUNK_BYTES", 1)
    batch, found = crossings(policy_device=GPU, storing_device=GPU)
    observations = sum(shape[0] if len(shape) == 3 else 1 for shape in found.ups if 4 in shape[1:])
    ends = int(batch["next", "done"].any(0).sum())
    assert observations == STEPS + ends + (not batch["next", "done"][:, -1].any())


def test_outputs_stay_where_they_are_unless_stored_elsewhere() -> None:
    batch, _ = crossings(policy_device=GPU)
    assert on_gpu(batch["logits"])
    assert not on_gpu(batch["observation"])
    batch, _ = crossings(policy_device=GPU, storing_device="cpu")
    assert not on_gpu(batch["logits"])


def test_no_placement_where_all_is_on_the_cpu() -> None:
    made = collector(device="cpu")
    assert "devices" not in {part.name for part in made.explain()}


# --------------------------------------------------------------------------------- real kernels


@pytest.mark.kernels
@pytest.mark.parametrize("option", ["compile_policy", "cudagraph_policy"])
def test_compiled_cuda_policies_give_the_parents_batches(option: str) -> None:
    def net(_: Any) -> Any:
        return nn_policy()

    options = {"policy_device": GPU, "env_device": "cpu", option: True}
    check_same(cartpole, net, batches(4), lambda: dict(options))


@pytest.mark.kernels
@pytest.mark.parametrize("option", ["compile_policy", "cudagraph_policy"])
def test_compiled_cuda_policies_that_draw(option: str) -> None:
    stream = iter(collector(policy_device=GPU, **{option: True}))
    for _ in range(4):
        assert next(stream)["action"].shape == (3, STEPS, 2)


@pytest.mark.kernels
def test_no_implicit_synchronisation_beyond_the_actions() -> None:
    """CUDA itself counts: it warns at each wait that was not asked for."""
    stream = iter(collector(policy_device=GPU))
    next(stream)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as found:
            next(stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) <= STEPS + 1


@pytest.mark.slow
def test_a_compiled_policy_gives_the_parents_batches() -> None:
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    check_same(cartpole, lambda _: net, batches(3), lambda: {"compile_policy": True})
