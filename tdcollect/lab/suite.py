"""Suites: many policies on many tasks, run, read and reported on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tdcollect.lab.definition import Definition
from tdcollect.lab.pages.suite import report_on
from tdcollect.lab.results import SuiteResults, is_suite, read_results

if TYPE_CHECKING:
    from tdcollect.evaluation.workers.local import Workers


class Suite(Definition):
    """Policies on tasks: one evaluation for each task, policy and training run.

    Make one with :meth:`read` or :meth:`of`. ``docs/suites.md`` has the form of the file.

    Attributes:
        name, version: of the suite; a new version makes new evaluations.
        tasks, policies: with a policy of random actions if a score needs it.
        episodes: the number of test episodes of each evaluation.
        seed: the root seed of each.
        metrics, confidence, drawn_runs: of the aggregates, as for
            :func:`tdcollect.lab.aggregate`; the first metric ranks the policies.
        groups: True to aggregate groups of tasks too.
        whole: the number of episodes before :meth:`limited`; None if it is not.
        directory: the directory that relative paths start from.

    Examples:
        >>> suite = Suite.read("suite.toml")
        >>> results = suite.run("runs/suite", workers=4)
        >>> print(results)
    """

    def run(
        self,
        output_dir: str | os.PathLike[str],
        *,
        workers: Workers | int | None = None,
        tasks: Sequence[str] | None = None,
        policies: Sequence[str] | None = None,
        shard: tuple[int, int] | None = None,
        keep_trajectories: bool = False,
        recheck: bool = True,
        progress: bool = True,
    ) -> SuiteResults:
        """Run the evaluations that ``output_dir`` lacks, and write the report.

        One that cannot run, since its checkpoint does not fit say, does not keep the others from
        running; ``results.failures`` has the reasons, until it has run.

        Args:
            output_dir: the directory of the suite, with an evaluation's directory for each cell.
            workers: as for :func:`tdcollect.evaluate`, as are those that are not listed here; all
                evaluations share the workers.
            tasks, policies: names or patterns of those to run; None for all. The report is of all.
            shard: ``(i, n)`` to run only the i-th of n parts of the evaluations, i from 0. Shards
                may share ``output_dir``; the last one to end writes the whole report.

        Raises:
            TypeError, ValueError: for a directory of something else, or of a task or a policy that
                has changed, naming the difference, before anything runs.
            FileNotFoundError: for checkpoints that are missing, naming them.
        """
        from tdcollect.lab.run import run_suite

        return run_suite(
            self,
            Path(os.path.abspath(output_dir)),
            self.cells(tasks, policies),
            workers=workers,
            shard=shard,
            keep_trajectories=keep_trajectories,
            recheck=recheck,
            progress=progress,
        )

    def results(self, output_dir: str | os.PathLike[str]) -> SuiteResults:
        """Read the results that a directory holds; the suite may be unfinished.

        Raises:
            ValueError: for evaluations that were altered, or are of other episodes.
        """
        return read_results(self, self._there(output_dir))

    def report(self, output_dir: str | os.PathLike[str]) -> SuiteResults:
        """Write the report on the :meth:`results` that a directory holds; return them."""
        return report_on(self, self._there(output_dir))

    def _there(self, output_dir: str | os.PathLike[str]) -> Path:
        if not is_suite(Path(output_dir)):
            raise FileNotFoundError(
                f"expected the directory of a suite, got {output_dir}; run the suite first, "
                "tdcollect suite run FILE --output-dir DIR"
            )
        return Path(os.path.abspath(output_dir))
