"""Collection: the collector, its statistics and its hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.lazy import lazy

if TYPE_CHECKING:
    from tdcollect.collect.collector import Collector as Collector
    from tdcollect.collect.collector import SyncDataCollector as SyncDataCollector
    from tdcollect.collect.hooks import Hooks as Hooks
    from tdcollect.collect.hooks import LogStatistics as LogStatistics
    from tdcollect.collect.hooks import Render as Render
    from tdcollect.collect.shaping import RewardShaping
    from tdcollect.collect.statistics import Statistics

__all__ = [
    "RewardShaping",
    "Statistics",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "collector": "Collector SyncDataCollector",
        "hooks": "Hooks LogStatistics Render",
        "shaping": "RewardShaping",
        "statistics": "Statistics",
    },
)
