"""The TorchRL interface of an env: step counts, infos, seeds, compared with TorchRL's wrappers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from tdcollect import Collector, make_env
from tdcollect.seeding import slot_seeds

from ..collect.oracle import assert_same


class Replay:
    """A policy that replays given actions ``[T, *batch, *action]``."""

    def __init__(self, actions: torch.Tensor) -> None:
        self.actions = iter(actions)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", next(self.actions))


def random_actions(env: EnvBase, steps: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.stack([env.action_spec.rand() for _ in range(steps)])


def play(env: EnvBase, actions: torch.Tensor, seed: int) -> TensorDictBase:
    """A rollout of given actions over many episodes, from a seeded reset."""
    return env.rollout(
        len(actions),
        Replay(actions),
        auto_reset=False,
        tensordict=env.reset(seed=seed),
        break_when_any_done=False,
    )


# --- beside TorchRL ----------------------------------------------------------------------------


# gymnasium has Taxi-v4 from 1.2 on.
TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"


@pytest.mark.parametrize(
    ("env_id", "categorical"),
    [("CartPole-v1", False), ("Pendulum-v1", False), ("FrozenLake-v1", True), (TAXI, False)],
)
def test_unbatched_data_are_those_of_gymenv(env_id: str, categorical: bool) -> None:
    theirs = GymEnv(env_id, categorical_action_encoding=categorical)
    ours = make_env(env_id, categorical_action_encoding=categorical)
    actions = random_actions(ours, 210)
    assert_same(play(ours, actions, seed=3), play(theirs, actions, seed=3))


def with_transforms(env: EnvBase, max_steps: int | None) -> TransformedEnv:
    return TransformedEnv(env, Compose(StepCounter(max_steps), RewardSum(), InitTracker()))


@pytest.mark.parametrize(
    ("env_id", "max_episode_steps", "num_envs"),
    [
        ("CartPole-v1", None, 3),
        ("CartPole-v1", 17, None),
        ("Pendulum-v1", 1, 3),
    ],
)
def test_bookkeeping_is_that_of_torchrls_transforms(
    env_id: str, max_episode_steps: int | None, num_envs: int | None
) -> None:
    ours = make_env(
        env_id,
        num_envs,
        step_count=True,
        episode_reward=True,
        is_init=True,
        max_episode_steps=max_episode_steps,
    )
    theirs = with_transforms(make_env(env_id, num_envs), max_episode_steps)
    actions = random_actions(ours, 100)
    reference = play(theirs, actions, seed=0)
    assert reference["next", "done"].any()
    assert_same(play(ours, actions, seed=0), reference)


def test_bookkeeping_is_that_of_torchrls_transforms_after_partial_resets() -> None:
    names = ["step_count", "episode_reward", "is_init"]
    ours = make_env("Pendulum-v1", 3, **dict.fromkeys(names, True))
    theirs = with_transforms(make_env("Pendulum-v1", 3), None)
    mask = torch.tensor([[True], [False], [True]])
    results = []
    for env in (ours, theirs):
        td = play(env, random_actions(ours, 5), seed=0)[:, -1]["next"].exclude("reward")
        td = env.reset(td.set("_reset", mask))
        results.append(env.step(td.set("action", torch.zeros(3, 1))))
    assert_same(results[0].select(*names, "next"), results[1].select(*names, "next"))


def test_bookkeeping_specs_are_torchrls_and_nothing_is_there_unasked() -> None:
    ours = make_env("CartPole-v1", 2, step_count=True, episode_reward=True, is_init=True)
    theirs = with_transforms(make_env("CartPole-v1", 2), None)
    assert ours.observation_spec == theirs.observation_spec
    check_env_specs(ours, seed=0)
    assert set(make_env("CartPole-v1", 2).observation_spec.keys()) == {"observation"}


@pytest.mark.behaviour(10)
def test_a_time_limit_truncates_and_leaves_the_limit_of_the_env() -> None:
    batch = make_env("Pendulum-v1", 2, max_episode_steps=4).rollout(12, break_when_any_done=False)
    expected = (torch.arange(12) % 4 == 3).expand(2, -1)
    assert torch.equal(batch["next", "truncated"][..., 0], expected)
    assert torch.equal(batch["next", "done"], batch["next", "truncated"])
    assert not batch["next", "terminated"].any()
    env = make_env("Pendulum-v1", max_episode_steps=10_000)
    assert env.rollout(300).shape == (200,)


# --- infos -------------------------------------------------------------------------------------


class Informed(gym.Env):
    """Its infos: ``number`` and ``array`` always; ``late`` from the third step."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, **more: Any) -> None:
        self.more, self.calls = more, 0

    def _out(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.calls += 1
        info = {
            "number": self.time,
            "array": np.full((2, 2), self.time, np.int16),
            **self.more,
        }
        if self.time >= 3:
            info["late"] = self.time
        return np.array([self.time], np.float32), info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return self._out()

    def step(self, action: Any) -> Any:
        self.time += 1
        observation, info = self._out()
        return observation, 0.0, False, False, info


def test_info_keys_run_one_reset_and_one_step_as_names_and_nothing_as_a_dict() -> None:
    for info_keys, calls in ((["number"], 2), ({"late": 0, "array": np.zeros((2, 2))}, 0)):
        env = Informed()
        made = make_env(env, info_keys=info_keys)
        assert env.calls == calls
    # One that comes late reads zero before.
    assert made.rollout(5)["next", "late"].tolist() == [0, 0, 3, 4, 5]


def test_infos_of_every_dtype_pass_torchrls_check() -> None:
    codes = "?BHIbhiqefd"  # bool; integers without a sign and with one; floats
    infos = {np.dtype(code).name: np.ones(2, code) for code in codes}
    env = make_env(lambda: Informed(**infos), 2, info_keys=list(infos))
    check_env_specs(env)
    begun = env.reset()
    assert all((begun[name] == 1).all() for name in infos)


def test_infos_that_cannot_be_stored_are_refused() -> None:
    for env in (SyncVectorEnv([Informed]), Informed):
        with pytest.raises(KeyError, match=r"\['late'\] are in the info of neither .*'array'"):
            make_env(env, info_keys=["number", "late"])
    for value in ("text", None, {"a": 1}, 1j):
        with pytest.raises(TypeError, match="expected info 'x' to be a number or an array of numb"):
            make_env(lambda value=value: Informed(x=value), info_keys=["x"])


# --- what is given out -------------------------------------------------------------------------


class Reusing(Informed):
    """Returns the same array at every step, changed in place."""

    buffer = np.zeros(1, np.float32)

    def _out(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.buffer[0] = self.time
        return self.buffer, {"buffer": self.buffer}


@pytest.mark.parametrize("num_envs", [None, 2])
def test_tensors_that_were_given_out_never_change(num_envs: int | None) -> None:
    env = make_env(Reusing, num_envs, info_keys=["buffer"], is_init=True, step_count=True)
    td = env.reset()
    given, copies = [], []
    for _ in range(5):
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        given += [td, following]
        copies += [td.clone(), following.clone()]
        td = following.copy()
    assert all((a == b).all() for a, b in zip(given, copies, strict=True))


def test_tensors_of_a_vector_env_without_copies_never_change() -> None:
    vector = SyncVectorEnv([Reusing] * 2, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    env = make_env(vector)
    first = env.reset()["observation"]
    env.rand_step()
    assert not first.any()


def test_a_device_is_that_of_every_entry() -> None:
    env = make_env("CartPole-v1", 2, device="cpu", step_count=True)
    td = env.rollout(3)
    assert env.device == td.device == td["next"].device == torch.device("cpu")
    assert all(tensor.device == td.device for tensor in td.values(True, True))
    check_env_specs(env)

    env = make_env("CartPole-v1", 2)
    assert env.device is env.reset().device is None


# --- seeds and options -------------------------------------------------------------------------


def starts(*seeds: int) -> torch.Tensor:
    """CartPole's first observations for the seeds, by gymnasium alone."""
    return torch.stack(
        [torch.from_numpy(gym.make("CartPole-v1").reset(seed=seed)[0]) for seed in seeds]
    )


def test_reset_gives_slot_i_a_seed_of_the_root_or_its_own() -> None:
    env, under_5 = make_env("CartPole-v1", 3), starts(*slot_seeds(5, range(3)))
    assert torch.equal(env.reset(seed=5)["observation"], under_5)
    assert torch.equal(env.reset(seed=[9, 1, 5])["observation"], starts(9, 1, 5))
    td = env.reset().set("_reset", torch.tensor([[False], [True], [True]]))
    assert torch.equal(env.reset(td, seed=5)["observation"][1:], under_5[1:])
    through = TransformedEnv(env, StepCounter())
    assert torch.equal(through.reset(seed=5)["observation"], under_5)


def test_the_seeds_of_make_env_and_of_set_seed_wait_for_the_reset_of_their_slot() -> None:
    env = make_env("CartPole-v1", 2, seed=[8, 3])
    assert torch.equal(env.reset()["observation"], starts(8, 3))
    env, under_5 = make_env("CartPole-v1", 3, seed=5), starts(*slot_seeds(5, range(3)))
    td = env.reset()
    assert torch.equal(td["observation"], under_5)
    assert env.set_seed(5) == GymEnv("CartPole-v1").set_seed(5)
    td = env.reset(td.set("_reset", torch.tensor([[False], [True], [False]])))
    assert torch.equal(td["observation"][1], under_5[1])
    td = env.reset()
    assert torch.equal(td["observation"][[0, 2]], under_5[[0, 2]])
    assert not torch.equal(td["observation"][1], under_5[1])
    # A seed given to reset replaces one that waits.
    assert env.set_seed(5, static_seed=True) == 5
    assert torch.equal(env.reset(seed=8)["observation"], starts(*slot_seeds(8, range(3))))
    assert not torch.equal(env.reset()["observation"], under_5)


def test_seeds_that_cannot_be_honoured_are_refused() -> None:
    env = make_env("CartPole-v1", 2)
    with pytest.raises(ValueError, match="one seed for each of the 2 slots"):
        env.reset(seed=[1, 2, 3])
    with pytest.raises(ValueError, match="not negative"):
        env.reset(seed=-1)
    for call in (env.reset, env.set_seed):
        with pytest.raises(TypeError, match=r"expected a seed that is an int .* got 1\.5"):
            call(seed=1.5)


def test_options_reach_the_slots_that_are_reset_and_are_not_changed() -> None:
    options = {"low": 0.2, "high": 0.3}
    for env in (
        make_env("CartPole-v1", 2),
        make_env(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)),
    ):
        td = env.reset().set("_reset", torch.tensor([[False], [True]]))
        after = env.reset(td, options=options)["observation"]
        assert (after[1] >= 0.2).all()
        assert (after[0] < 0.2).all()
        assert (env.reset(options=options)["observation"] >= 0.2).all()
    assert options == {"low": 0.2, "high": 0.3}


# --- the rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_frames_and_the_latest_infos_are_those_of_each_slot(backend: str) -> None:
    options = {"start_method": "fork", "num_workers": 2} if backend == "process" else {}
    kwargs = {"render_mode": "ansi", "is_slippery": False}
    env = make_env("FrozenLake-v1", 2, backend=backend, env_kwargs=kwargs, **options)
    down, right = (torch.eye(4, dtype=torch.int64)[[way, way]] for way in (1, 2))
    moved = env.step(env.reset().set("action", right))["next"]
    env.step(moved.update({"action": down, "_step": torch.tensor([[False], [True]])}))
    assert ["Down" in frame for frame in env.render()] == [False, True]
    assert [env.latest_info(slot) for slot in range(2)] == [{}, {"prob": 1.0}]
    env.close()


def test_a_single_env_renders_one_frame() -> None:
    env = make_env("FrozenLake-v1", env_kwargs={"render_mode": "ansi"})
    env.reset()
    assert "FFFH" in env.render().replace("\x1b[41m", "").replace("\x1b[0m", "")


def test_repr_says_what_runs_where() -> None:
    told = "GymnasiumEnv(CartPole-v1, backend={}, batch_size={}, device={})"
    assert repr(make_env("CartPole-v1", 2)) == told.format("serial", [2], None)
    assert repr(make_env("CartPole-v1", device="cpu")) == told.format("serial", [], "cpu")
    vector = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    assert repr(make_env(vector)) == told.format("gymnasium", [2], None)


# --- the adapter's own -------------------------------------------------------------------------


def test_an_adapter_says_what_its_slots_can() -> None:
    vector = SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED
    )
    for env, singly in ((make_env("CartPole-v1", 2), True), (make_env(vector), False)):
        assert env.can.pause is env.can.rebuild is singly
        assert env.can.reset_singly
        assert env.can.seed_singly
        assert not env.can.resume
        assert len(env.slot_envs) == 2 * singly
        assert env.env_spec is not None
        assert env.env_spec.id == "CartPole-v1"
        assert env.action_space == spaces.Discrete(2)
        assert env.observation_space == gym.make("CartPole-v1").observation_space
        assert env.restarts is None
        assert not env.broken_episodes


class Keeps(nn.Module):
    """Keeps what it is given, and asks for its gradient if that is wanted."""

    def __init__(self, gradients: bool = False):
        super().__init__()
        self.gradients = gradients
        self.kept: list[torch.Tensor] | None = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.gradients and self.kept is not None:
            with torch.enable_grad():
                assert observation.grad is None
                (observation.requires_grad_() ** 2).sum().backward()
        if self.kept is not None:
            self.kept.append(observation)
        return (observation[..., :1] > 0).long().squeeze(-1)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_policy_keeps_does_not_change(gradients: bool) -> None:
    env = make_env("CartPole-v1", 3, categorical_action_encoding=True)
    keeps = Keeps(gradients)
    policy = TensorDictModule(keeps, ["observation"], ["action"])
    collector = Collector(env, policy, frames_per_batch=450, total_frames=1800)
    collector.set_seed(0)
    keeps.kept = []  # not what the collector's making has shown it
    batches = torch.cat([batch["observation"] for batch in collector], 1)
    assert torch.equal(torch.stack([seen.detach() for seen in keeps.kept], 1), batches)


def test_the_latest_rewards_are_given_as_the_envs_gave_them() -> None:
    env = make_env("Pendulum-v1", 2)
    stored = env.rollout(1)["next", "reward"][:, 0]
    assert torch.equal(env.exact_reward(), stored)
    with env.exact_rewards():
        stored = env.rollout(1)["next", "reward"][:, 0]
    assert env.exact_reward().dtype is torch.float64
    assert torch.equal(env.exact_reward().float(), stored)
