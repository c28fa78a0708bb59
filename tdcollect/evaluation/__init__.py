"""Test episodes, each seeded by its index: the same to the bit however they are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Comparison, Difference, episodes_needed
    from tdcollect.evaluation.ledger import Episode, Problem
    from tdcollect.evaluation.request import Request
    from tdcollect.evaluation.result import export, to_pandas
    from tdcollect.evaluation.settings import EvaluationSettings
    from tdcollect.evaluation.statistics import Summary, summarize
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
        "comparison": "Comparison Difference episodes_needed",
        "ledger": "Episode Problem",
        "request": "Request",
        "result": "export to_pandas",
        "settings": "EvaluationSettings",
        "statistics": "Summary summarize",
        "verification": "Verification",
    },
    modules="sb3",
)
