"""The page of an episode: its film, its data by step, its record; of policies, side by side."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tdcollect import keys
from tdcollect.display import count_text, listed_text, number_text
from tdcollect.evaluation import ledger
from tdcollect.evaluation.directory import check_data
from tdcollect.files import check_no_links, write_atomically
from tdcollect.pages import build, plots
from tdcollect.pages.build import Column, Commands, DataTable, Figure, Page, Paragraph, Part
from tdcollect.pages.evaluation import COMPARISON_REPORT, again_of, ended, leaves, spread

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Comparison
    from tdcollect.evaluation.result import EvaluationResult

EPISODES = "episodes"
_WHERE = "the folder of the comparison"
SMALL = 16  # numbers per step of an entry that is drawn
COMPARED = 3  # episodes that differ most, of each policy
_SAID, _LONGEST = 500, 4000  # at most: steps of a transcript, characters of a text
_LINES, _FIGURES = 6, 40  # at most: lines in a figure, figures on a page
_MOST_DATA, _MOST_FILM = 1 << 32, 1 << 25  # bytes that are read, of data and of a film
_REWARDS, _ACTIONS, _OBSERVATIONS, _OTHERS = "Rewards", "Actions", "Observations", "Other entries"
_CAUSES = (_ACTIONS, _OBSERVATIONS, _REWARDS)  # in a step, the action comes first
Array = npt.NDArray[Any]
Rows = tuple[Array, ...]
"""Arrays ``[L, ...]`` that follow each other."""


class Played(NamedTuple):
    """An episode as one policy played it.

    Attributes:
        name: the policy.
        record: the record.
        again: the commands that run episodes again.
        names: the names of observations, actions and rewards, as a manifest has them.
        data: the entries ``[L, ...]`` by path; empty if there are none.
        film: an MP4 file, or None.
        problems: why data or a film that are there are not shown, one sentence each.
    """

    name: str
    record: ledger.Episode
    again: Commands
    names: Mapping[str, Sequence[str] | None]
    data: Mapping[str, Array]
    film: bytes | None = None
    problems: Sequence[str] = ()


class _Entry(NamedTuple):
    """An entry in the data of all policies; no rows for one that has no such entry."""

    section: str
    name: str
    first: int  # the step of its first row: 0 is the reset
    rows: list[Rows]


def with_data(root: Path) -> frozenset[int]:
    """Return the indices of the episodes of a directory that have data, kept or of a film."""
    return ledger.kept_trajectories(root) | ledger.kept_trajectories(root, ledger.FILMS)


def filmed(root: Path) -> frozenset[int]:
    """Return the indices of the episodes of a directory that have a film."""
    return ledger.kept_trajectories(root, ledger.FILMS, ".mp4")


def read_played(
    name: str, root: Path, record: ledger.Episode, manifest: Mapping[str, Any], again: Commands
) -> Played:
    """Read what a directory holds of an episode; of data, those of the record alone.

    The files may be anybody's: they are read as numbers, and nothing in them is run.
    """
    contents: dict[str, Any] = {}
    problems = []
    for what, read in (("data", _read_data), ("film", _read_film)):
        try:
            contents[what] = read(root, record, manifest)
        except (ValueError, OSError) as error:
            text = str(error).replace(f"{root}{os.sep}", "")
            problems.append(f"{name}: the {what} of this episode cannot be shown: {text}")
    entries, data = manifest["entries"], contents.get("data", {})
    return Played(name, record, again, entries, data, contents.get("film"), problems)


def _read_data(root: Path, record: ledger.Episode, manifest: Mapping[str, Any]) -> dict[str, Array]:
    """Return the data that were kept, or else those of a film, which no file lists."""
    last = ledger.read_last(root)[1]
    listed = None if last is None else last.get(ledger.TRAJECTORIES, {})
    for folder, digests in ((ledger.TRAJECTORIES, listed), (ledger.FILMS, None)):
        if (path := ledger.trajectory_path(root, record.index, folder)).exists():
            check_no_links(root, path.relative_to(root))
            if (size := path.lstat().st_size) > _MOST_DATA:
                raise ValueError(f"expected at most {_MOST_DATA} bytes in {path}, got {size}")
            return check_data(root, record, manifest, digests, folder)
    return {}


def _read_film(root: Path, record: ledger.Episode, manifest: Mapping[str, Any]) -> bytes | None:
    path = ledger.film_path(root, record.index)
    if not path.exists():
        return None
    check_no_links(root, path.relative_to(root))
    known = path.is_file() and path.stat().st_size <= _MOST_FILM  # a pipe has no end
    content = path.read_bytes() if known else b""
    if content[4:8] != b"ftyp":
        raise ValueError(f"expected {path} to be an MP4 file of at most {_MOST_FILM} bytes")
    return content


def neighbours(indices: Sequence[int], index: int) -> list[tuple[str, str]]:
    """Return links from the page of an episode to those before and after it in a folder."""
    at = indices.index(index)
    return [
        (f"{name}: episode {other}", f"{ledger.episode_name(other)}.html")
        for name, beside in (("Previous", indices[:at][-1:]), ("Next", indices[at + 1 :][:1]))
        for other in beside
    ]


def episode_page(played: Sequence[Played], env: str, links: Sequence[tuple[str, str]] = ()) -> Page:
    """Return the page of one episode, which one policy played or several; the first is compared."""
    record, several = played[0].record, len(played) > 1
    entries = _entries(played)
    differences, steps = _first_differences(played, entries) if several else ([], [])
    drawn, left = _drawn(played, entries, min(steps, default=None))
    films = [build.Film(one.name, one.film) for one in played if one.film is not None]
    sections: list[tuple[str, Sequence[Part]]] = [
        ("Film", films),
        ("The first difference", differences),
    ]
    sections.append(("Transcript", [*_transcript(played, entries)]))
    for name in (_REWARDS, _ACTIONS, _OBSERVATIONS, _OTHERS):
        figures = [figure for section, figure in drawn if section == name]
        sections.append((name, [build.Figures(figures)] if figures else []))
    notes: list[Part] = [Paragraph("warn", text) for one in played for text in one.problems]
    notes += [f"{count_text(left, 'more figure')} are left out."] * (left > 0)
    notes += [*_undrawn(entries)]
    how = "Step 0 is the reset. The action of a step leads to its reward and its observation."
    notes.append(how if entries else "No data of this episode are there, so nothing is drawn.")
    again = [Paragraph("command", one.again.of_row(str(record.index))) for one in played]
    uses = dict.fromkeys(one.again.how for one in played)
    sections += [("Data", notes), ("Record", [_records(played)])]
    sections.append(("Run it again", [*uses, *again]))
    return Page(
        f"{env}: episode {record.index}",
        f"{' and '.join(one.name for one in played)}, env seed {record.env_seed}",
        "Episodes side by side" if several else "Episode",
        sections,
        [*_cards(played)],
        "Made by tdcollect.",
        links,
    )


def _cards(played: Sequence[Played]) -> Iterator[build.Card]:
    for one in played:
        record, of = one.record, f" of {one.name}" * (len(played) > 1)
        how = ended(record) if record.completed else record.status
        said = {None: "", True: "success", False: "no success"}[record.success]
        yield f"Return{of}", number_text(record.episode_return), said
        yield f"Steps{of}", number_text(record.length), f"{how}"


def _records(played: Sequence[Played]) -> DataTable:
    records = [dict(leaves("", json.loads(one.record.to_json()))) for one in played]
    names = [*dict.fromkeys(name for record in records for name in record)]
    columns = [
        Column(one.name, [record.get(name, "-") for name in names], "t")
        for one, record in zip(played, records, strict=True)
    ]
    return DataTable([Column("", names), *columns], sort=False, name="Record")


def _entries(played: Sequence[Played]) -> list[_Entry]:
    by_name: dict[tuple[str, str], _Entry] = {}
    for at, one in enumerate(played):
        for section, name, first, rows in _entries_of(one) if one.data else ():
            entry = _Entry(section, name, first, [()] * len(played))
            by_name.setdefault((section, name), entry).rows[at] = rows
    return [*by_name.values()]


def _entries_of(one: Played) -> Iterator[tuple[str, str, int, Rows]]:
    """Yield each entry once; that of the following step is left out if the next row has it."""
    data, observed, acted = one.data, one.names["observation"] or (), one.names["action"] or ()
    rewarded = [f"{keys.NEXT}/{name}" for name in one.names.get("reward") or [keys.REWARD]]
    for path in rewarded:
        yield _REWARDS, path.partition("/")[2], 1, (data[path],)
    for name in acted:
        yield _ACTIONS, name, 1, (data[name],)
    for name in observed:
        yield _OBSERVATIONS, name, 0, (data[name], data[f"{keys.NEXT}/{name}"][-1:])
    for name, rows in data.items():
        parent, _, rest = name.partition("/")
        known = name in (*observed, *acted, *rewarded) or parent == keys.COLLECTOR
        known |= parent == keys.NEXT and rest in data
        if not known and name.rpartition("/")[2] not in keys.FLAGS:
            yield _OTHERS, name, 1, (rows,)


def _first_differences(
    played: Sequence[Played], entries: Iterable[_Entry]
) -> tuple[list[Part], list[int]]:
    """Return where each policy differs from the first one, to the bit; and these steps."""
    compared = [entry for cause in _CAUSES for entry in entries if entry.section == cause]
    parts, steps = list[Part](), list[int]()
    for at, other in enumerate(played[1:], 1):
        unlike = []
        for entry in compared:
            a, b = (_plain(entry.rows[which], entry.section) for which in (0, at))
            if a and b and (difference := first_difference(a, b)) is not None:
                step = entry.first + difference[0]
                where = f"in step {step}" if step else "at the reset"
                unlike.append((step, f"{where}: {entry.name}{difference[1]}"))
        unlike.sort(key=lambda one: one[0])
        steps += [step for step, _ in unlike[:1]]
        first, *others = [text for _, text in unlike] or ["in no step that both have"]
        more = f" Others: {listed_text(others)}." if others else ""
        parts.append(f"{played[0].name} and {other.name} first differ {first}.{more}")
    if steps:
        parts.append("In the figures, a dashed line is the first step that differs.")
        parts.append("Figures of rewards are whole; others end soon after the shortest episode.")
    return parts, steps


def first_difference(first: Rows, second: Rows) -> tuple[int, str] | None:
    """Return the first row that differs to the bit, and its place and values in words.

    None if there is none; rows that only one has are no difference.
    """
    for at, (a, b) in enumerate(zip(chain(*first), chain(*second), strict=False)):
        if isinstance(a, str) and isinstance(b, str):
            if a != b:
                return at, f" is {_said(repr(a), 100)} and {_said(repr(b), 100)}"
            continue
        a, b = np.asarray(a), np.asarray(b)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return at, f" is {a.dtype} {[*a.shape]} and {b.dtype} {[*b.shape]}"
        if a.tobytes() != b.tobytes():
            pairs = enumerate(zip(a.reshape(-1), b.reshape(-1), strict=True))
            place, both = next((n, (x, y)) for n, (x, y) in pairs if x.tobytes() != y.tobytes())
            return at, f"[{place}]" * (a.size > 1) + f" is {' and '.join(map(str, both))}"
    return None


def _transcript(played: Sequence[Played], entries: Sequence[_Entry]) -> Iterator[Part]:
    """Yield the texts of an episode in the order of its steps, with their rewards, as a table."""
    order = [_ACTIONS, _REWARDS, _OBSERVATIONS, _OTHERS]
    texts = [one for one in entries if any(rows and rows[0].dtype == object for rows in one.rows)]
    if not texts:
        return
    texts += [one for one in entries if one.section == _REWARDS]
    texts.sort(key=lambda one: order.index(one.section))
    told = [(one, [[*chain(*rows)] for rows in one.rows]) for one in texts]
    steps = max(one.first + len(rows) for one, runs in told for rows in runs)
    lines = list[list[str | None]]()
    for step in range(min(steps, _SAID)):
        for one, runs in told:
            at = step - one.first
            said = [_said(rows[at]) if 0 <= at < len(rows) else None for rows in runs]
            if any(said):
                lines.append([f"{step} {one.name}", *said])
    heads = ["", *(one.name for one in played)]
    columns = [Column(head, [row[at] for row in lines], "t") for at, head in enumerate(heads)]
    yield DataTable(columns, sort=False, name="Transcript")
    if steps > _SAID:
        yield f"Of {steps} steps, the first {_SAID} are shown."


def _said(row: Any, most: int = _LONGEST) -> str:
    if not isinstance(row, str):
        return ", ".join(map(number_text, row.reshape(-1).tolist()))
    return row if len(row) <= most else f"{row[:most]}... ({len(row)} characters)"


def _drawn(
    played: Sequence[Played], entries: Iterable[_Entry], step: int | None
) -> tuple[list[tuple[str, Figure]], int]:
    """Return the figures with their sections, and how many are left out."""
    lengths = [one.record.length or 0 for one in played if one.data]
    shared = min(lengths, default=0) * 11 // 10 + 10  # steps that are drawn side by side
    names = [one.name for one in played]
    wanted = [(entry.section, *one) for entry in entries for one in _lines(entry, names, shared)]
    drawn = []
    for place, (section, title, lines) in enumerate(wanted[:_FIGURES]):
        steps = max(len(line.x) for line in lines)
        level = section == _ACTIONS and all((line.y == np.round(line.y)).all() for line in lines)
        drawing = plots.lines(lines, "step", "", dashed_at=step, steps=level)
        note = f"Of {steps} steps, {plots.MOST_POINTS} are drawn, at even distances."
        shows = " ".join(spread(line.y, f"values of {line.name}") for line in lines)
        note *= steps > plots.MOST_POINTS
        drawn.append((section, Figure(f"entry_{place}", title, drawing, shows, note)))
    return drawn, len(wanted) - len(drawn)


def _lines(
    entry: _Entry, names: Sequence[str], shared: int
) -> Iterator[tuple[str, list[plots.Line]]]:
    """Yield the figures of a small entry: several numbers, or one number of several policies."""
    numbers = [(at, _numbers(rows, entry.section)) for at, rows in enumerate(entry.rows) if rows]
    runs = [(at, values) for at, values in numbers if values is not None]
    several, groups = len(names) > 1, [(entry.name, runs)]
    if entry.section == _REWARDS:
        with np.errstate(invalid="ignore", over="ignore"):
            summed = [(at, np.cumsum(values, 0)) for at, values in runs]
        groups.append((f"{entry.name}, summed up", summed))
    elif several:
        groups = [(entry.name, [(at, values[:shared]) for at, values in runs])]
    for title, group in groups:
        by_column: dict[str, list[plots.Line]] = {}
        for at, values in group:
            x = np.arange(entry.first, entry.first + len(values), dtype=np.float64)
            for column, y in enumerate(values.T):
                own = f"{title}[{column}]" if values.shape[1] > 1 else title
                place, name = (at, names[at]) if several else (column % _LINES, own)
                by_column.setdefault(own, []).append(plots.Line(name, x, y, series=place))
        each = 1 if several else _LINES
        for begin in range(0, len(by_column), each):
            shown = [*by_column][begin : begin + each]
            title = " to ".join([shown[0], *shown[1:][-1:]])
            yield title, [line for own in shown for line in by_column[own]]


def _numbers(rows: Rows, section: str) -> plots.Values | None:
    """Return rows as float64 ``[L, K]``; None if one has no numbers, or too many to draw."""
    rows = _plain(rows, section)
    size, dtype = math.prod(rows[0].shape[1:]), rows[0].dtype
    if not 0 < size <= SMALL or dtype.kind not in "biuf":
        return None
    values = np.concatenate(rows).reshape(-1, size)
    if dtype.metadata:  # bfloat16, as its bits
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def _plain(rows: Rows, section: str) -> Rows:
    """Return actions that are one-hot throughout as the place of the one, and other rows as is."""
    first = rows[0] if rows else np.empty(0)
    if section != _ACTIONS or first.ndim != 2 or first.dtype.kind not in "biu":
        return rows
    one_hot = first.shape[1] > 1 and np.isin(first, (0, 1)).all() and (first.sum(1) == 1).all()
    return (first.argmax(1),) if one_hot else rows


def _undrawn(entries: Iterable[_Entry]) -> Iterator[str]:
    for entry in entries:
        rows = next(filter(None, entry.rows))
        if _numbers(rows, entry.section) is None and rows[0].dtype != object:
            yield f"{entry.name}: {rows[0].dtype}, {[*rows[0].shape[1:]]} in each step. Not drawn."


def write_compared(
    directory: Path, results: Iterable[EvaluationResult], comparison: Comparison
) -> dict[int, str]:
    """Write the pages of the episodes whose returns differ most, side by side.

    Of each difference, three episodes with data of both policies have a page.

    Returns:
        The paths of the pages by index, relative to the directory.
    """
    runs = [(Path(one.directory or ""), one) for one in results]
    there = {n: with_data(root) for n, (root, _) in zip(comparison.names, runs, strict=True)}
    chosen: set[int] = set()
    for d in comparison.differences:
        both = there[d.name] & there[d.baseline]
        pairs = [pair for pair in zip(d.values, d.episodes, strict=True) if pair[1] in both]
        chosen |= {at for _, at in sorted(pairs, key=lambda p: (-abs(p[0]), p[1]))[:COMPARED]}
    check_no_links(directory, EPISODES)
    paths = {}
    for index in sorted(chosen):
        played = []
        for name, (root, run) in zip(comparison.names, runs, strict=True):
            if index in there[name]:
                again = again_of(run.manifest, root, directory, _WHERE)
                played.append(read_played(name, root, run.record(index), run.manifest, again))
        links = [("The comparison", f"../{COMPARISON_REPORT}"), *neighbours(sorted(chosen), index)]
        page = episode_page(played, comparison.env, links)
        paths[index] = f"{EPISODES}/{ledger.episode_name(index)}.html"
        write_atomically(directory / paths[index], page.html())
    return paths
