"""The parts of the package that others find by name: the one place that names the lab."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

COMMANDS = ("tdcollect.cli.commands", "tdcollect.lab.commands")
"""Modules that add commands to the command line when they are imported."""
KINDS = ("tdcollect.lab.race", "tdcollect.lab.results")
"""Modules with ``KINDS`` of directories, which :func:`tdcollect.verify` checks."""


def load(names: Sequence[str]) -> list[ModuleType]:
    """Import modules by name."""
    return [importlib.import_module(name) for name in names]
