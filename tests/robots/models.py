"""Small policies of LeRobot with random weights, as its training saves them, and their envs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import AlohaEnv, PushtEnv
from lerobot.envs.configs import MetaworldEnv
from lerobot.policies import (
    ACTConfig,
    DiffusionConfig,
    get_policy_class,
    make_pre_post_processors,
)

ACT: dict[str, Any] = {
    "chunk_size": 10, "n_action_steps": 5, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64,
    "n_encoder_layers": 1, "latent_dim": 4, "n_vae_encoder_layers": 1,
}  # fmt: skip
DIFFUSION = {
    "horizon": 16, "n_action_steps": 8, "n_obs_steps": 2, "down_dims": (16, 32),
    "spatial_softmax_num_keypoints": 4, "diffusion_step_embed_dim": 16, "num_inference_steps": 3,
    "num_train_timesteps": 10,
}  # fmt: skip
POLICIES: dict[str, Any] = {
    "act": partial(ACTConfig, **ACT),
    "act, ensembled": partial(
        ACTConfig, **{**ACT, "n_action_steps": 1, "temporal_ensemble_coeff": 0.01}
    ),
    "diffusion": partial(DiffusionConfig, **DIFFUSION),
}
LENGTH = int(os.environ.get("EPISODE_LENGTH", "50"))
CONFIGS: dict[str, Any] = {
    "gym_pusht": PushtEnv(episode_length=LENGTH),
    "gym_aloha": AlohaEnv(episode_length=LENGTH),
    "metaworld": MetaworldEnv(task="push-v3", obs_type="pixels_agent_pos", episode_length=LENGTH),
}


class Twice(gym.Wrapper):
    """Resets twice: MetaWorld's first picture has a few values of the episode before."""

    def reset(self, **how: Any) -> Any:
        self.env.reset(**how)
        return self.env.reset(**how)


def made(family: str) -> gym.Env[Any, Any]:
    """The env of a package as LeRobot makes it, with its time limit."""
    config = CONFIGS[family]
    if family != "metaworld":
        __import__(family)
        return gym.make(config.gym_id, disable_env_checker=True, **config.gym_kwargs)
    from lerobot.envs.metaworld import MetaworldEnv as Env

    env = Env("push-v3", **config.gym_kwargs)
    env._max_episode_steps = LENGTH  # LeRobot's rollout ends there
    return gym.wrappers.TimeLimit(Twice(env), LENGTH)


def saved(name: str, family: str, folder: Path) -> Path:
    """Save a policy with its processors for the spaces of an env, normalised by bounds."""
    env = made(family)
    pictures = env.observation_space["pixels"]
    named = pictures.spaces if isinstance(pictures, gym.spaces.Dict) else {}
    images = {f"observation.images.{key}": part for key, part in named.items()}
    parts = {**(images or {"observation.image": pictures}), "action": env.action_space}
    parts["observation.state"] = env.observation_space["agent_pos"]
    env.close()
    features, stats = {}, {}
    for key, space in parts.items():
        kind = FeatureType.ACTION if key == "action" else FeatureType.STATE
        shape = space.shape
        low, high = (torch.as_tensor(end).float() for end in (space.low, space.high))
        if len(shape) == 3:
            kind, shape = FeatureType.VISUAL, (3, *shape[:2])
            low, high = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
        low, high = low.clamp(-1000, 1000), high.clamp(-1000, 1000)
        features[key] = PolicyFeature(kind, shape)
        stats[key] = {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 4}
    outputs = {"action": features.pop("action")}
    torch.manual_seed(0)
    config = POLICIES[name](
        input_features=features,
        output_features=outputs,
        device="cpu",
        pretrained_backbone_weights=None,
        push_to_hub=False,
    )
    policy = get_policy_class(config.type)(config)
    for part in (policy, *make_pre_post_processors(config, dataset_stats=stats)):
        part.save_pretrained(folder)
    return folder
