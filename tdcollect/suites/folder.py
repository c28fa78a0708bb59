"""The directory of a suite: what decides its episodes, and an evaluation for each cell."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdcollect.display import count_text, listed_text
from tdcollect.evaluation.ledger import (
    SUITE,
    differences_text,
    leaf_differences,
    read_object,
    sha256,
)
from tdcollect.files import check_output, locked, write_json
from tdcollect.suites.cells import Cell

if TYPE_CHECKING:
    from tdcollect.suites.suite import Suite

FORMAT = 1

WAIT = math.inf  # for as long as other processes write the files of a suite


def check_files(cells: Sequence[Cell]) -> None:
    """Refuse cells whose files are missing.

    Raises:
        FileNotFoundError: naming them.
    """
    missing = [
        f"{path} of {cell.name}"
        for cell in cells
        for path in cell.files.values()
        if not path.is_file()
    ]
    if missing:
        more = "" if len(missing) <= 3 else f", and {count_text(len(missing) - 3, 'file')} more"
        raise FileNotFoundError(
            f"expected the files that the policies name, got no {'; no '.join(missing[:3])}{more}; "
            "train these runs, or take them out of `runs`"
        )


def claim_folder(path: Path, described: Mapping[str, Any]) -> None:
    """Write into the directory what decides the episodes of some cells, beside that of others.

    Args:
        path: the directory.
        described: as :func:`described_cells` returns it.

    Raises:
        ValueError: as :func:`check_folder`.
    """
    with locked(path, wait=WAIT):
        there = check_folder(path, described)
        every = {
            name: {**there.get(name, {}), **described[name]}
            for name in ("tasks", "policies", "files")
        }
        write_json(path / SUITE, {**there, **described, **every})


def is_suite(path: Path) -> bool:
    """Tell whether a directory is that of a suite."""
    return (path / SUITE).is_file()


def read_folder(path: Path) -> dict[str, Any]:
    """Read what decides the episodes of a suite's directory; empty if there is nothing.

    Raises:
        ValueError: for a file that a suite did not write.
    """
    if not is_suite(path):
        return {}
    found: dict[str, Any] = read_object(path / SUITE)
    parts = [found.get(name) for name in ("tasks", "policies", "files")]
    if found.get("format") != FORMAT or not all(isinstance(part, dict) for part in parts):
        raise ValueError(
            f"expected {path / SUITE} as `tdcollect suite run` of this version writes it, got "
            "something else; name another directory"
        )
    return found


def described_cells(suite: Suite, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return what decides the episodes of some cells; this reads their checkpoints."""
    digests: dict[Path, str] = {}
    files = {}
    for cell in cells:
        for path in cell.files.values():
            if path not in digests:
                digests[path] = sha256(path)
        files[cell.name] = {name: digests[path] for name, path in cell.files.items()}
    described = {
        "format": FORMAT,
        "name": suite.name,
        "version": suite.version,
        "episodes": suite.episodes,
        "seed": suite.seed,
        "tasks": {cell.task.name: cell.definition()["task"] for cell in cells},
        "policies": {cell.policy.name: cell.definition()["policy"] for cell in cells},
        "files": files,
    }
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))  # a torch.device, say
    return plain


def described_report(suite: Suite) -> dict[str, Any]:
    """Return what decides the report and no episode, as far as it is not the default."""
    tasks = {
        task.name: _some({"score": task.score and asdict(task.score), "group": task.group})
        for task in suite.tasks
    }
    plain = {entry.name: entry.default for entry in fields(suite)}
    names = ("metrics", "groups", "confidence", "drawn_runs", "whole")
    own = {name: getattr(suite, name) for name in names if getattr(suite, name) != plain[name]}
    return _some({"report": _some({"tasks": _some(tasks), "settings": own})})


def _some(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value not in (None, {})}


def note_report(path: Path, suite: Suite) -> None:
    """Write into the directory what decides the report, in place of what did before."""
    found = {name: value for name, value in read_folder(path).items() if name != "report"}
    write_json(path / SUITE, {**found, **described_report(suite)})


def check_folder(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a directory of something else, or where a cell has changed.

    Returns:
        What is there; empty if it is nothing.

    Raises:
        ValueError: with each difference.
    """
    there = read_folder(path)
    if not there:
        check_output(path, "a suite", (SUITE,))
        return {}
    found: list[tuple[str, Any, Any]] = []
    for name in ("name", "version", "episodes", "seed"):
        found += leaf_differences(name, there.get(name), described[name])
    for name in ("tasks", "policies", "files"):
        for key in sorted(there[name].keys() & described[name].keys()):
            found += leaf_differences(f"{name}.{key}", there[name][key], described[name][key])
    if found:
        texts = [differences_text([difference]) for difference in found]
        raise ValueError(
            f"{path} holds the evaluations of another suite: {listed_text(texts)}. Choose another "
            "directory, give what has changed another name, or remove its evaluations and "
            f"{SUITE} to run all anew"
        )
    return there


def error_file(path: Path, cell: Cell) -> Path:
    """Return the file with the error of a cell that could not run, beside its directory."""
    return (path / cell.path).with_name(f"{cell.run}.error.json")


def write_error(path: Path, cell: Cell, reason: str) -> None:
    """Keep why a cell could not run, until it has run."""
    write_json(error_file(path, cell), {"reason": reason})


def read_error(path: Path, cell: Cell) -> str:
    """Return why a cell could not run; empty if it could, or has not been tried.

    Raises:
        ValueError: for a file that a suite did not write.
    """
    file = error_file(path, cell)
    return str(read_object(file).get("reason")) if file.exists() else ""
