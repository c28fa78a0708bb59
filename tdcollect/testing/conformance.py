"""``check_env``: checks that an env keeps the rules that collection relies on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tdcollect.checks.player import GymnasiumPlayer, TorchRLPlayer
from tdcollect.checks.registry import run_checks, select
from tdcollect.checks.report import Report
from tdcollect.envs import make_env
from tdcollect.testing import gymnasium_checks, torchrl_checks

AnyEnv: TypeAlias = gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | EnvBase


def check_env(
    env: str | Callable[[], AnyEnv] | AnyEnv,
    *,
    policy: Callable[[Any], Any] | None = None,
    max_episode_steps: int = 1000,
    seed: int = 0,
    skip: Collection[str] = (),
) -> Report:
    """Check that an env keeps the rules that collection relies on.

    A gymnasium env is checked by gymnasium's interface, an ``EnvBase`` by TorchRL's; a gymnasium
    vector env is wrapped by :func:`tdcollect.make_env` and checked as an ``EnvBase``.

    Args:
        env: a gymnasium id, or a callable that makes an env, so that new envs can be compared. Or
            an env, about which some checks find less; it is closed in the end.
        policy: acts instead of random actions: a function from an observation to an action for a
            gymnasium env, a TensorDict policy for an ``EnvBase``.
        max_episode_steps: the most steps that an episode is played for.
        seed: the first of the seeds that are tried.
        skip: names of checks to leave out, which are their rules: "another seed gives another
            episode" for an env without chance, for instance.

    Returns:
        A report with one finding per check; print it, or call ``raise_if_failed()``.

    Raises:
        TypeError: if ``env`` is neither an env nor makes one.
        ValueError: for a name in ``skip`` that is no check of this kind of env, or if
            ``max_episode_steps`` is not positive.

    Examples:
        >>> print(check_env("CartPole-v1"))
        >>> check_env(lambda: MyEnv(size=5)).raise_if_failed()
    """
    if max_episode_steps < 1:
        raise ValueError(f"expected max_episode_steps to be positive, got {max_episode_steps}")
    made, make = _make(env)
    player: GymnasiumPlayer | TorchRLPlayer
    if isinstance(made, gym.Env):
        group = gymnasium_checks.GROUP
        player = GymnasiumPlayer(made, make, policy, max_episode_steps, seed)
    else:
        group = torchrl_checks.GROUP
        player = TorchRLPlayer(made, make, policy, max_episode_steps, seed)
    try:
        checks = select(group, skip=skip)
    except ValueError:
        player.close()
        raise
    # The env's draws from torch's global generator must not show outside.
    with torch.random.fork_rng():
        findings = run_checks(checks.values(), player, skip)
    player.close()
    return Report(_name(env, made), findings)


def _make(env: Any) -> tuple[gym.Env[Any, Any] | EnvBase, Callable[[], Any] | None]:
    """Return an env to check, and a callable that makes another one; None if nothing does."""
    if isinstance(env, VectorEnv):
        return make_env(env), None
    if isinstance(env, (gym.Env, EnvBase)):
        return env, None
    make = partial(gym.make, env) if isinstance(env, str) else env
    if not callable(make):
        raise TypeError(
            "expected a gymnasium id, an env or a callable that makes one, got "
            f"{type(env).__name__} {env!r}"
        )
    made = make()
    if isinstance(made, VectorEnv):
        return make_env(made), lambda: make_env(make())
    if isinstance(made, (gym.Env, EnvBase)):
        return made, make
    raise TypeError(
        f"expected a callable that makes a gymnasium env or an EnvBase, got {type(made).__name__}"
    )


def _name(env: Any, made: Any) -> str:
    if isinstance(env, str):
        return env
    if isinstance(made, gym.Env):
        return made.spec.id if made.spec is not None else type(made.unwrapped).__name__
    return type(made).__name__
