"""The learning curve of evaluations beside training: points, best, directory and page."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tdcollect.display import count_text, number_text, number_texts
from tdcollect.evaluation import ledger
from tdcollect.evaluation.comparison import SAME
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import Summary, alike, ends
from tdcollect.files import check_no_links, check_output, locked, write_atomically, write_json
from tdcollect.pages import build, plots
from tdcollect.pages.build import Cell, Column, DataTable, Figure, Figures, Page

BEST_BY = ("mean", "iqm")


class MetricPoint(NamedTuple):
    """A metric of one evaluation: its name, its mean, and the ends of the 95% interval."""

    name: str
    mean: float | None
    low: float | None
    high: float | None


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
        metrics: the metrics that were asked for, by their order.
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
    metrics: tuple[MetricPoint, ...] = ()


COLUMNS = tuple(Point.__annotations__)[:-1]
"""The columns of ``curve.csv``; those of metrics follow."""


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
    low, high = ends(returns.mean_interval) or (None, None)
    return Point(
        step,
        summary.episodes,
        summary.failed + summary.lost,
        returns.mean,
        low,
        high,
        returns.std,
        returns.interquartile_mean,
        summary.lengths.mean,
        digest,
        tuple(
            MetricPoint(name, metric.mean, *(ends(metric.mean_interval) or (None, None)))
            for name, metric in summary.metrics.items()
        ),
    )


def value_of(point: Point, by: str) -> float:
    """Return the value that the best point has the most of; minus infinity for none."""
    value = point.mean if by == "mean" else point.iqm
    return -math.inf if value is None else value


def with_point(curve: Sequence[Point], point: Point) -> list[Point]:
    """Return the curve with a point more, or with that of its step replaced, in order of steps."""
    return sorted([*(other for other in curve if other.step != point.step), point])


_ENDS = ("", ".low", ".high")  # of the columns of a metric


def to_csv(curve: Iterable[Point]) -> bytes:
    """Return a curve as CSV; floats have all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = [*curve]
    named = [f"metrics.{metric.name}" for metric in rows[0].metrics] if rows else []
    writer.writerow([*COLUMNS, *(f"{name}{end}" for name in named for end in _ENDS)])
    for point in rows:
        values = [*point[:-1], *(value for metric in point.metrics for value in metric[1:])]
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue().encode()


CURVE, PAGE, FIGURE = "curve.csv", "curve.html", "curve.svg"
BEST, WEIGHTS = "best.json", "best.pt"
_STEP = re.compile(r"step-(\d{9,})")
_AGAIN = "remove the file: the next evaluation writes it again"
_SECONDS = 2.0  # for a process that was killed to let go of its directory


class Folder:
    """The output directory of a :class:`tdcollect.Evaluator`, open for writing by one process."""

    def __init__(self, path: Path, best_by: str):
        self.path, self._by = path, best_by
        with ExitStack() as opened:
            opened.enter_context(locked(path, wait=_SECONDS))
            self.curve, self.best, _ = read_folder(path, best_by)
            self._opened = opened.pop_all()

    def step_path(self, step: int) -> Path:
        """The directory of the evaluation at a step; refused if it is a link."""
        check_no_links(self.path, step_name(step))
        return self.path / step_name(step)

    def check_same_episodes(self, manifest: Mapping[str, Any]) -> None:
        """Refuse an evaluation of other episodes than those of the curve."""
        begun = [d for d in steps_of(self.path).values() if (d / ledger.MANIFEST).exists()]
        there = ledger.read_manifest(begun[0]) if begun else manifest
        if others := ledger.differences(episodes_of(there), episodes_of(manifest)):
            raise ValueError(
                f"{self.path} holds a curve of other episodes: {ledger.differences_text(others)}. "
                "Choose another directory, or remove this one to start again"
            )

    def note(self, point: Point, policy_state: Callable[[], Mapping[str, Any]]) -> None:
        """Add a point to the curve; keep the weights of the best."""
        self.curve = with_point(self.curve, point)
        value = value_of(point, self._by)
        before = (-math.inf, 0) if self.best is None else (self.best.value, -self.best.step)
        if value > -math.inf and (value, -point.step) >= before:
            path, state = self.path / WEIGHTS, policy_state()
            entries = {"step": point.step, "by": self._by, "value": value, "weights": None}
            if state:
                import torch

                write_atomically(path, lambda opened: torch.save(state, opened))
                entries |= {"weights": WEIGHTS, "digest": ledger.sha256(path)}
            else:
                path.unlink(missing_ok=True)
            self.best = Best(point.step, value, path if state else None)
            write_json(self.path / BEST, entries)
        write_atomically(self.path / CURVE, to_csv(self.curve))

    def close(self) -> None:
        """Release the directory."""
        self._opened.close()


def step_name(step: int) -> str:
    """Return the name of the folder of the evaluation at a step."""
    return f"step-{step:09d}"


def read_folder(
    path: Path, best_by: str | None = None, warn: Callable[[str], object] = lambda text: None
) -> tuple[list[Point], Best | None, str]:
    """Return the curve that a directory's ledgers hold, its best point, and what that is best by.

    Args:
        path: the directory.
        best_by: the value that the best was chosen by; None for that which the directory has.
        warn: is told of weights that are not those of the best, as after a kill.

    Raises:
        ValueError: for a directory of something else, for files that were altered, and for one
        whose
            best evaluation was chosen by another value.
    """
    check_folder(path)
    points = {}
    for step, directory in steps_of(path).items():
        if ledger.is_finished(directory):
            result = EvaluationResult.load(directory)
            points[step] = point_of(step, result.summary(), result.digest)
    curve = [*points.values()]
    file, weights = path / BEST, path / WEIGHTS
    if not file.exists():
        return curve, None, best_by or BEST_BY[0]
    try:
        entries = json.loads(file.read_bytes())
        step, by, value = int(entries["step"]), str(entries["by"]), float(entries["value"])
        named, digest = entries["weights"], entries.get("digest")
        if by not in BEST_BY or named not in (None, WEIGHTS):
            raise ValueError(f"by {by!r}, weights {named!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"expected {file} to be as tdcollect.Evaluator writes it, got something else "
            f"({type(error).__name__}: {error}); remove the file"
        ) from error
    if best_by not in (None, by):
        raise ValueError(
            f"{path} keeps the best evaluation by {by!r}, got best={best_by!r}: the weights of "
            "others are gone; choose another directory"
        )
    own = value_of(points[step], by) if step in points else None
    if not alike(own, value):
        raise ValueError(f"{file} has {value} of step {step}, and its evaluation {own}; {_AGAIN}")
    now = ledger.sha256(weights) if weights.is_file() else None
    if now != digest:
        warn(f"{weights} has the digest {now}, and {digest} in {BEST}: it is not the best's")
    return curve, Best(step, value, weights if named and now == digest else None), by


def check_curve(path: Path) -> Iterator[ledger.Problem]:
    """Check the files of a curve against its evaluations, which were checked."""
    warnings: list[str] = []
    curve, best, by = read_folder(path, None, warnings.append)
    yield from (ledger.Problem(path / WEIGHTS, text) for text in warnings)
    top = max((value_of(point, by) for point in curve), default=-math.inf)
    if top > (-math.inf if best is None else best.value):
        yield ledger.Problem(path / BEST, f"it lacks the best, {top}: its process was killed, say")
    file = path / CURVE
    rows, wanted = map(_cells, (file.read_bytes() if file.is_file() else b"", to_csv(curve)))
    if not alike(rows, wanted):
        yield ledger.Problem(file, f"it is not what the evaluations give; {_AGAIN}")


def _cells(table: bytes) -> list[list[Any]]:
    """Return the cells of a curve as numbers, and as text where they are none."""
    rows = csv.reader(io.StringIO(table.decode(errors="replace"), newline=""))
    return [[_number_or_text(cell) for cell in row] for row in rows]


def _number_or_text(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def check_folder(path: Path) -> None:
    """Refuse a path that neither is nor can become the directory of an evaluator."""
    files = (CURVE, PAGE, FIGURE, BEST, WEIGHTS)
    check_output(path, "an Evaluator", files, _STEP.fullmatch)


def steps_of(path: Path) -> dict[int, Path]:
    """Return the directories of evaluations by step, in their order."""
    names = os.listdir(path) if path.is_dir() else []
    steps = (match for match in map(_STEP.fullmatch, names) if match)
    return dict(sorted((int(match[1]), path / match[0]) for match in steps))


def episodes_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest that decide which episodes are run."""
    entries = {
        key: ledger.manifest_entry(manifest, key)
        for key in (*SAME, "episodes", "seeds", ledger.METRICS, ledger.OPTIONS)
    }
    env = dict(entries["env"] or {})
    # Not the digests of running statistics, which training moves.
    env["transforms"] = [str(name).partition("(")[0] for name in env.get("transforms", [])]
    return {**entries, "env": env}


_INTERVAL = "95% interval"
_BEST_BY = {"mean": "mean return", "iqm": "interquartile mean"}


def curve_page(
    curve: Sequence[Point],
    best: Best | None,
    name: str,
    by: str,
    path_of: Callable[[int], str | None],
    links: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page of an env's curve; its first figure is that of the returns, if finite.

    The best point is best by its ``"mean"`` or ``"iqm"``. ``path_of`` returns the page of the
    evaluation at a step, relative to this one, or None.
    """
    drawn = _curve_figures([point for point in curve if point.mean is not None], best, by)
    lead = f"{count_text(len(curve), 'evaluation')} beside training"
    if curve:
        lead += f", {count_text(curve[-1].episodes, 'test episode')} each"
    return Page(
        f"{name}: learning curve",
        lead,
        "Learning curve",
        [
            ("Figures", [Figures(drawn)] if drawn else ["No return is finite."]),
            ("Evaluations", [_points(curve, best, path_of)]),
        ],
        _curve_headline(curve, best, by),
        links=links,
    )


def _curve_headline(curve: Sequence[Point], best: Best | None, by: str) -> list[build.Card]:
    entries = []
    if best is not None:
        name = f"Best {_BEST_BY[by]}"
        entries.append((name, number_text(best.value), f"at step {best.step:,}"))
    if curve:
        last = curve[-1]
        mean, low, high = number_texts([last.mean, last.low, last.high])
        words = "" if last.low is None else f", {_INTERVAL} {low} to {high}"
        entries.append(("Last mean return", mean, f"at step {last.step:,}{words}"))
    failed = f"{sum(point.failed for point in curve)} failed"
    return [*entries, ("Test episodes", str(sum(point.episodes for point in curve)), failed)]


def _curve_figures(curve: Sequence[Point], best: Best | None, by: str) -> list[Figure]:
    if not curve:
        return []
    x, mean, low, high, length = (
        np.array([getattr(point, key) for point in curve], np.float64)  # None is NaN
        for key in ("step", "mean", "low", "high", "length")
    )
    metrics = _metric_curves(curve)
    shows, at = from_to("The mean return", x, mean), None
    if best is not None and best.step in x:
        at = (float(best.step), float(mean[x == best.step][0]))
        value = number_text(best.value)
        shows += f" The best {_BEST_BY[by]}, {value}, is that of step {best.step:,}."
    line = plots.Line("mean return", x, mean, low, high)
    x_label, title = "training steps", "Return of test episodes"
    returns = plots.lines([line], x_label, "return", band_name=_INTERVAL, best=at)
    if (mean == length).all():
        note = "The mean length, in steps, is the same at each step, and not drawn by itself."
        return [Figure("curve", title, returns, shows, note), *metrics]
    line = plots.Line("mean length", x, length, series=2)
    lengths = plots.lines([line], x_label, "length (steps)")
    said = from_to("The mean length", x, length)
    figures = [Figure("curve", title, returns, shows)]
    return [*figures, Figure("lengths", "Length of test episodes", lengths, said), *metrics]


def _metric_curves(curve: Sequence[Point]) -> Iterator[Figure]:
    """Yield the figure of each metric; a step without a finite mean is left out."""
    for place, (name, *_) in enumerate(curve[0].metrics, 1):
        points = [(point.step, *point.metrics[place - 1][1:]) for point in curve]
        rows = np.array([row for row in points if row[1] is not None], np.float64)
        if not len(rows):
            continue
        x, mean, low, high = rows.T
        line = plots.Line(f"mean {name}", x, mean, low, high)
        drawing = plots.lines([line], "training steps", name, band_name=_INTERVAL)
        yield Figure(f"metric_{place}", name, drawing, from_to("The mean", x, mean))


def from_to(what: str, x: plots.Values, y: plots.Values) -> str:
    """Return the first and the last value of a curve in words."""
    first, last = number_texts([float(y[0]), float(y[-1])])
    return f"{what} is {first} at step {x[0]:,.0f} and {last} at step {x[-1]:,.0f}."


def _points(
    curve: Sequence[Point], best: Best | None, path_of: Callable[[int], str | None]
) -> DataTable:
    steps = [point.step for point in curve]
    chosen = [Cell("best", kind="good") if best and step == best.step else "" for step in steps]
    intervals = [None if p.low is None or p.high is None else (p.low, p.high) for p in curve]
    columns = [
        Column("step", [Cell(f"{step:,}", path_of(step)) for step in steps], "n"),
        Column("mean return", [point.mean for point in curve], "n"),
        Column(_INTERVAL, intervals, "n"),
        Column("std", [point.std for point in curve], "n"),
        Column("interquartile mean", [point.iqm for point in curve], "n"),
        Column("length", [point.length for point in curve], "n"),
        *(
            Column(f"mean {name}", [point.metrics[place].mean for point in curve], "n")
            for place, (name, *_) in enumerate(curve[0].metrics if curve else ())
        ),
        Column("episodes", [str(point.episodes) for point in curve], "n"),
        Column("failed", [str(point.failed) for point in curve], "n"),
        Column("", chosen),
        Column("ledger", [point.digest[:12] for point in curve]),
    ]
    caption = "A step leads to the report of its evaluation."
    return DataTable(columns, caption, hint="words, or step>1000")
