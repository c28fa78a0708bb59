"""The page of an episode: its film, its data by step, its record; of policies, side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tdcollect import keys
from tdcollect.display import count_text, number_text, number_texts
from tdcollect.evaluation.directory import check_data
from tdcollect.evaluation.ledger import (
    FILMS,
    TRAJECTORIES,
    Episode,
    film_path,
    kept_trajectories,
    read_last,
    trajectory_name,
    trajectory_path,
)
from tdcollect.evaluation.request import Request
from tdcollect.files import check_no_links, write_atomically
from tdcollect.pages import plots
from tdcollect.pages.build import (
    Card,
    Cell,
    Column,
    Commands,
    Figure,
    Figures,
    Film,
    Page,
    Paragraph,
    Part,
    Table,
)
from tdcollect.pages.evaluation import COMPARISON_REPORT, calls_of, commands_of, ended
from tdcollect.pages.plots import Line, Values

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Difference
    from tdcollect.evaluation.result import EvaluationResult

EPISODES = "episodes"
SMALL = 16  # numbers per step of an entry that is drawn
COMPARED = 3  # episodes that differ most, of each policy
_LINES = 6  # in a figure
_FIGURES = 40  # on a page
_ROWS = 200  # in the table of entries
_MARKED, _THIN = 60, 200  # steps that have a mark each, and from which lines are thin
_MOST_DATA = 1 << 32  # bytes that are read
_MOST_FILM = 1 << 25  # bytes of a film on a page
_REWARDS, _ACTIONS, _OBSERVATIONS, _OTHERS = "Rewards", "Actions", "Observations", "Other entries"
_CAUSES = (_ACTIONS, _OBSERVATIONS, _REWARDS)  # in a step, one leads to the next
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
    record: Episode
    again: Commands
    names: Mapping[str, Sequence[str] | None]
    data: Mapping[str, Array]
    film: bytes | None = None
    problems: Sequence[str] = ()


class _Entry(NamedTuple):
    """An entry in the data of all policies; None for one that has no such entry."""

    section: str
    name: str
    first: int  # the step of its first row: 0 is the reset
    rows: list[Rows | None]


def with_data(root: Path) -> frozenset[int]:
    """Return the indices of the episodes of a directory that have data, kept or of a film."""
    return kept_trajectories(root) | kept_trajectories(root, FILMS)


def filmed(root: Path) -> frozenset[int]:
    """Return the indices of the episodes of a directory that have a film."""
    return kept_trajectories(root, FILMS, ".mp4")


def read_played(
    name: str, root: Path, record: Episode, manifest: Mapping[str, Any], again: Commands
) -> Played:
    """Read what a directory holds of an episode; of data, those of the record alone.

    The files may be anybody's: they are read as numbers, and nothing in them is run.
    """
    data: dict[str, Array] = {}
    film, problems = None, []

    def refused(what: str, error: Exception) -> None:
        text = str(error).replace(f"{root}{os.sep}", "")
        problems.append(f"{name}: the {what} of this episode is not shown: {text}")

    for folder in (TRAJECTORIES, FILMS):
        path = trajectory_path(root, record.index, folder)
        if data or not path.exists():
            continue
        try:
            last = read_last(root)[1] if folder == TRAJECTORIES else None
            listed = None if last is None else last.get(TRAJECTORIES, {})
            _check_size(path)
            data = check_data(root, record, manifest, listed, folder)
        except (ValueError, OSError) as error:
            refused("data", error)
    try:
        film = _read_film(root, record.index)
    except (ValueError, OSError) as error:
        refused("film", error)
    return Played(name, record, again, manifest["entries"], data, film, problems)


def _check_size(folder: Path) -> None:
    files = [os.path.join(at, file) for at, _, names in os.walk(folder) for file in names]
    if (size := sum(os.lstat(file).st_size for file in files)) > _MOST_DATA:
        raise ValueError(f"expected at most {_MOST_DATA} bytes, got {size}")


def _read_film(root: Path, index: int) -> bytes | None:
    path = film_path(root, index)
    if not path.exists():
        return None
    check_no_links(root, path.relative_to(root))
    if not path.is_file() or path.stat().st_size > _MOST_FILM:  # a pipe has no end
        raise ValueError(f"expected {path} to be a file of at most {_MOST_FILM} bytes; open it")
    content = path.read_bytes()
    if content[4:8] != b"ftyp":
        raise ValueError(f"expected {path} to be an MP4 file, got something else")
    return content


def episode_page(played: Sequence[Played], env: str, back: tuple[str, str] | None = None) -> Page:
    """Return the page of one episode, which one policy played or several; the first is compared."""
    first, several = played[0], len(played) > 1
    entries = _entries(played)
    found, steps = _first_differences(played, entries) if several else ([], [])
    drawn, left = _drawn(played, entries, min(steps, default=None))
    films = [Film(one.name, one.film) for one in played if one.film is not None]
    sections: list[tuple[str, Sequence[Part]]] = [("Film" + "s" * (len(films) > 1), films)]
    sections.append(("The first difference", found))
    for name in (_REWARDS, _ACTIONS, _OBSERVATIONS, _OTHERS):
        figures = [figure for section, figure in drawn if section == name]
        sections.append((name, [Figures(figures)] if figures else []))
    notes: list[Part] = [Paragraph("warn", text) for one in played for text in one.problems]
    notes += [f"{count_text(left, 'more figure')} are left out."] * (left > 0)
    if not any(one.data for one in played):
        notes.append("No data of this episode are there, so that nothing is drawn.")
    if entries:
        notes.append("Step 0 is the reset. A step's action leads to its reward and observation.")
        notes.append(_table(entries))
    sections += [
        ("Data", notes),
        ("Record", [_records(played)]),
        ("Run it again", [*_again(played)]),
    ]
    return Page(
        f"{env}: episode {first.record.index}",
        f"{' and '.join(one.name for one in played)}, env seed {first.record.env_seed}",
        "Episodes side by side" if several else "Episode",
        [(name, parts) for name, parts in sections if parts],
        [*_cards(played)],
        "Made by tdcollect.",
        back,
    )


def _cards(played: Sequence[Played]) -> Iterator[Card]:
    for one in played:
        record, how = one.record, ended(one.record)
        words = [how.text if isinstance(how, Cell) else how]
        words += [] if record.length is None else [f"after {count_text(record.length, 'step')}"]
        if record.success is not None:
            words.append("success" if record.success else "no success")
        value = number_text(record.episode_return)
        if len(played) > 1:
            yield f"Return of {one.name}", value, ", ".join(words)
        else:
            yield from (("Return", value, ""), ("Ended", words[0], ", ".join(words[1:])))


def _again(played: Sequence[Played]) -> Iterator[Part]:
    yield from dict.fromkeys(one.again.how for one in played)
    for one in played:
        yield Paragraph("command", one.again.of_row(str(one.record.index)))


def _records(played: Sequence[Played]) -> Table:
    rows: dict[str, list[Any]] = {}
    for at, one in enumerate(played):
        record = one.record
        values = {
            "return": number_text(record.episode_return),
            **{f"return of {k}": number_text(v) for k, v in (record.group_returns or {}).items()},
            "length": str(record.length or "-"),
            "ended": ended(record),
            "success": {None: "-", True: "yes", False: "no"}[record.success],
            **{name: number_text(value) for name, value in (record.metrics or {}).items()},
            "restarts": str(record.restarts),
            "env seed": str(record.env_seed),
            "policy seed": str(record.policy_seed),
            "digest": (record.digest or "-")[:16],
        }
        for name, value in values.items():
            rows.setdefault(name, ["-"] * len(played))[at] = value
    cells = zip(*rows.values(), strict=True)
    columns = [Column(one.name, each) for one, each in zip(played, cells, strict=True)]
    return Table([Column("", [*rows]), *columns], sort=False, name="Record")


def _entries(played: Sequence[Played]) -> list[_Entry]:
    found: dict[tuple[str, str], _Entry] = {}
    for at, one in enumerate(played):
        for section, name, first, rows in _entries_of(one) if one.data else ():
            entry = _Entry(section, name, first, [None] * len(played))
            found.setdefault((section, name), entry).rows[at] = rows
    return [*found.values()]


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
    columns, parts, steps = [], list[Part](), list[int]()
    for at, other in enumerate(played[1:], 1):
        cells, found = [], list[tuple[int, str]]()
        for entry in compared:
            a, b = entry.rows[0], entry.rows[at]
            if a is None or b is None:
                cells.append("not in both")
                continue
            difference = first_difference(*(_plain(rows, entry.section) for rows in (a, b)))
            if difference is None:
                cells.append("never")
            else:
                row, place, values = difference
                found.append((entry.first + row, f"{entry.name}{place} is {values}"))
                cells.append(f"step {entry.first + row}, {f'{place}: ' * bool(place)}{values}")
        columns.append(Column(other.name, cells, "t"))
        names = f"{played[0].name} and {other.name}"
        if found:
            step, words = min(found, key=lambda one: one[0])
            steps.append(step)
            where = f"in step {step}" if step else "at the reset"
            parts.append(f"{names} first differ {where}: {words}.")
        elif played[0].data and other.data:
            parts.append(f"{names} are the same to the bit in all steps that both have.")
        else:
            parts.append(f"{names}: without the data of both, nothing can be compared.")
    if steps:
        columns.insert(0, Column("entry", [entry.name for entry in compared]))
        parts.append(Table(columns, sort=False, name="The first difference of each entry"))
        parts.append(
            "In the figures the dashed line is the first step that differs; but for rewards, they "
            "end soon after the shortest of the episodes."
        )
    return parts, steps


def first_difference(first: Rows, second: Rows) -> tuple[int, str, str] | None:
    """Return the first row that differs to the bit, the place in it, and both values.

    None if there is none; rows that only one has are no difference.
    """
    for at, (a, b) in enumerate(zip(chain(*first), chain(*second), strict=False)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return at, "", f"{a.dtype} {[*a.shape]} and {b.dtype} {[*b.shape]}"
        if a.tobytes() != b.tobytes():
            pairs = enumerate(zip(a.reshape(-1), b.reshape(-1), strict=True))
            place, both = next((n, (x, y)) for n, (x, y) in pairs if x.tobytes() != y.tobytes())
            return at, f"[{place}]" * (a.size > 1), " and ".join(map(str, both))
    return None


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
        marks, width = steps <= _MARKED, 1.6 if steps <= _THIN else 0.8
        drawing = plots.lines(lines, "step", "", marks=marks, dashed_at=step, line_width=width)
        note = ""
        if steps > plots.MOST_POINTS:
            note = f"Of {steps} steps, {plots.MOST_POINTS} are drawn, at even distances."
        shows = " ".join(map(_said, lines))
        drawn.append((section, Figure(f"entry_{place}", title, drawing, shows, note)))
    return drawn, len(wanted) - len(drawn)


def _lines(entry: _Entry, names: Sequence[str], shared: int) -> Iterator[tuple[str, list[Line]]]:
    """Yield the figures of a small entry: several numbers, or one number of several policies."""
    found = [(at, _numbers(rows, entry.section)) for at, rows in enumerate(entry.rows) if rows]
    kept = [(at, values) for at, values in found if values is not None]
    several, groups = len(names) > 1, [(entry.name, kept)]
    if entry.section == _REWARDS:
        with np.errstate(invalid="ignore", over="ignore"):
            summed = [(at, np.cumsum(values, 0)) for at, values in kept]
        groups.append((f"{entry.name}, summed up", summed))
    elif several:
        groups = [(entry.name, [(at, values[:shared]) for at, values in kept])]
    for title, runs in groups:
        width = max((values.shape[1] for _, values in runs), default=0)
        each = 1 if several else _LINES
        for begin in range(0, width, each):
            stop = min(begin + each, width)
            place = f"[{begin}]" if stop == begin + 1 else f"[{begin} to {stop - 1}]"
            lines = [
                Line(
                    names[at] if several else title if width == 1 else f"{title}[{column}]",
                    np.arange(entry.first, entry.first + len(values), dtype=np.float64),
                    values[:, column],
                    series=at if several else column - begin,
                )
                for at, values in runs
                for column in range(begin, min(stop, values.shape[1]))
            ]
            yield f"{title}{place * (width > 1)}", lines


def _numbers(rows: Rows, section: str) -> Values | None:
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
    first = rows[0]
    if section != _ACTIONS or first.ndim != 2 or first.dtype.kind not in "biu":
        return rows
    one_hot = first.shape[1] > 1 and np.isin(first, (0, 1)).all() and (first.sum(1) == 1).all()
    return (first.argmax(1),) if one_hot else rows


def _said(line: Line) -> str:
    values, name = plots.finite(line.y), line.name
    left = len(line.y) - len(values)
    more = f" {left} are NaN or beyond {plots.LARGEST:g}, and are not drawn." * (left > 0)
    if not len(values):
        return f"{name}: no number can be drawn.{more}"
    ends = [values[0], values[-1], values.min(), values.max()]
    begin, end, low, high = number_texts([float(value) for value in ends])
    if low == high:
        return f"{name}: {low} throughout.{more}"
    return f"{name}: {begin} at first, {end} at last, from {low} to {high}.{more}"


def _table(entries: Sequence[_Entry]) -> Table:
    shown = entries[:_ROWS]
    firsts = [next(rows[0] for rows in entry.rows if rows) for entry in shown]
    drawn = [any(r and _numbers(r, e.section) is not None for r in e.rows) for e in shown]
    types = [f"{'bfloat16' if a.dtype.metadata else a.dtype}" for a in firsts]
    left = len(entries) - len(shown)
    columns = [
        Column("entry", [entry.name for entry in shown]),
        Column("part", [entry.section.lower() for entry in shown]),
        Column("type", types),
        Column("shape of a step", [f"{[*a.shape[1:]]}" for a in firsts]),
        Column("drawn", ["yes" if yes else "no" for yes in drawn]),
    ]
    caption = f"Entries of more than {SMALL} numbers a step are not drawn."
    caption += f" {left} more entries are left out." * (left > 0)
    return Table(columns, caption, name="Entries")


def write_compared(
    directory: Path,
    results: Mapping[str, EvaluationResult],
    differences: Iterable[Difference],
    env: str,
) -> dict[int, str]:
    """Write the pages of the episodes whose returns differ most, side by side.

    Of each difference, three episodes with data of both policies have a page.

    Returns:
        The paths of the pages by index, relative to the directory.
    """
    roots = {name: one.directory for name, one in results.items() if one.directory is not None}
    there = {name: with_data(root) for name, root in roots.items()}
    chosen: set[int] = set()
    for d in differences:
        both = there.get(d.name, frozenset()) & there.get(d.baseline, frozenset())
        pairs = [pair for pair in zip(d.values, d.episodes, strict=True) if pair[1] in both]
        chosen |= {at for _, at in sorted(pairs, key=lambda p: (-abs(p[0]), p[1]))[:COMPARED]}
    check_no_links(directory, EPISODES)
    paths = {}
    for index in sorted(chosen):
        played = [
            read_played(name, root, one.record(index), one.manifest, _commands(one, directory))
            for name, root in roots.items()
            if index in there[name]
            for one in [results[name]]
        ]
        page = episode_page(played, env, ("The comparison", f"../{COMPARISON_REPORT}"))
        paths[index] = f"{EPISODES}/{trajectory_name(index)}.html"
        write_atomically(directory / paths[index], page.html())
    return paths


def _commands(result: EvaluationResult, start: Path) -> Commands:
    assert result.directory is not None
    where = "the folder of the comparison"
    try:
        request = Request.read(result.directory)
    except (ValueError, OSError):
        request = None
    if request is None:
        return calls_of(result.manifest, os.path.relpath(result.directory, start), where)
    return commands_of(request, result.directory, start, where)
