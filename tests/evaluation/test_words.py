"""Test episodes in words: observations and actions that are texts, and TorchRL's chat envs."""

from __future__ import annotations

import math
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Compose, GymWrapper, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

import tdcollect
from tdcollect.evaluation.directory import read_trajectory, write_trajectory
from tdcollect.policies import from_agent, from_function
from tdcollect.randomness import NotReproducibleError

from .envs import Guess, Says

EXAMPLE = Path(__file__).parents[2] / "examples" / "other_producer.py"
TEXTS = ["", "7", "größer\n🙂", "\0", "a\xff\0", "\ud800"]


def said(seen: Any) -> str:
    text = seen if isinstance(seen, str) else seen["said"]
    assert isinstance(text, str)
    return text


def nearest(seen: Any) -> str:
    """The first digit that was not said."""
    return next(digit for digit in "0123456789" if f"\n{digit}" not in said(seen))


class Draws:
    """Draws digits from the three global generators, none of them twice."""

    def reset(self) -> None:
        self.left = [*"0123456789"]

    def act(self, seen: Any) -> str:
        said(seen)
        drawn = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return self.left.pop(int(drawn * len(self.left) / 3))

    @staticmethod
    def together(agents: Any, seen: Any) -> list[str]:
        drawn = torch.rand(len(agents)).tolist()
        return [agent.left[int(10 * n)] for agent, n in zip(agents, drawn, strict=True)]


def chooses(texts: Any, *more: Any) -> list[str]:
    """A module's function: it gets the texts of a batch, of one."""
    assert len(texts) == 1
    return [random.choice("0123456789") for _ in texts]


def module(env: Any) -> TensorDictModule:
    key = "observation" if env is Says else "said"
    return TensorDictModule(chooses, in_keys=[key], out_keys=["action"])


POLICIES = {
    "function": lambda env: from_function(nearest),
    "agent": lambda env: Draws,
    "together": lambda env: from_agent(Draws, together="together"),
    "module": module,
    "random": lambda env: None,
}


@pytest.mark.parametrize("env", [Guess, Says])
@pytest.mark.parametrize("kind", POLICIES)
def test_any_number_of_slots_gives_one_ledger(kind: str, env: Any) -> None:
    policy = POLICIES[kind](env)
    found = {
        tdcollect.evaluate(env, policy, 10, num_envs=slots, progress=False).digest
        for slots in (1, 8, 64)
    }
    assert len(found) == 1


def test_workers_and_env_processes_give_the_same_ledger() -> None:
    run = {"episodes": 8, "num_envs": 4, "progress": False}
    here = tdcollect.evaluate(Guess, Draws, **run)
    assert tdcollect.evaluate(Guess, Draws, workers=2, **run).digest == here.digest
    assert tdcollect.evaluate(Guess, Draws, backend="process", **run).digest == here.digest


@pytest.mark.parametrize("env", [Guess, Says])
def test_records_are_those_of_a_plain_loop(env: Any) -> None:
    """Digests by the example of the protocol, returns by gymnasium's own rewards."""
    result = tdcollect.evaluate(env, from_function(nearest), 5, progress=False)
    digest, plain = runpy.run_path(str(EXAMPLE))["digest"], env()
    for index in range(5):
        seen, _ = plain.reset(seed=tdcollect.env_seed(0, index))
        rows: list[Any] = [seen]
        acts, rewards, flags = list[str](), list[float](), list[Any]()
        while not (flags and any(flags[-1])):
            acts.append(nearest(rows[-1]))
            seen, reward, *ends, _ = plain.step(acts[-1])
            rows.append(seen)
            rewards.append(reward)
            flags.append(ends)
        texts = [said(row) for row in rows]
        name = "said" if env is Guess else "observation"
        entries: list[Any] = [(name, texts[:-1], texts[-1])]
        if env is Guess:
            sizes = np.stack([row["size"] for row in rows])
            entries.append(("size", sizes[:-1], sizes[-1]))
        entries += [
            ("action", acts, None),
            ("next/reward", np.float32(rewards)[:, None], None),
            ("next/terminated", np.array(flags)[:, :1], None),
            ("next/truncated", np.array(flags)[:, 1:], None),
        ]
        assert result.record(index).digest == digest(entries)
        assert result.returns[index] == math.fsum(rewards)


def test_torchrls_own_env_gives_the_same_rows() -> None:
    def policy(td: Any) -> Any:
        td["action"] = nearest({"said": td["said"]})
        return td

    data = tdcollect.EvaluationCollector(lambda: GymWrapper(Guess()), policy, 3)
    ours = tdcollect.EvaluationCollector(Guess, from_function(nearest), 3)
    for one, other in zip(data, ours, strict=True):
        for key in ("said", "action", ("next", "said")):
            assert one.get(key).tolist() == other.get(key).tolist()
        assert torch.equal(one["next", "size"], other["next", "size"])


def test_what_is_kept_is_read_replayed_and_checked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kept = tdcollect.evaluate(
        Guess, Draws, 4, output_dir=out, keep_trajectories=True, keep_steps=True, progress=False
    )
    loaded = tdcollect.EvaluationResult.load(out, Guess, Draws)
    data = loaded.trajectory(2)
    assert data["said"][0] == "guess!"
    assert data["next", "said"][:-1] == data["said"][1:]
    assert loaded.replay(2)["next", "said"] == data["next", "said"]
    assert tdcollect.verify(out).passed
    assert tdcollect.merge([out], tmp_path / "merged").digest == kept.digest
    data["said"] = NonTensorStack(*["guess?", *data["said"][1:]])
    write_trajectory(out / "trajectories" / "000002.npz", data)
    assert "digest" in str(tdcollect.verify(out))


def test_texts_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    written = TensorDict({"a": {"text": NonTensorStack(*TEXTS)}, "n": torch.arange(6)}, [6])
    write_trajectory(tmp_path / "data.npz", written)
    read = read_trajectory(tmp_path / "data.npz")
    assert read["a", "text"] == TEXTS
    assert torch.equal(read["n"], written["n"])


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ValueError, match="expected a function of one observation where entries"):
        tdcollect.evaluate(Guess, from_function(nearest, batched=True), 2, progress=False)
    with pytest.raises(ValueError, match=r"expected an action of the env's space, Text.*got 7"):
        tdcollect.evaluate(Guess, from_function(lambda seen: 7), 2, progress=False)
    with pytest.raises(ValueError, match="expected a policy for an env whose actions are texts"):
        tdcollect.evaluate(lambda: GymWrapper(Guess()), None, 2, progress=False)
    unsteady = from_function(lambda seen, calls=[]: calls.append(1) or str(len(calls) % 10))
    with pytest.raises(NotReproducibleError, match="gives other actions"):
        tdcollect.evaluate(Guess, unsteady, 2, progress=False)


# ------------------------------------------------------------------------------ TorchRL's chat envs

ROWS = [{"query": [f"what is {n} + 2?"]} for n in range(32)]


class Drawn:
    """Rows of data, each drawn from torch's generator: so an episode's seed decides its row."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield ROWS[int(torch.randint(len(ROWS), ()))]


class Length(Transform):
    """Rewards the length of the last answer."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        answer = tensordict["history"].full.content[0][-1]
        return next_tensordict.set("reward", torch.full((1, 1), float(len(answer))))

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        return Composite(reward=Unbounded((1, 1)), shape=(1,))


class Asks(Transform):
    """Draws the first prompt from torch's generator."""

    def _reset_env_preprocess(self, tensordict: Any) -> Any:
        tensordict = TensorDict(batch_size=1) if tensordict is None else tensordict
        return tensordict.set("query", ROWS[int(torch.randint(len(ROWS), ()))]["query"])


def chat(rows: Any) -> Any:
    return DatasetChatEnv.from_dataloader(dataloader=rows, batch_size=(1,), data_key="query")


def answers(tensordict: Any) -> Any:
    said = random.choice(["four", "fünf", "I do not know"])
    answer = History(role=[["assistant"]], content=[[said]], batch_size=(1, 1))
    history = tensordict["history"]
    history.response = answer
    history.full = history.prompt.extend(answer, inplace=False, dim=-1)
    return tensordict


def test_chats_whose_prompt_is_drawn_are_numbered_episodes() -> None:
    runs = [
        tdcollect.evaluate(
            lambda: TransformedEnv(ChatEnv(batch_size=(1,)), Compose(Asks(), Length())), answers, 4,
            num_envs=slots, max_episode_steps=3, keep_trajectories=True, progress=False,
        )
        for slots in (1, 3)
    ]  # fmt: skip
    assert runs[0].digest == runs[1].digest
    episodes = [runs[0].trajectory(index) for index in range(4)]
    for data in episodes:
        asked, heard = data["history", "prompt"], data["next", "history", "prompt"]
        assert asked[1:] == heard[:-1]
        assert len(asked[0]) < len(heard[0]) < len(heard[1])
    assert len({data["history", "prompt"][0] for data in episodes}) > 1


def test_chats_that_take_row_after_row_are_refused() -> None:
    for episodes in (1, 4):
        with pytest.raises(NotReproducibleError, match="DataLoadingPrimer takes the next row"):
            tdcollect.evaluate(
                lambda: TransformedEnv(chat(ROWS), Length()), answers, episodes,
                num_envs=2, max_episode_steps=2, progress=False,
            )  # fmt: skip
    with pytest.raises(ValueError, match=r"expected an env with a reward, .*ChatEnv without"):
        tdcollect.evaluate(lambda: chat(Drawn()), answers, 2, max_episode_steps=2, progress=False)
