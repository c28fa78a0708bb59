"""Private names of torch's and tensordict's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.utils import _encode_key_for_filesystem as encode_key_for_filesystem
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.modules.tensordict_module.common import _forward_hook_safe_action as project_outputs


def validates_arguments() -> bool:
    """Tell whether distributions check their arguments by default; importing TorchRL stops that."""
    return bool(Distribution._validate_args)


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a call of a module also calls hooks: its own, or those of all modules."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def only_projects(module: nn.Module) -> bool:
    """Tell whether the hooks of a module are the one of ``safe=True``, :func:`project_outputs`."""
    return (
        list(module._forward_hooks.values()) == [project_outputs]
        and not module._forward_hooks_with_kwargs
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not has_hooks(_NO_HOOKS)
    )


_NO_HOOKS = nn.Identity()


def has_forward_hooks(module: nn.Module) -> bool:
    """Tell whether a call of a module also calls forward hooks of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``module.compile()`` has replaced what a call of the module runs."""
    return module._compiled_call_impl is not None


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The module's own dict of parameters by name: later changes show in it."""
    return module._parameters


def schema_of(operator: Any) -> Any:
    """The schema of an operator: its ``name``, and its ``arguments``."""
    return operator._schema


def unchecked_tensordict(
    entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """A TensorDict of tensors that are known to fit its batch size and device.

    Args:
        entries: by name; those of nested TensorDicts in dicts of their own.
        batch_size: of all of them.
        device: of all of them.
    """
    return TensorDict._new_unsafe(entries, batch_size=batch_size, device=device)


MEMMAP_TYPE = "_type"
"""The key of ``meta.json`` that names the class of a TensorDict that is saved as memory maps."""

SEQUENTIAL_METHODS = (
    "forward",
    "_run_module",
    "_module_iter",
    "get_dist_params",
    "det_part",
    "_last_module",
    "__call__",
)
"""The methods that decide what a call of a ``TensorDictSequential`` does."""

PROBABILISTIC_METHODS = ("forward", "get_dist", "_dist_sample", "__call__")
"""The methods that decide what a call of a ``ProbabilisticTensorDictModule`` does."""

MODULE_METHODS = ("forward", "_call_module", "_write_to_tensordict", "__call__")
"""The methods that decide what a call of a ``TensorDictModule`` does."""


def modules_in_order(sequence: TensorDictSequential) -> Iterator[Any]:
    """The modules of a sequence, in the order in which it calls them."""
    return sequence._module_iter()


def selects_output(sequence: TensorDictSequential) -> bool:
    """Tell whether a sequence returns some of its entries only."""
    return bool(sequence._select_before_return)


def draws_sample(sequence: ProbabilisticTensorDictSequential) -> bool:
    """Tell whether a probabilistic sequence draws from its distribution."""
    return bool(sequence._requires_sample)


def has_generator(module: ProbabilisticTensorDictModule) -> bool:
    """Tell whether a module draws from a generator of its own, or from one in an entry."""
    return module._generator is not None or module._generator_key is not None


def draw_of(module: ProbabilisticTensorDictModule) -> Callable[..., Any]:
    """The method that draws from a distribution: ``draw(dist, interaction_type=...)``."""
    return module._dist_sample


def get_options(module: TensorDictModule) -> dict[str, Any]:
    """The arguments with which a module calls ``TensorDict.get`` for its inputs."""
    return module._get_kwargs


def keyword_names(module: TensorDictModule) -> list[str] | None:
    """The keywords under which a module passes its inputs on; None if by position."""
    return module._kwargs


__all__ = [
    "MEMMAP_TYPE",
    "MODULE_METHODS",
    "PROBABILISTIC_METHODS",
    "SEQUENTIAL_METHODS",
    "TorchDispatchMode",
    "draw_of",
    "draws_sample",
    "encode_key_for_filesystem",
    "get_options",
    "has_forward_hooks",
    "has_generator",
    "has_hooks",
    "is_compiled",
    "keyword_names",
    "modules_in_order",
    "only_projects",
    "parameters_of",
    "project_outputs",
    "schema_of",
    "selects_output",
    "unchecked_tensordict",
    "validates_arguments",
]
