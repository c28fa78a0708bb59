"""Env workers and processes: free of torch, and the same code in parent and worker."""

from __future__ import annotations

import gc
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tdcollect
from tdcollect import processes
from tdcollect.processes.child import Forked

ROOT = Path(tdcollect.__file__).absolute().parent.parent
MODULES = [
    *(f"tdcollect.envs.process.{name}" for name in ("worker", "pool", "values", "resumable")),
    *(f"tdcollect.processes.{module.name}" for module in pkgutil.iter_modules(processes.__path__)),
]

IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if found := {"torch", "tensordict", "torchrl"} & sys.modules.keys():
        print(name, found)
"""

CHANGED_DIRECTORY = """
import os, pathlib, sys
import gymnasium
from tdcollect import make_env

def make(told):
    found = sys.modules["tdcollect"].__file__
    pathlib.Path(told).write_text(f"{found} {sys.path[0]!r} {'torch' in sys.modules}")
    return gymnasium.make("CartPole-v1")

print("once")
sys.path.insert(0, "first")
os.chdir(sys.argv[1])
make_env(make, 1, backend="process", env_kwargs={"told": sys.argv[2]}).close()
"""


def run(program: str, *arguments: str, path: str = str(ROOT), cwd: Path | None = None) -> str:
    """The output of a fresh interpreter that reads a program from stdin."""
    return subprocess.run(
        [sys.executable, "-", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        input=program,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_no_module_of_workers_and_processes_imports_torch() -> None:
    assert run(IMPORTS, *MODULES) == ""


def test_a_worker_runs_the_parents_package_wherever_a_relative_path_leads(tmp_path: Path) -> None:
    (tmp_path / "tdcollect").mkdir()
    (tmp_path / "tdcollect" / "__init__.py").write_text("raise ImportError('another package')")
    told = tmp_path / "told"
    assert run(CHANGED_DIRECTORY, str(tmp_path), str(told), path="", cwd=ROOT) == "once"
    assert told.read_text() == f"{ROOT / 'tdcollect' / '__init__.py'} 'first' False"


class Cycle:
    """Waits for the garbage collector, and tells of it."""

    def __init__(self, descriptor: int):
        self.itself, self.descriptor = self, descriptor

    def __del__(self) -> None:
        os.write(self.descriptor, b"collected")


def test_a_fork_collects_no_garbage_of_its_parent() -> None:
    """Objects that it would remove may belong to threads of the parent, which the fork lacks."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    gc.disable()
    try:
        Cycle(writes)
        assert Forked(lambda end: None).end(60) == "ended with exit code 0"
        with pytest.raises(BlockingIOError):
            os.read(reads, 1)
        assert Forked(lambda end: Cycle(writes)).end(60) == "ended with exit code 0"
        assert os.read(reads, 100) == b"collected"
    finally:
        gc.enable()
        gc.collect()
        os.close(reads)
        os.close(writes)
