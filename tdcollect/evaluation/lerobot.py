"""Policies of LeRobot as policies to evaluate, and evaluations as LeRobot's ``eval_info.json``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial, update_wrapper
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect.evaluation.directory import read_runs
from tdcollect.evaluation.ledger import film_path
from tdcollect.packages import extra_module
from tdcollect.policies import AgentPolicy, from_agent

if TYPE_CHECKING:
    from tdcollect.evaluation.result import EvaluationResult


def load_policy(
    model: str | PathLike[str], device: str | None = None, env_config: Any = None, task: str = ""
) -> AgentPolicy:
    """Return a policy of LeRobot as a policy for :func:`tdcollect.evaluate`.

    It acts as in ``lerobot-eval`` with one env: the observation of gymnasium's env, LeRobot's
    ``preprocess_observation``, the processors of the env and of the policy, ``select_action``, and
    the processors of the action. Each running episode has queues and histories of its own around
    the same weights.

    Args:
        model: the folder ``pretrained_model`` of a checkpoint, or the id of a model on the Hub.
        device: the device of the policy; None for that of its config.
        env_config: LeRobot's config of the env, for its processors, if it has any (LIBERO).
        task: what to do, in words, for policies that read it.

    Raises:
        ModuleNotFoundError: without LeRobot.

    Examples:
        >>> policy = load_policy("outputs/train/checkpoints/last/pretrained_model")
        >>> result = tdcollect.evaluate("gym_pusht/PushT-v0", policy, episodes=50)
    """
    policies = extra_module("lerobot.policies", "a policy of LeRobot")
    from lerobot.configs import PreTrainedConfig
    from lerobot.envs import PushtEnv, make_env_pre_post_processors

    path, config = str(model), PreTrainedConfig.from_pretrained(model)
    config.device = device or config.device
    policy = policies.get_policy_class(config.type).from_pretrained(path, config=config)
    on = {"device_processor": {"device": config.device}}
    own = policies.make_pre_post_processors(config, path, preprocessor_overrides=on)
    # By default those of a config that has none, as most.
    around = make_env_pre_post_processors(env_config or PushtEnv(), config)
    pipelines = (around[0], *own, around[1])
    # All that decides its actions has a name here, so that the manifest has its digest.
    statistics = {
        f"{at} {key} {name}": value
        for at, pipeline in enumerate(pipelines)
        for key, state in pipeline.state_dict().items()
        for name, value in state.items()
    }
    told = str((config, [pipeline.get_config() for pipeline in pipelines]))
    make = partial(Agent, policy, pipelines, task, told=told, **statistics)
    update_wrapper(make, type(policy), ("__module__", "__qualname__"), ())
    return from_agent(make, reset=None)


class Agent:
    """A policy with its queues and processors, in one episode."""

    def __init__(self, policy: Any, pipelines: Sequence[Any], task: str, **told: Any):
        # All but the weights is the episode's own, also the state of a processor.
        shared = {id(part): part for part in policy.state_dict(keep_vars=True).values()}
        self._parts = copy.deepcopy((policy, pipelines, task), shared)
        self._parts[0].reset()

    def select_action(self, observation: Any) -> Any:
        """Return the action at an observation, as LeRobot's ``rollout`` does in a batch of one."""
        import torch
        from lerobot.envs.utils import preprocess_observation

        policy, (env_before, before, after, env_after), task = self._parts
        batch = {**preprocess_observation(_batch_of_one(observation)), "task": [task]}
        device = torch.device(policy.config.device).type
        with torch.inference_mode(), torch.autocast(device, enabled=policy.config.use_amp):
            action = after(policy.select_action(before(env_before(batch))))
            return env_after({"action": action})["action"]


def _batch_of_one(observation: Any) -> Any:
    if isinstance(observation, Mapping):
        return {name: _batch_of_one(part) for name, part in observation.items()}
    return np.asarray(observation)[None]


def max_reward(data: Any) -> float:
    """Return the largest reward of an episode, a metric that LeRobot's reports have.

    Examples:
        >>> result = tdcollect.evaluate(env, policy, 50, metrics={"max_reward": max_reward})
    """
    return float(data["next", "reward"].max())


def eval_info(results: Mapping[str, Sequence[EvaluationResult]]) -> dict[str, Any]:
    """Return evaluations as LeRobot 0.6 writes them: ``per_task``, ``per_group``, ``overall``.

    An episode that did not complete is no success; its rewards are NaN, which averages leave out.
    What was not recorded is an empty list, with NaN as its average: success that the env does not
    report, and largest rewards without the metric ``max_reward``.

    Args:
        results: the evaluations of each group of tasks, by its name.
    """
    lists = isinstance(results, Mapping) and [isinstance(r, Sequence) for r in results.values()]
    if not lists or not all((*lists, *results.values())):
        raise ValueError(f"expected evaluations by group, {{'pusht': [result]}}, got {results!r}")
    each = [(group, at, one) for group, many in results.items() for at, one in enumerate(many)]
    tasks = [{"task_group": g, "task_id": at, "metrics": _metrics(one)} for g, at, one in each]
    groups = {name: _averages([one for g, _, one in each if g == name]) for name in results}
    overall = _averages([one for *_, one in each])
    runs = [run for *_, one in each if one.directory for run in read_runs(one.directory)]
    seconds = sum(run["seconds"] for run in runs) or np.nan
    overall |= {"eval_s": seconds, "eval_ep_s": seconds / overall["n_episodes"]}
    return {"per_task": tasks, "per_group": groups, "overall": overall}


def _metrics(result: EvaluationResult) -> dict[str, list[Any]]:
    """Return what is known of each episode."""
    episodes, folder = result.episodes, result.directory
    films = [film_path(folder, episode.index) for episode in episodes] if folder else []
    said = [episode.success for episode in episodes]
    largest = np.array([(e.metrics or {}).get("max_reward") for e in episodes], float)
    return {
        "sum_rewards": np.array([e.episode_return for e in episodes], float).tolist(),
        "max_rewards": [] if np.isnan(largest).all() else largest.tolist(),
        "successes": [*map(bool, said)] if {True, False} & {*said} else [],
        "video_paths": [str(film) for film in films if film.exists()],
        "predicted_video_paths": [],
    }


def _averages(results: Sequence[EvaluationResult]) -> dict[str, Any]:
    """Return the averages over the episodes of evaluations."""
    each = [_metrics(result) for result in results]
    found = {name: [value for one in each for value in one[name]] for name in each[0]}

    def mean(name: str) -> float:
        return float(np.mean([value for value in found[name] if not np.isnan(value)] or np.nan))

    return {
        "avg_sum_reward": mean("sum_rewards"),
        "avg_max_reward": mean("max_rewards"),
        "pc_success": mean("successes") * 100,
        "n_episodes": len(found["sum_rewards"]),
        "video_paths": found["video_paths"],
        "predicted_video_paths": [],
    }
