"""Env workers and processes: free of torch, and the same code in parent and worker."""

from __future__ import annotations

import gc
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import gymnasium as gym
import pytest

import tdcollect
from tdcollect import make_env, processes
from tdcollect.processes.child import Forked

from ..forkserver import run

ROOT = Path(tdcollect.__file__).absolute().parent.parent
MODULES = [
    "tdcollect.evaluation.workers.ray",
    *(f"tdcollect.envs.process.{name}" for name in ("worker", "values", "resumable")),
    *(f"tdcollect.processes.{module.name}" for module in pkgutil.iter_modules(processes.__path__)),
]

IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if found := {"torch", "tensordict", "torchrl"} & sys.modules.keys():
        print(name, found)
"""


def test_no_module_of_workers_and_processes_imports_torch() -> None:
    told = subprocess.run(
        [sys.executable, "-c", IMPORTS, *MODULES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == ""


def look(told: Path) -> gym.Env:
    found = sys.modules["tdcollect"].__file__
    told.write_text(f"{found} {sys.path[0]!r} {'torch' in sys.modules}")
    return gym.make("CartPole-v1")


def change_directory(to: Path, told: Path) -> None:
    sys.path[:0] = ["first", ""]
    os.chdir(to)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    make_env(look, 1, backend="process", env_kwargs={"told": told}).close()


def test_a_worker_runs_the_parents_package_wherever_a_relative_path_leads(tmp_path: Path) -> None:
    (tmp_path / "tdcollect").mkdir()
    (tmp_path / "tdcollect" / "__init__.py").write_text("raise ImportError('another package')")
    told = tmp_path / "told"
    done = run(change_directory, tmp_path, told)
    assert done.returncode == 0, done.stderr
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
