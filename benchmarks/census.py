"""A census of env packages: docs/census.md and docs/census.csv.

    python benchmarks/census.py                        # all packages of census.toml, and the page
    python benchmarks/census.py minigrid ale-py        # some packages again
    python benchmarks/census.py --page                 # the page, of what runs/census holds

Each package gets an environment of its own on top of this one, which is removed afterwards, and
a file runs/census/PACKAGE.json; packages that have one are done. It runs code of all of them, so
run it where that may be.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import census_probe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "runs" / "census"
PROBE = HERE / "census_probe.py"
BESIDE = ("gymnasium", "mujoco", "numpy", "torch", "torchrl", "tensordict")
KEPT = census_probe.KEPT
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["census_probe", "torchrl.envs", "tdcollect.testing.doctor"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="by default all that have no result yet")
    parser.add_argument("--jobs", type=int, default=1, help="packages at a time")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    config = tomllib.loads((HERE / "census.toml").read_text())
    wanted = arguments.packages or [
        name for name in config["packages"] if not (RESULTS / f"{name}.json").exists()
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not arguments.page:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            [*pool.map(partial(one_package, config), wanted)]


def one_package(config: dict[str, Any], name: str) -> None:
    """Write the result of a package."""
    limits, about = config["limits"], config["packages"].get(name.partition("==")[0], {})
    found: dict[str, Any] = {
        "package": name.partition("==")[0],
        "date": datetime.date.today().isoformat(),
        "beside": {"python": platform.python_version()} | {one: version(one) for one in BESIDE},
    }
    with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as folder:
        try:
            examine(Path(folder), name, about, limits, found)
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {error}"
    file = RESULTS / f"{found['package']}.json"
    file.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".part").rename(file)
    envs = [one for one in found.get("envs", {}).values() if one.get("makes") == "yes"]
    print(f"{name} {found.get('version')}: {found['install'][:100]}; {len(envs)} envs", flush=True)


def examine(
    folder: Path, name: str, about: dict[str, Any], limits: dict[str, Any], found: dict[str, Any]
) -> None:
    python = environment(folder)
    found["install"] = "could not be looked up"
    seen = run(
        folder,
        limits["install"],
        [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
        + ["--report", "-", name],
    )
    if seen.returncode:
        found["install"] = reason(seen)
        return
    report = json.loads(seen.stdout[seen.stdout.index("{") :])
    found["version"] = report["install"][0]["metadata"]["version"]
    beside = folder / "constraints.txt"
    beside.write_text("".join(f"{one}=={version(one).partition('+')[0]}\n" for one in BESIDE))
    exact = f"{found['package']}=={found['version']}"
    seen = run(
        folder,
        limits["install"],
        [python, "-m", "pip", "install", "--no-cache-dir", "--progress-bar=off", "-c", str(beside)]
        + [exact, *about.get("with", [])],
    )
    found["install"] = reason(seen) if seen.returncode else "yes"
    if seen.returncode:
        return
    job: dict[str, Any] = {"package": found["package"], "env": limits["env"], **about}
    first = probed(folder, limits["plain"], python, "plain", job, "0")
    envs = found["envs"] = {one.pop("env"): one for one in first}
    made = [one for one in envs if envs[one].get("makes") == "yes"]
    if not made:
        return
    again = probed(folder, limits["plain"], python, "plain", {**job, "envs": made}, "1")
    for one in again:
        envs[one["env"]]["same_in_new_process"] = one.get("digests") == envs[one["env"]].get(
            "digests"
        )
    job |= {"envs": made, "workers": False}
    for one in beside_tdcollect(folder, limits["probe"], python, job):
        envs[one.pop("env")] |= one


def environment(folder: Path) -> str:
    """An environment that takes what it lacks from this one; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    (folder / "home").mkdir()
    return str(folder / "venv" / "bin" / "python")


def probed(
    folder: Path, seconds: float, python: str, what: str, job: dict[str, Any], hash_seed: str
) -> list[dict[str, Any]]:
    """The last line of each env that the probe prints."""
    seen = run(folder, seconds, [python, str(PROBE), what, json.dumps(job)], hash_seed)
    tail = " ".join((seen.stderr or seen.stdout).strip().splitlines()[-1:])[-300:]
    nothing = [{"env": None, "why": tail or f"no end in {seconds} s"}] if what == "plain" else []
    return last_lines(seen.stdout) or nothing


def beside_tdcollect(
    folder: Path, seconds: float, python: str, job: dict[str, Any]
) -> list[dict[str, Any]]:
    """The same of `probe`, forked from a process that has imported torch, as that takes seconds.

    A package that brought other versions of what is imported gets a process of its own.
    """
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    own = {path.name.partition(".")[0] for path in packages.iterdir()}
    if own & census_probe.imported():
        return probed(folder, seconds, python, "probe", job, "0")
    process = FORKED.Process(target=census_probe.forked, args=(packages, folder, around(folder), job))
    process.start()
    process.join(seconds)
    end_group(process.pid)
    return last_lines((folder / "said").read_text(errors="replace"))


def last_lines(said: str) -> list[dict[str, Any]]:
    lines = [line.partition(KEPT)[2] for line in said.splitlines() if KEPT in line]
    return [*{one["env"]: one for one in map(json.loads, lines)}.values()]


def end_group(leader: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run(
    folder: Path, seconds: float, command: list[str], hash_seed: str = "0"
) -> subprocess.CompletedProcess[str]:
    """Run a command for some seconds at most, in a folder of its own; then end all it started."""
    process = subprocess.Popen(
        command,
        cwd=folder / "home",
        env=os.environ | around(folder) | {"PYTHONHASHSEED": hash_seed},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        end_group(process.pid)
        out, err = process.communicate()
        err, code = err + f"\nERROR: no end in {seconds} s", 124
    finally:
        end_group(process.pid)
    return subprocess.CompletedProcess(command, code, out, err)


def around(folder: Path) -> dict[str, str]:
    """The environment variables of all that runs for a package."""
    return {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "MUJOCO_GL": "egl",
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
        "OMP_NUM_THREADS": "1",
    }


def reason(seen: subprocess.CompletedProcess[str]) -> str:
    """Why pip did not install it."""
    lines = [line.strip() for line in (seen.stdout + seen.stderr).splitlines() if line.strip()]
    if "The conflict is caused by:" in lines:
        at = lines.index("The conflict is caused by:")
        return "pins: " + "; ".join(lines[at + 1 : at + 3])[:300]
    errors = [line for line in lines if "rror" in line and "subprocess-exited" not in line]
    return (errors or lines or ["no word"])[-1][:300]


if __name__ == "__main__":
    main()
