"""Collection: the collector."""

from tdcollect.collect.collector import Collector, SyncDataCollector

__all__ = ["Collector", "SyncDataCollector"]
