"""Collection: the collector, its statistics and its hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.collect.collector import Collector as Collector
    from tdcollect.collect.collector import RewardShaping as RewardShaping
    from tdcollect.collect.collector import SyncDataCollector as SyncDataCollector
    from tdcollect.collect.hooks import Hooks as Hooks
    from tdcollect.collect.hooks import LogStatistics as LogStatistics
    from tdcollect.collect.hooks import Render as Render
    from tdcollect.collect.statistics import Statistics as Statistics

__getattr__, __dir__, __all__ = lazy(
    __name__, inner="Collector Hooks LogStatistics Render SyncDataCollector"
)
