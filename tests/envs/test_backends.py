"""Every backend keeps the contract: one TorchRL env, the same data, no row for a reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import check_env_specs, step_mdp

from tdcollect import GymnasiumEnv, make_env, slot_seed
from tdcollect.envs.process.backend import ProcessBackend
from tdcollect.envs.slots import Stepper

from ..counting import CountingEnv, CountingRules, check_counting_batch
from ..forkserver import forkserver

N = 3
SEEDS = [7, 100, 23]
MODES = {"disabled": "DISABLED", "next-step": "NEXT_STEP", "same-step": "SAME_STEP"}
MODES_OF_WORKERS = ["async-next-step", "async-same-step"]
VECTOR_KINDS = [*(f"sync-{mode}" for mode in MODES), "async-disabled"]
OWN_KINDS = ["unbatched", "serial", "process"]
"""Backends that step plain gymnasium envs themselves."""
CUSTOM_KINDS = [*OWN_KINDS, *VECTOR_KINDS]
"""Backends that take any gymnasium env."""
ENVPOOL_KINDS = ["envpool", "envpool-unbatched"]
KINDS = [*CUSTOM_KINDS, *ENVPOOL_KINDS]
BATCHED_KINDS = [kind for kind in KINDS if "unbatched" not in kind]


def build(kind: str, make: Callable[..., gym.Env], **options: Any) -> GymnasiumEnv:
    """An env of the given kind, with ``make(slot=i)`` in slot i."""
    if kind == "unbatched":
        return make_env(partial(make, slot=0), **options)
    if kind == "serial":
        slots = iter(range(N))
        return make_env(lambda: make(slot=next(slots)), num_envs=N, **options)
    if kind == "process":
        return process_env(make, **options)
    way, _, mode = kind.partition("-")
    vector_class = {"sync": SyncVectorEnv, "async": async_vector_env}[way]
    factories = [partial(make, slot=slot) for slot in range(N)]
    vector = vector_class(factories, autoreset_mode=AutoresetMode[MODES[mode]])
    return make_env(vector, **options)


def process_env(
    make: Callable[..., gym.Env],
    categorical_action_encoding: bool = False,
    info_keys: Any = (),
    seed: int = 0,
) -> GymnasiumEnv:
    """An env as of make_env, but with another callable in each slot; forked, which is quick."""
    factories = [partial(make, slot=slot) for slot in range(N)]
    backend = ProcessBackend(
        factories, categorical_action_encoding, num_workers=2, start_method="fork"
    )
    if info_keys:
        backend.read_info(info_keys)
    env = GymnasiumEnv(Stepper(backend, name="process env"), batched=True)
    env.set_seed(seed)
    return env


def async_vector_env(factories: Sequence[Callable[[], gym.Env]], **options: Any) -> AsyncVectorEnv:
    return AsyncVectorEnv(factories, context=forkserver().get_start_method(), **options)


def cartpole(slot: int = 0) -> gym.Env:
    return gym.make("CartPole-v1")


def build_cartpole(kind: str, **options: Any) -> GymnasiumEnv:
    if kind not in ENVPOOL_KINDS:
        return build(kind, cartpole, **options)
    pytest.importorskip("envpool", reason="the envpool extra is not installed")
    num_envs = N if kind == "envpool" else None
    return make_env("CartPole-v1", num_envs, backend="envpool", **options)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def env(kind: str) -> Iterator[GymnasiumEnv]:
    env = build_cartpole(kind, categorical_action_encoding=True)
    yield env
    env.close()


every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
batched_kinds = pytest.mark.parametrize("kind", BATCHED_KINDS, indirect=True)


class Replay:
    """A policy that replays given actions ``[N, T]``."""

    def __init__(self, env: GymnasiumEnv, actions: np.ndarray) -> None:
        self.batch_size, self.actions, self.step = env.batch_size, actions, 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        action = torch.from_numpy(self.actions[:, self.step].copy())
        self.step += 1
        return td.set("action", action if self.batch_size else action[0])


def play(env: GymnasiumEnv, actions: np.ndarray, seeds: Sequence[int] | None = None) -> TensorDict:
    """A rollout ``[N, T]`` of given actions, over many episodes."""
    n = env.num_envs
    start = env.reset(seed=list(seeds[:n])) if seeds is not None else env.reset()
    policy = Replay(env, actions[:n])
    steps = actions.shape[1]
    rollout = env.rollout(
        steps, policy, auto_reset=False, tensordict=start, break_when_any_done=False
    )
    return rollout if env.batch_size else rollout[None]


class Plain(NamedTuple):
    """The data of a plain gymnasium loop, each ``[N, T]``."""

    observation: np.ndarray
    next_observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def plain_loop(envs: Sequence[Any], actions: np.ndarray, seeds: Sequence[int]) -> Plain:
    """The oracle: gymnasium envs, reset when an episode ends."""
    slots = []
    for env, slot_actions, seed in zip(envs, actions, seeds, strict=False):
        rows = []
        observation, _ = env.reset(seed=seed)
        for action in slot_actions:
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((np.copy(observation), np.copy(following), reward, terminated, truncated))
            observation = env.reset()[0] if terminated or truncated else following
        slots.append([np.array(column) for column in zip(*rows, strict=True)])
        env.close()
    return Plain(*(np.stack(column) for column in zip(*slots, strict=True)))


def assert_plays_as(batch: TensorDict, plain: Plain) -> None:
    """The same data, to the bit, in the same dtypes."""
    np.testing.assert_array_equal(batch["observation"], plain.observation)
    np.testing.assert_array_equal(batch["next", "observation"], plain.next_observation)
    assert batch["observation"].numpy().dtype == plain.observation.dtype
    np.testing.assert_array_equal(batch["next", "reward"][..., 0], plain.reward.astype(np.float32))
    np.testing.assert_array_equal(batch["next", "terminated"][..., 0], plain.terminated)
    np.testing.assert_array_equal(batch["next", "truncated"][..., 0], plain.truncated)
    np.testing.assert_array_equal(batch["next", "done"][..., 0], plain.terminated | plain.truncated)


def random_actions(steps: int, seed: int = 0, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, size=(n, steps))


# --- the oracle: a plain gymnasium loop --------------------------------------------------------


class OnePool:
    """One EnvPool env with gymnasium's face, for the plain loop."""

    def __init__(self, seed: int) -> None:
        envpool = pytest.importorskip("envpool", reason="the envpool extra is not installed")
        self.pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=seed)

    def reset(self, seed: int | None = None) -> Any:
        observation, info = self.pool.reset()
        return observation[0], info

    def step(self, action: int) -> Any:
        *values, info = self.pool.step(np.array([action]))
        return *(value[0] for value in values), info

    def close(self) -> None:
        self.pool.close()


# --- the counting env ---------------------------------------------------------------------------

RULES = CountingRules(lengths=(3, 1, 5, 2), num_actions=10)


class Counting(CountingEnv):
    """The counting env with infos."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot, RULES, wrong_action="record")

    def reset(self, **given: Any) -> Any:
        self.last = -1
        observation, info = super().reset(**given)
        return observation, {**info, **self.facts(), "at_reset": True, "nested": {"a": 1}}

    def step(self, action: Any) -> Any:
        self.last = int(action)
        *given, info = super().step(action)
        return *given, {**info, **self.facts()}

    def facts(self) -> dict[str, Any]:
        step, *pair = self._observation()
        return {"time": int(step), "pair": np.array(pair, np.float32), "last": self.last}


def nested(slot: int) -> gym.Env:
    """The same, with observations of several dtypes in a nested space."""
    space = spaces.Dict(
        when=spaces.Dict(step=spaces.Discrete(10), episode=spaces.Box(0, 10**6, (), np.int64)),
        where=spaces.Tuple([spaces.Box(-1, 10, (1,), np.float32)] * 2),
    )

    def nest(observation: np.ndarray) -> dict[str, Any]:
        step, episode, slot = observation
        when = {"step": int(step), "episode": np.int64(episode)}
        return {"when": when, "where": (np.array([slot], np.float32),) * 2}

    return gym.wrappers.TransformObservation(Counting(slot), nest, space)


def flatten(td: TensorDictBase) -> None:
    """Turn nested observations into those of the counting env."""
    when, where = td["when"], td["where"][..., 0]
    assert (where[..., 0] == where[..., 1]).all()
    parts = when["step"].argmax(-1), when["episode"][..., 0], where[..., 0]
    td["observation"] = torch.stack([part.float() for part in parts], -1)


COUNTED = [
    *((kind, Counting) for kind in [*CUSTOM_KINDS, *MODES_OF_WORKERS]),
    *((kind, nested) for kind in ["serial", "process", "sync-disabled", "sync-same-step"]),
]


@pytest.mark.parametrize(("kind", "form"), COUNTED)
def test_the_rules_of_the_contract_hold(kind: str, form: Any) -> None:
    """In a rollout of the counting env over many episodes, whose actions are random."""
    env = build(kind, form, info_keys=["time", "pair", "at_reset", "last"])
    actions = np.random.default_rng(0).integers(10, size=(env.num_envs, 60))
    batch = play(env, np.eye(10, dtype=np.int64)[actions])
    env.close()
    for td in (batch, batch["next"]) if form is nested else ():
        flatten(td)
    check_counting_batch(batch, RULES, predicted=False)
    assert batch["next", "terminated"].any()
    assert batch["next", "truncated"].any()
    assert torch.equal(batch["next", "last"], torch.from_numpy(actions))  # none is ignored
    # Infos belong to their rows, final ones too; one that is missing reads zero.
    for td in (batch, batch["next"]):
        assert torch.equal(td["time"], td["observation"][..., 0].long())
        assert torch.equal(td["pair"], td["observation"][..., 1:])
    assert torch.equal(batch["at_reset"], batch["time"] == 0)
    assert not batch["next", "at_reset"].any()
    dtypes = [batch[name].dtype for name in ("time", "pair", "at_reset")]
    assert dtypes == [torch.int64, torch.float32, torch.bool]


# --- with TorchRL ------------------------------------------------------------------------------


@every_kind
def test_specs_hold_and_set_seed_decides_the_next_reset(env: GymnasiumEnv) -> None:
    check_env_specs(env, seed=0)
    actions = random_actions(40)
    runs = []
    for seed in (3, 3, 4):
        env.set_seed(seed)
        runs.append(play(env, actions))
    assert torch.equal(runs[0]["observation"], runs[1]["observation"])
    assert not torch.equal(runs[0]["observation"], runs[2]["observation"])
    by_reset = play(env, actions, [slot_seed(3, slot) for slot in range(N)])
    assert torch.equal(runs[0]["observation"], by_reset["observation"])


@pytest.mark.parametrize("kind", KINDS)
def test_torchrls_collector_yields_what_a_plain_loop_sees(kind: str) -> None:
    env = build_cartpole(kind, categorical_action_encoding=True, seed=SEEDS[0])
    collector = TorchRLCollector(
        env, None, frames_per_batch=40 * env.num_envs, total_frames=160 * env.num_envs
    )
    batch = torch.cat([part.reshape(env.num_envs, -1) for part in collector], 1).cpu()
    collector.shutdown()
    seeds = [slot_seed(SEEDS[0], slot) for slot in range(env.num_envs)]
    make = OnePool if kind in ENVPOOL_KINDS else lambda seed: cartpole()
    plain = plain_loop([make(seed) for seed in seeds], batch["action"].numpy(), seeds)
    assert plain.terminated.sum() > 2 * env.num_envs
    assert_plays_as(batch, plain)


# --- partial resets and steps ------------------------------------------------------------------


def some_steps_in(env: GymnasiumEnv, steps: int = 5) -> TensorDictBase:
    """The root TensorDict after steps that end no episode."""
    batch = play(env, random_actions(steps), SEEDS)
    assert not batch["next", "done"].any()
    return step_mdp(batch[:, -1])


@batched_kinds
def test_a_partial_reset_leaves_the_other_slots_alone(kind: str, env: GymnasiumEnv) -> None:
    before = some_steps_in(env)
    mask = torch.tensor([False, True, False])
    shape = (N,) if kind == "serial" else (N, 1)
    after = env.reset(before.clone().set("_reset", mask.reshape(shape)))
    assert torch.equal(after[~mask]["observation"], before[~mask]["observation"])
    assert (after[mask]["observation"].abs() <= 0.05).all()
    assert (before[mask]["observation"].abs() > 0.05).any()
    # TorchRL's reset() pads what its input lacks with zeros; what the env itself gives is whole.
    after = env._reset(TensorDict({"_reset": mask}, [N]))
    assert torch.equal(after[~mask]["observation"], before[~mask]["observation"])
    # A seed is for the slots that are reset alone.
    if kind == "envpool":
        with pytest.raises(ValueError, match="EnvPool seeds at construction only"):
            env.reset(before.clone().set("_reset", mask), seed=[5])
    else:
        after = env.reset(before.clone().set("_reset", mask), seed=[5])
        assert np.array_equal(after["observation"][1], cartpole().reset(seed=5)[0])
        assert torch.equal(after[~mask]["observation"], before[~mask]["observation"])
    # Nor does a reset of no slot do anything.
    none = torch.zeros(N, 1, dtype=torch.bool)
    for seed in (None, 3):
        again = env.reset(after.clone().set("_reset", none), seed=seed)
        assert torch.equal(again["observation"], after["observation"])


@batched_kinds
def test_a_step_of_some_slots_leaves_the_others_alone(kind: str, env: GymnasiumEnv) -> None:
    before = some_steps_in(env)
    mask = torch.tensor([[True], [False], [True]])
    td = before.clone().set("action", torch.zeros(N, dtype=torch.int64)).set("_step", mask)
    if kind in VECTOR_KINDS:
        with pytest.raises(RuntimeError, match="this vector env steps its slots together"):
            env.step(td)
        return
    following = env.step(td)["next"]
    assert torch.equal(following["observation"][1], before["observation"][1])
    assert following["reward"].flatten().tolist() == [1, 0, 1]
    twin = build_cartpole(kind, categorical_action_encoding=True)
    whole = twin.step(some_steps_in(twin).set("action", torch.zeros(N, dtype=torch.int64)))["next"]
    moved = mask[:, 0]
    assert torch.equal(following[moved]["observation"], whole[moved]["observation"])
    twin.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OWN_KINDS])
def test_a_step_that_would_lose_an_action_is_refused(kind: str) -> None:
    env = build_cartpole(kind, max_episode_steps=1)
    td = env.rand_step(env.reset())
    assert td["next", "done"].all()
    with pytest.raises(RuntimeError, match=r"the episodes of slots \[0.*reset these slots first"):
        env.rand_step(step_mdp(td))
    env.close()


def test_episodes_begun_by_the_vector_env_are_not_lost_beside_a_time_limit() -> None:
    # In SAME_STEP mode some slots have begun anew by themselves where others wait for a reset.
    env = build("sync-same-step", Counting, max_episode_steps=3)
    batch = play(env, np.eye(10, dtype=np.int64)[np.zeros((N, 40), int)])
    env.close()
    check_counting_batch(batch, RULES, predicted=False, max_episode_steps=3)


# --- seeds, closing ----------------------------------------------------------------------------


@every_kind
def test_a_closed_env_says_so(env: GymnasiumEnv) -> None:
    td = env.fake_tensordict().exclude("next")
    with pytest.raises(RuntimeError, match=r"expected reset\(\) before the first step\(\)"):
        env.step(td)
    td = env.reset()
    env.close()
    env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match=r"cannot reset .* the env is closed; make a new one"):
        env.reset()
    with pytest.raises(RuntimeError, match=r"cannot step .* the env is closed; make a new one"):
        env.rand_step(td)


def test_envpool_draws_fresh_episodes_unless_seeded_and_refuses_what_it_cannot_honour() -> None:
    env = build_cartpole("envpool")
    other = build_cartpole("envpool").reset()["observation"]
    assert not torch.equal(env.reset()["observation"], other)
    with pytest.raises(ValueError, match="EnvPool takes no reset options"):
        env.reset(options={"low": 0.0})
    env.close()
    with pytest.raises(ValueError, match=r"expected EnvPool seeds in \[0, 2\*\*31\)"):
        make_env("CartPole-v1", 2, backend="envpool", seed=[0, 2**31])


# --- vector envs of other classes --------------------------------------------------------------


class Foreign(VectorWrapper):
    """A vector env that is neither Sync nor Async, around one that is."""

    def __init__(self, mode: AutoresetMode | None) -> None:
        inner_mode = AutoresetMode.SAME_STEP if mode is None else mode
        factories = [partial(Counting, slot=slot) for slot in range(N)]
        super().__init__(SyncVectorEnv(factories, autoreset_mode=inner_mode))
        self.metadata = {} if mode is None else {"autoreset_mode": mode}

    @property
    def unwrapped(self) -> Any:
        return self


def without_shared_memory(mode: AutoresetMode) -> AsyncVectorEnv:
    factories = [partial(Counting, slot=slot) for slot in range(N)]
    return async_vector_env(factories, shared_memory=False, autoreset_mode=mode)


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (Foreign, AutoresetMode.SAME_STEP),
        (Foreign, AutoresetMode.DISABLED),
        (without_shared_memory, AutoresetMode.SAME_STEP),
    ],
)
def test_other_vector_envs_keep_the_contract(make: Any, mode: AutoresetMode) -> None:
    env = make_env(make(mode))
    batch = play(env, np.eye(10, dtype=np.int64)[np.zeros((N, 40), int)])
    env.close()
    check_counting_batch(batch, RULES, predicted=False)


@pytest.mark.parametrize(
    ("make", "mode", "told"),
    [
        (Foreign, None, r"expected metadata\['autoreset_mode'\]"),
        (without_shared_memory, AutoresetMode.NEXT_STEP, "use shared_memory=True or autoreset_m"),
    ],
)
def test_a_vector_env_that_would_lose_actions_is_refused(make: Any, mode: Any, told: str) -> None:
    vector = make(mode)
    with pytest.raises(ValueError, match=told):
        make_env(vector)
    vector.close()


def test_a_same_step_env_that_resets_whole_only_resets_no_single_slot() -> None:
    env = make_env(Foreign(AutoresetMode.SAME_STEP))
    env.reset()
    mask = torch.tensor([[True], [False], [False]])
    with pytest.raises(ValueError, match=r"cannot reset slots \[0\] alone.*backend='serial'"):
        env.reset(TensorDict({"_reset": mask}, [N]))
    with pytest.raises(ValueError, match="expected no max_episode_steps"):
        make_env(Foreign(AutoresetMode.SAME_STEP), max_episode_steps=3)
