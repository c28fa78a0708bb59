"""Models of Stable-Baselines3 as policies: the oracle is their own ``predict``, in a plain loop."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.envs import ExplorationType

import tdcollect
from tdcollect.evaluation.ledger import policy_name
from tdcollect.evaluation.sb3 import load_policy
from tdcollect.policies import from_function
from tdcollect.randomness import GlobalStream, Outside

from ..zoo.process_envs import Drawn

sb3 = pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3 (extra dev)")
sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (extra dev)")


class Shown(Drawn):
    """Refuses actions outside its space."""

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return super().step(action)


UNIT, IMAGE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (36, 40, 3), np.uint8)
NUMBERS = spaces.Box(np.float32([-1, 0]), np.float32([1, 0.2]))
SHOWN = {
    "a discrete observation": (spaces.Discrete(4), spaces.Discrete(3)),
    "an image": (IMAGE, spaces.Discrete(3)),
    "a dict": (spaces.Dict(a=UNIT, of=spaces.Discrete(2), pixels=IMAGE), spaces.Discrete(3)),
    "discrete choices": (UNIT, spaces.MultiDiscrete([2, 5])),
    "bits": (UNIT, spaces.MultiBinary(3)),
    "numbers from a start": (UNIT, NUMBERS),
    "a dict, and numbers": (spaces.Dict(a=UNIT, of=spaces.Discrete(2), pixels=IMAGE), NUMBERS),
    "an image, and numbers": (IMAGE, NUMBERS),
}


def shown(name: str) -> Callable[[], gym.Env[Any, Any]]:
    return lambda: Shown(*SHOWN[name])


def pendulum() -> gym.Env[Any, Any]:
    return gym.make("Pendulum-v1", max_episode_steps=5)


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", max_episode_steps=12)


def model(algorithm: str, env: Any, policy: str = "MlpPolicy", **options: Any) -> Any:
    """An untrained model; a seed determines its weights."""
    if algorithm in ("PPO", "A2C", "MaskablePPO", "RecurrentPPO", "TRPO"):
        options = {"n_steps": 8, **options}
    if algorithm not in ("A2C", "ARS"):
        options = {"batch_size": 8, **options}
    if algorithm in ("TD3", "DDPG", "SAC", "TQC", "CrossQ", "DQN", "QRDQN"):
        options = {"buffer_size": 100, "policy_kwargs": {"net_arch": [16]}, **options}
    if policy.startswith(("Cnn", "MultiInput")):  # whose layers are large
        size = "features_dim" if policy.startswith("Cnn") else "cnn_output_dim"
        options["policy_kwargs"] = {"features_extractor_kwargs": {size: 8}}
    module = sb3 if hasattr(sb3, algorithm) else sb3_contrib
    return getattr(module, algorithm)(policy, env(), seed=3, device="cpu", **options)


def by_predict(model: Any, env: Any, count: int, deterministic: bool) -> list[list[Any]]:
    """The actions of test episodes, as ``model.predict`` has them."""
    made, episodes = env(), []
    for i in range(count):
        observation, _ = made.reset(seed=tdcollect.env_seed(0, i))
        torch.manual_seed(tdcollect.policy_seed(0, i))
        actions, state, ended = [], None, False
        while not ended:
            begins = np.array([state is None])
            action, state = model.predict(observation, state, begins, deterministic)
            observation, _, terminated, truncated, _ = made.step(action)
            actions.append(action)
            ended = terminated or truncated
        episodes.append(np.array(actions))
    return episodes


def by_evaluate(
    model: Any, env: Any, count: int, deterministic: bool, normalization: Any = None, **options: Any
) -> Any:
    """The same by :func:`tdcollect.evaluate`; and its result."""
    made = tdcollect.make_env(env, num_envs=options.pop("slots", 2))
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    policy = load_policy(model, made, normalization=normalization)
    options = {"keep_trajectories": True, "progress": False, **options}
    result = tdcollect.evaluate(made, policy, count, exploration_type=kind, **options)
    codec = made.stepper.backend.action
    episodes = [
        codec.read([result.trajectory(i)[key].numpy() for key in made.action_keys])
        for i in range(count)
    ]
    made.close()
    return episodes, result


# Each algorithm of both packages: envs that it takes, and the policy for them.
ENVS = {
    "Pendulum": (pendulum, "MlpPolicy"),
    "CartPole": (cartpole, "MlpPolicy"),
    **{name: (shown(name), "MlpPolicy") for name in SHOWN},
    **{name: (shown(name), "CnnPolicy") for name in SHOWN if "image" in name},
    **{name: (shown(name), "MultiInputPolicy") for name in SHOWN if "dict" in name},
}
ANY = ("Pendulum", "CartPole", *SHOWN)
CHOICES = ("CartPole", "a discrete observation", "an image", "a dict")
BOXES = ("Pendulum", "numbers from a start", "an image, and numbers", "a dict, and numbers")
TABLE = {
    **dict.fromkeys(("A2C", "PPO", "TRPO", "RecurrentPPO"), ANY),
    **dict.fromkeys(("DQN", "QRDQN"), CHOICES),
    **dict.fromkeys(("DDPG", "SAC", "TD3", "TQC"), BOXES),
    "CrossQ": BOXES[:2],  # it has an MlpPolicy alone
    "ARS": ("CartPole", "Pendulum", "numbers from a start"),
}
QUICK = {("PPO", "a dict", False), ("SAC", "Pendulum", False), ("DQN", "CartPole", True)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for algorithm, names in TABLE.items()
    # The draws of these come from elsewhere, and have tests of their own.
    for case in itertools.product(
        [algorithm],
        names,
        [True] if algorithm in ("DQN", "QRDQN", "RecurrentPPO") else [True, False],
    )
]


def test_the_table_has_each_algorithm() -> None:
    found = {
        name
        for module in (sb3, sb3_contrib)
        for name, one in vars(module).items()
        if isinstance(one, type) and hasattr(one, "learn")
    }
    # HER became a buffer. Masks have a test of their own.
    assert found - {"HER", "HerReplayBuffer"} == {*TABLE, "MaskablePPO"}


@pytest.mark.parametrize(("algorithm", "name", "deterministic"), CASES)
def test_actions_are_those_of_predict(
    algorithm: str, name: str, deterministic: bool, tmp_path: Path
) -> None:
    env, policy = ENVS[name]
    if algorithm == "RecurrentPPO":
        policy = policy.replace("Policy", "LstmPolicy")
    of = model(algorithm, env, policy)
    of.save(tmp_path / "model")
    expected = by_predict(of, env, 2, deterministic)
    # One row at a time, as the plain loop has it: the same to the bit. The suffix may be left out.
    found, _ = by_evaluate(tmp_path / "model", env, 2, deterministic, inference_batch_size=1)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    # In a batch, the evaluation's probe refuses a policy that couples rows.
    _, batched = by_evaluate(of, env, 2, deterministic, inference_batch_size=4)
    assert batched.lengths.tolist() == [len(actions) for actions in expected]
    assert policy_name(batched.manifest) == algorithm


class Seeded(gym.Wrapper[Any, Any, Any, Any]):
    """Resets with an evaluation's seeds, and lets the policy draw from its streams."""

    started = 0

    def reset(self, **_: Any) -> Any:
        self.started += 1
        torch.manual_seed(tdcollect.policy_seed(0, self.started - 1))
        return super().reset(seed=tdcollect.env_seed(0, self.started - 1))


class Normalized:
    """A model behind the statistics of a VecNormalize."""

    def __init__(self, model: Any, venv: Any):
        self.model, self.venv = model, venv

    def predict(self, observation: Any, *options: Any) -> Any:
        return self.model.predict(self.venv.normalize_obs(observation), *options)


def test_observations_are_normalized_as_the_model_was_trained(tmp_path: Path) -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    venv = VecNormalize(DummyVecEnv([pendulum]), clip_obs=2.0)
    of = sb3.PPO("MlpPolicy", venv, n_steps=8, seed=0, device="cpu").learn(8)
    venv.save(tmp_path / "stats.pkl")
    expected = by_predict(Normalized(of, venv), pendulum, 2, True)
    for given in (venv, tmp_path / "stats.pkl", None):  # None: those that the model holds
        found, result = by_evaluate(
            of, pendulum, 2, True, inference_batch_size=1, normalization=given
        )
        np.testing.assert_array_equal(expected, found)
    made = load_policy(of, tdcollect.make_env(pendulum, num_envs=1), normalization=venv)
    travelled = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(made))))  # to a worker's worker
    data = TensorDict({"observation": torch.ones(2, 3)}, [2])
    assert (travelled(data.clone())["action"] == made(data)["action"]).all()
    _, without = by_evaluate(of, pendulum, 2, True, normalization=False)
    again = tdcollect.evaluate(pendulum, of, 2, progress=False, inference_batch_size=1)
    assert again.digest == result.digest
    assert without.manifest["policy"]["digest"] != result.manifest["policy"]["digest"]


def test_the_keys_of_a_dict_that_are_normalized_are_those_of_training() -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

    env = shown("a dict")
    venv = VecNormalize(DummyVecEnv([env]), norm_obs_keys=["a"])
    venv.obs_rms["a"].update(np.random.default_rng(0).normal(1, 3, (9, 3)))
    of = model("PPO", lambda: venv, "MultiInputPolicy")
    expected = by_predict(Normalized(of, venv), env, 2, True)
    found, _ = by_evaluate(of, env, 2, True, inference_batch_size=1, normalization=venv)
    np.testing.assert_array_equal(expected, found)
    # Statistics of one frame are not those of a stack.
    inside = VecNormalize(DummyVecEnv([pendulum]))
    of = model("PPO", lambda: VecFrameStack(inside, 2))
    stacked = tdcollect.make_env(
        lambda: gym.wrappers.FlattenObservation(gym.wrappers.FrameStackObservation(pendulum(), 2))
    )
    with pytest.raises(ValueError, match=r"VecNormalize of observations as the env gives them.*6"):
        load_policy(of, stacked)


@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_stacked_frames_are_those_of_vec_frame_stack(kind: str) -> None:
    """As docs/stable-baselines3.md says."""
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

    wrappers = gym.wrappers
    picture = spaces.Box(0, 255, (36, 40, 1), np.uint8)
    env, policy = (pendulum, "MlpPolicy")
    stacked: Any = lambda: wrappers.FlattenObservation(  # noqa: E731
        wrappers.FrameStackObservation(env(), 4, padding_type="zero")
    )
    if kind == "pictures":
        env, policy = (lambda: Shown(picture, spaces.Discrete(3)), "CnnPolicy")
        stacked = lambda: wrappers.ReshapeObservation(  # noqa: E731
            wrappers.FrameStackObservation(env(), 4, padding_type="zero"), (4, 36, 40)
        )
    venv = VecFrameStack(DummyVecEnv([env]), 4)
    of = model("PPO", lambda: venv, policy)
    found, _ = by_evaluate(of, stacked, 2, True, inference_batch_size=1)
    for i, actions in enumerate(found):
        venv.seed(tdcollect.env_seed(0, i))
        observation, expected, ended = venv.reset(), [], False
        while not ended:
            action, _ = of.predict(observation, deterministic=True)
            observation, _, (ended,), _ = venv.step(action)
            expected.append(action[0])
        np.testing.assert_array_equal(expected, actions)


@pytest.mark.parametrize(("algorithm", "epsilon"), [("DQN", 0.3), ("QRDQN", 1.0)])
def test_dqn_explores_with_its_epsilon(algorithm: str, epsilon: float) -> None:
    of = model(algorithm, shown("a discrete observation"))
    of.exploration_rate = epsilon
    env = shown("a discrete observation")
    greedy, found = (by_evaluate(of, env, 100, kind, slots=16)[0] for kind in (True, False))
    changed = np.mean(np.concatenate(greedy) != np.concatenate(found))
    assert changed == pytest.approx(epsilon * 2 / 3, abs=0.085)  # of three actions, two are others


def test_the_model_and_random_numbers_are_left_as_they_are(tmp_path: Path) -> None:
    of = model("PPO", cartpole)
    of.save(tmp_path / "model.zip")
    of.policy.train(True)
    before = torch.get_rng_state()
    for given in (of, tmp_path / "model.zip"):
        _, result = by_evaluate(given, cartpole, 2, True, eval_mode=False)
        assert result.manifest["policy"]["mode"] == "eval"  # as predict sets it
    assert of.policy.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_other_spaces_or_with_a_state_is_refused() -> None:
    of = model("PPO", pendulum)
    with pytest.raises(ValueError, match=r"the observation space that the model was trained on.*3"):
        load_policy(of, tdcollect.make_env(cartpole))
    of = model("PPO", shown("a discrete observation"))
    other = tdcollect.make_env(lambda: Shown(spaces.Discrete(4), spaces.Discrete(2)))
    with pytest.raises(ValueError, match=r"the action space that the model was trained on, Disc"):
        load_policy(of, other)
    of = model("PPO", pendulum, use_sde=True)  # of which no file holds the noise
    by_evaluate(of, pendulum, 1, True, max_episode_steps=5)
    with pytest.raises(ValueError, match="gSDE is drawn at each rollout"):
        by_evaluate(of, pendulum, 1, False)


def test_its_policy_or_method_in_place_of_a_model_is_told(tmp_path: Path) -> None:
    of = model("PPO", cartpole)
    for given in (of.policy, of.predict):
        with pytest.raises(TypeError, match=r"a model of .* itself, got its .*; pass the model"):
            tdcollect.evaluate(cartpole, given, 2, progress=False)
    line = from_function(lambda x: of.predict(x)[0])  # which the message names
    evaluate = partial(tdcollect.evaluate, cartpole, line, 2, output_dir=tmp_path, progress=False)
    assert evaluate().digest == evaluate().digest
    with torch.no_grad():
        of.policy.action_net.bias[1] += 50  # which no manifest has
    with pytest.raises(ValueError, match="holds an evaluation of another policy or env"):
        evaluate()
    with pytest.raises(FileNotFoundError, match="a model of Stable-Baselines3, got 3, which is no"):
        load_policy(3, tdcollect.make_env(cartpole))


RECURRENT = {
    "discrete": (cartpole, "MlpLstmPolicy"),
    "box": (pendulum, "MlpLstmPolicy"),
    "a dict": (shown("a dict"), "MultiInputLstmPolicy"),
}


@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        pytest.param(*case, marks=() if case == ("a dict", False) else pytest.mark.slow)
        for case in itertools.product(RECURRENT, (True, False))
    ],
)
def test_a_hidden_state_is_that_of_its_episode(
    name: str, deterministic: bool, tmp_path: Path
) -> None:
    env, policy = RECURRENT[name]
    of = model("RecurrentPPO", env, policy, n_steps=8)
    of.save(tmp_path / "model.zip")
    made, results = env(), []
    for slots, workers in ((1, None), (3, None), (2, 2)):
        load = load_policy(tmp_path / "model.zip", tdcollect.make_env(env))
        kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
        options = {"num_envs": slots, "workers": workers, "exploration_type": kind}
        results.append(tdcollect.evaluate(env, load, 4, progress=False, **options))
    assert len({result.digest for result in results}) == 1
    for record in results[0].episodes:
        stream, state, total, steps = GlobalStream(record.policy_seed), None, 0.0, 0
        observation, _ = made.reset(seed=record.env_seed)
        ended = False
        while not ended:
            with Outside(), stream:
                begins = np.array([steps == 0])
                action, state = of.predict(observation, state, begins, deterministic)
            observation, reward, terminated, truncated, _ = made.step(action)
            ended, total, steps = terminated or truncated, total + float(reward), steps + 1
        assert record.length == steps
        assert record.episode_return == pytest.approx(total, rel=1e-5)


def test_the_statistics_of_a_recurrent_model_are_in_the_manifest() -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    of = model("RecurrentPPO", cartpole, "MlpLstmPolicy", n_steps=8)
    digests = []
    for seed in (None, 0, 0, 1):
        normalization = None
        if seed is not None:
            normalization = VecNormalize(DummyVecEnv([cartpole]))
            normalization.obs_rms.update(np.random.default_rng(seed).normal(size=(9, 4)))
        policy = load_policy(of, tdcollect.make_env(cartpole), normalization=normalization)
        result = tdcollect.evaluate(cartpole, policy, 2, progress=False)
        digests.append(result.manifest["policy"]["digest"])
    assert digests[1] == digests[2]
    assert len({*digests}) == 3


class Doors(gym.Env[Any, Any]):
    """Some actions are valid, which the observation does not show; others cost a point."""

    def __init__(self, action: spaces.Space[Any] | None = None):
        self.observation_space = UNIT
        self.action_space = action or spaces.Discrete(4)

    def _observe(self) -> Any:
        space = self.action_space
        sizes = [space.n] if isinstance(space, spaces.Discrete) else getattr(space, "nvec", None)
        sizes = [2] * space.shape[0] if sizes is None else list(sizes)
        self.open = [np.arange(size) == self.np_random.integers(size) for size in sizes]
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def action_masks(self) -> Any:
        assert self.left > 0, "the episode has ended"
        return np.concatenate(self.open)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 9))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        chosen = np.atleast_1d(action)
        through = all(doors[i] for doors, i in zip(self.open, chosen, strict=True))
        self.left -= 1
        return self._observe(), 1.0 if through else -1.0, False, self.left == 0, {}


DOORS = {
    "discrete": Doors,
    "wrapped": lambda: gym.wrappers.TimeLimit(Doors(), 6),
    "choices": lambda: Doors(spaces.MultiDiscrete([2, 3])),
    "bits": lambda: Doors(spaces.MultiBinary(3)),
}


@pytest.mark.parametrize(("name", "deterministic"), [*zip(DOORS, (True, False) * 2, strict=True)])
def test_masks_are_passed_as_by_the_evaluation_of_sb3_contrib(
    name: str, deterministic: bool, tmp_path: Path
) -> None:
    maskable = pytest.importorskip("sb3_contrib.common.maskable.evaluation")
    of = model("MaskablePPO", DOORS[name])
    of.save(tmp_path / "model.zip")
    returns, lengths = maskable.evaluate_policy(
        of, Seeded(DOORS[name]()), 4, deterministic, return_episode_rewards=True, warn=False
    )
    for given, options in ((of, {"inference_batch_size": 1}), (tmp_path / "model.zip", {})):
        _, result = by_evaluate(given, DOORS[name], 4, deterministic, **options)
        assert result.returns.tolist() == returns == result.lengths.tolist() == lengths
    assert result.manifest["env"]["transforms"] == ["ActionMasks"]
    assert policy_name(result.manifest) == "MaskablePPO"


def test_masks_of_an_unbatched_env_and_of_a_replay() -> None:
    of = model("MaskablePPO", Doors)
    env = tdcollect.make_env(Doors)
    result = tdcollect.evaluate(env, load_policy(of, env), 3, progress=False)
    assert result.returns.tolist() == result.lengths.tolist()
    again = tdcollect.evaluate(Doors, load_policy(of, env), 3, progress=False)
    assert again.digest == result.digest
    again.replay(1)
    assert "action_masks" not in env.observation_spec


def test_masks_that_cannot_be_read_are_refused() -> None:
    of = model("MaskablePPO", Doors)
    mode = gym.vector.AutoresetMode.DISABLED
    env = tdcollect.make_env(gym.vector.SyncVectorEnv([Doors], autoreset_mode=mode))
    with pytest.raises(ValueError, match="expected backend='serial', got 'gymnasium': the policy"):
        load_policy(of, env)
    unmasked = model("MaskablePPO", shown("a discrete observation"))
    env = tdcollect.make_env(shown("a discrete observation"), 2)
    with pytest.raises(ValueError, match=r"expected an env with a method action_masks\(\), got"):
        load_policy(unmasked, env)

    class Odd(Doors):
        def action_masks(self) -> Any:
            return np.ones(3, bool)

    with pytest.raises(ValueError, match=r"slot 0 to give 4 values, one for each choice, got sh"):
        tdcollect.evaluate(Odd, load_policy(of, tdcollect.make_env(Doors)), 1, progress=False)


def test_files_that_are_no_models_and_a_missing_package_are_told(tmp_path, monkeypatch) -> None:
    env = tdcollect.make_env(cartpole)
    with pytest.raises(FileNotFoundError, match="expected a model of Stable-Baselines3"):
        load_policy(tmp_path / "none.zip", env)
    (tmp_path / "text.zip").write_text("text")
    with pytest.raises(ValueError, match=r"holds none|wasn't a zip-file"):
        load_policy(tmp_path / "text.zip", env)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ModuleNotFoundError, match="pip install stable-baselines3"):
        load_policy(tmp_path / "text.zip", env)
    with pytest.raises(ModuleNotFoundError, match="pip install stable-baselines3"):
        _ = tdcollect.evaluation.sb3.EvalCallback
