"""Envs of the census that need arguments: packages whose ids cannot be made without."""

from __future__ import annotations

from typing import Any

import numpy as np


def trading() -> Any:
    """gym-trading-env on a random walk of prices."""
    import gym_trading_env  # noqa: F401
    import gymnasium as gym
    import pandas as pd

    close = 100 * np.exp(np.random.default_rng(0).normal(0, 0.01, 500).cumsum())
    frame = pd.DataFrame(dict.fromkeys(("open", "high", "low", "close"), close))
    frame["volume"] = 1.0
    frame["feature_close"] = frame["close"].pct_change().fillna(0)
    frame.index = pd.date_range("2020-01-01", periods=len(frame), freq="h")
    return gym.make("TradingEnv", df=frame, positions=[0, 1])


def bluesky() -> Any:
    """One of bluesky-gym, whose ids are registered by a call."""
    import bluesky_gym
    import gymnasium as gym

    bluesky_gym.register_envs()
    return gym.make("DescentEnv-v0")


def classics() -> Any:
    """One of gym-classics, likewise."""
    import gym_classics
    import gymnasium as gym

    gym_classics.register("gymnasium")
    return gym.make("WindyGridworld-v0")


def minatar() -> Any:
    """One of MinAtar, likewise."""
    import gymnasium as gym
    from minatar.gym import register_envs

    register_envs()
    return gym.make("MinAtar/Breakout-v1")


def retro() -> Any:
    """The game that stable-retro brings along."""
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0")


def matrix() -> Any:
    """matrix-mdp-gym on a chain of four states."""
    import gymnasium as gym
    import matrix_mdp  # noqa: F401

    moves = np.zeros((4, 4, 2))
    for state in range(3):
        moves[state, state, 0] = moves[state + 1, state, 0] = 0.5
        moves[state + 1, state, 1] = 1.0
    return gym.make("matrix_mdp/MatrixMDP-v0", p_0=np.eye(4)[0], p=moves, r=np.ones((4, 4, 2)))
