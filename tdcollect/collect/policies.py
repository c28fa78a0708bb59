"""Policies as the loops call them: on StepDicts, by way of TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.modules.tensordict_module import SafeProbabilisticModule, SafeSequential
from torchrl.modules.tensordict_module.probabilistic import SafeProbabilisticTensorDictSequential

from tdcollect._upstream.modules import (
    MODULE_METHODS,
    PROBABILISTIC_METHODS,
    SEQUENTIAL_METHODS,
)
from tdcollect.collect.arguments import missing_entries, no_tensordict
from tdcollect.collect.step_dict import Key, StepDict, not_taken_apart
from tdcollect.envs.spaces import nested

Call = Callable[[StepDict], None]
"""Reads and writes entries of a StepDict."""

ON_TENSORDICT = "on a TensorDict"
"""The beginning of the line on a module that is called as it is."""


class Noise(Protocol):
    """A source of random numbers, for draws without a distribution object."""

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the exponential distribution of rate 1, of the shape and dtype given."""

    def standard_normal(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the standard normal distribution, of the shape and dtype given."""


class GlobalNoise:
    """Random numbers of torch's global generator; a :class:`Noise`."""

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the exponential distribution of rate 1, of the shape and dtype given."""
        return torch.empty_like(like).exponential_(1)

    def standard_normal(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the standard normal distribution, of the shape and dtype given."""
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_()


class RandomActions:
    """Random actions of an action spec, as a policy.

    Args:
        spec: of the actions, with the batch size in front; it may change meanwhile (masks).
    """

    def __init__(self, spec: Composite):
        self.spec = spec

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write actions."""
        return tensordict.update(self.spec.rand())


def draws_from_spec(env: EnvBase) -> bool:
    """Tell whether ``env.rand_action`` is TorchRL's, which draws from the action spec."""
    envs = [env]
    while isinstance(envs[-1], TransformedEnv):
        envs.append(envs[-1].base_env)
    known = (EnvBase.rand_action, TransformedEnv.rand_action)
    return all(type(env).rand_action in known and "rand_action" not in env.__dict__ for env in envs)


def is_masked(spec: Composite) -> bool:
    """Tell whether an action spec has a mask of the legal actions now."""
    return any(getattr(leaf, "mask", None) is not None for leaf in spec.values(True, True))


class Policy(Protocol):
    """A policy on StepDicts.

    Attributes:
        calls: its parts, in order; each reads and writes entries of the step.
        sampling: the calls that draw from a :class:`Noise`.
        described: a line for each call: its name, and how it runs.
        straight: whether no module is called on a TensorDict.
        writes: the entries that every call of the policy writes.
        reads_first: the entries that it may read before it has written them.
    """

    calls: list[Call]
    sampling: set[Call]
    described: list[tuple[str, str]]
    straight: bool
    writes: set[Key]
    reads_first: set[Key]

    def __call__(self, step: StepDict) -> None:
        """Run the policy; its outputs join the step."""

    def check(self) -> None:
        """Raise where a draw had parameters that its distribution refuses."""


class TensorDictPolicy:
    """A policy that is called as it is, on a TensorDict; a :class:`Policy`.

    Args:
        policy: the callable that a collector would call on a TensorDict.
        given: the entries that the first call finds.
        batch_size: the env's.
        device: the device of the policy's TensorDict; its outputs come back to the step's own.
        reason: why it is called as it is.
        select: the outputs of a compiled policy; None for others.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        given: StepDict,
        batch_size: torch.Size,
        device: torch.device | None,
        reason: str,
        select: Sequence[Key] | None = None,
    ):
        self._call = call_on_tensordict(policy, batch_size, device, select)
        self._device = device
        self.calls: list[Call] = [self._run]
        self.sampling: set[Call] = set()
        self.described = [(label(policy), f"{ON_TENSORDICT}: {reason}")]
        self.straight = False
        self.writes: set[Key] = set()
        self.reads_first: set[Key] = set(given)

    def __call__(self, step: StepDict) -> None:
        """Run the policy; its outputs join the step."""
        self._run(step)

    def _run(self, step: StepDict) -> None:
        home = next((value.device for value in step.values()), self._device)
        if self._device is None or home == self._device:
            self._call(step)
            return
        given = StepDict((key, value.to(self._device)) for key, value in step.items())
        before = dict(given)
        self._call(given)
        for key, value in given.items():
            if before.get(key) is not value:
                step[key] = value.to(home)

    def check(self) -> None:
        """Do nothing: distributions check their own parameters."""


def call_on_tensordict(
    module: Callable[..., Any],
    batch_size: torch.Size,
    device: torch.device | None,
    select: Sequence[Key] | None = None,
) -> Call:
    """A call of a module as it is, on a TensorDict.

    Args:
        module: called with a TensorDict, returns one.
        batch_size: of the TensorDict.
        device: that the TensorDict names, if any.
        select: the outputs of a compiled module; None for others.
    """

    def call(step: StepDict) -> None:
        given = nested(step.items(), batch_size, device)
        if select is not None:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            out = module(given)
        except KeyError as error:
            missing = missing_entries(module, step)
            raise error if missing is None else KeyError(missing) from error
        if select is not None:
            # A graph writes its outputs into the same memory each time.
            out = out.select(*select, strict=False).clone()
        try:
            written = out.items(True, True, is_leaf=not_taken_apart)
        except (AttributeError, TypeError) as error:
            raise TypeError(no_tensordict(out)) from error
        for key, value in written:
            if step.get(key) is not value:
                step[key] = value

    return call


def label(module: Any) -> str:
    """The name of a module, with the entries that it reads and writes."""
    name = (
        type(module).__name__
        if isinstance(module, nn.Module)
        else getattr(module, "__name__", type(module).__name__)
    )
    # A class with a __call__ of its own need not say what it reads and writes.
    ins, outs = getattr(module, "in_keys", None), getattr(module, "out_keys", None)
    if not isinstance(module, TensorDictModuleBase) or ins is None or outs is None:
        return name
    return f"{name}({names(ins)} -> {names(outs)})"


def names(entries: Iterable[Key]) -> str:
    """The names of entries, in one line."""
    return ", ".join(key if isinstance(key, str) else "/".join(key) for key in entries)


def unknown_class(module: Any) -> str | None:
    """The reason why a module's class is not known to the letter; None where it is."""
    if not isinstance(module, TensorDictModuleBase):
        return "is no TensorDict module"
    for base, methods in _KNOWN:
        if isinstance(module, base):
            changed = [name for name in methods if _method(module, name) not in methods[name]]
            return f"has a {changed[0]} of its own" if changed else None
    return "is of a class that is not known here"


def _method(module: nn.Module, name: str) -> Any:
    if name in module.__dict__:
        return module.__dict__[name]
    return getattr(type(module), name, None)


def _methods(*classes: type, names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: [getattr(cls, name, None) for cls in classes] for name in names}


# The classes that are known, and the methods that make them so.
_KNOWN: list[tuple[Any, dict[str, list[Any]]]] = [
    (
        TensorDictSequential,
        _methods(
            TensorDictSequential,
            ProbabilisticTensorDictSequential,
            SafeSequential,
            SafeProbabilisticTensorDictSequential,
            names=SEQUENTIAL_METHODS,
        ),
    ),
    (
        ProbabilisticTensorDictModule,
        _methods(
            ProbabilisticTensorDictModule,
            SafeProbabilisticModule,
            names=PROBABILISTIC_METHODS,
        ),
    ),
    (
        TensorDictModule,
        _methods(
            TensorDictModule,
            names=MODULE_METHODS,
        ),
    ),
]
