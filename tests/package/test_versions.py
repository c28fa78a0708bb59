"""The versions of others: what is too old or newer than tested; and every file names the same."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torchrl.collectors import Collector as TorchRLCollector

from tdcollect import Collector, make_env, packages
from tdcollect._upstream import names
from tdcollect.collect import arrays, policy

from ..collect.policies import lean

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed versions, as the metadata give them; a test changes them."""
    faked = {"torch": "2.13.0", "torchrl": "0.14.1", "tensordict": "0.14.3"}

    def version(name: str) -> str:
        if name not in faked:
            raise metadata.PackageNotFoundError(name)
        return faked[name]

    monkeypatch.setattr(metadata, "version", version)
    return faked


NEWER = ["0.15.0", "0.15", "0.15.0rc1", "0.15.0.dev2026", "0.16.1", "1.0"]


def test_versions_are_tested_newer_or_too_old(installed: dict[str, str]) -> None:
    for version in ("0.14.1", "0.14.1+cpu", "0.14.2.dev3+g12ab", "0.14.10"):
        installed["torchrl"] = version
        assert packages.unmet() == packages.untested() == ""
    for version in NEWER:
        installed["torchrl"] = version
        assert packages.unmet() == ""
        assert packages.untested() == f"torchrl {version}"
    for version in ("0.13.3", "0.14.0", "0.2", "x", None):
        installed["torchrl"] = version or "x"
        if version is None:
            del installed["torchrl"]
        assert f"expected torchrl from 0.14.1 on, got {version or 'none'}; do:" in packages.unmet()
    installed["torchrl-nightly"] = "2026.10.27"
    assert (packages.unmet(), packages.untested()) == ("", "torchrl 2026.10.27")


def test_an_import_never_refuses_and_what_needs_torchrl_says_what_to_do() -> None:
    code = """
import sys
from importlib import metadata
versions = metadata.version
metadata.version = lambda name: "0.13.1" if name == "torchrl" else versions(name)
import tdcollect.evaluation
tdcollect.env_seed(0, 0)
sys.modules["torchrl.collectors"] = None
try:
    tdcollect.Collector
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "tdcollect.collect.Collector: expected torchrl from 0.14.1 on, got 0.13.1; do: pip install "
    )


def test_where_a_newer_torchrl_lacks_names_its_own_loop_collects(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["torchrl"] = "0.15.0"
    monkeypatch.setitem(names.NAMES, "torchrl.collectors:Collector", "_iter _gone")
    monkeypatch.setattr(names, "missing", functools.cache(names.missing.__wrapped__))
    for module in (arrays, policy):
        monkeypatch.setattr(module, "missing", names.missing)
    gone = "torchrl.collectors:Collector._gone is gone from torchrl 0.15.0"
    with pytest.warns(UserWarning, match=r"torchrl 0.15.0 is newer than what was tested, torchrl"):
        names.warn_if_untested()
    torch.manual_seed(0)
    ours = Collector(lambda: make_env("CartPole-v1", 2), lean, frames_per_batch=64, total_frames=64)
    assert [part.how for part in ours.explain() if gone in part.how]
    (batch,) = ours
    assert batch.shape == (2, 32)


def test_rows_on_arrays_are_counted_as_torchrl_0_15_counts_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    count = lambda collector, rows: counted.append(rows)  # noqa: E731
    monkeypatch.setattr(TorchRLCollector, "_record_stepped_frames", count, raising=False)
    env = make_env("CartPole-v1", 2)
    collector = Collector(env, None, frames_per_batch=8, total_frames=16)
    assert len([*collector]) == 2
    assert counted == [8, 8]


@pytest.mark.parametrize(("components", "loaded"), [(["counters"], [7]), (["random"], [])])
def test_the_counts_of_torchrl_0_15_are_saved_and_loaded_with_the_counters(
    components: list[str], loaded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    parents = TorchRLCollector.state_dict
    saves = lambda collector: {**parents(collector), "collector_progress": 7}  # noqa: E731
    loads = lambda collector, count: counts.append(count)  # noqa: E731
    monkeypatch.setattr(TorchRLCollector, "state_dict", saves)
    monkeypatch.setattr(TorchRLCollector, "_load_progress_state_dict", loads, raising=False)
    collector = Collector(make_env("CartPole-v1", 2), None, frames_per_batch=8, total_frames=16)
    state = collector.state_dict(components)
    assert ("collector_progress" in state) == bool(loaded)
    collector.load_state_dict(state, components=components)
    assert counts == loaded


def test_a_name_that_is_gone_does_not_stop_an_import() -> None:
    code = """
from torchrl.envs import batched_envs
del batched_envs._recursively_strip_locks_from_state_dict
import tdcollect
env = tdcollect.make_env("CartPole-v1", 2)
collector = tdcollect.Collector(env, None, frames_per_batch=8, total_frames=8)
print(collector.explain())
print(len(list(collector)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "_recursively_strip_locks_from_state_dict is gone from " in done.stdout
    assert done.stdout.endswith("\n1\n")


def test_the_version_of_a_checkout_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_installed", lambda name: None)
    assert packages.own_version() == metadata.version("tdcollect")
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "tdcollect" / "packages.py"))
    assert packages.own_version() == "unknown"


def test_all_is_imported_where_forks_and_locks_are_missing(tmp_path: Path) -> None:
    """As on Windows; what needs them says so when it is used."""
    code = """
import importlib, multiprocessing.forkserver, os, pkgutil, select, signal, sys
import torchrl.collectors.distributed, torchrl.envs.libs.gym, torchrl.modules
for module, names in {
    os: "fork pidfd_open memfd_create register_at_fork sched_getaffinity O_ASYNC",
    signal: "SIGUSR1 SIGUSR2 SIGCHLD SIGHUP SIGALRM SIGIO pthread_sigmask",
    select: "poll POLLIN epoll",
}.items():
    for name in names.split():
        delattr(module, name)
sys.modules["fcntl"] = None
import tdcollect
for module in pkgutil.walk_packages(tdcollect.__path__, "tdcollect."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
env = tdcollect.make_env("CartPole-v1", 2)
print(len(list(tdcollect.Collector(env, None, frames_per_batch=8, total_frames=16))))
for refused in (
    lambda: tdcollect.evaluate("CartPole-v1", None, 2, workers=2),
    lambda: tdcollect.evaluate("CartPole-v1", None, 2, output_dir="runs"),
    lambda: tdcollect.make_env("CartPole-v1", 2, backend="process"),
):
    try:
        refused()
    except NotImplementedError as error:
        print(error)
"""
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    batches, *refused = done.stdout.splitlines()
    assert batches == "2"
    assert [
        re.split(" needs? a POSIX system such as Linux, got ", line)[0] for line in refused
    ] == [
        "worker processes",
        "an output_dir, which one process writes to at a time,",
        "worker processes",
    ]


def ranges(lines: list[str]) -> dict[str, str]:
    """The ranges of versions of requirements, by name."""
    return {re.split(r"[<>=\[]", line)[0]: line for line in lines}


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    named = ranges(PROJECT["dependencies"])
    for name, (oldest, _) in packages.KNOWN.items():
        assert named[name] == f"{name}>={oldest}"


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
    first, last = 11, 13
    assert PROJECT["requires-python"] == f">=3.{first}"  # newer ones are not refused
    pythons = [f"3.{minor}" for minor in range(first, last + 1)]
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
