"""The protocol of what acts in an evaluation; the form, device and specs of a policy."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction, ismethod
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.utils import RandomPolicy
from torchrl.modules import AdditiveGaussianModule, ConsistentDropoutModule, EGreedyModule

from tdcollect import check
from tdcollect._upstream.torchrl import (
    exploration_spec,
    make_compatible_policy,
    only_projects,
    set_exploration_spec,
)
from tdcollect.collect.arguments import cannot_wrap, check_instance
from tdcollect.collect.policy import RandomActions, warning_of_draws
from tdcollect.collect.step_dict import StepDict, with_index
from tdcollect.envs.process.agents import ACTION_MASK
from tdcollect.keys import Key
from tdcollect.policies import parameters_of

_DRAWING = (AdditiveGaussianModule, EGreedyModule)  # draw a spec's actions, or noise for them


class Layout(NamedTuple):
    """The slots that a policy acts for, its batch size and its device."""

    size: int  # the batch size that a policy on TensorDicts always runs at
    slots: int
    batched: bool  # False for one slot without a batch dimension
    device: torch.device  # the policy's


class Actor(ABC):
    """Acts for the episodes in the slots: probed once, told of each start, then acts at each step.

    Attributes:
        left_out: the entries of the last outputs that are no dense tensors.
    """

    left_out: Sequence[Key] = ()

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        """Act on trial, and refuse a policy that would not act the same for the same episode.

        Args:
            rows: those of slots that begin an episode.
            carried: the entries that the env carries from one step to the next.

        Returns:
            The outputs for equal rows, and the entries that the policy carries on.
        """
        return StepDict(), []

    @abstractmethod
    def start(self, slot: int, seed: int) -> None:
        """Begin an episode in a slot; it draws from a stream that starts from the seed."""

    @abstractmethod
    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        """Add the actions to the rows; only those of the slots ``active`` matter."""

    def end(self) -> None:  # noqa: B027, most have nothing to check
        """End a block of steps: raise if a draw had parameters that its distribution refuses."""


def as_policy(policy: Any, env: EnvBase, size: int) -> Callable[..., Any]:
    """Return a policy as a collector would call it, on TensorDicts."""
    if policy is None or isinstance(policy, RandomPolicy):
        drawn = RandomActions(env.full_action_spec_unbatched.expand(size))
        if text := warning_of_draws(drawn):
            warnings.warn(text, stacklevel=2)
        return drawn
    check_instance(policy)
    try:
        return make_compatible_policy(policy, env.observation_spec, env=env)
    except TypeError as error:
        reason = cannot_wrap(policy, env, evaluating=True)
        if reason is None:
            raise
        raise TypeError(reason) from error


def modules_of(policy: Any) -> Iterable[nn.Module]:
    """Return the modules of a policy; none of one that is no module."""
    return policy.modules() if isinstance(policy, nn.Module) else ()


def reads_masks(policy: Any) -> bool:
    """Return whether a policy reads masks of actions: a random one, or one that names them."""
    names = getattr(policy, "in_keys", None) or parameters_of(getattr(policy, "forward", policy))
    return policy is None or isinstance(policy, RandomPolicy) or ACTION_MASK in names


def draws_at_starts(policy: Any) -> bool:
    """Return whether the env must draw for a policy where an episode starts, in its slot alone."""
    return any(isinstance(module, ConsistentDropoutModule) for module in modules_of(policy))


def device_of(policy: Any, named: torch.device | str | None) -> torch.device:
    """Return the device that a policy runs on, with its index; ``named`` is in the settings."""
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    devices = [with_index(tensor.device) for tensor in (*module.parameters(), *module.buffers())]
    if named is None:
        return devices[0] if devices else with_index(torch.empty(0).device)
    device = with_index(check.device(named))
    if devices and device not in devices:
        raise ValueError(
            f"expected a policy on {device}, as device says, got one on "
            f"{', '.join(sorted({*map(str, devices)}))}; move it: policy.to({str(device)!r})"
        )
    return device


@contextmanager
def at_batch_size(policy: Any, env: EnvBase, size: int) -> Iterator[None]:
    """Let modules that hold an action spec, to draw or to project, take a batch of this size."""
    bound = [m for m in modules_of(policy) if isinstance(m, _DRAWING) or only_projects(m)]
    before = [(module, exploration_spec(module)) for module in bound]
    for module, spec in before:
        if not isinstance(module, _DRAWING):
            set_exploration_spec(module, _of_one_row(spec, env.full_action_spec_unbatched))
            continue
        key = module.action_key
        spec = env.full_action_spec_unbatched[key]
        spec = spec.expand(size, *spec.shape).to(next(module.buffers()).device)
        set_exploration_spec(module, Composite({key: spec}, shape=[size]))
    try:
        yield
    finally:
        for module, spec in before:
            set_exploration_spec(module, spec)


def _of_one_row(spec: Composite, actions: Composite) -> Composite:
    """A module's spec, with its actions' specs for one row, whose bounds any batch broadcasts."""
    leaves = dict(spec.items(True, True))
    for key, action in actions.items(True, True):
        leaf = leaves.get(key)
        if leaf is not None and leaf.ndim > action.ndim:
            leaves[key] = leaf[(0,) * (leaf.ndim - action.ndim)]
    return Composite(leaves)


@contextmanager
def two_readings(policy: Any, env: EnvBase) -> Iterator[None]:
    """Name the other reading of a function that fails as one of tensors, by its argument's name."""
    try:
        yield
    except Exception as error:
        names = [*parameters_of(policy)] if isfunction(policy) or ismethod(policy) else []
        if len(names) == 1 and names[0] in env.observation_keys:
            error.add_note(
                f"its argument is named like the env's entry {names[0]!r}, so that it was called "
                "with a batch of tensors; if it takes one NumPy observation: "
                "tdcollect.policies.from_function(policy)"
            )
        raise
