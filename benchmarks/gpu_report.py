"""The page and the short table of the GPU benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_collectors as collectors
import gpu_evaluation as evaluation
import gpu_parts as parts
import gpu_workers as workers
from tables import number, table, with_spread

Rows = list[dict[str, Any]]


def page(results: dict[str, Any]) -> str:
    """The text of runs/gpu/README.md."""
    host = results["machine"]
    gpu = "no GPU: the policies run on the CPU"
    if "gpu" in host:
        gpu = f"{host['gpu']}, {host['gpu_memory_GiB']} GiB, CUDA {host['cuda']}"
    named = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    text = [
        "# On a GPU\n",
        f"`{results['command']}` wrote this page and `results.json` on {results['date']}.\n",
        f"Device: {gpu}. Machine: {host['cpu']}, {host['cores']} cores, {host['memory_GiB']} GiB, "
        f"{host['system']}; load before the run {', '.join(map(str, host['load_before']))}. One "
        "torch thread in each process, on both sides; EnvPool has one thread per core, unless "
        "stated otherwise.\n",
        f"Versions: {named}.\n",
        "Sides take turns; figures are medians over the rounds, with the quartiles in brackets. "
        "A turn ends when the GPU has done its work.\n",
    ]
    if "tests" in results:
        text.append(f"Tests (`pytest -m gpu`): {results['tests']['outcome']}; see tests.txt.\n")
    for name, rows in results["groups"].items():
        text += [f"## {_TITLES[name]}\n", *_SECTIONS[name]([r for r in rows if not _lost(r)])]
        text += _problems(rows)
    return "\n".join(text)


def summary(results: dict[str, Any]) -> str:
    """A short table: each aim, with the worst figure measured for it."""
    rows = [["tests", results["tests"]["outcome"], "all pass"]] if "tests" in results else []
    for (what, aim, at_most), values in _aims(results["groups"]).items():
        low, high = min(values), max(values)
        shown = number(low) if low == high else f"{number(low)} to {number(high)}"
        met = sum(value <= aim if at_most else value >= aim for value in values)
        text = f"{'at most ' * at_most}{aim:g}: met in {met} of {len(values)}"
        rows.append([what, shown, text])
    for name, found in results["groups"].items():
        lost = [row for row in found if _lost(row)]
        if lost:
            failed = sum(row["failed"] for row in lost)
            rows.append([name, f"{len(lost)} of {len(found)} not measured", f"{failed} failed"])
    return table(["part", "measured", "aim"], rows) if rows else "nothing was measured\n"


def failures(results: dict[str, Any]) -> list[str]:
    """The parts that failed."""
    found = [row["name"] for rows in results["groups"].values() for row in rows
             if row.get("failed")]  # fmt: skip
    tests = results.get("tests", {"status": 0})
    return found + ["tests"] * (tests["status"] != 0)


def _lost(row: dict[str, Any]) -> bool:
    return "problem" in row


def _problems(rows: Rows) -> list[str]:
    names: dict[str, list[str]] = {}
    for row in filter(_lost, rows):
        what = f"{'failed' if row['failed'] else 'left out'}, {row['problem']}"
        names.setdefault(what, []).append(row["name"])
    lines = [f"- {what}: {'; '.join(of)}" for what, of in names.items()]
    return ["Not measured:\n", "\n".join(lines) + "\n"] if lines else []


def _aims(groups: dict[str, Rows]) -> dict[tuple[str, float, bool], list[float]]:
    """The figures for each aim: its name, its number, and whether that is a maximum."""
    found: dict[tuple[str, float, bool], list[float]] = {}

    def add(what: str, aim: float, value: float, at_most: bool = False) -> None:
        found.setdefault((what, aim, at_most), []).append(value)

    for row in groups.get("counts", []):
        for kind, most in row.get("at_most", {}).items():
            what = f"{kind} per step, {row['side']}"
            add(what, most, round(row["per_step"][kind], 2), at_most=True)
    for row in (r for name in _COMPARED for r in groups.get(name, [])):
        for other, aim in row.get("target", {}).items():
            if other in row["ratios"]:
                what = f"{row['workload']}: speed of {row['base']} over {other}"
                add(what, aim, row["ratios"][other]["median"])
    for row in groups.get("evaluation", []):
        if "device_over_cpu" in row:
            slower = row["device_over_cpu"]
            add("evaluation, time over the CPU's", evaluation.SLOWER, slower, at_most=True)
    for row in groups.get("workers", []):
        for count, value in row.get("efficiency", {}).items():
            if 1 < int(count) <= workers.TARGET_WORKERS:
                add("efficiency of workers", workers.TARGET, value)
    for row in groups.get("overlap", []):
        if "gain" in row:
            add("gain of overlap, by the model", parts.WORTH_IT, row["gain"])
    return found


def _aimed(value: float, text: str, target: float | None, at_most: bool = False) -> str:
    if target is None:
        return text
    met = value <= target if at_most else value >= target
    return f"{text}; aim {target:g}" if met else f"**{text}; aim {target:g} missed**"


def _ratio(row: dict[str, Any], name: str) -> str:
    ratio = row["ratios"].get(name)
    if ratio is None:
        return row["raised"].get(name, "-")
    return _aimed(ratio["median"], with_spread(ratio), row["target"].get(name))


def _counts(rows: Rows) -> list[str]:
    kinds = [parts.LAUNCHES, parts.COPIES, parts.WAITS, parts.BUSY]
    body = [
        [f"{row['workload']}, N={row['N']}, {row['side']}",
         *(_aimed(round(row["per_step"][kind], 1), f"{row['per_step'][kind]:.1f}",
                  row["at_most"].get(kind), at_most=True) for kind in kinds)]
        for row in rows
    ]  # fmt: skip
    return [
        "Calls of CUDA's runtime that a further step brings, by torch.profiler, in the difference "
        "of two batches; a graph is one launch. The load of the machine does not move them.\n",
        table(["workload", *kinds], body),
    ]


def _settings(rows: Rows) -> list[str]:
    body = [
        [each["env"], str(each["env_device"]), str(each["storing_device"]),
         str(each["no_cuda_sync"]), each["differs"] or "equal",
         "-" if each["us_per_step"] is None else number(each["us_per_step"])]
        for each in rows
    ]  # fmt: skip
    head = ["env", "env_device", "storing_device", "no_cuda_sync", "batches", "us per step"]
    return [
        "TorchRL's collector in each setting, CartPole-v1, 64 x 64, with the policy on the device, "
        "each with an env of its own. The batches are compared with those of waiting copies to the "
        "CPU (env_device and storing_device on the CPU, no_cuda_sync=False). The fastest setting "
        "that yields the same batches is used below.\n",
        table(head, body),
    ]


def _compared(rows: Rows) -> list[str]:
    text = []
    for base in dict.fromkeys(row["base"] for row in rows):
        of_base = [row for row in rows if row["base"] == base]
        others = list(dict.fromkeys(
            name for row in of_base for name in (*row["ratios"], *row["raised"])
        ))  # fmt: skip
        body = [
            [row["workload"], str(row["T"]), number(row["us_per_step"][base]),
             *(_ratio(row, name) for name in others)]
            for row in of_base
        ]  # fmt: skip
        text += [
            f"Time per step of the other over that of *{base}*: 2 means that it takes half the "
            "time. Batches are stored on the same device on both sides.\n",
            table(["workload", "T", "us per step", *others], body),
        ]
    bits = [f"{row['workload']}: {row['differs'] or 'equal'}" for row in rows
            if row.get("differs") is not None]  # fmt: skip
    if bits:
        text.append(f"tdcollect's batches beside TorchRL's on the same env: {'; '.join(bits)}.\n")
    return text


def _shares(rows: Rows) -> list[str]:
    body = []
    for row in rows:
        took = row["us_per_step"]
        rest = (took[side] - took[parts.ENV] for side in (collectors.CALLS, collectors.GRAPH))
        title = f"{row['workload']}, N={row['N']}"
        body.append([title, *map(number, (*took.values(), *rest))])
    head = ["workload", "env", collectors.CALLS, collectors.GRAPH, "rest", "rest, graph"]
    return [
        "Microseconds per step of all slots, 64 x 64: the envs alone, whole steps call by call and "
        "with the policy as one graph, and the rest of both: policy, copies, waits and loop.\n",
        table(head, body),
    ]


def _overlap(rows: Rows) -> list[str]:
    body = []
    for row in rows:
        gain = _aimed(row["gain"], number(row["gain"]), parts.WORTH_IT)
        title = f"{row['workload']}, N={row['N']}"
        body.append([title, *map(number, row["us_per_step"].values()), gain])
    head = ["workload", parts.ENV, collectors.CALLS, collectors.GRAPH, parts.HALF_ENV, parts.HALF]
    return [
        "The gain of two groups of slots that take turns, by the model "
        "(E + R) / max(E, 2R', E/2 + R'). E: the envs of all slots, on worker processes (Pong: on "
        "EnvPool's threads). R: all else of a whole step with the policy as one graph, the loop "
        "included, which each group has to itself; R': that of half of the slots. Microseconds per "
        "step.\n",
        table([*head, "gain"], body),
    ]


def _workers(rows: Rows) -> list[str]:
    text = [
        "Envs alone. Speed in frames/s; in brackets the efficiency: speed over that of one worker "
        f"for each. Aim: {workers.TARGET:g} up to {workers.TARGET_WORKERS} workers. EnvPool with "
        "as many threads steps without restarts of single slots.\n"
    ]
    counts = [f"{n}" for n in sorted({int(n) for row in rows for n in row["efficiency"]})]
    body = []
    for row in rows:
        speeds, title = row["frames_per_second"], f"{row['workload']}, N={row['N']}"
        entries = []
        for n in counts:
            share = row["efficiency"][n]
            missed = share < workers.TARGET and int(n) <= workers.TARGET_WORKERS
            entries.append(f"{speeds[n]:,.0f} ({share:.2f}{' missed' * missed})")
        body.append([title, f"{speeds[workers.SERIAL]:,.0f}", *entries])
        if row["pool_efficiency"]:
            shown = [f"{speeds[f'{workers.POOL} {n}']:,.0f} ({row['pool_efficiency'][n]:.2f})"
                     for n in counts]  # fmt: skip
            body.append([f"{title}, EnvPool", "-", *shown])
    return [*text, table(["workload", "serial", *counts], body)]


def _evaluation(rows: Rows) -> list[str]:
    return [row["table"] + "\n" for row in rows]


_TITLES = {
    "counts": "Launches, copies and waits",
    "settings": "TorchRL's settings",
    "graphs": "CUDA graphs",
    "device_envs": "Envs on the device",
    "evaluation": "Evaluation",
    "collectors": "Collectors, call by call",
    "shares": "Where a step's time goes",
    "overlap": "Overlap of policy and envs",
    "workers": "Worker processes",
    "compiled": "Compiled policies",
}
_COMPARED = ("graphs", "device_envs", "collectors", "compiled")
_SECTIONS: dict[str, Callable[[Rows], list[str]]] = {
    **dict.fromkeys(_COMPARED, _compared),
    "counts": _counts,
    "settings": _settings,
    "evaluation": _evaluation,
    "shares": _shares,
    "overlap": _overlap,
    "workers": _workers,
}
