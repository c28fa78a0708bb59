"""The page of a comparison, and its figures as files."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tdcollect.display import count_text, number_text, percent_text
from tdcollect.evaluation.reports.comparison import Comparison, Difference
from tdcollect.evaluation.reports.intervals import ends
from tdcollect.evaluation.reports.report import write_page
from tdcollect.evaluation.reports.sentences import (
    interval_name,
    mean_sentence,
    middle_halves,
    number_and_interval,
    spread,
    with_interval,
)
from tdcollect.pages.drawing import short
from tdcollect.pages.html import Figure, cards, figures, page, paragraphs, section
from tdcollect.pages.plots import (
    MOST_PAIRS,
    Bar,
    Estimate,
    bars,
    cloud,
    histogram,
    intervals,
    ridges,
)
from tdcollect.pages.tables import Column, table

COMPARISON_REPORT = "comparison.html"
MOST = 10_000  # rows of the table of episodes
EXTREMES = 200  # of more episodes: the lowest and the highest differences of each policy
IMPROVEMENT = (
    "Probability of improvement: the share of paired episodes with a higher return than the "
    "baseline's, (won + tied / 2) / episodes."
)


def write_comparison_report(
    directory: str | os.PathLike[str], comparison: Comparison
) -> list[Path]:
    """Write ``comparison.html`` and its figures.

    Like :func:`write_report`: self-contained, and the same bytes for the same comparison.

    Returns:
        The files written, the page last.
    """
    differences = comparison.differences
    sections = []
    if len(differences) == 1:
        sections.append(cards(_headline(differences[0])))
    drawn = _together(comparison)
    for place, difference in enumerate(differences, 1):
        drawn += _figures(difference, place)
    columns = [Column(""), *(Column(name, number=True) for name in comparison.names[1:])]
    sections += [
        section(
            "Figures",
            figures(drawn) if drawn else paragraphs(["No episode was completed by both."]),
        ),
        section(
            "Differences",
            table(columns, comparison.rows(), sort=False, name="Differences"),
            paragraphs([*comparison.notes(), IMPROVEMENT]),
        ),
    ]
    if any(d.values for d in differences):
        sections.append(section("Episodes", *_episodes(comparison)))
    lead = (
        f"{', '.join(comparison.names[1:])} minus {comparison.names[0]}, on the same "
        f"{count_text(comparison.episodes, 'test episode')}"
    )
    html = page(f"{comparison.env}: comparison", lead, sections, kicker="Comparison")
    return write_page(Path(directory, COMPARISON_REPORT), html, drawn)


def _headline(d: Difference) -> list[tuple[str, str, str]]:
    mean = number_and_interval(d.difference.mean, d.difference.mean_interval, d.confidence)
    p_value = "-" if d.p_value is None else f"{d.p_value:.2g}"
    return [
        ("Mean difference", *mean),
        (
            "Probability of improvement",
            number_text(d.improvement),
            "share of episodes won, and half of those tied",
        ),
        ("Won, tied, lost", f"{d.won}, {d.tied}, {d.lost}", f"of {len(d.values)} episodes"),
        ("p-value", p_value, "of no mean difference, by sign flips"),
    ]


def _together(comparison: Comparison) -> list[Figure]:
    """Return the figures of all policies: distributions side by side, outcomes, intervals."""
    baseline = comparison.names[0]
    longest = max(comparison.differences, key=lambda d: len(d.baseline_returns))
    rows = [(baseline, longest.baseline_returns)]
    rows += [(d.name, d.returns) for d in comparison.differences]
    if not any(values for _, values in rows):
        return []
    said = middle_halves(rows, "returns")
    note = "Thick: the middle half of the returns; thin: all of them; dot: the mean."
    found = [Figure("returns", "Returns", ridges(rows, "return"), said, note)]
    if len(comparison.differences) == 1:
        return [*found, _outcomes(comparison.differences[0])]
    measured = [d for d in comparison.differences if d.difference.mean is not None]
    if not measured:
        return found
    estimates = [
        Estimate(d.name, d.difference.mean, ends(d.difference.mean_interval), place)
        for place, d in enumerate(comparison.differences, 1)
    ]
    said = " ".join(
        f"{d.name}: {with_interval(d.difference.mean, d.difference.mean_interval, d.confidence)}."
        for d in measured
    )
    drawing = intervals(estimates, f"mean difference to {short(baseline)}", line_at=0.0)
    return [*found, Figure("intervals", f"Mean differences to {baseline}", drawing, said)]


def _outcomes(d: Difference) -> Figure:
    """Return the figure of episodes won, tied and lost."""
    count = len(d.values)
    rows = [
        Bar(name, number, f"{number} ({percent_text(round(number / count, 3))})", role)
        for name, number, role in [
            ("won", d.won, "good"),
            ("tied", d.tied, "bar"),
            ("lost", d.lost, "bad"),
        ]
    ]
    shows = (
        f"Of {count_text(count, 'episode')}, {d.name} has a higher return than {d.baseline} in "
        f"{d.won}, an equal one in {d.tied}, and a lower one in {d.lost}."
    )
    return Figure("outcomes", "Episodes won, tied and lost", bars(rows, "episodes", count), shows)


def _figures(d: Difference, place: int) -> Iterator[Figure]:
    """Yield the figures of a difference: its histogram, and pairs of returns."""
    if not d.values:
        return
    drawing = histogram(
        d.values,
        "difference of returns",
        mean=d.difference.mean,
        interval=ends(d.difference.mean_interval),
        interval_name=interval_name(d.confidence),
        zero=True,
    )
    said = [spread(d.values, "differences"), mean_sentence(d.difference, d.confidence)]
    shows = " ".join(filter(None, said))
    note = "The dashed line is no difference."
    yield Figure(f"difference_{place}", f"{d.name} minus {d.baseline}", drawing, shows, note)
    pairs = cloud(
        np.array(d.baseline_returns),
        np.array(d.returns),
        f"return of {short(d.baseline)}",
        f"return of {short(d.name)}",
    )
    shows = (
        f"{d.name} has the higher return in {d.won} of {count_text(len(d.values), 'episode')}, "
        f"{d.baseline} in {d.lost}; {d.tied} are tied."
    )
    note = "On the dashed line both returns are equal."
    if len(d.values) > MOST_PAIRS:
        note += f" {MOST_PAIRS} of {len(d.values)} episodes are drawn, at even distances."
    yield Figure(f"pairs_{place}", f"{d.name} and {d.baseline}", pairs, shows, note)


def _episodes(comparison: Comparison) -> Iterator[str]:
    """Yield the table of episodes with the returns of all policies, or of those that matter."""
    differences = comparison.differences
    returns: list[dict[int, tuple[float | None, ...]]] = [
        dict(
            zip(d.episodes, zip(d.baseline_returns, d.returns, d.values, strict=True), strict=True)
        )
        for d in differences
    ]
    indices = sorted({index for d in differences for index in d.episodes})
    if len(indices) > MOST:
        chosen = set()
        for d in differences:
            order = range(len(d.values))
            extreme = heapq.nsmallest(EXTREMES, order, d.values.__getitem__)
            extreme += heapq.nlargest(EXTREMES, order, d.values.__getitem__)
            chosen |= {d.episodes[at] for at in extreme}
        yield paragraphs(
            [
                f"The table lists {len(chosen)} of {len(indices)} episodes: those with the "
                f"{EXTREMES} lowest and the {EXTREMES} highest differences of each policy."
            ],
            "warn",
        )
        indices = sorted(chosen)
    columns = [Column("episode", number=True), Column(comparison.names[0], number=True)]
    for d in differences:
        columns += [Column(d.name, number=True), Column("difference", number=True)]
    rows = []
    for index in indices:
        found = [of.get(index, (None, None, None)) for of in returns]
        baseline = next((first for first, *_ in found if first is not None), None)
        rows.append([str(index), baseline, *(value for _, *own in found for value in own)])
    yield table(columns, rows, "Returns of each episode.", hint="words, or difference<0")
