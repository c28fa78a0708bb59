"""The command line: ``tdcollect``."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from tdcollect.text import visible

# As shells have it for SIGINT and SIGPIPE.
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what was typed behind ``tdcollect``; None for the process's own.

    Returns:
        The exit status: 0 where all went well; 1 where the command was refused or failed, with
        the reason on one line; 2 where it was not understood; 130 where it was interrupted, and
        141 where who reads its output went away.
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
    except (click.Abort, KeyboardInterrupt) as error:
        told = "; ".join(["interrupted", *map(str, error.args)])
        print(f"tdcollect: {told}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit:  # click's, where the reader of its help went away
        drop_output()
        return PIPE_CLOSED
    except Exception as error:
        if "--traceback" in given:
            raise
        print(f"tdcollect: {visible(_line(error))}", file=sys.stderr)
        return 1


def drop_output() -> None:
    """Have what stdout still holds go nowhere: its reader went away, and Python writes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _line(error: Exception) -> str:
    """The reason on one line; and its place, where it comes from code that is not ours."""
    if isinstance(error, OSError) and error.strerror:
        said = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    elif isinstance(error, KeyError) and error.args:
        said = str(error.args[0])
    else:
        said = str(error)
    told = " ".join(said.split())
    if not told:
        told = type(error).__name__
    elif not _is_ours(error):
        told = f"{type(error).__name__}: {told}"
    place = _place(error)
    return f"{told} ({place})" if place else told


def _is_ours(error: Exception) -> bool:
    """Tell whether the text is enough without its type, as it is in our own refusals."""
    if type(error).__module__.partition(".")[0] == "tdcollect":
        return True
    plain = (ValueError, TypeError, RuntimeError, KeyError)
    known = type(error) in plain or isinstance(error, (OSError, ImportError))
    return known and not any(map(_is_users, _files(error)))


_LIBRARIES = {
    *("click", "cloudpickle", "envpool", "gymnasium", "matplotlib", "numpy", "scipy"),
    *("stable_baselines3", "tensordict", "torch", "torchrl", "tqdm"),
}


def _place(error: BaseException | None) -> str | None:
    """File and line of the innermost frame of the user's code, of an error or of its causes."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if _is_users(frame.filename):
                file, here = Path(frame.filename), Path.cwd()
                shown = file.relative_to(here) if file.is_relative_to(here) else file
                return f"{shown}:{frame.lineno}"
        error = error.__cause__
    return None


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _is_users(file: str) -> bool:
    parts = Path(file).parts
    for installed in ("site-packages", "dist-packages"):
        if installed in parts:
            package = parts[parts.index(installed) + 1]
            return package.removesuffix(".py") not in {"tdcollect", *_LIBRARIES}
    roots = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"])
    return not file.startswith(("<", *(root + os.sep for root in roots)))
