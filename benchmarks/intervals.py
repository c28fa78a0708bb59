"""Simulate how often the intervals of tdcollect hold the truth, and what pairing finds.

    python benchmarks/intervals.py

Prints the tables of docs/statistics.md; the same versions give the same tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from tdcollect import compare
from tdcollect.evaluation.comparison import Difference, episodes_needed
from tdcollect.evaluation.ledger import Episode
from tdcollect.evaluation.statistics import (
    Interval,
    interquartile_mean,
    mean_interval,
    paired_rates_interval,
)

CONFIDENCE = 0.95
RESAMPLES = 2000
Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]

RETURNS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "10 or 200, evenly": lambda rng, shape: np.where(rng.random(shape) < 0.5, 10.0, 200.0),
    "500 in 4 of 5, else 50 to 500": lambda rng, shape: np.where(
        rng.random(shape) < 0.8, 500.0, rng.uniform(50, 500, shape)
    ),
    "500 in 9 of 10, else 0 to 100": lambda rng, shape: np.where(
        rng.random(shape) < 0.9, 500.0, rng.uniform(0, 100, shape)
    ),
}


@dataclass
class Run:
    """An evaluation in the form that ``compare`` accepts."""

    episodes: Sequence[Episode]
    manifest: dict[str, Any] = field(default_factory=dict)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def coverage(sizes: Sequence[int], evaluations: int) -> str:
    rows = []
    for number, (name, draw) in enumerate(RETURNS.items()):
        many = draw(np.random.default_rng(0), (4_000_000,))
        for what, mean in (("mean", np.mean), ("interquartile mean", interquartile_mean)):
            truth = mean(many)
            shares = []
            for size in sizes:
                rng = np.random.default_rng([number, size])
                found = [
                    mean_interval(values, CONFIDENCE, RESAMPLES, rng, mean)
                    for values in draw(rng, (evaluations, size))
                ]
                shares.append(np.mean([holds(interval, truth) for interval in found]))
            rows.append([name, what, *map(percent, shares)])
    return markdown(["returns", "interval of", *(f"E = {size}" for size in sizes)], rows)


def holds(interval: Interval | None, truth: float) -> bool:
    assert interval is not None
    # Sums round: an interval of no width at the truth holds it.
    slack = 1e-9 * abs(truth)
    return interval.low - slack <= truth <= interval.high + slack


def methods(size: int, evaluations: int) -> str:
    """Coverage of the mean's interval: by BCa, which is used, and by two alternatives."""
    rows = []
    for number, (name, draw) in enumerate(RETURNS.items()):
        truth = draw(np.random.default_rng(0), (4_000_000,)).mean()
        rng = np.random.default_rng([number, size])
        hits = np.zeros(3)
        for values in draw(rng, (evaluations, size)):
            reach = stats.t.ppf(0.5 + CONFIDENCE / 2, size - 1) * stats.sem(values)
            percentile = stats.bootstrap(
                (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=rng
            ).confidence_interval
            found = [
                Interval(percentile.low, percentile.high),
                mean_interval(values, CONFIDENCE, RESAMPLES, rng),
                Interval(values.mean() - reach, values.mean() + reach),
            ]
            hits += [holds(interval, truth) for interval in found]
        rows.append([name, *map(percent, hits / evaluations)])
    return markdown([f"returns, E = {size}", "percentile", "BCa", "Student's t"], rows)


def rates(sizes: Sequence[int]) -> str:
    """Exact coverage: the probabilities of all counts whose interval holds the rate, summed."""
    rows = []
    for rate in (0.5, 0.8, 0.95, 0.99):
        shares = []
        for size in sizes:
            count = np.arange(size + 1)
            found = [
                stats.binomtest(k, size).proportion_ci(CONFIDENCE, "wilson") for k in count.tolist()
            ]
            inside = [interval.low <= rate <= interval.high for interval in found]
            shares.append(float(stats.binom.pmf(count, size, rate)[inside].sum()))
        rows.append([f"{rate:g}", *map(percent, shares)])
    return markdown(["success rate", *(f"E = {size}" for size in sizes)], rows)


def paired_rates(sizes: Sequence[int]) -> str:
    """Exact coverage of the difference of two rates: summed over all counts that differ.

    The last rows are of equal rates: how often one is shown to be worse, which is an error.
    """
    cases = [(0.5, 0.5, 0.5), (0.5, 0.4, 0.3), (0.8, 0.8, 0.1), (0.9, 0.8, 0.2)]
    cases += [(0.95, 0.95, 0.04), (0.99, 0.95, 0.05), (0.99, 0.99, 0.02)]
    shares: dict[tuple[str, str, str], list[str]] = {}
    for size in sizes:
        counts = [(g, lost) for g in range(size + 1) for lost in range(size + 1 - g)]
        found = [paired_rates_interval(g, lost, size, CONFIDENCE) for g, lost in counts]
        low, high = np.array([(one.low, one.high) for one in found]).T
        gained, lost = np.array(counts).T
        for baseline, rate, differing in cases:
            chances = [(differing + rate - baseline) / 2, (differing - rate + baseline) / 2]
            cells = np.stack([gained, lost, size - gained - lost], -1)
            weights = stats.multinomial.pmf(cells, size, [*chances, 1 - sum(chances)])
            named = (f"{baseline:g}, {rate:g}", f"{differing:g}")
            inside = (low <= rate - baseline + 1e-12) & (rate - baseline - 1e-12 <= high)
            shares.setdefault((*named, "the truth in the interval"), []).append(
                percent(weights[inside].sum())
            )
            if rate == baseline:
                wrong = percent(weights[high < 0].sum())
                shares.setdefault((*named, "wrongly shown to be worse"), []).append(wrong)
    rows = sorted(([*names, *values] for names, values in shares.items()), key=lambda row: row[2])
    header = ["success rates", "episodes that differ", "", *(f"E = {size}" for size in sizes)]
    return markdown(header, rows)


def pairing(evaluations: int) -> str:
    """Power with and without pairing: 50 episodes; starts have deviation 80, the remainder 7."""
    rows = []
    for shift in (0, 2, 5, 10, 40):
        rng = np.random.default_rng(shift)
        paired = unpaired = 0
        for _ in range(evaluations):
            ease = rng.normal(300, 80, size=50)
            first, second = ease + rng.normal(0, 7, 50), ease + shift + rng.normal(0, 7, 50)
            runs = [
                Run([Episode(i, i, i, episode_return=v, length=1) for i, v in enumerate(values)])
                for values in (first.tolist(), second.tolist())
            ]
            (found,) = compare(*runs, names=["a", "b"], resamples=999).differences
            assert found.p_value is not None
            paired += found.p_value < 0.05
            unpaired += stats.ttest_ind(first, second).pvalue < 0.05
        rows.append([str(shift), percent(paired / evaluations), percent(unpaired / evaluations)])
    header = ["true difference", "found by `compare`", "found by an unpaired t-test"]
    return markdown(header, rows)


def planned(comparisons: int) -> str:
    """Power that is reached with a planned number: from the truth, and from pilots of 30 episodes.

    Returns share an ease of deviation 80.
    """
    rows = []
    for number, (name, noise) in enumerate(RETURNS.items()):
        rng = np.random.default_rng(number)
        sample = noise(rng, (1_000_000,))
        std = float(sample.std() * 2**0.5)
        size = 0.4 * std

        def pair(count: int, noise: Draw = noise, size: float = size) -> list[Run]:
            ease = rng.normal(0, 80, count)  # noqa: B023, of this turn of the loop
            values = ease + noise(rng, (count,)), ease + size + noise(rng, (count,))  # noqa: B023
            return [recorded(returns) for returns in values]

        numbers = [episodes_needed(size, std)] * comparisons
        pilots = [difference_of(*pair(30)).episodes_needed(size) for _ in range(comparisons)]
        shares = [
            np.mean([(difference_of(*pair(count)).p_value or 0) < 0.05 for count in counts])
            for counts in (numbers, pilots)
        ]
        rows.append([name, str(numbers[0]), *map(percent, shares)])
    header = ["returns", "planned from the truth", "its power", "from pilots of 30"]
    return markdown(header, rows)


def recorded(returns: Any) -> Run:
    return Run(
        [
            Episode(i, i, i, episode_return=value, length=1)
            for i, value in enumerate(returns.tolist())
        ]
    )


def difference_of(first: Run, second: Run) -> Difference:
    return compare(first, second, names=["a", "b"], resamples=999).differences[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--evaluations", type=int, default=1000, help="simulated evaluations per cell"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10, 20, 50, 100, 200], help="values of E"
    )
    arguments = parser.parse_args()
    print(coverage(arguments.sizes, arguments.evaluations), end="\n\n")
    print(methods(20, arguments.evaluations), end="\n\n")
    print(rates(arguments.sizes), end="\n\n")
    print(paired_rates(arguments.sizes), end="\n\n")
    print(pairing(arguments.evaluations), end="\n\n")
    print(planned(arguments.evaluations))


if __name__ == "__main__":
    main()
