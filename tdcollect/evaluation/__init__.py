"""Test episodes, each seeded by its index: the same to the bit however they are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Comparison as Comparison
    from tdcollect.evaluation.comparison import Difference as Difference
    from tdcollect.evaluation.comparison import episodes_needed as episodes_needed
    from tdcollect.evaluation.ledger import Episode as Episode
    from tdcollect.evaluation.ledger import Problem as Problem
    from tdcollect.evaluation.request import Request as Request
    from tdcollect.evaluation.result import export as export
    from tdcollect.evaluation.settings import EvaluationSettings as EvaluationSettings
    from tdcollect.evaluation.statistics import Summary as Summary
    from tdcollect.evaluation.statistics import summarize as summarize
    from tdcollect.evaluation.verification import Verification as Verification

__getattr__, __dir__, __all__ = lazy(__name__, modules="lerobot sb3")
