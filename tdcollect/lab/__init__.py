"""The lab: questions to finished evaluations, and the pages of the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.lab.aggregates import Aggregates as Aggregates
    from tdcollect.lab.aggregates import aggregate as aggregate
    from tdcollect.lab.definition import Policy as Policy
    from tdcollect.lab.definition import Score as Score
    from tdcollect.lab.definition import Task as Task
    from tdcollect.lab.race import RaceResult as RaceResult
    from tdcollect.lab.results import SuiteResults as SuiteResults
    from tdcollect.lab.suite import Suite as Suite

__getattr__, __dir__, __all__ = lazy(__name__, inner="Suite", modules="curves")
