"""The scripts of docs/upstream/ still show the faults that they report."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "upstream"
REPORTS = sorted(path.stem for path in DOCS.glob("*.py"))
SEEN = {
    "torchrl": (0, 14, 1),
    "gymnasium": (1, 4, 0),
    "envpool": (1, 2, 5),
    "ale-py": (0, 12, 1),
    "vmas": (1, 5, 2),
}
PROCESSES = ("async-reset-mask", "distributed-sync-collector", "gymenv-num-envs")
CANNOT = 77  # no GPU, or no such method


def status_of(name: str) -> int:
    path = DOCS / f"{name}.py"
    if name.endswith(PROCESSES):
        return subprocess.run([sys.executable, path], timeout=200).returncode
    return runpy.run_path(str(path))["main"]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * n.endswith(PROCESSES)) for n in REPORTS],
)
def test_the_fault_is_still_there(name: str) -> None:
    for module in re.findall(
        r"\b(?:envpool|Box2D|minari|ale_py|vmas)\b", (DOCS / f"{name}.md").read_text()
    ):
        pytest.importorskip(module)
    package = next(package for package in SEEN if name.startswith(package))
    if tuple(map(int, re.findall(r"\d+", version(package))[:3])) < SEEN[package]:
        pytest.skip(f"was seen on {package} {SEEN[package]}")
    if (status := status_of(name)) == CANNOT:
        pytest.skip("needs a GPU, or a method that this version has not")
    assert status == 1, f"mended upstream: drop docs/upstream/{name}.* and the workaround it names"


def test_each_report_holds_its_script_and_is_listed() -> None:
    listed = re.findall(r"^- \[.*?\]\((.*?)\.md\)", (DOCS / "index.md").read_text(), re.M)
    assert sorted(listed) == REPORTS
    for name in REPORTS:
        script, report = ((DOCS / f"{name}{end}").read_text() for end in (".py", ".md"))
        assert f"```py\n{script}```\n" in report, name
