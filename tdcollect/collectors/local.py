"""The kinds of collectors with workers on this machine."""

from __future__ import annotations

import torchrl.collectors as upstream

from tdcollect.collectors.multi import MultiCollector


class MultiSyncCollector(MultiCollector, upstream.MultiSyncCollector):
    """Workers that collect one batch together, each its part, and wait for the next.

    For on-policy learners: all rows of a batch are of the same weights. See
    :class:`MultiCollector`, and :class:`torchrl.collectors.MultiSyncCollector`.
    """


class MultiAsyncCollector(MultiCollector, upstream.MultiAsyncCollector):
    """Workers that collect a batch each, whenever they are ready.

    For off-policy learners: weights arrive while a batch is collected, so that one batch may be of
    several versions; ``track_policy_version=True`` keeps that of each row under
    ``("next", "policy_version")``. See :class:`MultiCollector`, and
    :class:`torchrl.collectors.MultiAsyncCollector`.
    """


class AsyncCollector(MultiAsyncCollector, upstream.AsyncCollector):
    """One worker that collects while this process learns.

    See :class:`MultiAsyncCollector`, and :class:`torchrl.collectors.AsyncCollector`.
    """
