"""Packages whose names are imported when they are asked for: torch takes seconds to import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: str, names: Mapping[str, str], modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        names: the names that each of its modules has, separated by spaces; a module that begins
            with a dot is beside the package.
        modules: modules that are attributes themselves.
    """
    places = {name: module for module, named in names.items() for name in named.split()}
    shown = {*places, *modules.split()}

    def get(name: str) -> Any:
        if name not in shown:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in places:
            found = getattr(import_module(f".{places[name]}", package), name)
        else:
            found = import_module(f".{name}", package)
        setattr(sys.modules[package], name, found)
        return found

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *shown})

    return get, listed
