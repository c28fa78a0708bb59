"""Settings of a process that change what code does in it: for its workers, and as JSON."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

_BACKENDS = (
    *("mkldnn.enabled", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic"),
    *(f"mkldnn.{kind}.fp32_precision" for kind in ("matmul", "conv", "rnn")),
    *(f"{name}.fp32_precision" for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")),
)
"""Settings below ``torch.backends``; torch before 2.9 lacks some."""


class Surroundings(NamedTuple):
    """The surroundings of a process, which its workers share; without torch where it has none."""

    directory: str | None  # None if it is gone
    path: tuple[str, ...]
    filters: tuple[tuple[Any, ...], ...]  # of warnings, with the modules and names of categories
    errors: dict[str, Any]  # np.geterr()
    callback: bytes  # np.geterrcall(), pickled
    flushes: bool  # denormal floats are flushed to zero
    torch: dict[str, Any]  # settings of torch by name, where it is imported

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process; ``flushes`` and ``errors`` are of this thread."""
        try:
            directory = os.getcwd()
        except OSError:
            directory = None
        return cls(
            directory,
            tuple(entry for entry in sys.path if isinstance(entry, str)),
            _filters(),
            dict(np.geterr()),
            cloudpickle.dumps(np.geterrcall()),
            _flushes(),
            _of_torch(sys.modules.get("torch")),
        )

    def enter(self) -> None:
        """Make them those of this process, which looks for modules in its own places too.

        To flush denormals takes torch, which is imported for it.
        """
        if self.directory is not None:
            with suppress(OSError):  # another machine may lack it
                os.chdir(self.directory)
        sys.path[:] = [*self.path, *(entry for entry in sys.path if entry not in self.path)]
        if _filters() != self.filters:
            warnings.resetwarnings()  # the interpreter forgets what it has warned of, too
            filters: Any = warnings.filters
            filters[:] = [(*one[:2], _categories(one[2]), *one[3:]) for one in self.filters]
        np.seterr(**self.errors)
        np.seterrcall(cloudpickle.loads(self.callback))
        if self.flushes != _flushes():
            import torch

            torch.set_flush_denormal(self.flushes)
        self.enter_torch()

    def enter_torch(self) -> None:
        """Set the settings of torch, if it is imported."""
        torch: Any = sys.modules.get("torch")
        if torch is None or self.torch == _of_torch(torch):
            return
        for name, value in self.torch.items():
            if name not in _BACKENDS:
                value = getattr(torch, value) if name == "default_dtype" else value
                getattr(torch, f"set_{name}")(value)
            elif attrgetter(name)(torch.backends) != value:
                owner, _, setting = name.rpartition(".")
                setattr(attrgetter(owner)(torch.backends), setting, value)


def settings_of_process() -> dict[str, Any]:
    """Return the settings of this process that may change an episode on a CPU, as plain JSON."""
    settings = _of_torch(sys.modules["torch"])
    errors = {
        ":".join((_text(message), "|".join(map(".".join, named)), _text(module), str(line)))
        for action, message, named, module, line in _filters()
        if action == "error"
    }
    precision = settings.get("mkldnn.matmul.fp32_precision")
    return {
        "numpy_errors": dict(np.geterr()),
        "warnings_as_errors": sorted(errors),
        "flushed_denormals": _flushes(),
        "default_dtype": settings["default_dtype"],
        "deterministic_algorithms": settings["deterministic_debug_mode"],
        "matmul_precision": settings.get("float32_matmul_precision", precision),
        "onednn": settings["mkldnn.enabled"],
    }


def _flushes() -> bool:
    """Return whether denormals are flushed, by a product: torch tells only if it sets them."""
    return sys.float_info.min * 0.5 == 0.0


def _of_torch(torch: Any) -> dict[str, Any]:
    """Return the settings of torch, by the names of their setters or of their backends."""
    if torch is None:
        return {}
    settings = {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
    }
    with suppress(RuntimeError):  # backends have precisions of their own
        settings["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    for name in _BACKENDS:
        with suppress(AttributeError):
            settings[name] = attrgetter(name)(torch.backends)
    return settings


def _filters() -> tuple[tuple[Any, ...], ...]:
    filters = []
    for action, message, category, module, line in warnings.filters:
        kinds = category if isinstance(category, tuple) else (category,)
        named = tuple((kind.__module__, kind.__qualname__) for kind in kinds)
        filters.append((action, message, named, module, line))
    return tuple(filters)


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def _categories(named: Iterable[tuple[str, str]]) -> Any:
    """Return classes of warnings by name, or others that stand for them until they are imported."""
    kinds: list[Any] = []
    for module, name in named:
        kind = getattr(sys.modules.get(module), name, None)
        known = isinstance(kind, type)
        kinds.append(kind if known else _Named(name, (Warning,), {"__module__": module}))
    return kinds[0] if len(kinds) == 1 else tuple(kinds)


class _Named(type):
    """A class whose subclasses are told by its name."""

    def __subclasscheck__(cls, other: type) -> bool:
        named = cls.__module__, cls.__qualname__
        return any((kind.__module__, kind.__qualname__) == named for kind in other.__mro__)
