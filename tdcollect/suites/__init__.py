"""Suites: many policies on many tasks, with several training runs of each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.suites.aggregates import Aggregates as Aggregates
    from tdcollect.suites.aggregates import aggregate as aggregate
    from tdcollect.suites.report import export as export
    from tdcollect.suites.results import SuiteResults as SuiteResults
    from tdcollect.suites.suite import Suite as Suite
    from tdcollect.suites.tables import Policy as Policy
    from tdcollect.suites.tables import Score as Score
    from tdcollect.suites.tables import Task as Task

__getattr__, __dir__, __all__ = lazy(__name__, modules="curves")
