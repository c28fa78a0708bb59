"""Random actions are drawn on arrays as TorchRL draws them, to the bit."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import Bounded, Choice, Composite
from torchrl.envs import (
    ActionDiscretizer,
    ActionScaling,
    Compose,
    EnvBase,
    GymWrapper,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import RandomPolicy

from tdcollect import Collector, evaluate, make_env

from ..zoo.masked import Masked
from . import policies
from .envs import ENVS, Toy, masked
from .oracle import UPSTREAM, batches, check_same

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

DRAWN = "drawn from the action spec, on arrays"


def scaled() -> EnvBase:
    env = make_env("Pendulum-v1", 2, max_episode_steps=7)
    return TransformedEnv(env, Compose(ActionScaling(loc=0.0, scale=2.0), StepCounter()))


def discretized() -> EnvBase:
    env = make_env("Pendulum-v1", 2, max_episode_steps=7)
    return TransformedEnv(env, ActionDiscretizer(num_intervals=5))


RANDOM_ENVS: dict[str, Callable[[], EnvBase]] = {
    **{
        name: ENVS[name]
        for name in (
            "cartpole",
            "cartpole-unbatched",
            "cartpole-categorical",
            "cartpole-device",
            "pendulum",
            "toy-binary",
            "toy-dict-action",
            "toy-many-actions",
            "toy-scalar",
        )
    },
    "scaled actions": scaled,
    "discretized actions": discretized,
}

OPTIONS: list[dict[str, Any]] = [
    {},
    {"init_random_frames": 37, "use_buffers": False},
    {"return_same_td": True, "set_truncated": True},
    {"reset_at_each_iter": True, "storing_device": "cpu", "use_buffers": False},
    {"compact_obs": True},
]


def how(collector: Any) -> list[str]:
    return [part.how for part in collector.explain() if part.name == "policy"]


def script(collector: Any) -> Iterator[Any]:
    """Iterate beyond the random phase; ours says when it is in it."""
    stream = iter(collector)
    for _ in range(4):
        frames = collector._frames
        if isinstance(collector, Collector):
            assert (DRAWN in how(collector)) == (frames < collector.init_random_frames)
        yield next(stream)


@pytest.mark.parametrize("env", RANDOM_ENVS)
def test_random_frames_of_every_action(env: str) -> None:
    frames = {"init_random_frames": 30, "frames_per_batch": 18}
    looked_at = batches(4) if env == "discretized actions" else script
    check_same(RANDOM_ENVS[env], policies.actor, looked_at, lambda: frames)


REMEMBER = ["tanh-normal", "ornstein-uhlenbeck", "hidden-outputs", "alternates", "carries-memory"]


@pytest.mark.parametrize(("policy", "options"), [*zip(REMEMBER, OPTIONS, strict=True)])
def test_random_frames_under_every_option(policy: str, options: dict[str, Any]) -> None:
    """The phase ends with a batch, or within one; policies that remember start after it."""
    made = {"frames_per_batch": 18, "init_random_frames": 36, **options}
    known = policy in REMEMBER[:3]  # others are called on TensorDicts
    check_same(*policies.case(policy), script if known else batches(4), lambda: made)


def test_random_actions_after_the_policy_has_acted() -> None:
    """The policy's last outputs stay, and are zeroed where episodes start."""

    def again(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        for _ in range(2):
            yield next(stream)
        collector.init_random_frames = 1000
        for _ in range(2):
            yield next(stream)

    check_same(*policies.case("tanh-normal"), again, lambda: {"frames_per_batch": 18})


POLICIES: dict[str, Callable[[Any], Any]] = {
    "no policy": lambda env: None,
    "without a spec": lambda env: RandomPolicy(),
    "of one action": lambda env: RandomPolicy(env.action_spec),
    "of all actions": lambda env: RandomPolicy(env.full_action_spec),
    "of some entries more": lambda env: RandomPolicy(
        Composite(
            {**env.full_action_spec, "extra": Composite(a=Bounded(0, 1, env.action_spec.shape))},
            shape=env.batch_size,
        )
    ),
}


TURNS = itertools.cycle(["pendulum", "discretized actions", "cartpole-unbatched"])


@pytest.mark.parametrize(("policy", "env"), [*zip(POLICIES, TURNS, strict=False)])
def test_random_policies(policy: str, env: str) -> None:
    check_same(RANDOM_ENVS[env], POLICIES[policy])
    made = RANDOM_ENVS[env]()
    assert how(Collector(made, POLICIES[policy](made), frames_per_batch=6)) == [DRAWN]


class Biased(RandomPolicy):
    """A subclass, which does something else."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        out = super().__call__(td)
        return out.set("action", out["action"] / 2)


def drawn_together(env: EnvBase) -> RandomPolicy:
    """Actions beside an entry of a kind that is not drawn leaf by leaf."""
    extra = Choice([Bounded(0, 1, env.action_spec.shape), Bounded(2, 3, env.action_spec.shape)])
    return RandomPolicy(Composite({**env.full_action_spec, "extra": extra}, shape=env.batch_size))


@pytest.mark.parametrize("policy", [lambda env: Biased(env.action_spec), drawn_together])
def test_random_policies_that_are_called_as_they_are(policy: Any) -> None:
    check_same(ENVS["pendulum"], policy)
    env = ENVS["pendulum"]()
    collector = Collector(env, policy(env), frames_per_batch=6)
    assert how(collector) == ["on a TensorDict: is no TensorDict module"]


def own_rand_action() -> EnvBase:
    """An env object whose user has replaced ``rand_action``."""
    env = ENVS["pendulum"]()
    draw = env.rand_action

    def rand_action(tensordict: TensorDictBase | None = None) -> TensorDictBase:
        out = draw(tensordict)
        return out.set("action", out["action"] / 2)

    env.__dict__["rand_action"] = rand_action
    return env


def test_an_env_with_a_rand_action_of_its_own() -> None:
    options = {"frames_per_batch": 18, "init_random_frames": 30}
    check_same(own_rand_action, policies.actor, batches(4), lambda: options)
    collector = Collector(own_rand_action(), frames_per_batch=6)
    batch = collector.collect(frames=60, random=True)
    assert (batch["action"].abs() <= 1).all()


def legal(batch: TensorDictBase) -> bool:
    return bool((batch["action"].bool() & batch["legal"]).any(-1).all())


def test_masks_are_ignored_where_torchrl_ignores_them_and_a_warning_says_so_once() -> None:
    def two_batches(kind: Any) -> list[TensorDictBase]:
        torch.manual_seed(0)
        collector = kind(masked(2), None, frames_per_batch=40, total_frames=80)
        collector.set_seed(0)
        found = list(collector)
        collector.shutdown()
        return found

    with pytest.warns(UserWarning, match="ignore the env's action masks, as in TorchRL") as warned:
        batches = two_batches(Collector)
    assert len([w for w in warned if "masks" in str(w.message)]) == 1
    assert not all(map(legal, batches))
    collector = Collector(masked(2), None, frames_per_batch=40, total_frames=80)
    with pytest.warns(UserWarning, match="action masks"):
        lines = str(collector.explain())
    assert "; action masks are ignored, as in TorchRL" in lines
    assert legal(collector.collect(frames=40, random=True))  # as env.rand_action draws them
    env = masked(2)  # and as a policy, which the warning advises
    assert all(map(legal, Collector(env, env.rand_action, frames_per_batch=40, total_frames=40)))


def test_init_random_frames_are_legal_as_in_torchrl() -> None:
    for kind in (Collector, TorchRLCollector):
        first = lambda td: td.set("action", (td["legal"].cumsum(-1) == 1).long())  # noqa: E731
        collector = kind(
            masked(2), first, frames_per_batch=40, total_frames=40, init_random_frames=40
        )
        assert all(map(legal, collector))


def wide() -> EnvBase:
    """TorchRL's own env of actions that have one bound."""
    return GymWrapper(Toy(spaces.Box(-1, 1, (3,)), spaces.Box(0, float("inf"), (2,))))


def test_infinite_actions_of_torchrls_own_envs_stay_and_a_warning_says_so_once() -> None:
    with pytest.warns(UserWarning, match="are infinite or NaN") as warned:
        check_same(wide, lambda env: None)
    assert len([w for w in warned if "infinite" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match="are infinite or NaN") as warned:
        evaluate(wide, None, episodes=2, progress=False)
    assert len([w for w in warned if "infinite" in str(w.message)]) == 1


@pytest.mark.parametrize("frames", [None, 100])
def test_random_actions_of_half_bounded_boxes_are_finite(frames: int | None) -> None:
    env = make_env(lambda: Toy(spaces.Box(-1, 1, (3,)), spaces.Box(0, float("inf"), (2,))), 2)
    policy = policies.actor(env) if frames else None
    collector = Collector(env, policy, frames_per_batch=20, init_random_frames=frames)
    assert next(iter(collector))["action"].isfinite().all()
    assert collector.collect(frames=20, random=True)["action"].isfinite().all()


Way = Callable[[Callable[..., Any]], Any]
WAYS: dict[str, Way] = {
    "rollout": lambda make: make().rollout(60, break_when_any_done=False),
    "unbatched": lambda make: make(num_envs=None).rollout(60),
    "transformed": lambda make: TransformedEnv(make(), StepCounter()).rollout(9),
    "RandomPolicy": lambda make: (env := make()).rollout(9, RandomPolicy(env.action_spec)),
    "TorchRL's": lambda make: list(TorchRLCollector(make(), **FRAMES)),
    "no policy": lambda make: list(Collector(make(), **FRAMES)),
    "under a transform": lambda make: list(
        Collector(TransformedEnv(make(), StepCounter()), **FRAMES, init_random_frames=90)
    ),
    "process": lambda make: list(Collector(make(backend="process", start_method="fork"), **FRAMES)),
    "episodes": lambda make: Collector(make(), **FRAMES).collect(episodes=10, random=True),
}
FRAMES = {"frames_per_batch": 45, "total_frames": 90}
CHOICES = [spaces.Discrete(3, start=2), spaces.MultiDiscrete([3, 3]), spaces.MultiDiscrete([2, 3])]


@pytest.mark.parametrize("told", [False, True], ids=["seen", "told"])
@pytest.mark.parametrize("way", WAYS)
def test_masks_of_make_envs_envs_are_kept_to(way: str, told: bool) -> None:
    """The env raises for an illegal action."""
    for actions, categorical in itertools.product(CHOICES, (False, True)):
        make = partial(
            make_env,
            partial(Masked, actions, told),
            num_envs=3,
            categorical_action_encoding=categorical,
            info_keys=["action_mask"] * told,
        )
        WAYS[way](make)


def test_a_spec_copied_for_another_env_keeps_the_mask_that_it_had() -> None:
    env = make_env(Masked, 2)
    env.reset()
    assert type(env.action_spec.rand()) is torch.Tensor  # as results of all shared masks
    assert copy.deepcopy(env.action_spec) == env.action_spec
    other = pickle.loads(pickle.dumps(env.action_spec))
    before = other.mask.tolist()
    while env.action_spec.mask.tolist() == before:
        env.rollout(1)
    assert other.mask.tolist() == before
