"""Code by name: ``module:name`` and ``path/to/file.py:name``; without torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tdcollect import check, cleanup
from tdcollect.files import existing


def is_named(text: str) -> bool:
    """Return whether a text is ``module:name``; the id ``ale_py:ALE/Pong-v5`` is not."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and re.fullmatch(r"[^\W\d][\w.]*", name) is not None


def check_named(text: str, directory: Path) -> tuple[str, str]:
    """Return file or module, and the name in it, that a text names; nothing is imported.

    Raises:
        ValueError: for a text of another form.
        FileNotFoundError, ModuleNotFoundError: if there is no such file, or no such package.
    """
    where, _, name = text.rpartition(":")
    if not is_named(text) or not (where.endswith(".py") or all(where.split("."))):
        raise ValueError(
            f"expected module:name or path/to/file.py:name, got {text!r} (for example "
            "examples/policies.py:lean)"
        )
    top = where.partition(".")[0]
    if where.endswith(".py"):
        existing(directory / where, "a Python file")
    elif not (top in sys.modules or find_spec(top) or PathFinder.find_spec(top, [str(directory)])):
        raise ModuleNotFoundError(
            f"there is no module {top} in {directory} or where Python looks; name a module, or a "
            "file by its path with .py at the end",
            name=top,
        )
    return where, name


def load_named(text: str, directory: Path, look: bool = True) -> Any:
    """Import the object that a text names.

    Args:
        text: ``module:name`` or ``path/to/file.py:name``; the name may have dots in it.
        directory: the directory that relative paths start from.
        look: look for modules in the directory first; else only on Python's path.

    Raises:
        ValueError: for a text of another form.
        FileNotFoundError, ModuleNotFoundError, AttributeError: if there is no such object.
    """
    where, name = check_named(text, directory)
    thing: Any
    if where.endswith(".py"):
        thing = _module_of_file((directory / where).resolve())
    else:
        thing = _module(where, directory if look else None)
    for part in name.split("."):
        if not hasattr(thing, part):
            raise AttributeError(f"expected {where} to have {name!r}, which it has not")
        thing = getattr(thing, part)
    return thing


def called(item: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the keyword arguments of a function that is named."""
    name: Any = item
    kwargs: Any = {}
    if isinstance(item, Mapping):
        check.only_keys(item, ("call", "kwargs"), repr(item))
        name, kwargs = item.get("call"), item.get("kwargs", {})
    if not isinstance(name, str) or not is_named(name):
        raise ValueError(
            f"expected module:name or path/to/file.py:name, alone or as {{'call': 'module:name', "
            f"'kwargs': {{...}}}}, got {item!r}"
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(f"expected kwargs to be keyword arguments, got {kwargs!r} in {item!r}")
    return name, dict(kwargs)


def exits_refused() -> AbstractContextManager[None]:
    """Make an error of the end of the program, which a script that is no module may ask for."""
    advice = "put what a script runs under `if __name__ == '__main__':`"
    return cleanup.exits_refused("the code that was named", advice)


def _module(name: str, directory: Path | None) -> ModuleType:
    if directory is not None:
        _look_in(directory)
    module = importlib.import_module(name)
    if directory is not None:
        _check_imported(name.partition(".")[0], directory)
    return module


def _check_imported(name: str, directory: Path) -> None:
    """Refuse a module of a directory if another one is imported under its name.

    An installed package that a folder there has the name of is meant, and is no other one.
    """
    imported = getattr(sys.modules.get(name), "__file__", None)
    spec = PathFinder.find_spec(name, [str(directory.absolute())])
    own = None if spec is None else spec.origin
    if imported is None or own is None or Path(imported).resolve() == Path(own).resolve():
        return
    if not any(Path(imported).is_relative_to(place) for place in sysconfig.get_paths().values()):
        raise ValueError(
            f"expected {own} for the module {name}, got {imported}, which is imported under that "
            "name already; give one of them another name, or run it in another process"
        )


def _module_of_file(path: Path) -> ModuleType:
    imported = sys.modules.get(path.stem)
    if imported is not None:
        if getattr(imported, "__file__", None) == str(path):
            return imported
        raise ValueError(
            f"the name of {path} is that of a module which is imported already ({path.stem}); "
            "give the file another name"
        )
    _look_in(path.parent)  # for the modules beside it, as Python does for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with cleanup.ended_on_error(lambda: sys.modules.pop(path.stem)):
        spec.loader.exec_module(module)
    return module


def _look_in(directory: Path) -> None:
    place = str(directory.absolute())  # a relative one would follow the working directory
    if place not in sys.path:
        sys.path.insert(0, place)
