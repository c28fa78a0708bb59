"""Modules of TorchRL whose own ``forward``, freed of what dispatches it, runs on StepDicts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchrl.modules import (
    AdditiveGaussianModule,
    ConsistentDropoutModule,
    DistributionalDQNnet,
    DistributionalQValueModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    OrnsteinUhlenbeckProcessModule,
    QValueModule,
    TanhModule,
)

from tdcollect.collect.fast.projection import gaussian_call
from tdcollect.collect.policies import Call
from tdcollect.collect.step_dict import Key, StepDict

Shapes = Mapping[tuple[str, ...], torch.Size]
"""The batch sizes of nested TensorDicts, where they are not those of the outermost."""

OWN_CODE: dict[type, Callable[[Any, StepDict], Any]] = {
    cls: inspect.unwrap(cls.forward)
    for cls in (
        AdditiveGaussianModule,
        ConsistentDropoutModule,
        DistributionalDQNnet,
        DistributionalQValueModule,
        EGreedyModule,
        GRUModule,
        LSTMModule,
        OrnsteinUhlenbeckProcessModule,
        QValueModule,
        TanhModule,
    )
}
"""The modules, each with its ``forward``."""


def why_not_own_code(module: Any) -> str | None:
    """The reason why a module's ``forward`` cannot run on StepDicts; None where it can."""
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if isinstance(module, (LSTMModule, GRUModule)) and module.recurrent_mode:
        return "is in recurrent mode"
    return None


def also_reads(module: Any) -> list[Key]:
    """The entries of the step before that a module reads beside its ``in_keys``."""
    if isinstance(module, OrnsteinUhlenbeckProcessModule):
        return [module.is_init_key, *module.ou.out_keys]
    return []


def own_code_call(
    module: Any, batch_size: torch.Size, device: torch.device | None, shapes: Shapes
) -> Call:
    """A call of a module's own ``forward`` on StepDicts.

    Args:
        module: one of :data:`OWN_CODE`.
        batch_size: the env's.
        device: the device that TensorDicts name, if any.
        shapes: batch sizes of nested TensorDicts.
    """
    forward = OWN_CODE[type(module)]
    if isinstance(module, (GRUModule, LSTMModule)):
        return _recurrent(module, forward, batch_size)
    if isinstance(module, AdditiveGaussianModule) and module.spec is not None:
        return gaussian_call(module)
    action_key = getattr(module, "action_key", None)
    if isinstance(module, OrnsteinUhlenbeckProcessModule):
        action_key = module.ou.key
    if isinstance(action_key, tuple):
        return _nested(module, forward, batch_size, device, action_key, shapes)

    def run(step: StepDict) -> None:
        step.shape, step.device = batch_size, device
        forward(module, step)

    return run


def _recurrent(module: Any, forward: Callable[..., Any], batch_size: torch.Size) -> Call:
    in_keys: list[Key] = list(module.in_keys)

    def run(step: StepDict) -> None:
        # These reshape all that they are given: hand them their inputs alone.
        given = StepDict((key, step[key]) for key in in_keys)
        given.shape = batch_size
        forward(module, given)
        for key in module.out_keys:
            step[key] = given[key]

    return run


def _nested(
    module: Any,
    forward: Callable[..., Any],
    batch_size: torch.Size,
    device: torch.device | None,
    action_key: tuple[str, ...],
    shapes: Shapes,
) -> Call:
    """A call of a module that asks for the TensorDict in which the action lies."""
    above, name = action_key[:-1], action_key[-1]
    # A TensorDict that the policy makes has the batch size of the one in which it lies.
    noted = [shapes[above[:n]] for n in range(len(above), 0, -1) if above[:n] in shapes]
    shape = noted[0] if noted else batch_size

    def run(step: StepDict) -> None:
        value = step[action_key]
        inner = StepDict({name: value})
        inner.shape, inner.device = shape, device
        step.shape, step.device = batch_size, device
        step[above] = inner  # type: ignore[assignment]
        try:
            forward(module, step)
        finally:
            del step[above]
        if inner[name] is not value:
            step[action_key] = inner[name]

    return run
