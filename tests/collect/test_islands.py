"""Transforms that tdcollect does not know: each alone gets TensorDicts, and does what it does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl import envs as E
from torchrl.data import Unbounded

from tdcollect import Collector

from . import policies, transforms
from .envs import ENVS
from .oracle import UPSTREAM, ParentCollector, batches, check_same

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

OBS = "observation"


class Own(E.Transform):
    """A user's transform: ``_call`` runs at resets, too."""

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._call(reset)


class Adding(Own):
    """Adds an entry of the observation's shape, with its spec."""

    key: Any = "added"

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        shape = (*observation_spec.shape, 3)
        observation_spec[self.key] = Unbounded(shape, dtype=torch.float32)
        return observation_spec


class InPlace(Own):
    def _call(self, next_tensordict: Any) -> Any:
        next_tensordict[OBS].mul_(0.5)
        next_tensordict[OBS] += 1
        return next_tensordict


class NewTensorDict(Own):
    def _call(self, next_tensordict: Any) -> Any:
        entries = dict(next_tensordict.items())
        entries[OBS] = entries[OBS] * 2
        return TensorDict(entries, next_tensordict.batch_size)


class Replaces(Adding):
    """Removes the observation; another entry takes its place."""

    def _call(self, next_tensordict: Any) -> Any:
        return next_tensordict.set("added", next_tensordict.pop(OBS) + 1)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        del observation_spec[OBS]
        return super().transform_observation_spec(observation_spec)


class Nests(Adding):
    key = ("deep", "added")

    def _call(self, next_tensordict: Any) -> Any:
        next_tensordict["deep", "added"] = next_tensordict[OBS].flip(-1)
        return next_tensordict


class PaysForActions(E.Transform):
    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        next_tensordict["reward"] = next_tensordict["reward"] - tensordict["action"][..., :1] * 0.1
        return next_tensordict


class CountsEpisodes(Adding):
    """Counts the episodes of each slot, by the mask of its resets."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def _call(self, next_tensordict: Any) -> Any:
        counts = self.count.expand(*next_tensordict.batch_size, 1)
        return next_tensordict.set("added", counts.repeat_interleave(3, -1).clone())

    def _reset(self, tensordict: Any, reset: Any) -> Any:
        mask = tensordict.get("_reset", None)
        if mask is None:
            mask = torch.ones(*reset.batch_size, 1, dtype=torch.bool)
        self.count = self.count + mask
        return self._call(reset)


class Mixes(Own):
    """Centres the observations of a step."""

    def _call(self, next_tensordict: Any) -> Any:
        value = next_tensordict[OBS]
        mean = value.mean(0, keepdim=True)
        return next_tensordict.set(OBS, value - mean)


class LeavesNote(E.Transform):
    """Writes to the step taken, for a later transform."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        tensordict["note"] = next_tensordict["reward"] * 2
        return next_tensordict


class ReadsNote(E.Transform):
    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        next_tensordict["reward"] = next_tensordict["reward"] + tensordict["note"]
        return next_tensordict


class Prepares(Own):
    """Changes the marks of a reset, and the step, for a later transform's reset."""

    enable_inv_on_reset = True

    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict.set("noted", torch.ones(*tensordict.batch_size, 1))

    def _call(self, next_tensordict: Any) -> Any:
        return next_tensordict

    def _reset(self, tensordict: Any, reset: Any) -> Any:
        noted = 0 if tensordict is None else tensordict.get("noted", torch.zeros(()))
        return reset.set(OBS, reset[OBS] + noted)


class Applied(E.ObservationTransform):
    """Maps the observation, by NumPy."""

    def __init__(self) -> None:
        super().__init__(in_keys=[OBS], out_keys=[OBS])

    def _apply_transform(self, obs: torch.Tensor) -> Any:
        return obs.numpy() * 2

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._call(reset)


class Marks(E.Transform):
    """Marks steps with a flag alone, and does not end the episode."""

    def __init__(self, flag: str):
        super().__init__()
        self.flag = flag

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        marked = next_tensordict[OBS][..., :1] > 0.5
        return next_tensordict.set(self.flag, next_tensordict[self.flag] | marked)


class StepsAgain(E.Transform):
    """Steps its parent env once more, where no episode has ended."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        if next_tensordict["done"].any():
            return next_tensordict
        again = self.parent._step(tensordict)
        return again.set("reward", again["reward"] + next_tensordict["reward"])


class Describes(Own):
    """Adds entries without a spec, which the batch does not have."""

    def _call(self, next_tensordict: Any) -> Any:
        next_tensordict["text"] = "a note"
        return next_tensordict.set("square", next_tensordict[OBS] ** 2)


def replaced() -> E.Transform:
    norm: Any = transforms.norm()
    norm._apply_transform = lambda value: value * 3
    return norm


def hooked() -> E.Transform:
    norm = transforms.norm()
    norm.register_forward_hook(lambda *_: None)
    return norm


def composed(*parts: Any) -> Callable[[], E.Transform]:
    return lambda: E.Compose(*(part() for part in parts))


ISLANDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "in-place": ("toy", InPlace),
    "in-place-over-norm": ("toy", composed(transforms.norm, InPlace, E.RewardSum)),
    "new-tensordict": ("toy", NewTensorDict),
    "replaces": ("toy", Replaces),
    "nests": ("toy", Nests),
    "pays": ("toy", composed(PaysForActions, E.RewardSum)),
    "counts": ("toy", CountsEpisodes),
    "counts-unbatched": ("toy-unbatched", CountsEpisodes),
    "counts-serial": ("torchrl-serial", CountsEpisodes),
    "mixes": ("toy", composed(transforms.books, Mixes)),
    "notes": ("toy", composed(LeavesNote, ReadsNote)),
    "prepares": ("toy", composed(Prepares, Prepares)),
    "numpy": ("toy", Applied),
    "lambda": ("toy", lambda: lambda td: td.set(OBS, td[OBS] * 2)),
    "truncates-alone": ("toy", composed(lambda: Marks("truncated"), transforms.books)),
    "terminates-alone": ("torchrl-serial", lambda: Marks("terminated")),
    "truncates-alone-unbatched": ("toy-unbatched", lambda: Marks("truncated")),
    "truncates-alone-counted": ("pendulum", lambda: E.StepCounter(3, update_done=False)),
    "steps-again": ("cartpole-unbatched", composed(transforms.norm, StepsAgain, E.RewardSum)),
    "steps-again-gym": ("torchrl-gym", composed(E.RewardSum, StepsAgain)),
    "steps-again-batched": ("pendulum", StepsAgain),
    "noops": ("cartpole-unbatched", lambda: E.NoopResetEnv(4)),
    "noops-gym": ("torchrl-gym", composed(lambda: E.NoopResetEnv(4), transforms.books)),
    "replaced": ("cartpole", replaced),
    "hooked": ("cartpole", hooked),
    "noise": ("toy", transforms.Noise),
    "terminates": (
        "toy",
        lambda: E.transforms.TerminateTransform(lambda td: td[OBS][..., 0] > 1),
    ),
    "actions-by-mean": ("toy", composed(transforms.RunningSum, transforms.NegatedAction)),
}


@pytest.mark.parametrize("case", ISLANDS)
def test_an_unknown_transform_is_torchrls_to_the_bit_and_all_else_on_arrays(case: str) -> None:
    env, transform = ISLANDS[case]

    def script(collector: Any) -> Iterator[Any]:
        if isinstance(collector, Collector):
            plan = collector._runner.plan(iterating=True)
            assert plan.env is not None, plan.reasons
        yield from batches()(collector)

    check_same(lambda: E.TransformedEnv(ENVS[env](), transform()), policies.actor, script)


def test_entries_without_a_spec_are_left_out_of_the_following_step() -> None:
    def script(collector: Any) -> Iterator[Any]:
        for batch in itertools.islice(collector, 3):
            # What resets give stays in the step, stale.
            yield batch.exclude("square", "text")

    check_same(lambda: E.TransformedEnv(ENVS["toy"](), Describes()), policies.random_policy, script)


class EndsAtOnce(E.Transform):
    """Ends the second episode of a slot at its reset."""

    def _reset(self, tensordict: Any, reset: Any) -> Any:
        if tensordict is None or tensordict.get("_reset", None) is None:
            return reset
        return reset.set("done", torch.ones_like(reset["done"]))


@pytest.mark.parametrize("kind", [Collector, ParentCollector])
def test_an_episode_that_ends_at_its_reset_is_refused(kind: Any) -> None:
    env = E.TransformedEnv(ENVS["toy"](), EndsAtOnce())
    with pytest.raises(RuntimeError, match="reset"):
        next(iter(kind(env, None, frames_per_batch=60)))


@pytest.mark.parametrize("episodes", [False, True])
@pytest.mark.parametrize("env", ["toy", "toy-unbatched", "torchrl-serial"])
def test_an_entry_of_steps_that_resets_lack_is_refused(env: str, episodes: bool) -> None:
    """TorchRL's collector raises, too: an episode's first row has no value for it."""
    theirs, collector = (
        kind(E.TransformedEnv(ENVS[env](), transforms.OneSided("step")), None, frames_per_batch=30)
        for kind in (ParentCollector, Collector)
    )
    with pytest.raises(TypeError, match="got NoneType"):
        theirs.rollout()
    how = {"episodes": 2} if episodes else {"frames": 30}
    for _ in range(2):  # a second try does not begin amid an episode
        with pytest.raises(ValueError, match=r"\['added'\] from resets"):
            collector.collect(**how)


class Averages(Adding):
    """Averages an entry over the slots: over all of them, at a reset too."""

    def __init__(self, key: str):
        super().__init__()
        self.read = key

    def _call(self, next_tensordict: Any) -> Any:
        value = next_tensordict[self.read].to(torch.float32)
        mean = value.mean(0, keepdim=True)[..., :1]
        return next_tensordict.set("added", mean.expand(*value.shape[:-1], 3).clone())


AVERAGED: dict[str, tuple[str, Callable[[], E.Transform]]] = {
    "sum": ("episode_reward", E.RewardSum),
    "count": ("step_count", E.StepCounter),
    "init": ("is_init", E.InitTracker),
    "primer": ("memory", lambda: transforms.primer(False)),
    "primer-random": ("memory", lambda: transforms.primer(True)),
    "target": ("target_return", lambda: E.TargetReturn(10.0)),
    "trajectories": ("traj_count", E.TrajCounter),
    "frames": (OBS, lambda: E.CatFrames(3, -1, [OBS])),
    "pool": (OBS, lambda: E.TimeMaxPool([OBS], T=2)),
    "vec-norm": (OBS, lambda: E.VecNormV2([OBS], reduce_batch_dims=True)),
    "stateless": (OBS, lambda: E.VecNormV2([OBS], stateful=False)),
    "copy": ("copy", lambda: E.RenameTransform([OBS], ["copy"], create_copy=True)),
}


@pytest.mark.parametrize("case", AVERAGED)
def test_slots_that_go_on_show_at_a_reset_what_torchrls_do(case: str) -> None:
    key, transform = AVERAGED[case]
    check_same(
        lambda: E.TransformedEnv(ENVS["cartpole"](), E.Compose(transform(), Averages(key))),
        policies.actor,
    )


def high(tensordict: Any) -> torch.Tensor:
    return tensordict[OBS][..., 0] > 0.5


def every_other(tensordict: Any) -> torch.Tensor:
    return (tensordict["step_count"] % 2 == 1).squeeze(-1)


def at_once(tensordict: Any) -> torch.Tensor:
    chosen = every_other(tensordict)
    return chosen.any().expand(chosen.shape)


def skipping(when: Callable[[Any], torch.Tensor]) -> Callable[[], Any]:
    return composed(E.StepCounter, lambda: E.ConditionalSkip(when))


class Draws:
    """A random policy that makes so many actions a step."""

    def __init__(self, env: E.TransformedEnv, actions: int):
        self.actions_of = env.base_env.action_spec
        self.actions = actions

    def __call__(self, tensordict: Any) -> Any:
        drawn = [self.actions_of.rand() for _ in range(self.actions)]
        dim = tensordict.ndim
        return tensordict.set("action", drawn[0] if len(drawn) == 1 else torch.stack(drawn, dim))


PARTLY: dict[str, tuple[str, int, Callable[[], Any]]] = {
    "skips-some-slots": (
        "toy",
        1,
        composed(E.StepCounter, lambda: E.ConditionalSkip(high), E.RewardSum),
    ),
    "skips-some-slots-serial": ("torchrl-serial", 1, skipping(every_other)),
    "skips-all-slots": ("pendulum", 1, skipping(at_once)),
    "skips-unbatched": ("torchrl-gym-pendulum", 1, skipping(every_other)),
    # Steps in the middle of which an episode ends have fewer rewards.
    "several-actions": ("cartpole", 2, E.MultiAction),
    "several-actions-pendulum": ("pendulum", 2, E.MultiAction),
    "several-actions-unbatched": ("torchrl-gym-pendulum", 2, E.MultiAction),
}


@pytest.mark.parametrize("case", PARTLY)
def test_a_transform_may_skip_steps_or_take_several_actions_a_step(case: str) -> None:
    env, actions, transform = PARTLY[case]
    check_same(
        lambda: E.TransformedEnv(ENVS[env](), transform()),
        lambda made: Draws(made, actions),
        catch=actions > 1,
    )


POOL: dict[str, Callable[[], E.Transform]] = {
    "norm": transforms.norm,
    "sum": E.RewardSum,
    "count": lambda: E.StepCounter(4),
    "init": E.InitTracker,
    "frames": lambda: E.CatFrames(2, -1, [OBS]),
    "vec-norm": lambda: E.VecNormV2([OBS], reduce_batch_dims=True),
    "vec-norm-1": lambda: E.VecNorm([OBS, "reward"]),
    "clip": lambda: E.ClipTransform([OBS], low=-1.0, high=1.0),
    "copy": lambda: E.RenameTransform([OBS], ["kept"], create_copy=True),
    "pool": lambda: E.TimeMaxPool([OBS], T=2),
    "target": lambda: E.TargetReturn(3.0),
    "in-place": InPlace,
    "new": NewTensorDict,
    "pays": PaysForActions,
    "mixes": Mixes,
    "noise": transforms.Noise,
    "ends": transforms.EarlyEnd,
}


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(POOL)), min_size=2, max_size=6, unique=True),
    st.sampled_from(["toy", "toy-unbatched", "torchrl-serial"]),
)
def test_any_order_of_transforms_is_torchrls_to_the_bit(names: list[str], env: str) -> None:
    def make() -> E.EnvBase:
        return E.TransformedEnv(ENVS[env](), E.Compose(*(POOL[name]() for name in names)))

    check_same(make, policies.random_policy)
