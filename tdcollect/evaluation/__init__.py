"""Test episodes, each seeded by its index: the same to the bit however they are run."""

from tdcollect.evaluation.ledger.reading import Problem
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.reports.comparison import Comparison, Difference, compare, episodes_needed
from tdcollect.evaluation.reports.exports import to_pandas, write_evaluations_npz, write_marl_eval
from tdcollect.evaluation.reports.report import write_comparison_report, write_report
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
    "write_marl_eval",
    "write_report",
]
