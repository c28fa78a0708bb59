"""All of TorchRL's own mock envs: the data equal the parent's, bit for bit.

Among them are entries that are stacked lazily, strings, tensorclasses, several rewards and done
flags, and policies that do not say what they read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torchrl.collectors import Collector as ParentCollector
from torchrl.envs import EnvBase, Transform

from tdcollect import Collector

from .mocks import ENVS, POLICIES, classes
from .oracle import UPSTREAM, assert_same, assert_same_record, batches, parents_state, run

pytestmark = pytest.mark.filterwarnings(UPSTREAM, "ignore:.*multiple of the:UserWarning")

NEVER = {
    "EnvThatDoesNothing": "the env shows nothing and takes no action",
    "MockNestedResetEnv": "the env shows nothing and takes no action",
    "EnvThatErrorsBecauseOfStack": "the env gives an entry another dtype with each step",
}
"""Envs that TorchRL's own collector cannot run, and why not."""

CANNOT = {
    ("StateLessCountingEnv", "actor"): "ones are no actions of an env without bounds",
    ("NestedCountingEnv[2]", "actor"): "the network's output lacks the agents",
    ("HeterogeneousCountingEnv[2]", "actor"): "a nested tensor is no action",
    ("HeterogeneousCountingEnv, serial", "actor"): "a nested tensor is no action",
    ("HeterogeneousCountingEnv", "split"): "trajectories cannot be padded",
    ("HeterogeneousCountingEnv[2]", "split"): "trajectories cannot be padded",
    ("HistoryTransform", "reset at each"): "the history is longer than the reset's",
}
"""Pairs of an env with a policy or an option that TorchRL's own collector cannot run."""

ODD = [
    "HeterogeneousCountingEnv",
    "MultiKeyCountingEnv",
    "CountingEnvWithString[2]",
    "EnvWithTensorClass",
    "HistoryTransform",
]
"""Envs whose entries are no plain tensors, or several of a kind."""

OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "one step": lambda slots: {"frames_per_batch": slots},
    "no whole steps": lambda slots: {"frames_per_batch": 3 * slots + 1},
    "no buffers": lambda slots: {"use_buffers": False},
    "split": lambda slots: {"split_trajs": True},
    "random at first": lambda slots: {"init_random_frames": 5 * slots},
    "one TensorDict": lambda slots: {"return_same_td": True},
    "max_frames_per_traj": lambda slots: {"max_frames_per_traj": 3},
    "no ids": lambda slots: {"track_traj_ids": False},
    "reset at each": lambda slots: {"reset_at_each_iter": True},
}


def test_every_class_is_here() -> None:
    """A class that a later TorchRL adds is to be added to ``mocks.py``."""
    named = {name.split("[")[0].split(",")[0] for name in ENVS}
    assert named == classes(EnvBase, Transform)


def all_ways(collector: Any) -> Iterator[Any]:
    """Iterate, and query everything in between."""
    stream = iter(collector)
    for _ in range(2):
        yield next(stream)
        if isinstance(collector, Collector):
            assert str(collector.explain())
            assert repr(collector.stats)
            assert collector.state_dict()
    yield {"collector": parents_state(collector), "stats": collector.stats()}


def check(env: str, policy: Callable[[Any], Any], script: Any, options: Any, key: str) -> None:
    """Raise unless both collectors do the same; skip if both fail for a known reason."""
    slots = ENVS[env]().batch_size.numel()
    made = {"frames_per_batch": 3 * slots, **options(slots)}
    theirs = run(ParentCollector, ENVS[env], policy, script, lambda: made, catch=True)
    ours = run(Collector, ENVS[env], policy, script, lambda: made, catch=True)
    reason = NEVER.get(env.split(",")[0]) or CANNOT.get((env, key))
    failed = theirs[-1][0] == "error"
    assert failed == (reason is not None), theirs[-1][:2]
    if not failed:
        assert_same_record(ours, theirs)
    elif ours[-1][0] == "error":  # its text names the op that came first
        assert ours[-1][1][0] == theirs[-1][1][0]
        pytest.skip(f"TorchRL's collector cannot do it either: {reason}")


FAST = [*((env, "keyless") for env in ENVS), *((env, "random") for env in ODD)]
MORE = [(env, policy) for env in ENVS for policy in POLICIES if (env, policy) not in FAST]


@pytest.mark.parametrize(
    ("env", "policy"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_every_env(env: str, policy: str) -> None:
    check(env, POLICIES[policy], all_ways, lambda slots: {}, policy)


SAYS_NOTHING_OF_TRUNCATION = ["MockSerialEnv", "CountingEnv[2]", "AddPixelsTransform"]


@pytest.mark.parametrize(
    ("env", "options"),
    [
        *itertools.product(ODD[:2], OPTIONS),
        *((env, "max_frames_per_traj") for env in SAYS_NOTHING_OF_TRUNCATION),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(ODD[2:], OPTIONS)
        ),
    ],
)
def test_every_option_on_odd_entries(env: str, options: str) -> None:
    check(env, POLICIES["keyless"], batches(2), OPTIONS[options], options)


@pytest.mark.parametrize("env", ODD)
def test_collecting_frames_gives_the_parents_batches(env: str) -> None:
    slots = ENVS[env]().batch_size.numel()

    def by_count(collector: Any) -> Iterator[Any]:
        for _ in range(2):
            yield collector.collect(frames=6 * slots)

    def by_iteration(collector: Any) -> Iterator[Any]:
        yield from itertools.islice(collector, 2)

    made = {"frames_per_batch": 6 * slots, "use_buffers": False}
    policy = POLICIES["keyless"]
    theirs = run(ParentCollector, ENVS[env], policy, by_iteration, lambda: made)
    assert_same_record(run(Collector, ENVS[env], policy, by_count, lambda: made), theirs)


@pytest.mark.parametrize("env", ["CountingEnv", "IncrementingEnv", "AddPixelsTransform"])
def test_episodes_are_the_parents_rows(env: str) -> None:
    """The parent, reset before each batch, takes the same steps up to the ends of episodes."""
    made = {"frames_per_batch": 60, "use_buffers": False, "reset_at_each_iter": True}
    policy = POLICIES["keyless"]
    theirs = run(ParentCollector, ENVS[env], policy, lambda c: [next(iter(c))], lambda: made)
    ours = run(Collector, ENVS[env], policy, lambda c: [c.collect(episodes=2)], lambda: made)
    (_, batch, _), (_, expected, _) = ours[-1], theirs[-1]
    assert batch["next", "done"].sum() == 2
    assert batch["next", "done"][-1]
    rows = expected[: len(batch)].exclude("collector")
    assert_same(batch.exclude("collector"), rows)
