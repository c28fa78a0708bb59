"""Packages of extras, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

_EXTRAS = {"envpool": "envpool", "imageio_ffmpeg": "video", "ray": "ray"}  # of the others, evaluate
_PACKAGES = {"pandas": "pandas", "stable_baselines3": "stable-baselines3"}  # of no extra


def extra_module(name: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        name: the module, such as ``"scipy.stats"``.
        what: the feature that needs it, as the first words of the error.

    Raises:
        ModuleNotFoundError: if the package is not installed, with the command that installs it.
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
    wanted = _PACKAGES.get(package)
    if wanted is None:
        extra = _EXTRAS.get(package, "evaluate")
        wanted = f"'.[{extra}]' in a clone of tdcollect"
    return f"{what} needs the {package} package: pip install {wanted}"
