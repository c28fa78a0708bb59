"""The page and the short table of the GPU benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_collectors as collectors
import gpu_device_envs as device_envs
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
    for what, target, values in _aims(results["groups"]):
        worst, best = min(values), max(values)
        shown = number(worst) if worst == best else f"{number(worst)} to {number(best)}"
        met = sum(value >= target for value in values)
        rows.append([what, shown, f"{target:g}: met in {met} of {len(values)}"])
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


def _aims(groups: dict[str, Rows]) -> list[tuple[str, float, list[float]]]:
    """Each aim, with its name and the figures."""
    found: dict[tuple[str, float], list[float]] = {}
    for row in (r for name in ("collectors", "graphs", "compiled") for r in groups.get(name, [])):
        for each in row.get("rows", []):
            for other, target in each["target"].items():
                if other not in each["ratios"]:
                    continue
                mode = "" if other == collectors.EAGER else f", {row['mode']}"
                key = (f"speed over {other}{mode}", target)
                found.setdefault(key, []).append(each["ratios"][other]["median"])
    for row in groups.get("device_envs", []):
        for other, target in row.get("target", {}).items():
            key = (f"envs on the device, speed over the {other}", target)
            found.setdefault(key, []).append(row["ratios"][other]["median"])
    for row in groups.get("workers", []):
        values = [v for n, v in row.get("efficiency", {}).items()
                  if 1 < int(n) <= workers.TARGET_WORKERS]  # fmt: skip
        if values:
            found.setdefault(("efficiency of workers", workers.TARGET), []).extend(values)
    gains = [row["gain"] for row in groups.get("overlap", []) if "gain" in row]
    if gains:
        found["gain of overlap, by the model", parts.WORTH_IT] = gains
    return [(what, target, values) for (what, target), values in found.items()]


def _aimed(value: float, text: str, target: float | None) -> str:
    if target is None:
        return text
    return f"{text}; aim {target:g}" if value >= target else f"**{text}; aim {target:g} missed**"


def _ratio(row: dict[str, Any], name: str) -> str:
    ratio = row["ratios"].get(name)
    if ratio is None:
        return row.get("raised", {}).get(name, "-")
    return _aimed(ratio["median"], with_spread(ratio), row["target"].get(name))


def _settings(rows: Rows) -> list[str]:
    text = [
        "TorchRL's collector in each setting, CartPole-v1, 64 x 64, with the policy on the device. "
        "The batches are compared with those of waiting copies to the CPU (env_device and "
        "storing_device on the CPU, no_cuda_sync=False). The fastest setting that "
        "yields the same batches is used below.\n"
    ]
    for row in rows:
        body = [
            [each["env"], str(each["env_device"]), str(each["storing_device"]),
             str(each["no_cuda_sync"]), each["differs"] or "equal",
             "-" if each["us_per_step"] is None else number(each["us_per_step"])]
            for each in row["settings"]
        ]  # fmt: skip
        head = ["env", "env_device", "storing_device", "no_cuda_sync", "batches", "us per step"]
        text.append(table(head, body))
        best = row["fastest"]
        text.append(
            f"N={row['slots']}. The fastest: {best['env']}, env_device={best['env_device']}, "
            f"storing_device={best['storing_device']}, no_cuda_sync={best['no_cuda_sync']}.\n"
        )
    return text


def _collectors(rows: Rows) -> list[str]:
    others = [collectors.THEIRS, collectors.EAGER, collectors.WORKERS]
    body, bits = [], []
    for row in rows:
        for each in row["rows"]:
            title = f"{row['workload']}, N={row['N']}, {each['policy']}, {row['mode']}"
            ours = number(each["us_per_step"][collectors.OURS])
            body.append([title, str(row["T"]), ours, *(_ratio(each, name) for name in others)])
        if row["differs"] is not None:
            bits.append(f"{row['workload']} N={row['N']}: {row['differs'] or 'equal'}")
    text = [
        "Time per step of the other over that of tdcollect's collector with one process: 2 means "
        "that tdcollect takes half the time. Batches are stored on the same device on both sides. "
        "*tdcollect, workers* has its envs on worker processes, one per core.\n",
        table(["workload", "T", "us per step", *others], body),
    ]
    if bits:
        text.append(f"tdcollect's batches beside TorchRL's on the same env: {'; '.join(bits)}.\n")
    return text


def _shares(rows: Rows) -> list[str]:
    names = [parts.ENV, parts.UP, parts.POLICY, parts.DOWN, parts.LOOP]
    body = [
        [f"{row['workload']}, N={row['N']}", number(row["us_per_step"]),
         *(f"{row['us'][name]:.0f} ({row['us'][name] / row['us_per_step']:.0%})" for name in names)]
        for row in rows
    ]  # fmt: skip
    return [
        "Microseconds per step of all slots, 64 x 64. Env, the copy of observations, the policy "
        "and the copy of actions are each timed by themselves, with a wait for the device; the "
        "loop is the rest of a whole step, and below zero where a step waits less often than its "
        "parts.\n",
        table(["workload", "whole step", *names], body),
    ]


def _overlap(rows: Rows) -> list[str]:
    names = [parts.ENV, parts.BOTH, parts.HALF, parts.WHOLE]
    body = [
        [f"{row['workload']}, N={row['N']}", str(row["workers"]),
         *(number(row["us_per_step"][name]) for name in names),
         _aimed(row["gain"], number(row["gain"]), parts.WORTH_IT), number(row["gain_with_loop"])]
        for row in rows
    ]  # fmt: skip
    return [
        "The gain of two groups of slots that take turns, by the model "
        "(E + P) / max(E, 2P', E/2 + P'). E: the envs of all slots, on worker processes (Pong: on "
        "EnvPool's threads). P: the policy for all slots, with both copies; P': for half of them. "
        "Microseconds per step. In the last column, P and P' include the rest of a whole step, the "
        "loop, which each group would have to itself.\n",
        table(["workload", "workers", "E", "P", "P'", "whole step", "gain", "with the loop"], body),
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


def _device_envs(rows: Rows) -> list[str]:
    names = [device_envs.THEIRS, device_envs.BARE]
    body, waits = [], []
    for row in rows:
        ours = number(row["us_per_step"][device_envs.OURS])
        title = f"{row['workload']}, N={row['N']}"
        body.append([title, str(row["T"]), ours, *(_ratio(row, name) for name in names)])
        for side, where in row["waits"].items():
            waits.append(f"- {row['workload']}, {side}: {where or 'no wait in a batch'}")
    return [
        "Envs whose tensors are on the device: time per step of the other over that of tdcollect's "
        "collector. The bare loop has env and policy in PyTorch, and stores nothing.\n",
        table(["workload", "T", "us per step", *names], body),
        "The first operation of a batch at which the host waits for the device:\n",
        "\n".join(waits) + "\n",
    ]


def _evaluation(rows: Rows) -> list[str]:
    return [row["table"] for row in rows]


_TITLES = {
    "settings": "TorchRL's settings",
    "collectors": "Collectors",
    "shares": "Where a step's time goes",
    "graphs": "CUDA graphs",
    "device_envs": "Envs on the device",
    "overlap": "Overlap of policy and envs",
    "workers": "Worker processes",
    "evaluation": "Evaluation",
    "compiled": "Compiled policies",
}
_SECTIONS: dict[str, Callable[[Rows], list[str]]] = {
    "settings": _settings,
    "collectors": _collectors,
    "shares": _shares,
    "graphs": _collectors,
    "device_envs": _device_envs,
    "overlap": _overlap,
    "workers": _workers,
    "evaluation": _evaluation,
    "compiled": _collectors,
}
