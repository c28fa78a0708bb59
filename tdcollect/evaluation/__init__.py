"""Test episodes, each seeded by its index: the same to the bit however they are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy

if TYPE_CHECKING:
    from tdcollect.evaluation.ledger.reading import Problem
    from tdcollect.evaluation.ledger.records import Episode
    from tdcollect.evaluation.reports.comparison import Comparison, Difference, episodes_needed
    from tdcollect.evaluation.reports.exports import export, to_pandas
    from tdcollect.evaluation.reports.statistics import Summary, summarize
    from tdcollect.evaluation.request import Request
    from tdcollect.evaluation.settings import EvaluationSettings
    from tdcollect.evaluation.verification import Verification

__all__ = [
    "Comparison",
    "Difference",
    "Episode",
    "EvaluationSettings",
    "Problem",
    "Request",
    "Summary",
    "Verification",
    "episodes_needed",
    "export",
    "summarize",
    "to_pandas",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ledger.reading": "Problem",
        "ledger.records": "Episode",
        "reports.comparison": "Comparison Difference episodes_needed",
        "reports.exports": "export to_pandas",
        "reports.statistics": "Summary summarize",
        "request": "Request",
        "settings": "EvaluationSettings",
        "verification": "Verification",
    },
    modules="sb3",
)
