"""The counting env and its policies through every backend and both collectors.

A slot's rows tell where they come from, so ``check_counting_batch`` sees each that is lost,
doubled, shifted or swapped; the recurrent policy acts by its hidden state alone, so that each
hidden state that is lost, carried over or swapped raises in the env.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, InitTracker, SerialEnv, TransformedEnv, check_env_specs

from tdcollect import Collector, keys
from tdcollect.testing import (
    CountingPolicy,
    CountingRules,
    StatelessCountingPolicy,
    TorchCountingEnv,
    check_counting_batch,
    counting_env,
)

MODES = list(AutoresetMode)
VECTOR_ENVS = [(backend, mode) for backend in ("sync", "async") for mode in MODES]
BACKENDS = [("serial", None), ("torch", None), *VECTOR_ENVS]
RULES = CountingRules()  # episodes of 3, 7, 1, 4 and 2 steps, ended in turn by either flag
T, BATCHES = 11, 4  # 44 steps, some ten episodes a slot; no batch ends where they all do

both_collectors = pytest.mark.parametrize(
    "collector_class", [Collector, TorchRLCollector], ids=["tdcollect", "torchrl"]
)
every_backend = pytest.mark.parametrize(
    ("backend", "mode"), BACKENDS, ids=[f"{b}-{m.name if m else 'own'}" for b, m in BACKENDS]
)


def make(
    backend: str, mode: AutoresetMode | None = None, num_envs: int | None = 3, **kwargs: Any
) -> EnvBase:
    """A strict counting env: a wrong action raises in it."""
    if backend == "torch":
        return TorchCountingEnv([] if num_envs is None else [num_envs], RULES, **kwargs)
    if backend in ("sync", "async"):
        # Forked workers start at once; spawned ones import torch first. One test spawns.
        kwargs = {"autoreset_mode": mode, "context": "fork", **kwargs}
    return counting_env(num_envs, backend=backend, rules=RULES, **kwargs)


def batches(collector_class: Any, env: EnvBase, policy: Any, **kwargs: Any) -> Iterator[Any]:
    """``BATCHES`` batches of ``T`` steps per slot."""
    frames = T * env.batch_size.numel()
    collector = collector_class(
        env,
        policy,
        frames_per_batch=frames,
        total_frames=frames * BATCHES,
        auto_register_policy_transforms=True,
        **kwargs,
    )
    try:
        yield from collector
    finally:
        collector.shutdown()


def check_run(run: Iterator[Any], shape: tuple[int, ...], **kwargs: Any) -> None:
    previous, count = None, 0
    for batch in run:
        assert batch.shape == shape
        check_counting_batch(batch, RULES, previous=previous, require=[keys.TRAJ_IDS], **kwargs)
        previous, count = batch, count + 1
    assert count == BATCHES


@both_collectors
@every_backend
def test_recurrent_policy_predicts_across_batches_and_resets(
    collector_class: Any, backend: str, mode: AutoresetMode | None
) -> None:
    run = batches(collector_class, make(backend, mode), CountingPolicy(RULES))
    check_run(run, (3, T))


@both_collectors
@every_backend
def test_one_slot_in_a_batch(
    collector_class: Any, backend: str, mode: AutoresetMode | None
) -> None:
    run = batches(collector_class, make(backend, mode, num_envs=1), CountingPolicy(RULES))
    check_run(run, (1, T))


@both_collectors
@pytest.mark.parametrize("backend", ["serial", "torch"])
def test_unbatched(collector_class: Any, backend: str) -> None:
    run = batches(collector_class, make(backend, num_envs=None), CountingPolicy(RULES))
    check_run(run, (T,))


@both_collectors
@every_backend
def test_stateless_policy_predicts(
    collector_class: Any, backend: str, mode: AutoresetMode | None
) -> None:
    env, policy = make(backend, mode), StatelessCountingPolicy(RULES)
    check_run(batches(collector_class, env, policy), (3, T))


@both_collectors
@pytest.mark.parametrize("backend", ["serial", "torch"])
def test_categorical_actions(collector_class: Any, backend: str) -> None:
    env = make(backend, categorical_action_encoding=True)
    policy = CountingPolicy(RULES, categorical_action_encoding=True)
    check_run(batches(collector_class, env, policy), (3, T))


@both_collectors
@pytest.mark.parametrize(("backend", "mode"), [("serial", None), *VECTOR_ENVS[:3]])
def test_bookkeeping_of_the_env(
    collector_class: Any, backend: str, mode: AutoresetMode | None
) -> None:
    env = make(
        backend, mode, is_init=True, step_count=True, episode_reward=True, max_episode_steps=3
    )
    check_run(batches(collector_class, env, CountingPolicy(RULES)), (3, T), max_episode_steps=3)


@both_collectors
def test_transforms_put_there_by_hand(collector_class: Any) -> None:
    policy = CountingPolicy(RULES)
    env = TransformedEnv(make("serial"), InitTracker())
    env.append_transform(policy.make_tensordict_primer())
    check_run(batches(collector_class, env, policy), (3, T))


@both_collectors
def test_torchrl_batch_of_unbatched_envs(collector_class: Any) -> None:
    def slot(i: int) -> Any:
        return lambda: TorchCountingEnv(rules=CountingRules(5))

    rules = CountingRules(5)
    env = SerialEnv(2, [slot(0), slot(1)])
    for batch in batches(collector_class, env, StatelessCountingPolicy(rules)):
        check_counting_batch(batch, rules, slots=[0, 0])


@both_collectors
def test_many_batch_dims(collector_class: Any) -> None:
    run = batches(collector_class, TorchCountingEnv([2, 3], RULES), CountingPolicy(RULES))
    check_run(run, (2, 3, T))


def test_spawned_workers() -> None:
    env = make("async", AutoresetMode.NEXT_STEP, num_envs=1, context="spawn")
    check_run(batches(Collector, env, CountingPolicy(RULES)), (1, T))


@every_backend
def test_rollout_of_the_env_alone(backend: str, mode: AutoresetMode | None) -> None:
    env = make(backend, mode)
    rollout = env.rollout(50, StatelessCountingPolicy(RULES), break_when_any_done=False)
    env.close()
    assert rollout.shape == (3, 50)
    check_counting_batch(rollout, RULES)


@every_backend
def test_set_seed_of_the_collector_fixes_the_first_episodes(
    backend: str, mode: AutoresetMode | None
) -> None:
    env = make(backend, mode)
    collector = Collector(
        env,
        CountingPolicy(RULES),
        frames_per_batch=3 * T,
        total_frames=-1,
        auto_register_policy_transforms=True,
    )
    run = iter(collector)
    check_counting_batch(next(run), RULES)
    collector.set_seed(100)
    first = next(run)
    second = next(run)
    collector.shutdown()
    assert first[keys.OBSERVATION][:, 0].tolist() == [[0, 100, 0], [0, 101, 1], [0, 102, 2]]
    check_counting_batch(first, RULES)
    check_counting_batch(second, RULES, previous=first)


def test_slots_reset_singly_in_the_torch_env() -> None:
    env = TorchCountingEnv([3], CountingRules(9), wrong_action="record")
    root = env.reset(seed=10)
    _, root = env.step_and_maybe_reset(env.rand_action(root))
    root[keys.RESET] = torch.tensor([[False], [True], [False]])
    assert env.reset(root)[keys.OBSERVATION].tolist() == [[1, 10, 0], [0, 12, 1], [1, 12, 2]]


def test_slots_stepped_singly_in_the_torch_env() -> None:
    env = TorchCountingEnv([2], CountingRules(9), wrong_action="record")
    root = env.rand_action(env.reset())
    root[keys.STEP] = torch.tensor([True, False])
    assert env.step(root)[keys.NEXT, keys.OBSERVATION].tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("batch_size", [[], [1], [3], [2, 3]])
@pytest.mark.parametrize("categorical", [False, True])
def test_torch_env_keeps_its_specs(batch_size: list[int], categorical: bool) -> None:
    env = TorchCountingEnv(
        batch_size, wrong_action="record", categorical_action_encoding=categorical
    )
    check_env_specs(env)


def test_env_counts_wrong_actions_as_info() -> None:
    env = counting_env(2, wrong_action="record", info_keys=["wrong_actions"])
    rollout = env.rollout(20, break_when_any_done=False)
    with pytest.raises(AssertionError, match="an action is the one that the state asks for: slot"):
        check_counting_batch(rollout)
    check_counting_batch(rollout, predicted=False)
    assert (rollout[keys.NEXT, "wrong_actions"][:, -1] > 5).all()
