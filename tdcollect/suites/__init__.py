"""Suites: many policies on many tasks, with several training runs of each policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdcollect.suites.aggregates import aggregate
    from tdcollect.suites.cells import Cell
    from tdcollect.suites.definition import Policy, Score, Task
    from tdcollect.suites.estimates import Aggregates, Estimate, Profile
    from tdcollect.suites.exports import (
        write_leaderboard_csv,
        write_leaderboard_markdown,
        write_scores_npz,
    )
    from tdcollect.suites.results import CellResult, SuiteResults
    from tdcollect.suites.suite import Suite
    from tdcollect.suites.validation import Validation

__all__ = [
    "Aggregates",
    "Cell",
    "CellResult",
    "Estimate",
    "Policy",
    "Profile",
    "Score",
    "Suite",
    "SuiteResults",
    "Task",
    "Validation",
    "aggregate",
    "write_leaderboard_csv",
    "write_leaderboard_markdown",
    "write_scores_npz",
]

# Imported when they are asked for: to read a suite takes no torch.
_MODULES = {
    "Aggregates": "estimates",
    "Cell": "cells",
    "CellResult": "results",
    "Estimate": "estimates",
    "Policy": "definition",
    "Profile": "estimates",
    "Score": "definition",
    "Suite": "suite",
    "SuiteResults": "results",
    "Task": "definition",
    "Validation": "validation",
    "aggregate": "aggregates",
    "write_leaderboard_csv": "exports",
    "write_leaderboard_markdown": "exports",
    "write_scores_npz": "exports",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tdcollect.suites' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
