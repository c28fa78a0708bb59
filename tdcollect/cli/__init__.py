"""The command line: ``tdcollect``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130  # as shells have it for SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what was typed behind ``tdcollect``; None for the process's own.

    Returns:
        The exit status: 0 where all went well; 1 where the command was refused or failed, with
        the reason on one line; 2 where it was not understood; 130 where it was interrupted.
    """
    try:
        import click
    except ModuleNotFoundError:
        print(
            "tdcollect: the command line needs the click package: pip install "
            "'tdcollect[evaluate]'",
            file=sys.stderr,
        )
        return 1
    from tdcollect.cli.commands import program

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return program.main(given, prog_name="tdcollect", standalone_mode=False) or 0
    except click.ClickException as error:  # what was typed cannot be understood
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("tdcollect: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if "--traceback" in given:
            raise
        print(f"tdcollect: {_line(error)}", file=sys.stderr)
        return 1


def _line(error: Exception) -> str:
    """The reason on one line."""
    said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    told = " ".join(said.split())
    ours = type(error).__module__.partition(".")[0] == "tdcollect"
    plain = (ValueError, TypeError, RuntimeError, KeyError, OSError, ImportError)
    if told and (ours or type(error) in plain or isinstance(error, (OSError, ImportError))):
        return told
    return f"{type(error).__name__}: {told}" if told else type(error).__name__
