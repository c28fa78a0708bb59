"""The fast path can be deleted: everything still works, slower, and to the bit as before."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tdcollect

from . import digests

PACKAGE = Path(tdcollect.__file__).parent
FAST = PACKAGE / "collect" / "fast"
TESTS = Path(__file__).parent
FORK = PACKAGE / "collect" / "path.py"


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere but under ``if TYPE_CHECKING``."""

    names: set[str] = set()

    class Imports(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if getattr(node.test, "id", None) != "TYPE_CHECKING":
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            names.update(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)

    Imports().visit(ast.parse(path.read_text()))
    return names


def test_one_module_imports_from_the_fast_path() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if FAST not in path.parents]
    importing = [
        path
        for path in others
        if any(name.startswith("tdcollect.collect.fast") for name in imported(path))
    ]
    assert importing == [FORK]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, without its fast path."""
    folder = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns("fast", "__pycache__")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=ignored)
    return folder


def run(folder: Path, *program: str) -> str:
    """The output of a Python program that finds the package in a folder."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


def test_frames_episodes_and_evaluations_are_the_same(without: Path) -> None:
    program = "import runpy, sys, tdcollect.collect.path as p; assert not p.HAS_FAST_PATH; "
    program += "runpy.run_path(sys.argv[1], run_name='__main__')"
    found = json.loads(run(without, "-c", program, str(TESTS / "digests.py")))
    assert found == digests.main()


def oracle(folder: Path, chosen: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-c", str(TESTS.parents[1] / "pyproject.toml")]
    run(folder, "-m", "pytest", *options, str(TESTS / "test_oracle.py"), "-k", chosen)


def test_batches_are_the_parents(without: Path) -> None:
    oracle(without, "arrays and (two_layers or round or norm)")


@pytest.mark.slow
def test_batches_are_the_parents_in_all_tests_of_the_oracle(without: Path) -> None:
    oracle(without, "arrays")
