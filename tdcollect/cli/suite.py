"""The commands of suites."""

from __future__ import annotations

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import click

from tdcollect.cli import options
from tdcollect.cli.output import print_json, say, status_of
from tdcollect.cli.program import Program, program, resumable

file = click.argument("file", type=options.FOLDER)
task = click.option(
    "--task", "tasks", multiple=True, metavar="NAME", help="A task, or a pattern of names."
)
policy = click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="A policy, or a pattern of names."
)
episodes = click.option(
    "--episodes", type=click.IntRange(min=1), help="Number of episodes, in place of the file's."
)
limit = click.option(
    "--limit", type=click.IntRange(min=1), help="At most so many episodes each, to try it out."
)


@program.group(cls=Program)
def suite() -> None:
    """Many policies on many tasks: run, list, validate, report."""


@suite.command()
@file
@click.option(
    "--output-dir",
    type=options.FOLDER,
    required=True,
    help="Directory of the evaluations and the report. Resumes the suite found there.",
)
@task
@policy
@episodes
@limit
@options.workers
@options.ray_workers
@options.ray_address
@click.option(
    "--shard",
    callback=options.shard_of,
    metavar="I/N",
    help="Run shard I of N of the evaluations, I from 0; shards may share --output-dir.",
)
@click.option("--keep-trajectories", is_flag=True, help="Keep the episodes' data.")
@options.allow_mixed
@options.retry_lost
@options.no_recheck
@click.option("--quiet", is_flag=True, help="Show no progress and no table.")
@options.as_json
def run(
    file: Path,
    output_dir: Path,
    tasks: tuple[str, ...],
    policies: tuple[str, ...],
    episodes: int | None,
    limit: int | None,
    workers: int | None,
    ray_workers: int | None,
    ray_address: str | None,
    shard: Any,
    keep_trajectories: bool,
    allow_mixed: bool,
    retry_lost: bool,
    no_recheck: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run the evaluations of a suite that --output-dir lacks, and write the report.

    FILE is the TOML file of the suite. The exit status is 3 if episodes were lost with their
    workers; else 1 if an evaluation could not run, or episodes failed.
    """
    with redirect_stdout(sys.stderr), resumable(output_dir), ExitStack() as stack:
        found = _read(file, episodes, limit).run(
            output_dir,
            workers=options.crew_of(stack, workers, ray_workers, ray_address),
            tasks=tasks or None,
            policies=policies or None,
            shard=shard,
            keep_trajectories=keep_trajectories,
            allow_mixed=allow_mixed,
            retry_lost=retry_lost,
            recheck=not no_recheck,
            progress=not quiet,
        )
    return _say(found, output_dir, as_json, quiet)


@suite.command()
@file
@click.option("--output-dir", type=options.FOLDER, help="Directory that may have some of them.")
@task
@policy
@episodes
@limit
@options.as_json
def ls(
    file: Path,
    output_dir: Path | None,
    tasks: tuple[str, ...],
    policies: tuple[str, ...],
    episodes: int | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the evaluations of a suite, and which of them are finished.

    FILE is the TOML file of the suite. Nothing that it names is run.
    """
    from tdcollect.display import text_table
    from tdcollect.suites.reading import state_of

    read = _read(file, episodes, limit)
    rows = []
    for cell in read.cells(tasks or None, policies or None):
        missing = [str(path) for path in cell.files.values() if not path.is_file()]
        status, ended = ("-", 0) if output_dir is None else state_of(cell, output_dir)
        note = f"no file {missing[0]}" if missing else ""
        rows.append([cell.name, cell.task.env, cell.policy.factory, status, f"{ended}", note])
    if as_json:
        names = ("name", "env", "policy", "status", "episodes", "note")
        cells = [dict(zip(names, row, strict=True)) | {"episodes": int(row[4])} for row in rows]
        print_json(suite=read.name, version=read.version, episodes=read.episodes, cells=cells)
        return
    say(f"{read.name} {read.version}, {len(rows)} evaluations of {read.episodes} episodes\n")
    header = ["task/policy/run", "env", "policy", "status", "ended", ""]
    say(text_table(rows, header))


@suite.command()
@file
@task
@policy
@click.option("--quiet", is_flag=True, help="Show no progress.")
@options.as_json
def validate(
    file: Path, tasks: tuple[str, ...], policies: tuple[str, ...], quiet: bool, as_json: bool
) -> int:
    """Find before anything runs what would fail: envs, extras, checkpoints, scores.

    FILE is the TOML file of the suite. This makes each env and each policy, has the doctor look at
    the envs, and runs a step of each evaluation. The exit status is 1 if there is a problem.
    """
    with redirect_stdout(sys.stderr):
        found = _read(file).validate(
            tasks=tasks or None, policies=policies or None, progress=not quiet
        )
    if as_json:
        print_json(**found.to_dict(), passed=found.passed)
    else:
        say(found)
    return 0 if found.passed else 1


@suite.command()
@file
@click.option(
    "--output-dir", type=options.FOLDER, required=True, help="Directory of the evaluations."
)
@episodes
@limit
@options.as_json
def report(
    file: Path, output_dir: Path, episodes: int | None, limit: int | None, as_json: bool
) -> int:
    """Write the report on the evaluations that are there, and print the leaderboard.

    FILE is the TOML file of the suite. Nothing is run.
    """
    return _say(_read(file, episodes, limit).report(output_dir), output_dir, as_json)


def _read(file: Path, episodes: int | None = None, limit: int | None = None) -> Any:
    from dataclasses import replace

    import tdcollect

    read = tdcollect.Suite.read(file)
    if episodes is not None:
        read = replace(read, episodes=episodes)
    return read if limit is None else read.limited(limit)


def _say(found: Any, output_dir: Path, as_json: bool, quiet: bool = False) -> int:
    from tdcollect.evaluation.reports.report import REPORT

    report = output_dir / REPORT
    if as_json:
        print_json(**found.to_dict(), failures=found.failures, report=report)
    elif not quiet:
        say(found)
        say(f"\nreport {report}")
    for name, reason in found.failures.items():
        say(f"tdcollect: {name} could not run: {reason}", err=True)
    if found.failed_episodes:
        say(f"tdcollect: {found.failed_episodes} episodes failed", err=True)
    return status_of(bool(found.failures or found.failed_episodes), found.lost_episodes)
