"""A plain gymnasium loop with the same seeds gives the collector's data, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import distributions as D
from torchrl.collectors import Collector as ParentCollector
from torchrl.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv
from torchrl.modules import TanhNormal

from tdcollect import Collector, EvaluationCollector, make_env, slot_seed

from . import policies, transforms
from .envs import BACKENDS, ENVS, cartpole_envpool, make_toy
from .loops import on_arrays
from .oracle import UPSTREAM, difference

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]

STEPS = 80
SLOTS = 3
SEED = 21


class Task(NamedTuple):
    """A gymnasium env, and how an action and its log-prob are drawn in it."""

    make: Callable[[], gym.Env[Any, Any]]
    draw: Callable[[TensorDict], tuple[torch.Tensor, torch.Tensor]]


def draw_categorical(td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = D.Categorical(logits=td["logits"])
    action = distribution.sample()
    return action, distribution.log_prob(action)


def draw_tanh_normal(td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    # What torchrl's actors call: it rounds otherwise than rsample and log_prob after each other.
    return TanhNormal(td["loc"], td["scale"]).rsample_and_log_prob()


TASKS = {
    "cartpole": Task(partial(gym.make, "CartPole-v1"), draw_categorical),
    "pendulum": Task(partial(gym.make, "Pendulum-v1", max_episode_steps=20), draw_tanh_normal),
    "toy": Task(make_toy, draw_categorical),
}


def plain_loop(task: Task, policy: Any, batched: bool = True) -> dict[Any, torch.Tensor]:
    """A loop in CleanRL's style: a vector env, the policy's network, a distribution, lists.

    Unbatched, it is a loop over one slot that shows the network vectors.
    """
    slots = SLOTS if batched else 1
    rows_seen = slice(None) if batched else 0
    envs = SyncVectorEnv([task.make] * slots, autoreset_mode=AutoresetMode.DISABLED)
    network = policy.module[0]
    rows: dict[Any, list[Any]] = {}
    observation, _ = envs.reset(seed=[slot_seed(SEED, slot) for slot in range(slots)])
    for _ in range(STEPS):
        with torch.no_grad():
            td = network(TensorDict({"observation": torch.from_numpy(observation)[rows_seen]}))
            action, log_prob = task.draw(td)
            action = action.reshape(slots, *envs.single_action_space.shape)
        following, reward, terminated, truncated, _ = envs.step(action.numpy())
        row = {
            "observation": observation,
            "action": action.numpy(),
            "action_log_prob": log_prob.reshape(slots).numpy(),
            ("next", "observation"): following,
            ("next", "reward"): reward.astype(np.float32)[:, None],
            ("next", "terminated"): terminated[:, None],
            ("next", "truncated"): truncated[:, None],
            ("next", "done"): (terminated | truncated)[:, None],
        }
        for key, value in row.items():
            rows.setdefault(key, []).append(value.copy())
        observation = following
        done = terminated | truncated
        if done.any():
            observation, _ = envs.reset(options={"reset_mask": done})
    envs.close()
    return {key: torch.from_numpy(np.stack(value, 1))[rows_seen] for key, value in rows.items()}


def collect(env: EnvBase, policy: Any, batches: int = 4) -> TensorDict:
    """``STEPS`` steps per slot after ``set_seed``, in several batches."""
    slots = env.batch_size.numel()
    collector = Collector(env, policy, frames_per_batch=STEPS * slots // batches)
    next(iter(collector))
    collector.set_seed(SEED)
    torch.manual_seed(SEED)
    stream = iter(collector)
    data = torch.cat([next(stream) for _ in range(batches)], -1)
    collector.shutdown()
    return data


def assert_equal_entries(data: TensorDict, expected: dict[Any, torch.Tensor]) -> None:
    for key, value in expected.items():
        found = difference(data[key].contiguous(), value, str(key))
        assert found is None, found


@pytest.mark.behaviour(12, 14, 15)
@on_arrays(
    "case",
    [
        *(("cartpole", backend) for backend in BACKENDS),
        *(("pendulum", "NextStep"), ("toy", "serial")),
        *((task, "unbatched") for task in TASKS),
    ],
    parent=[("cartpole", "serial"), ("pendulum", "serial"), ("toy", "unbatched")],
)
def test_data_is_that_of_a_plain_loop(case: tuple[str, str]) -> None:
    task, backend = case
    make, slots = TASKS[task].make, None if backend == "unbatched" else SLOTS
    env = BACKENDS["serial" if slots is None else backend](make, slots)
    torch.manual_seed(0)
    policy = policies.actor(env)
    torch.manual_seed(SEED)
    expected = plain_loop(TASKS[task], policy, batched=backend != "unbatched")
    assert (expected["next", "done"].sum((-1, -2)) >= 3).all()
    assert_equal_entries(collect(env, policy), expected)


# ------------------------------------------------------------------------------------ set_seed


def first_observation(collector: Any) -> torch.Tensor:
    return next(iter(collector))["observation"][..., 0, :]


SEEDED: dict[str, tuple[Callable[[], EnvBase], int]] = {
    "ours": (ENVS["cartpole"], 3),
    "ours-unbatched": (ENVS["cartpole-unbatched"], 1),
    "ours-transformed": (lambda: TransformedEnv(ENVS["cartpole"](), transforms.E.StepCounter()), 3),
    "ours-vector": (ENVS["cartpole-disabled"], 3),
    "ours-same-step": (ENVS["cartpole-same-step"], 3),
    "gym-env": (ENVS["torchrl-gym"], 1),
    "gym-env-transformed": (
        lambda: TransformedEnv(ENVS["torchrl-gym"](), transforms.E.RewardSum()),
        1,
    ),
    "gym-wrapper-vector": (ENVS["torchrl-vector"], 3),
}


@pytest.mark.behaviour(8)
@on_arrays("env", SEEDED, parent=["ours", "gym-env-transformed"])
def test_seeds_restart_each_slot_with_its_seed(env: str) -> None:
    """TorchRL's collector goes on from the unseeded reset. Its GymWrapper counts on from a seed."""
    make, slots = SEEDED[env]
    counts_on = env == "gym-wrapper-vector"
    seeds = [SEED + i if counts_on else slot_seed(SEED, i) for i in range(slots)]
    rows = [gym.make("CartPole-v1").reset(seed=seed)[0] for seed in seeds]
    expected = torch.from_numpy(np.stack(rows))
    for kind, same in ((Collector, True), (ParentCollector, False)):
        collector = kind(make(), frames_per_batch=10 * slots)
        collector.set_seed(SEED)
        shown = first_observation(collector).reshape(slots, 4)
        assert torch.equal(shown, expected) == same
        collector.shutdown()
    collector = Collector(make(), frames_per_batch=slots)
    for count in ({"frames": 6 * slots}, {"episodes": 3}):
        batch = collector.collect(**count, seed=SEED)
        ids = batch["collector", "traj_ids"].flatten()
        starts = batch["observation"].reshape(-1, 4)
        for slot in range(slots):
            assert torch.equal(starts[ids == ids.unique()[slot]][0], expected[slot])


def test_a_vector_env_with_one_generator_gets_the_root() -> None:
    vector = CartPoleVectorEnv(3)
    vector.metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # it is stepped once
    env = make_env(vector)
    with pytest.raises(ValueError, match=r"ints in a row for CartPole.*got \[4, 9, 2\]"):
        env.reset(seed=[4, 9, 2])
    collector = Collector(env, frames_per_batch=3)
    assert "roots in a row may share" in str(collector.explain())
    for env.first_slot in (0, 3):  # of the env in a second worker
        collector.set_seed(SEED)
        expected, _ = CartPoleVectorEnv(3).reset(seed=slot_seed(SEED, env.first_slot))
        assert torch.equal(first_observation(collector), torch.from_numpy(expected))
    assert "roots" not in str(Collector(ENVS["cartpole-disabled"](), frames_per_batch=3).explain())


def test_training_meets_no_other_root_and_no_test_episode() -> None:
    """Of roots in a row; slot 0 of each begins with the root itself, as a single env does."""
    starts = []
    for root in range(3):
        collector = Collector(make_env("CartPole-v1", 8), frames_per_batch=8)
        collector.set_seed(root)
        starts += first_observation(collector).tolist()
        for episode in EvaluationCollector("CartPole-v1", None, episodes=8, seed=root):
            starts.append(episode.data["observation"][0].tolist())
    assert len({*map(tuple, starts)}) == 3 * 16


RESTARTED: dict[str, Callable[[], EnvBase]] = {
    **{name: SEEDED[name][0] for name in ("ours", "ours-unbatched", "gym-env-transformed")},
    **{name: ENVS[name] for name in ("toy", "toy-nested", "pendulum", "torchrl-serial-of-ours")},
    "books": partial(transforms.make, "books"),
    "serial-of-gym": lambda: SerialEnv(2, partial(GymEnv, "CartPole-v1")),
    "wrapper": lambda: GymWrapper(make_toy()),
    "envpool": cartpole_envpool,
}


@on_arrays("env", RESTARTED, parent=["ours", "gym-env-transformed"])
def test_same_seed_same_data_whatever_came_before(env: str) -> None:
    def data(batches: int, seed: int) -> Any:
        instance = RESTARTED[env]()
        torch.manual_seed(0)
        policy = policies.actor(instance)
        frames = 20 * instance.batch_size.numel()
        collector = Collector(instance, policy, frames_per_batch=frames)
        stream = iter(collector)
        for _ in range(batches):
            next(stream)
        collector.set_seed(seed)
        torch.manual_seed(1)
        found = torch.cat([next(stream) for _ in range(2)], -1)
        collector.shutdown()
        return found.exclude("collector")

    expected = data(1, SEED)
    assert difference(data(0, SEED), expected) is None
    assert difference(data(2, SEED), expected) is None
    assert difference(data(1, SEED + 7), expected) is not None


def test_set_seed_starts_new_trajectories_and_their_count() -> None:
    collector = Collector(ENVS["cartpole"](), frames_per_batch=9, max_frames_per_traj=5)
    before = next(iter(collector))["collector", "traj_ids"]
    collector.set_seed(SEED)
    batch = next(iter(collector))
    assert batch["collector", "traj_ids"].min() > before.max()
    assert batch["step_count"][:, :, 0].tolist() == [[0, 1, 2]] * 3


def test_set_seed_returns_what_the_parent_returns() -> None:
    seeds = [
        collector_class(ENVS["cartpole"](), frames_per_batch=6).set_seed(5, static_seed=static)
        for static in (False, True)
        for collector_class in (Collector, ParentCollector)
    ]
    assert seeds[0] == seeds[1]
    assert seeds[2] == seeds[3] == 5
