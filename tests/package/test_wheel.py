"""The wheel and the source archive: what they hold, and that the wheel runs alone.

``make package`` runs these tests on the files that it has built: TDCOLLECT_DIST names their folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="hatchling is not installed; the dev extra brings it")

ROOT = Path(__file__).parents[2]
END_TO_END = ("tests/test_promises.py", "tests/cli", "tests/lab/test_suite_cli.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    if "TDCOLLECT_DIST" in os.environ:
        return ROOT / os.environ["TDCOLLECT_DIST"]
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-d", out], ROOT)
    return out


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new venv that has the wheel."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("venv")
    python = fresh_python(folder)
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], folder)
    return python


def run(command: list[str | Path], folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    there = (path for path in (ROOT / "tdcollect").rglob("*") if path.is_file())
    files = {p.relative_to(ROOT).as_posix() for p in there if "__pycache__" not in p.parts}
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    expected = {*files, *(f"{info}/{name}" for name in names)}
    assert {*zipfile.ZipFile(wheel).namelist()} == expected


def test_the_source_archive_gives_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    tops = {path.name for path in unpacked.iterdir()}
    assert tops >= {"tdcollect", "tests", "examples", "docs", "Makefile", "README.md", "LICENSE"}
    assert not tops & {".git", ".venv", "runs"}

    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], unpacked)
    (again,) = tmp_path.glob("*.whl")
    (wheel,) = built.glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()


def test_the_wheel_runs_the_first_example_of_the_readme(python: Path, tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "example.py").write_text(f"{example[1]}\nprint(tdcollect.__file__)\n")
    *printed, evaluated, file = run([python, "example.py"], tmp_path).splitlines()
    assert len(printed) == 4
    assert all(re.fullmatch(r"\d+ episodes, mean return \d+\.\d", line) for line in printed)
    assert re.fullmatch(r"mean return \d+\.\d, digest [0-9a-f]{8}", evaluated)
    assert Path(file).is_relative_to(python.parents[1])

    script = python.parent / "tdcollect"
    assert run([script, "--version"], tmp_path).startswith("tdcollect, version ")


@pytest.mark.timeout(1200)
def test_the_wheel_passes_the_end_to_end_tests(python: Path, tmp_path: Path) -> None:
    """From a folder that has no package beside the tests."""
    for name in ("tests", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run([python, "-m", "pytest", "-q", *END_TO_END], tmp_path)


@pytest.mark.timeout(1200)
def test_the_file_of_a_user_passes_mypy_in_strict_mode(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n[mypy-torchrl.*,tensordict.*]\nignore_missing_imports = True\n"
    )
    shutil.copy(ROOT / "tests" / "package" / "user.py", tmp_path)
    run([sys.executable, "-m", "mypy", "--python-executable", python, "user.py"], tmp_path)


def fresh_python(folder: Path) -> Path:
    """The interpreter of a new venv that finds the installed dependencies, but no checkout."""
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    # A folder that a .pth file names: the .pth files in it, of editable installs, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"
