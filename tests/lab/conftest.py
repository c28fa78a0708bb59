"""Fixtures of the lab's tests: a small suite's folder, small reports, commands that are typed."""

from ..evaluation.conftest import here, typed
from ..zoo.reports import small_reports
from .parts import folder

__all__ = ["folder", "here", "small_reports", "typed"]
