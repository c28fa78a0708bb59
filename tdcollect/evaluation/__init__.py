"""Test episodes: numbered, seeded, the same to the bit however they are run."""

from tdcollect.evaluation.comparison import Comparison, Difference, compare, episodes_needed
from tdcollect.evaluation.exports import to_pandas, write_evaluations_npz, write_marl_eval
from tdcollect.evaluation.reading import Problem
from tdcollect.evaluation.records import Episode
from tdcollect.evaluation.report import write_comparison_report, write_report
from tdcollect.evaluation.statistics import Summary, summarize
from tdcollect.evaluation.verification import Verification, verify

__all__ = [
    "Comparison",
    "Difference",
    "Episode",
    "Problem",
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
