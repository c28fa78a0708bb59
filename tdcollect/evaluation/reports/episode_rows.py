"""The table of all episodes of an evaluation."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

from tdcollect.evaluation.ledger.records import Episode
from tdcollect.pages.html import paragraphs
from tdcollect.pages.tables import Cell, Column, Commands, Value, table

MOST = 10_000  # rows of the table
EXTREMES = 200  # of more episodes: those of the lowest returns, and those of the highest
TROUBLED = 200  # of more episodes: those that failed or were restarted


def episode_table(
    records: Sequence[Episode], kept: Mapping[int, str | None], commands: Commands | None
) -> str:
    """Return a table of episodes with their outcomes: all of them, or those that matter of many.

    Args:
        records: the records, by index.
        kept: the indices of episodes whose data are kept, each with the path of their folder.
        commands: the command that runs an episode again.
    """
    listed, left = select(records)
    firsts = first_equals(records)
    success = any(e.success is not None for e in records)
    restarts = any(e.restarts for e in records)
    columns = [
        Column("episode", number=True),
        Column("return", number=True),
        Column("length", number=True),
        Column("ended"),
        *([Column("success")] if success else []),
        *([Column("restarts", number=True)] if restarts else []),
        *([Column("equal to", number=True)] if firsts else []),
        Column("env seed", number=True),
        *([Column("data")] if kept else []),
    ]
    rows = []
    for e in listed:
        row: list[Value] = [str(e.index), e.episode_return]
        row += ["-" if e.length is None else str(e.length), _ended(e)]
        row += [_success(e)] if success else []
        row += [str(e.restarts)] if restarts else []
        row += [str(firsts.get(e.index, "-"))] if firsts else []
        row.append(str(e.env_seed))
        if kept:
            row.append(Cell("kept", kept[e.index]) if e.index in kept else "-")
        rows.append(row)
    hint = "words, or return<100"
    found = table(columns, rows, commands=commands, hint=hint, name="Episodes")
    return paragraphs([left], "warn") + found if left else found


def select(records: Sequence[Episode]) -> tuple[Sequence[Episode], str]:
    """Return the episodes to list, by index, and a sentence on those left out, if any are."""
    if len(records) <= MOST:
        return records, ""
    returns = [e for e in records if _finite(e)]

    def key(episode: Episode) -> tuple[float, int]:
        return episode.episode_return or 0.0, episode.index

    chosen = {
        e.index: e
        for e in itertools.chain(
            heapq.nsmallest(EXTREMES, returns, key),
            heapq.nlargest(EXTREMES, returns, key),
            itertools.islice(filter(_odd, records), TROUBLED),
        )
    }
    text = (
        f"The table lists {len(chosen)} of {len(records)} episodes: the {EXTREMES} lowest and the "
        f"{EXTREMES} highest returns, and the first {TROUBLED} that failed, were restarted, or "
        "have no finite return. episodes.jsonl has all."
    )
    return [chosen[index] for index in sorted(chosen)], text


def first_equals(records: Sequence[Episode]) -> dict[int, int]:
    """Return the first episode that each later one repeats to the bit, by index."""
    first: dict[str, int] = {}
    found = {}
    for e in records:
        if e.digest is not None and first.setdefault(e.digest, e.index) != e.index:
            found[e.index] = first[e.digest]
    return found


def _odd(episode: Episode) -> bool:
    """Tell whether an episode failed, was restarted, or has no finite return."""
    return episode.restarts > 0 or not _finite(episode)


def _finite(episode: Episode) -> bool:
    return episode.episode_return is not None and math.isfinite(episode.episode_return)


def _ended(episode: Episode) -> str | Cell:
    if not episode.completed:
        return Cell(episode.status, kind="bad")
    flags = [("terminated", episode.terminated), ("truncated", episode.truncated)]
    return " and ".join(name for name, flag in flags if flag) or "-"


def _success(episode: Episode) -> str | Cell:
    if episode.success is None:
        return "-"
    return Cell("yes", kind="good") if episode.success else "no"
