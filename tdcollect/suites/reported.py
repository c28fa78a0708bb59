"""Results of a suite without its file, read from its directory as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tdcollect.evaluation.ledger.reading import read_object
from tdcollect.suites.folder import read_folder
from tdcollect.suites.reading import read_results
from tdcollect.suites.report import RESULTS
from tdcollect.suites.results import SuiteResults
from tdcollect.suites.suite import Suite


def results_of(directory: Path) -> SuiteResults:
    """Read the results of a suite from the last report in its directory.

    Tasks, policies and ranges are those that the report names; the numbers are computed anew from
    the ledgers. Nothing is run.

    Raises:
        FileNotFoundError: if there is no report.
        ValueError: for files that a suite did not write, or evaluations that were altered.
    """
    file = directory / RESULTS
    if not file.is_file():
        raise FileNotFoundError("no report yet")
    given, decided = read_object(file), read_folder(directory)
    try:
        suite = _suite(given, decided)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"expected {file} as `tdcollect suite report` writes it, got something else "
            f"({type(error).__name__}: {error}); write the report again"
        ) from error
    found = read_results(suite, directory)
    # Those that only the suite's file tells, such as that it was limited.
    said = [text for text in given.get("remarks", []) if isinstance(text, str)]
    own = found.remarks
    return replace(found, remarks=(*own, *(text for text in said if text not in own)))


def _suite(given: Mapping[str, Any], decided: Mapping[str, Any]) -> Suite:
    """Return the suite that a report is of, as far as the report needs it."""
    cells, tasks = given["cells"], given["tasks"]
    runs: dict[str, list[str]] = {}
    for cell in cells:  # tasks in their order, and the runs of policies in theirs
        of = runs.setdefault(cell["policy"], [])
        of += [] if cell["run"] in of else [cell["run"]]
    table: dict[str, Any] = {
        "suite": {name: given[name] for name in ("name", "version", "episodes")},
        "tasks": [
            _task(name, tasks[name]) for name in dict.fromkeys(cell["task"] for cell in cells)
        ],
        # What makes them is not in a report, and nothing is made here.
        "policies": [
            {"name": name, "factory": "not:known", "checkpoints": "{run}", "runs": [*map(int, of)]}
            for name, of in runs.items()
        ],
    }
    table["suite"]["seed"] = decided["seed"]
    if given["aggregates"] is not None:
        report = {name: given["aggregates"][name] for name in ("confidence", "drawn_runs")}
        table["report"] = {**report, "metrics": given["aggregates"]["metrics"]}
    suite = Suite.of(table)
    presets = {name: dict(task["presets"]) for name, task in tasks.items()}
    return replace(
        suite, tasks=tuple(replace(task, presets=presets[task.name]) for task in suite.tasks)
    )


def _task(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    task = {"name": name, "env": given["env"]}
    if given["group"] is not None:
        task["group"] = given["group"]
    if given["range"] is not None:
        low, high = given["range"]
        task["score"] = {"low": low, "high": high, "source": given["source"] or ""}
    return task
