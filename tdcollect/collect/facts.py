"""Facts: what the plan of an env, or a policy on StepDicts, depends on; both are kept meanwhile."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrl.envs import EnvBase

from tdcollect.envs.traits import all_transforms_of, innermost
from tdcollect.envs.wrapper import GymnasiumEnv

_MOST = 100
"""Lists and dicts of more items count as one object."""
_MOST_NUMBERS = 10_000
"""Tensors of more numbers, likewise."""


class Facts:
    """Objects, their attributes and items of these, compared by identity; values, by equality.

    Tensors among the items, such as the bounds of a distribution, are compared by value, too, but
    for weights and buffers, which are read as they are at each step.
    """

    def __init__(self, objects: Iterable[nn.Module], *values: Any):
        self._objects = [*objects]
        self._values = values
        self._dicts: list[Any] = []
        self._lists: list[Any] = []
        tensors: dict[int, torch.Tensor] = {}
        for each in self._objects:
            for value in vars(each).values():
                self._note(value, tensors)
        for module in self._objects:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensors.pop(id(tensor), None)
        self._tensors = [*tensors.values()]
        self._values_of_tensors = [tensor.detach().clone() for tensor in self._tensors]
        self._held = self._now()

    def _note(self, value: Any, tensors: dict[int, torch.Tensor]) -> None:
        """Note a list or dict, those in it, and their tensors."""
        known = isinstance(value, torch.Tensor) and value.device.type != "meta"
        if known and value.numel() <= _MOST_NUMBERS:
            tensors[id(value)] = value
        if type(value) not in (dict, OrderedDict, list) or len(value) > _MOST:
            return
        is_list = type(value) is list
        (self._lists if is_list else self._dicts).append(value)
        for item in value if is_list else value.values():
            self._note(item, tensors)

    def hold(self, root: Any, *values: Any) -> bool:
        """Return whether all is as it was, of the same first object, and for these values."""
        if root is not self._objects[0] or values != self._values:
            return False
        now = self._now()
        same = len(now) == len(self._held) and all(map(operator.is_, now, self._held))
        return same and all(map(torch.equal, self._tensors, self._values_of_tensors))

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
