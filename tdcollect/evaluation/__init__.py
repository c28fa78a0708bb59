"""Test episodes, each seeded by its index: the same to the bit however they are run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdcollect.evaluation.ledger.reading import Problem
    from tdcollect.evaluation.ledger.records import Episode
    from tdcollect.evaluation.reports.comparison import (
        Comparison,
        Difference,
        compare,
        episodes_needed,
    )
    from tdcollect.evaluation.reports.comparison_page import write_comparison_report
    from tdcollect.evaluation.reports.exports import (
        to_pandas,
        write_evaluations_npz,
    )
    from tdcollect.evaluation.reports.report import write_report
    from tdcollect.evaluation.reports.statistics import Summary, summarize
    from tdcollect.evaluation.request import Request
    from tdcollect.evaluation.settings import EvaluationSettings
    from tdcollect.evaluation.verification import Verification, verify

__all__ = [
    "Comparison",
    "Difference",
    "Episode",
    "EvaluationSettings",
    "Problem",
    "Request",
    "Summary",
    "Verification",
    "compare",
    "episodes_needed",
    "summarize",
    "to_pandas",
    "verify",
    "write_comparison_report",
    "write_evaluations_npz",
    "write_report",
]

# Imported when they are asked for: processes that only start workers need no torch.
_MODULES = {
    "Comparison": "reports.comparison",
    "Difference": "reports.comparison",
    "Episode": "ledger.records",
    "EvaluationSettings": "settings",
    "Problem": "ledger.reading",
    "Request": "request",
    "Summary": "reports.statistics",
    "Verification": "verification",
    "compare": "reports.comparison",
    "episodes_needed": "reports.comparison",
    "summarize": "reports.statistics",
    "to_pandas": "reports.exports",
    "verify": "verification",
    "write_comparison_report": "reports.comparison_page",
    "write_evaluations_npz": "reports.exports",
    "write_report": "reports.report",
}


def __getattr__(name: str) -> Any:
    if name == "sb3":
        return import_module(f"{__name__}.sb3")
    if name not in _MODULES:
        raise AttributeError(f"module 'tdcollect.evaluation' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "sb3"})
