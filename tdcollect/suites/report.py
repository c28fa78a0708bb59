"""The files of a suite's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tdcollect.evaluation.ledger.reading import SUITE, sha256
from tdcollect.evaluation.reports.report import REPORT
from tdcollect.files import locked, remove, write_atomically
from tdcollect.suites.exports import (
    write_leaderboard_csv,
    write_leaderboard_markdown,
    write_scores_npz,
)
from tdcollect.suites.folder import WAIT, note_report
from tdcollect.suites.page import suite_page
from tdcollect.suites.reading import read_results
from tdcollect.suites.results import SuiteResults

if TYPE_CHECKING:
    from tdcollect.suites.suite import Suite

RESULTS = "results.json"
SCORES, SCORE_NAMES = "scores.npz", "scores.json"
LEADERBOARD = "leaderboard"
FILES = (SCORES, SCORE_NAMES, f"{LEADERBOARD}.csv", f"{LEADERBOARD}.md")
"""The files that are there if there is something to write into them."""


def report_on(suite: Suite, directory: Path) -> SuiteResults:
    """Read the results that a directory holds, and write the report on them.

    Of several processes that end at the same time, the last one to write has read all results.

    Args:
        suite: the suite.
        directory: its directory.
    """
    with locked(directory, wait=WAIT):
        note_report(directory, suite)
        results = read_results(suite, directory)
        write_suite_report(directory, results)
    return results


def write_suite_report(directory: Path, results: SuiteResults) -> list[Path]:
    """Write the report on a suite, the same bytes for the same results.

    ``scores.npz`` and the leaderboard are written once a policy has all its scores.

    Returns:
        The files; the last one has the digests of the others.
    """
    written = []
    if (found := results.aggregates) is not None:
        written += [
            write_scores_npz(directory / SCORES, results.scores(), tasks=results.scored_tasks),
            directory / SCORE_NAMES,
            write_leaderboard_csv(directory / f"{LEADERBOARD}.csv", found),
            write_leaderboard_markdown(
                directory / f"{LEADERBOARD}.md", found, title=f"{results.name} {results.version}"
            ),
        ]
    for name in FILES:
        if directory / name not in written:
            remove(directory / name)  # of results that have changed since
    written.append(write_atomically(directory / REPORT, suite_page(results)))
    files = {file.name: sha256(file) for file in (directory / SUITE, *written)}
    text = json.dumps({**results.to_dict(), "files": files}, indent=1, sort_keys=True) + "\n"
    return [*written, write_atomically(directory / RESULTS, text.encode())]
