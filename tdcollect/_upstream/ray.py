"""Ray: private options and state, under plain names."""

from __future__ import annotations

from typing import Any

__all__ = ["bounded", "started_here"]


def bounded(items: int) -> dict[str, Any]:
    """Return the options of a stream that holds so many items that nobody has read yet.

    Its actor waits before it makes more. Without, a stream takes memory without bound.
    """
    return {"num_returns": "streaming", "_generator_backpressure_num_objects": items}


def started_here() -> bool:
    """Tell whether this process has started the Ray that it is connected to."""
    from ray._private import worker

    node = worker._global_node
    return node is not None and bool(node.is_head())
