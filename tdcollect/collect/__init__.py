"""Collection: the collector, and what it tells of its work."""

from tdcollect.collect.collector import Collector, SyncDataCollector
from tdcollect.collect.hooks import Hooks
from tdcollect.collect.loggers import LogStatistics, log_stats
from tdcollect.collect.render import Render
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
