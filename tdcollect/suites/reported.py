"""Results of a suite without its file, read from its directory as data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tdcollect.evaluation.ledger.reading import SUITE, Problem, read_object
from tdcollect.evaluation.reports.report import REPORT
from tdcollect.evaluation.reports.statistics import alike
from tdcollect.evaluation.verification import check_files
from tdcollect.suites.cells import EVALUATIONS
from tdcollect.suites.definition import RANDOM
from tdcollect.suites.folder import read_folder
from tdcollect.suites.reading import read_results
from tdcollect.suites.report import FILES, RESULTS
from tdcollect.suites.results import SuiteResults
from tdcollect.suites.suite import Suite


def results_of(directory: Path, may_be_stale: bool = True) -> SuiteResults:
    """Read the results of a suite from its directory.

    ``suite.json`` has the ranges of scores and all else that decides the report. The numbers are
    computed anew from the ledgers, and compared with those of the last report. Nothing is run.

    Args:
        directory: the directory.
        may_be_stale: compare nothing with a report that evaluations have begun or ended since.

    Raises:
        FileNotFoundError: if there is no report.
        ValueError: for files that a suite did not write, or that were altered.
    """
    file = directory / RESULTS
    if not file.is_file():
        raise FileNotFoundError("no report yet")
    given, decided = read_object(file), read_folder(directory)
    try:
        suite = _suite(given, decided)
        cells = {f"{cell['task']}/{cell['policy']}/{cell['run']}": cell for cell in given["cells"]}
        if lost := decided["files"].keys() - cells.keys():
            raise ValueError(f"it lacks {min(lost)}")
        states = [(cell["status"], cell["episodes"]) for cell in cells.values()]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"expected {file} as `tdcollect suite report` writes it, got something else "
            f"({type(error).__name__}: {error}); write the report again"
        ) from error
    found = read_results(suite, directory)
    if may_be_stale and states != [(cell.status, cell.episodes) for cell in found.cells]:
        return found
    for name, value in json.loads(json.dumps(found.to_dict())).items():
        if not alike(value, given.get(name)):
            raise ValueError(
                f"{file}: its {name} are not what {SUITE} and the evaluations give: one of them "
                "was altered; `tdcollect suite report` writes it anew"
            )
    return found


def cells_of(directory: Path) -> list[Path]:
    """Return the directories of the evaluations that a suite has begun."""
    return [directory / EVALUATIONS / name for name in sorted(read_folder(directory)["files"])]


def check_suite(directory: Path) -> Iterator[Problem]:
    """Check the report of a suite against its evaluations, which were checked.

    Raises:
        ValueError: as :func:`results_of` does, also for a report that is not the last one.
    """
    results_of(directory, may_be_stale=False)
    files = read_object(directory / RESULTS)["files"]
    there = [SUITE, REPORT, *(name for name in FILES if (directory / name).exists())]
    yield from check_files(directory / RESULTS, files, there)


def _suite(given: Mapping[str, Any], decided: Mapping[str, Any]) -> Suite:
    """Return the suite that a report is of, as far as the report needs it."""
    if not isinstance(given.get("files"), dict):
        raise TypeError("it has no digests of files")
    cells, tasks, told = given["cells"], decided["tasks"], decided.get("report", {})
    settings = told.get("settings", {})
    runs: dict[str, list[str]] = {}
    for cell in cells:  # tasks in their order, and the runs of policies in theirs
        of = runs.setdefault(cell["policy"], [])
        of += [] if cell["run"] in of else [cell["run"]]
    by_chance = {n for n, policy in decided["policies"].items() if policy["factory"] == RANDOM}
    # What makes the others is not known, and nothing is made here.
    other = {"factory": "not:known", "checkpoints": "{run}"}
    table: dict[str, Any] = {
        "suite": {name: decided[name] for name in ("name", "version", "episodes", "seed")},
        "tasks": [
            {"name": name, "env": tasks[name]["env"], **told.get("tasks", {}).get(name, {})}
            for name in dict.fromkeys(cell["task"] for cell in cells)
        ],
        "policies": [
            {"name": name, "runs": [*map(int, of)]}
            | ({"factory": RANDOM} if name in by_chance else other)
            for name, of in runs.items()
        ],
        "report": {name: value for name, value in settings.items() if name != "whole"},
    }
    suite = Suite.of(table)
    own = [replace(task, presets=dict(tasks[task.name]["presets"])) for task in suite.tasks]
    return replace(suite, tasks=tuple(own), whole=settings.get("whole"))
