"""Processes forked from a server that has imported what tests need: a fresh one takes seconds.

Each test worker has one server, which starts with its first process and has one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver as _server
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

from tdcollect.processes import child

_IMPORTED = [
    "pytest",
    "gymnasium.vector",
    "pandas",
    "scipy.stats",
    "torch.optim",
    "torchrl.checkpoint",
    "torchrl.objectives",
    "tdcollect.collect",
    "tdcollect.collectors.multi",
    "tdcollect.evaluation.background",
    "tdcollect.pages.evaluation",
]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


Ended = CompletedProcess[str]


def forkserver() -> ForkServerContext:
    """Return the context of this process's server, which runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    # It imports what this process would, wherever that has changed its directory to.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with mock.patch.dict(os.environ, {**_ONE_THREAD, "PYTHONPATH": path}):
        _server.ensure_running()
    return context


@contextmanager
def starting(method: str) -> Iterator[None]:
    """Have multiprocessing start processes by this method."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a process that runs a function; it inherits descriptors given as ``DupFd``.

    Warnings are errors there that are here.
    """
    errors = [one for one in warnings.filters if one[0] == "error"]
    process = forkserver().Process(target=_run, args=(errors, function, *arguments))
    process.start()
    return process


def _run(errors: list[Any], function: Callable[..., Any], *arguments: Any) -> None:
    for action, _, category, module, line in reversed(errors):
        warnings.filterwarnings(action, "", category, module.pattern if module else "", line)
    function(*arguments)


def quick_begin(spawned: Any, lifeline: int, descriptors: Sequence[int]) -> None:
    """Start a process that has imported torch already, in place of a fresh interpreter."""
    files = map(DupFd, (lifeline, *descriptors))
    spawned._process = start(_main, spawned._function, spawned._init_fn, *files)
    spawned.pid = spawned._process.pid


def quick_reap(spawned: Any, waits: bool) -> bool:
    spawned._process.join(None if waits else 0)
    spawned.code = spawned._process.exitcode
    return spawned.code is not None


def _main(function: str, init_fn: bytes, *files: Any) -> None:
    lifeline, *descriptors = (file.detach() for file in files)
    init = child.shared_file(len(init_fn))
    os.pwrite(init, init_fn, 0)
    child.main(function, *map(str, (lifeline, init, *descriptors)))


def run(
    function: Callable[..., Any], *arguments: Any, cwd: Path | None = None, seconds: float = 240
) -> Ended:
    """Run a function in a process; return its exit code and its output."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(_redirected, folder, cwd, function, arguments)
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        texts = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    assert process.exitcode is not None
    return Ended(function, process.exitcode, *texts)


def run_script(path: Path, *arguments: Any, cwd: Path | None = None, seconds: float = 240) -> Ended:
    """Run a Python program, as ``python path arguments`` does."""
    return run(_script, str(path), [str(a) for a in arguments], cwd=cwd, seconds=seconds)


def _script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_anew(program: str) -> Ended:
    """Run a program that finds nothing of tdcollect imported yet, as in a fresh interpreter."""
    return run(_anew, program)


def _anew(program: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tdcollect"]:
        del sys.modules[name]
    exec(program, {})


def _redirected(
    folder: str, cwd: Path | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)
    if cwd is not None:
        os.chdir(cwd)
    function(*arguments)
