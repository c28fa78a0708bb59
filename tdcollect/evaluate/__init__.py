"""Test episodes: numbered, seeded, the same to the bit however they are run."""

from tdcollect.evaluate.comparison import Comparison, Difference, compare, episodes_needed
from tdcollect.evaluate.exports import to_pandas, write_evaluations_npz, write_marl_eval
from tdcollect.evaluate.records import Episode
from tdcollect.evaluate.report import write_comparison_report, write_report
from tdcollect.evaluate.statistics import Summary, summarize

__all__ = [
    "Comparison",
    "Difference",
    "Episode",
    "Summary",
    "compare",
    "episodes_needed",
    "summarize",
    "to_pandas",
    "write_comparison_report",
    "write_evaluations_npz",
    "write_marl_eval",
    "write_report",
]
