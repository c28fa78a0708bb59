"""The oracle: run one program with two collectors and name the first thing that differs.

A *script* drives a collector and yields what it observes: batches, tensors, numbers, dicts of
them. :func:`run` keeps a copy of everything yielded, with the global random states at that moment,
so a difference is placed where it arises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensorclass,
)
from torchrl.collectors import Collector as ParentCollector

from tdcollect import Collector

Script = Callable[[Any], Iterable[Any]]

UPSTREAM = "ignore:::(torchrl|tensordict|torch|gymnasium)"
"""Filter for the warnings that TorchRL gives with either collector."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def batches(count: int = 3) -> Script:
    """A script that iterates: each batch, then the state of the collector and its policy."""

    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        for _ in range(count):
            yield next(stream)
        yield {"collector": parents_state(collector), "modes": _modes(collector.policy)}

    return script


def parents_state(collector: Any) -> dict[str, Any]:
    """A state dict without the entries that tdcollect adds to the parent's."""
    added = ("statistics", "random", "envs")
    return {key: value for key, value in collector.state_dict().items() if key not in added}


def _modes(policy: Any) -> list[bool]:
    modules = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    return [module.training for module in modules]


def run(
    collector_class: Callable[..., Any],
    make_env: Callable[[], Any],
    make_policy: Callable[[Any], Any],
    script: Script,
    make_options: Callable[[], Mapping[str, Any]] = dict,
    catch: bool = False,
) -> list[tuple[str, Any, Any]]:
    """The observations of ``script`` on a new collector: (where, copy of the value, random states).

    With ``catch``, an error is the last of the observations.
    """
    seed_everything(0)
    env = make_env()
    env.set_seed(7)
    policy = make_policy(env)
    options = {"frames_per_batch": 10 * env.batch_size.numel(), **make_options()}
    seed_everything(1)
    record: list[tuple[str, Any, Any]] = []
    try:
        collector = collector_class(env, policy, **options)
        record.append(("construction", None, random_states()))
        for i, value in enumerate(script(collector)):
            record.append((f"yield {i}", copy_of(value), random_states()))
        collector.shutdown(raise_on_error=False)
    except Exception as error:
        if not catch:
            raise
        record.append(("error", [type(error).__name__, str(error)], random_states()))
    return record


def check_same(
    make_env: Callable[[], Any],
    make_policy: Callable[[Any], Any],
    script: Script | None = None,
    make_options: Callable[[], Mapping[str, Any]] = dict,
    catch: bool = False,
) -> None:
    """Raise unless ``script`` observes the same of our collector and the parent's, bit for bit."""
    script = batches(2) if script is None else script
    theirs = run(ParentCollector, make_env, make_policy, script, make_options, catch)
    ours = run(Collector, make_env, make_policy, script, make_options, catch)
    assert_same_record(ours, theirs)


def assert_same_record(
    ours: Sequence[tuple[str, Any, Any]], theirs: Sequence[tuple[str, Any, Any]]
) -> None:
    """Raise AssertionError at the first observation that differs."""
    for (where, value, state), (place, expected, expected_state) in zip(ours, theirs, strict=False):
        assert_same(where, place, "progress")
        assert_same(value, expected, where)
        assert_same(state, expected_state, f"random state after {where}")
    if len(ours) != len(theirs):
        raise AssertionError(f"{len(ours) - 1} yields, the parent's has {len(theirs) - 1}")


def seed_everything(seed: int) -> None:
    """Set the global random states of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  the global state is what is compared
    random.seed(seed)


def random_states() -> dict[str, Any]:
    """The global random states of torch, numpy and Python."""
    _, numpy_keys, position, *_ = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "numpy": (numpy_keys.tolist(), position),
        "python": random.getstate(),
    }


def copy_of(value: Any) -> Any:
    """A deep copy that later collection cannot change, with the same memory layout."""
    if isinstance(value, TensorDictBase):
        return value.clone().lock_() if value.is_locked else value.clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copy_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_of(item) for item in value]
    return value


def assert_same(ours: Any, theirs: Any, where: str = "value") -> None:
    """Raise AssertionError that names the first entry in which two values differ."""
    found = difference(ours, theirs, where)
    if found is not None:
        raise AssertionError(found)


def difference(ours: Any, theirs: Any, where: str = "value") -> str | None:
    """The first difference between ours and the parent's, in words; None if they are equal."""
    if type(ours) is not type(theirs):
        return f"{where}: type {type(ours).__name__}, the parent's has {type(theirs).__name__}"
    if isinstance(theirs, (NonTensorData, NonTensorStack)):
        return difference(ours.tolist(), theirs.tolist(), where)
    if is_tensorclass(theirs):
        return difference(ours.to_tensordict(), theirs.to_tensordict(), where)
    if isinstance(theirs, LazyStackedTensorDict):
        # Rows may be unlike in shape and keys: compare them one by one.
        return _attributes_difference(
            ours, theirs, where, "batch_size names device stack_dim"
        ) or difference(ours.tensordicts, theirs.tensordicts, f"{where}, lazily stacked")
    if isinstance(theirs, TensorDictBase):
        return _tensordict_difference(ours, theirs, where)
    if isinstance(theirs, torch.Tensor):
        return _tensor_difference(ours, theirs, where)
    if isinstance(theirs, Mapping):
        return _keys_difference(ours, theirs, where) or _first(
            difference(ours[key], theirs[key], f"{where}[{key!r}]") for key in theirs
        )
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: length {len(ours)}, the parent's has {len(theirs)}"
        return _first(
            difference(a, b, f"{where}[{i}]")
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        )
    same = ours == theirs or (ours != ours and theirs != theirs)
    return None if same else f"{where}: {ours!r}, the parent's has {theirs!r}"


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def _attributes_difference(ours: Any, theirs: Any, where: str, names: str) -> str | None:
    for name in names.split():
        a, b = getattr(ours, name), getattr(theirs, name)
        a, b = (a(), b()) if callable(b) else (a, b)
        if a != b:
            return f"{where}: {name} {a}, the parent's has {b}"
    return None


def _keys_difference(ours: Any, theirs: Any, where: str) -> str | None:
    missing = [key for key in theirs.keys() if key not in ours.keys()]  # noqa: SIM118
    extra = [key for key in ours.keys() if key not in theirs.keys()]  # noqa: SIM118
    return f"{where}: lacks {missing}, has beyond the parent's {extra}" if missing + extra else None


def _tensordict_difference(ours: Any, theirs: Any, where: str) -> str | None:
    found = _attributes_difference(ours, theirs, where, "batch_size names device is_locked")
    if found is not None:
        return found
    found = _keys_difference(ours, theirs, where)
    if found is not None:
        return found
    return _first(
        difference(ours.get(key), theirs.get(key), f"{where}[{key!r}]")
        for key in sorted(theirs.keys())
    )


def _tensor_difference(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> str | None:
    names = "dtype shape device layout requires_grad is_shared"
    found = _attributes_difference(ours, theirs, where, names)
    if found is not None or theirs.numel() == 0:
        return found
    if theirs.is_contiguous() and not ours.is_contiguous():
        return f"{where}: is not contiguous, the parent's is"
    unequal = _bits(ours) != _bits(theirs)
    if theirs.is_floating_point():
        unequal &= ~(ours.isnan() & theirs.isnan())
    if not unequal.any():
        return None
    index = unequal.nonzero()[0].tolist()
    return (
        f"{where}: {int(unequal.sum())} of {unequal.numel()} values differ, first at {index}: "
        f"{ours[tuple(index)].item()!r}, the parent's has {theirs[tuple(index)].item()!r}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor
