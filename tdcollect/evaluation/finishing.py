"""The last files of an evaluation: its statistics and its report, or the mark of a shard."""

from __future__ import annotations

from tdcollect.evaluation.ledger.directory import Directory
from tdcollect.evaluation.ledger.reading import RECHECK
from tdcollect.evaluation.reports.report import write_report
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.extras import extra_module


def check_report_extras(what: str) -> None:
    """Raise for packages that the report lacks, before anything runs.

    Args:
        what: the call that writes the report, as the first words of the error.
    """
    for name in ("scipy", "matplotlib"):
        extra_module(name, what)


def finish(
    directory: Directory, result: EvaluationResult, request: Request | None, recheck: bool = True
) -> None:
    """Sort the ledger, and write all that follows from it; the last file marks it as finished.

    The same result gives the same bytes, whoever ran its episodes.

    Args:
        directory: the directory of the evaluation; data that are kept are there.
        result: all episodes of the directory.
        request: env and policy by name, if they are kept.
        recheck: False if no episode ran once more, which the last file then says.
    """
    note = {} if recheck else {RECHECK: False}
    directory.finish(result.episodes)
    if request is not None:
        request.write(directory.path)
    if directory.shard is not None:
        directory.finish_shard(**note)
        return
    summary = result.summary()
    files = write_report(directory.path, directory.manifest, result.episodes, summary, request)
    directory.write_results({**note, **summary.to_dict()}, files)
