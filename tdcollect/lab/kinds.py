"""The kinds of directories that the lab writes, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tdcollect.evaluation import ledger, statistics
from tdcollect.evaluation.ledger import Problem
from tdcollect.evaluation.verification import Kind
from tdcollect.lab import race
from tdcollect.lab.results import cells_of, is_suite, results_of


def _check_race(root: Path) -> Iterator[Problem]:
    """Decide a race again from its ledgers, which were checked, and compare its file."""
    _, written = race.read(root)
    file = root / ledger.RACE
    if "outcome" not in written:
        yield Problem(file, "the race is unfinished: it has no outcome; the same call resumes it")
        return
    for name, value in race.RaceResult.load(root).to_dict().items():
        if not statistics.alike(value, written.get(name)):
            yield Problem(file, f"{name} is {written.get(name)!r}, and by the ledgers {value!r}")


def _holds_suite(root: Path) -> bool:
    return is_suite(root) and not (root / ledger.MANIFEST).exists()


def _check_suite(root: Path) -> Iterator[Problem]:
    """Compare the report of a suite with its evaluations, which were checked."""
    results_of(root, may_be_stale=False)
    digests = ledger.read_object(root / ledger.RESULTS).get("files")
    if digests != {ledger.SUITE: ledger.sha256(root / ledger.SUITE)}:
        yield Problem(root / ledger.SUITE, "it is not the file that was written with the report")


KINDS = (
    Kind(lambda root: (root / ledger.RACE).is_file(), race.evaluations_of, _check_race),
    Kind(_holds_suite, cells_of, _check_suite),
)
