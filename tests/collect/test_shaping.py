"""Reward shaping: a function of the batch; the env's reward is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import BinarizeReward, RenameTransform, RewardSum, StepCounter, TransformedEnv

from tdcollect import Collector, make_env
from tdcollect.envs import EnvAction

from . import policies
from .envs import ENVS
from .oracle import UPSTREAM, difference, seed_everything

pytestmark = pytest.mark.filterwarnings(UPSTREAM)
both_loops = pytest.mark.usefixtures("arrays")

RAW = ("next", "raw_reward")
REWARD = ("next", "reward")


def shape(observation: Any, action: Any, reward: Any, done: Any) -> torch.Tensor:
    return reward * 2 + observation[..., :1] + action[..., :1] - 10 * done


def stream_of(env: Callable[[], Any], shaping: Any, **options: Any) -> Iterator[Any]:
    seed_everything(0)
    made = env()
    made.set_seed(3)
    frames = 12 * made.batch_size.numel()
    options = {"frames_per_batch": frames, "reward_shaping": shaping, **options}
    return iter(Collector(made, policies.actor(made), **options))


def collected(env: Callable[[], Any], shaping: Any, count: int = 3, **options: Any) -> list[Any]:
    return list(islice(stream_of(env, shaping, **options), count))


MADE = ["toy", "toy-unbatched", "torchrl-serial"]


@both_loops
@pytest.mark.behaviour(17)
@pytest.mark.parametrize("env", MADE)
def test_learners_see_the_shaped_reward_and_the_envs_is_kept(env: str) -> None:
    calls = itertools.count()

    def shaping(observation: Any, action: Any, reward: Any, done: Any) -> torch.Tensor:
        next(calls)
        assert not torch.is_grad_enabled()
        shaped = shape(observation, action, reward, done)
        reward.zero_()  # a copy: the env's own is kept
        return shaped

    plain = collected(ENVS[env], None)
    for batch, unshaped in zip(collected(ENVS[env], shaping), plain, strict=True):
        expected = shape(
            unshaped["next", "observation"],
            unshaped["action"],
            unshaped[REWARD],
            unshaped["next", "done"],
        )
        assert torch.equal(batch[REWARD], expected)
        assert torch.equal(batch[RAW], unshaped[REWARD])
        assert batch[REWARD].dtype == torch.float32
        rest = batch.exclude(RAW, REWARD)
        assert difference(rest, unshaped.exclude(REWARD)) is None
    assert next(calls) == len(plain)


def counters(env: Any) -> Any:
    return TransformedEnv(env, RewardSum()).append_transform(StepCounter())


@pytest.mark.parametrize(
    "make",
    [
        partial(make_env, "CartPole-v1", 2, is_init=True, step_count=True, episode_reward=True),
        lambda: counters(make_env("CartPole-v1", 2)),
        lambda: TransformedEnv(make_env("CartPole-v1", 2), EnvAction()),
    ],
    ids=["make_env", "transforms", "actions"],
)
def test_what_is_noted_beside_it_is_no_observation(make: Any) -> None:
    (batch,) = collected(
        make, lambda o, a, r, d: r * 0 + o.shape[-1], count=1, track_policy_version=True
    )
    assert (batch[REWARD] == 4).all()
    env = ENVS["cartpole"]()  # nor is a hidden state
    collector = Collector(
        env,
        policies.recurrent("gru", env),
        frames_per_batch=30,
        reward_shaping=lambda o, a, r, d: r + o.shape[-1],
    )
    assert (next(iter(collector))[REWARD] == 5).all()


def test_several_observations_or_actions_come_as_a_tensordict() -> None:
    def shaping(observation: TensorDictBase, action: Any, reward: Any, done: Any) -> Any:
        assert observation.shape == reward.shape[:-1]
        return reward + observation["inner", "flag"].sum(-1, keepdim=True)

    (batch,) = collected(ENVS["toy-nested"], shaping, count=1)
    flags = batch["next", "inner", "flag"].sum(-1, keepdim=True)
    assert torch.equal(batch[REWARD], batch[RAW] + flags)
    (batch,) = collected(ENVS["toy-dict-action"], lambda o, a, r, d: r + a["push"][..., :1], 1)
    assert torch.equal(batch[REWARD], batch[RAW] + batch["push"][..., :1])


OPTIONS: dict[str, dict[str, Any]] = {
    "no-buffers": {"use_buffers": False, "set_truncated": True, "init_random_frames": 48},
    "same-td": {"return_same_td": True, "storing_device": "cpu"},
    "split": {"split_trajs": True},
    "trajectories": {"trajs_per_batch": 3, "traj_format": "cat"},
}


@both_loops
@pytest.mark.parametrize("option", OPTIONS)
def test_every_way_to_get_a_batch_gets_a_shaped_one(option: str) -> None:
    stream = stream_of(ENVS["toy"], lambda o, a, r, d: r + 100, **OPTIONS[option])
    for batch in islice(stream, 3):
        valid = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        reward, raw = batch[REWARD][valid], batch[RAW][valid]
        assert (reward > 90).all()
        assert torch.equal(reward, raw + 100)


@pytest.mark.behaviour(17)
def test_postproc_hooks_and_the_replay_buffer_come_after_it() -> None:
    seen: list[Any] = []

    def postproc(batch: Any) -> Any:
        seen.append(batch[REWARD].clone())
        return batch

    buffer = ReplayBuffer(storage=LazyTensorStorage(90, ndim=2), batch_size=4)
    collected(
        ENVS["toy"],
        lambda o, a, r, d: r * 0 - 7,
        count=2,
        replay_buffer=buffer,
        postproc=postproc,
    )
    assert (torch.cat(seen) == -7).all()
    assert (buffer[:][REWARD] == -7).all()
    assert (buffer[:][RAW] != -7).any()


def named() -> Any:
    return TransformedEnv(ENVS["toy"](), RenameTransform(["observation"], ["raw_reward"]))


STEP_BY_STEP = {"extend_buffer": False, "replay_buffer": ReplayBuffer()}
SEVERAL = "expected an env with one reward and one done flag"


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (ENVS["toy"], {"reward_shaping": 3}, "expected reward_shaping to be a function .*got int"),
        (ENVS["toy"], {"compact_obs": True}, "compact_obs=True leaves out"),
        (ENVS["toy"], STEP_BY_STEP, "expected extend_buffer=True"),
        (ENVS["mock-agents"], {}, SEVERAL),
        (ENVS["mock-nested-flags"], {}, SEVERAL),
        (named, {}, "expected no entry 'raw_reward' in the env"),
    ],
)
def test_what_it_cannot_go_with_is_refused(env: Any, options: Any, message: str) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(env())
        return made[-1]

    with pytest.raises((TypeError, ValueError), match=message):
        Collector(make, **{"frames_per_batch": 30, "reward_shaping": shape, **options})
    assert made[0].is_closed


def of_bytes() -> Any:
    return TransformedEnv(ENVS["toy"](), BinarizeReward())


@pytest.mark.parametrize(
    ("env", "change", "message"),
    [
        (ENVS["toy"], lambda r: r.squeeze(-1), r"reward's shape \[3, 12, 1\], got \[3, 12\]"),
        (ENVS["toy"], lambda r: 1.0, r"reward's shape \[3, 12, 1\], got float"),
        (ENVS["toy"], lambda r: r + 1j, r"numbers that go into the reward's torch.float32 without"),
        (of_bytes, lambda r: r / 2 + 0.25, r"the reward's torch.int8 without loss"),
        (of_bytes, lambda r: r.long() + 300, r"the reward's torch.int8 without loss"),
    ],
)
def test_what_does_not_fit_the_reward_is_refused(env: Any, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collected(env, lambda observation, action, reward, done: change(reward), 1)


def test_whole_shaped_rewards_go_into_a_whole_reward() -> None:
    (batch,) = collected(of_bytes, lambda o, a, reward, d: reward.double() * 2, 1)
    assert batch[REWARD].dtype == batch[RAW].dtype == torch.int8
    assert torch.equal(batch[REWARD], batch[RAW] * 2)


@both_loops
@pytest.mark.parametrize("count", [{"frames": 30}, {"episodes": 5}], ids=str)
def test_collecting_by_count_shapes_too(count: dict[str, int]) -> None:
    env = ENVS["toy"]()
    collector = Collector(env, policies.actor(env), frames_per_batch=30, reward_shaping=shape)
    fake, batch = collector.fake_tensordict(), collector.collect(**count)
    assert set(fake.keys(True, True)) == set(batch.keys(True, True))
    following = batch["next"]
    expected = shape(following["observation"], batch["action"], batch[RAW], following["done"])
    assert torch.equal(batch[REWARD], expected)
    assert not torch.equal(batch[REWARD], batch[RAW])
