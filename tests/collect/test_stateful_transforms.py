"""Transforms with a state: theirs is TorchRL's, whoever steps, from batch to batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl import envs as E
from torchrl.collectors import Collector as TorchRLCollector

from tdcollect import Collector
from tdcollect.collect import plan

from . import policies, transforms
from .envs import ENVS
from .oracle import UPSTREAM, check_same, parents_state

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

OBS, R = "observation", "reward"


def two_norms() -> E.Transform:
    return E.Compose(E.VecNormV2([OBS]), E.VecNormV2([R], ["normed"], decay=0.9))


def begun(kind: Any, **options: Any) -> Any:
    """A transform that has seen some steps of another env."""
    norm = kind([OBS], **options)
    env = E.TransformedEnv(ENVS["cartpole"](), norm)
    env.set_seed(3)
    env.rollout(5)
    return norm


def shared(kind: Any, **options: Any) -> Callable[[], E.Transform]:
    """Statistics that another transform has begun, in shared memory."""

    def make() -> E.Transform:
        first = begun(kind, **options)
        if kind is E.VecNorm:
            return E.VecNorm([OBS], shared_td=first._td.share_memory_(), lock=first.lock)
        data = TensorDict(loc=first._loc, var=first._var, count=first._count).share_memory_()
        return E.VecNormV2([OBS], shared_data=data, lock=first.lock, **options)

    return make


def frozen_copy(kind: Any) -> Callable[[], E.Transform]:
    return lambda: begun(kind).frozen_copy()


NORMS: dict[str, tuple[str, Callable[[], E.Transform]]] = {
    "1": ("cartpole", lambda: E.VecNorm([OBS], decay=0.9, eps=1e-2)),
    "1-out-keys": ("cartpole", lambda: E.VecNorm([OBS, R], ["normed", R])),
    "1-nested": ("toy-nested", lambda: E.VecNorm(["position"], [("inner", "normed")])),
    "1-shapes": ("cartpole", lambda: E.VecNorm([OBS], shapes=[torch.Size([3, 4])])),
    "1-unbatched": ("cartpole-unbatched", lambda: E.VecNorm([OBS, R])),
    "1-frozen-copy": ("cartpole", frozen_copy(E.VecNorm)),
    "1-shared": ("cartpole", shared(E.VecNorm)),
    "1-over-books": ("pendulum", lambda: E.Compose(transforms.books(), E.VecNorm([OBS, R]))),
    "1-under-books": ("pendulum", lambda: E.Compose(E.VecNorm([OBS, R]), transforms.books())),
    "2": ("cartpole", lambda: E.VecNormV2([OBS], decay=0.9, eps=1e-2)),
    "2-mean": ("cartpole", lambda: E.VecNormV2([OBS, R], decay=1.0)),
    "2-reduced": ("pendulum", lambda: E.VecNormV2([OBS, R], reduce_batch_dims=True, decay=0.99)),
    "2-reduced-mean": ("pendulum", lambda: E.VecNormV2([OBS], reduce_batch_dims=True, decay=1.0)),
    "2-out-keys": ("cartpole", lambda: E.VecNormV2([OBS, R], ["normed", "money"])),
    "2-nested": (
        "toy-nested",
        lambda: E.VecNormV2(["position", ("inner", "flag")], ["p", ("inner", "f")]),
    ),
    "2-integers": ("toy-pixels", lambda: E.VecNormV2(["pixels"])),
    "2-doubles": ("half-cheetah", lambda: E.VecNormV2([OBS], reduce_batch_dims=True)),
    "2-unbatched": ("cartpole-unbatched", lambda: E.VecNormV2([OBS, R])),
    "2-frozen-copy": ("cartpole", frozen_copy(E.VecNormV2)),
    "2-shared": ("cartpole", shared(E.VecNormV2)),
    "2-shared-reduced": ("cartpole", shared(E.VecNormV2, reduce_batch_dims=True)),
    "2-twice": ("cartpole", two_norms),
    "2-over-books": ("pendulum", lambda: E.Compose(transforms.books(), E.VecNormV2([OBS, R]))),
    "2-under-books": ("pendulum", lambda: E.Compose(E.VecNormV2([OBS, R]), transforms.books())),
    "2-before-another": (
        "pendulum",
        lambda: E.Compose(E.VecNormV2([OBS], reduce_batch_dims=True), transforms.norm()),
    ),
    "2-serial-env": ("torchrl-serial", lambda: E.VecNormV2([OBS], reduce_batch_dims=True)),
    "2-gym": ("torchrl-gym", lambda: E.VecNormV2([OBS, R])),
    "stateless": ("cartpole", lambda: E.VecNormV2([OBS], stateful=False, decay=0.9)),
    "stateless-mean": ("cartpole", lambda: E.VecNormV2([OBS], stateful=False, decay=1.0)),
    "stateless-out-keys": ("toy", lambda: E.VecNormV2([OBS], ["normed"], stateful=False)),
    "stateless-nested": (
        "toy-nested",
        lambda: E.VecNormV2(["position", ("inner", "flag")], stateful=False),
    ),
    "stateless-unbatched": ("cartpole-unbatched", lambda: E.VecNormV2([OBS], stateful=False)),
    "stateless-under-books": (
        "pendulum",
        lambda: E.Compose(E.VecNormV2([OBS], stateful=False), transforms.books()),
    ),
}

FRAMES: dict[str, tuple[str, Callable[[], E.Transform]]] = {
    "one": ("cartpole", lambda: E.CatFrames(1, -1, [OBS])),
    "same": ("cartpole", lambda: E.CatFrames(4, -1, [OBS])),
    "constant": ("toy", lambda: E.CatFrames(3, -1, [OBS], padding="constant", padding_value=0.5)),
    "out-keys": ("toy", lambda: E.CatFrames(3, -1, [OBS], ["stack"])),
    "nested": (
        "toy-nested",
        lambda: E.CatFrames(2, -1, ["position", ("inner", "grid")], ["p", ("inner", "stack")]),
    ),
    "reset-key": ("cartpole", lambda: E.CatFrames(2, -1, [OBS], reset_key="_reset")),
    "unbatched": ("cartpole-unbatched", lambda: E.CatFrames(3, -1, [OBS], padding="constant")),
    "short-episodes": ("toy-one-step-episodes", lambda: E.CatFrames(3, -1, [OBS])),
    "same-step": ("cartpole-same-step", lambda: E.CatFrames(3, -1, [OBS])),
    "pixels": (
        "toy-pixels",
        lambda: E.Compose(E.ToTensorImage(), E.GrayScale(), E.CatFrames(4, -3)),
    ),
    "bytes": ("toy-pixels", lambda: E.CatFrames(2, -1, ["pixels"], ["stack"])),
    "twice": (
        "toy",
        lambda: E.Compose(E.CatFrames(2, -1, [OBS]), E.CatFrames(2, -1, [OBS], padding="constant")),
    ),
    "under-norm": ("toy", lambda: E.Compose(E.CatFrames(2, -1, [OBS]), transforms.norm())),
    "over-sum": (
        "toy",
        lambda: E.Compose(transforms.RunningSum(), E.CatFrames(2, -1, ["sum"], ["stack"])),
    ),
    "under-vec-norm": (
        "toy",
        lambda: E.Compose(E.CatFrames(2, -1, [OBS]), E.VecNormV2([OBS], reduce_batch_dims=True)),
    ),
    "serial-env": ("torchrl-serial", lambda: E.CatFrames(3, -1, [OBS])),
    "gym": ("torchrl-gym", lambda: E.CatFrames(3, -1, [OBS])),
}

CASES = {f"norm-{name}": case for name, case in NORMS.items()} | {
    f"frames-{name}": case for name, case in FRAMES.items()
}


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_torchrls_from_batch_to_batch(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches on arrays and in TorchRL's loop in turn, with the env's own rollouts between."""

    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        env = collector.env
        for on_arrays in (True, True, False, True):
            monkeypatch.setattr(plan, "RUN_ON_ARRAYS", on_arrays)
            yield next(stream)
            yield env.transform.state_dict()
        yield env.rollout(5, break_when_any_done=False)
        collector.reset()
        yield next(stream)
        yield parents_state(collector)

    env, transform = CASES[case]
    # Normalized integers are not finite.
    policy = policies.random_policy if env in ("toy-nested", "toy-pixels") else policies.actor
    check_same(lambda: E.TransformedEnv(ENVS[env](), transform()), policy, script)


@pytest.mark.parametrize("case", CASES)
def test_they_run_on_arrays(case: str) -> None:
    env, transform = CASES[case]
    made = E.TransformedEnv(ENVS[env](), transform())
    collector = Collector(made, policies.actor(made), frames_per_batch=made.batch_size.numel())
    plan = collector._runner.plan(iterating=True)
    assert plan.env is not None, plan.reason
    islands = [part.how for part in plan.env.transforms if part.how != "on arrays"]
    assert len(islands) == ("over-sum" in case), islands


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
def test_a_lock_that_another_holds_is_waited_for(kind: Any) -> None:
    norm = kind(in_keys=[OBS])
    env = E.TransformedEnv(ENVS["cartpole"](), norm)
    stream = iter(Collector(env, policies.actor(env), frames_per_batch=6))
    next(stream)
    thread = threading.Thread(target=next, args=(stream,))
    with norm.lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


def test_stacks_are_given_away() -> None:
    """A user may write into a step's stack: the next one does not show it."""

    class Erase(E.Transform):
        def _call(self, next_tensordict: Any) -> Any:
            next_tensordict[OBS].zero_()
            return next_tensordict

    def make() -> E.EnvBase:
        stack = E.CatFrames(3, -1, [OBS])
        return E.TransformedEnv(ENVS["toy"](), E.Compose(stack, Erase()))

    check_same(make, policies.actor)


def counted() -> E.Transform:
    return E.Compose(E.TrajCounter(), E.VecNorm([OBS]))


# TorchRL's gym wrappers begin the episode of the seed when they are seeded, and reset again.
FROM_TORCHRL = [case for case, (env, _) in NORMS.items() if not env.startswith("torchrl")]


@pytest.mark.parametrize("case", [*FROM_TORCHRL, "counted"])
def test_set_seed_before_the_first_batch_leaves_nothing_of_the_unseeded_reset(case: str) -> None:
    env, transform = NORMS.get(case, ("cartpole", counted))
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


@pytest.mark.parametrize("make", [normed_gym, lambda: E.SerialEnv(2, normed_gym)])
def test_set_seed_reaches_the_transforms_of_torchrls_gym_envs(make: Any) -> None:
    first = []
    for _ in range(2):
        collector = Collector(make(), frames_per_batch=24, total_frames=-1)
        collector.set_seed(0)
        torch.manual_seed(5)
        first.append(next(iter(collector)))
    assert torch.equal(first[0][OBS], first[1][OBS])


def test_collecting_with_a_seed_at_first_leaves_nothing_of_the_unseeded_reset() -> None:
    for count in ({"frames": 24}, {"episodes": 2}):
        first = []
        for _ in range(2):
            env = E.TransformedEnv(ENVS["cartpole"](), E.VecNormV2([OBS]))
            collector = Collector(env, frames_per_batch=24, total_frames=-1)
            torch.manual_seed(5)
            first.append(collector.collect(**count, seed=0))
        assert torch.equal(first[0][OBS], first[1][OBS]), count


def test_set_seed_after_a_batch_keeps_the_statistics() -> None:
    norm = E.VecNorm([OBS])
    env = E.TransformedEnv(ENVS["cartpole"](), norm)
    collector = Collector(env, frames_per_batch=24, total_frames=-1)
    next(iter(collector))
    before = norm.state_dict()["_extra_state"][f"{OBS}_count"].item()
    collector.set_seed(0)
    assert norm.state_dict()["_extra_state"][f"{OBS}_count"].item() > before


@pytest.mark.parametrize("kind", [E.VecNorm, E.VecNormV2])
def test_set_seed_keeps_statistics_that_were_loaded_since(kind: Any) -> None:
    norm, other = kind([OBS]), begun(kind)
    env = E.TransformedEnv(ENVS["cartpole"](), norm)
    collector = Collector(env, frames_per_batch=24, total_frames=-1)
    norm.load_state_dict(copy.deepcopy(other.state_dict()))
    norm.freeze()  # or the reset of set_seed would move them
    collector.set_seed(0)
    assert torch.equal(norm.loc[OBS], other.loc[OBS])


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
