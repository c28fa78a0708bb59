"""Suites: many policies on many tasks, with several training runs of each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy

if TYPE_CHECKING:
    from tdcollect.suites.aggregates import Aggregates, aggregate
    from tdcollect.suites.report import export
    from tdcollect.suites.results import SuiteResults
    from tdcollect.suites.suite import Suite
    from tdcollect.suites.tables import Policy, Score, Task

__all__ = [
    "Aggregates",
    "Policy",
    "Score",
    "Suite",
    "SuiteResults",
    "Task",
    "aggregate",
    "export",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "aggregates": "Aggregates aggregate",
        "report": "export",
        "results": "SuiteResults",
        "suite": "Suite",
        "tables": "Policy Score Task",
    },
)
