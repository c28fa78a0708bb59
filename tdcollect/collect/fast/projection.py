"""Projections of actions on their specs, as the specs do them, and noise that ends in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec
from torchrl.data.tensor_specs import BoundedContinuous
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import AdditiveGaussianModule

from tdcollect._upstream.modules import project_outputs
from tdcollect.collect.policies import Call
from tdcollect.collect.step_dict import Key, StepDict

Projection = Callable[[Tensor], Tensor]


def projection(spec: TensorSpec) -> Projection:
    """The projection that ``spec.project`` makes; the bounds of floats are read once."""
    if type(spec) not in (Bounded, BoundedContinuous) or not spec.dtype.is_floating_point:
        project: Projection = spec.project
        return project
    shape, dtype, device, dims = spec.shape, spec.dtype, spec.device, len(spec.shape)
    low, high = spec.space.low, spec.space.high

    def clamped(value: Tensor) -> Tensor:
        fits = value.ndim >= dims and value.shape[value.ndim - dims :] == shape
        if not fits or value.dtype != dtype or value.device != device:
            return spec.project(value)
        found = torch.clamp(value, low, high)
        # The value itself within the bounds, with the sign of its zeros.
        return value if torch.equal(found, value) else found

    return clamped


class SafeOutputs:
    """The hook of modules made with ``safe=True``: projects their outputs; a :data:`Call`.

    Args:
        module: the module; its spec may change meanwhile.
    """

    def __init__(self, module: Any):
        self._module = module
        self._spec: Any = None
        self._projections: list[tuple[Key, Projection]] = []

    def __call__(self, step: StepDict) -> None:
        """Project the entries of a step that the spec names."""
        spec = self._module.spec
        if spec is not self._spec:
            if type(spec) is not Composite:
                project_outputs(self._module, step, step)
                return
            leaves = [(key, spec[key]) for key in spec.keys(True, True)]
            self._projections = [
                (key, projection(leaf)) for key, leaf in leaves if leaf is not None
            ]
            self._spec = spec
        for key, project in self._projections:
            value = step.get(key)
            if value is not None:
                step[key] = project(value)


def gaussian_call(module: AdditiveGaussianModule) -> Call:
    """A call that adds a module's noise, as its ``forward`` does."""
    key: Key = module.action_key
    seen: Any = None
    project: Projection

    def run(step: StepDict) -> None:
        nonlocal seen, project
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return
        spec = module.spec
        if spec is not seen:
            project, seen = projection(spec[key]), spec
        action = step[key]
        mean, std = (
            value if value.is_floating_point() else value.to(torch.get_default_dtype())
            for value in (module.mean.expand(action.shape), module.std.expand(action.shape))
        )
        noise = torch.normal(mean=mean, std=std)
        if noise.device != action.device:
            noise = noise.to(action.device)
        step[key] = project(action + noise * module.sigma)

    return run
