"""The output of the commands: text without control characters, JSON, and the result of episodes."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tdcollect.cli import LOST, PIPE_CLOSED, drop_output
from tdcollect.display import count_text, visible

if TYPE_CHECKING:
    from tdcollect.evaluation.result import EvaluationResult

_MOST_ERRORS = 10  # printed of the errors of failed episodes


def say_result(
    result: EvaluationResult,
    directory: Path | None,
    *,
    as_json: bool,
    quiet: bool,
    shard: Any = None,
) -> int:
    """Print the result of an evaluation, or of a shard; return the command's exit status.

    Args:
        result: the result.
        directory: its directory as it was typed.
        as_json: print JSON.
        quiet: print nothing of the statistics.
        shard: the shard that ran.
    """
    summary = result.summary()
    report = None
    if directory is not None and shard is None:
        from tdcollect.evaluation.reports.report import REPORT

        report = directory / REPORT
    if as_json:
        print_json(
            env=result.manifest["env"]["id"],
            policy=result.manifest["policy"]["class"],
            ledger=result.digest,
            report=report,
            **({} if shard is None else {"shard": list(shard)}),
            **summary.to_dict(),
        )
    elif not quiet:
        say(f"{result.manifest['env']['id']}, {result.manifest['policy']['class']}\n")
        if shard is not None:
            ended = count_text(len(result.episodes), "episode")
            say(
                f"{shard}: {ended} ended, {len(result.missing)} are in other shards; when those "
                f"have ended, merge all:\n"
                f"tdcollect merge {shlex.quote(str(directory))} DIR... --output-dir DIR"
            )
        else:
            say(summary)
            combined = result.manifest.get("returns")
            if combined and not click.get_current_context().params.get("reward_keys"):
                say(
                    f"\nA return is the mean over agents, then over groups "
                    f"({', '.join(combined['rewards'])}). Opponents may cancel out: then choose a "
                    f"group of your own with --reward-keys, such as {combined['rewards'][0]}"
                )
            say(f"\nledger {result.digest}")
        if report is not None:
            say(f"report {report}")
    if summary.failed:
        say(f"tdcollect: {summary.failed} of {summary.episodes} episodes failed", err=True)
    if result.errors:
        for index, error in sorted(result.errors.items())[:_MOST_ERRORS]:
            say(f"tdcollect: episode {index}: {' '.join(error.split())}", err=True)
        if len(result.errors) > _MOST_ERRORS:
            say(f"tdcollect: and {len(result.errors) - _MOST_ERRORS} more", err=True)
    return status_of(summary.failed, summary.lost)


def status_of(failed: bool | int, lost: int) -> int:
    """Return the exit status, given what failed; tell of lost episodes."""
    if not lost:
        return 1 if failed else 0
    counted = count_text(lost, "lost episode")
    say(f"tdcollect: {counted}, whose workers ended; run again with --retry-lost", err=True)
    return LOST


def distinct_names(directories: Sequence[Path]) -> list[str]:
    """Return names of directories, as short as they differ: without the last parts that all share.

    ``random`` and ``net`` for ``runs/random/0`` and ``runs/net/0``.
    """
    paths = [directory.resolve().parts for directory in directories]
    while len({parts[-1] for parts in paths}) == 1:
        paths = [parts[:-1] for parts in paths]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(directory) for directory in directories]


def print_json(**fields: Any) -> None:
    """Print one JSON object."""
    text = json.dumps(_finite(fields), indent=1, default=str, allow_nan=False)
    # json escapes all other control characters, and no reader of it takes `\x7f`.
    say(text.replace("\x7f", "\\u007f"))


def _finite(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(text: object, err: bool = False) -> None:
    """Print with control characters written out, whatever ledgers, requests and envs contain."""
    try:
        click.echo(visible(str(text), lines=True), err=err)
    except BrokenPipeError as error:  # `| head`: the reader has read enough
        drop_output()
        raise click.exceptions.Exit(PIPE_CLOSED) from error
