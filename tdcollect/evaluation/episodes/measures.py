"""Numbers of an episode by group and by agent: returns, lengths and success."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect import keys
from tdcollect.display import listed_text
from tdcollect.evaluation.episodes.data import exact_sum
from tdcollect.evaluation.episodes.groups import Group, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensordict import TensorDict
    from torchrl.envs import EnvBase

KINDS = ("return", "length", "success")
BY = "by"
"""The name under which ``metrics`` asks for all numbers of groups, or of groups and agents."""
GROUP, AGENT = "group", "agent"


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
