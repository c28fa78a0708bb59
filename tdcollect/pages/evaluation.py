"""The pages of one evaluation, and of a comparison on the same episodes."""

from __future__ import annotations

import heapq
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tdcollect import display
from tdcollect.display import count_text, listed_text, number_text, number_texts, percent_text
from tdcollect.evaluation import ledger, statistics
from tdcollect.evaluation.ledger import BATCHES, RANDOM, Episode, manifest_entry, policy_name
from tdcollect.evaluation.statistics import Interval, Quantity, Summary, ends, in_order
from tdcollect.files import write_json
from tdcollect.pages import build, plots
from tdcollect.pages.build import REPORT, Cell, Column, DataTable, Figure, Figures, Page, Paragraph
from tdcollect.pages.plots import Values, finite, short

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Comparison, Difference

COMPARISON_REPORT = "comparison.html"
COMPARED = "comparison.json"
LOWEST = 5  # returns that are named above the table of episodes
LISTED = 100  # entries of a list in the manifest, such as given seeds
MOST = 10_000  # rows of a table of episodes
EXTREMES = 200  # of more episodes: the lowest, the highest, and those that failed or were restarted
_HERE = "the directory of this page"
_TYPED = ("env", "policy", "checkpoint", "vecnormalize", "env_kwargs", "backend", "device")
MAKE_ENV = "FILE.py:make_env"  # in commands, where no option names what is around the env
AUDIT = (
    " Without the policy, `tdcollect audit DIR` runs episodes again by the actions that were kept, "
    "and compares them with the ledger."
)
IMPROVEMENT = (
    "Probability of improvement: the share of paired episodes with a higher return than the "
    "baseline's, (won + tied / 2) / episodes."
)


def write_report(
    directory: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    episodes: Sequence[Episode],
    summary: Summary,
) -> list[Path]:
    """Write ``report.html`` and its figures, the same bytes for the same arguments.

    The page holds its figures and needs no network; ``figures/`` has them as SVG files too. They
    contain no time and no absolute path. Each file is written completely or not at all.

    Args:
        directory: the directory to write to; made if it is missing. Episodes whose data it keeps
            in ``trajectories/`` get a link to them. If its ``run.json`` names env and policy, the
            page has the commands of ``tdcollect replay`` that run episodes again, instead of the
            calls in Python.
        manifest: the manifest of the evaluation: nested mappings, as JSON has them.
        episodes: its records.
        summary: their statistics, by :func:`tdcollect.evaluation.summarize`.

    Returns:
        The files written, the page last.
    """
    root = Path(directory)
    again = again_of(manifest, root, root, _HERE)
    kept = {
        index: Cell("kept", f"{ledger.TRAJECTORIES}/{ledger.trajectory_name(index)}")
        for index in ledger.kept_trajectories(root)
    }
    return build.write_page(root / REPORT, report_page(manifest, episodes, summary, again, kept))


def report_page(
    manifest: Mapping[str, Any],
    episodes: Sequence[Episode],
    summary: Summary,
    again: build.Commands,
    kept: Mapping[int, Cell] = MappingProxyType({}),
    links: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page of an evaluation, as :func:`write_report` writes it.

    Episodes whose data are ``kept`` have a cell that says so, with the path to them or to a page of
    their own.
    """
    records = in_order(episodes)
    completed = [episode for episode in records if episode.completed]
    policy = policy_name(manifest)
    exploration = manifest_entry(manifest, "policy.exploration")
    lead = [policy, count_text(summary.episodes, "test episode")]
    if exploration and policy != RANDOM:
        lead.append(f"{'sampled' if exploration == 'random' else exploration} actions")
    if batches := ledger.Batches.of(manifest):
        lead.append(f"batches of {batches.slots} slots")
    same = bool(completed) and all(e.episode_return == e.length for e in completed)
    columns = build.columns_of(summary.header(), summary.rows())
    if same:
        columns[1:3] = [columns[1]._replace(heading="return and length (steps)")]
    statistics_table = DataTable(columns, sort=False, name="Statistics")
    drawn = _figures(records, completed, summary, same) if completed else []
    return Page(
        str(manifest_entry(manifest, "env.id") or "env"),
        " · ".join(lead),
        "Evaluation",
        [
            ("Figures", [Figures(drawn)] if drawn else ["No episode completed."]),
            ("Statistics", [statistics_table, *summary.notes()]),
            ("Episodes", [*_episodes(records, completed, again, kept)]),
            ("How it was made", [*_manifest(manifest)]),
        ],
        _headline(summary, same),
        f"Ledger {ledger.ledger_digest(records)}. Equal digests mean equal episodes, to the bit. "
        "Made by tdcollect.",
        links,
    )


def named_in(directory: Path) -> Mapping[str, Any]:
    """Return env and policy by name, as the last run in a directory notes them; else nothing."""
    try:
        runs = ledger.read_json(directory / ledger.RUN, list, "")
    except (ValueError, OSError):
        return {}
    named = [run[ledger.REQUEST] for run in runs if isinstance(run, dict) and ledger.REQUEST in run]
    return named[-1] if named and isinstance(named[-1], dict) else {}


def again_of(
    manifest: Mapping[str, Any], directory: Path, start: Path, where: str
) -> build.Commands:
    """Return what runs episodes of a directory again.

    They are commands of ``tdcollect replay`` if its last run names env and policy; else calls,
    typed in ``start``, which is ``where``.
    """
    names = named_in(directory)
    if not names:
        return _calls_of(manifest, os.path.relpath(directory, start), where)
    if names.keys() & {"wrappers", "transforms", "env_state"}:
        names = {**names, "env": MAKE_ENV}
    words = []
    for name in _TYPED:
        if (value := names.get(name)) is not None:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            words += [f"--{name.replace('_', '-')}", text]
    return build.Commands(
        "tdcollect replay DIR ",
        f" {shlex.join(words)}",
        "The command is typed where the evaluation was run, with its directory in place of DIR and "
        "the index of an episode. It runs the code that it names, and checks that the episode is "
        "the same to the bit; with --video FILE.mp4 it films it.",
    )


def _calls_of(manifest: Mapping[str, Any], path: str, where: str) -> build.Commands:
    """Return the calls in Python that run episodes again, with the path of their directory."""
    arguments = ["env"]
    if manifest_entry(manifest, "policy.class") != RANDOM:
        arguments.append("policy")
    if manifest_entry(manifest, "env.kwargs"):
        arguments.append("env_kwargs=env_kwargs")
    name = json.dumps(path, ensure_ascii=False)
    return build.Commands(
        f"tdcollect.EvaluationResult.load({name}, {', '.join(arguments)}).replay(",
        ")",
        f"In Python, in {where}, with the env and the policy that were evaluated, and env_kwargs, "
        "backend and device where they were given. The call takes the index of an episode, and "
        "checks that it is the same to the bit.",
    )


def _headline(summary: Summary, same: bool) -> list[build.Card]:
    def card(name: str, value: float | None, interval: Interval | None) -> build.Card:
        return name, *number_and_interval(value, interval, summary.confidence)

    returns, lengths = summary.returns, summary.lengths
    middle, middle_interval = returns.interquartile_mean, returns.interquartile_mean_interval
    cards = [
        card("Mean return" + " and length" * same, returns.mean, returns.mean_interval),
        card("Interquartile mean", middle, middle_interval),
    ]
    if (success := summary.success) is not None:
        rate = number_and_interval(success.rate, success.interval, summary.confidence, percents)
        cards.insert(0, ("Success rate", *rate))
    if not same:
        cards.append(card("Mean length", lengths.mean, lengths.mean_interval))
    lost = statistics.lost_words(summary.lost)
    remark = f"{summary.failed} failed, {lost}{summary.restarted} restarted"
    if summary.distinct < summary.completed:
        remark += f", only {summary.distinct} distinct"
    return [*cards, ("Episodes completed", f"{summary.completed} of {summary.episodes}", remark)]


def percents(shares: Sequence[float | None]) -> list[str]:
    """Return shares as percent, with one decimal at most."""
    return ["-" if share is None else percent_text(round(share, 3)) for share in shares]


def _figures(
    records: Sequence[Episode], completed: Sequence[Episode], summary: Summary, same: bool
) -> list[Figure]:
    returns = [episode.episode_return or 0.0 for episode in completed]
    lengths = [float(episode.length or 0) for episode in completed]
    note = "The length of each episode, in steps, is the same as its return." * same
    figures = [_histogram("returns", "Returns", "return", "returns", returns, summary.returns,
                        summary.confidence, note)]  # fmt: skip
    if len(finite(returns)) > 1:
        figures.append(_running_figure(finite(returns), summary.confidence))
    if not same:
        figures.append(_histogram("lengths", "Lengths", "length (steps)", "lengths", lengths,
                                summary.lengths, summary.confidence))  # fmt: skip
    for place, (name, values) in enumerate(statistics.metrics_of(completed).items(), 1):
        there = [value for value in values if value is not None]
        if there:
            figures.append(_histogram(f"metric_{place}", name, name, "values", there,
                                    summary.metrics[name], summary.confidence))  # fmt: skip
    return [*figures, _endings(records, summary)]


def _histogram(
    name: str,
    title: str,
    x_label: str,
    things: str,
    values: Sequence[float],
    quantity: Quantity,
    confidence: float,
    note: str = "",
    zero: str = "",
) -> Figure:
    mean, interval = quantity.mean, quantity.mean_interval
    drawing = plots.histogram(
        values,
        x_label,
        mean=mean,
        interval=ends(interval),
        interval_name=interval_name(confidence),
        zero=zero,
    )
    said = shows = spread(values, things)
    if mean is not None:
        shows += f" The mean is {with_interval(mean, interval, confidence)}."
    return Figure(name, title, drawing, shows, f"{said} {note}".strip())


def _running_figure(values: Values, confidence: float) -> Figure:
    running = statistics.running_mean(values, confidence)
    count = np.arange(1, len(values) + 1, dtype=np.float64)
    drawing = plots.lines(
        [plots.Line("mean so far", count, *running)],
        "completed episodes, by index",
        "mean return",
        band_name=f"{interval_name(confidence)} (Student's t)",
        y_limits=running.limits(),
    )
    half = len(values) // 2
    first, last = number_texts([float(running.mean[half - 1]), float(running.mean[-1])])
    shows = (
        f"The mean return is {first} over the first {count_text(half, 'episode')}, and {last} over "
        f"all {len(values)}."
    )
    note = "Each interval is that of its own number of episodes."
    return Figure("cumulative", "How the mean settles", drawing, shows, note)


def _endings(records: Sequence[Episode], summary: Summary) -> Figure:
    both = sum(bool(e.terminated and e.truncated) for e in records)
    counts = [
        ("terminated", "terminated", sum(bool(e.terminated) for e in records) - both, "bar"),
        ("truncated", "truncated", sum(bool(e.truncated) for e in records) - both, "bar"),
        ("both", "both terminated and truncated", both, "bar"),
        ("failed", "failed", summary.failed, "bad"),
        ("lost", "lost", summary.lost, "bad"),
    ]
    said = [(count, words) for _, words, count, _ in counts if count]
    said_counts = [count_text(said[0][0], "episode"), *(str(count) for count, _ in said[1:])]
    shows = ", ".join(f"{count} {said[at][1]}" for at, count in enumerate(said_counts)) + "."
    rows = [
        _share_bar(name, count, len(records), role)
        for name, _, count, role in counts
        if count or name in ("terminated", "truncated")
    ]
    if (success := summary.success) is not None:
        rows.append(_share_bar("success", success.successes, success.count, "good"))
        rate = with_interval(success.rate, success.interval, summary.confidence, percents)
        of = count_text(success.count, "episode")
        shows += f" {success.successes} of {of} were a success: {rate}."
    drawing = plots.bars(rows, "episodes", len(records))
    return Figure("endings", "How episodes ended", drawing, shows)


def _share_bar(name: str, count: int, of: int, role: str) -> plots.Bar:
    share = f" ({percents([count / of])[0]})" if of else ""
    return plots.Bar(name, count, f"{count}{share}", role)


def _episodes(
    records: Sequence[Episode],
    completed: Sequence[Episode],
    again: build.Commands,
    kept: Mapping[int, Cell],
) -> Iterator[build.Part]:
    lowest = heapq.nsmallest(LOWEST, completed, lambda e: (_order(e.episode_return), e.index))
    few = lowest[: len(completed) // 4]  # of five episodes, five would be all
    if few and len({e.episode_return for e in completed}) > 1:
        texts = number_texts([e.episode_return for e in few])
        named = [f"{text} in episode {e.index}" for text, e in zip(texts, few, strict=True)]
        yield f"Lowest return{'s' * (len(few) > 1)}: {listed_text(named, LOWEST)}."
    if troubled := [e.index for e in records if e.restarts or not e.completed]:
        what = "Failed, lost" if any(e.lost for e in records) else "Failed"
        them = f"episode{'s' * (len(troubled) > 1)} {listed_text(troubled, 10)}"
        yield Paragraph("warn", f"{what} or restarted: {them}.")
    if not records:
        return
    yield again.how + AUDIT
    yield Paragraph("command", again.of_row(str((lowest or records)[0].index)))
    if len(records) > MOST:
        chosen = _extremes([e for e in records if _finite(e)], lambda e: e.episode_return or 0.0)
        odd = [e for e in records if e.restarts or not _finite(e)][:EXTREMES]
        indices = {e.index for e in (*chosen, *odd)}
        yield Paragraph(
            "warn",
            f"The table lists {len(indices)} of {len(records)} episodes: the {EXTREMES} lowest and "
            f"the {EXTREMES} highest returns, and the first {EXTREMES} that failed, were "
            "restarted, or have no finite return. episodes.jsonl has all.",
        )
        listed = [e for e in records if e.index in indices]
    else:
        listed = [*records]
    yield _episode_table(records, listed, again, kept)


def _episode_table(
    records: Sequence[Episode],
    listed: Sequence[Episode],
    again: build.Commands,
    kept: Mapping[int, Cell],
) -> DataTable:
    first: dict[str, int] = {}  # the first episode with a digest: later ones repeat it to the bit
    for e in records:
        first.setdefault(e.digest or str(e.index), e.index)
    columns = [
        Column("episode", [str(e.index) for e in listed], "n"),
        Column("return", [e.episode_return for e in listed], "n"),
        Column("length", ["-" if e.length is None else str(e.length) for e in listed], "n"),
        Column("ended", [ended(e) for e in listed]),
    ]
    for name in statistics.metrics_of([e for e in records if e.completed]):
        columns.append(Column(name, [(e.metrics or {}).get(name) for e in listed], "n"))
    if any(e.success is not None for e in records):
        words: dict[bool | None, str | Cell] = {
            None: "-",
            False: "no",
            True: Cell("yes", kind="good"),
        }
        columns.append(Column("success", [words[e.success] for e in listed]))
    if any(e.restarts for e in records):
        columns.append(Column("restarts", [str(e.restarts) for e in listed], "n"))
    if len(first) < len(records):
        equal = [first[e.digest or str(e.index)] for e in listed]
        cells = ["-" if at == e.index else str(at) for at, e in zip(equal, listed, strict=True)]
        columns.append(Column("equal to", cells, "n"))
    columns.append(Column("env seed", [str(e.env_seed) for e in listed], "n"))
    for name in ("batch", "slot"):
        if places := [e.place for e in listed if e.place is not None]:
            columns.append(Column(name, [str(place[name]) for place in places], "n"))
    if kept:
        columns.append(Column("data", [kept.get(e.index) for e in listed]))
    return DataTable(columns, commands=again, hint="words, or return<100", name="Episodes")


def _extremes(items: Sequence[Any], key: Callable[[Any], float]) -> list[Any]:
    return heapq.nsmallest(EXTREMES, items, key) + heapq.nlargest(EXTREMES, items, key)


def _finite(episode: Episode) -> bool:
    return episode.episode_return is not None and math.isfinite(episode.episode_return)


def _order(value: float | None) -> float:
    """Return a key for sorting by return, NaN first: it counts as the worst one."""
    return float("-inf") if value is None or value != value else value


def ended(episode: Episode) -> str | Cell:
    """Return how an episode ended."""
    if not episode.completed:
        return Cell(episode.status, kind="bad")
    flags = [("terminated", episode.terminated), ("truncated", episode.truncated)]
    return " and ".join(name for name, flag in flags if flag) or "-"


def _manifest(manifest: Mapping[str, Any]) -> Iterator[build.Part]:
    if BATCHES in manifest:
        repeated = manifest.get(ledger.REPEATED)
        sound = repeated is not None and not repeated["differing"]
        text = (
            f"{ledger.repeatability(manifest)} The slots of a batch share a seed: its episodes "
            "depend on the number of slots, and cannot be compared with numbered ones."
        )
        yield text if sound else Paragraph("warn", text)
    paths, texts = zip(*leaves("", manifest), strict=True)
    columns = [Column("entry", paths), Column("value", texts, "t")]
    yield DataTable(columns, "The manifest of the evaluation.")


def leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the entries of nested mappings as text, by their paths."""
    if isinstance(value, Mapping) and value:
        for key, entry in sorted(value.items()):  # as they are in the file
            yield from leaves(f"{path}.{key}" if path else str(key), entry)
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


def write_comparison_report(
    directory: str | os.PathLike[str],
    comparison: Comparison,
    pages: Mapping[int, str] = MappingProxyType({}),
) -> list[Path]:
    """Write ``comparison.html`` and its figures as :func:`write_report` does; return the files.

    ``pages`` has the paths of those of single episodes. ``comparison.json`` names what was
    compared, by its digests, so that ``tdcollect view`` compares it again.
    """
    settings = ("names", "ledgers", "across_envs", "confidence", "resamples", "seed")
    write_json(Path(directory, COMPARED), {name: getattr(comparison, name) for name in settings})
    return build.write_page(Path(directory, COMPARISON_REPORT), comparison_page(comparison, pages))


def comparison_page(
    comparison: Comparison, pages: Mapping[int, str], links: Sequence[tuple[str, str]] = ()
) -> Page:
    """Return the page of a comparison, which leads to ``pages`` of episodes."""
    differences, (baseline, *others) = comparison.differences, comparison.names
    drawn = [*_together(comparison)]
    for place, difference in enumerate(differences, 1):
        if difference.values:
            drawn += _difference_figures(difference, place)

    def table(name: str, rows: Sequence[Sequence[str]]) -> DataTable:
        return DataTable(build.columns_of(["", *others], rows), sort=False, name=name)

    returns = table("Differences", comparison.return_rows())
    success = comparison.success_rows()
    paired = any(d.values for d in differences)
    return Page(
        f"{comparison.env}: comparison",
        f"{', '.join(others)} minus {baseline}, on the same "
        f"{count_text(comparison.episodes, 'test episode')}",
        "Comparison",
        [
            ("Figures", [Figures(drawn)] if drawn else ["No episode was completed by both."]),
            ("Success", [table("Success", success)] if success else []),
            ("Differences", [returns, *comparison.notes(), IMPROVEMENT]),
            ("Episodes", [*_paired_episodes(comparison, pages)] if paired else []),
        ],
        _comparison_headline(differences[0]) if len(differences) == 1 else [],
        links=links,
    )


def _comparison_headline(d: Difference) -> list[build.Card]:
    mean = number_and_interval(*d.measured("return"), d.confidence)
    won_and_tied = "share of episodes won, and half of those tied"
    cards: list[build.Card] = []
    if (s := d.success) is not None:
        rates = number_and_interval(s.difference, s.interval, d.confidence, percents)
        cards.append(("Difference of success rates", *rates))
    return [
        *cards,
        ("Mean difference", *mean),
        ("Probability of improvement", number_text(d.improvement), won_and_tied),
        ("Won, tied, lost", f"{d.won}, {d.tied}, {d.lost}", f"of {len(d.values)} episodes"),
        ("p-value", display.p_text(d.p_value), "of no mean difference, by sign flips"),
    ]


def _together(comparison: Comparison) -> Iterator[Figure]:
    """Yield the figures of all policies: distributions side by side, outcomes or intervals."""
    baseline, differences = comparison.names[0], comparison.differences
    longest = max((d.baseline_returns for d in differences), key=len)
    rows = [(baseline, longest), *((d.name, d.returns) for d in differences)]
    if not any(values for _, values in rows):
        return
    by_name = [(name, finite(values)) for name, values in rows]
    halves = [
        f"{name} {_quantiles(values, [0.25, 0.75])}" for name, values in by_name if len(values)
    ]
    said = f"Half of the returns lie: {'; '.join(halves)}."
    note = "Thick: the middle half of the returns; thin: all of them; dot: the mean."
    yield Figure("returns", "Returns", plots.ridges(rows, "return"), said, note)
    measured = {d.name: d.difference for d in differences if d.difference.mean is not None}
    if len(differences) == 1:
        (d,), count = differences, len(differences[0].values)
        outcomes = [("won", d.won, "good"), ("tied", d.tied, "bar"), ("lost", d.lost, "bad")]
        bars = [_share_bar(name, number, count, role) for name, number, role in outcomes]
        said = (
            f"Of {count_text(count, 'episode')}, {d.name} has a higher return than {baseline} in "
            f"{d.won}, an equal one in {d.tied}, and a lower one in {d.lost}."
        )
        drawing = plots.bars(bars, "episodes", count)
        yield Figure("outcomes", "Episodes won, tied and lost", drawing, said)
    elif measured:
        texts = mean_texts(d.difference for d in differences)
        estimates = [
            plots.Mark(d.name, d.difference.mean, ends(d.difference.mean_interval), place, text)
            for place, (d, text) in enumerate(zip(differences, texts, strict=True), 1)
        ]
        said = intervals_sentence(
            ((name, one.mean, one.mean_interval) for name, one in measured.items()),
            comparison.confidence,
        )
        x_label = f"mean difference to {short(baseline)}"
        drawing = plots.intervals(estimates, x_label, line_at=0.0)
        yield Figure("intervals", f"Mean differences to {baseline}", drawing, said)


def _difference_figures(d: Difference, place: int) -> Iterator[Figure]:
    title, x_label, zero = f"{d.name} minus {d.baseline}", "difference of returns", "no difference"
    yield _histogram(f"difference_{place}", title, x_label, "differences", d.values, d.difference,
                     d.confidence, zero=zero)  # fmt: skip
    pairs = plots.cloud(
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
    if len(d.values) > plots.MOST_PAIRS:
        drawn = f"{plots.MOST_PAIRS} of {len(d.values)}"
        note += f" {drawn} episodes are drawn, at even distances."
    yield Figure(f"pairs_{place}", f"{d.name} and {d.baseline}", pairs, shows, note)


def _paired_episodes(comparison: Comparison, pages: Mapping[int, str]) -> Iterator[build.Part]:
    """Yield the table of episodes with the returns of all policies, or of those that matter."""
    differences = comparison.differences
    by_index = [dict(zip(d.episodes, d.values, strict=True)) for d in differences]
    indices = sorted({index for values in by_index for index in values})
    if len(indices) > MOST:
        chosen = {at for values in by_index for at in _extremes([*values], values.__getitem__)}
        yield Paragraph(
            "warn",
            f"The table lists {len(chosen)} of {len(indices)} episodes: those with the "
            f"{EXTREMES} lowest and the {EXTREMES} highest differences of each policy.",
        )
        indices = sorted(chosen)
    baseline: dict[int, float] = {}
    columns = []
    for d, values in zip(differences, by_index, strict=True):
        baseline |= zip(d.episodes, d.baseline_returns, strict=True)
        returns = dict(zip(d.episodes, d.returns, strict=True))
        columns.append(Column(d.name, [returns.get(index) for index in indices], "n"))
        columns.append(Column("difference", [values.get(index) for index in indices], "n"))
    first = [
        Column("episode", [Cell(str(i), pages[i]) if i in pages else str(i) for i in indices], "n"),
        Column(comparison.names[0], [baseline.get(index) for index in indices], "n"),
    ]
    yield DataTable([*first, *columns], "Returns of each episode.", hint="words, or difference<0")


def spread(values: Sequence[float] | Values, things: str) -> str:
    """Return where values lie: ``Half of the returns lie between 1 and 5, all between 0 and 9.``"""
    drawn = finite(values)
    left = len(values) - len(drawn)
    said = []
    if len(drawn) == 1:
        said.append(f"The only one of the {things} is {number_text(float(drawn[0]))}.")
    elif len(drawn) and drawn.min() == drawn.max():
        said.append(f"All {len(drawn)} {things} are {number_text(float(drawn[0]))}.")
    elif len(drawn):
        middle, all_of_them = _quantiles(drawn, [0.25, 0.75]), _quantiles(drawn, [0, 1])
        said.append(f"Half of the {len(drawn)} {things} lie {middle}, all {all_of_them}.")
    if left:
        beyond = f"{left} of {len(values)} are NaN or beyond {plots.LARGEST:g}"
        said.append(f"{beyond}, and are not drawn.")
    return " ".join(said)


def _quantiles(values: Values, shares: Sequence[float]) -> str:
    return "between {} and {}".format(*number_texts(np.quantile(values, shares).tolist()))


Texts = Callable[[Sequence[float | None]], Sequence[str]]
"""Makes texts of numbers that stand together."""


def intervals_sentence(
    estimates: Iterable[tuple[str, float | None, Interval | None]],
    confidence: float,
    texts: Texts = number_texts,
) -> str:
    """Return names, each with its number and interval: ``a: 3.5 (95% interval 3.1 to 4.0).``"""
    return " ".join(
        f"{name}: {with_interval(value, interval, confidence, texts)}."
        for name, value, interval in estimates
    )


def with_interval(
    value: float | None, interval: Interval | None, confidence: float, texts: Texts = number_texts
) -> str:
    """Return a number, with its interval in brackets if there is one."""
    number, words = number_and_interval(value, interval, confidence, texts)
    return number if interval is None else f"{number} ({words})"


def mean_texts(quantities: Iterable[Quantity]) -> list[str]:
    """Return means with their intervals, alike: ``3.5 [3.1, 4.0]``."""
    both = [(one.mean, ends(one.mean_interval) or ()) for one in quantities]
    texts = iter(number_texts([number for mean, own in both for number in (mean, *own)]))
    return [next(texts) + (f" [{next(texts)}, {next(texts)}]" if own else "") for _, own in both]


def interval_name(confidence: float) -> str:
    """Return the name of an interval for a legend."""
    return f"{percent_text(confidence)} interval"


def number_and_interval(
    value: float | None, interval: Interval | None, confidence: float, texts: Texts = number_texts
) -> tuple[str, str]:
    """Return a number and its interval alike: ``3.5``, ``95% interval 3.1 to 4.0``."""
    if interval is None:
        return texts([value])[0], "no interval"
    number, low, high = texts([value, interval.low, interval.high])
    return number, f"{interval_name(confidence)} {low} to {high}"
