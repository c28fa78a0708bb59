"""Groups of agents: those of an env, a policy for each, and numbers of an episode by group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.collect.policy import needs_state
from tdcollect.display import listed_text
from tdcollect.envs.traits import innermost
from tdcollect.evaluation.episodes.data import SUCCESS, exact_sum
from tdcollect.keys import ACTION, Key, as_path, entry_path, under_next
from tdcollect.policies import SpacePolicy

KINDS = ("return", "length", "success")
BY = "by"
"""The name under which ``metrics`` asks for all numbers of groups, or of groups and agents."""
GROUP, AGENT = "group", "agent"


@dataclass(frozen=True)
class Group:
    """A group of agents of an env."""

    name: str
    path: tuple[str, ...]  # of its TensorDict
    agents: tuple[str, ...]  # their names, or their places where the env has none
    entries: Mapping[str, Key]  # in the following step, of those of ``KINDS`` that it has


def groups_of(env: EnvBase) -> dict[str, Group]:
    """Return the groups of agents of an env, by name; none where actions are not in groups."""
    named = getattr(innermost(env), "group_map", None) or {}
    actions = env.full_action_spec_unbatched
    groups = {}
    acting = {as_path(key)[:-1] for key in env.action_keys if key[-1] == ACTION}
    for path in sorted(acting - {()}):
        name = entry_path(path)
        count = next(iter(actions[path].shape), 1)
        agents = tuple(map(_plain, named.get(name, ())))
        if len(set(agents)) != count:
            agents = tuple(map(str, range(count)))
        groups[name] = Group(_plain(name, "/"), path, agents, dict(_entries(env, path)))
    return groups


def _entries(env: EnvBase, path: tuple[str, ...]) -> Iterable[tuple[str, Key]]:
    if (*path, keys.REWARD) in env.reward_keys:
        yield "return", under_next((*path, keys.REWARD))
    flag = (*path, keys.DONE)
    yield "length", under_next(flag) if flag in env.done_keys else keys.NEXT_DONE
    for key in env.full_observation_spec.keys(True, True):
        if as_path(key)[: len(path)] == path and key[-1] in SUCCESS:
            yield "success", under_next(key)


def _plain(name: str, more: str = "") -> str:
    """Return a name with the letters that the names of metrics have."""
    return re.sub(rf"[^A-Za-z0-9_{more}-]", "_", name)


class GroupPolicies(nn.Module):
    """A policy for each group of agents; None stands for random legal actions.

    The weights of those that are modules are its own, by group: ``red.0.weight``.

    Attributes:
        policies: by the name of the group.
    """

    def __init__(self, policies: Mapping[str, Any]):
        super().__init__()
        self.policies = dict(policies)
        for name, policy in self.policies.items():
            if isinstance(policy, TensorDictModuleBase):
                _check_module(name, policy)
                self.add_module(name.replace(".", "_"), policy)
            elif not (policy is None or isinstance(policy, SpacePolicy)):
                raise TypeError(
                    f"expected the policy of group {name!r} to be a TensorDict module, one of "
                    "tdcollect.policies, or None for random actions, got "
                    f"{type(policy).__name__}; pass from_function(f) for a function of the group's "
                    "observations, or TensorDictModule(net, ['observation'], ['action'])"
                )
        self.training = any(module.training for module in self.children())


def of_groups(policy: Any) -> Any:
    """Return policies that are given by group as one; any other policy as it is."""
    return GroupPolicies(policy) if isinstance(policy, Mapping) else policy


def _check_module(name: str, policy: Any) -> None:
    """Refuse a module that acts for others, or remembers under keys that are not the group's."""
    if needs_state(policy):
        raise ValueError(
            f"expected the policy of group {name!r} to be without a hidden state of TorchRL's, got "
            f"{type(policy).__name__}; pass an agent that remembers, from_agent(make), or one "
            "module for all groups"
        )
    own, absolute = name.split("/"), is_absolute(name, policy)
    named = [*policy.in_keys, *policy.out_keys] if absolute else []
    foreign = [key for key in named if [*as_path(key)[: len(own)]] != own]
    wanted = (*own, ACTION) if absolute else ACTION
    if foreign or wanted not in policy.out_keys:
        raise ValueError(
            f"expected the policy of group {name!r} to write {wanted!r}, and to read and write "
            f"entries of its group alone, got in_keys {policy.in_keys}, out_keys {policy.out_keys}"
        )


def is_absolute(name: str, policy: Any) -> bool:
    """Return whether a module names entries from the root, ``("red", "observation")``."""
    own = name.split("/")
    keys = [*policy.in_keys, *policy.out_keys]
    return any(len(as_path(key)) > len(own) and [*as_path(key)[: len(own)]] == own for key in keys)


def checked_groups(policies: GroupPolicies, env: EnvBase) -> list[Group]:
    """Return the groups of an env, each of which must have a policy."""
    there = {entry_path(group.path): group for group in groups_of(env).values()}
    named = policies.policies.keys()
    if named != there.keys() or not there:
        unknown, without = sorted(named - there.keys()), sorted(there.keys() - named)
        many, names = ("one", unknown) if unknown else ("none", without)
        groups = listed_text(sorted(there), 12) or "of which it has none"
        raise ValueError(
            f"expected a policy for each of the env's groups of agents, {groups}, got {many} of "
            f"{listed_text(names) or 'them'}; None stands for random actions, and an env without "
            "groups takes one policy"
        )
    return list(there.values())


def is_measure(text: Any) -> bool:
    """Return whether a text asks for a number of a group, ``return/red``, or of an agent."""
    return isinstance(text, str) and text.startswith(tuple(f"{kind}/" for kind in KINDS))


class GroupMeasure:
    """A number of a group, or of one of its agents, as a function of an episode's data ``[L]``.

    The return of a group is the mean over its agents, as in a record's ``group_returns``. The
    length of an agent is that of its episode up to its own end, and a group's is the longest one.
    A group has succeeded if all its agents have, each at its own last step.
    """

    def __init__(self, kind: str, group: Group, agent: str | None = None):
        self.text = "/".join([kind, group.name, *([agent] if agent else [])])
        self.reads = {*group.entries.values(), keys.NEXT_DONE}
        self.agent, self._kind, self._group = agent, kind, group
        self._agents = slice(None)
        if agent is not None:
            self._agents = slice(at := group.agents.index(agent), at + 1)

    def __str__(self) -> str:
        return self.text

    def __call__(self, data: TensorDict) -> float | None:
        """Return the number; None for a success that the env does not tell."""
        values = self._read(data, self._kind)
        if self._kind == "return":
            rewards = values[:, self._agents].astype(np.float64)
            return exact_sum(rewards) / rewards.shape[1]
        ended = self._read(data, "length")
        steps = np.where(ended.any(0), ended.argmax(0) + 1, len(data))
        if self._kind == "length":
            return float(steps[self._agents].max())
        last = values[steps - 1, range(len(steps))][self._agents]
        return float(last.all()) if np.isin(last, (0, 1)).all() else None

    def _read(self, data: TensorDict, kind: str) -> np.ndarray[Any, Any]:
        """Return an entry as ``[L, agents]``, also if the agents share one value."""
        rows = data[self._group.entries[kind]].cpu().numpy().reshape(len(data), -1)
        return np.broadcast_to(rows, (len(data), len(self._group.agents)))


def with_measures(metrics: Mapping[str, Any], env: EnvBase) -> dict[str, Any]:
    """Return metrics with functions in the place of texts such as ``return/red``.

    Raises:
        ValueError: for a group or an agent that the env does not have.
    """
    named = dict(metrics)
    wanted = named.pop(BY, None)
    if wanted not in (None, GROUP, AGENT):  # a metric of this name
        named[BY], wanted = wanted, None
    texts = [text for text in named.values() if is_measure(text)]
    if not texts and wanted is None:
        return named
    every = {str(measure): measure for measure in _every(groups_of(env).values())}
    unknown = [text for text in texts if text not in every]
    if unknown or not every:
        there = listed_text([*every], 12) or "an env without groups of agents"
        raise ValueError(
            f"expected metrics of groups that the env has, {there}, got "
            f"{unknown[0] if unknown else f'{BY}={wanted}'}"
        )
    resolved = {name: every.get(text, text) for name, text in named.items()}
    for text, measure in every.items() if wanted is not None else ():
        if wanted == AGENT or measure.agent is None:
            resolved.setdefault(text, measure)
    return {name: resolved[name] for name in sorted(resolved)}


def _every(groups: Iterable[Group]) -> Iterable[GroupMeasure]:
    for group in groups:
        for kind in group.entries:
            yield GroupMeasure(kind, group)
            yield from (GroupMeasure(kind, group, agent) for agent in group.agents)
