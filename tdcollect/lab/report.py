"""The files of a suite's report, written together or exported one by one."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tdcollect import check
from tdcollect.display import visible
from tdcollect.evaluation.ledger import RESULTS, SUITE, sha256
from tdcollect.evaluation.npz import dump
from tdcollect.evaluation.statistics import ends
from tdcollect.files import locked, remove, write_atomically, write_json
from tdcollect.lab.aggregates import Aggregates
from tdcollect.lab.definition import Definition
from tdcollect.lab.pages.suite import suite_page
from tdcollect.lab.results import WAIT, SuiteResults, note_report, read_results
from tdcollect.pages.build import REPORT

FILES = ("scores.npz", "scores.json", "leaderboard.csv")
"""The files that are there if there is something to write into them."""


def report_on(suite: Definition, directory: Path) -> SuiteResults:
    """Read the results that a directory holds, and write the report on them.

    Of several processes that end at the same time, the last one to write has read all results.
    """
    with locked(directory, wait=WAIT):
        note_report(directory, suite)
        results = read_results(suite, directory)
        if results.aggregates is not None:
            export(results, "npz", directory / "scores.npz")
            export(results, "csv", directory / "leaderboard.csv")
        else:
            for name in FILES:
                remove(directory / name)  # of results that have changed since
        write_atomically(directory / REPORT, suite_page(results).html())
        digests = {SUITE: sha256(directory / SUITE)}
        write_json(directory / RESULTS, {**results.to_dict(), "files": digests})
    return results


def export(
    results: SuiteResults | Aggregates,
    format: Literal["npz", "csv"],
    path: str | os.PathLike[str],
) -> Path:
    """Write the scores or the leaderboard of a suite for other tools, and return the file's path.

    Args:
        results: what :meth:`tdcollect.Suite.run` returns; for a leaderboard also what
            :func:`tdcollect.lab.aggregate` returns.
        format: ``"npz"``: a float64 array of scores ``[runs, tasks]`` per policy, the mapping that
            rliable's functions take, and the names in a JSON file beside it, as
            ``{"tasks": [...], "policies": {key: name}}``. ``"csv"``: a row per policy, the best
            first, with rank, runs, each metric with the ends of its interval (empty where there is
            none), and the mean score of each task.
        path: the file.

    Raises:
        ValueError: for another format, for npz under another ending or without scores, and as long
            as no policy has all its scores.
    """
    check.one_of(("npz", "csv"), format=format)
    aggregates = results if isinstance(results, Aggregates) else results.aggregates
    if aggregates is None:
        raise ValueError("expected results with a policy that has all its scores, got none")
    if format == "csv":
        return write_atomically(Path(path), _csv(aggregates).encode())
    if isinstance(results, Aggregates) or Path(path).suffix != ".npz":
        raise ValueError(
            "expected the results of a suite and a path that ends in .npz for format='npz', got "
            f"{type(results).__name__} and {os.fspath(path)!r}"
        )
    return _write_npz(results, Path(path))


def _write_npz(results: SuiteResults, file: Path) -> Path:
    # numpy takes a final ".npy" for the ending of the member's name.
    scores = results.scores()
    policies = {re.sub(r"\.(npy)?$", r"%2E\1", name): name for name in scores}
    arrays = {key: scores[name] for key, name in policies.items()}
    text = json.dumps({"tasks": results.scored_tasks, "policies": policies}, indent=2) + "\n"
    write_atomically(file.with_suffix(".json"), text.encode())
    return write_atomically(file, partial(dump, arrays))


def _csv(aggregates: Aggregates) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metrics = [f"{metric}{end}" for metric in aggregates.metrics for end in ("", "_low", "_high")]
    tasks = [f"score:{visible(task)}" for task in aggregates.tasks]
    others = [policy for _, policy in aggregates.ranking()] if aggregates.differences else []
    figures = ("low", "high", "p", "adjusted_p")
    names = [f"minus:{visible(policy)}" for policy in others]
    minus = [column for name in names for column in (name, *(f"{name}_{of}" for of in figures))]
    writer.writerow(["rank", "policy", "runs", *metrics, *tasks, *minus])
    for rank, policy in aggregates.ranking():
        row: list[Any] = [rank, visible(policy), aggregates.runs[policy]]
        for metric in aggregates.metrics:
            estimate = aggregates.estimates[policy][metric]
            row += [estimate.value, *(ends(estimate.interval) or ("", ""))]
        row += aggregates.task_means[policy].values()
        for other in others:
            if other == policy:
                row += [""] * 5
                continue
            one = aggregates.differences[policy][other]
            row += [one.value, *(ends(one.interval) or ("", "")), one.p_value, one.adjusted_p_value]
        writer.writerow(row)
    return text.getvalue()
