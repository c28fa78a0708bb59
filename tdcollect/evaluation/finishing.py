"""The last files of an evaluation: its statistics and its report, or the mark of a shard."""

from __future__ import annotations

from tdcollect.evaluation.ledger.directory import Directory
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


def finish(directory: Directory, result: EvaluationResult, request: Request | None) -> None:
    """Sort the ledger, and write all that follows from it; the last file marks it as finished.

    The same result gives the same bytes, whoever ran its episodes.

    Args:
        directory: the directory of the evaluation; data that are kept are there.
        result: all episodes of the directory.
        request: env and policy by name, if they are kept.
    """
    directory.finish(result.episodes)
    if request is not None:
        request.write(directory.path)
    if directory.shard is not None:
        directory.finish_shard()
        return
    summary = result.summary()
    files = write_report(directory.path, directory.manifest, result.episodes, summary, request)
    directory.write_results(summary.to_dict(), files)
