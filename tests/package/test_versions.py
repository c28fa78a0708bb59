"""The supported versions: other ones are refused, and every file names the same."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tdcollect import packages

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed versions, as the metadata give them; a test changes them."""
    faked = {"torchrl": "0.14.1", "tensordict": "0.14.3"}

    def version(name: str) -> str:
        if name not in faked:
            raise metadata.PackageNotFoundError(name)
        return faked[name]

    monkeypatch.setattr(metadata, "version", version)
    return faked


def test_torchrl_in_the_range_is_accepted(installed: dict[str, str]) -> None:
    for version in ("0.14.1", "0.14.1+cpu", "0.14.2.dev3+g12ab", "0.14.10"):
        installed["torchrl"] = version
        packages.check_versions()


OTHERS = ["0.13.3", "0.14.0", "0.15.0", "0.15", "0.15.0rc1", "0.15.0.dev2026", "0.2", "1.0", "x"]


@pytest.mark.parametrize(
    ("name", "wanted", "version"),
    [
        *(("torchrl", "torchrl>=0.14.1,<0.15", version) for version in (*OTHERS, None)),
        *(("tensordict", "tensordict>=0.14.3,<0.15", version) for version in ("0.14.2", "0.15.0")),
    ],
)
def test_another_version_is_refused(
    installed: dict[str, str], name: str, wanted: str, version: str | None
) -> None:
    del installed[name]
    if version is not None:
        installed[name] = version
    said = f"expected {wanted}, got {version or 'none'}; do: pip install '{wanted}'"
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$") as caught:
        packages.check_versions()
    assert caught.value.name == name


def test_the_version_of_a_checkout_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_installed", lambda name: None)
    assert packages.own_version() == metadata.version("tdcollect")
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "tdcollect" / "packages.py"))
    assert packages.own_version() == "unknown"


def test_an_import_refuses_before_it_loads_torch() -> None:
    code = """
import sys
from importlib import metadata
metadata.version = lambda name: "0.13.1"
try:
    import tdcollect.envs
except ImportError as error:
    print(error)
assert not {"torch", "torchrl", "tensordict"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("expected torchrl>=0.14.1,<0.15, got 0.13.1; ")


def ranges(lines: list[str]) -> dict[str, str]:
    """The ranges of versions of requirements, by name."""
    return {re.split(r"[<>=\[]", line)[0]: line for line in lines}


def test_the_refused_ranges_are_those_of_pyproject() -> None:
    named = ranges(PROJECT["dependencies"])
    for name, (oldest, end) in packages.SUPPORTED.items():
        assert named[name] == f"{name}>={oldest},<{end}"


def test_the_oldest_constraints_are_the_lower_bounds_of_pyproject() -> None:
    extras = PROJECT["optional-dependencies"]
    tested = [line for name, lines in extras.items() if name != "bench" for line in lines]
    bounds = [line for line in [*PROJECT["dependencies"], *tested] if ">=" in line]
    expected = {name: oldest(line) for name, line in ranges(bounds).items()}

    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line[:1] != "#"]
    assert {name: shortened(pin) for name, pin in pins} == expected


def oldest(requirement: str) -> str:
    return shortened(requirement.split(">=")[1].split(",")[0])


def shortened(version: str) -> str:
    """The version without the zeros at its end: "2.0.0" and "2.0" are the same."""
    return re.sub(r"(\.0)+$", "", version)


def test_every_file_names_the_same_pythons() -> None:
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    pythons = [f"3.{minor}" for minor in range(int(first), int(end))]
    classifier = "Programming Language :: Python :: "
    assert [f"{classifier}{python}" for python in pythons] == [
        line for line in PROJECT["classifiers"] if line.startswith(f"{classifier}3.")
    ]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py3{first}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == pythons[0]
    makefile = (ROOT / "Makefile").read_text()
    assert f"\nOLDEST_PYTHON ?= python{pythons[0]}\n" in makefile
    assert f"\nNEWEST_PYTHON ?= python{pythons[-1]}\n" in makefile
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / page).read_text()
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert set(re.findall(r"\b3\.\d+", workflow)) == {*pythons}
