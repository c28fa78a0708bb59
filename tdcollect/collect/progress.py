"""A progress bar around iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any


def check_tqdm() -> None:
    """Raise ModuleNotFoundError, naming the extra, where tqdm is not installed."""
    _tqdm()


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "progress=True needs the tqdm package: pip install 'tdcollect[evaluate]'"
        ) from error
    return tqdm


def with_progress(batches: Iterator[Any], collector: Any) -> Iterator[Any]:
    """The batches, while a bar shows the frames collected and the latest mean return.

    The bar closes with the iteration, however that ends.
    """
    total = collector.total_frames
    total = None if math.isinf(total) else total
    with (
        closing(batches),  # type: ignore[type-var]
        _tqdm()(total=total, initial=collector._frames, unit="frames") as bar,
    ):
        for batch in batches:
            latest = collector.stats.latest if collector.stats.on else None
            if latest is not None and latest.return_stats is not None:
                bar.set_postfix({"return": f"{latest.return_stats.mean:.4g}"}, refresh=False)
            bar.update(collector._frames - bar.n)
            yield batch
            del batch  # or it would take memory beside the next one
