"""A suite without its file: rebuilt from its directory, and its report compared with that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tdcollect.evaluation.ledger import SUITE, read_object
from tdcollect.evaluation.statistics import alike
from tdcollect.suites.cells import EVALUATIONS
from tdcollect.suites.folder import read_folder
from tdcollect.suites.report import RESULTS
from tdcollect.suites.results import SuiteResults, read_results
from tdcollect.suites.suite import Suite
from tdcollect.suites.tables import Policy, Task


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
        cells = {f"{cell['task']}/{cell['policy']}/{cell['run']}": cell for cell in given["cells"]}
        suite = _suite(given["cells"], decided)
        if lost := decided["files"].keys() - cells.keys():
            raise ValueError(f"it lacks {min(lost)}")
        if not isinstance(given.get("files"), dict):
            raise TypeError("it has no digests of files")
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


def _suite(cells: Sequence[Mapping[str, Any]], decided: Mapping[str, Any]) -> Suite:
    """Return the suite as its directory has it; only the policies' files are not known."""
    told = decided.get("report", {})
    runs: dict[str, list[str]] = {}
    for cell in cells:  # tasks in their order, and the runs of policies in theirs
        of = runs.setdefault(cell["policy"], [])
        of += [] if cell["run"] in of else [cell["run"]]
    return Suite(
        **{name: decided[name] for name in ("name", "version", "episodes", "seed")},
        tasks=tuple(
            Task(name, **decided["tasks"][name], **told.get("tasks", {}).get(name, {}))
            for name in dict.fromkeys(cell["task"] for cell in cells)
        ),
        policies=tuple(
            Policy(name, runs=of, **decided["policies"][name]) for name, of in runs.items()
        ),
        **told.get("settings", {}),
    )


def cells_of(directory: Path) -> list[Path]:
    """Return the directories of the evaluations that a suite has begun."""
    return [directory / EVALUATIONS / name for name in sorted(read_folder(directory)["files"])]
