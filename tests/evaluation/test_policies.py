"""Functions and agents as policies: the oracle is a plain gymnasium loop over the same episodes."""

from __future__ import annotations

import functools
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

import tdcollect
from tdcollect.policies import from_agent, from_function
from tdcollect.randomness import GlobalStream, NotReproducibleError, Outside
from tdcollect.seeding import env_seed, policy_seed

from .envs import Walk, pictures
from .policies import net

pytestmark = pytest.mark.usefixtures("quick_children")

BOX = spaces.Box(-2.0, 2.0, (3,), np.float32)
SPACES: dict[str, Any] = {
    "discrete": (spaces.Discrete(3, start=1), lambda x: 1 + int(abs(x[0]) * 7) % 3),
    "an array of one number": (spaces.Discrete(3), lambda x: np.array([int(x[0] > 0)])),
    "box": (BOX, lambda x: np.tanh(x).astype(np.float64)),
    "a row of torch": (BOX, lambda x: torch.from_numpy(x)[None].tanh()),
    "choices": (spaces.MultiDiscrete([2, 3]), lambda x: [int(x[0] > 0), int(x[1] > 0)]),
    "bits": (spaces.MultiBinary(3), lambda x: x > 0),
    "a dict": (
        spaces.Dict(a=spaces.Discrete(2), b=BOX),
        lambda x: {"a": int(x[0] > 0), "b": np.tanh(x)},
    ),
}


def played(env: gym.Env[Any, Any], begin: Callable[[], Any], index: int) -> tuple[float, int]:
    """Return and length of an episode, in gymnasium's loop; the policy draws from its stream."""
    stream = GlobalStream(policy_seed(0, index))
    observation, _ = env.reset(seed=env_seed(0, index))
    with Outside(), stream:
        act = begin()
    rewards = []
    while True:
        with Outside(), stream:
            action = act(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            return sum(rewards), len(rewards)


def assert_as_played(result: Any, env: gym.Env[Any, Any], begin: Callable[[], Any]) -> None:
    for record in result.episodes:
        expected, length = played(env, begin, record.index)
        assert record.length == length
        assert record.episode_return == pytest.approx(expected, rel=1e-5, abs=1e-5)


def flat(action: Any) -> Any:
    """An action as the walk's env takes it, whatever form the function gives it."""
    if isinstance(action, dict):
        return {name: flat(part) for name, part in action.items()}
    value = np.asarray(action)
    return value[0] if value.shape in [(1,), (1, 3)] else value


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_a_function_acts_as_in_gymnasiums_loop(name: str, encoded: bool) -> None:
    space, act = SPACES[name]
    if isinstance(space, spaces.Dict):
        encoded = True  # of its parts
    env = tdcollect.make_env(partial(Walk, space), 3, categorical_action_encoding=encoded)
    result = tdcollect.evaluate(env, from_function(act), 7, progress=False)
    assert_as_played(result, Walk(space), lambda: lambda x: flat(act(x)))


def test_dicts_and_pictures_reach_a_function_as_the_env_gives_them() -> None:
    seen: deque[Any] = deque(maxlen=1)

    def act(observation: Any) -> int:
        seen.append(observation)
        return int(observation.sum()) % 3

    result = tdcollect.evaluate(pictures, from_function(act), 3, progress=False)
    assert seen[0].dtype == np.uint8
    assert seen[0].shape == (8, 8, 3)
    assert_as_played(result, pictures(), lambda: act)


def test_a_batched_function_gives_the_same_episodes() -> None:
    def best(observation: Any) -> Any:
        return (observation[..., 0] > 0).astype(np.int64)

    one, many = (
        tdcollect.evaluate(Walk, from_function(best, batched), 9, num_envs=4, progress=False)
        for batched in (False, True)
    )
    assert one.digest == many.digest


class Remembering:
    """An agent with a queue of actions, a history, and draws of its own."""

    def __init__(self, network: nn.Module, chance: float = 0.3):
        self.network, self.chance = network, chance

    def reset(self) -> None:
        self.queue: list[int] = []
        self.history: deque[Any] = deque(maxlen=3)
        self.offset = random.random()

    def select_action(self, observation: Any) -> int:
        self.history.append(observation)
        if not self.queue:
            mean = torch.from_numpy(np.mean(self.history, 0, dtype=np.float32))
            best = int(self.network(mean + self.offset).argmax())
            self.queue = [best, 1 - best, best]
        if np.random.rand() < self.chance or torch.rand(()) < 0.1:  # noqa: NPY002
            return 0
        return self.queue.pop()


def begun(make: Callable[[], Any]) -> Callable[[], Any]:
    def begin() -> Any:
        agent = make()
        agent.reset()
        return agent.select_action

    return begin


def test_agents_remember_their_own_episode_for_any_slots_and_workers() -> None:
    make = partial(Remembering, net(3, 2))
    agents = from_agent(make)
    results = [
        tdcollect.evaluate(Walk, agents, 11, num_envs=slots, workers=workers, progress=False)
        for slots, workers in ((1, None), (5, None), (16, None), (2, 2))
    ]
    assert len({result.digest for result in results}) == 1
    assert_as_played(results[0], Walk(), begun(make))


def test_an_evaluator_takes_agents_as_they_are_at_each_call() -> None:
    make = partial(Remembering, net(3, 2))
    agents, results = from_agent(make), []
    with tdcollect.Evaluator(Walk, agents, num_trajectories=4) as evaluator:
        for step in range(2):
            results.append(evaluator.submit(step=step).result())
            assert results[-1].digest == tdcollect.evaluate(Walk, agents, 4, progress=False).digest
            with torch.no_grad():
                make.args[0][-1].bias[0] += 9
    assert results[0].digest != results[1].digest


def test_an_agent_without_reset_and_with_other_names() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def act(self, observation: Any) -> int:
            self.calls += 1
            return self.calls % 2

    result = tdcollect.evaluate(
        Walk, from_agent(Counting, act="act", reset=None), 5, num_envs=2, progress=False
    )
    assert_as_played(result, Walk(), lambda: Counting().act)
    with pytest.raises(TypeError, match=r"a method select_action\(\), got .*act=\.\.\., reset="):
        tdcollect.evaluate(Walk, from_agent(Counting), 2, progress=False)


class Alternating:
    def reset(self) -> None:
        self.next = 0

    def select_action(self, observation: Any) -> int:
        self.next = 1 - self.next
        return self.next

    other = select_action


class Reversed(Alternating):
    def select_action(self, observation: Any) -> int:
        return 1 - super().select_action(observation)


def test_the_manifest_says_what_acts(tmp_path: Any) -> None:
    def evaluated(policy: Any) -> Any:
        return tdcollect.evaluate(Walk, policy, 2, progress=False).manifest["policy"]

    def never(observation: Any) -> int:
        return 0

    first = evaluated(from_function(never))
    assert first["kind"] == "function"
    assert first["class"].endswith("never")
    assert evaluated(from_function(partial(never)))["class"] == first["class"]
    assert first != evaluated(from_function(lambda observation: 0))
    agents = [from_agent(partial(Remembering, net(3, 2, seed))) for seed in (0, 0, 1)]
    one, same, other = map(evaluated, agents)
    assert one == same
    assert one["kind"] == "agent"
    assert one["digest"] not in (None, other["digest"])
    assert (one | {"digest": 0}) == (other | {"digest": 0})
    other = evaluated(from_agent(Alternating, act="other"))
    assert other == {**evaluated(from_agent(Alternating)), "method": "other"}
    codes = [evaluated(from_agent(kind))["code"] for kind in (Alternating, Reversed)]
    assert None not in codes
    assert codes[0] != codes[1]


class Above:
    """Acts by a number, or a network, that it is given."""

    def __init__(self, limit: float):
        self.limit = limit

    def __call__(self, observation: Any) -> int:
        return int(observation[0] > self.limit)


HELD: dict[str, Callable[[Any], Any]] = {  # of what may differ, the policy
    "an object's number": lambda x: from_agent(Above(x), act="__call__", reset=None),
    "of a function that is called": lambda x: from_function(
        (lambda inner: lambda observation: inner())(lambda: int(x))
    ),
    "a default": lambda x: from_function(lambda observation, network=net(3, 2, int(x)): 0),
}


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_policies_that_hold_something_else_are_not_resumed(make: Any, tmp_path: Path) -> None:
    how = {"seed": 5, "output_dir": tmp_path, "progress": False}  # it begins between 0 and 1
    run = partial(tdcollect.evaluate, Walk, episodes=6, **how)
    assert run(make(0.0)).digest == run(make(0.0)).digest
    with pytest.raises(ValueError, match=r"holds an(other)? evaluation"):
        run(make(1.0))


def remembers() -> Any:
    calls: list[int] = []

    def act(observation: Any) -> int:
        calls.append(0)
        return len(calls) % 2

    return act


def draws_its_own() -> Any:
    generator = np.random.default_rng()
    return lambda observation: generator.random(3)


def draws_unseen() -> Any:
    generator = random.Random()
    return lambda observation: int(generator.random() < 1e-9)


@pytest.mark.parametrize(
    ("make", "space", "said"),
    [
        (remembers, None, "from_agent"),
        (draws_its_own, BOX, "default_rng"),
        (draws_unseen, None, r"def reset\(self, seed\)"),
    ],
)
def test_a_function_that_keeps_something_is_refused(make: Any, space: Any, said: str) -> None:
    with pytest.raises(NotReproducibleError, match=said):
        tdcollect.evaluate(partial(Walk, space), from_function(make()), 4, progress=False)


def test_agents_that_share_something_are_refused() -> None:
    shared = [0]

    class Sharing:
        def select_action(self, observation: Any) -> int:
            shared[0] += 1
            return shared[0] % 2

    with pytest.raises(NotReproducibleError, match="keeps something from one episode to the next"):
        tdcollect.evaluate(Walk, from_agent(Sharing, reset=None), 4, progress=False)


class Drawing:
    """Draws from a generator of its own, whose copies would draw the same in all episodes."""

    def __init__(self, generator: Any):
        self.generator = generator

    def select_action(self, observation: Any) -> int:
        return int(self.draw() > 0.5)

    def draw(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        return float(self.generator.random())


class Reseeded(Drawing):
    def reset(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)


def test_agents_whose_copies_draw_the_same_are_refused() -> None:
    own = (np.random.default_rng, np.random.RandomState, random.Random, torch.Generator)
    for generator in own:
        with pytest.raises(
            NotReproducibleError, match=r"that no seed reaches.*reset\(self, seed\)"
        ):
            tdcollect.evaluate(Walk, Drawing(generator()), 2, progress=False)
    lengths = tdcollect.evaluate(Walk, Reseeded(np.random.default_rng()), 8, progress=False).lengths
    assert len({*lengths}) > 1


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (spaces.Discrete(2), 2, r"Discrete\(2\), got 2 \(int\)"),
        (spaces.Discrete(2), 0.5, r"got 0.5 \(float\)"),
        (spaces.Discrete(2), None, r"got None \(NoneType\)"),
        (BOX, np.zeros(2), r"got array\(\[0., 0.\]\) \(ndarray of shape \(2,\)\)"),
        (spaces.Dict(a=BOX), {"b": 0}, r"got \{'b': 0\} \(dict\)"),
    ],
)
def test_an_action_that_the_env_does_not_take_is_told(space: Any, action: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"expected an action of the env's space, .*{said}"):
        tdcollect.evaluate(partial(Walk, space), from_function(lambda x: action), 2, progress=False)


def test_other_envs_and_numbers_of_actions_are_refused() -> None:
    from torchrl.envs import GymEnv

    with pytest.raises(TypeError, match=r"expected an env of tdcollect.make_env"):
        tdcollect.evaluate(GymEnv("CartPole-v1"), from_function(lambda x: 0), 2, progress=False)
    with pytest.raises(ValueError, match=r"expected 16 actions, .* got 1; a function of one obs"):
        tdcollect.evaluate(Walk, from_function(lambda x: [0], batched=True), 2, progress=False)
    with pytest.raises(ValueError, match=r"which it has none, got none of them; .* one policy"):
        tdcollect.evaluate(Walk, {}, 2, progress=False)


def never() -> Any:
    raise AssertionError("an env was made")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: from_function(7), "expected a function of an observation, .* got 7; functools"),
        (
            lambda: from_function(lambda: 0),
            r"got <function .*, which takes \(\); functools.partial",
        ),
        (lambda: from_function(lambda x, key: 0), r"with key=True .*, which takes \(x, key\);"),
        (lambda: from_function(lambda x: 0, key=True), r"key=True of one and a .* takes \(x\);"),
        (
            lambda: from_agent("agents.py:Agent"),
            r"expected an agent with a method select_action\(\), or",
        ),
        (
            lambda: from_agent(Alternating(), act="step"),
            r"an agent with a method step\(\), or a func",
        ),
        (
            lambda: from_agent(Remembering),
            r"or a function \(\) that makes .* takes \(network[^)]*\);",
        ),
    ],
)
def test_what_cannot_act_is_told_before_an_env_is_made(make: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        tdcollect.evaluate(never, make(), 2, progress=False)


def test_a_function_takes_what_it_takes_and_not_what_the_one_within_does() -> None:
    def at(observation: Any, gain: float) -> Any:
        return int(observation.sum() > gain)

    @wraps(at)
    def act(observation: Any) -> Any:
        return at(observation, 0.1)

    how: dict[str, Any] = {"episodes": 2, "progress": False}
    found = tdcollect.evaluate("CartPole-v1", from_function(act), **how)
    plain = from_function(lambda x: int(x.sum() > 0.1))
    assert found.digest == tdcollect.evaluate("CartPole-v1", plain, **how).digest


@pytest.mark.skipif(find_spec("jax") is not None, reason="jax is installed")
def test_without_jax_a_key_is_told_before_an_env_is_made() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"key=True\) needs the jax package: pip install"):
        tdcollect.evaluate(never, from_function(lambda x, key: 0, key=True), 2, progress=False)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (from_function(lambda x: x[9]), "one observation; one of a batch goes with batched"),
        (from_function(lambda x: x[99], batched=True), r"\[N, ...\]; a function of one goes"),
        (from_agent(lambda: SimpleNamespace(reset=lambda x: 0, select_action=len)), "no argument"),
        (from_agent(lambda: SimpleNamespace(select_action=lambda x, y: 0), reset=None), "one obs"),
    ],
)
def test_errors_of_a_policy_say_how_it_was_called(policy: Any, said: str) -> None:
    with pytest.raises((IndexError, TypeError)) as caught:
        tdcollect.evaluate(Walk, policy, 2, progress=False)
    assert re.search(f"it was called with .*{said}", caught.value.__notes__[0])


# ------------------------------------------------------------------- what a policy is, found out


def lines_of(policy: Any, env: Any = Walk) -> list[str]:
    """The lines of code that the refusal of a policy names."""
    with pytest.raises((TypeError, ValueError)) as refused:
        tdcollect.evaluate(env, policy, 3, progress=False)
    text = " ".join([str(refused.value), *getattr(refused.value, "__notes__", [])])
    return re.findall(r"(?:tdcollect\.policies\.\w+|TensorDictModule)\(.*?\)(?=$| or |; )", text)


def evaluated_as(
    line: str, policy: Any, env: Any = Walk, num_envs: int | None = None, **names: Any
) -> Any:
    known = {"tdcollect": tdcollect, "functools": functools, "torch": torch}
    made = eval(line, {**known, "TensorDictModule": TensorDictModule, "policy": policy, **names})
    return tdcollect.evaluate(env, made, 3, num_envs=num_envs, progress=False)


def named_like_an_entry(observation: Any) -> int:
    return int(observation[2] > 0)


class Actor(nn.Module):
    """An agent as CleanRL's scripts have it."""

    def __init__(self, continuous: bool = False):
        super().__init__()
        self.mean, self.continuous = net(3, 3 if continuous else 2), continuous

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    def get_action_and_value(self, x: torch.Tensor) -> Any:
        mean = self.mean(x)
        return mean if self.continuous else mean.argmax(-1), None, None, self.get_value(x)


class Predicting(Alternating):
    def predict(self, observation: Any) -> Any:
        return self.select_action(observation), None

    def act(self, observation: Any) -> int:
        return self.select_action(observation)


def test_the_line_for_a_function_works() -> None:
    for act in (named_like_an_entry, lambda x: int(x[2] > 0)):
        line = lines_of(act)[-1]
        assert "from_function" in line
        assert_as_played(evaluated_as(line, act), Walk(), lambda: named_like_an_entry)

    def of_tensors(x: Any) -> Any:
        return nn.functional.one_hot((x[:, 2] > 0).long(), 2)

    wrapped, _ = lines_of(of_tensors)
    assert_as_played(evaluated_as(wrapped, of_tensors), Walk(), lambda: named_like_an_entry)


@pytest.mark.parametrize("continuous", [False, True])
def test_the_line_for_a_cleanrl_agent_works(continuous: bool) -> None:
    env, policy = partial(Walk, BOX if continuous else None), Actor(continuous)
    (line,) = lines_of(policy, env)

    def act(observation: Any) -> Any:
        return flat(policy.get_action_and_value(torch.from_numpy(observation)[None])[0].numpy())

    with torch.no_grad():
        assert_as_played(evaluated_as(line, policy, env), env(), lambda: act)


def test_agents_and_classes_of_agents_are_found_out() -> None:
    oracle = begun(Alternating)
    used = Alternating()
    used.reset()
    used.select_action(None)
    for policy in (Alternating, Alternating(), used):
        result = tdcollect.evaluate(Walk, policy, 6, num_envs=3, progress=False)
        assert_as_played(result, Walk(), oracle)
        assert result.manifest["policy"]["kind"] == "agent"
        assert result.manifest["policy"]["class"].endswith("Alternating")
    networks = [Remembering(net(3, 2, seed)) for seed in (0, 1)]
    one, other = (tdcollect.evaluate(Walk, n, 2, progress=False).manifest for n in networks)
    assert one["policy"]["digest"] != other["policy"]["digest"]


def test_the_lines_for_agents_that_can_be_read_in_several_ways_work() -> None:
    (line,) = lines_of(Remembering)
    result = evaluated_as(line, None, Remembering=Remembering, network=net(3, 2))
    assert_as_played(result, Walk(), begun(lambda: Remembering(net(3, 2))))
    lines = lines_of(Predicting())
    assert len(lines) == 4
    for line in lines[:2]:
        assert_as_played(evaluated_as(line, Predicting()), Walk(), begun(Alternating))
    stateless = SimpleNamespace(predict=lambda x: (int(x[2] > 0), None))
    first = lines_of(stateless)[-1]
    assert_as_played(evaluated_as(first, stateless), Walk(), lambda: named_like_an_entry)


# ------------------------------------------------------------------------------ random numbers


class Seeded:
    """Draws from a generator of its own."""

    def reset(self, seed: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)

    def select_action(self, observation: Any) -> int:
        return int(self.generator.integers(2))


def test_an_agent_whose_reset_takes_a_seed_gets_the_episodes() -> None:
    results = [
        tdcollect.evaluate(Walk, from_agent(Seeded), 6, seed, num_envs=slots, progress=False)
        for seed, slots in ((0, 1), (0, 4), (1, 4))
    ]
    assert len({result.digest for result in results}) == 2
    for record in results[0].episodes:
        agent = Seeded()
        agent.reset(record.policy_seed >> 33)
        assert record.episode_return == pytest.approx(played_by(agent, record), rel=1e-5)


def played_by(agent: Any, record: Any) -> float:
    env, total = Walk(), 0.0
    observation, _ = env.reset(seed=record.env_seed)
    for _ in range(record.length):
        observation, reward, *_ = env.step(agent.select_action(observation))
        total += reward
    return total


def test_keys_of_jax_are_those_of_the_episode() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")

    @jax.jit
    def draws(observation: Any, key: Any) -> Any:
        return jax.random.bernoulli(key).astype(int) + (observation[0] > 9)

    line = lines_of(draws)[-1]
    assert line == "tdcollect.policies.from_function(policy, key=True)"
    one = evaluated_as(line, draws)
    assert one.digest == evaluated_as(line, draws, num_envs=2).digest
    record = one.episodes[0]
    key, chosen = jax.random.PRNGKey(record.policy_seed >> 33), []
    for _ in range(record.length):
        key, now = jax.random.split(key)
        chosen.append(int(jax.random.bernoulli(now)))
    agent = SimpleNamespace(select_action=lambda observation: chosen.pop(0))
    assert record.episode_return == pytest.approx(played_by(agent, record), rel=1e-5)
    with pytest.raises(ValueError, match="expected batched=True or key=True, got both"):
        from_function(draws, batched=True, key=True)


def test_the_code_of_a_function_that_jax_compiled_is_in_the_manifest() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")

    def described(scale: float, sign: int = 1) -> Any:
        params = {"layer": [scale * jax.numpy.ones(3)]}
        best = jax.jit((lambda x: x @ params["layer"][0] > 0) if sign > 0 else (lambda x: x[0] < 0))
        result = tdcollect.evaluate(Walk, from_function(best), 2, progress=False)
        return result.manifest["policy"]["code"]

    assert None is not described(1.0) == described(2.0) != described(1.0, -1)


class Batched(Remembering):
    """The agent that remembers, with one network for several of them."""

    def __init__(self, network: nn.Module, sizes: set[int]):
        super().__init__(network)
        self.sizes = sizes

    @staticmethod
    def select_actions(agents: list[Any], observations: list[Any]) -> list[Any]:
        for agent, observation in zip(agents, observations, strict=True):
            agent.history.append(observation)
        means = np.stack([np.mean(agent.history, 0, dtype=np.float32) for agent in agents])
        agents[0].sizes.add(len(agents))
        noise = torch.randn(len(agents), 1)
        return [*(agents[0].network(torch.from_numpy(means)) + 0.1 * noise).clamp(-1, 1)]


class Exact(nn.Module):
    """A layer whose sums are exact, so that they do not round by the place of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((net(3, 3)[0].weight[:3].detach() * 64).round() / 64)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return (seen * 64).round() / 64 @ self.weight.T


def test_agents_that_act_together_do_so_for_a_fixed_number_whatever_runs() -> None:
    sizes: set[int] = set()
    agents = from_agent(partial(Batched, Exact(), sizes), together="select_actions")
    run = partial(tdcollect.evaluate, partial(Walk, BOX), agents, 6, progress=False)
    assert len({run(num_envs=slots).digest for slots in (1, 4, 6)}) == 1
    assert sizes == {16}
    assert run(inference_batch_size=4).digest == run(inference_batch_size=4, num_envs=1).digest
    # Alone, and in gymnasium's loop, an agent has the same memory and the same draws.
    for record in run().episodes:
        agent = Batched(Exact(), set())
        agent.reset()
        stream = torch.Generator().manual_seed(policy_seed(0, record.index))

        def act(observation: Any, agent: Any = agent, stream: Any = stream) -> Any:
            agent.history.append(observation)
            mean = torch.from_numpy(np.mean(agent.history, 0, dtype=np.float32))
            noise = torch.randn(1, generator=stream)
            return (agent.network(mean) + 0.1 * noise).clamp(-1, 1).detach()

        expected, length = played(Walk(BOX), lambda act=act: act, record.index)
        assert record.length == length
        assert record.episode_return == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("acts", "said"),
    [
        (lambda agents, seen: [sum(x[0] for x in seen) * np.ones(3)] * len(seen), "beside other"),
        (lambda agents, seen: [np.zeros(3)], r"of each of 16 agents from acts\(agents, .*got 1"),
        (lambda agents, seen: [np.random.rand(3) for _ in seen], "another generator|drew from"),  # noqa: NPY002
    ],
)
def test_agents_that_are_not_each_their_own_together_are_refused(acts: Any, said: str) -> None:
    kind = type("Together", (), {"acts": staticmethod(acts)})
    with pytest.raises((NotReproducibleError, ValueError), match=said):
        tdcollect.evaluate(
            partial(Walk, BOX), from_agent(kind, reset=None, together="acts"), 3, progress=False
        )


@dataclass(slots=True)
class Slotted:
    level: float = 0.5

    def act(self, seen: Any) -> Any:
        return np.full(3, self.level)


class SlottedFunction(Slotted):
    __slots__ = ()

    __call__ = Slotted.act


def test_policies_with_slots_are_run() -> None:
    run = partial(tdcollect.evaluate, partial(Walk, BOX), episodes=3, progress=False)
    assert run(Slotted()).digest == run(from_function(SlottedFunction())).digest
