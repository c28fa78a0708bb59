"""Envs whose tensors live on the GPU: TorchRL's batches, and no wait where the env allows for it.

Where there is no GPU, one is simulated.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import (
    Compose,
    InitTracker,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import ProbabilisticActor

import tdcollect

from ..simulated_cuda import Crossings
from .oracle import UPSTREAM, batches, check_same

_SPEC = importlib.util.spec_from_file_location(
    "torch_cartpole", Path(__file__).parents[2] / "benchmarks" / "torch_cartpole.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
torch_cartpole: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(torch_cartpole)

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.filterwarnings(UPSTREAM)]

SLOTS, STEPS = 5, 20


class Asked(torch_cartpole.TorchCartPole):
    """Is reset where flags say so, as TorchRL does."""

    resets_by_mask = False


class Fixed(torch_cartpole.TorchCartPole):
    """Is reset by mask, and draws nothing: the batches are TorchRL's."""

    def fresh(self) -> torch.Tensor:
        count = 4 * SLOTS
        return torch.linspace(-0.05, 0.05, count, device=self.device).view(SLOTS, 4)


def actor(_: Any = None) -> Any:
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


class Memory(nn.Module):
    """Reads its output of the step before."""

    def forward(self, tensordict: Any) -> Any:
        observation = tensordict["observation"]
        memory = tensordict.get("memory", torch.zeros_like(observation[:, 0]))
        tensordict["memory"] = memory = 0.9 * memory + observation[:, 2]
        return tensordict.set("action", (memory > 0).long())


def books() -> list[Any]:
    return [StepCounter(max_steps=13), RewardSum(), InitTracker()]


def normalized() -> list[Any]:
    return [ObservationNorm(loc=0.3, scale=1.7, in_keys=["observation"]), RewardSum()]


def learning() -> list[Any]:
    return [VecNormV2(in_keys=["observation"], decay=0.9), RewardSum()]


def transformed(env: Any, transforms: list[Any]) -> Any:
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


@pytest.mark.parametrize(
    ("device", "of", "kind"),
    [
        ("cuda:0", books, Asked),
        ("cuda:0", learning, Fixed),
        ("cuda", list, Asked),
        ("cuda", books, Fixed),
        ("cpu", learning, Asked),
    ],
)
def test_batches_are_the_parents(device: str, kind: Any, of: Any) -> None:
    check_same(
        lambda: transformed(kind(SLOTS, device), of()),
        actor,
        batches(2),
        lambda: {"frames_per_batch": SLOTS * STEPS, "device": device},
    )


PLACES = [
    {"policy_device": "cuda:0"},
    {"policy_device": "cuda:0", "storing_device": "cpu"},
    {"policy_device": "cpu", "storing_device": "cuda:0"},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Asked, Fixed])
@pytest.mark.parametrize("policy", [actor, lambda _: Memory()])
@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("of", [list, books, normalized, learning])
def test_wherever_policy_and_batch_are(
    kind: Any, policy: Any, options: dict[str, str], of: Any
) -> None:
    check_same(
        lambda: transformed(kind(SLOTS, "cuda:0"), of()),
        policy,
        batches(3),
        lambda: {"frames_per_batch": SLOTS * STEPS, **options},
    )


def test_resets_by_mask_that_draw_are_those_of_a_plain_loop() -> None:
    env = torch_cartpole.TorchCartPole(SLOTS, "cuda:0")
    net = nn.Linear(4, 2).to("cuda:0")
    policy = TensorDictModule(lambda x: net(x).argmax(-1), ["observation"], ["action"])
    collector = tdcollect.Collector(env, policy, frames_per_batch=SLOTS * STEPS, device="cuda:0")
    torch.manual_seed(0)
    collector.reset()
    (batch,) = [collector.collect(frames=SLOTS * STEPS)]

    torch.manual_seed(0)
    state, count = env.fresh(), torch.zeros((SLOTS, 1), device="cuda:0")
    for step in range(STEPS):
        assert torch.equal(batch["observation"][:, step], state)
        state, fell = torch_cartpole.physics(state, net(state).argmax(-1))
        count = count + 1
        done = fell | (count >= torch_cartpole.STEPS)
        assert torch.equal(batch["next", "observation"][:, step], state)
        state = torch.where(done, env.fresh(), state)
        count = torch.where(done, 0, count)
    assert batch["next", "done"].any()


def waits_per_step(env: Any) -> float:
    counts = []
    for steps in (STEPS, STEPS + 4):
        collector = tdcollect.Collector(
            env(), actor(), frames_per_batch=SLOTS * steps, device="cuda:0"
        )
        stream = iter(collector)
        next(stream)
        with Crossings() as found:
            assert next(stream)["next", "done"].any()
        counts.append(len(found.waits))
    return (counts[1] - counts[0]) / 4


def test_nothing_is_waited_for_where_resets_go_by_mask() -> None:
    def env() -> Any:
        of = [StepCounter(), RewardSum(), InitTracker()]
        return transformed(torch_cartpole.TorchCartPole(SLOTS, "cuda:0"), of)

    assert waits_per_step(env) == 0


def test_one_wait_per_step_elsewhere() -> None:
    assert waits_per_step(lambda: Asked(SLOTS, "cuda:0")) == 1


@pytest.mark.parametrize(("kind", "options"), [(Fixed, PLACES[2]), (Asked, PLACES[1])])
def test_batches_of_several_chunks(
    kind: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.collect.step_dict._GPU_CHUNK_BYTES", 900)
    check_same(
        lambda: transformed(kind(SLOTS, "cuda:0"), books()),
        actor,
        batches(2),
        lambda: {"frames_per_batch": SLOTS * STEPS, **options},
    )


class InPlace(Asked):
    """Writes each observation into the same memory, as simulators do."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.buffer = torch.zeros(SLOTS, 4, device=self.device)

    def _step(self, tensordict: Any) -> Any:
        return self._in_buffer(super()._step(tensordict))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        return self._in_buffer(super()._reset(tensordict, **kwargs))

    def _in_buffer(self, made: Any) -> Any:
        self.buffer.copy_(made["observation"])
        return made.set("observation", self.buffer)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cuda:0", {"policy_device": "cpu"}),
        ("cuda:0", {"policy_device": "cuda:0", "storing_device": "cpu"}),
        ("cpu", {"policy_device": "cuda:0", "env_device": "cpu", "storing_device": "cpu"}),
    ],
)
def test_an_env_that_writes_into_the_same_memory(device: str, options: dict[str, str]) -> None:
    def batch(kind: Any) -> Any:
        torch.manual_seed(0)
        collector = tdcollect.Collector(
            kind(SLOTS, device), Memory(), frames_per_batch=SLOTS * STEPS, **options
        )
        torch.manual_seed(1)
        collector.reset()
        return collector.collect(frames=SLOTS * STEPS).cpu()

    expected, got = batch(Asked), batch(InPlace)
    for key, value in expected.items(True, True):
        assert torch.equal(value, got[key]), key


@pytest.mark.parametrize(("steps", "tracked"), [(2, True), (STEPS, False)])
def test_a_batch_without_an_end_and_one_without_ids(steps: int, tracked: bool) -> None:
    check_same(
        lambda: Fixed(SLOTS, "cuda:0"),
        actor,
        batches(2),
        lambda: {"frames_per_batch": SLOTS * steps, "device": "cuda:0", "track_traj_ids": tracked},
    )


def test_hooks_do_not_change_the_batch() -> None:
    class Ends(tdcollect.Hooks):
        def __init__(self) -> None:
            self.count = 0

        def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
            self.count += len(slots)

    def collected(**options: Any) -> Any:
        torch.manual_seed(0)
        collector = tdcollect.Collector(
            torch_cartpole.TorchCartPole(SLOTS, "cuda:0"),
            actor(),
            frames_per_batch=SLOTS * STEPS,
            device="cuda:0",
            **options,
        )
        torch.manual_seed(1)
        return collector.collect(frames=SLOTS * STEPS)

    hooks = Ends()
    plain, hooked = collected(), collected(hooks=hooks)
    assert hooks.count == plain["next", "done"].sum()
    for key, value in plain.items(True, True):
        assert torch.equal(value, hooked[key]), key


def test_it_is_explained() -> None:
    def parts(kind: Any, *transforms: Any) -> dict[str, str]:
        env = transformed(kind(SLOTS, "cuda:0"), list(transforms))
        collector = tdcollect.Collector(env, actor(), frames_per_batch=SLOTS, device="cuda:0")
        return {part.name: f"{part.what}: {part.how}" for part in collector.explain()}

    assert "no flag is read" in parts(torch_cartpole.TorchCartPole)["resets"]
    assert "one wait per step" in parts(Asked)["resets"]
    assert "one wait per step" in parts(torch_cartpole.TorchCartPole, *learning())["resets"]


@pytest.mark.kernels
def test_cuda_finds_no_wait_in_a_step() -> None:
    """CUDA raises at whatever the host waits for; a batch ends with a few waits."""
    env = torch_cartpole.TorchCartPole(4096, "cuda:0")
    collector = tdcollect.Collector(env, actor(), frames_per_batch=4096 * STEPS, device="cuda:0")
    collector.collect(frames=4096 * STEPS)
    taken = 0
    step = type(env)._step

    def counted(self: Any, tensordict: Any) -> Any:
        nonlocal taken
        taken += 1
        # From the second step to the last but one.
        torch.cuda.set_sync_debug_mode("error" if 1 < taken < STEPS else "default")
        return step(self, tensordict)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(env), "_step", counted)
        try:
            collector.collect(frames=4096 * STEPS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert taken == STEPS
