"""The learning curve of evaluations beside training: its points, its best, its CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tdcollect.evaluation.ledger.records import is_digest
from tdcollect.evaluation.reports.statistics import Summary

BEST_BY = ("mean", "iqm")


class Point(NamedTuple):
    """One evaluation of a learning curve. Statistics are None without a finite return.

    Attributes:
        step: the training step.
        episodes: the number of test episodes.
        failed: the number of them that failed or were lost, and are in no statistic.
        mean: the mean return.
        low: the lower end of its 95% interval; None for one episode.
        high: the upper end.
        std: the standard deviation of the returns; None for one episode.
        iqm: the interquartile mean of the returns.
        length: the mean length, in steps.
        digest: SHA-256 of the ledger.
    """

    step: int
    episodes: int
    failed: int
    mean: float | None
    low: float | None
    high: float | None
    std: float | None
    iqm: float | None
    length: float | None
    digest: str


COLUMNS = tuple(Point.__annotations__)
"""The columns of ``curve.csv``."""


class Best(NamedTuple):
    """The best evaluation so far; of equal ones the earliest.

    Attributes:
        step: the training step.
        value: the mean return, or the interquartile mean.
        path: the file with the policy's ``state_dict``; None without an ``output_dir``, or if the
            policy has no weights.
    """

    step: int
    value: float
    path: Path | None


def point_of(step: int, summary: Summary, digest: str) -> Point:
    """Return the point of an evaluation."""
    returns = summary.returns
    interval = returns.mean_interval
    return Point(
        step,
        summary.episodes,
        summary.failed + summary.lost,
        returns.mean,
        None if interval is None else interval.low,
        None if interval is None else interval.high,
        returns.std,
        returns.interquartile_mean,
        summary.lengths.mean,
        digest,
    )


def value_of(point: Point, by: str) -> float:
    """Return the value that the best point has the most of; minus infinity for none."""
    value = point.mean if by == "mean" else point.iqm
    return -math.inf if value is None else value


def with_point(curve: Sequence[Point], point: Point) -> list[Point]:
    """Return the curve with a point more, or with that of its step replaced, in order of steps."""
    return sorted([*(other for other in curve if other.step != point.step), point])


def to_csv(curve: Iterable[Point]) -> bytes:
    """Return a curve as CSV; floats read back to the same bits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(["" if value is None else value for value in point] for point in curve)
    return text.getvalue().encode()


def read_csv(file: Path) -> list[Point]:
    """Read a curve that :func:`to_csv` wrote."""
    try:
        header, *lines = csv.reader(io.StringIO(file.read_bytes().decode()))
        if tuple(header) != COLUMNS:
            raise ValueError(f"its columns are {', '.join(header)}")
        curve = [_point(line) for line in lines]
        if [point.step for point in curve] != sorted({point.step for point in curve}):
            raise ValueError("its steps do not rise")
    except ValueError as error:
        raise ValueError(
            f"expected {file} to hold a curve as tdcollect.Evaluator writes it: {error}; remove "
            "the file, and it is written anew"
        ) from error
    return curve


def _point(line: Sequence[str]) -> Point:
    if len(line) != len(COLUMNS) or not is_digest(line[-1]):
        raise ValueError(f"a line is {line}")
    step, episodes, failed = map(int, line[:3])
    mean, low, high, std, iqm, length = (float(text) if text else None for text in line[3:-1])
    return Point(step, episodes, failed, mean, low, high, std, iqm, length, line[-1])
