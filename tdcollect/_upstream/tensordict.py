"""Private names of tensordict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.utils import _encode_key_for_filesystem as encode_key_for_filesystem

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
    "draw_of",
    "draws_sample",
    "encode_key_for_filesystem",
    "get_options",
    "has_generator",
    "keyword_names",
    "modules_in_order",
    "selects_output",
]
