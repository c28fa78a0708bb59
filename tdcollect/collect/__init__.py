"""Collection: the collector, its statistics and its hooks."""

from tdcollect.collect.collector import Collector, SyncDataCollector
from tdcollect.collect.hooks import Hooks, LogStatistics, Render, log_stats
from tdcollect.collect.shaping import RewardShaping
from tdcollect.collect.statistics import Collection, Lifetime, Spread, Statistics, Window

__all__ = [
    "Collection",
    "Collector",
    "Hooks",
    "Lifetime",
    "LogStatistics",
    "Render",
    "RewardShaping",
    "Spread",
    "Statistics",
    "SyncDataCollector",
    "Window",
    "log_stats",
]
