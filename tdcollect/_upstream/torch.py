"""Private names of torch."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode


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


__all__ = [
    "TorchDispatchMode",
    "has_forward_hooks",
    "has_hooks",
    "is_compiled",
    "parameters_of",
    "schema_of",
    "validates_arguments",
]
