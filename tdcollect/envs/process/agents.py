"""PettingZoo's parallel envs as gymnasium envs: agents in groups, the values of each stacked.

Groups, entries and masks are those of TorchRL's ``PettingZooWrapper``. Rewards and flags of agents
stand beside their observations, so that slots write them as they write observations.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tdcollect import check, keys
from tdcollect.envs.process.values import Array, is_number, slot_of
from tdcollect.packages import extra_module

OPTIONS = ("group_map", "use_mask", "return_state", "done_on_any")
"""The arguments of :class:`Agents` in ``env_kwargs``; the others are the parallel env's own."""

ACTION_MASK, INFO, STATE = "action_mask", "info", "state"


class Flags(spaces.MultiBinary):
    """Flags, as bools of a shape."""

    def __init__(self, shape: Sequence[int]):
        super().__init__(list(shape))
        self.dtype: Any = np.dtype(bool)


class AgentSpace(spaces.Dict):
    """What is seen of the agents of each group, stacked, with their rewards and flags.

    Attributes:
        group_map: the agents of each group.
    """

    def __init__(self, parts: Mapping[str, Any], group_map: Mapping[str, list[str]]):
        super().__init__(dict(parts))
        self.group_map = dict(group_map)


class Agents(gym.Env[Any, Any]):
    """A parallel env of PettingZoo as one gymnasium env, for the slots of ``make_env``.

    Actions and observations are dicts by group, of arrays with the agents in front.

    Args:
        env: a ``pettingzoo.ParallelEnv``. It is reset once, to see its infos, unless ``infos``
            has an example of each agent's.
        group_map: the agents of each group; or a ``MarlGroupMapType`` of TorchRL's. None groups
            agents by name: ``"adversary_0"`` is in the group ``"adversary"``.
        use_mask: add ``"mask"`` to each group: the agents that are alive. Agents that die before
            the episode ends need it.
        return_state: add the env's ``state()``.
        done_on_any: an episode ends as soon as one agent is done; False: once all are.

    Raises:
        TypeError: for another env.
        ValueError: if groups do not hold each agent once, or an array cannot hold a group's spaces.
    """

    def __init__(
        self,
        env: Any,
        group_map: Any = None,
        use_mask: bool = False,
        return_state: bool = False,
        done_on_any: bool | None = None,
        *,
        infos: Mapping[str, Any] | None = None,
    ):
        if not isinstance(env, extra_module("pettingzoo", "an env of PettingZoo").ParallelEnv):
            raise TypeError(f"expected a pettingzoo.ParallelEnv, got {type(env).__name__}")
        check.bools(use_mask=use_mask, return_state=return_state)
        check.one_of((True, False, None), done_on_any=done_on_any)
        self.env, self.metadata = env, env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        self.groups = _groups(group_map, list(env.possible_agents))
        self.use_mask, self.return_state = use_mask, return_state
        self._ended = any if done_on_any in (None, True) else all
        infos = env.reset()[1] if infos is None else infos
        parts: dict[str, Any] = {}
        actions: dict[str, Any] = {}
        for group, agents in self.groups.items():
            actions[group] = spaces.Dict(
                {keys.ACTION: _stacked([env.action_space(agent) for agent in agents], group)}
            )
            seen = [env.observation_space(agent) for agent in agents]
            parts[group] = self._group_space(group, seen, actions[group], infos)
        if return_state:
            state = np.asarray(env.state())
            parts[STATE] = getattr(env, "state_space", _real(state.shape, state.dtype.type))
        self.observation_space = AgentSpace(parts, self.groups)
        self.action_space = spaces.Dict(actions)

    def _group_space(
        self, group: str, seen: Sequence[Any], action: spaces.Dict, infos: Mapping[str, Any]
    ) -> spaces.Dict:
        agents = self.groups[group]
        count = len(agents)
        told = [dict(infos.get(agent, {})) for agent in agents]
        masked = any(ACTION_MASK in info for info in told)
        if isinstance(seen[0], spaces.Dict) and ACTION_MASK in seen[0].spaces:
            masked = True
            seen = [spaces.Dict({n: p for n, p in s.items() if n != ACTION_MASK}) for s in seen]
        parts: dict[str, Any] = {keys.OBSERVATION: _stacked(seen, group)}
        if masked:
            choices = action[keys.ACTION]
            if not isinstance(choices, spaces.MultiDiscrete):
                raise ValueError(
                    f"expected Discrete actions with the action_mask of the group {group!r}, got "
                    f"{choices}; leave it out"
                )
            parts[ACTION_MASK] = Flags((count, int(choices.nvec[0])))
        if self.use_mask:
            parts[keys.MASK] = Flags((count,))
        shapes = {
            name: np.shape(value)
            for name, value in told[0].items()
            if name != ACTION_MASK and is_number(value) and all(name in info for info in told)
        }
        if shapes:
            parts[INFO] = spaces.Dict({n: _real((count, *shape)) for n, shape in shapes.items()})
        parts[keys.REWARD] = _real((count, 1))
        return spaces.Dict(parts | {flag: Flags((count, 1)) for flag in keys.FLAGS})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the infos are those of each agent."""
        seen, infos = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        none = {agent: False for agents in self.groups.values() for agent in agents}
        return self._observed(seen, infos, none, none, none), infos

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step all agents; the reward is their sum."""
        actions = {
            agent: slot_of(action[group][keys.ACTION], i)
            for group, agents in self.groups.items()
            for i, agent in enumerate(agents)
        }
        seen, rewards, terminated, truncated, infos = self.env.step(actions)
        if not self.use_mask and (gone := [agent for agent in actions if agent not in seen]):
            raise ValueError(
                f"expected all agents in every step, got none of {gone}, which have died; pass "
                "use_mask=True (in env_kwargs, or to Agents)"
            )
        # As TorchRL has it of agents that have died.
        dead = {agent: True for agent in actions if agent not in seen}
        terminated, truncated = {**dead, **terminated}, {**dead, **truncated}
        observed = self._observed(seen, infos, rewards, terminated, truncated)
        ends = [self._ended(flags[agent] for agent in actions) for flags in (terminated, truncated)]
        total = sum(float(observed[group][keys.REWARD].sum()) for group in self.groups)
        return observed, total, bool(ends[0]), bool(ends[1]), infos

    def _observed(
        self,
        seen: Mapping[str, Any],
        infos: Mapping[str, Any],
        rewards: Mapping[str, Any],
        terminated: Mapping[str, Any],
        truncated: Mapping[str, Any],
    ) -> dict[str, Any]:
        observed: dict[str, Any] = {}
        alive = self.env.agents
        for group, agents in self.groups.items():
            space: Any = self.observation_space[group]  # type: ignore[index]
            by_agent = [seen.get(agent) for agent in agents]
            part = {keys.OBSERVATION: _values(by_agent, space[keys.OBSERVATION])}
            if ACTION_MASK in space.spaces:
                part[ACTION_MASK] = legal = np.ones(space[ACTION_MASK].shape, bool)
                for i, agent in enumerate(agents):
                    sources = (by_agent[i], infos.get(agent))
                    told = [s for s in sources if isinstance(s, Mapping) and ACTION_MASK in s]
                    if told and agent in alive and agent in seen:
                        legal[i] = told[0][ACTION_MASK]
            if self.use_mask:
                part[keys.MASK] = np.array([agent in alive for agent in agents])
            if INFO in space.spaces:
                here = [infos[agent] if agent in seen else {} for agent in agents]
                part[INFO] = {
                    name: _values([info.get(name) for info in here], like)
                    for name, like in space[INFO].items()
                }
            shape = (len(agents), 1)
            gained = [rewards[agent] if agent in seen else 0.0 for agent in agents]
            part[keys.REWARD] = np.array(gained, np.float32).reshape(shape)
            ends = [np.array([f[a] for a in agents], bool) for f in (terminated, truncated)]
            flags = (ends[0] | ends[1], *ends)
            part |= {n: flag.reshape(shape) for n, flag in zip(keys.FLAGS, flags, strict=True)}
            observed[group] = part
        if self.return_state:
            observed[STATE] = self.env.state()
        return observed

    def render(self) -> Any:
        """The parallel env's picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the parallel env."""
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)


def is_agents_id(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("pettingzoo/")


def agents_of(name: str, /, **kwargs: Any) -> Agents:
    """Make an env from its id, ``pettingzoo/<package>/<module>``.

    The module is PettingZoo's (``pettingzoo.butterfly.pistonball_v6``), or one of a package of its
    own (``mpe2.simple_spread_v3``). ``kwargs`` are :data:`OPTIONS` and those of the env.

    Raises:
        ValueError: if there is no such module, or it has no parallel env.
    """
    parts = re.fullmatch(r"pettingzoo/(\w+)/(\w+)", name)
    module: Any = None
    if parts is not None:
        extra_module("pettingzoo", name)
        for package in (f"pettingzoo.{parts[1]}", parts[1]):
            path = f"{package}.{parts[2]}"
            if module is None and find_spec(package) and find_spec(path):
                module = importlib.import_module(path)
    if not hasattr(module, "parallel_env"):
        do = "its agents take turns" if module else "install its package"
        raise ValueError(
            "expected the id of a parallel env, as pettingzoo/mpe2/simple_spread_v3, got "
            f"{name!r}: {do}, or pass a function that makes a parallel env"
        )
    options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
    return Agents(module.parallel_env(**kwargs), **options)


def as_env(make: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Make an env; one of PettingZoo's is given as :class:`Agents`."""
    env = make(**kwargs)
    zoo = sys.modules.get("pettingzoo")
    if zoo is not None and isinstance(env, zoo.AECEnv):
        raise TypeError(
            f"expected a gymnasium.Env or a pettingzoo.ParallelEnv, got the AECEnv {env}, whose "
            "agents take turns; pass its parallel_env, or give TorchRL's PettingZooEnv to the "
            "collector"
        )
    return Agents(env) if zoo is not None and isinstance(env, zoo.ParallelEnv) else env


def _groups(group_map: Any, agents: Sequence[str]) -> dict[str, list[str]]:
    if hasattr(group_map, "get_group_map"):
        group_map = group_map.get_group_map(list(agents))
    if group_map is None:
        group_map = {}
        for agent in agents:
            numbered = re.fullmatch(r"(.+)_[+-]?\d+", agent)
            group_map.setdefault(numbered[1] if numbered else agent, []).append(agent)
    mapping = group_map if isinstance(group_map, Mapping) else {}
    groups = {group: list(m) for group, m in mapping.items() if isinstance(m, Iterable)}
    if sorted(agent for members in groups.values() for agent in members) != sorted(agents):
        raise ValueError(
            f"expected group_map to be a dict of lists that hold each of the agents {list(agents)} "
            f"once, got {group_map!r}"
        )
    return groups


def _real(shape: Sequence[int], dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, tuple(shape), dtype)


def _stacked(parts: Sequence[Any], group: str) -> Any:
    """The space of a group, of spaces of its agents that are alike."""
    first, count = parts[0], len(parts)
    alike = all(
        type(p) is type(first) and p.shape == first.shape and p.dtype == first.dtype for p in parts
    )
    if alike and isinstance(first, spaces.Dict) and all(p.keys() == first.keys() for p in parts):
        return spaces.Dict({n: _stacked([part[n] for part in parts], group) for n in first})
    if alike and isinstance(first, spaces.Box) and first.shape:
        lows, highs = np.stack([p.low for p in parts]), np.stack([p.high for p in parts])
        return spaces.Box(lows, highs, dtype=first.dtype.type)
    if alike and isinstance(first, spaces.MultiBinary):
        return spaces.MultiBinary((count, *first.shape))
    if alike and isinstance(first, spaces.Discrete) and all(p == first for p in parts):
        n, start = [first.n] * count, [first.start] * count
        return spaces.MultiDiscrete(n, dtype=first.dtype.type, start=start)
    advice = "put unlike agents into groups of their own (group_map)"
    if all(type(part) is type(first) and part == first for part in parts):
        advice = f"wrap the env so that its {type(first).__name__} becomes one of these"
    raise ValueError(
        "expected agents of a group to have one space, a Box, Discrete, MultiBinary, or a Dict of "
        f"these, got {list(parts)} in the group {group!r}; {advice}, or give TorchRL's "
        "PettingZooEnv to the collector"
    )


def _values(by_agent: Sequence[Any], space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            name: _values([None if value is None else value[name] for value in by_agent], part)
            for name, part in space.items()
        }
    if any(value is None for value in by_agent):
        zero: Array = np.zeros(space.shape[1:], space.dtype)
        by_agent = [zero if value is None else value for value in by_agent]
    return np.stack(by_agent)
