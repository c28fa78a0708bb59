"""Learning curves over several training runs, and the curve of the time to success."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect import check, display
from tdcollect.display import count_text, number_text, number_texts
from tdcollect.evaluation import ledger, statistics
from tdcollect.evaluation.comparison import RETURN, SUCCESS, Evaluated
from tdcollect.evaluation.curve import check_folder, episodes_of, from_to, steps_of
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import Interval, Values
from tdcollect.lab.aggregates import LABELS, RESAMPLES, Estimate
from tdcollect.packages import extra_module
from tdcollect.pages import plots
from tdcollect.pages.build import DataTable, Figure, Figures, Page, columns_of

# The coverage of 95% intervals from few runs, in percent, lowest and highest of the simulations in
# docs/beside-training.md. Suites do better: there each run has a score on each of several tasks.
COVERAGE = {2: (47, 51), 3: (71, 75), 4: (84, 87), 5: (84, 90)}


@dataclass(frozen=True)
class Measure:
    """A number of each training run, and their interquartile mean.

    Attributes:
        name: what it is: a training step, say.
        runs: the numbers, in the order of the runs; infinite steps to a threshold for a run that
            never gets there.
        estimate: their interquartile mean, with the percentile bootstrap interval over runs, which
            is None for one run.
    """

    name: str
    runs: tuple[float, ...]
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Curves(display.ShownAsTable):
    """The learning curves of several training runs; print them to see a table.

    Attributes:
        env: the env's id.
        episodes: the number of test episodes at each step.
        on: ``"return"``, ``"success"`` or a metric: the curves are of its mean over episodes.
        runs: the names of the runs.
        steps: the training steps that all runs have, with a finite mean.
        left_out: the steps that only some runs have.
        points: the means at each step.
        measures: of whole curves: the area under each over its width, which is the mean over
            training by the trapezoidal rule, if there are two steps; and the steps to the
            threshold, if one was given: the first step with a mean there or beyond.
        threshold, confidence: as they were given.
    """

    env: str
    episodes: int
    on: str
    runs: tuple[str, ...]
    steps: tuple[int, ...]
    left_out: tuple[int, ...]
    points: tuple[Measure, ...]
    measures: tuple[Measure, ...]
    threshold: float | None
    confidence: float

    @property
    def what(self) -> str:
        """The quantity of the curves, in words."""
        return "success rate" if self.on == SUCCESS else f"mean {self.on}"

    def to_dict(self) -> dict[str, Any]:
        """Return the curves as plain dicts, lists, numbers and None, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        runs = display.count_text(len(self.runs), "run")
        return display.one_line(self, self.env, runs, f"last {self.points[-1].estimate}")

    def _head(self) -> str:
        return f"{self.env}, {self.what} of {display.count_text(self.episodes, 'test episode')}"

    def header(self) -> list[str]:
        """Return the headings of :meth:`rows`."""
        interval = f"{display.percent_text(self.confidence)} interval"
        return ["step", LABELS["iqm"], interval, *self.runs]

    def rows(self) -> list[list[str]]:
        """Return a row per step and per measure: its name, the estimate, the number of each run."""
        points, measures = (
            [[m.name, m.estimate.value, statistics.ends(m.estimate.interval), *m.runs] for m in of]
            for of in (self.points, self.measures)
        )
        texts = [display.column_texts(row) for row in measures]
        never = [[name, *(cell.replace("inf", "never") for cell in row)] for name, *row in texts]
        return [*display.number_columns(points), *never]

    def notes(self) -> list[str]:
        """Return the notes to the table, one sentence each."""
        runs = len(self.runs)
        notes = ["Intervals: training runs drawn anew, at each step by itself."]
        if runs == 1:
            notes = ["One run: no interval. It cannot show how much another run would differ."]
        if runs in COVERAGE:
            low, high = COVERAGE[runs]
            notes.append(
                f"{runs} runs are too few for the intervals: in simulations, 95% intervals from "
                f"{runs} runs held the truth in {low}% to {high}% of cases."
            )
        if self.left_out:
            shared = display.count_text(len(self.steps), "step")
            left = display.listed_text(self.left_out)
            notes.append(f"All runs share {shared}; those that some lack are left out: {left}.")
        if any(math.isinf(number) for measure in self.measures for number in measure.runs):
            notes.append("A run that never comes to the threshold counts as infinitely many steps.")
        return notes


def over_runs(
    directories: Mapping[str, str | os.PathLike[str]], *, on: str = RETURN, **settings: Any
) -> Curves:
    """Return the learning curves of several training runs together, from their ledgers.

    At each step that all runs have: the interquartile mean over runs of their mean returns, with
    the percentile bootstrap interval over runs (Agarwal et al. 2021). The estimates are the same
    for the runs in any order.

    Args:
        directories: the ``output_dir`` of the :class:`tdcollect.Evaluator` of each run, by a name
            for the run.
        on: ``"return"``, ``"success"``, or the name of a metric.
        settings: ``threshold``, to count the steps to a mean of at least this;
            ``lower_is_better``, for a mean of at most the threshold, as of a cost; ``confidence``,
            ``resamples`` and ``seed`` of every interval.

    Raises:
        ValueError: for runs of other envs or episodes, runs without a step in common, a directory
            without a curve, and numbers out of range.
    """
    means: dict[str, dict[int, float]] = {}
    first: dict[str, Any] = {}
    for name, directory in directories.items():
        manifest, means[name] = _read(Path(directory), on)
        first = first or manifest
        if unlike := ledger.differences(episodes_of(first), episodes_of(manifest)):
            one = next(iter(means))
            text = ledger.differences_text(unlike, f"in {one}", f"in {name}")
            raise ValueError(
                f"expected runs that are tested on the same episodes, but {one} and {name} differ: "
                f"{text}"
            )
    env, episodes = str(first["env"]["id"]), len(ledger.asked_indices(first))
    return together(means, env=env, episodes=episodes, on=on, **settings)


def _read(path: Path, on: str) -> tuple[dict[str, Any], dict[int, float]]:
    """Return the manifest of a run's evaluations, and the finite means by step."""
    check_folder(path)
    manifest: dict[str, Any] = {}
    means = {}
    for step, directory in steps_of(path).items():
        if not ledger.is_finished(directory):
            continue
        result = EvaluationResult.load(directory)
        manifest = manifest or result.manifest
        by_step = result.summary(resamples=1)
        known = {RETURN: by_step.returns.mean}
        known |= {name: metric.mean for name, metric in by_step.metrics.items()}
        known |= {SUCCESS: by_step.success.rate} if by_step.success else {}
        if on not in known:
            raise ValueError(f"expected one of {', '.join(known)} in {directory}, got {on!r}")
        means[step] = known[on]
    if not manifest:
        raise ValueError(
            "expected the directory of a learning curve, as tdcollect.Evaluator writes it with an "
            f"output_dir, got {path}, which holds no finished evaluation"
        )
    return manifest, {step: mean for step, mean in means.items() if mean is not None}


def together(
    means: Mapping[str, Mapping[int, float]],
    *,
    env: str,
    episodes: int,
    on: str = RETURN,
    threshold: float | None = None,
    lower_is_better: bool = False,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Curves:
    """Return curves from the mean of each run at each of its steps; see :func:`over_runs`."""
    statistics.check_settings(confidence, resamples, seed, 0)
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"expected a finite threshold, got {threshold}")
    steps = sorted(set.intersection(*map(set, means.values())))
    if not steps:
        listed = {name: display.listed_text([*own]) or "none" for name, own in means.items()}
        text = "; ".join(f"{name} has {own}" for name, own in listed.items())
        raise ValueError(f"expected runs with training steps in common, got none: {text}")
    values = np.array([[own[step] for step in steps] for own in means.values()])

    def measure(name: str, numbers: Values) -> Measure:
        ordered = np.sort(numbers)  # the same are drawn in whatever order the runs come
        rng = statistics.generator(seed)  # at each step anew: a band as smooth as the curves
        with np.errstate(invalid="ignore"):
            ends = statistics.mean_interval(
                ordered, confidence, resamples, rng, statistics.interquartile_mean
            )
        if ends is not None:  # NaN is between two infinite ones
            ends = Interval(*np.nan_to_num([ends.low, ends.high], nan=math.inf, posinf=math.inf))
        value = float(statistics.interquartile_mean(ordered))
        return Measure(name, tuple(numbers.tolist()), Estimate(value, ends))

    measures = []
    if len(steps) > 1:
        widths = np.diff(steps) / (steps[-1] - steps[0])
        areas = ((values[:, 1:] + values[:, :-1]) / 2 * widths).sum(1)
        measures.append(measure("area under the curve", areas))
    if threshold is not None:
        reached = values <= threshold if lower_is_better else values >= threshold
        first = np.where(reached, steps, math.inf).min(1)
        measures.append(measure(f"steps to {display.number_text(threshold)}", first))
    return Curves(
        env=env,
        episodes=episodes,
        on=on,
        runs=tuple(means),
        steps=tuple(steps),
        left_out=tuple(sorted(set().union(*means.values()).difference(steps))),
        points=tuple(measure(f"{at:,}", row) for at, row in zip(steps, values.T, strict=True)),
        measures=tuple(measures),
        threshold=threshold,
        confidence=confidence,
    )


@dataclass(frozen=True)
class TimeToSuccess:
    """The share of episodes that have succeeded, by the number of steps.

    Attributes:
        steps: the numbers of steps at which the share changes, ascending.
        success: the share of successes by then: one minus the Kaplan-Meier curve.
        low: the lower end of its pointwise band.
        high: the upper end.
        horizon: the steps up to which :attr:`mean` counts.
        mean: the restricted mean time in steps: without a success, ``horizon`` counts.
        interval: of that mean.
        episodes: the number of episodes with an outcome.
        confidence: of band and interval.
    """

    steps: tuple[float, ...]
    success: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    horizon: float
    mean: float
    interval: Interval
    episodes: int
    confidence: float

    def __repr__(self) -> str:
        count, mean = display.count_text(self.episodes, "episode"), display.number_text(self.mean)
        return display.one_line(self, count, f"mean {mean} {self.interval} steps")


def time_to_success(
    result: Evaluated, horizon: float | None = None, confidence: float = 0.95
) -> TimeToSuccess:
    """Return the curve of the time to success of an evaluation, and its restricted mean.

    Kaplan and Meier, JASA 53, 1958, by ``scipy.stats.ecdf``, with a log-log band; the error of the
    mean is Greenwood's. A success counts at the end of its episode, one that was truncated is
    censored there, and one that ended otherwise, or failed, never succeeds.

    Args:
        result: an evaluation of an env that reports success.
        horizon: steps, at most those of the longest episode; None for these.
        confidence: between 0 and 1.

    Raises:
        ValueError: if no episode says whether it was a success; for another horizon.
    """
    check.share(confidence=confidence)
    stats = extra_module("scipy.stats", "the time to success")
    told = [e for e in result.episodes if not e.lost and (not e.completed or e.success is not None)]
    longest = max((e.length or 0 for e in told), default=0)
    end = float(longest if horizon is None else horizon)
    if not 0 < end <= longest:
        raise ValueError(
            "expected episodes of an env that reports success, and a horizon of at most the steps "
            f"of the longest one, got {len(told)} such episodes, the longest of {longest} steps, "
            f"and {horizon!r}"
        )
    times = [float(e.length or 0) for e in told if e.success]
    others = [e for e in told if not e.success]
    waited = [float(e.length or 0) if e.truncated else longest + 1.0 for e in others]
    curve = stats.ecdf(stats.CensoredData(uncensored=times, right=waited)).sf
    with np.errstate(divide="ignore", invalid="ignore"):
        band = curve.confidence_interval(confidence, method="log-log")
    at, survival = curve.quantiles, curve.probabilities
    # What is left of the area after each time; steps of the curve up to the horizon.
    areas = np.diff(np.clip([0.0, *at, end], 0, end)) * np.append(1.0, survival)
    left = np.cumsum(areas[::-1])[::-1][1:]
    ordered = np.sort(times)
    events = np.searchsorted(ordered, at, "right") - np.searchsorted(ordered, at)
    rest = len(told) - np.searchsorted(np.sort(times + waited), at) - events
    terms = np.divide(events, (rest + events) * rest, out=np.zeros(len(at)), where=rest > 0)
    mean, error = float(areas.sum()), math.sqrt((left**2 * terms).sum())
    reach = float(stats.norm.ppf(0.5 + confidence / 2)) * error
    shown = (events > 0) & (at <= end)
    # Where all have succeeded, a band has no width that the data tell.
    sides = [band.high.probabilities, band.low.probabilities]
    ends = [np.where(np.isnan(side), survival, side) for side in sides]
    success, low, high = ((1 - one[shown]).tolist() for one in (survival, *ends))
    return TimeToSuccess(
        steps=tuple(at[shown].tolist()),
        success=tuple(success),
        low=tuple(low),
        high=tuple(high),
        horizon=end,
        mean=mean,
        interval=Interval(max(0.0, mean - reach), min(end, mean + reach)),
        episodes=len(told),
        confidence=confidence,
    )


CURVES_REPORT = "curves.html"
MOST_RUNS = 10  # with a line of their own


def curves_page(curves: Curves) -> Page:
    """Return the page of the learning curves of several training runs."""
    heads, rows = curves.header(), curves.rows()
    last, *measured = rows[len(curves.steps) - 1 :]
    return Page(
        f"{curves.env}: learning curves",
        f"{curves.what} of {count_text(curves.episodes, 'test episode')} at each step, over "
        f"{count_text(len(curves.runs), 'training run')}",
        "Learning curves",
        [
            ("Figures", [Figures(_over_runs(curves))]),
            ("Numbers", [DataTable(columns_of(heads, rows), sort=False), *curves.notes()]),
        ],
        [
            (f"{heads[1]}, {name}".capitalize(), value, f"{heads[2]} {interval}")
            for name, value, interval, *_ in [[f"at step {last[0]}", *last[1:]], *measured]
        ],
    )


def _over_runs(curves: Curves) -> list[Figure]:
    x, both = np.array(curves.steps, np.float64), [point.estimate for point in curves.points]
    y = np.array([one.value for one in both])
    low, high = (
        np.array([getattr(one.interval, end, np.nan) for one in both]) for end in ("low", "high")
    )
    middle = [plots.Line("interquartile mean", x, y, low, high)]
    goal = curves.threshold
    levels = {} if goal is None else {goal: f"threshold {number_text(goal)}"}
    values = np.array([point.runs for point in curves.points]).T[:MOST_RUNS]
    runs = [plots.Line(curves.runs[at], x, own, series=at) for at, own in enumerate(values)]
    over, each = (
        plots.lines(drawn, "training steps", plots.short(curves.what), levels=levels)
        for drawn in (middle, runs)
    )
    shows = from_to("The interquartile mean over runs", x, y)
    note = f"The band is the {curves.header()[2]}." if len(curves.runs) > 1 else ""
    low_text, high_text = number_texts([*np.quantile(values[:, -1], [0, 1])])
    said = f"At step {x[-1]:,.0f} the means are from {low_text} to {high_text}."
    left = len(curves.runs) - len(runs)
    return [
        Figure("curves", "Interquartile mean over runs", over, shows, note),
        Figure("runs", "Each run", each, said, f"{left} more are in the table." * bool(left)),
    ]
