"""Facts: what the plan of an env, or a policy on StepDicts, depends on; both are kept meanwhile."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torchrl.envs import EnvBase

from tdcollect.envs.traits import all_transforms_of, innermost
from tdcollect.envs.wrapper import GymnasiumEnv

_MOST = 100
"""Lists and dicts of more items count as one object."""


class Facts:
    """Objects, their attributes and items of these, compared by identity; values, by equality."""

    def __init__(self, objects: Iterable[Any], *values: Any):
        self._objects = [*objects]
        self._values = values
        attributes = [value for each in self._objects for value in vars(each).values()]
        short = [v for v in attributes if isinstance(v, (list, dict)) and len(v) <= _MOST]
        self._dicts = [part for part in short if type(part) in (dict, OrderedDict)]
        self._lists = [part for part in short if type(part) is list]
        self._held = self._now()

    def hold(self, root: Any, *values: Any) -> bool:
        """Return whether all is as it was, of the same first object, and for these values."""
        if root is not self._objects[0] or values != self._values:
            return False
        now = self._now()
        return len(now) == len(self._held) and all(map(operator.is_, now, self._held))

    def _now(self) -> list[Any]:
        dicts: list[Any] = [*map(vars, self._objects), *self._dicts]
        items: Iterable[Any] = chain(dicts, map(dict.values, dicts), self._lists)
        return [*map(type, self._objects), *chain.from_iterable(items)]


def facts_of_env(env: EnvBase, *values: Any) -> Facts | None:
    """The facts of an env on gymnasium slots and of its transforms; None for another, not known."""
    base = innermost(env)
    if type(base) is not GymnasiumEnv:
        return None
    layers = [env]
    while layers[-1] is not base:
        layers.append(layers[-1].base_env)
    return Facts([*layers, *all_transforms_of(env)], *values)
