"""The program that the commands belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click


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
    def run(**given: Any) -> Any:
        try:
            return command(**given)
        except BrokenPipeError as error:  # not stdout's: see `say`
            raise RuntimeError(f"a pipe was closed at its other end: {error}") from error
        except SystemExit as error:  # of a script that is no module: without `if __name__ == ...`
            raise RuntimeError(
                f"the code that was named ended the program by sys.exit({error.code!r}); nothing "
                "was done. Put what a script runs under `if __name__ == '__main__':`"
            ) from error

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
