"""Scores and returns of a suite in the formats of other tools, and its leaderboard."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tdcollect.display import number_text, visible
from tdcollect.files import write_atomically
from tdcollect.suites.estimates import LABELS, Aggregates
from tdcollect.suites.metrics import check_scores

Cell = tuple[str, str, int | str]
"""Task, policy and run of an evaluation."""

# Characters that file systems, numpy or percent-encoding itself give a meaning to. numpy takes a
# final ".npy" for the ending of the member's name.
_UNSAFE = re.compile(r'[\x00-\x1f\x7f%/\\:*?"<>|\ud800-\udfff]|^[. ]|[. ]$|\.(?=npy$)')
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


def write_scores_npz(
    path: str | os.PathLike[str],
    scores: Mapping[str, npt.ArrayLike],
    *,
    tasks: Sequence[str] | None = None,
) -> Path:
    """Write ``scores.npz`` in rliable's form, and the names of its tasks beside it.

    The file holds one float64 array ``[runs, tasks]`` per policy and nothing else, so
    ``dict(numpy.load(path))`` is the mapping that rliable's functions take. ``scores.json`` beside
    it holds the names: ``{"tasks": [...], "policies": {key: name}}``. A key is the policy's name;
    characters that a file's name cannot have are percent-encoded, as ``a%2Fb`` for ``a/b``.

    Args:
        path: the file, with the ending ``.npz``.
        scores: by policy, ``[runs, tasks]``.
        tasks: the names of the tasks, one per column; by default their positions.

    Returns:
        The path of the file.

    Raises:
        ValueError: another ending; scores that :func:`~tdcollect.suites.aggregate`
            refuses.
    """
    file = Path(path)
    if file.suffix != ".npz":
        raise ValueError(f"expected a path that ends in .npz, got {os.fspath(path)!r}")
    arrays, names = check_scores(scores, tasks)
    keys = {_key(policy): policy for policy in arrays}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for key, policy in keys.items():
            member = zipfile.ZipInfo(f"{key}.npy")  # dated 1980, always
            member.create_system = 3
            array = io.BytesIO()
            np.lib.format.write_array(array, arrays[policy], allow_pickle=False)
            archive.writestr(member, array.getvalue())
    text = json.dumps({"tasks": list(names), "policies": keys}, indent=2) + "\n"
    write_atomically(file.with_suffix(".json"), text.encode())
    return write_atomically(file, data.getvalue())


def _key(policy: str) -> str:
    def encoded(found: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))

    return _UNSAFE.sub(encoded, policy)


def write_leaderboard_csv(path: str | os.PathLike[str], aggregates: Aggregates) -> Path:
    """Write the leaderboard as CSV, one row per policy, the best first, and return its path.

    Columns are ``rank``, ``policy``, ``runs``; for each metric its value and the ends of its
    interval, as ``iqm``, ``iqm_low``, ``iqm_high``, empty where there is no interval; and for each
    task ``score:TASK``, the mean over runs. Numbers have all their digits.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metrics = [
        "_".join(parts)
        for metric in aggregates.metrics
        for parts in ((metric,), (metric, "low"), (metric, "high"))
    ]
    scores = [f"score:{visible(task)}" for task in aggregates.tasks]
    writer.writerow(["rank", "policy", "runs", *metrics, *scores])
    for rank, policy in aggregates.ranking():
        row: list[Any] = [rank, visible(policy), aggregates.runs[policy]]
        for metric in aggregates.metrics:
            estimate = aggregates.estimates[policy][metric]
            ends = estimate.interval
            row += [estimate.value, *(("", "") if ends is None else (ends.low, ends.high))]
        writer.writerow([*row, *aggregates.task_means[policy].values()])
    return write_atomically(Path(path), text.getvalue().encode())


def write_leaderboard_markdown(
    path: str | os.PathLike[str], aggregates: Aggregates, *, title: str
) -> Path:
    """Write the leaderboard as a Markdown page, and return its path.

    The page has the policies with their metrics, the best first; the probability of improvement of
    each over each other; the scores per task; groups of tasks; and the notes.

    Args:
        path: the file.
        aggregates: the numbers.
        title: the heading of the page, the suite's name say.
    """
    found = aggregates
    order = [policy for _, policy in found.ranking()]
    parts = [f"# {_escaped(title)}", _metrics_table(found)]
    if len(order) > 1:
        rows = [
            [p, *("" if p == q else str(found.improvement[p][q]) for q in order)] for p in order
        ]
        parts.append("## Probability of improvement of the row over the column")
        parts.append(_table(["", *order], rows))
    parts.append("## Scores per task, means over runs")
    rows = [
        [task, *(number_text(found.task_means[policy][task]) for policy in order)]
        for task in found.tasks
    ]
    parts.append(_table(["task", *order], rows))
    for name, group in found.groups.items():
        parts += [
            f"## {_escaped(name)}: {_escaped(', '.join(group.tasks))}",
            _metrics_table(group),
        ]
    parts.append("\n".join(f"- {_escaped(note)}" for note in found.notes()))
    return write_atomically(Path(path), ("\n\n".join(parts) + "\n").encode())


def _metrics_table(found: Aggregates) -> str:
    header = ["policy", "rank", "runs", *(LABELS[metric] for metric in found.metrics)]
    ranks = [str(rank) for rank, _ in found.ranking()]
    rows = [[row[0], rank, *row[1:]] for rank, row in zip(ranks, found.rows(), strict=True)]
    return _table(header, rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose headings and first column are names, and the rest numbers."""
    lines = [
        [_escaped(text) for text in header],
        ["---", *["---:"] * (len(header) - 1)],
        *([_escaped(first), *rest] for first, *rest in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", visible(text))
