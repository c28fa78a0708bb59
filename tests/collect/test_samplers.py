"""Policy modules on StepDicts do what they do on TensorDicts, to the bit, and draw the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import distributions as D
from torch import nn
from torchrl import envs as E
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import (
    EnvBase,
    ExplorationType,
    GymEnv,
    SerialEnv,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    ConsistentDropoutModule,
    Delta,
    DistributionalQValueModule,
    EGreedyModule,
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    OneHotOrdinal,
    Ordinal,
    ProbabilisticActor,
    QValueModule,
    SafeModule,
    TanhDelta,
    TanhModule,
    TanhNormal,
    TruncatedNormal,
)
from torchrl.modules.models.exploration import LazygSDEModule
from torchrl.modules.tensordict_module import SafeProbabilisticModule

import tdcollect
from tdcollect import Hooks, evaluate, make_env
from tdcollect._upstream.torchrl import set_exploration_spec
from tdcollect.collect import samplers
from tdcollect.collect.policy import LoweredPolicy
from tdcollect.collect.samplers import Draw, GlobalNoise, sampler
from tdcollect.collect.step_dict import StepDict, flat, nested_shapes

from . import policies
from .envs import ENVS
from .oracle import UPSTREAM, assert_same, batches, check_same

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

N = 3
STRAIGHT = "computed straight, checked once per batch"
CALLED = "called straight"
OWN = "its own code, on arrays"

KINDS = RANDOM, DETERMINISTIC = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC


def check(
    module: Any,
    given: Mapping[str, Any],
    how: str | list[str] | None = STRAIGHT,
    batch: tuple[int, ...] = (N,),
    kind: ExplorationType = RANDOM,
    calls: int = 3,
    checked: bool = False,
) -> None:
    """Compare a module on TensorDicts with its calls on StepDicts, call after call.

    ``how`` its parts must run; None if the module may be called as it is.
    """
    theirs = TensorDict(dict(given), batch)
    ours = flat(theirs.clone())
    ours.shapes = nested_shapes(theirs)
    with torch.no_grad(), set_exploration_type(kind):
        policy = LoweredPolicy(module, ours, torch.Size(batch), None, checked=checked)
        if how is not None:
            found = [way for _, way in policy.described]
            assert found == (how if isinstance(how, list) else [how] * len(found))
        state = torch.get_rng_state()
        for _ in range(calls):
            module(theirs)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        for _ in range(calls):
            policy(ours)
        policy.check()
    assert torch.equal(torch.get_rng_state(), after), "other random numbers"
    written = {key: value.contiguous() for key, value in ours.items()}
    assert_same(written, dict(theirs.items(True, True)), type(module).__name__)


def probabilistic(
    cls: Any, kind: Any, in_keys: Any, scored: bool = False, **kwargs: Any
) -> ProbabilisticTensorDictModule:
    return cls(
        in_keys=in_keys,
        out_keys=["action"],
        distribution_class=kind,
        distribution_kwargs=kwargs,
        return_log_prob=scored,
    )


MODULES = [SafeProbabilisticModule, ProbabilisticTensorDictModule]
NORMAL = ["loc", "scale"]

BOUNDS = [
    {},
    {"low": -1.0, "high": 1.0},
    {"low": -2, "high": 3},
    {"high": 5.0},
    {"low": torch.tensor([-2.0, -1.0, 0.0, -0.5]), "high": torch.tensor([2.0, 1.0, 0.5, 4.0])},
    {"low": torch.tensor(-0.25)},
    {"low": torch.full((N, 4), -2.0, dtype=torch.float64), "high": torch.full((N, 4), 9.0)},
    {"low": torch.full((4,), -1.0), "high": torch.full((4,), 1.0)},
]
TANH_OPTIONS = {
    "event_dims": st.integers(0, 2),
    "tanh_loc": st.booleans(),
    "upscale": st.sampled_from([5.0, 1, torch.tensor(2.0), torch.full((4,), 0.5)]),
    "safe_tanh": st.booleans(),
}


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    cls=st.sampled_from(MODULES),
    called=st.fixed_dictionaries({"kind": st.sampled_from(KINDS), "checked": st.booleans()}),
    scored=st.booleans(),
    bounds=st.sampled_from(BOUNDS),
    options=st.fixed_dictionaries({}, optional=TANH_OPTIONS),
    scale=st.sampled_from(["entry", "one per row", "number", "tensor", "function"]),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_tanh_normal(
    seed: int,
    cls: Any,
    called: Any,
    scored: bool,
    bounds: Any,
    options: Any,
    scale: str,
    spread: float,
    dtype: Any,
) -> None:
    torch.manual_seed(seed)
    entries = {"loc": spread * torch.randn(N, 4, dtype=dtype)}
    kwargs = {**bounds, **options}
    if scale in ("entry", "one per row"):
        entries["scale"] = torch.rand(N, 4 if scale == "entry" else 1, dtype=dtype) + 0.1
    else:
        made = {"number": 0.5, "tensor": torch.rand(4, dtype=dtype) + 0.1}
        kwargs["scale"] = made.get(scale, partial(torch.full_like, fill_value=0.2))
    module = probabilistic(cls, TanhNormal, list(entries), scored, **kwargs)
    how = CALLED if called["checked"] else STRAIGHT
    check(module, entries, how, () if options.get("event_dims") == 2 else (N,), **called)


def test_tanh_normal_without_batch_dimension() -> None:
    for shape in [(), (4,)]:
        given = {"loc": torch.randn(shape), "scale": torch.rand(shape) + 0.1}
        for cls in MODULES:
            check(probabilistic(cls, TanhNormal, NORMAL, True, tanh_loc=False), given, batch=())
    bounds = {"low": torch.full((N, 4), -2.0), "high": torch.full((N, 4), 2.0)}
    for kind in KINDS:  # bounds of more dimensions than the parameters
        module = probabilistic(SafeProbabilisticModule, TanhNormal, NORMAL, **bounds)
        check(module, given, batch=(), kind=kind)


def test_parameters_in_another_order() -> None:
    given = {"loc": torch.randn(N, 4), "scale": torch.rand(N, 4) + 0.1}
    for kind in (TanhNormal, IndependentNormal, D.Normal):
        check(probabilistic(SafeProbabilisticModule, kind, NORMAL[::-1], True), given)
    renamed = {"s": given["scale"], "m": given["loc"]}
    check(
        probabilistic(SafeProbabilisticModule, TanhNormal, {"scale": "s", "loc": "m"}, True),
        renamed,
    )


@pytest.mark.parametrize("kind", [TanhNormal, IndependentNormal, TanhDelta])
def test_arguments_that_the_class_refuses(kind: Any) -> None:
    """The first draw builds the distribution."""
    given = {"loc": torch.randn(N, 4), "scale": torch.rand(N, 4) + 0.1, "param": torch.randn(N, 4)}
    wrong = {"event_dim": 3} if kind is IndependentNormal else {"low": 1.0, "high": -1.0}
    in_keys = ["param"] if kind is TanhDelta else NORMAL
    module = probabilistic(SafeProbabilisticModule, kind, in_keys, **wrong)
    raised = []
    for call in (
        module,
        LoweredPolicy(module, flat(TensorDict(given, [N])), torch.Size([N]), None),
    ):
        with set_exploration_type(RANDOM), pytest.raises((RuntimeError, ValueError)) as error:
            call(TensorDict(given, [N]) if call is module else flat(TensorDict(given, [N])))
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


# ------------------------------------------------------------------------------ other distributions


def multi(logits: torch.Tensor) -> D.Distribution:
    """Several choices at once."""
    return D.Independent(D.Categorical(logits=logits.unflatten(-1, (2, 2))), 1)


POINTS = {"param": torch.linspace(-3, 3, 4 * N).view(N, 4)}
LOC_SCALE = {"loc": POINTS["param"], "scale": POINTS["param"].abs() + 0.1}
LOGITS = {"logits": POINTS["param"].sin()}
MASKED = {**LOGITS, "mask": torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]]).bool()}
DEEP = {"logits": LOGITS["logits"].expand(2, N, 4).transpose(0, 1).contiguous()}
DEEP_MASKED = {**DEEP, "mask": MASKED["mask"][:, None].expand(N, 2, 4).contiguous()}


class Case(NamedTuple):
    """A distribution's class, entries and arguments; how it runs at random, and otherwise."""

    kind: Any
    given: Mapping[str, torch.Tensor]
    kwargs: Mapping[str, Any] = MappingProxyType({})
    at_random: str = STRAIGHT
    fixed: str = STRAIGHT


HIGHER = {"low": torch.full((4,), -2.0), "high": torch.full((4,), 0.5), "safe": False}
ODD_MASK = {"neg_inf": -50.0, "use_cross_entropy": False}
UNSCALED = {"tanh_loc": False, "upscale": 3.0, "event_dim": 1}
TRUNCATED = {"low": -2.0, "high": 2.0, "tanh_loc": False}

DISTRIBUTIONS = {
    "Normal": Case(D.Normal, LOC_SCALE, fixed=CALLED),
    "IndependentNormal": Case(IndependentNormal, LOC_SCALE, fixed=CALLED),
    "IndependentNormal, unscaled": Case(IndependentNormal, LOC_SCALE, UNSCALED, fixed=CALLED),
    "IndependentNormal of one scale": Case(
        IndependentNormal, POINTS | {"loc": POINTS["param"]}, {"scale": 0.25}, fixed=CALLED
    ),
    "TruncatedNormal": Case(TruncatedNormal, LOC_SCALE, TRUNCATED, CALLED, CALLED),
    "Delta": Case(Delta, POINTS, {}, CALLED, CALLED),
    "TanhDelta": Case(TanhDelta, POINTS),
    "TanhDelta in bounds": Case(TanhDelta, POINTS, HIGHER),
    "Categorical": Case(D.Categorical, LOGITS),
    "OneHotCategorical": Case(OneHotCategorical, LOGITS),
    "OneHotCategorical of several": Case(OneHotCategorical, DEEP),
    "MaskedCategorical": Case(MaskedCategorical, MASKED),
    "MaskedCategorical of several": Case(MaskedCategorical, DEEP_MASKED),
    "MaskedCategorical with options": Case(MaskedCategorical, MASKED, ODD_MASK, CALLED, CALLED),
    "MaskedOneHotCategorical": Case(MaskedOneHotCategorical, MASKED),
    "Ordinal": Case(Ordinal, {"scores": LOGITS["logits"]}, {}, CALLED, CALLED),
    "OneHotOrdinal": Case(OneHotOrdinal, {"scores": LOGITS["logits"]}, {}, CALLED, CALLED),
    "several choices": Case(multi, LOGITS, {}, CALLED, CALLED),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    kind, entries, kwargs, at_random, fixed = DISTRIBUTIONS[name]
    in_keys = [key for key in entries if key != "param" or kind in (Delta, TanhDelta)]
    for cls, scored in ((MODULES[0], True), (MODULES[1], True), (MODULES[0], False)):
        module = probabilistic(cls, kind, in_keys, scored, **kwargs)
        called = scored and kind is TanhDelta
        check(module, entries, CALLED if called else at_random)
        check(module, entries, CALLED if called else fixed, kind=DETERMINISTIC)
        if kind is not D.Normal:
            check(module, entries, None, kind=ExplorationType.MODE)
        if kind in (D.Normal, IndependentNormal, TruncatedNormal, Delta):
            check(module, entries, None, kind=ExplorationType.MEAN)


def test_a_mask_without_actions_is_found_at_the_end_of_the_batch() -> None:
    given = {**MASKED, "mask": torch.zeros(N, 4, dtype=torch.bool)}
    module = probabilistic(SafeProbabilisticModule, MaskedCategorical, ["logits", "mask"])
    step = flat(TensorDict(given, [N]))
    with set_exploration_type(RANDOM):
        policy = LoweredPolicy(module, step, torch.Size([N]), None)
        policy(step)
    with pytest.raises(RuntimeError, match="-inf for every action"):
        policy.check()


def categorical(kind: Any, scored: bool) -> Any:
    return probabilistic(SafeProbabilisticModule, kind, ["logits"], scored)


SHAPES = [(1, 2), (8, 2), (3, 7), (2, 4, 5), (3,), (40, 40)]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (D.Categorical, {}),
        (OneHotCategorical, {}),
        (D.Normal, {}),
        (IndependentNormal, {}),
        (TanhNormal, {}),
        (TanhNormal, {"low": -2.0, "high": 0.5, "safe_tanh": False, "event_dims": 0}),
        (TanhNormal, {"tanh_loc": True, "scale": 0.5}),
    ],
)
def test_scores_of_a_whole_batch(
    kind: Any,
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    alike: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those of each step, in the first batch and later, whatever rounds otherwise."""
    of_logits = kind in (D.Categorical, OneHotCategorical)
    names = ["logits"] if of_logits else [n for n in NORMAL if n not in kwargs]
    *slots, _ = shape
    size, generator = torch.Size(slots), torch.Generator().manual_seed(len(shape))
    module = probabilistic(SafeProbabilisticModule, kind, names, True, **kwargs)
    monkeypatch.setattr(samplers, "_STEPS", 8)
    monkeypatch.setattr(samplers.Sampler, "_agreeing", cases := {})

    def parameters() -> TensorDict:
        loc, scale = 4 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        entries = {"logits": loc, "loc": loc, "scale": scale.abs() + 0.1}
        return TensorDict({name: entries[name].to(dtype) for name in names}, size)

    for steps in (20, 8):
        theirs = [parameters() for _ in range(steps)]
        ours = [flat(step) for step in theirs]
        with torch.no_grad(), set_exploration_type(RANDOM):
            policy = LoweredPolicy(
                module, ours[0], size, None, late=lambda key: key == "action_log_prob"
            )
            state = torch.get_rng_state()
            for step in ours:
                step["action_log_prob"] = torch.zeros(())  # as an earlier batch leaves it
                policy(step)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            wanted = torch.stack([module(step) for step in theirs], len(slots))
        assert torch.equal(torch.get_rng_state(), after)
        batch = StepDict((key, torch.stack([s[key] for s in ours], len(slots))) for key in ours[0])
        assert "action_log_prob" not in batch
        policy.check()
        assert policy.score is not None
        policy.score(batch, ours[-1])
        assert torch.equal(ours[-1]["action_log_prob"], theirs[-1]["action_log_prob"])
        assert_same(dict(batch), dict(wanted.items()), "batch")
        assert all(cases.values()) or steps == 8
        if not alike:
            cases.update(dict.fromkeys(cases, False))


@pytest.mark.parametrize("logits", [torch.tensor([0.0, torch.nan]), torch.full((2,), -torch.inf)])
@pytest.mark.parametrize("late", [None, lambda key: True])
@pytest.mark.parametrize("scored", [True, False])
def test_logits_that_are_refused_at_the_end_of_the_batch(
    logits: torch.Tensor, late: Any, scored: bool
) -> None:
    step = StepDict({"logits": logits.expand(N, 2).contiguous()})
    with torch.no_grad(), set_exploration_type(RANDOM):
        policy = LoweredPolicy(
            categorical(D.Categorical, scored), step, torch.Size([N]), None, late=late
        )
        policy(step)
    batch = StepDict((key, value[:, None]) for key, value in step.items())
    check, late_check = policy.check, partial(policy.score or id, batch, step)
    with pytest.raises(RuntimeError, match="-inf for every action"):
        (late_check if policy.score else check)()


class Likely(E.Transform):
    """Rewards what the policy was likely to do."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("reward", tensordict["action_log_prob"].exp()[..., None])


class Listening(Hooks):
    """Keeps the log-probabilities of steps."""

    def __init__(self) -> None:
        self.heard: list[torch.Tensor] = []

    def stepped(self, slots: Any, step: TensorDictBase) -> None:
        self.heard.append(step["action_log_prob"].clone())


def scores_at_once(**options: Any) -> bool:
    """Tell whether a policy scores its draws as they come."""
    made: list[LoweredPolicy] = []

    class Watched(LoweredPolicy):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tdcollect.collect.run.LoweredPolicy", Watched)
        patch.setattr("tdcollect.evaluation.episodes.inference.LoweredPolicy", Watched)
        run_scored(**options)
    unscored = made[-1]._unscored
    return unscored is None or unscored.call not in made[-1].calls


def scored_actor(env: EnvBase, after: Any = None) -> Any:
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    return actor if after is None else TensorDictSequential(actor, after)


VALUE = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
LIKELIHOOD = TensorDictModule(torch.exp, ["action_log_prob"], ["likelihood"])
DOUBLED = TensorDictModule(lambda x: x.mul_(2), ["logits"], ["doubled"])
RESCORED = TensorDictModule(lambda x: x[..., 0], ["observation"], ["action_log_prob"])
OWN_NOISE = EGreedyModule(OneHot(2, shape=(N, 2)), eps_init=0.5)


def run_scored(
    transform: Any = None,
    metrics: Any = None,
    evaluated: bool = False,
    after: Any = None,
    **how: Any,
) -> Any:
    env = make_env("CartPole-v1", num_envs=N)
    torch.manual_seed(0)
    policy = scored_actor(env, after)
    if evaluated:
        return evaluate(env, policy, 4, metrics=metrics, exploration_type=RANDOM, progress=False)
    torch.manual_seed(0)
    env.set_seed(0)
    made = env if transform is None else TransformedEnv(env, transform)
    return tdcollect.Collector(made, policy, frames_per_batch=4 * N, **how).rollout()


def test_draws_are_scored_late_unless_somebody_reads_the_scores() -> None:
    assert not scores_at_once()
    assert not scores_at_once(after=VALUE)
    for after in (LIKELIHOOD, DOUBLED, RESCORED, OWN_NOISE):
        assert scores_at_once(after=after)
    assert not scores_at_once(transform=E.RewardSum())
    assert scores_at_once(transform=Likely())
    assert scores_at_once(transform=E.SignTransform(in_keys=[], in_keys_inv=["action_log_prob"]))
    hooks = Listening()
    assert scores_at_once(hooks=hooks)
    assert torch.equal(torch.stack(hooks.heard, 1), run_scored()["action_log_prob"])

    def mean(episode: TensorDictBase) -> float:
        return float(episode["action_log_prob"].mean())

    assert not scores_at_once(evaluated=True)
    assert scores_at_once(evaluated=True, metrics={"mean": mean})
    plain = run_scored(evaluated=True).episodes
    found = run_scored(evaluated=True, metrics={"mean": mean}).episodes
    assert [episode.digest for episode in found] == [episode.digest for episode in plain]
    assert all(episode.metrics["mean"] < 0 for episode in found)


def serial() -> EnvBase:
    return SerialEnv(N, partial(GymEnv, "CartPole-v1"))


def test_a_transform_that_reads_scores_finds_them() -> None:
    check_same(lambda: TransformedEnv(serial(), Likely()), scored_actor)


@pytest.mark.parametrize("after", [VALUE, LIKELIHOOD, DOUBLED, RESCORED, OWN_NOISE])
def test_modules_after_a_draw(after: Any) -> None:
    check_same(serial, partial(scored_actor, after=after))


class Given(NamedTuple):
    """A source of numbers that are given."""

    numbers: torch.Tensor

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        return self.numbers.clone()


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 9) | st.integers(256, 270),
    actions=st.integers(2, 6),
    apart=st.sampled_from([0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3]),
    scale=st.sampled_from([0.0, 1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_draws_that_are_almost_ties(
    seed: int, slots: int, actions: int, apart: float, scale: float, dtype: torch.dtype
) -> None:
    """The noise is such that the probabilities over it are almost alike."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, slots, actions, generator=generator, dtype=torch.float64)
    logits = (scale * drawn[0]).to(dtype)
    noise = (logits.double().softmax(-1) * (1 + apart * drawn[1])).clamp(6e-8, 17).to(dtype)
    draw = Draw(D.Categorical, ("logits",), {}, InteractionType.RANDOM, False, False, Given(noise))
    found, _ = sampler(draw)(logits)  # type: ignore[misc]
    probs = (logits - logits.logsumexp(-1, keepdim=True)).softmax(-1)
    assert torch.equal(found, (probs / noise).argmax(-1))


ODD = [0.0, -np.inf, 1e4, -1e4]


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(1,), (256,), (300,), (16384,), (40000,), (20, 30), (3, 50, 7)]),
    actions=st.sampled_from([2, 2, 3, 6]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    odd=st.sampled_from([0.0, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kind=st.sampled_from([D.Categorical, OneHotCategorical]),
    quick=st.booleans(),
    apart=st.sampled_from([1e-4, 0.5]),
    steps=st.integers(1, 3),
)
def test_draws_and_scores_of_many_choices_are_those_of_the_class(
    seed: int,
    shape: tuple[int, ...],
    actions: int,
    scale: float,
    odd: float,
    dtype: torch.dtype,
    kind: Any,
    quick: bool,
    apart: float,
    steps: int,
) -> None:
    """With numbers of a generator elsewhere in between; apart 0.5: no draw is clear."""
    rng = np.random.default_rng(seed)
    values = scale * rng.normal(size=(steps, *shape, actions))
    one = rng.integers(actions, size=(steps, *shape, 1)) == np.arange(actions)
    values = np.where(one & (rng.random(values.shape) < odd), rng.choice(ODD, values.shape), values)
    logits = torch.from_numpy(values).to(dtype).unbind(0)
    other = torch.Generator()
    dists = [kind(logits=each, validate_args=False) for each in logits]
    torch.manual_seed(seed)
    expected = [dist.sample() for dist in dists]
    state = torch.get_rng_state()
    draw = sampler(Draw(kind, ("logits",), {}, InteractionType.RANDOM, True, True, GlobalNoise()))
    assert draw is not None
    assert draw.late
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "_APART", apart)
        if not quick:
            patch.setattr(samplers, "_made_of_uniform", lambda: False)
        for each, sample in zip(logits, expected, strict=True):
            found = draw.unscored(each)
            torch.rand(3, generator=other)
            assert found.dtype == sample.dtype
            assert torch.equal(found, sample)
    assert torch.equal(torch.get_rng_state(), state)
    scores = draw.scores()
    assert scores is not None
    singly = [dist.log_prob(sample) for dist, sample in zip(dists, expected, strict=True)]
    assert torch.equal(scores, torch.stack(singly))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_of_many_logits_that_is_no_number_is_refused(value: float, dtype: torch.dtype) -> None:
    for at in (0, 1), (1, 0), (99, slice(None)):
        logits = torch.zeros(300, 2, dtype=dtype)
        logits[at] = value
        draw = Draw(
            D.Categorical, ("logits",), {}, InteractionType.RANDOM, True, True, GlobalNoise()
        )
        drawing = sampler(draw)
        assert drawing is not None
        torch.manual_seed(0)
        probs = (logits - logits.logsumexp(-1, keepdim=True)).softmax(-1)
        expected = probs.div_(torch.empty_like(probs).exponential_(1)).argmax(-1)
        torch.manual_seed(0)
        assert torch.equal(drawing.unscored(logits), expected)
        with pytest.raises(RuntimeError, match="inf"):
            drawing.scores()


def test_exponential_numbers_that_are_not_made_of_uniform_ones_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whether = samplers._made_of_uniform.__wrapped__
    assert whether() is samplers._made_of_uniform()
    drawn = torch.Tensor.exponential_

    def scaled(self: torch.Tensor, rate: float = 1, **options: Any) -> torch.Tensor:
        return drawn(self, rate, **options).mul_(1 + 1e-5)

    def advanced(self: torch.Tensor, rate: float = 1, **options: Any) -> torch.Tensor:
        try:
            return drawn(self, rate, **options)
        finally:
            torch.rand(1, **options)

    for other in (scaled, advanced):
        monkeypatch.setattr(torch.Tensor, "exponential_", other)
        assert not whether()


# -------------------------------------------------------------------------- composite distributions


OBSERVED = {"observation": POINTS["param"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregate", [True, False])
def test_composite_distributions(aggregate: bool, kind: ExplorationType) -> None:
    values = LOGITS["logits"], LOC_SCALE["loc"], LOC_SCALE["scale"]
    keys = [("params", *key) for key in (("turn", "logits"), ("push", "loc"), ("push", "scale"))]
    parts = TensorDictModule(lambda _: values, in_keys=["observation"], out_keys=keys)
    how = [CALLED, "on a TensorDict: draws from a composite distribution"]
    with set_composite_lp_aggregate(aggregate):
        sample = SafeProbabilisticModule(
            in_keys=["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"turn": OneHotCategorical, "push": TanhNormal}
            },
            return_log_prob=True,
        )
        check(TensorDictSequential(parts, sample), OBSERVED, how, kind=kind)


# ------------------------------------------------------------------------ nets, most likely actions


SHARED = nn.Tanh()
NETS = {
    "MLP, given two entries": MLP(8, 2, num_cells=[16, 16]),
    "MLP of one layer": MLP(4, 2, depth=0),
    "MLP with norm": MLP(
        4, 2, num_cells=[16], norm_class=nn.LayerNorm, norm_kwargs=[{"normalized_shape": 16}]
    ),
    "a module that comes twice": nn.Sequential(
        nn.Linear(4, 8), SHARED, nn.Linear(8, 8), SHARED, nn.Linear(8, 2)
    ),
}


@pytest.mark.parametrize("net", NETS)
def test_nets(net: str) -> None:
    entries = ["observation"] * (2 if "two" in net else 1)
    check(TensorDictModule(NETS[net], in_keys=entries, out_keys=["logits"]), OBSERVED, CALLED)


class Remembering(nn.Linear):
    """Holds what it has given."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.held = super().forward(value)
        return self.held


def hooked(*args: int) -> nn.Linear:
    """The same, by a hook."""
    layer = nn.Linear(*args)
    layer.register_forward_hook(lambda module, _, out: setattr(module, "held", out))
    return layer


@pytest.mark.parametrize("function", [nn.Tanh, nn.ReLU, nn.Sigmoid])
def test_functions_write_into_what_nobody_else_holds_and_no_gradient_needs(function: Any) -> None:
    linear, ours = nn.Linear(4, 8), StepDict(OBSERVED)
    plain = nn.Sequential(nn.Identity(), function(), linear, function(), function())
    remembering, watched = Remembering(8, 8), hooked(8, 8)
    net = nn.Sequential(plain, remembering, function(), watched, function())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["out"])
    policy = LoweredPolicy(module, ours, torch.Size([N]), None)
    before = OBSERVED["observation"].clone()
    expected = net(before)
    held = [remembering.held.clone(), watched.held.clone()]
    with torch.no_grad():
        policy(ours)
    assert torch.equal(ours["out"], expected)
    assert torch.equal(OBSERVED["observation"], before)
    assert torch.equal(remembering.held, held[0])
    assert torch.equal(watched.held, held[1])
    policy(ours)
    (gradient,) = torch.autograd.grad(ours["out"].sum(), linear.weight)
    assert torch.equal(gradient, *torch.autograd.grad(expected.sum(), linear.weight))


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 6),
    st.sampled_from([1e-30, 1e-3, 1.0, 30.0, 1e4, 1e30]),
    st.integers(0, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([8, 260]),
)
def test_modes_of_logits_that_are_almost_alike(
    seed: int, actions: int, scale: float, ulps: int, dtype: torch.dtype, one_hot: bool, slots: int
) -> None:
    rng = np.random.default_rng(seed)
    eps = torch.finfo(dtype).eps
    near = 1 + eps * rng.integers(-ulps, ulps + 1, (slots, actions))
    logits = torch.from_numpy(scale * rng.normal(size=(slots, 1)) * near).to(dtype)
    logits[0, 0], logits[1, 1], logits[2, 0] = torch.tensor([np.nan, np.inf, -np.inf])
    kind = OneHotCategorical if one_hot else D.Categorical
    module = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=kind)
    mode = Draw(kind, ("logits",), {}, InteractionType.MODE, False, False, GlobalNoise())
    draw = sampler(mode)
    assert draw is not None
    for rows in (logits, logits[3:]):  # one row that is not clear sends all to the normalizer
        expected = kind(logits=rows).mode
        assert torch.equal(draw(rows)[0], expected)
        assert torch.equal(module(TensorDict(logits=rows))["action"], expected)


# ------------------------------------------------------------------------------------ other modules


ACTION = {"action": POINTS["param"]}
BOX = Bounded(-2, 2, (N, 4))
WIDE = Bounded(-0.5, 0.5, (N, 4))
CHOICE = {"action": torch.eye(4, dtype=torch.long)[:N]}
AGENTS = {"agents": TensorDict({"action": torch.eye(4).long()[:2].expand(N, 2, 4)}, [N, 2])}
KEY = ("agents", "action")
ATOMS = {"action_value": torch.linspace(-1, 1, 20 * N).view(N, 5, 4).log_softmax(-2)}


def agents_spec(leaf: Any) -> Composite:
    return Composite(agents=Composite(action=leaf, shape=(N, 2)), shape=(N,))


OTHERS: dict[str, tuple[Callable[[], Any], Mapping[str, Any]]] = {
    "tanh": (lambda: TanhModule(in_keys=["action"]), ACTION),
    "tanh in a spec": (lambda: TanhModule(in_keys=["action"], spec=BOX, clamp=True), ACTION),
    "Gaussian noise, safe": (lambda: AdditiveGaussianModule(WIDE, std=3.0, safe=True), ACTION),
    "epsilon-greedy with a mask": (
        lambda: EGreedyModule(OneHot(4, (N, 4)), 0.9, action_mask_key="mask"),
        {**CHOICE, "mask": MASKED["mask"]},
    ),
    "epsilon-greedy of integers": (
        lambda: EGreedyModule(Categorical(4, (N,)), 0.5),
        {"action": torch.tensor([0, 1, 3])},
    ),
    "epsilon-greedy of masked agents": (
        lambda: EGreedyModule(
            agents_spec(OneHot(4, (N, 2, 4))), 0.5, action_key=KEY, action_mask_key="mask"
        ),
        {**AGENTS, "mask": torch.arange(8 * N).view(N, 2, 4) % 3 != 1},
    ),
    "Q-values with a mask": (
        lambda: QValueModule(action_space="one_hot", action_mask_key="mask"),
        {"action_value": POINTS["param"], "mask": MASKED["mask"]},
    ),
    "Q-values of agents": (
        lambda: QValueModule(
            action_value_key=("agents", "value"),
            out_keys=[KEY, ("agents", "value"), ("agents", "chosen")],
            action_space="categorical",
        ),
        {"agents": TensorDict({"value": torch.linspace(-1, 1, 8 * N).sin().view(N, 2, 4)}, [N, 2])},
    ),
    "distributions of Q-values": (
        lambda: DistributionalQValueModule(
            action_space="one_hot", support=torch.linspace(-1, 1, 5)
        ),
        ATOMS,
    ),
    "dropout that is kept": (
        lambda: ConsistentDropoutModule(0.5, ["action", "mask"], input_shape=(N, 4)),
        {**ACTION, "mask": MASKED["mask"].float()},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_modules_that_run_their_own_code(name: str) -> None:
    make, given = OTHERS[name]
    for kind in KINDS:
        torch.manual_seed(0)
        check(make(), given, OWN, kind=kind)


def test_safe_modules_project_on_their_spec() -> None:
    module = SafeModule(lambda x: 3 * x, ["action"], ["action"], spec=WIDE, safe=True)
    check(module, ACTION, [CALLED, OWN])
    narrow = StepDict(action=ACTION["action"][:, :1])
    for call in (module, LoweredPolicy(module, narrow, torch.Size([N]), None)):
        with pytest.raises(RuntimeError, match="expanded size"):
            call(TensorDict(narrow, [N]) if call is module else narrow)
    actor = SafeProbabilisticModule(
        in_keys=NORMAL,
        out_keys=["action"],
        spec=WIDE,
        safe=True,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    check(actor, LOC_SCALE, [STRAIGHT, OWN])


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    spec=st.sampled_from(
        [
            WIDE,
            Bounded(-0.5, 0.5, (4,)),
            Bounded(0.0, torch.tensor([0.0, 1.0, 2.0, 3.0]), (4,)),
            Bounded(-0.5, 0.5, (N, 4), dtype=torch.float64),
            Bounded(-1, 1, (N, 4), dtype=torch.int64),
            Unbounded((N, 4)),
        ]
    ),
    odd=st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 0.5]),
    scale=st.sampled_from([0.1, 1.0]),
)
def test_projections(seed: int, spec: Any, odd: float, scale: float) -> None:
    torch.manual_seed(seed)
    value = (scale * torch.randn(N, 4)).clamp(-3, 3)
    value[torch.rand(N, 4) < 0.3] = odd
    module = SafeModule(nn.Identity(), ["action"], ["action"], spec=spec, safe=True)
    check(module, {"action": value}, None, calls=1)
    if not spec.dtype.is_floating_point:
        return
    for safe in (True, False):
        check(AdditiveGaussianModule(spec, safe=safe), {"action": value}, OWN, calls=1)


@pytest.mark.parametrize(
    "module",
    [
        AdditiveGaussianModule(WIDE, safe=False),
        SafeModule(lambda x: 3 * x, ["action"], ["action"], spec=WIDE, safe=True),
    ],
    ids=["noise", "safe module"],
)
def test_a_spec_that_changes_meanwhile(module: Any) -> None:
    """As during an evaluation, which gives exploration modules the spec of its batch."""
    step = flat(TensorDict(ACTION, [N]))
    with set_exploration_type(RANDOM):
        policy = LoweredPolicy(module, step, torch.Size([N]), None)
        policy(step)
        assert step["action"].abs().max() == 0.5
        set_exploration_spec(module, Composite(action=Bounded(-0.25, 0.25, (N, 4)), shape=(N,)))
        policy(step)
        assert step["action"].abs().max() == 0.25


def test_other_hooks_beside_the_projection_are_called_on_a_tensordict() -> None:
    module = SafeModule(lambda x: 3 * x, ["action"], ["action"], spec=WIDE, safe=True)
    module.register_forward_hook(lambda module, given, out: out.set("seen", out["action"] + 1))
    check(module, ACTION, "on a TensorDict: has hooks")


def test_state_dependent_exploration() -> None:
    noise = torch.linspace(-1, 1, 8 * N).view(N, 2, 4)
    torch.manual_seed(0)
    module = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["mean"]),
        TensorDictModule(
            LazygSDEModule(),
            ["mean", "observation", "_eps_gSDE"],
            ["loc", "scale", "action", "_eps_gSDE"],
        ),
        SafeProbabilisticModule(NORMAL, ["action"], distribution_class=IndependentNormal),
    )
    given = {**OBSERVED, "_eps_gSDE": noise}
    with set_exploration_type(RANDOM):
        module(TensorDict(given, [N]))  # its weights take their shapes
    check(module, given, [CALLED, CALLED, STRAIGHT])
    check(module, given, CALLED, kind=DETERMINISTIC)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_without_starts_of_episodes_is_zeroed_with_the_slot(kind: ExplorationType) -> None:
    options = {
        "frames_per_batch": 40,
        "exploration_type": kind,
        "auto_register_policy_transforms": False,
    }
    check_same(ENVS["pendulum"], policies.ornstein_uhlenbeck, batches(2), lambda: options)


def test_outputs_that_are_ignored_and_inputs_that_may_be_missing() -> None:
    module = TensorDictModule(lambda x: (x + 1, x * 2), ["action"], ["_", "twice"])
    check(module, ACTION, CALLED)
    tolerant = TensorDictSequential(module, partial_tolerant=True)
    check(tolerant, ACTION, "on a TensorDict: tolerates missing inputs")
