"""Learning curves over several training runs: what a training gives, and how much runs differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect import display
from tdcollect.evaluation import ledger
from tdcollect.evaluation.curve import check_folder, episodes_of, steps_of
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import (
    Interval,
    Values,
    check_settings,
    ends,
    generator,
    interquartile_mean,
    interquartile_mean_interval,
)
from tdcollect.suites.aggregates import LABELS, RESAMPLES, Estimate

RETURN, SUCCESS = "return", "success"
IQM = LABELS["iqm"]

# The coverage of 95% intervals from few runs, in percent, lowest and highest of the simulations in
# docs/evaluating.md. Suites do better: there each run has a score on each of several tasks.
COVERAGE = {2: (47, 51), 3: (71, 75), 4: (84, 87), 5: (84, 90)}


@dataclass(frozen=True)
class Measure:
    """A number of each training run, and their interquartile mean.

    Attributes:
        name: what it is, in words.
        runs: the number of each run, by name; infinite steps to a threshold for one that never
            gets there.
        estimate: their interquartile mean, with the percentile bootstrap interval over runs.
    """

    name: str
    runs: Mapping[str, float]
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The learning curves of several training runs; print them to see tables.

    Attributes:
        env: the env's id.
        episodes: the number of test episodes at each step.
        on: ``"return"``, ``"success"`` or a metric: the curves are of its mean over episodes.
        steps: the training steps that all runs have, with a finite mean.
        left_out: the steps that only some runs have.
        runs: the mean at each step, by the name of the run.
        estimates: at each step, the interquartile mean over runs; None as its interval for one run.
        measures: the numbers of a whole curve: ``"last"``, the mean at the last step; ``"area"``
            under the curve over its width, which is the mean over training by the trapezoidal
            rule, if there are two steps; and ``"steps"`` to a threshold, if one was given: the
            first step with a mean there or beyond.
        threshold: as it was given.
        confidence, resamples, seed: as for :func:`over_runs`.
    """

    env: str
    episodes: int
    on: str
    steps: tuple[int, ...]
    left_out: tuple[int, ...]
    runs: Mapping[str, tuple[float, ...]]
    estimates: tuple[Estimate, ...]
    measures: Mapping[str, Measure]
    threshold: float | None
    confidence: float
    resamples: int
    seed: int

    @property
    def what(self) -> str:
        """The quantity of the curves, in words."""
        return "success rate" if self.on == SUCCESS else f"mean {self.on}"

    @property
    def interval(self) -> str:
        """The intervals of the estimates, in words."""
        return f"{display.percent_text(self.confidence)} interval"

    def to_dict(self) -> dict[str, Any]:
        """Return the curves as plain dicts, lists, numbers and None, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        runs = display.count_text(len(self.runs), "run")
        return display.one_line(self, self.env, runs, f"last {self.measures['last'].estimate}")

    def __str__(self) -> str:
        episodes = display.count_text(self.episodes, "test episode")
        return "\n\n".join(
            [
                display.visible(f"{self.env}, {self.what} of {episodes}"),
                display.text_table(self.step_rows(), ["step", IQM, self.interval, *self.runs]),
                display.text_table(self.run_rows(), ["run", *(m.name for m in self._measures)]),
                "\n".join(map(display.visible, self.notes())),
            ]
        )

    @property
    def _measures(self) -> list[Measure]:
        return [*self.measures.values()]

    def step_rows(self) -> list[list[str]]:
        """Return a row per step: the estimate, its interval, and the mean of each run."""
        rows = zip(self.steps, self.estimates, *self.runs.values(), strict=True)
        return display.number_columns(
            [f"{step:,}", one.value, ends(one.interval), *values] for step, one, *values in rows
        )

    def run_rows(self) -> list[list[str]]:
        """Return a row per run with its measures, and a last one with their estimates."""
        rows = display.number_columns(
            [name, *(measure.runs[name] for measure in self._measures)] for name in self.runs
        )
        rows.append([IQM, *(str(measure.estimate) for measure in self._measures)])
        return [[name, *(cell.replace("inf", "never") for cell in cells)] for name, *cells in rows]

    def notes(self) -> list[str]:
        """Return the notes to the tables, one sentence each."""
        runs, notes = len(self.runs), []
        if runs == 1:
            notes.append("One run: no interval. It cannot show how much another run would differ.")
        else:
            notes.append(f"{self.interval}s: training runs drawn anew, at each step by itself.")
        if runs in COVERAGE:
            low, high = COVERAGE[runs]
            notes.append(
                f"{runs} runs are too few for the intervals: in simulations, 95% intervals from "
                f"{runs} runs held the truth in {low}% to {high}% of cases."
            )
        if "area" in self.measures:
            notes.append("The area under a curve is over its width: its mean over training.")
        if self.left_out:
            notes.append(
                f"All runs share {display.count_text(len(self.steps), 'step')}; those that some "
                f"lack are left out: {display.listed_text(self.left_out)}."
            )
        if never := self.never:
            notes.append(
                f"{display.listed_text(never)} never came to {display.number_text(self.threshold)},"
                " which counts as infinitely many steps."
            )
        return notes

    @property
    def never(self) -> list[str]:
        """The runs that never come to the threshold."""
        steps = self.measures["steps"].runs if "steps" in self.measures else {}
        return [name for name, step in steps.items() if math.isinf(step)]


def over_runs(
    directories: Sequence[str | os.PathLike[str]],
    *,
    names: Sequence[str] | None = None,
    on: str = RETURN,
    **settings: Any,
) -> Curves:
    """Return the learning curves of several training runs together, from their ledgers.

    At each step that all runs have: the interquartile mean over runs of their mean returns, with
    the percentile bootstrap interval over runs (Agarwal et al. 2021). The same numbers come from
    the runs in any order.

    Args:
        directories: the ``output_dir`` of the :class:`tdcollect.Evaluator` of each run.
        names: of the runs; by default the names of the directories.
        on: ``"return"``, ``"success"``, or the name of a metric.
        settings: ``threshold``, to count the steps to a mean of at least this;
            ``lower_is_better``, for a mean of at most the threshold, as of a cost; ``confidence``,
            ``resamples`` and ``seed`` of every interval.

    Raises:
        ValueError: for runs of other envs or episodes, runs without a step in common, a directory
            without a curve, and numbers out of range.
    """
    paths = [Path(directory) for directory in directories]
    called = [path.name for path in paths] if names is None else [*names]
    if not paths or len({*called}) < len(called) or len(called) != len(paths):
        raise ValueError(
            f"expected one directory or more, each with a name of its own, got "
            f"{[*map(str, paths)]} called {called}"
        )
    manifests = [_manifest(path) for path in paths]
    for name, manifest in zip(called[1:], manifests[1:], strict=True):
        if found := ledger.differences(*map(episodes_of, (manifests[0], manifest))):
            text = ledger.differences_text(found, f"in {called[0]}", f"in {name}")
            raise ValueError(
                f"expected runs that are tested on the same episodes, but {called[0]} and {name} "
                f"differ: {text}"
            )
    return together(
        {name: dict(_means(path, on)) for name, path in zip(called, paths, strict=True)},
        env=str(ledger.manifest_entry(manifests[0], "env.id")),
        episodes=len(ledger.asked_indices(manifests[0])),
        on=on,
        **settings,
    )


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
    check_settings(confidence, resamples, seed, 0)
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"expected a finite threshold, got {threshold}")
    steps = sorted(set.intersection(*map(set, means.values())))
    if not steps:
        listed = {name: display.listed_text([*own]) or "none" for name, own in means.items()}
        text = "; ".join(f"{name} has {own}" for name, own in listed.items())
        raise ValueError(f"expected runs with training steps in common, got none: {text}")
    values = np.array([[own[step] for step in steps] for own in means.values()])
    estimate = partial(_estimate, confidence=confidence, resamples=resamples, seed=seed)

    def measure(words: str, numbers: Values) -> Measure:
        return Measure(words, dict(zip(means, numbers.tolist(), strict=True)), estimate(numbers))

    measures = {"last": measure(f"at step {steps[-1]:,}", values[:, -1])}
    if len(steps) > 1:
        widths = np.diff(steps) / (steps[-1] - steps[0])
        areas = ((values[:, 1:] + values[:, :-1]) / 2 * widths).sum(1)
        measures["area"] = measure("area under the curve", areas)
    if threshold is not None:
        reached = values <= threshold if lower_is_better else values >= threshold
        first = np.where(reached, steps, math.inf).min(1)
        measures["steps"] = measure(f"steps to {display.number_text(threshold)}", first)
    return Curves(
        env=env,
        episodes=episodes,
        on=on,
        steps=tuple(steps),
        left_out=tuple(sorted(set().union(*means.values()).difference(steps))),
        runs={name: tuple(row) for name, row in zip(means, values.tolist(), strict=True)},
        estimates=tuple(map(estimate, values.T)),
        measures=measures,
        threshold=threshold,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the first evaluation of a curve."""
    check_folder(path)
    finished = [step for step in steps_of(path).values() if ledger.is_finished(step)]
    if not finished:
        raise ValueError(
            f"expected the directory of a learning curve, as tdcollect.Evaluator writes it with an "
            f"output_dir, got {path}, which holds no finished evaluation"
        )
    return ledger.read_manifest(finished[0])


def _means(path: Path, on: str) -> Iterator[tuple[int, float]]:
    """Yield the steps of a run with a finite mean, and the mean."""
    for step, directory in steps_of(path).items():
        if not ledger.is_finished(directory):
            continue
        found = EvaluationResult.load(directory).summary(resamples=1)
        rate = None if found.success is None else found.success.rate
        means = {RETURN: found.returns.mean, SUCCESS: rate}
        means |= {name: metric.mean for name, metric in found.metrics.items()}
        if on not in means:
            raise ValueError(f"expected one of {', '.join(means)} in {directory}, got {on!r}")
        if (mean := means[on]) is not None:
            yield step, mean


def _estimate(values: Values, confidence: float, resamples: int, seed: int) -> Estimate:
    """Return the interquartile mean of numbers of runs, which may be infinite."""
    ordered = np.sort(values)  # the same numbers are drawn in whatever order the runs come
    rng = generator(seed)  # the same at each step, so that a band is no rougher than the curves
    with np.errstate(invalid="ignore"):
        found = interquartile_mean_interval(ordered, confidence, resamples, rng)
    if found is not None:  # NaN is between two infinite ones
        found = Interval(*(math.inf if math.isnan(end) else end for end in ends(found)))
    return Estimate(float(interquartile_mean(ordered)), found)
