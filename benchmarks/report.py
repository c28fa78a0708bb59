"""Benchmark results as Markdown, with machine and versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import many_agents
import pipelines_report
import workers_report
import workloads as w
from tables import number, table, with_spread

COLUMNS = (
    w.HAND,
    w.TORCHRL,
    w.PARALLEL,
    w.SB3,
    w.TIANSHOU,
    w.HAND_DEFAULT,
    w.HAND_SINGLY,
    w.ENVS,
    w.POLICY,
    w.LIMIT,
    w.TURNS,
)
MAIN_NOTE = f"""\
Each figure is the time of that program over the time of tdcollect's collector in the same round:
2 means that tdcollect takes half the time. It is the median over the rounds, with the quartiles in
brackets. "-" marks a program that does not support the workload, or is not installed.

- *{w.HAND}*: a loop in CleanRL's style on `SyncVectorEnv` in `SAME_STEP` mode. It keeps the final
  observations of episodes, so each of its rows is a transition, as in tdcollect. On EnvPool it only
  steps the pool, so one row per episode is no transition.
- *{w.HAND_DEFAULT}*: the same loop in its most common form, on gymnasium's default mode,
  `NEXT_STEP`. Time per row; one row per episode is no transition (on CartPole with this untrained
  policy about one in 23).
- *{w.HAND_SINGLY}*: a loop that restarts ended slots by a second call, on EnvPool by their numbers
  and on the NumPy env by a mask, and uses the step's observations as final ones. It yields as many
  transitions as tdcollect, by the same calls. On the NumPy env it draws without a
  distribution object, and stores the next observations of all rows; on EnvPool only those that end
  an episode.
- *{w.TORCHRL}*: TorchRL's collector, with the fastest env that keeps final observations and has no
  rows for resets: `GymWrapper` over `SyncVectorEnv` with autoreset disabled; `GymEnv` for N=1; on
  EnvPool, for which TorchRL has no such env, tdcollect's env.
- *{w.SB3}*: `PPO.collect_rollouts` alone, with a value network of one linear layer and without
  advantages; continuous actions come from a clipped normal distribution.
- *{w.TIANSHOU}*: `Collector.collect`; no log-probabilities are stored.
- *{w.ENVS}* and *{w.POLICY}*: the envs stepped in a plain loop with actions that the policy gave
  beforehand (on EnvPool, random ones without resets), and the hand-written loop's policy called on
  one observation. *{w.LIMIT}* is their sum: 1 means that nothing is lost beside them.
- *{w.TURNS}*: the same envs and policy in one loop that keeps nothing. Each finds the caches full
  of the other's code and data. (This policy builds a distribution at each step; tdcollect computes
  the same numbers without.)
"""


def main_table(cells: Sequence[dict[str, Any]]) -> str:
    """The main table, one row per cell."""
    head = ["workload", "tdcollect, frames/s", *COLUMNS]
    rows = []
    for cell in cells:
        row = [cell["title"], f"{cell['frames_per_second']:,.0f}"]
        row += [_entry(cell["ratios"].get(name), cell["targets"].get(name)) for name in COLUMNS]
        rows.append(row)
    return table(head, rows)


def _entry(ratio: dict[str, float] | None, target: float | None) -> str:
    if ratio is None:
        return "-"
    text = f"{number(ratio['median'])} ({number(ratio['low'])} to {number(ratio['high'])})"
    if target is None:
        return text
    if ratio["median"] >= target:
        return f"{text}; target {target:g}"
    return f"**{text}; target {target:g} missed**"


def misses(cells: Sequence[dict[str, Any]]) -> str:
    """A list item for each missed target, or a sentence that all are met."""
    lines = []
    for cell in cells:
        for name, target in cell["targets"].items():
            ratio = cell["ratios"].get(name)
            if ratio is not None and ratio["median"] < target:
                lines.append(
                    f"- {cell['title']}, against {name}: target {target:.2f}, "
                    f"measured {ratio['median']:.2f}.{_where(cell)}"
                )
    return "\n".join(lines) + "\n" if lines else "All targets of the table are met.\n"


def _where(cell: dict[str, Any]) -> str:
    if not cell["shares"]:
        return ""
    parts = [f"{name} {share:.0%}" for name, share in cell["shares"].items()]
    micros = 1e6 * cell["slots"] / cell["frames_per_second"]
    return f" A step of all slots takes {micros:.0f} us: {', '.join(parts)}."


def shares_table(cells: Sequence[dict[str, Any]]) -> str:
    """Shares of tdcollect's time, one row per cell."""
    measured = [cell for cell in cells if cell["shares"]]
    head = ["workload", "us per step", *(measured[0]["shares"] if measured else [])]
    rows = [
        [
            cell["title"],
            f"{1e6 * cell['slots'] / cell['frames_per_second']:.0f}",
            *(f"{share:.0%}" for share in cell["shares"].values()),
        ]
        for cell in measured
    ]
    return table(head, rows)


def page(results: dict[str, Any]) -> str:
    """The text of benchmarks/README.md."""
    cells = results["cells"]
    machine_, settings = results["machine"], results["settings"]
    named = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        "# Benchmarks\n",
        f"`{results['command']}` wrote this page on {results['date']}.\n",
        f"Machine: {machine_['cpu']}, {machine_['cores']} cores, {machine_['memory_GiB']} GiB, "
        f"{machine_['system']}; load before the run "
        f"{', '.join(map(str, machine_['load_before']))}. One torch thread; EnvPool with "
        f"{settings['pool_threads']}.\n",
        f"Versions: {named}.\n",
        "No policy here is on a GPU; `make gpu` measures that, and writes to runs/gpu.\n",
        f"T={settings['steps']}. The programs of a cell take turns in one process: "
        f"{settings['rounds']} rounds of about {settings['seconds']:g} s per program, after a "
        "warm-up.\n",
    ]
    if cells:
        parts += ["## Frames per second\n", main_table(cells), MAIN_NOTE, misses(cells)]
    if any(cell["shares"] for cell in cells):
        parts += [
            "## Where tdcollect's time goes\n",
            "Measured by timers around the collector's calls, while it collects. Env steps and "
            "resets include reading actions and writing observations into arrays. The loop is the "
            "rest: trajectory ids, step dicts, the batch.\n",
            shares_table(cells),
        ]
    parts += [section for name, make in _SECTIONS.items() if name in results
              for section in make(results[name])]  # fmt: skip
    return "\n".join(parts)


def _hot_loop(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in rows[0] if name != "N"]
    body = [[str(row["N"]), *(with_spread(row[name]) for name in names)] for row in rows]
    return [
        "## Overhead of the loop\n",
        "Microseconds per step of all slots, with a vector env and a policy that do nothing. The "
        "hand-written loop does not separate termination from truncation, and stores no next "
        "observations.\n",
        table(["N", *names], body),
    ]


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    mib = 2**20
    body = [
        [
            row["collector"],
            f"{row['batch'] / mib:.0f}",
            f"{row['peak_above_idle'] / mib:.0f}",
            _most(row["in_batches"], row["target"]),
        ]
        for row in rows
    ]
    return [
        "## Memory of the pixel cell\n",
        "Peak resident memory, in MiB, of a process that collects Pong-v5 (N=16), reads each batch "
        "and drops it before the next. The baseline is the same process after env and policy have "
        "been built and used once.\n",
        table(["collector", "one batch", "peak above idle", "in batches"], body),
    ]


def _most(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    if value <= target:
        return f"{value:.2f}; target at most {target:g}"
    return f"**{value:.2f}; target at most {target:g} missed**"


def _growth(row: dict[str, Any]) -> list[str]:
    head = ["batches", *map(str, row["iterations"])]
    body = [["resident, MiB", *(f"{value / 2**20:.1f}" for value in row["resident"])]]
    return [
        "## Memory over many batches\n",
        f"CartPole-v1, N=8, T={row['steps']}: {row['grown'] / 1024:.0f} KiB more after "
        f"{row['iterations'][-1]} batches than at the first, after a warm-up of a tenth as many; "
        f"slope {row['bytes_per_iteration']:.0f} bytes per batch of {row['frames']} frames.\n",
        table(head, body),
    ]


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    body = [
        ["us per frame", *(with_spread(row) for row in rows)],
        ["TorchRL Collector", *(with_spread(row["torchrl"]) for row in rows)],
    ]
    return [
        "## Cost per frame against T\n",
        "CartPole-v1, N=8. TorchRL's is the ratio of its time to tdcollect's in the same round. "
        "Off-policy scripts collect short batches.\n",
        table(["T", *(str(row["T"]) for row in rows)], body),
    ]


def _batches(rows: list[dict[str, Any]]) -> list[str]:
    body = [["us per frame", *(number(row["median"]) for row in rows)]]
    return [
        "## Cost per frame against the number of batches\n",
        "CartPole-v1, N=8, T=32; medians.\n",
        table(["batches", *(row["batches"] for row in rows)], body),
    ]


def _variants(rows: list[dict[str, Any]]) -> list[str]:
    parts = [
        "## Variants of a pipeline\n",
        "The variants of a group take turns. The ratio is the time per frame over that of the "
        "group's first variant. CartPole-v1, N=8, integer actions, unless stated otherwise.\n",
    ]
    body, group = [], None
    for row in rows:
        name = row["group"] if row["group"] != group else ""
        group = row["group"]
        ratio = "1" if row["ratio"] is None else with_spread(row["ratio"])
        body.append([name, row["variant"], number(row["us_per_frame"]["median"]), ratio])
    return [*parts, table(["group", "variant", "us per frame", "ratio"], body)]


def _monitoring(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0]["ratios"])
    body = []
    for row in rows:
        entries = []
        for name in names:
            ratio, target = row["ratios"][name], row["targets"].get(name)
            entry = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            if target is not None:
                missed = "" if ratio["median"] <= target else " missed"
                entry += f"; target at most {target:g}{missed}"
            entries.append(entry)
        body.append([f"N={row['N']}, T={row['T']}", number(row["us_per_frame"]), *entries])
    return [
        "## Cost of statistics and hooks\n",
        "CartPole-v1: time per frame over that of the same collector without them.\n",
        table(["workload", "us per frame", *names], body),
    ]


def _workers(rows: list[dict[str, Any]]) -> list[str]:
    """A section on the speed of worker processes relative to one process."""
    numbers = list(rows[-1]["gains"])
    body = []
    for row in rows:
        gains, target = row["gains"], row["target"]
        entries = [with_spread(gains[name]) for name in numbers]
        if target is not None:
            best = max(gains[name]["median"] for name in numbers)
            entries[-1] += f"; target {target:g}{'' if best >= target else ' missed'}"
        other = "-" if "AsyncVectorEnv" not in gains else with_spread(gains["AsyncVectorEnv"])
        body.append([row["workload"], number(row["us_per_frame"]), *entries, other])
    return [
        "## Worker processes\n",
        'Speed relative to `backend="serial"`: its time per frame over that of '
        '`backend="process"` with the given number of workers, and over that of gymnasium\'s '
        "`AsyncVectorEnv`. The collector's envs only burn the given time per step; the policy is "
        "64x64 tanh.\n",
        table(
            [
                "workload",
                "us per frame, serial",
                *(f"{n} workers" for n in numbers),
                "AsyncVectorEnv",
            ],
            body,
        ),
    ]


def _evaluating(rows: list[dict[str, Any]]) -> list[str]:
    body = []
    for row in rows:
        entry, target = with_spread(row["ratio"]), row["target"]
        if target is not None:
            missed = "" if row["ratio"]["median"] >= target else " missed"
            entry += f"; target {target:g}{missed}"
        body.append([row["policy"], row["other"], entry])
    return [
        "## Test episodes\n",
        "Time per step of other evaluators over that of `tdcollect.evaluate`, with one policy that "
        "balances the pole for hundreds of steps. CartPole-v1, 16 slots made beforehand, "
        f"{rows[0]['episodes']} episodes. tdcollect's time includes its checks of env and "
        "policy.\n",
        table(["policy", "other", "ratio"], body),
    ]


_SECTIONS = {
    "hot-loop": _hot_loop,
    "memory": _memory,
    "growth": _growth,
    "steps": _steps,
    "batches": _batches,
    "variants": _variants,
    "monitoring": _monitoring,
    "workers": _workers,
    "processes": workers_report.processes,
    "evaluating": _evaluating,
    "many-workers": workers_report.many_workers,
    "many-agents": many_agents.section,
    "ready": workers_report.ready,
    "suites": workers_report.suites,
    "beside": workers_report.beside,
    "pipelines": pipelines_report.section,
}
