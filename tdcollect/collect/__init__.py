"""Collection: the collector."""

from tdcollect.collect.collector import Collector, SyncDataCollector
from tdcollect.collect.shaping import RewardShaping

__all__ = ["Collector", "RewardShaping", "SyncDataCollector"]
