"""Collection: the collector, and what it tells of its work."""

from tdcollect.collect.collector import Collector, SyncDataCollector
from tdcollect.collect.shaping import RewardShaping
from tdcollect.collect.statistics import Collection, Life, Spread, Statistics, Window

__all__ = [
    "Collection",
    "Collector",
    "Life",
    "RewardShaping",
    "Spread",
    "Statistics",
    "SyncDataCollector",
    "Window",
]
