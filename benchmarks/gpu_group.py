"""Groups of measurements, each in a process of its own with a time limit.

A group that crashes, hangs or leaves the GPU in an error loses its present measurement and those
after it, and no other group's. The process is a fork of one that has imported everything and has
not touched the GPU, or a fresh one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_setting import LeftOut, Plan, Row, Setting, first_line
from machine import device


class Group(NamedTuple):
    """Measurements that share a process.

    Attributes:
        plan: yields them.
        share: of the time, relative to the other groups.
    """

    plan: Callable[[Setting], Plan]
    share: float


def run_group(
    plan: Callable[[Setting], Plan],
    setting: Setting,
    seconds: float,
    log: Path,
    keep: Callable[[Row], None],
    start_method: str = "fork",
) -> None:
    """Take measurements until they are done or the time is over.

    Args:
        plan: yields them.
        setting: the setting of the run.
        seconds: the time limit.
        log: takes what the process prints.
        keep: called with the row of each. Its ``"name"`` is there; one that was left out or has
            failed has a ``"problem"``, and ``"failed"`` tells which.
        start_method: ``"fork"``, or ``"spawn"`` where forks cannot use the GPU.
    """
    end = time.monotonic() + seconds
    process, rows = _start(start_method, _measure_all, log, plan, setting)
    names = [name for name, _ in plan(setting)]
    done = 0
    try:
        while rows.poll(max(0, end - time.monotonic())):
            keep(rows.recv())
            done += 1
        problem, failed = f"out of time: the group had {seconds:.0f} s", False
    except EOFError:
        process.join()
        problem, failed = f"the process ended with status {process.exitcode}", True
    finally:
        process.kill()
        process.join()
    for name in names[done:]:
        keep({"name": name, "problem": problem, "failed": failed})


def find_device(log: Path) -> tuple[str, dict[str, Any] | None]:
    """The start method of processes that can use the GPU, and its facts; None without one."""
    for start_method in ("fork", "spawn"):
        process, answer = _start(start_method, _answer, log)
        with contextlib.suppress(EOFError):
            # Forks of a process that has asked for CUDA itself raise, or see no device.
            found = answer.recv()
            if found is not None:
                return start_method, found
        process.join()
    return "spawn", None


def _start(
    method: str, function: Callable[..., None], log: Path, *given: Any
) -> tuple[BaseProcess, Connection]:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_with_log, args=(function, log, theirs, *given))
    process.start()
    theirs.close()
    return process, ours


def _with_log(function: Callable[..., None], log: Path, *given: Any) -> None:
    """Send output to the log: packages print at will, and some from C."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    warnings.filterwarnings("ignore")
    function(*given)


def _answer(rows: Connection) -> None:
    rows.send(device())


def _measure_all(rows: Connection, plan: Callable[[Setting], Plan], setting: Setting) -> None:
    torch.set_num_threads(1)
    for name, measure in plan(setting):
        row: Row = {"name": name, "load_before": os.getloadavg()[0]}
        start = time.monotonic()
        try:
            row |= measure()
        except LeftOut as reason:
            row |= {"problem": str(reason), "failed": False}
        except Exception as error:
            traceback.print_exc()
            row |= {"problem": first_line(error), "failed": True}
        row |= {"load_after": os.getloadavg()[0], "seconds": round(time.monotonic() - start, 1)}
        rows.send(row)
