"""gymnasium envs with text: numbers on arrays, TorchRL's strings in batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import (
    Compose,
    EnvBase,
    GymWrapper,
    ObservationNorm,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)

from tdcollect import Collector, Hooks, make_env, split_trajectories
from tdcollect.envs import spaces as codecs
from tdcollect.testing import check_env

TEXT = spaces.Text(20)
BOX = spaces.Box(-1, 9, (2,), np.float32)
SPACES = {
    "alone": TEXT,
    "dict": spaces.Dict(at=BOX, task=TEXT),
    "nested": spaces.Dict(at=BOX, told=spaces.Dict(task=TEXT, hint=TEXT)),
    "tuple": spaces.Tuple([TEXT, TEXT]),
}


class Told(gym.Env[Any, Any]):
    """Says how far it is; an episode's length depends on its seed, and texts on both."""

    def __init__(self, kind: str = "dict", talks: bool = False, long: int = 1, fails: int = 0):
        self.observation_space = SPACES[kind]
        self.action_space: Any = TEXT if talks else spaces.Discrete(3)
        self._kind, self._long, self._fails = kind, long, fails

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at, self._end = 0, int(self.np_random.integers(2, 6))
        self._heard: Any = ""
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._at += 1
        self._heard = action if isinstance(action, str) else int(action)
        if self._fails and self._at == self._fails:
            raise OSError("the env fails")
        return self._seen(), 1.0, self._at >= self._end, False, {}

    def _seen(self) -> Any:
        text = f"{self._at} of {self._end}: {self._heard}" * self._long
        at = np.array([self._at, self._end], np.float32)
        return {
            "alone": text,
            "dict": {"at": at, "task": text},
            "nested": {"at": at, "told": {"task": text, "hint": "é" if self._at else ""}},
            "tuple": (text, "x" * self._at),
        }[self._kind]


def listed(batch: TensorDictBase) -> dict[str, Any]:
    """The entries of a batch as lists, by path."""
    entries: dict[str, Any] = {}
    for key in batch.keys(True):
        name = "/".join([key] if isinstance(key, str) else key)
        value = batch.get(key)
        if type(value) is not TensorDict and "traj_ids" not in name:
            entries[name] = value.tolist()
    return entries


def wordy(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy of words: it counts the letters of its task."""
    texts = tensordict["task"]
    texts = [texts] if isinstance(texts, str) else texts
    letters = torch.tensor([len(text) % 3 for text in texts])
    action = nn.functional.one_hot(letters, 3)
    return tensordict.set("action", action if tensordict.batch_size else action[0])


def both(
    make: Callable[[], EnvBase], policy: Any = None, batches: int = 3, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Batches of the array lane, and of TorchRL's loop."""
    results = []
    for arrays in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", arrays)
            torch.manual_seed(0)
            env = make()
            env.set_seed(3)
            settings = {"frames_per_batch": 24, "total_frames": 24 * batches, **options}
            collector = Collector(env, policy, **settings)
            how = str(collector.explain())
            assert ("steps on arrays" in how) is arrays, how
            results.append([listed(batch) for batch in collector])
    return results[0], results[1]


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_batches_are_torchrls(kind: str, slots: int | None, backend: str) -> None:
    make = partial(make_env, partial(Told, kind), slots, backend=backend)
    own, theirs = both(make, return_same_td=kind in ("dict", "nested"))
    assert own == theirs
    assert own[0]["next/done"] != own[1]["next/done"]


def test_the_form_is_that_of_torchrls_own_wrapper() -> None:
    ours = make_env(Told)
    theirs = GymWrapper(Told())
    assert ours.observation_spec == theirs.observation_spec
    first = [Collector(env, _zero, frames_per_batch=8) for env in (ours, theirs)]
    for env in (ours, theirs):
        env.set_seed(0)
    batches = [next(iter(collector)) for collector in first]
    for batch in batches:
        assert type(batch.get("task")) is NonTensorStack
        assert isinstance(batch[0]["task"], str)
        assert batch["next", "task"][0].startswith("1 of")
    assert type(batches[0]["task"]) is type(batches[1]["task"])


def _zero(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", torch.tensor([1, 0, 0]))


def test_one_text_in_a_batch_can_be_written_alone() -> None:
    collector = Collector(make_env(partial(Told, "nested"), 2), None, frames_per_batch=16)
    batch = next(iter(collector))
    before = batch["told", "hint"]
    batch[0, 0] = batch[1, 1].clone()
    after = batch["told", "hint"]
    assert after[0][0] == before[1][1]
    assert after[0][1:] == before[0][1:]
    assert batch["next", "told", "hint"][1] == ["é"] * 8


@pytest.mark.parametrize("slots", [None, 3])
def test_policies_read_text(slots: int | None) -> None:
    make = lambda: make_env(Told, slots)  # noqa: E731
    own, theirs = both(make, wordy)
    assert own == theirs
    scores = nn.Linear(2, 3)
    module = TensorDictSequential(
        TensorDictModule(scores, ["at"], ["logits"]),
        TensorDictModule(
            lambda task, logits: logits + len(str(task)) % 3, ["task", "logits"], ["logits"]
        ),
        TensorDictModule(
            lambda logits: (logits == logits.max(-1, True)[0]).long(), ["logits"], ["action"]
        ),
    )
    own, theirs = both(make, module)
    assert own == theirs
    how = {part.what: part.how for part in Collector(make(), module, frames_per_batch=6).explain()}
    assert how["TensorDictModule(at -> logits)"] == "called straight"
    assert "no tensor" in how["TensorDictModule(task, logits -> logits)"]


def test_known_transforms_of_numbers_stay_on_arrays() -> None:
    def make() -> EnvBase:
        norm = ObservationNorm(0.5, 2.0, ["at"])
        env = make_env(Told, 2, step_count=True)
        return TransformedEnv(env, Compose(norm, RewardSum(), StepCounter(3, step_count_key="n")))

    own, theirs = both(make)
    assert own == theirs


class Shouts(Transform):
    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        texts = next_tensordict.get("task").tolist()
        return next_tensordict.set("task", NonTensorStack(*[text.upper() for text in texts]))

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._call(reset)


def test_a_transform_that_may_read_text_has_torchrls_loop() -> None:
    collector = Collector(TransformedEnv(make_env(Told, 2), Shouts()), None, frames_per_batch=8)
    assert "the transform Shouts may read text" in str(collector.explain())
    assert "OF" in next(iter(collector))["next", "task"][0][0]


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_actions_of_text(backend: str) -> None:
    def speak(tensordict: TensorDictBase) -> TensorDictBase:
        said = [f"é{text[:1]}" for text in tensordict["observation"]]
        return tensordict.set("action", NonTensorStack(*said))

    env = make_env(partial(Told, "alone", talks=True), 2, backend=backend)
    collector = Collector(env, speak, frames_per_batch=12, total_frames=24)
    assert "no tensors" in str(collector.explain())
    for batch in collector:
        for said, heard in zip(batch["action"], batch["next", "observation"], strict=True):
            assert [text.split(": ")[1] for text in heard] == said
    env = make_env(partial(Told, "alone", talks=True), 2)
    env.reset()
    with pytest.raises(ValueError, match="expected text, as the space says, got 0"):
        env.step(TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2]))


def test_random_actions_of_text_are_those_of_the_space() -> None:
    spoken = spaces.Text(4, min_length=3, charset="äb")
    for space in (spoken, spaces.Dict(say=spoken, move=spaces.Discrete(3))):

        class Hears(Told):
            def __init__(self) -> None:
                super().__init__("dict")
                self.action_space = space  # noqa: B023

            def step(self, action: Any) -> Any:
                assert self.action_space.contains(action)
                return super().step(1)

        env = make_env(Hears, 2, seed=0)
        collector = Collector(env, None, frames_per_batch=24)
        key = "say" if isinstance(space, spaces.Dict) else "action"
        assert len({text for row in next(iter(collector))[key] for text in row}) > 6
        assert len(collector.collect(frames=6, random=True)[key]) == 2
        with pytest.raises(ValueError, match="tensors of fixed shapes, got other ones in"):
            collector.collect(episodes=2, random=True)
        assert env.rollout(3).shape == (2, 3)
        assert env.full_action_spec.zero().batch_size == (2,)
        report = check_env(make_env(Hears, 2))
        assert report.passed, report


class Reads(Hooks):
    def __init__(self) -> None:
        self.started: list[Any] = []
        self.read: list[Any] = []

    def episodes_started(self, slots: Any, step: TensorDictBase) -> None:
        self.started += [step["task"][slot] for slot in slots]

    def stepped(self, slots: Any, step: TensorDictBase) -> None:
        self.read.append(step["next", "task"])


def test_hooks_read_text() -> None:
    hook = Reads()
    batch = next(iter(Collector(make_env(Told, 2), None, frames_per_batch=16, hooks=hook)))
    assert [list(texts) for texts in zip(*hook.read, strict=True)] == batch["next", "task"]
    assert len(hook.started) > 2
    assert all(text.startswith("0 of") for text in hook.started)


def test_episodes_and_trajectories() -> None:
    collector = Collector(make_env(Told, 2, seed=0), None, frames_per_batch=32)
    batch = collector.collect(episodes=5)
    ends = [i for i, done in enumerate(batch["next", "done"].flatten().tolist()) if done]
    assert len(ends) == 5
    for row, (text, after) in enumerate(zip(batch["task"], batch["next", "task"], strict=True)):
        at, end = batch["at"][row].int().tolist()
        assert text.startswith(f"{at} of {end}")
        assert after.startswith(f"{at + 1} of {end}")
    batch = next(iter(collector))
    texts = sorted(text for row in batch["task"] for text in row)
    parts = split_trajectories(batch, layout="list")
    assert sorted(text for part in parts for text in part["task"]) == texts
    assert sorted(split_trajectories(batch, layout="flat")["task"]) == texts


@pytest.mark.parametrize("by_arrival", [False, True])
def test_slots_that_are_ready_go_on(by_arrival: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_FEW_TEXTS", 5)
    env = make_env(Told, 4, backend="process", num_workers=2, wait_num=1, seed=0)
    collector = Collector(
        env, wordy, frames_per_batch=24, total_frames=24 * 8, by_arrival=by_arrival
    )
    for batch in collector:
        rows = batch.reshape(-1)
        for at, text, after in zip(rows["at"], rows["task"], rows["next", "task"], strict=True):
            first, end = at.int().tolist()
            assert text.startswith(f"{first} of {end}")
            assert after.startswith(f"{first + 1} of {end}")


@pytest.mark.parametrize("arrays", [True, False])
def test_texts_are_forgotten(arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_FEW_TEXTS", 5)
    monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", arrays)
    env = make_env(Told, 2, seed=0)
    for _ in Collector(env, None, frames_per_batch=40, total_frames=400):
        leaf = env.texts["task"]
        assert len(leaf._texts) == len(leaf._numbers) <= 9


def test_long_texts_and_failures_in_processes() -> None:
    own, theirs = (
        both(lambda b=b: make_env(partial(Told, "dict", False, 90), 2, backend=b))[0]
        for b in ("serial", "process")
    )
    assert own == theirs
    assert max(len(text) for row in own[0]["task"] for text in row) > 256
    env = make_env(partial(Told, fails=2), 2, on_env_error="restart", seed=0)
    batch = next(iter(Collector(env, None, frames_per_batch=16)))
    for text, after, error in zip(
        batch["task"][0], batch["next", "task"][0], batch["next", "env_error"][0], strict=True
    ):
        assert (text == after) is bool(error)


def test_new_env_kwargs_and_a_state_dict() -> None:
    collector = Collector(make_env(Told, 2, env_kwargs={"long": 1}), None, frames_per_batch=8)
    batches = iter(collector)
    next(batches)
    collector.rebuild_env(long=2)
    assert next(batches)["task"][0][0].count("of") == 2
    state = collector.state_dict()
    other = Collector(make_env(Told, 2), None, frames_per_batch=8)
    with pytest.warns(UserWarning, match=r"entries \['task'\] are no tensors"):
        other.load_state_dict(state)


def test_envs_of_torchrls_own_around_ours() -> None:
    collector = Collector(SerialEnv(2, lambda: make_env(Told)), None, frames_per_batch=8)
    batch = next(iter(collector))
    assert batch["task"][1][0].startswith("0 of")


def test_what_is_no_text_is_refused() -> None:
    class Wrong(Told):
        def _seen(self) -> Any:
            return {**super()._seen(), "task": 3}

    for backend in ("serial", "process"):
        env = make_env(Wrong, 2, backend=backend)
        with pytest.raises(RuntimeError, match="expected text, as the space says, got 3"):
            env.reset()
        env.close()
