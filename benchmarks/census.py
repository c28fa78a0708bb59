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
import csv
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
PAGE = ROOT / "docs" / "census.md"
BEGIN, END = "<!-- written by benchmarks/census.py -->\n", "<!-- end -->\n"
COLUMNS = [
    "package",
    "version",
    "date",
    "installs",
    "alone",
    "env",
    "makes",
    "seeds",
    "used_env",
    "construction",
    "first_observations",
    "of_seeds",
    "limit",
    "make_env",
    "gymenv",
    "digest",
    "doctor",
    "doctor_failed",
    "doctor_warned",
    "evidence",
]
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
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    rows = [row for result in results for row in rows_of(result)]
    with PAGE.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + page(results, rows) + END + rest.partition(END)[2])


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
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--no-compile",
        "--progress-bar=off",
    ]
    wanted = [exact, *about.get("with", [])]
    seen = run(folder, limits["install"], [*install, "-c", str(beside), *wanted])
    found["install"] = reason(seen) if seen.returncode else "yes"
    if found["install"].startswith("pins"):  # then the versions that it asks for, and no TorchRL
        beside.write_text(f"torch=={version('torch').partition('+')[0]}\n")
        seen = run(folder, limits["install"], [*install, "-c", str(beside), *wanted])
        found["alone"] = reason(seen) if seen.returncode else own_versions(folder)
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
    if "alone" in found:
        return
    job["envs"] = made
    for one in beside_tdcollect(folder, limits["probe"], python, job):
        envs[one.pop("env")] |= one


def own_versions(folder: Path) -> str:
    """The versions that were installed in place of those here."""
    paths = (folder / "venv").glob("lib/python*/site-packages/*.dist-info")
    found = [path.name.removesuffix(".dist-info").split("-")[:2] for path in paths]
    return ", ".join(f"{name} {value}" for name, value in sorted(found) if name in BESIDE)


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
    process = FORKED.Process(
        target=census_probe.forked, args=(packages, folder, around(folder), job)
    )
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
        "PYGLET_HEADLESS": "1",
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
    errors = [line for line in lines if "rror" in line and not line.startswith(("note:", "╰"))]
    errors = [line for line in errors if "subprocess-exited" not in line]
    return (errors or lines or ["no word"])[-1][:300]


# ---- the page


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the CSV per env that was tried; one for a package without."""
    about = {
        "package": result["package"],
        "version": result.get("version", ""),
        "date": result["date"],
        "installs": result.get("raised") or result["install"],
        "alone": result.get("alone", ""),
    }
    rows = [about | row_of(name, env) for name, env in result.get("envs", {}).items()]
    return rows or [about]


def row_of(name: str, env: dict[str, Any]) -> dict[str, Any]:
    doctor = env.get("doctor")
    findings = doctor["findings"] if isinstance(doctor, dict) else []
    told = {
        status: [f for f in findings if f["status"] == status] for status in ("failed", "warned")
    }
    evidence = [f"{f['name']}: {f['evidence']}" for each in told.values() for f in each]
    return {
        "env": "" if name == "null" else name.removeprefix("census_envs.py:"),
        "makes": env.get("makes") or env.get("why") or env.get("raised", "no end in time"),
        "seeds": seeds(env),
        "used_env": {True: "same", False: "differs"}.get(env.get("same_when_used"), ""),
        "construction": " ".join(env.get("construction_draws", [])),
        "first_observations": env.get("first_observations", ""),
        "of_seeds": env.get("of_seeds", ""),
        "limit": limit(env),
        "make_env": compared(env.get("rows_make_env", "")),
        "gymenv": compared(env.get("rows_gymenv", "")),
        "digest": digest if isinstance(digest := env.get("digests", ""), str) else "",
        "doctor": ("passed" if doctor["passed"] else "failed") if findings else "",
        "doctor_failed": " ".join(f["name"] for f in told["failed"]),
        "doctor_warned": " ".join(f["name"] for f in told["warned"]),
        "evidence": " | ".join([env["raised"], *evidence] if "raised" in env else evidence),
    }


def compared(rows: str) -> str:
    """Text of what rows showed; empty where the entries of an observation were not matched."""
    return "" if "no entry" in rows else rows


def seeds(env: dict[str, Any]) -> str:
    """Tell if seed and actions decide the episode."""
    if "same_twice" not in env:
        return ""
    if not env["same_twice"]:
        return "no"
    doctor = env.get("doctor")
    told = {f["name"]: f["status"] for f in doctor["findings"]} if isinstance(doctor, dict) else {}
    if not env.get("same_after", told.get("seed") != "failed"):
        return "first episode alone"
    if "same_in_new_process" not in env:
        return "in one process"
    return "yes" if env["same_in_new_process"] else "not in a new process"


def limit(env: dict[str, Any]) -> str:
    """The end of an episode by its time limit, as far as random actions reach it."""
    ended = [(steps, how) for steps, how in env.get("ends", []) if how != "goes on"]
    if found := [steps for steps, how in ended if how == "truncated"]:
        return f"truncates at {max(found)}"
    if found := [steps for steps, how in ended if how == "terminatedtruncated"]:
        return f"both flags at {max(found)}"
    if env.get("limit"):
        return f"truncates at {env['limit']} (gymnasium's)"
    if len(ended) > 2 and len(set(ended)) == 1 and ended[0][0] > 5:
        return f"terminates at {ended[0][0]}"
    return "none seen" if "ends" in env else ""


def page(results: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The sums, the table by package, and what was not as it should be."""
    made = [row for row in rows if row.get("makes") == "yes"]
    packages = {row["package"] for row in made}
    installed = [one for one in results if one["install"] == "yes"]
    dates = sorted({one["date"] for one in results})
    beside = ", ".join(f"{name} {value}" for name, value in results[0]["beside"].items())

    def share(column: str, good: str, among: list[dict[str, Any]] = made) -> str:
        known = [str(row[column]) for row in among if row[column] != ""]
        return f"{sum(value.startswith(good) for value in known)} of {len(known)}"

    decided = [row for row in made if str(row["seeds"]).startswith("yes")]
    one_first = [row for row in made if row["first_observations"] == 1]
    all_first = [
        row for row in made if row["of_seeds"] and row["first_observations"] == row["of_seeds"]
    ]
    lines = [
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; beside {beside}.",
        "",
        f"- {len(results)} packages: {len(installed)} install beside these versions, and "
        f"{len(packages)} of them make an env, {len(made)} envs in all.",
        f"- Seed and actions decide the episode, in one process and in a new one: "
        f"{share('seeds', 'yes')} envs.",
        f"- An env that has been used repeats the episodes of a new one: "
        f"{share('used_env', 'same')} envs.",
        f"- Construction leaves the global random numbers alone: "
        f"{sum(not row['construction'] for row in made)} of {len(made)} envs.",
        f"- All seeds that were tried have first observations of their own: {len(all_first)} of "
        f"{len(made)} envs; one first observation for all: {len(one_first)}.",
        f"- The time limit truncates: {share('limit', 'truncates')} envs; all episodes terminate "
        f"at one length: {share('limit', 'terminates').split()[0]}.",
        f"- Where seed and actions decide, rows are those of a plain loop under `make_env`: "
        f"{share('make_env', 'equal', decided)} envs; under TorchRL's `GymEnv`: "
        f"{share('gymenv', 'equal', decided)}.",
        f"- The doctor passes {share('doctor', 'passed')} envs, the first of each package.",
        f"- There, one digest over 1 slot, 8 slots and worker processes: "
        f"{share('digest', 'one', decided)} envs.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
    ]
    for name in sorted(packages):
        lines.append("| " + " | ".join(cells([r for r in made if r["package"] == name])) + " |")
    lines += ["", "## What differs", ""]
    for row in made:
        if said := differences(row):
            lines.append(f"- {row['env']} ({row['package']} {row['version']}): {'; '.join(said)}")
    lines += ["", "## Packages without an env here", ""]
    for result in results:
        if result["package"] not in packages:
            why = rows_of(result)[0]
            text = why.get("makes") if result["install"] == "yes" else why["installs"]
            lines.append(f"- {result['package']} {result.get('version', '')}: {short(text)}")
    return "\n".join(lines).replace("<", "&lt;") + "\n"


HEADS = (
    "package, version",
    "envs",
    "seeds decide",
    "used env",
    "construction draws",
    "first observations",
    "limit",
    "make_env",
    "GymEnv",
    "one digest",
    "doctor",
)


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of a package, each the worst of its envs."""

    def worst(column: str, good: str) -> str:
        values = [str(row[column]) for row in rows if row[column] != ""]
        bad = [value for value in values if not value.startswith(good)]
        return "**no**" if bad else "yes" if values else "-"

    firsts = [r for r in rows if r["first_observations"] != ""]
    least = min(firsts, key=lambda row: row["first_observations"] / row["of_seeds"], default=None)
    failed = dict.fromkeys(name for row in rows for name in row["doctor_failed"].split())
    warned = dict.fromkeys(name for row in rows for name in row["doctor_warned"].split())
    told = [f"**{name}**" for name in failed] + [*warned]
    return [
        f"{rows[0]['package']} {rows[0]['version']}",
        str(len(rows)),
        worst("seeds", "yes"),
        worst("used_env", "same"),
        ", ".join(dict.fromkeys(row["construction"] for row in rows if row["construction"]))
        or "no",
        "-" if least is None else f"{least['first_observations']} of {least['of_seeds']}",
        "; ".join(dict.fromkeys(row["limit"] or "-" for row in rows)),
        worst("make_env", "equal"),
        worst("gymenv", "equal"),
        worst("digest", "one"),
        ", ".join(told) or ("passed" if any(row["doctor"] for row in rows) else "-"),
    ]


def differences(row: dict[str, Any]) -> list[str]:
    said = []
    if row["seeds"] in ("no", "first episode alone", "not in a new process"):
        said.append(f"seed and actions decide the episode: {row['seeds']}")
    if row["used_env"] == "differs" and row["seeds"] != "no":
        said.append("a used env differs from a new one")
    for column, name in (("make_env", "make_env"), ("gymenv", "GymEnv")):
        if row[column] and not row[column].startswith("equal"):
            said.append(f"{name}: {short(row[column])}")
    if row["digest"] and not row["digest"].startswith("one"):
        said.append(f"digests: {short(row['digest'])}")
    return said + ([f"the doctor: {short(row['evidence'], 400)}"] if row["evidence"] else [])


def short(text: Any, most: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[: most - 3] + "..."


if __name__ == "__main__":
    main()
