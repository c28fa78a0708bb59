"""``check_env``: the rules that an env must keep for its batches to be right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tdcollect.envs import make_env
from tdcollect.testing import gymnasium_probe, gymnasium_rules, torchrl_probe, torchrl_rules
from tdcollect.testing.report import Broken, Finding, NotChecked, Report

AnyEnv: TypeAlias = gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | EnvBase
AnyProbe: TypeAlias = gymnasium_probe.Probe | torchrl_probe.Probe


def check_env(
    env: str | Callable[[], AnyEnv] | AnyEnv,
    *,
    policy: Callable[[Any], Any] | None = None,
    steps: int = 1000,
    seed: int = 0,
    skip: Collection[str] = (),
) -> Report:
    """Check an env against the rules that collection relies on.

    A gymnasium env is checked as gymnasium has it, an ``EnvBase`` as TorchRL has it; a gymnasium
    vector env is wrapped by :func:`tdcollect.make_env` and checked as an ``EnvBase``.

    Args:
        env: a gymnasium id, or a callable that makes an env: some rules compare envs newly made.
            Or an env, which is closed in the end, and of which these rules see less.
        policy: acts instead of the env's random actions: a function from an observation to an
            action for a gymnasium env, a TensorDict policy for an ``EnvBase``.
        steps: the most steps that an episode is played for.
        seed: the first of the seeds that are tried.
        skip: rules to leave out, by their sentences: "another seed gives another episode" for an
            env without chance, for instance.

    Returns:
        A report of each rule, to be printed or to ``raise_if_failed()``.

    Raises:
        TypeError: for anything but an env or what makes one.
        ValueError: for a sentence in ``skip`` that is no rule of this kind of env, or for
            ``steps`` that are not positive.

    Examples:
        >>> print(check_env("CartPole-v1"))
        >>> check_env(lambda: MyEnv(size=5)).raise_if_failed()
    """
    if steps < 1:
        raise ValueError(f"expected steps to be positive, got {steps}")
    made, make = _make(env)
    rules: Mapping[str, Callable[[Any], str]]
    probe: AnyProbe
    if isinstance(made, gym.Env):
        rules = gymnasium_rules.RULES
        probe = gymnasium_probe.Probe(made, make, policy, steps, seed)
    else:
        rules = torchrl_rules.RULES
        probe = torchrl_probe.Probe(made, make, policy, steps, seed)
    unknown = [sentence for sentence in skip if sentence not in rules]
    if unknown:
        probe.close()
        raise ValueError(f"expected the rules to skip to be of {list(rules)}, got {unknown}")
    # What the env draws from torch's global generator must not show outside.
    with torch.random.fork_rng():
        findings = _try_rules(rules, probe, skip)
    probe.close()
    return Report(_name(env, made), findings)


def _try_rules(
    rules: Mapping[str, Callable[[Any], str]], probe: AnyProbe, skip: Collection[str]
) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    for sentence, rule in rules.items():
        if sentence in skip:
            findings.append(Finding(sentence, None, "skipped as asked"))
        elif findings and findings[0].passed is False:
            # The first rule plays the episodes that the others look at.
            findings.append(Finding(sentence, None, "no episode to look at"))
        else:
            findings.append(_try_rule(sentence, rule, probe))
    return tuple(findings)


def _try_rule(sentence: str, rule: Callable[[Any], str], probe: AnyProbe) -> Finding:
    try:
        return Finding(sentence, True, rule(probe))
    except NotChecked as reason:
        return Finding(sentence, None, str(reason))
    except Broken as evidence:
        return Finding(sentence, False, str(evidence))
    except Exception as error:
        text = " ".join(str(error).split())
        return Finding(sentence, False, f"{type(error).__name__}: {text}"[:300])


def _make(env: Any) -> tuple[gym.Env[Any, Any] | EnvBase, Callable[[], Any] | None]:
    """An env to check, and what makes another one like it (None where nothing does)."""
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
