"""Transforms of TorchRL and of users: each gives what it gives under TorchRL, to the bit."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import gymnasium as gym
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl import envs as E
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import _timer as timer

from tdcollect import Collector
from tdcollect.collect import arrays
from tdcollect.collect.lowering import LOWERED, exact_reward_of, lower_transforms
from tdcollect.collect.step_dict import StepDict
from tdcollect.envs.traits import TRAITS, of_kind

from . import policies, transforms
from .envs import ENVS, masked
from .loops import on_arrays
from .oracle import UPSTREAM, assert_same, batches, check_same, parents_state
from .transforms import ISLANDS, OBS, STATEFUL, STATELESS, R, begun

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

# Their envs have two actions, or none that an actor can make; normalized integers are not finite.
DRAWN = (
    "rename-action",
    "discretized-compose",
    "discretized-one-hot",
    "closed-loop",
    "closed-loop-state",
)
NOT_FINITE = ("toy-nested", "toy-pixels")


def policy_of(case: str) -> Any:
    drawn = case in DRAWN or (case in STATEFUL and STATEFUL[case][0] in NOT_FINITE)
    return policies.random_policy if drawn else policies.actor


def check_plan(case: str, collector: Any) -> None:
    """Raise unless those transforms of a collector of ours that are known run on arrays."""
    if isinstance(collector, Collector) and arrays.RUN_ON_ARRAYS:
        found = collector._runner.plan(iterating=True)
        known = found.env and all(part.how.startswith("on arrays") for part in found.env.parts)
        assert known or case in ISLANDS, found.reasons
        assert not known or case not in ISLANDS


@on_arrays("case", STATELESS | ISLANDS, parent=["books", "norm"])
def test_batches_are_torchrls(case: str, arrays: bool) -> None:
    def script(collector: Any) -> Iterator[Any]:
        check_plan(case, collector)
        yield from batches(2)(collector)

    check_same(lambda: transforms.make(case), policy_of(case), script)


@pytest.mark.parametrize("case", STATEFUL)
def test_the_state_is_torchrls_from_batch_to_batch(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches on arrays and in TorchRL's loop in turn, with the env's own rollouts between."""

    def script(collector: Any) -> Iterator[Any]:
        check_plan(case, collector)
        stream, env = iter(collector), collector.env
        for ours in (True, False, True):
            monkeypatch.setattr(arrays, "RUN_ON_ARRAYS", ours)
            yield next(stream)
            yield env.transform.state_dict()
        yield env.rollout(5, break_when_any_done=False)
        collector.reset()
        yield next(stream)
        yield parents_state(collector)

    check_same(lambda: transforms.make(case), policy_of(case), script)


class Notes(E.Transform):
    """Writes to what the env's reset is given, and adds it to the observation of a reset."""

    enable_inv_on_reset = True

    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict.set("noted", torch.ones(*tensordict.batch_size, 1))

    def _reset(self, tensordict: Any, reset: Any) -> Any:
        noted = 0 if tensordict is None else tensordict.get("noted", torch.zeros(()))
        return reset.set(OBS, reset[OBS] + noted)


@pytest.mark.parametrize("enabled", [False, True])
def test_inverses_of_known_transforms_change_resets_if_asked(enabled: bool) -> None:
    def make() -> E.EnvBase:
        norm = E.ObservationNorm(0.5, 4.0, in_keys=[], in_keys_inv=["noted"])
        norm.enable_inv_on_reset = enabled
        return E.TransformedEnv(ENVS["toy"](), E.Compose(norm, Notes()))

    check_same(make, policies.actor)


class Erase(E.Transform):
    """A user may write into a step's stack: the next one does not show it."""

    def _call(self, next_tensordict: Any) -> Any:
        next_tensordict[OBS].zero_()
        return next_tensordict


def choosing() -> E.EnvBase:
    return E.TransformedEnv(ENVS["pendulum"](), E.ActionDiscretizer(5, out_action_key="choice"))


def two_layers() -> E.EnvBase:
    inner = E.TransformedEnv(ENVS["cartpole"](), transforms.norm())
    return E.TransformedEnv(inner, transforms.books(), auto_unwrap=False)


def erased() -> E.EnvBase:
    return E.TransformedEnv(ENVS["toy"](), E.Compose(E.CatFrames(3, -1, [OBS]), Erase()))


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (choosing, policies.random_policy),
        (two_layers, policies.actor),
        (erased, policies.actor),
        (lambda: masked(None), policies.random_policy),
        (lambda: masked(3), policies.random_policy),
    ],
    ids=["a discretizer alone", "two layers", "stacks that are written", "a mask", "masks"],
)
@pytest.mark.filterwarnings("ignore:random actions ignore the env's action masks")
def test_envs_of_other_makes(make: Any, policy: Any) -> None:
    check_same(make, policy)


@pytest.mark.skipif(not hasattr(E, "ClosedLoopMultiAction"), reason="since TorchRL 0.15")
@pytest.mark.parametrize("limits", [(None, None), (7, 5)])
def test_controllers_inside_of_a_serial_env(limits: Any) -> None:
    def one(limit: int | None) -> E.EnvBase:
        env = E.GymWrapper(gym.make("Pendulum-v1", max_episode_steps=limit))
        return E.TransformedEnv(env, transforms.remembers())

    makes = [partial(one, limit) for limit in limits]
    check_same(lambda: E.SerialEnv(2, makes), policies.random_policy)


class Carries(E.Transform):
    """Counts steps in what its inverse writes for the following step, which TorchRL 0.15 takes."""

    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict.set(("next", "count"), tensordict["count"] + 1)


@pytest.mark.parametrize("inside", [False, True])
def test_inverses_may_write_the_following_step(inside: bool) -> None:
    def make() -> E.EnvBase:
        primer = E.TensorDictPrimer(count=Unbounded((1,)), default_value=0.0, expand_specs=True)
        carried = lambda env: E.TransformedEnv(env, E.Compose(primer.clone(), Carries()))  # noqa: E731
        if inside:
            return E.SerialEnv(2, lambda: carried(E.GymEnv("CartPole-v1")))
        return carried(ENVS["cartpole"]())

    check_same(make, policies.random_policy)


def test_the_timer_is_asked_as_often_as_by_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> E.EnvBase:
        ticks = itertools.count()
        monkeypatch.setattr(timer, "time", SimpleNamespace(time=lambda: float(next(ticks))))
        return E.TransformedEnv(ENVS["toy"](), E.Compose(timer.Timer(), E.RewardSum()))

    check_same(make, policies.random_policy)


@pytest.mark.parametrize(
    ("parts", "error", "match"),
    [
        (
            lambda: [E.UnaryTransform([OBS], [OBS], fn=lambda x: x / 0), E.FiniteTensorDictCheck()],
            ValueError,
            "non-finite",
        ),
        (
            lambda: [E.RenameTransform(["nothing"], ["something"])],
            KeyError,
            "expected an entry 'nothing' for RenameTransform",
        ),
    ],
)
def test_errors_of_transforms(parts: Any, error: Any, match: str) -> None:
    env = E.TransformedEnv(ENVS["toy"](), E.Compose(*parts()))
    with pytest.raises(error, match=match):
        next(iter(Collector(env, None, frames_per_batch=9)))


@pytest.mark.parametrize(
    ("transform", "exact"),
    [
        (lambda: E.RenameTransform([OBS], ["reward2"], create_copy=True), True),
        (lambda: E.RenameTransform([R], ["gain"], create_copy=True), False),
        (lambda: E.ExcludeTransform(OBS), True),
        (lambda: E.TrajCounter(), True),
        (lambda: E.LineariseRewards([R], weights=[0.3]), False),
        (lambda: E.FrameSkipTransform(2), False),
    ],
)
def test_rewards_are_exact_where_a_transform_leaves_them_alone(transform: Any, exact: bool) -> None:
    env = E.TransformedEnv(ENVS["toy"](), transform())
    assert (exact_reward_of(env) is not None) is exact


def test_what_is_written_out_is_in_the_table_and_the_rest_runs_by_its_own_code() -> None:
    own_code = set(of_kind("own_code"))
    assert not own_code & set(LOWERED)
    assert set(TRAITS) - own_code - set(LOWERED) == {E.transforms.Reward2GoTransform}
    assert set(LOWERED) <= set(TRAITS)


# ---------------------------------------------------------------------------------- their states


@pytest.mark.parametrize("kind", [E.VecNorm, E.VecNormV2])
def test_freezing_and_loading_between_batches(kind: Any) -> None:
    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        norm = collector.env.transform
        yield next(stream)
        norm.freeze()
        kept = copy.deepcopy(norm.state_dict())
        yield next(stream)
        yield norm.state_dict()
        copied = norm.frozen_copy()
        norm.unfreeze()
        yield next(stream)
        yield {"loc": norm.loc, "scale": norm.scale, "copied": copied.loc}
        norm.load_state_dict(kept)
        yield next(stream)

    def make() -> E.EnvBase:
        return E.TransformedEnv(ENVS["cartpole"](), kind(in_keys=[OBS, R]))

    check_same(make, policies.actor, script)


@pytest.mark.parametrize("kind", [E.VecNorm, E.VecNormV2])
def test_each_step_takes_the_lock(kind: Any) -> None:
    norm = kind(in_keys=[OBS])
    env = E.TransformedEnv(ENVS["cartpole"](), norm)
    stream = iter(Collector(env, policies.actor(env), frames_per_batch=6))
    next(stream)
    norm.lock, seen = MagicMock(), []
    norm.lock.__enter__.side_effect = lambda *_: seen.append(norm.loc[OBS])
    norm.lock.__exit__.side_effect = lambda *_: seen.append(norm.loc[OBS])
    next(stream)
    assert len(seen) >= 4
    for before, after, later in zip(
        seen[::2], seen[1::2], [*seen[2::2], norm.loc[OBS]], strict=True
    ):
        assert not torch.equal(before, after)
        assert torch.equal(after, later)


def counted() -> E.Transform:
    return E.Compose(E.TrajCounter(), E.VecNorm([OBS]))


SEEDED = ["vec-norm-shapes", "vec-norm-shared", "vec-norm-over-books", "vec-norm-2-reduced"]
SEEDED += ["vec-norm-2-shared", "counted"]


@pytest.mark.parametrize("case", SEEDED)
def test_set_seed_before_the_first_batch_leaves_nothing_of_the_unseeded_reset(case: str) -> None:
    env, transform = STATEFUL.get(case, ("cartpole", counted))
    collector = Collector(
        E.TransformedEnv(ENVS[env](), transform()), frames_per_batch=24, total_frames=-1
    )
    collector.set_seed(3)
    collector.reset()
    collector.set_seed(0)
    torch.manual_seed(5)
    batch = next(iter(collector))
    made = E.TransformedEnv(ENVS[env](), transform())
    made.set_seed(0)  # the reset at construction is then that of the seed
    theirs = TorchRLCollector(made, frames_per_batch=24, total_frames=-1)
    torch.manual_seed(5)
    expected = next(iter(theirs))
    expected["collector"] = batch["collector"]  # ids go on
    for key, value in expected.items(True, True):
        assert torch.equal(batch[key].nan_to_num(), value.nan_to_num()), key


def normed_gym() -> E.EnvBase:
    return E.TransformedEnv(E.GymEnv("CartPole-v1"), E.VecNorm([OBS]))


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (normed_gym, {"frames": 24}),
        (lambda: E.SerialEnv(2, normed_gym), {"frames": 24}),
        (lambda: transforms.make("vec-norm-2"), {"episodes": 2}),
    ],
)
def test_a_seed_at_first_leaves_nothing_of_the_unseeded_reset(make: Any, count: Any) -> None:
    found = []
    for _ in range(2):
        collector = Collector(make(), frames_per_batch=24, total_frames=-1)
        torch.manual_seed(5)
        found.append(collector.collect(**count, seed=0)[OBS])
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", [E.VecNorm, E.VecNormV2])
def test_set_seed_keeps_statistics_of_batches_and_those_that_were_loaded(kind: Any) -> None:
    norm, other = kind([OBS]), begun(kind)
    env = E.TransformedEnv(ENVS["cartpole"](), norm)
    collector = Collector(env, frames_per_batch=24, total_frames=-1)
    norm.load_state_dict(copy.deepcopy(other.state_dict()))
    norm.freeze()  # or the reset of set_seed would move them
    collector.set_seed(0)
    assert torch.equal(norm.loc[OBS], other.loc[OBS])
    norm.unfreeze()
    next(iter(collector))
    norm.freeze()
    before = norm.loc[OBS].clone()
    collector.set_seed(0)
    assert torch.equal(norm.loc[OBS], before)


def test_set_seed_keeps_statistics_in_the_memory_that_is_shared() -> None:
    data = TensorDict(
        loc={OBS: torch.zeros(3, 4)},
        var={OBS: torch.zeros(3, 4)},
        count={OBS: torch.zeros((), dtype=torch.int64)},
    ).share_memory_()
    norm = E.VecNormV2([OBS], shared_data=data)
    Collector(E.TransformedEnv(ENVS["cartpole"](), norm), frames_per_batch=24).set_seed(0)
    assert data["count", OBS] == 1
    assert torch.equal(norm._loc[OBS], data["loc", OBS])


ODD = [0.0, -0.0, 1e-30, -1e-40, 3e38, math.inf, -math.inf, math.nan]


@st.composite
def numbers(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any numbers: ordinary ones, and some odd."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 10
    for place in draw(st.lists(st.integers(0, max(0, found.numel() - 1)), max_size=3)):
        found.view(-1)[place] = draw(st.sampled_from(ODD))
    return found


def in_steps(env: E.TransformedEnv, given: list[torch.Tensor], part: Any) -> list[Any]:
    """The entries after each of some steps, on StepDicts or, without a part, by TorchRL's code."""
    found = []
    for value in given:
        entries = StepDict({OBS: value.clone()})
        if part is None:
            entries = env.transform._call(TensorDict(entries, env.batch_size))
        else:
            part.step(StepDict(), entries)
        found.append(entries[OBS])
    return found


class Fixed(E.EnvBase):
    """An env of a batch size, which is never stepped."""

    def __init__(self, batch: tuple[int, ...]):
        super().__init__(batch_size=batch)
        self.observation_spec = Composite({OBS: Unbounded((*batch, 3))}, shape=batch)
        self.action_spec, self.reward_spec = Unbounded((*batch, 1)), Unbounded((*batch, 1))

    _reset = _step = _set_seed = lambda self, *given: None


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_few_numbers_in_numpy_have_the_bits_of_torchrl(data: st.DataObject) -> None:
    """VecNorm, frozen or with other statistics from some step on; ClipTransform."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    batch = data.draw(st.sampled_from([(), (1,), (3,), (40,), (2, 3)]))
    given = data.draw(st.lists(numbers(dtype, (*batch, 3)), min_size=1, max_size=4))
    options = {
        "decay": data.draw(st.sampled_from([0.9999, 0.5, 1.0])),
        "eps": data.draw(st.sampled_from([1e-4, 1e-2, 0.0])),
    }
    frozen, replaced = data.draw(st.booleans()), data.draw(st.booleans())
    low, high = sorted(
        data.draw(st.lists(st.sampled_from([-3, 0.0, 0.1, 7]), min_size=2, max_size=2, unique=True))
    )
    makers = [
        lambda: E.VecNorm(in_keys=[OBS], **options),
        lambda: E.ClipTransform([OBS], low=low, high=high),
    ]
    for make in makers:
        records = []
        for ours in (True, False):
            env = E.TransformedEnv(Fixed(batch), make())
            part = lower_transforms([env.transform], env)[0] if ours else None
            first, state = in_steps(env, given, part), env.transform.state_dict()
            if isinstance(env.transform, E.VecNorm):
                env.transform.frozen = frozen
                env.transform._td = env.transform._td.clone() if replaced else env.transform._td
            records.append([first, state, in_steps(env, given, part), env.transform.state_dict()])
        assert_same(*records)
