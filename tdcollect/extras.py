"""Packages of extras, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

_WANTED = {
    "pandas": "pandas",
    "imageio_ffmpeg": "'tdcollect[video]'",
    "stable_baselines3": "stable-baselines3",
    "ray": "'tdcollect[ray]'",
}


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
        wanted = _WANTED.get(package, "'tdcollect[evaluate]'")
        raise ModuleNotFoundError(
            f"{what} needs the {package} package: pip install {wanted}", name=package
        ) from error
