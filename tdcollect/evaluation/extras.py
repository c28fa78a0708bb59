"""Packages of extras, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

_WANTED = {
    "pandas": "pandas",
    "imageio_ffmpeg": "'tdcollect[video]'",
    "stable_baselines3": "stable-baselines3",
}


def extra_module(name: str, what: str) -> Any:
    """The module ``name``, or an error that says what needs it and how to install it.

    Args:
        name: the module, ``"scipy.stats"`` say.
        what: what needs it, as the error's first words.

    Raises:
        ModuleNotFoundError: where the package is not installed.
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
