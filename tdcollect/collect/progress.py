"""A collector's batches, with how far it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from tdcollect._upstream.collector import CollectorState
from tdcollect.progress import progress_bar


def with_progress(batches: Iterator[Any], collector: Any) -> Iterator[Any]:
    """The batches, while the frames collected and the latest mean return are shown.

    A bar closes with the iteration, however that ends.
    """
    state = CollectorState(collector)
    total = collector.total_frames
    total = None if math.isinf(total) else total
    with (
        closing(batches),  # type: ignore[type-var]
        progress_bar(total, "frames", state.frames) as bar,
    ):
        for batch in batches:
            latest = collector.stats.latest if collector.stats.on else None
            if latest is not None and latest.return_stats is not None:
                bar.set_postfix({"return": f"{latest.return_stats.mean:.4g}"}, refresh=False)
            bar.update(state.frames - bar.n)
            yield batch
            del batch  # or it would take memory beside the next one
