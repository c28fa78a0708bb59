"""The report of an evaluation: one page, and its figures as files."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect.display import count_text, listed_text, number_texts, percent_text
from tdcollect.evaluation.ledger.manifest import RANDOM, manifest_entry, mixed_values
from tdcollect.evaluation.ledger.reading import TRAJECTORIES, kept_trajectories, trajectory_name
from tdcollect.evaluation.ledger.records import Episode, ledger_digest
from tdcollect.evaluation.reports.episode_rows import episode_table
from tdcollect.evaluation.reports.intervals import ends
from tdcollect.evaluation.reports.running import running_mean
from tdcollect.evaluation.reports.sentences import (
    interval_name,
    mean_sentence,
    number_and_interval,
    parts,
    spread,
)
from tdcollect.evaluation.reports.statistics import Success, Summary, in_order, lost_words
from tdcollect.files import check_no_links, write_atomically
from tdcollect.pages.html import Figure, cards, command, figures, page, paragraphs, section
from tdcollect.pages.plots import Bar, Line, bars, finite, histogram, lines
from tdcollect.pages.tables import Column, Commands, table

if TYPE_CHECKING:
    from tdcollect.evaluation.request import Request

REPORT = "report.html"
FIGURES = "figures"
LOWEST = 5  # returns that are named above the table of episodes
_HERE = "the directory of this page"
LISTED = 100  # entries of a list in the manifest, such as given seeds


@dataclass(frozen=True)
class Again:
    """How an episode is run again.

    Attributes:
        commands: the commands or calls.
        how: a sentence on where they are typed.
    """

    commands: Commands
    how: str


def write_report(
    directory: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    episodes: Sequence[Episode],
    summary: Summary,
    request: Request | None = None,
) -> list[Path]:
    """Write ``report.html`` and its figures, the same bytes for the same arguments.

    The page holds its figures and needs no network; ``figures/`` has them as SVG files too. They
    contain no time and no absolute path. Each file is written completely or not at all.

    Args:
        directory: the directory to write to; made if it is missing. Episodes whose data it keeps
            in ``trajectories/`` get a link to them.
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
    again = commands_of(request, root, root) if request is not None else calls_of(manifest)
    kept = {index: f"{TRAJECTORIES}/{trajectory_name(index)}/" for index in kept_trajectories(root)}
    return write_page(root / REPORT, *report_page(manifest, episodes, summary, again, kept))


def write_page(path: Path, html: bytes, drawn: Sequence[Figure]) -> list[Path]:
    """Write a page, and its figures beside it; return the files, the page last."""
    check_no_links(path.parent, FIGURES)
    folder = path.with_name(FIGURES)
    written = [write_atomically(folder / f"{f.name}.svg", f.file()) for f in drawn]
    return [*written, write_atomically(path, html)]


def report_page(
    manifest: Mapping[str, Any],
    episodes: Sequence[Episode],
    summary: Summary,
    again: Again,
    kept: Mapping[int, str | None] = MappingProxyType({}),
    back: str = "",
) -> tuple[bytes, list[Figure]]:
    """Return the page of an evaluation, and its figures.

    Args:
        manifest: as :func:`write_report` takes it, and so the next two.
        episodes: the records.
        summary: their statistics.
        again: how an episode is run again.
        kept: the indices of episodes whose data are kept, each with the path of their folder
            relative to the page, or None for no link.
        back: HTML above all sections, such as a link to an index.
    """
    records = in_order(episodes)
    completed = [episode for episode in records if episode.completed]
    env = str(manifest_entry(manifest, "env.id") or "env")
    policy = str(manifest_entry(manifest, "policy.class") or "policy")
    same = bool(completed) and all(e.episode_return == e.length for e in completed)
    drawn = _figures(records, completed, summary, same) if completed else []
    names = ["return and length (steps)"] if same else ["return", "length (steps)"]
    columns = [Column(""), *(Column(name, number=True) for name in names)]
    rows = [row[: len(columns)] for row in summary.rows()]
    sections = [
        *([back] if back else []),
        cards(_headline(summary, same)),
        section("Figures", figures(drawn) if drawn else paragraphs(["No episode completed."])),
        section(
            "Statistics",
            table(columns, rows, sort=False, name="Statistics"),
            paragraphs(summary.notes()),
        ),
        section("Episodes", *_episodes(records, completed, again, kept)),
        section("How it was made", _manifest(manifest)),
    ]
    exploration = manifest_entry(manifest, "policy.exploration")
    said = [policy.rpartition(".")[2], count_text(summary.episodes, "test episode")]
    if exploration and policy != RANDOM:
        said.append(f"{'sampled' if exploration == 'random' else exploration} actions")
    digest = ledger_digest(records)
    footer = f"Ledger {digest}. Equal digests mean equal episodes, to the bit. Made by tdcollect."
    return page(env, " · ".join(said), sections, kicker="Evaluation", footer=footer), drawn


def commands_of(request: Request, directory: Path, start: Path, where: str = "") -> Again:
    """Return the commands of ``tdcollect replay``, as typed in the directory ``start``.

    Args:
        request: env and policy by name.
        directory: the directory of the evaluation.
        start: the directory that the commands are typed in.
        where: its name in the sentence; by default the directory of the page.
    """
    commands = Commands.of(*(request.command(index, directory, start) for index in "12"))
    return Again(
        commands,
        f"The command is typed in {where or _HERE}, with the index of an "
        "episode. It runs the code that it names, and checks that the episode is the same to the "
        "bit; with --video FILE.mp4 it films it.",
    )


def calls_of(manifest: Mapping[str, Any], path: str = ".", where: str = "") -> Again:
    """Return the calls in Python that run episodes again.

    Args:
        manifest: the manifest of the evaluation.
        path: its directory, as the calls name it.
        where: as in :func:`commands_of`.
    """
    given = ["env"]
    if manifest_entry(manifest, "policy.class") != RANDOM:
        given.append("policy")
    if manifest_entry(manifest, "env.kwargs"):
        given.append("env_kwargs=env_kwargs")
    name = json.dumps(path, ensure_ascii=False)
    call = f"tdcollect.EvaluationResult.load({name}, {', '.join(given)}).replay("
    return Again(
        Commands(call, ")"),
        f"In Python, in {where or _HERE}, with the env and the policy that were evaluated, and "
        "env_kwargs, backend and device where they were given. The call takes the index of an "
        "episode, and checks that it is the same to the bit.",
    )


def _headline(summary: Summary, same: bool) -> list[tuple[str, str, str]]:
    entries = []
    returns, lengths = summary.returns, summary.lengths
    for name, value, interval in [
        (f"Mean return{' and length' * same}", returns.mean, returns.mean_interval),
        (
            "Interquartile mean",
            returns.interquartile_mean,
            returns.interquartile_mean_interval,
        ),
        ("Mean length", lengths.mean, lengths.mean_interval),
    ][: 2 if same else 3]:
        entries.append((name, *number_and_interval(value, interval, summary.confidence)))
    if summary.success is not None:
        entries.insert(2, ("Success rate", *_rate(summary.success, summary.confidence)))
    count = f"{summary.completed} of {summary.episodes}"
    remark = f"{summary.failed} failed, {lost_words(summary.lost)}{summary.restarted} restarted"
    if summary.distinct < summary.completed:
        remark += f", only {summary.distinct} distinct"
    return [*entries, ("Episodes completed", count, remark)]


def _figures(
    records: Sequence[Episode], completed: Sequence[Episode], summary: Summary, same: bool
) -> list[Figure]:
    returns = [episode.episode_return or 0.0 for episode in completed]
    lengths = [float(episode.length or 0) for episode in completed]
    shown = []
    for name, title, x_label, things, values, quantity in [
        ("returns", "Returns", "return", "returns", returns, summary.returns),
        ("lengths", "Lengths", "length (steps)", "lengths", lengths, summary.lengths),
    ][: 1 if same else 2]:
        drawing = histogram(
            values,
            x_label,
            mean=quantity.mean,
            interval=ends(quantity.mean_interval),
            interval_name=interval_name(summary.confidence),
        )
        said = [spread(values, things), mean_sentence(quantity, summary.confidence)]
        note = "The length of each episode, in steps, is the same as its return." * same
        shown.append(Figure(name, title, drawing, " ".join(filter(None, said)), note))
    return [shown[0], *_running_figure(returns, summary), *shown[1:], _endings(records, summary)]


def _running_figure(returns: Sequence[float], summary: Summary) -> list[Figure]:
    values = finite(returns)
    if len(values) < 2:
        return []
    running = running_mean(values, summary.confidence)
    counts = np.arange(1, len(values) + 1, dtype=np.float64)
    drawing = lines(
        [Line("mean so far", counts, *running)],
        "completed episodes, by index",
        "mean return",
        band_name=f"{interval_name(summary.confidence)} (Student's t)",
        y_limits=running.limits(),
    )
    half = len(values) // 2
    first, last = number_texts([float(running.mean[half - 1]), float(running.mean[-1])])
    shows = (
        f"The mean return is {first} over the first {count_text(half, 'episode')}, and {last} over "
        f"all {len(values)}."
    )
    note = "Each interval is that of its own number of episodes."
    return [Figure("cumulative", "How the mean settles", drawing, shows, note)]


def _endings(records: Sequence[Episode], summary: Summary) -> Figure:
    both = sum(bool(e.terminated and e.truncated) for e in records)
    counts = [
        ("terminated", sum(bool(e.terminated) for e in records) - both, "bar"),
        ("truncated", sum(bool(e.truncated) for e in records) - both, "bar"),
        ("both", both, "bar"),
        ("failed", summary.failed, "bad"),
        ("lost", summary.lost, "bad"),
    ]
    rows = [
        Bar(name, count, _share(count, len(records)), role)
        for name, count, role in counts
        if count or name in ("terminated", "truncated")
    ]
    words = ["terminated", "truncated", "both terminated and truncated", "failed", "lost"]
    said = [parts([(count, text) for (_, count, _), text in zip(counts, words, strict=True)]) + "."]
    success = summary.success
    if success is not None:
        share = _share(success.successes, success.count)
        rows.append(Bar("success", success.successes, share, "good"))
        rate, interval = _rate(success, summary.confidence)
        said.append(
            f"{success.successes} of {count_text(success.count, 'episode')} were a success: {rate} "
            f"({interval})."
        )
    drawing = bars(rows, "episodes", len(records))
    return Figure("endings", "How episodes ended", drawing, " ".join(said))


def _rate(success: Success, confidence: float) -> tuple[str, str]:
    """Return a success rate and its interval in percent."""
    ends = (success.rate, success.interval.low, success.interval.high)
    rate, low, high = (percent_text(round(end, 3)) for end in ends)
    return rate, f"{interval_name(confidence)} {low} to {high}"


def _share(count: int, of: int) -> str:
    return f"{count} ({percent_text(round(count / of, 3))})" if of else str(count)


def _episodes(
    records: Sequence[Episode],
    completed: Sequence[Episode],
    again: Again,
    kept: Mapping[int, str | None],
) -> Iterator[str]:
    lowest = heapq.nsmallest(LOWEST, completed, lambda e: (_order(e.episode_return), e.index))
    few = lowest[: len(completed) // 4]  # of five episodes, five would be all
    if few and len({e.episode_return for e in completed}) > 1:
        texts = number_texts([e.episode_return for e in few])
        named = [f"{text} in episode {e.index}" for text, e in zip(texts, few, strict=True)]
        yield paragraphs([f"Lowest return{'s' * (len(few) > 1)}: {listed_text(named, LOWEST)}."])
    troubled = [e.index for e in records if e.restarts or not e.completed]
    if troubled:
        what = "Failed, lost" if any(e.lost for e in records) else "Failed"
        yield paragraphs([f"{what} or restarted: {_counted(troubled)}."], "warn")
    if records:
        yield paragraphs([again.how])
        yield command(again.commands.of_row(str((lowest or records)[0].index)))
        yield episode_table(records, kept, again.commands)


def _counted(indices: Sequence[int]) -> str:
    return f"episode{'s' if len(indices) > 1 else ''} {listed_text(indices, 10)}"


def _manifest(manifest: Mapping[str, Any]) -> str:
    rows = [[path, text] for path, text in _leaves("", manifest)]
    mixed = [
        f"Not the same for all episodes: {path}, {listed_text(values)}. Episodes may differ from "
        "those of one machine."
        for path, values in mixed_values(manifest).items()
    ]
    return paragraphs(mixed, "warn") + table(
        [Column("entry"), Column("value", text=True)], rows, "The manifest of the evaluation."
    )


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
