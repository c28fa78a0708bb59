"""Packages: this one's names, imported when they are asked for; and the versions of others."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import platform
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KNOWN = {"torch": ("2.8", ""), "torchrl": ("0.14.1", "0.15"), "tensordict": ("0.14.3", "0.16")}
"""The versions that were tested: from the first on, and below the second, if there is one."""
_DECIDING = (
    *("tdcollect", "torch", "tensordict", "torchrl", "gymnasium", "numpy"),
    *("ale-py", "box2d", "dm-control", "envpool", "mujoco", "pettingzoo", "vmas"),  # if installed
    *("gym-aloha", "gym-pusht", "lerobot", "metaworld"),
)
# Of the others, evaluate.
_EXTRAS = {"imageio_ffmpeg": "video", "envpool": "envpool", "ray": "ray"}
_PACKAGES = ("jax", "lerobot", "pandas", "pettingzoo", "stable_baselines3")  # of no extra


def unmet() -> str:
    """Return what is missing or too old of what collecting needs; empty if nothing is."""
    for name, (oldest, _) in KNOWN.items():
        version = _installed(name) if find_spec(name) else None
        if version is None or _release(version) < _release(oldest):
            return (
                f"expected {name} from {oldest} on, got {version or 'none'}; do: pip install "
                + " ".join(f"'{name}>={oldest}'" for name, (oldest, _) in KNOWN.items())
                + " (ledgers and reports are read without them)"
            )
    return ""


def untested() -> str:
    """Return the packages whose version is newer than all that were tested; empty if none is."""
    installed = {name: _installed(name) or "0" for name in KNOWN}
    return " and ".join(
        f"{name} {version}"
        for name, version in installed.items()
        if (end := KNOWN[name][1]) and _release(version) >= _release(end)
    )


def check_posix(what: str, instead: str) -> None:
    """Raise NotImplementedError where the system lacks forks and locks of files, as Windows does.

    ``what`` needs them; its text begins the error, and what to do ``instead`` ends it.
    """
    if not hasattr(os, "fork") or find_spec("fcntl") is None:
        raise NotImplementedError(
            f"{what} a POSIX system such as Linux, got {sys.platform}; {instead}"
        )


def own_version() -> str:
    """Return the version of tdcollect, also of a checkout that is not installed."""
    version = _installed("tdcollect")
    project = Path(__file__).parent.parent / "pyproject.toml"
    if version is None and project.is_file():
        version = str(tomllib.loads(project.read_text())["project"]["version"])
    return version or "unknown"


@functools.cache  # reading them takes longer than a short episode
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that may change an episode."""
    installed = {"python": platform.python_version()} | {n: _installed(n) for n in _DECIDING}
    return {name: version for name, version in installed.items() if version is not None}


def _installed(name: str) -> str | None:
    for title in (name, f"{name}-nightly"):  # builds of TorchRL's main have packages of their own
        try:
            return metadata.version(title)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 14, 1) of "0.14.1+cpu" and of "0.14.1.dev7"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def extra_module(name: str, what: str) -> Any:
    """Import a module of an optional package that a feature (``what``) needs.

    ModuleNotFoundError, with the command that installs it, if it is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(install_text(package, what), name=package) from error


def install_text(package: str, what: str) -> str:
    """Return the command that installs an optional package; there is no release of tdcollect."""
    wanted = package.replace("_", "-")
    if package not in _PACKAGES:
        extra = _EXTRAS.get(package, "evaluate")
        wanted = f"'.[{extra}]' in a clone of tdcollect"
    return f"{what} needs the {package} package: pip install {wanted}"


def lazy(
    package: str, inner: str = "", modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports its names late.

    The names are those that its source imports for type checkers, ``name as name`` on a line each;
    ``inner`` ones are not public, and ``modules`` are attributes themselves, separated by spaces.
    """
    source = (pkgutil.get_data(package, "__init__.py") or b"").decode()  # from a zip file, too
    imports = re.findall(r"^    from (\S+) import (?:\(\s+)?(\w+) as \2\b", source, re.MULTILINE)
    places = {name: module for module, name in imports}
    shown = {*places, *modules.split()}

    def get(name: str) -> Any:
        if name not in shown:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(places.get(name, f"{package}.{name}"))
        except ImportError as error:
            if why := unmet():
                raise ImportError(f"{package}.{name}: {why}", name=error.name) from error
            raise
        value = getattr(module, name) if name in places else module
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *shown})

    return get, listed, sorted(places.keys() - set(inner.split()))
