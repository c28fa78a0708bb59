"""The commands of the lab: comparisons, curves over runs, races, suites, and pages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tdcollect.cli import options
from tdcollect.cli import program as terminal
from tdcollect.cli.commands import request_of, settle
from tdcollect.cli.program import (
    WORSE,
    Program,
    distinct_names,
    print_json,
    program,
    running,
    say,
    tell,
)
from tdcollect.display import count_text, number_text

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Difference
    from tdcollect.evaluation.result import EvaluationResult


@program.command()
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR DIR...")
@options.output_dir(help="Directory for a report of the comparison.")
@options.shown("--confidence", type=float, default=0.95, help="Of every interval.")
@click.option(
    "--fail-if-worse",
    type=float,
    metavar="MARGIN",
    help="End with status 3 if a policy is shown to be worse by more than MARGIN, such as 0.",
)
@click.option(
    "--require-not-worse",
    type=float,
    metavar="MARGIN",
    help="End with status 3 unless each is shown to be worse by less than MARGIN, if at all.",
)
@click.option(
    "--on",
    metavar="NAME",
    help="What these two are about: return, success, or a metric.  [default: return]",
)
@options.flag("--lower-is-better", help="Of a metric such as a cost.")
@options.flag(
    "--across-envs", help="Compare one policy in envs that differ, on episodes of the same numbers."
)
@click.option(
    "--groups",
    metavar="FILE.py:NAME",
    help="What episodes share, as a function of an index or a mapping: errors are clustered by it.",
)
@options.as_json
def compare(
    directories: tuple[Path, ...],
    output_dir: Path | None,
    confidence: float,
    across_envs: bool,
    groups: str | None,
    on: str | None,
    lower_is_better: bool,
    as_json: bool,
    **margins: float | None,
) -> int:
    """Compare evaluations with the first one, episode by episode.

    All must be of the same episodes; the first may have more. What the interval of a difference
    excludes is shown not to be so. The exit status is 3 if --fail-if-worse or --require-not-worse
    says so.
    """
    wanted = {name: margin for name, margin in margins.items() if margin is not None}
    if (on or lower_is_better) and not wanted:
        name = "--on" if on else "--lower-is-better"
        raise click.UsageError(f"{name} goes with --fail-if-worse or --require-not-worse MARGIN")
    if len(directories) < 2:
        raise click.UsageError("expected two directories or more")
    names = distinct_names(directories)
    import tdcollect
    from tdcollect.evaluation.request import load_named
    from tdcollect.lab.pages.episode import write_compared
    from tdcollect.pages.evaluation import write_comparison_report

    results = [finished(directory) for directory in directories]
    shared = None if groups is None else load_named(groups, Path.cwd())
    comparison = tdcollect.compare(
        *results, names=names, confidence=confidence, across_envs=across_envs, groups=shared
    )
    verdicts = [
        _reason(difference, name, margin, on or "return", lower_is_better)
        for name, margin in wanted.items()
        for difference in comparison.differences
    ]
    reasons = [reason for reason in verdicts if reason is not None]
    report = None
    if output_dir is not None:
        pages = write_compared(output_dir, results, comparison)
        report = write_comparison_report(output_dir, comparison, pages)[-1]
    told = {"reasons": reasons} if wanted else {}
    tell(as_json, comparison, report=report, **comparison.to_dict(), **told)
    for reason in reasons:
        say(f"tdcollect: {reason}", err=True)
    return WORSE if reasons else 0


def finished(directory: Path) -> EvaluationResult:
    """Read an evaluation; refuse one that is unfinished, and a shard."""
    import tdcollect
    from tdcollect.evaluation.ledger import is_finished, read_last

    result = tdcollect.EvaluationResult.load(directory)
    count = len(result.missing)
    if count or not is_finished(directory):
        lacks = f"{count} of its episodes" if count else "its results"
        if (shard := read_last(directory)[0]) is not None:
            raise ValueError(
                f"{directory} holds {shard} of an evaluation; make one of all shards "
                "first, tdcollect merge DIR... --output-dir DIR, and compare that"
            )
        raise ValueError(
            f"{directory} is unfinished: it lacks {lacks}; run its evaluation again, which "
            "resumes it"
        )
    return result


def _reason(d: Difference, name: str, margin: float, *on: Any) -> str | None:
    """Return why a difference does not pass an option; None if it does."""
    than = f"worse than {d.baseline} by"
    if name == "fail_if_worse":
        passed, verdict = not d.is_worse(margin, *on), f"shown to be {than} more than {margin:g}"
    else:
        passed = d.is_not_worse(margin, *on)
        verdict = f"not shown to be {than} less than {margin:g}, if at all"
    value, interval = d.measured(on[0])
    told = {"return": "mean returns", "success": "success rates"}.get(on[0], f"mean {on[0]}")
    measured = f"difference of {told} {number_text(value)} {interval or 'without an interval'}"
    return None if passed else f"{d.name} is {verdict}: {measured}"


@program.command()
@click.argument("runs", nargs=-1, required=True, type=options.FOLDER, metavar="RUN...")
@options.shown("--on", default="return", help="return, success, or the name of a metric.")
@click.option("--threshold", type=float, help="Count the steps to a mean of at least this.")
@options.flag("--lower-is-better", help="To a mean of at most the threshold, as of a cost.")
@options.shown("--confidence", type=float, default=0.95, help="Of every interval.")
@options.output_dir(help="Directory for a page of the curves.")
@options.as_json
def curves(runs: tuple[Path, ...], output_dir: Path | None, as_json: bool, **settings: Any) -> None:
    """Show the learning curves of several training runs together.

    RUN is the directory of an Evaluator, one of each run, tested on the same episodes. At each step
    that all have: the interquartile mean over runs and its interval. Nothing is run.
    """
    if settings["lower_is_better"] and settings["threshold"] is None:
        raise click.UsageError("--lower-is-better goes with --threshold")
    names = distinct_names(runs) if len(runs) > 1 else [runs[0].resolve().name]
    from tdcollect.lab.curves import CURVES_REPORT, curves_page, over_runs
    from tdcollect.pages.build import write_page

    together = over_runs(dict(zip(names, runs, strict=True)), **settings)
    report = None if output_dir is None else output_dir / CURVES_REPORT
    if report is not None:
        write_page(report, curves_page(together))
    tell(as_json, together, report=report, **together.to_dict())


of_policy = partial(click.option, multiple=True, callback=options.by_name)


@program.command()
@click.argument("env")
@of_policy(
    "--policy",
    "policies",
    required=True,
    metavar="NAME=POLICY",
    help=f"A policy and its name, twice or more. {options.POLICY}",
)
@of_policy(
    "--checkpoint",
    "checkpoints",
    metavar="NAME=FILE",
    help=f"{options.CHECKPOINT} Of the policy of this name.",
)
@of_policy(
    "--vecnormalize",
    "vecnormalizes",
    metavar="NAME=FILE",
    help=f"{options.VECNORMALIZE} Of the policy of this name.",
)
@options.shown("--max-episodes", type=int, default=1000, help="Most episodes of a policy.")
@options.shown("--on", default="return", help="return, success, or the name of a --metric.")
@options.flag("--lower-is-better", help="Of a metric such as a cost.")
@click.option(
    "--return-range",
    type=(float, float),
    metavar="LOW HIGH",
    help="Lowest and highest return of an episode. Without it, signs of differences are compared.",
)
@options.shown("--alpha", default=0.05, help="Probability of a wrong decision.")
@click.option("--margin", type=float, help="End, too, once no difference is larger than this.")
@click.option(
    "--failed",
    type=click.Choice(["worst", "leave out"]),
    help="How failed and lost episodes count.  [default: worst, where there is a worst value]",
)
@options.shown("--block", default=10, help="Episodes between two looks, which belong to the rule.")
@options.shown("--seed", type=int, default=0, help="Root seed.")
@click.option("--num-envs", type=int, help="Number of slots.  [default: 16]")
@options.crew
@options.output_dir(help="Directory for the race and its report. Resumes the race found there.")
@options.episode
@options.recheck
@options.flag("--keep-trajectories", help="Keep the episodes' data in --output-dir.")
@options.flag("--quiet", help="Show no progress and no table.")
@options.as_json
def race(
    env: str,
    policies: dict[str, str],
    checkpoints: dict[str, str] | None,
    vecnormalizes: dict[str, str] | None,
    output_dir: Path | None,
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Have policies play the same episodes until it is decided which is better.

    ENV is that of evaluate. The exit status is 3 if episodes were lost with their workers; else 1
    if episodes failed. An undecided race is no failure.
    """
    if settings["keep_trajectories"] and output_dir is None:
        raise click.UsageError("--keep-trajectories needs a directory: --output-dir DIR")
    checkpoints, vecnormalizes = checkpoints or {}, vecnormalizes or {}
    for name in checkpoints | vecnormalizes:
        if name not in policies:
            raise click.UsageError(f"expected a name of --policy, {[*policies]}, got {name!r}")
    with running(output_dir, settings) as crew:
        import tdcollect

        requests = {
            name: request_of(
                env,
                policy,
                settings,
                checkpoint=checkpoints.get(name),
                vecnormalize=vecnormalizes.get(name),
            )
            for name, policy in policies.items()
        }
        subjects = {name: request.make() for name, request in requests.items()}
        settle(settings)
        result = tdcollect.race(
            next(iter(subjects.values()))[0],
            {name: policy for name, (_, policy) in subjects.items()},
            output_dir=output_dir,
            progress=not quiet,
            requests=requests,
            workers=crew,
            **settings,
        )
    from tdcollect.pages.build import REPORT

    report = None if output_dir is None else output_dir / REPORT
    if as_json or not quiet:
        tell(as_json, result, winner=result.winner, report=report, **result.to_dict())
    records = [record for one in result.results.values() for record in one.episodes]
    lost = sum(record.lost for record in records)
    failed = sum(not record.completed for record in records) - lost
    return terminal.status_of(len(records), failed, lost)


@program.command()
@click.argument("directory", type=options.FOLDER, metavar="DIR")
@options.shown(
    "--output-dir",
    type=options.FOLDER,
    default="pages",
    help="Folder for the pages; new, empty, or with pages of this command, which are replaced.",
)
@options.flag(
    "--overwrite", help="Replace pages that lie in DIR, too, and all that is beside them."
)
@options.shown(
    "--episodes",
    default="worst:5",
    help="Of those whose data are there, the ones with a page: worst:3, failed, or 1,5.",
)
@options.as_json
def view(directory: Path, output_dir: Path, as_json: bool, **how: Any) -> None:
    """Write the pages of all evaluations, learning curves and suites below DIR, with an index.

    The pages are static files that need no network. They are made anew from the ledgers, which are
    read as data: nothing that DIR names is run.
    """
    from tdcollect.lab.pages.view import view as write

    index, viewed = write(directory, output_dir, **how)
    if as_json:
        print_json(index=index, found=[one.to_dict() for one in viewed])
    else:
        pages = sum(one.page is not None for one in viewed)
        say(f"{count_text(pages, 'page')} of {len(viewed)} found below {directory}\nindex {index}")
        for one in viewed:
            if one.page is None:
                say(f"tdcollect: {one.path}: {one.status}", err=True)


suite_file = click.argument("file", type=options.FOLDER)


@program.group(cls=Program)
def suite() -> None:
    """Many policies on many tasks: run, list, report."""


@suite.command()
@suite_file
@options.output_dir(
    required=True,
    help="Directory of the evaluations and the report. Resumes the suite found there.",
)
@options.selection
@options.size
@options.crew
@options.shard(help="Run shard I of N of the evaluations, I from 0; shards may share --output-dir.")
@options.flag("--keep-trajectories", help="Keep the episodes' data.")
@options.recheck
@options.flag("--quiet", help="Show no progress and no table.")
@options.as_json
def run(file: Path, output_dir: Path, quiet: bool, as_json: bool, **chosen: Any) -> int:
    """Run the evaluations of a suite that --output-dir lacks, and write the report.

    FILE is the TOML file of the suite. The exit status is 3 if episodes were lost with their
    workers; else 1 if an evaluation could not run, or episodes failed.
    """
    with running(output_dir, chosen) as crew:
        read = _suite_of(file, chosen)
        results = read.run(output_dir, workers=crew, progress=not quiet, **chosen)
    return _say_suite(results, output_dir, as_json, quiet)


@suite.command()
@suite_file
@options.output_dir(help="Directory that may have some of them.")
@options.selection
@options.size
@options.as_json
def ls(file: Path, output_dir: Path | None, as_json: bool, **chosen: Any) -> None:
    """List the evaluations of a suite, and which of them are finished.

    FILE is the TOML file of the suite. Nothing that it names is run.
    """
    from tdcollect.display import text_table
    from tdcollect.lab.results import state_of

    read = _suite_of(file, chosen)
    rows = []
    for cell in read.cells(**chosen):
        missing = [*cell.missing.values()]
        status, ended = ("-", 0) if output_dir is None else state_of(cell, output_dir)
        note = f"no file {missing[0]}" if missing else ""
        rows.append([cell.name, cell.task.env, cell.policy.factory, status, f"{ended}", note])
    names = ("name", "env", "policy", "status", "episodes", "note")
    cells = [dict(zip(names, row, strict=True)) | {"episodes": int(row[4])} for row in rows]
    head = f"{read.name} {read.version}, {len(rows)} evaluations of {read.episodes} episodes"
    text = f"{head}\n\n{text_table(rows, ['task/policy/run', *names[1:4], 'ended', ''])}"
    about = {"version": read.version, "episodes": read.episodes, "cells": cells}
    tell(as_json, text, suite=read.name, **about)


@suite.command()
@suite_file
@options.output_dir(required=True, help="Directory of the evaluations.")
@options.size
@options.as_json
def report(file: Path, output_dir: Path, as_json: bool, **size: Any) -> int:
    """Write the report on the evaluations that are there, and print the leaderboard.

    FILE is the TOML file of the suite. Nothing is run.
    """
    return _say_suite(_suite_of(file, size).report(output_dir), output_dir, as_json)


def _suite_of(file: Path, values: dict[str, Any]) -> Any:
    """Return the suite of a file; its size is taken out of the options."""
    import tdcollect

    read = tdcollect.Suite.read(file)
    episodes, limit = values.pop("episodes", None), values.pop("limit", None)
    if episodes is not None:
        read = replace(read, episodes=episodes)
    return read if limit is None else read.limited(limit)


def _say_suite(results: Any, output_dir: Path, as_json: bool, quiet: bool = False) -> int:
    from tdcollect.pages.build import REPORT

    report = output_dir / REPORT
    if as_json or not quiet:
        tell(as_json, results, **results.to_dict(), failures=results.failures, report=report)
    for name, reason in results.failures.items():
        say(f"tdcollect: {name} could not run: {reason}", err=True)
    ended = sum(cell.episodes for cell in results.cells)
    refused = bool(results.failures)
    return terminal.status_of(ended, results.failed_episodes, results.lost_episodes, refused)
