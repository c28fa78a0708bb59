"""Policies of LeRobot: each episode is that of LeRobot's own rollout of it alone."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("lerobot", reason="LeRobot has environments of its own: make lerobot")

from lerobot.configs import PreTrainedConfig
from lerobot.envs import PushtEnv, make_env_pre_post_processors
from lerobot.policies import get_policy_class, make_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline
from lerobot.scripts.lerobot_eval import eval_policy_all, rollout
from safetensors.torch import load_file, save_file

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation.lerobot import load_policy
from tdcollect.evaluation.manifest import structure_digest, weights_digest
from tdcollect.randomness import GlobalStream, Outside
from tdcollect.seeding import env_seed, policy_seed

from ..evaluation.test_exports import eval_info
from .models import LENGTH, POLICIES, made, saved

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
QUIET: dict[str, Any] = {"progress": False}
BRIEF = LENGTH < 50  # where drawing takes longest


def theirs(folder: Path) -> dict[str, Any]:
    """A saved policy as LeRobot's evaluation takes it."""
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    around = make_env_pre_post_processors(PushtEnv(), config)
    own = make_pre_post_processors(config, str(folder))
    names = ("policy", "env_preprocessor", "env_postprocessor", "preprocessor", "postprocessor")
    return dict(zip(names, (policy, *around, *own), strict=True))


def vector(make: Callable[[], Any], count: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Envs in a batch, as LeRobot makes those of gymnasium ids."""
    return gym.vector.SyncVectorEnv(
        [make] * count, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("gym_pusht", name) for name in POLICIES), ("gym_aloha", "act"), ("metaworld", "diffusion")],
)
def test_episodes_are_those_of_lerobots_rollout_alone(
    name: str, family: str, tmp_path: Path
) -> None:
    pytest.importorskip(family, reason=f"{family} has an environment of its own: make lerobot")
    folder, make = saved(name, family, tmp_path / "model"), partial(made, family)
    policy = load_policy(folder)
    count = 3 if name == "act, ensembled" or BRIEF else 10
    sizes: list[dict[str, Any]] = [{"num_envs": n} for n in (1, 5, 10)] + [{"workers": 2}]
    results = [tdcollect.evaluate(make, policy, count, **how, **QUIET) for how in sizes]
    assert len({result.digest for result in results}) == 1, [r.digest for r in results]
    print(f"\n{family}, {name}: {results[0].digest}")
    assert results[0].summary().success is not None
    env, alone = vector(make, 1), theirs(folder)
    for record in results[0].episodes[: 1 if BRIEF else 3]:
        stream = GlobalStream(policy_seed(0, record.index))
        with Outside(), stream:
            ran = rollout(env, seeds=[env_seed(0, record.index)], **alone)
        rewards = ran["reward"][0].double().tolist()
        assert len(rewards) == record.length
        assert record.episode_return == pytest.approx(math.fsum(rewards), rel=1e-5, abs=1e-6)
    env.close()


@pytest.fixture(scope="module")
def act(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gym_pusht")
    return saved("act", "gym_pusht", tmp_path_factory.mktemp("act") / "model")


def test_the_report_is_the_one_that_lerobot_writes(act: Path, tmp_path: Path) -> None:
    """With a batch of one, the same seeds, and a policy that draws nothing."""
    seeds = range(1000, 1004)
    results = [
        tdcollect.evaluate(
            partial(made, "gym_pusht"),
            load_policy(act),
            4,
            env_seeds=[*seeds],
            metrics={"max_reward": lambda data: float(data["next", "reward"].max())},
            output_dir=tmp_path / str(number),
            **QUIET,
        )
        for number in range(2)
    ]
    envs = {"pusht": {n: vector(partial(made, "gym_pusht"), 1) for n in range(2)}}
    expected = eval_policy_all(envs, n_episodes=4, start_seed=1000, **theirs(act))
    assert expected["overall"].pop("eval_s") > expected["overall"].pop("eval_ep_s") > 0
    assert_close(eval_info({"pusht": results}), expected)


def assert_close(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == (pytest.approx(expected, 1e-6) if isinstance(expected, float) else expected)


class Ends(gym.Wrapper):
    """Ends after 8 to 14 steps, as the seed says, with a reward of 1 a step."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.left = 8 + (seed or 0) % 7
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, _, _, truncated, info = self.env.step(action)
        self.left -= 1
        return observation, 1.0, self.left == 0, truncated, {**info, "is_success": self.left == 0}


def test_lerobots_batches_add_a_reward_of_the_next_episode(act: Path) -> None:
    def make() -> Ends:
        return Ends(made("gym_pusht"))

    lengths = [8 + seed % 7 for seed in range(7)]
    result = tdcollect.evaluate(make, load_policy(act), 7, env_seeds=[*range(7)], **QUIET)
    assert result.returns.tolist() == lengths

    def returns(count: int) -> list[float]:
        info = eval_policy_all(
            {"pusht": {0: vector(make, count)}}, n_episodes=7, start_seed=0, **theirs(act)
        )
        (task,) = info["per_task"]
        return task["metrics"]["sum_rewards"]

    assert returns(1) == lengths
    # The longest one of the batch ends with it; each other has one reward too many.
    assert returns(7) == [length + (length < 14) for length in lengths]


def test_lerobots_draws_depend_on_the_size_of_the_batch(tmp_path: Path) -> None:
    pytest.importorskip("gym_pusht")
    folder = saved("diffusion", "gym_pusht", tmp_path / "model")

    def returns(count: int) -> list[float]:
        torch.manual_seed(0)
        envs = {"pusht": {0: vector(partial(made, "gym_pusht"), count)}}
        info = eval_policy_all(envs, n_episodes=10, start_seed=0, **theirs(folder))
        return info["per_task"][0]["metrics"]["sum_rewards"]

    found = {count: returns(count) for count in (1, 5, 10)}
    print("\nLeRobot's own:", {n: round(float(np.mean(r)), 3) for n, r in found.items()})
    assert len({*map(tuple, found.values())}) == 3


def test_the_manifest_has_what_decides_actions_wherever_the_model_lies(
    act: Path, tmp_path: Path
) -> None:
    def digests(folder: Path) -> tuple[Any, Any]:
        policy = load_policy(folder)
        return structure_digest(policy), weights_digest(policy)

    there = [Path(shutil.copytree(act, tmp_path / name)) for name in "abc"]
    config = json.loads((there[1] / "config.json").read_text())
    (there[1] / "config.json").write_text(json.dumps({**config, "n_action_steps": 2}))
    (file,) = there[2].glob("policy_preprocessor_step_*.safetensors")
    statistics = load_file(file)
    save_file({name: value + 1 for name, value in statistics.items()}, file)
    own, same, steps, shifted = map(digests, (act, *there))
    assert own == same
    assert own[0] != steps[0]
    assert own[1] != shifted[1]


def test_processors_of_the_env_come_first(act: Path) -> None:
    class Dark(PolicyProcessorPipeline):
        def __call__(self, batch: Any) -> Any:
            return {**batch, "observation.image": 0 * batch["observation.image"]}

    config = SimpleNamespace(
        get_env_processors=lambda: (Dark(steps=[]), PolicyProcessorPipeline(steps=[]))
    )
    black, white = (
        {"pixels": np.full((96, 96, 3), value, np.uint8), "agent_pos": np.array([100.0, 200.0])}
        for value in (0, 255)
    )

    def acted(observation: Any, **how: Any) -> list[float]:
        return load_policy(act, **how).begin(0)(observation)[0].tolist()

    assert acted(black) != acted(white)
    assert acted(black, env_config=config) == acted(white, env_config=config) == acted(black)


def test_the_page_of_robots(act: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks run in their order, where a checkpoint lies as training leaves it."""
    monkeypatch.chdir(tmp_path)
    place = Path("outputs/train/act_pusht/checkpoints/last")
    place.mkdir(parents=True)
    (place / "pretrained_model").symlink_to(act)
    page, space = (ROOT / "docs" / "robots.md").read_text(), {"__name__": "__main__"}
    for block in re.findall(r"^```py(?:thon)?\n(.*?)^```", page, re.S | re.M):
        exec(compile(block, "docs/robots.md", "exec"), space)
    for command in re.findall(r"^tdcollect (.*?)$(?<!\\)", page.replace("\\\n", ""), re.M):
        assert main(shlex.split(command)) == 0
