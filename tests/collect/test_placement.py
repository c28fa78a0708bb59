"""Devices: batches are the parent's wherever env, policy and batch are, and tensors cross once.

Envs are on the CPU, or have their tensors on the GPU: then nothing is waited for where the env
allows for it. Where there is no GPU, one is simulated.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import OneHot
from torchrl.envs import (
    ClipTransform,
    Compose,
    EnvBase,
    ExplorationType,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import OneHotCategorical

import tdcollect
from benchmarks import networks, torch_cartpole
from benchmarks.torch_cartpole import TorchCartPole

from ..simulated_cuda import Crossings, Simulated, on_gpu, simulated
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


def recurrent(env: EnvBase) -> Any:
    # The simulated device has no kernels of cuDNN.
    return policies.recurrent("gru", env, python_based=True)


class Remembering(nn.Module):
    """Reads the output of the step before; called on TensorDicts, as it is of no known class."""

    def __init__(self, env: EnvBase):
        super().__init__()
        self.encoded = isinstance(env.action_spec, OneHot)

    def forward(self, tensordict: Any) -> Any:
        observation = tensordict["observation"]
        memory = tensordict.get("memory", torch.zeros_like(observation[:, 0]))
        tensordict["memory"] = memory = 0.9 * memory + observation[:, 2]
        action = (memory > 0).long()
        return tensordict.set("action", policies.one_hot(action) if self.encoded else action)


POLICIES: dict[str, Callable[[Any], Any]] = {
    "actor": policies.actor,
    "recurrent": recurrent,
    "remembering": Remembering,
}


def transformed(env: EnvBase, *of: Any) -> EnvBase:
    return TransformedEnv(env, Compose(*of)) if of else env


def cartpole(*of: Any, env_id: str = "CartPole-v1", **options: Any) -> EnvBase:
    made = tdcollect.make_env(env_id, 3, seed=0, max_episode_steps=8, **options)
    return transformed(made, *of)


def collector(
    policy: str | Callable[[Any], Any] = "actor", env: EnvBase | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    env = cartpole() if env is None else env
    made = (POLICIES[policy] if isinstance(policy, str) else policy)(env)
    options = {"frames_per_batch": env.batch_size.numel() * STEPS, **options}
    return tdcollect.Collector(env, made, auto_register_policy_transforms=True, **options)


def assert_same_values(found: Any, expected: Any) -> None:
    """Raise unless two batches hold the same, wherever they are."""
    assert set(expected.keys(True, True)) == set(found.keys(True, True))
    for key, value in expected.items(True, True):
        assert torch.equal(value.cpu(), found[key].cpu()), key


# ------------------------------------------------------------------------------------ the bits


def counted() -> EnvBase:
    return cartpole(RewardSum(), InitTracker())


# Each combination with one of the policies; all of them are slow.
CASES = [
    pytest.param(kind, places, marks=[] if (i + j) % len(POLICIES) == 0 else pytest.mark.slow)
    for i, kind in enumerate(POLICIES)
    for j, places in enumerate(COMBINATIONS)
]


@pytest.mark.behaviour(23)
@pytest.mark.parametrize(("kind", "places"), CASES)
def test_batches_are_the_parents(kind: str, places: tuple[str, str, str | None]) -> None:
    if kind == "recurrent" and places[2] is None and places[0] != places[1]:
        pytest.skip("TorchRL cannot stack a hidden state that begins on another device")
    names = ("policy_device", "env_device", "storing_device")
    options = {"auto_register_policy_transforms": True, **dict(zip(names, places, strict=True))}
    check_same(counted, POLICIES[kind], batches(2), lambda: options)


@pytest.mark.parametrize("options", [{"device": GPU}, {"policy_device": GPU, "env_device": "cpu"}])
def test_transforms_with_tensors_of_their_own(options: dict[str, str]) -> None:
    def env() -> EnvBase:
        return cartpole(
            ObservationNorm(loc=0.3, scale=1.7, in_keys=["observation"]),
            VecNormV2(in_keys=["observation"], decay=0.9),
            RewardScaling(loc=0.5, scale=3.0),
            StepCounter(max_steps=5),
            RewardSum(),
        )

    check_same(env, policies.actor, batches(2), lambda: options)


PLACES = [
    {"policy_device": GPU, "env_device": "cpu"},
    {"policy_device": GPU, "env_device": "cpu", "storing_device": "cpu"},
    {"device": GPU},
]
EVERYTHING = {
    **{f"policy {name}": policies.case(name) for name in policies.POLICIES},
    **{
        f"transform {name}": (partial(transforms.make, name), policies.actor)
        for name in transforms.TRANSFORMS
    },
    **{f"env {name}": (make, policies.actor) for name, make in ENVS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_policy_transform_and_env(name: str, options: dict[str, str]) -> None:
    arguments = *EVERYTHING[name], batches(2), lambda: options
    theirs = run(TorchRLCollector, *arguments, catch=True)
    if theirs[-1][0] == "error":
        pytest.skip(f"TorchRL raises {theirs[-1][1][0]}")
    check_same(*arguments)


def test_actions_are_waited_for() -> None:
    """TorchRL waits only if it is given ``env_device``, and else steps on what is there."""

    def record(cls: Any, **options: Any) -> Any:
        given = {"policy_device": GPU, "auto_register_policy_transforms": True, **options}
        return run(cls, lambda: GymEnv("CartPole-v1"), policies.actor, batches(2), lambda: given)

    assert_same_record(record(tdcollect.Collector), record(TorchRLCollector, env_device="cpu"))


@pytest.mark.parametrize("kind", POLICIES)
def test_an_env_without_a_device(kind: str) -> None:
    """TorchRL cannot reset its slots in part; the rows are those of an env on the CPU."""
    found = []
    for options in ({}, {"env_device": "cpu"}):
        stream = iter(collector(kind, policy_device=GPU, **options))
        torch.manual_seed(1)
        found.append(next(stream))
    assert_same_values(*found)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
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

    given = {"auto_register_policy_transforms": True, "frames_per_batch": 15, **options}
    check_same(counted, POLICIES[kind], script, lambda: given)


def draws_nothing(_: EnvBase) -> Any:
    """The GPU has random numbers of its own."""
    return TensorDictModule(policies.PlainNet(), ["observation"], ["action"])


@pytest.mark.parametrize(
    ("storing", "options"), [(None, {}), ("cpu", {"env_device": GPU}), (GPU, {})]
)
def test_whole_episodes(storing: str | None, options: dict[str, str]) -> None:
    def episodes(**options: Any) -> Any:
        made = collector(draws_nothing, cartpole(StepCounter(max_steps=7)), **options)
        return made.collect(episodes=7, seed=1)

    assert_same_values(episodes(policy_device=GPU, storing_device=storing, **options), episodes())


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
    batch, found = crossings(count=2, policy_device=GPU)
    assert found.ups == [(3, 4)] * STEPS
    assert found.downs == [(3, 2)] * STEPS
    # For the actions; and at the end, once, whether the distribution had parameters it refuses.
    assert len(found.waits) == STEPS + 1
    # Outputs stay where they are unless stored elsewhere.
    assert on_gpu(batch["logits"])
    assert not on_gpu(batch["observation"])


def per_step(make: Callable[[], EnvBase], policy: Any, **options: Any) -> tuple[float, float]:
    """The launches and waits that a further step brings: a batch has some at its end."""
    counts = []
    for steps in (STEPS, STEPS + 4):
        env = make()
        stream = iter(collector(policy, env, frames_per_batch=env.numel() * steps, **options))
        next(stream)
        with warnings.catch_warnings(record=True) as told, Crossings() as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # CUDA itself tells of each wait
            try:
                assert next(stream)["next", "done"].any()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append((found.launches, sum("synchronizing" in str(one.message) for one in told)))
    launches, waits = ((more - less) / 4 for less, more in zip(*counts, strict=True))
    return launches, waits


def benchmarked(env: EnvBase) -> Any:
    if isinstance(env.action_spec, OneHot):
        return networks.discrete_actor(networks.mlp(4, 2), OneHotCategorical)
    return networks.continuous_actor(networks.cheetah_net())


clip = partial(ClipTransform, in_keys=["observation"], low=-0.1, high=0.1)
limit = partial(StepCounter, max_steps=5)
there, calls = {"policy_device": GPU}, {"policy_device": GPU, "cudagraph_policy": False}
asked = {"policy_device": GPU, "cudagraph_policy": True}


@pytest.mark.parametrize(
    ("make", "policy", "options", "launches", "waits"),
    [
        (cartpole, benchmarked, calls, 23, 1),
        (cartpole, benchmarked, there, 1, 0),
        (partial(cartpole, env_id="HalfCheetah-v5"), benchmarked, calls, 16, 1),
        (partial(cartpole, env_id="HalfCheetah-v5"), benchmarked, asked, 1, 0),
        # Ends of episodes, and transforms, add no wait, but for one on the GPU that ends episodes.
        (lambda: cartpole(clip(), RewardSum()), "actor", there, 99, 1),
        (lambda: cartpole(clip(), RewardSum()), "remembering", {"device": GPU}, 99, 1),
        (lambda: cartpole(clip(), limit()), "actor", {"device": GPU}, 99, 2),
        (lambda: cartpole(limit()), "actor", {"device": GPU}, 99, 1),
        (lambda: transformed(TorchCartPole(SLOTS, GPU), *books()), "actor", {"device": GPU}, 99, 0),
        (lambda: transformed(Asked(SLOTS, GPU), *books()), "actor", {"device": GPU}, 99, 1),
        (lambda: transformed(Captured(SLOTS, GPU), limit()), "actor", asked, 1, 0),
    ],
)
def test_launches_and_waits_per_step(
    make: Any, policy: Any, options: dict[str, Any], launches: int, waits: int
) -> None:
    found, waited = per_step(make, policy, **options)
    assert simulated() <= found <= launches
    assert waited == waits if simulated() else waited <= waits


@pytest.mark.parametrize("chunk", [2**20, 1])
def test_what_has_crossed_does_not_cross_again_to_be_stored(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.collect.step_dict._CHUNK_BYTES", chunk)
    batch, found = crossings(policy_device=GPU, storing_device=GPU)
    observations = sum(shape[0] if len(shape) == 3 else 1 for shape in found.ups if 4 in shape[1:])
    ends = int(batch["next", "done"].any(0).sum())
    # What no policy call was given: final observations, and the row after the batch.
    assert observations == STEPS + ends + (not batch["next", "done"][:, -1].any())
    batch, found = crossings(policy_device=GPU, storing_device="cpu")
    assert [shape for shape in found.downs if shape[-2:] == (3, 2)].count((3, 2)) == STEPS
    assert not on_gpu(batch["logits"])


def test_no_placement_where_all_is_on_the_cpu() -> None:
    made = collector(device="cpu")
    assert "devices" not in {part.name for part in made.explain()}


# ----------------------------------------------------------------------------- envs on the GPU

SLOTS = 5


class Asked(TorchCartPole):
    """Is reset where flags say so, as TorchRL does."""

    resets_by_mask = False


class Fixed(TorchCartPole):
    """Is reset by mask, and draws nothing: the batches are TorchRL's."""

    def fresh(self) -> torch.Tensor:
        count = 4 * SLOTS
        return torch.linspace(-0.05, 0.05, count, device=self.device).view(SLOTS, 4)


def books() -> list[Any]:
    return [StepCounter(max_steps=7), RewardSum(), InitTracker()]


def normalized() -> list[Any]:
    return [ObservationNorm(loc=0.3, scale=1.7, in_keys=["observation"]), RewardSum()]


def learning() -> list[Any]:
    return [VecNormV2(in_keys=["observation"], decay=0.9), RewardSum()]


def check_there(
    kind: Any, there: str, of: Any, policy: Any = policies.actor, steps: int = STEPS, **options: Any
) -> None:
    """Compare two batches of an env on a device with TorchRL's."""
    check_same(
        lambda: transformed(kind(SLOTS, there), *of()),
        policy,
        batches(2),
        lambda: {"frames_per_batch": SLOTS * steps, **options},
    )


@pytest.mark.parametrize(
    ("kind", "device", "of", "steps", "tracked"),
    [
        (Asked, "cuda", books, STEPS, True),
        (Fixed, GPU, learning, 20, False),
        (Asked, "cpu", learning, 20, True),
        (Fixed, "cuda", books, STEPS, True),
        (Fixed, GPU, list, 2, True),
    ],
)
def test_batches_of_envs_there(kind: Any, device: str, of: Any, steps: int, tracked: bool) -> None:
    check_there(kind, device, of, steps=steps, device=device, track_traj_ids=tracked)


THERE = [
    {"policy_device": GPU},
    {"policy_device": GPU, "storing_device": "cpu"},
    {"policy_device": "cpu", "storing_device": GPU},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Asked, Fixed])
@pytest.mark.parametrize("policy", [policies.actor, Remembering])
@pytest.mark.parametrize("options", THERE, ids=str)
@pytest.mark.parametrize("of", [list, books, normalized, learning])
def test_wherever_policy_and_batch_are(
    kind: Any, policy: Any, options: dict[str, str], of: Any
) -> None:
    check_there(kind, GPU, of, policy, steps=20, **options)


@pytest.mark.parametrize(("kind", "options"), [(Fixed, THERE[2]), (Asked, THERE[1])])
def test_batches_of_several_chunks(
    kind: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.collect.step_dict._GPU_CHUNK_BYTES", 500)
    check_there(kind, GPU, books, **options)


def test_resets_by_mask_that_draw_are_those_of_a_plain_loop() -> None:
    steps = 20
    net = nn.Linear(4, 2).to(GPU)
    policy = TensorDictModule(lambda x: net(x).argmax(-1), ["observation"], ["action"])
    made = collector(lambda _: policy, TorchCartPole(SLOTS, GPU), device=GPU)
    torch.manual_seed(0)
    made.reset()
    batch = made.collect(frames=SLOTS * steps)

    torch.manual_seed(0)
    state = made.env.fresh()
    for step in range(steps):
        assert torch.equal(batch["observation"][:, step], state)
        state, done = torch_cartpole.physics(state, net(state).argmax(-1))
        assert torch.equal(batch["next", "observation"][:, step], state)
        state = torch.where(done, made.env.fresh(), state)
    assert batch["next", "done"].any()


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


def one_batch(policy: Any, env: EnvBase, **options: Any) -> Any:
    made = collector(policy, env, **options)
    torch.manual_seed(1)
    made.reset()
    return made.collect(frames=SLOTS * 20)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        (GPU, {"policy_device": "cpu"}),
        (GPU, {"policy_device": GPU, "storing_device": "cpu"}),
        ("cpu", {"policy_device": GPU, "env_device": "cpu", "storing_device": "cpu"}),
    ],
)
def test_an_env_that_writes_into_the_same_memory(device: str, options: dict[str, str]) -> None:
    kinds = (InPlace, Asked)
    assert_same_values(*(one_batch(Remembering, kind(SLOTS, device), **options) for kind in kinds))


def test_hooks_do_not_change_the_batch() -> None:
    class Ends(tdcollect.Hooks):
        count = 0

        def episodes_ended(self, slots: Any, returns: Any, lengths: Any) -> None:
            self.count += len(slots)

    hooks = Ends()
    plain, hooked = (
        one_batch(policies.actor, TorchCartPole(SLOTS, GPU), device=GPU, hooks=given)
        for given in (None, hooks)
    )
    assert hooks.count == plain["next", "done"].sum() > 0
    assert_same_values(hooked, plain)


@pytest.mark.parametrize(
    ("kind", "of", "told"),
    [
        (TorchCartPole, list, "no flag is read"),
        (Asked, list, "one wait per step"),
        (TorchCartPole, learning, "one wait per step"),
    ],
)
def test_resets_are_explained(kind: Any, of: Any, told: str) -> None:
    made = collector(policies.actor, transformed(kind(SLOTS, GPU), *of()), device=GPU)
    assert told in next(part.how for part in made.explain() if part.name == "resets")


# --------------------------------------------------------------------------------- CUDA graphs

WAITS = "it waits for the GPU"
REFUSED = {
    "epsilon-greedy": WAITS,
    "additive-gaussian": WAITS,
    "ornstein-uhlenbeck": WAITS,
    "several-steps": WAITS,
    "overridden-forward": WAITS,
    "gru": WAITS,
    "hooks": "the policy has hooks",
    "function": "the policy is no module",
}
Change = Callable[[Any], Any]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The CUDA graphs that are made."""
    found: list[Any] = []
    make = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: found.append(make()) or found[-1])
    return found


def graph_case(name: str) -> tuple[Callable[[], EnvBase], Callable[[EnvBase], Any]]:
    if name in ("gru", "lstm"):
        return cartpole, partial(policies.recurrent, name, python_based=True)
    return policies.case(name)


def explained(made: Any) -> str:
    return next(part.how for part in made.explain() if part.what == "all calls")


def with_and_without(
    make_env: Callable[[], EnvBase],
    make_policy: Callable[[EnvBase], Any],
    *changes: Change | None,
    **more: Any,
) -> str:
    """Compare batches of a graph with those of its policy at each step; how it is explained.

    Each change, if it is one, is made before a batch, the first before the second.
    """
    found = []
    for options in (calls, asked):
        env = make_env()
        made = collector(make_policy, env, total_frames=-1, **options, **more)
        made.set_seed(0)
        torch.cuda.default_generators[0].manual_seed(0)
        stream, batches = iter(made), []
        for change in (None, *changes, None):
            if change is not None:
                change(made)
            batches.append(next(stream).clone())
        found.append((batches, torch.cuda.default_generators[0].get_state()))
        how = explained(made)
        made.shutdown()
    for ours, expected in zip(found[1][0], found[0][0], strict=True):
        assert_same_values(ours, expected)
    assert torch.equal(found[0][1], found[1][1])
    return how


QUICK = (
    "one-hot-unbatched",
    "tanh-normal",
    "call-counter",
    "batch-norm",
    "lstm",
    "function",
    "gru",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in ("gru", "lstm", *policies.POLICIES)
        if name in QUICK or policies.POLICIES.get(name, [""])[0] in ("cartpole", "pendulum")
        if name not in ("plain-net", "fresh-tensordict", "context", "in-place")  # not moved
        if name not in ("reads-everything", "drops-entries")
    ],
)
def test_a_graph_has_the_bits_of_its_policy(name: str, captures: list[Any]) -> None:
    how = with_and_without(*graph_case(name))
    if name in REFUSED:
        assert how == f"no CUDA graph: {REFUSED[name]}"
        assert not captures
    else:
        assert how.startswith("one CUDA graph of ")


def net_of(made: Any) -> nn.Linear:
    return next(m for m in made.policy.modules() if isinstance(m, nn.Linear))


def moved(made: Any) -> None:
    weight = net_of(made).weight
    weight.data = new = weight.detach().neg()
    if isinstance(new, Simulated):
        weight.raw = new.raw


def replaced(made: Any) -> None:
    net_of(made).weight = nn.Parameter(net_of(made).weight.detach().neg())


def drops(env: EnvBase) -> Any:
    pixels = nn.Unflatten(-1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten()
    rest = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    body = nn.Sequential(*pixels, *rest)
    module = TensorDictModule(body, in_keys=["observation"], out_keys=["logits"])
    return policies.one_hot_actor(env, module)


def in_place(made: Any) -> None:
    net_of(made).weight.detach().mul_(-1)


def shorter(made: Any) -> None:
    made.collect(frames=made.n_env * 4)


CHANGES: dict[str, tuple[Change, int]] = {  # and the number of graphs that are made
    "in place": (in_place, 1),
    "moved": (moved, 2),
    "replaced": (replaced, 2),
    "loaded": (lambda made: made.load_state_dict(made.state_dict()), 1),
    "shorter": (shorter, 1),
    "longer": (lambda made: made.collect(frames=made.n_env * 15), 2),
    "most likely": (
        lambda made: setattr(made, "exploration_type", ExplorationType.DETERMINISTIC),
        2,
    ),
    "evaluating": (lambda made: made.policy.eval(), 2),
    "hooked": (lambda made: net_of(made).register_forward_hook(lambda _, args, out: out + 1), 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_is_made_for(name: str, captures: list[Any]) -> None:
    change, made = CHANGES[name]
    how = with_and_without(cartpole, drops, change)
    assert len(captures) == made
    assert ("hooks" in how) == (name == "hooked")


def test_a_graph_goes_on_from_a_state() -> None:
    def made() -> Any:
        env = cartpole(resumable=True)
        return collector(drops, env, policy_device=GPU, total_frames=-1)

    first, other = made(), made()
    stream = iter(first)
    next(stream)
    state = deepcopy(first.state_dict())
    expected = next(stream).clone()
    for _ in range(2):
        in_place(other)
        other.load_state_dict(deepcopy(state))
        assert_same_values(next(iter(other)), expected)
    assert explained(first) == explained(other) != "one CUDA graph, after the first step"


@pytest.mark.parametrize("storing", ["cpu", GPU])
def test_graphs_over_several_chunks(
    storing: str, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden state goes from one chunk to the next, in rings that are written over."""
    monkeypatch.setattr("tdcollect.collect.step_dict._CHUNK_BYTES", 300)
    how = with_and_without(*graph_case("lstm"), None, storing_device=storing)
    assert (how[:14], len(captures)) == ("one CUDA graph", 1)


def test_graphs_are_made_under_autocast() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert nn.Linear(4, 2).to(GPU)(torch.ones(1, 4).to(GPU)).dtype is torch.bfloat16
        assert "of" in with_and_without(cartpole, drops, in_place)


def test_a_policy_is_timed_on_both_devices() -> None:
    made = collector("actor", policy_device=GPU)
    state = torch.get_rng_state(), torch.cuda.default_generators[0].get_state()
    told = {part.what: part.how for part in made.explain(measure=True)}
    assert re.fullmatch(r"\d+ us on cuda:0, \d+ us on cpu", told["time of a call"])
    assert told["size"].endswith("products a step: may take less time on the CPU")
    assert torch.equal(torch.get_rng_state(), state[0])
    assert torch.equal(torch.cuda.default_generators[0].get_state(), state[1])


def test_known_policies_are_graphs_by_themselves() -> None:
    def how(policy: Any, **options: Any) -> str:
        made = collector(policy, policy_device=GPU, total_frames=-1, **options)
        next(iter(made))
        return explained(made)

    assert how(drops).startswith("one CUDA graph of ")
    assert how(drops, cudagraph_policy=False) == "no CUDA graph: cudagraph_policy=False"
    assert how(drops, timers=True) == "no CUDA graph: timers=True"
    assert how(policies.actor).startswith("no CUDA graph: Features may keep a state in Python")
    assert "on TensorDicts" in how(lambda e: drops(e).select_out_keys("action"))
    made = collector(drops, policy_device=GPU, hooks=Started())
    assert explained(made) == "no CUDA graph: hooks are told of steps"


class Started(tdcollect.Hooks):
    def stepped(self, slots: Any, step: Any) -> None:
        pass


def test_logits_that_are_not_numbers_are_refused_with_graphs() -> None:
    made = collector(drops, policy_device=GPU, total_frames=-1)
    stream = iter(made)
    next(stream)
    weight = net_of(made).weight.detach()
    held = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="logits that are not numbers"):
        made.collect(frames=made.n_env * 5)
    weight.copy_(held)
    made.collect(frames=made.n_env * 5)


def test_scores_of_a_batch_are_those_of_its_steps() -> None:
    found = []
    for hooks in (Started(), None):
        made = collector(
            policies.actor, ENVS["pendulum"](), policy_device=GPU, storing_device="cpu", hooks=hooks
        )
        made.set_seed(0)
        torch.cuda.default_generators[0].manual_seed(0)
        found.append(made.collect(frames=made.n_env * 20))
        late = made._runner._lowered.score is not None
        assert late == (hooks is None)
    assert_same_values(*found)


class Captured(TorchCartPole):
    """May be captured in a CUDA graph, resets and all."""

    steps_as_graph = True


class Asks(Captured):
    """Waits for the GPU in its steps."""

    def _step(self, tensordict: Any) -> Any:
        assert tensordict["observation"].isfinite().all()
        return super()._step(tensordict)


@pytest.mark.parametrize(
    ("of", "storing", "changes", "graphs"),
    [
        (list, None, [in_place], 1),
        (books, "cpu", [shorter, moved], 2),
        (list, GPU, [CHANGES["most likely"][0], None], 2),
    ],
)
def test_whole_turns_as_graphs(
    of: Any, storing: Any, changes: list[Any], graphs: int, captures: list[Any]
) -> None:
    env = lambda: transformed(Captured(SLOTS, GPU), *of())  # noqa: E731
    options = {"storing_device": storing, "frames_per_batch": SLOTS * 12}
    how = with_and_without(env, policies.actor, None, *changes, **options)
    assert how.startswith("with env and resets: one CUDA graph of ")
    assert len(captures) == graphs


def test_an_env_that_waits_is_no_part_of_a_graph() -> None:
    how = with_and_without(lambda: Asks(SLOTS, GPU), policies.actor, None)
    assert how.endswith(f"operations; not the env: {WAITS}")


# --------------------------------------------------------------------------------- real kernels


@pytest.mark.kernels
def test_compiled_cuda_policies_give_the_parents_batches() -> None:
    options = {"policy_device": GPU, "env_device": "cpu", "compile_policy": True}
    check_same(cartpole, draws_nothing, batches(4), lambda: dict(options))
    stream = iter(collector(policy_device=GPU, compile_policy=True))
    for _ in range(4):
        assert next(stream)["action"].shape == (3, STEPS, 2)


@pytest.mark.slow
def test_a_compiled_policy_gives_the_parents_batches() -> None:
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    check_same(cartpole, lambda _: net, batches(3), lambda: {"compile_policy": True})
