"""Progress of a run: a bar in terminals and notebooks, occasional lines in logs."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

SECONDS_BETWEEN_LINES = 30.0  # a shorter run writes none


def progress_bar(total: int, unit: str) -> Any:
    """Show the progress of a run on stderr, with tqdm's bar or :class:`Lines`.

    A bar is drawn in a terminal or a notebook (a widget, or text without ipywidgets) if tqdm is
    installed, and gone at the end. Anything else, such as a log, gets lines.
    """
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    in_notebook = get_shell and "IPKernelApp" in getattr(get_shell(), "config", ())
    if in_notebook or (sys.stderr is not None and sys.stderr.isatty()):
        try:
            return _tqdm()(total=total, unit=f" {unit}", leave=False)
        except ModuleNotFoundError as error:
            if error.name not in ("tqdm", "tqdm.auto"):
                raise
    return Lines(total, unit)


def line_above(bar: Any, text: str) -> None:
    """Print a line to stderr, above the bar if there is one."""
    bar.write(f"tdcollect: {text}", file=sys.stderr)


class Lines(AbstractContextManager["Lines"]):
    """A line every 30 seconds, for logs; used as tqdm's bar is. ``n`` is the count."""

    def __init__(self, total: int, unit: str):
        self.n = 0
        self._total = total
        self._unit = unit
        self._began = self._told = time.monotonic()
        self._postfix: Mapping[str, str] = {}

    def __exit__(self, *exception: Any) -> None:
        """Nothing stays open."""

    def set_postfix(self, postfix: Mapping[str, str], refresh: bool = True) -> None:
        """Set the values that further lines show beside the count."""
        self._postfix = postfix

    def update(self, more: int = 1) -> None:
        """Add ``more`` to the count."""
        self.n += more
        now = time.monotonic()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            line_above(self, self._line(now - self._began))

    def write(self, text: str, file: Any) -> None:
        """Print a line, unless there is nowhere to print it."""
        if file is not None:
            print(text, file=file, flush=True)

    def _line(self, passed: float) -> str:
        parts = [f"{self.n} of {self._total} {self._unit}", seconds_text(passed)]
        if self.n:
            left = passed / self.n * max(0, self._total - self.n)
            parts.append(f"about {seconds_text(round(left))} left")
        return ", ".join([*parts, *(f"{name} {text}" for name, text in self._postfix.items())])


def seconds_text(seconds: float) -> str:
    """A duration as text: seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _tqdm() -> Any:
    with warnings.catch_warnings():  # in a notebook without ipywidgets, where text will do
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    return tqdm


_OURS = ("tdcollect.", "torch.", "contextlib")  # torch's, and contextlib's, lie in between


def warn(line: str, /) -> None:
    """Say in a warning what no progress shows; it points to the user's call, and not to ours."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
