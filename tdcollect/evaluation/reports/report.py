"""The report of an evaluation, or of a comparison: one page, and its figures as files."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdcollect.display import count_text, listed_text, number_text, percent_text
from tdcollect.evaluation.ledger.manifest import RANDOM, manifest_entry, mixed_values
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.reports.comparison import Comparison, Difference
from tdcollect.evaluation.reports.figures import cumulative_mean, histogram
from tdcollect.evaluation.reports.page import (
    Column,
    cards,
    figure,
    page,
    paragraphs,
    section,
    table,
)
from tdcollect.evaluation.reports.statistics import Summary, in_order
from tdcollect.files import write_atomically

if TYPE_CHECKING:
    from tdcollect.evaluation.request import Request

REPORT = "report.html"
COMPARISON_REPORT = "comparison.html"
FIGURES = "figures"
HARDEST = 10  # rows of the table of lowest returns
LISTED = 100  # entries of a list in the manifest, such as given seeds
TROUBLED = 100  # rows of the table of failed and restarted episodes


def write_report(
    directory: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    episodes: Sequence[Episode],
    summary: Summary,
    request: Request | None = None,
) -> list[Path]:
    """Write ``report.html`` and its figures, the same bytes for the same arguments.

    The page holds its figures and needs no network; ``figures/`` has them as PNG files too. They
    contain no time and no absolute path. Each file is written completely or not at all.

    Args:
        directory: the directory to write to; made if it is missing.
        manifest: the manifest of the evaluation: nested mappings, as JSON has them.
        episodes: its records.
        summary: their statistics, by :func:`tdcollect.evaluation.summarize`.
        request: env and policy by name: the page then has the commands of ``tdcollect replay``
            that run episodes again, instead of the calls in Python.

    Returns:
        The files written, the page last.

    Raises:
        ModuleNotFoundError: without matplotlib or scipy, which the extra ``evaluate`` brings.
    """
    root = Path(directory)
    records = in_order(episodes)
    completed = [episode for episode in records if episode.completed]
    env = str(manifest_entry(manifest, "env.id") or "env")
    policy = str(manifest_entry(manifest, "policy.class") or "policy")
    figures = _figures(completed, env, summary) if completed else {}
    pictures = [figure(png, description) for png, description in figures.values()]
    sections = [
        cards(_headline(summary)),
        section("Statistics", _statistics(summary), paragraphs(summary.notes())),
        section("Figures", *pictures or [paragraphs(["No episode completed."])]),
        section("Lowest returns", _hardest(completed, manifest, root, request)),
        section("Failed and restarted episodes", _troubled(records)),
        section("How it was made", _manifest(manifest)),
    ]
    lead = f"{policy}, {count_text(summary.episodes, 'test episode')}"
    written = [write_atomically(root / FIGURES / name, png) for name, (png, _) in figures.items()]
    return [*written, write_atomically(root / REPORT, page(env, lead, sections))]


def write_comparison_report(
    directory: str | os.PathLike[str], comparison: Comparison
) -> list[Path]:
    """Write ``comparison.html`` and a figure of the differences of each policy.

    Like :func:`write_report`: self-contained, and the same bytes for the same comparison.

    Returns:
        The files written, the page last.
    """
    figures = {
        f"difference_{number}.png": _difference_figure(difference)
        for number, difference in enumerate(comparison.differences, 1)
        if difference.values
    }
    columns = [Column(""), *(Column(name, number=True) for name in comparison.names[1:])]
    pictures = [figure(png, description) for png, description in figures.values()]
    sections = [
        section("Differences", table(columns, comparison.rows()), paragraphs(comparison.notes())),
        section("Figures", *pictures or [paragraphs(["No episode was completed by both."])]),
    ]
    lead = (
        f"{', '.join(comparison.names[1:])} minus {comparison.names[0]} on the same "
        f"{count_text(comparison.episodes, 'test episode')}"
    )
    root = Path(directory)
    written = [write_atomically(root / FIGURES / name, png) for name, (png, _) in figures.items()]
    html = page(f"{comparison.env}: comparison", lead, sections)
    return [*written, write_atomically(root / COMPARISON_REPORT, html)]


def _headline(summary: Summary) -> list[tuple[str, str, str]]:
    percent = percent_text(summary.confidence)
    entries = []
    for name, value, interval in [
        ("Mean return", summary.returns.mean, summary.returns.mean_interval),
        (
            "Interquartile mean",
            summary.returns.interquartile_mean,
            summary.returns.interquartile_mean_interval,
        ),
    ]:
        remark = "no interval" if interval is None else f"{percent} interval {interval}"
        entries.append((name, number_text(value), remark))
    if summary.success is not None:
        rate = percent_text(round(summary.success.rate, 4))
        interval = summary.success.interval
        low, high = (percent_text(round(end, 3)) for end in (interval.low, interval.high))
        entries.append(("Success rate", rate, f"{percent} interval {low} to {high}"))
    count = f"{summary.completed} of {summary.episodes}"
    remark = f"{summary.failed} failed, {summary.restarted} restarted"
    return [*entries, ("Episodes completed", count, remark)]


def _statistics(summary: Summary) -> str:
    columns = [Column(""), Column("return", number=True), Column("length (steps)", number=True)]
    return table(columns, summary.rows())


def _figures(
    completed: Sequence[Episode], env: str, summary: Summary
) -> dict[str, tuple[bytes, str]]:
    """Return the picture of each file, with its description."""
    returns = [episode.episode_return or 0.0 for episode in completed]
    lengths = [float(episode.length or 0) for episode in completed]
    over = count_text(len(completed), "episode")
    found = {}
    for name, thing, unit, values, quantity in [
        ("returns.png", "Return", "return", returns, summary.returns),
        ("lengths.png", "Length", "length (steps)", lengths, summary.lengths),
    ]:
        png = histogram(
            values,
            title=env,
            x_label=unit,
            mean=quantity.mean,
            interval=quantity.mean_interval,
            confidence=summary.confidence,
        )
        found[name] = (png, f"{thing} of {over}: how many episodes have each.")
    figures = {"returns.png": found["returns.png"]}
    if len(returns) > 1:
        text = (
            f"Mean return over the first episodes, up to all {len(completed)}: how it settles. "
            "Each interval is that of its own number of episodes."
        )
        png = cumulative_mean(returns, title=env, confidence=summary.confidence)
        figures["cumulative.png"] = (png, text)
    return figures | {"lengths.png": found["lengths.png"]}


def _difference_figure(difference: Difference) -> tuple[bytes, str]:
    png = histogram(
        difference.values,
        title=f"{difference.name} minus {difference.baseline}",
        x_label="difference of returns",
        mean=difference.difference.mean,
        interval=difference.difference.mean_interval,
        confidence=difference.confidence,
        zero=True,
    )
    text = (
        f"Return of {difference.name} minus that of {difference.baseline}, in "
        f"{count_text(len(difference.values), 'episode')}: {difference.won} won, "
        f"{difference.tied} tied, {difference.lost} lost."
    )
    return png, text


def _hardest(
    completed: Sequence[Episode], manifest: Mapping[str, Any], root: Path, request: Request | None
) -> str:
    if not completed:
        return paragraphs(["No episode completed."])
    lowest = heapq.nsmallest(HARDEST, completed, lambda e: (_order(e.episode_return), e.index))
    columns = [
        Column("episode", number=True),
        Column("return", number=True),
        Column("length (steps)", number=True),
        Column("ended"),
        Column("env seed", number=True),
        Column("run it again", code=True),
    ]
    rows = [
        [
            str(e.index),
            number_text(e.episode_return),
            str(e.length),
            _ended(e),
            str(e.env_seed),
            _call(e.index, manifest) if request is None else request.command(e.index, root, root),
        ]
        for e in lowest
    ]
    return table(columns, rows, _CALLS if request is None else _COMMANDS)


_COMMANDS = "The commands are typed in the directory of this page; they run what they name."
_CALLS = (
    "In Python, in the directory of this page, with the env and the policy that were evaluated, "
    "and env_kwargs, backend and device where they were given."
)


def _call(index: int, manifest: Mapping[str, Any]) -> str:
    """Return the call in Python that runs an episode again."""
    given = ["env"]
    if manifest_entry(manifest, "policy.class") != RANDOM:
        given.append("policy")
    if manifest_entry(manifest, "env.kwargs"):
        given.append("env_kwargs=env_kwargs")
    return f'tdcollect.EvaluationResult.load(".", {", ".join(given)}).replay({index})'


def _troubled(records: Sequence[Episode]) -> str:
    troubled = [e for e in records if e.restarts or not e.completed]
    if not troubled:
        return paragraphs(["None: every episode ran to its end at the first try."])
    columns = [
        Column("episode", number=True),
        Column("status"),
        Column("restarts", number=True),
        Column("return", number=True),
        Column("env seed", number=True),
    ]
    rows = [
        [str(e.index), e.status, str(e.restarts), number_text(e.episode_return), str(e.env_seed)]
        for e in troubled[:TROUBLED]
    ]
    left = len(troubled) - len(rows)
    more = [f"{left} more are in episodes.jsonl."] if left else []
    return table(columns, rows) + paragraphs(more)


def _manifest(manifest: Mapping[str, Any]) -> str:
    rows = [[path, text] for path, text in _leaves("", manifest)]
    mixed = [
        f"Not the same for all episodes: {path}, {listed_text(values)}. Episodes may differ from "
        "those of one machine."
        for path, values in mixed_values(manifest).items()
    ]
    return paragraphs(mixed) + table([Column("entry"), Column("value")], rows)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, entry in sorted(value.items()):  # as they are in the file
            yield from _leaves(f"{path}.{key}" if path else str(key), entry)
    elif value is None or (isinstance(value, (Mapping, list, tuple)) and not value):
        yield path, "none"
    elif isinstance(value, str):
        yield path, value
    elif isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value):
        yield path, ", ".join(value)
    elif isinstance(value, (list, tuple)) and len(value) > LISTED:
        start = json.dumps(value[:LISTED], ensure_ascii=False, default=str)
        yield path, f"{start[:-1]}, ...], {len(value)} in all: manifest.json has them"
    else:
        yield path, json.dumps(value, ensure_ascii=False, default=str)


def _order(value: float | None) -> float:
    """Return a key for sorting by return, NaN first: it counts as the worst one."""
    return float("-inf") if value is None or value != value else value


def _ended(episode: Episode) -> str:
    ways = [
        name
        for name, flag in [("terminated", episode.terminated), ("truncated", episode.truncated)]
        if flag
    ]
    return " and ".join(ways) or "-"
