"""The command line: ``tdcollect``."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from tdcollect.display import visible
from tdcollect.packages import install_text, unmet

INTERRUPTED = 130  # as shells have it for SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after ``tdcollect``; None for those of the process.

    Returns:
        The exit status: 0 for success; 1 if the command was refused or failed, with the reason on
        one line; 2 if it was not understood; 3 if episodes were lost with their workers, or if a
        policy is worse than a comparison was to allow; 130 if it was interrupted; 141 if the
        reader of its output went away.
    """
    try:
        import click
    except ModuleNotFoundError:
        print(f"tdcollect: {install_text('click', 'the command line')}", file=sys.stderr)
        return 1
    from tdcollect import registry
    from tdcollect.cli.program import PIPE_CLOSED, drop_output, program

    registry.load(registry.COMMANDS)

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return program.main(words, prog_name="tdcollect", standalone_mode=False) or 0
    except click.ClickException as error:  # what was typed cannot be understood
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        message = "; ".join(["interrupted", *map(str, error.args)])
        print(f"tdcollect: {message}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit:  # of click, if the reader of its help went away
        drop_output()
        return PIPE_CLOSED
    except Exception as error:
        if "--traceback" in words:
            raise
        print(f"tdcollect: {visible(_line(error))}", file=sys.stderr)
        return 1


def _line(error: Exception) -> str:
    """Return the reason on one line, with its place if it comes from the user's code."""
    if isinstance(error, OSError) and error.strerror:
        said = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    elif isinstance(error, KeyError) and error.args:
        said = str(error.args[0])
    else:
        said = (isinstance(error, ImportError) and unmet()) or str(error)
    said = "; ".join([said, *getattr(error, "__notes__", ())])
    text = " ".join(said.replace(f"{os.getcwd()}{os.sep}", "").split())  # as it was typed
    if not text:
        text = type(error).__name__
    elif not _is_ours(error):
        text = f"{type(error).__name__}: {text}"
    place = _place(error)
    return f"{text} ({place})" if place else text


def _is_ours(error: Exception) -> bool:
    """Tell whether the text is clear without the error's type, as in our own refusals."""
    if type(error).__module__.partition(".")[0] == "tdcollect":
        return True
    plain = (ValueError, TypeError, RuntimeError, KeyError)
    known = type(error) in plain or isinstance(error, (OSError, ImportError))
    frames = traceback.extract_tb(error.__traceback__)
    return known and not any(_is_users(frame.filename) for frame in frames)


_LIBRARIES = {
    *("click", "cloudpickle", "envpool", "gymnasium", "numpy", "scipy"),
    *("stable_baselines3", "tensordict", "torch", "torchrl", "tqdm"),
}


def _place(error: BaseException | None) -> str | None:
    """Return file and line of the innermost user code, of an error or of its causes."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if _is_users(frame.filename):
                file, here = Path(frame.filename), Path.cwd()
                path = file.relative_to(here) if file.is_relative_to(here) else file
                return f"{path}:{frame.lineno}"
        error = error.__cause__
    return None


def _is_users(file: str) -> bool:
    parts = Path(file).parts
    for installed in ("site-packages", "dist-packages"):
        if installed in parts:
            package = parts[parts.index(installed) + 1]
            return package.removesuffix(".py") not in {"tdcollect", *_LIBRARIES}
    roots = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"])
    return not file.startswith(("<", *(root + os.sep for root in roots)))
