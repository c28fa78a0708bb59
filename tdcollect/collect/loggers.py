"""Statistics to TorchRL's loggers."""

from __future__ import annotations

from typing import Protocol

from tensordict import TensorDictBase

from tdcollect.collect.hooks import Hooks
from tdcollect.collect.statistics import Spread, Statistics
from tdcollect.display import one_line


class ScalarLogger(Protocol):
    """What is asked of a logger: TorchRL's have it (CSV, TensorBoard, W&B and the others)."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Write a number."""


def log_stats(
    logger: ScalarLogger, stats: Statistics, step: int | None = None, prefix: str = "collect"
) -> None:
    """Write the statistics of the latest collection to a logger.

    Episodes and steps over the collector's life; steps a second; mean, std, min and max of returns
    and lengths of the latest collection, where episodes ended, and of shaped returns, where there
    are any; the mean return over the window; times. The names are ``prefix/return_mean`` and so on.

    Args:
        logger: one of TorchRL's, say ``CSVLogger``.
        stats: ``collector.stats``.
        step: of the logger's axis; by default the steps collected so far, over all slots.
        prefix: of each name.

    Raises:
        RuntimeError: before anything has been collected.
    """
    latest, life = stats.latest, stats.lifetime
    if latest is None:
        raise RuntimeError("expected a collector that has collected something, got a new one")
    values = {
        "episodes": life.episodes,
        "steps": life.steps,
        "steps_per_second": latest.steps_per_second,
        "seconds": latest.seconds,
        "seconds_between": latest.seconds_between,
        "env_seconds": latest.env_seconds,
        "policy_seconds": latest.policy_seconds,
        **_named("return", latest.return_stats),
        **_named("length", latest.length_stats),
        **_named("shaped_return", latest.shaped_return_stats),
    }
    over_window = stats.window.return_stats
    if over_window is not None:
        values["window_return_mean"] = over_window.mean
    for name, value in values.items():
        if value is not None:
            logger.log_scalar(f"{prefix}/{name}", value, step=life.steps if step is None else step)


def _named(name: str, spread: Spread | None) -> dict[str, float]:
    if spread is None:
        return {}
    return {f"{name}_{figure}": value for figure, value in spread._asdict().items()}


class LogStatistics(Hooks):
    """Hooks that write the statistics of each collection to one of TorchRL's loggers.

    As :func:`log_stats` does, without shaped returns: rewards are shaped later.

    Args:
        logger: say ``CSVLogger``.
        every: of so many collections, write one.
        prefix: of each name.

    Raises:
        ValueError: for an ``every`` that is not positive.
    """

    def __init__(self, logger: ScalarLogger, every: int = 1, prefix: str = "collect"):
        if every < 1:
            raise ValueError(f"expected every to be positive, got {every}")
        self._logger = logger
        self._every = every
        self._prefix = prefix

    def __repr__(self) -> str:
        return one_line(self, type(self._logger).__name__, f"every={self._every}", self._prefix)

    def collection_ended(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """Write them."""
        if stats.lifetime.collections % self._every == 0:
            log_stats(self._logger, stats, prefix=self._prefix)
