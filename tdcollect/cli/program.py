"""The program that the commands belong to, and what they print: text, JSON, results of episodes."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tdcollect.display import count_text, visible
from tdcollect.evaluation.request import exits_refused
from tdcollect.files import check_writable

if TYPE_CHECKING:
    from tdcollect.evaluation.result import EvaluationResult

PIPE_CLOSED = 141  # as shells have it for SIGPIPE
LOST = 3
"""Episodes were lost with their workers: the same command runs them again."""
WORSE = 3
"""A comparison was asked for a verdict, and a policy is worse, or may be."""

_MOST_ERRORS = 10  # printed of the errors of failed episodes


def _traceback_option() -> click.Option:
    text = "Print the traceback of an error."  # main() looks for the option itself
    return click.Option(["--traceback"], is_flag=True, expose_value=False, help=text)


class Program(click.Group):
    """The commands; each takes ``--traceback``, as does the program itself."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(_traceback_option())
        if cmd.callback is not None and not isinstance(cmd, click.Group):
            cmd.callback = _never_silent(cmd.callback)
        super().add_command(cmd, name)


def _never_silent(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command: it gives a reason if click or Python would end it without one."""

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        try:
            with exits_refused():
                return command(**values)
        except BrokenPipeError as error:  # not stdout's: see `say`
            raise RuntimeError(f"a pipe was closed at its other end: {error}") from error

    return run


@click.group(
    cls=Program,
    params=[_traceback_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="tdcollect")
def program() -> None:
    """Test episodes for TorchRL policies, the same to the bit however they are run."""


@contextmanager
def resumable(output_dir: Path | None) -> Iterator[None]:
    """Say that an interrupted command can be resumed, if it can."""
    try:
        yield
    except KeyboardInterrupt as error:
        if output_dir is None:
            raise
        raise click.Abort("the same command resumes the evaluation") from error


@contextmanager
def others_on_stderr() -> Iterator[None]:
    """Keep stdout for the result: env and policy print to stderr, also in C code and in workers."""
    with ExitStack() as stack:
        with suppress(OSError):  # one of them is closed
            stack.callback(os.close, stdout := os.dup(1))
            stack.callback(os.dup2, stdout, 1)
            os.dup2(2, 1)
            stack.callback(ctypes.pythonapi.fflush, None)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def running(output_dir: Path | None, values: dict[str, Any]) -> Iterator[Any]:
    """Give the workers that were asked for; :func:`others_on_stderr`."""
    workers, count, address = (values.pop(n) for n in ("workers", "ray_workers", "ray_address"))
    if count is not None and workers is not None:
        raise click.UsageError("--workers and --ray-workers exclude each other; give one of them")
    if address is not None and count is None:
        raise click.UsageError("--ray-address goes with --ray-workers N")
    if output_dir is not None:
        check_writable(output_dir)
    with others_on_stderr(), resumable(output_dir), ExitStack() as stack:
        if count is not None:
            import tdcollect

            workers = stack.enter_context(tdcollect.RayWorkers(count, address=address))
        yield workers


def drop_output() -> None:
    """Discard what stdout still holds: its reader went away, and Python writes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_result(
    result: EvaluationResult, directory: Path | None, as_json: bool, quiet: bool, shard: Any = None
) -> int:
    """Print the result of an evaluation, or of a shard; return the command's exit status."""
    from tdcollect.evaluation.ledger import policy_name
    from tdcollect.pages.build import REPORT

    summary = result.summary()
    report = None if directory is None or shard is not None else directory / REPORT
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
        say(f"{result.manifest['env']['id']}, {policy_name(result.manifest)}\n")
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
    for index, error in sorted(result.errors.items())[:_MOST_ERRORS]:
        say(f"tdcollect: episode {index}: {' '.join(error.split())}", err=True)
    if len(result.errors) > _MOST_ERRORS:
        say(f"tdcollect: and {len(result.errors) - _MOST_ERRORS} more", err=True)
    return status_of(summary.episodes, summary.failed, summary.lost)


def status_of(episodes: int, failed: int, lost: int, refused: bool = False) -> int:
    """Return the exit status, given how many episodes failed and were lost; tell of them."""
    if failed:
        say(f"tdcollect: {failed} of {episodes} episodes failed", err=True)
    if not lost:
        return int(bool(failed or refused))
    counted = count_text(lost, "lost episode")
    say(f"tdcollect: {counted}, whose workers ended; the same command runs them again", err=True)
    return LOST


def distinct_names(directories: Sequence[Path]) -> list[str]:
    """Return names of directories, as short as they differ: ``random`` and ``net``, say."""
    paths = [directory.resolve().parts for directory in directories]
    if len({*paths}) < len(paths):
        raise click.UsageError("expected directories that differ, got one of them twice")
    while len({parts[-1] for parts in paths}) == 1:
        paths = [parts[:-1] for parts in paths]
    counts = range(1, max(map(len, paths)) + 1)
    named = (["/".join(parts[-count:]) for parts in paths] for count in counts)
    return next(names for names in named if len(set(names)) == len(names))


def tell(as_json: bool, text: object, **fields: Any) -> None:
    """Print what a command has found: a text and where the report is, or the fields as JSON."""
    if as_json:
        print_json(**fields)
    else:
        say(f"{text}\n\nreport {fields['report']}" if fields.get("report") else text)


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
