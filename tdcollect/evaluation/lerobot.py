"""Policies of LeRobot as policies to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial, update_wrapper
from os import PathLike
from typing import Any

import numpy as np

from tdcollect.packages import extra_module
from tdcollect.policies import AgentPolicy, from_agent


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
