"""The report's sections on processes: collection, test episodes on workers and beside training."""

from __future__ import annotations

from typing import Any

from tables import number, table, with_spread


def many_workers(results: dict[str, Any]) -> list[str]:
    """The section on workers as Markdown, in paragraphs."""
    starts = results["seconds to start"]
    started = ", ".join(f"{number(s)} s for {n}" for n, s in starts.items())
    rows = [
        [
            f"{row['workers']} workers, envs {row['kind']}",
            f"{with_spread(row['ratio'])}; target {row['target']:g}"
            + ("" if row["ratio"]["median"] >= row["target"] else " missed"),
        ]
        for row in results["speedups"]
    ]
    short = [
        [row["way"], f"{with_spread(row['ms'])}; target at most {row['target']:g}"]
        for row in results["short"]
    ]
    memory = [
        [f"{row['episodes']} episodes", "yes" if row["kept"] else "no", number(row["peak_MiB"])]
        for row in results["memory"]
    ]
    return [
        "## Test episodes on workers\n",
        "Time of one worker over that of several, for "
        f"{results['speedups'][0]['episodes']} episodes of 50 steps of 1 ms each, with a 64x64 "
        "policy. *Asleep*: the envs sleep, so that cores do not matter; *busy*: they compute. "
        f"Workers are warm. Their start, until each has run an episode, took {started}.\n",
        table(["workers", "times as fast as one"], rows),
        f"Cost of {results['short'][0]['episodes']:,} episodes of one step on two workers, beside "
        "the env, in ms per episode:\n",
        table(["result", "ms per episode"], short),
        "Peak memory of the driver after further episodes of 8 MB each, one line after the other; "
        "it never falls:\n",
        table(["ran", "data kept in a directory", "peak, MiB"], memory),
    ]


def processes(results: dict[str, Any]) -> list[str]:
    """The section on collection on two processes as Markdown, in paragraphs."""
    slots, target, one = results["slots"], results["target"], "tdcollect, one process"
    others = [name for name in results["rows"][0]["ratios"] if name != one]
    against = [row for row in results["rows"] if len(row["ratios"]) > 1]
    head = ["workload", "tdcollect, frames/s", *others]
    return [
        "## Collection on two processes\n",
        f"`MultiSyncCollector` with two workers of N={slots}: time per frame of TorchRL's class "
        "over that of tdcollect's, in the same round. TorchRL's class has each batched env in "
        f"turn; the target, {target:g}, is against the fastest. One torch thread in each "
        "process.\n",
        table(head, [_against_torchrl(row, others, target) for row in against]),
        f"One process with {2 * slots} slots, instead of two with {slots} each: the time of one "
        "process over that of two. Below 1, one process is faster. The last rows' envs only burn "
        "the given time per step.\n",
        table(
            ["workload", "two processes, frames/s", "one process"],
            [
                [
                    row["workload"],
                    f"{row['frames_per_second']:,.0f}",
                    with_spread(row["ratios"][one]),
                ]
                for row in results["rows"]
            ],
        ),
    ]


def _against_torchrl(row: dict[str, Any], others: list[str], target: float) -> list[str]:
    fastest = min(others, key=lambda name: row["ratios"][name]["median"])
    entries = []
    for name in others:
        entry = with_spread(row["ratios"][name])
        if name == fastest:
            missed = "" if row["ratios"][name]["median"] >= target else " missed"
            entry += f"; target {target:g}{missed}"
        entries.append(entry)
    return [row["workload"], f"{row['frames_per_second']:,.0f}", *entries]


def suites(results: dict[str, Any]) -> list[str]:
    """The section on suites as Markdown, in paragraphs."""
    rows = [
        ["one after the other, over the suite", with_spread(results["ratio"])],
        ["the envs' own time, over the suite", with_spread(results["share of ideal"])],
    ]
    return [
        "## Suites on workers\n",
        f"{results['evaluations']} evaluations of {results['episodes']} episodes, of tasks whose "
        f"steps sleep for 1 to 8 ms, on {results['workers']} warm workers: as a suite, whose "
        "evaluations share the workers, and one after the other on the same workers. Both write "
        "reports of all evaluations. The envs' own time is that of all steps, divided by the "
        "workers; the rest is probes of the envs, policy calls, and reports.\n",
        table(["time of", "times"], rows),
    ]


def beside(results: dict[str, Any]) -> list[str]:
    """The section on evaluation beside training as Markdown, in paragraphs."""
    target = results["target"]
    rows = [
        [name, _percent(results[name])]
        for name in ("share of wall time", "share of the process's CPU time")
    ]
    rows.append(
        ["calls and the thread that waits", f"{100 * results['share of calls and thread']:.1f} %"]
    )
    return [
        "## Evaluation beside training\n",
        "A PPO training with one torch thread, with and without an `Evaluator` that runs 100 "
        f"episodes every ten batches; the two take turns of {results['seconds per turn']:.2f} s, "
        "in which three evaluations begin. Shares of the training's time that evaluation costs, "
        f"in a machine with a core free; target at most {100 * target:g} % of wall time:\n",
        table(["", "share"], rows),
    ]


def ready(results: dict[str, Any]) -> list[str]:
    """The section on slots that are ready as Markdown, in paragraphs."""
    paragraphs = [
        "## Slots that are ready\n",
        f"Time of tdcollect in step over that of each side, for {results['slots']} slots in as "
        "many processes, whose envs sleep; episodes of 50 steps, a 64x64 policy. A step of all "
        "slots waits for the slowest; slots that are ready go on (`wait_num=1`). Training collects "
        f"{results['slots']} x {results['steps']} frames. TorchRL's `AsyncEnvPool` is stepped by a "
        "loop that stacks its rows. Tianshou's `AsyncCollector` fills its buffer, and takes the "
        "first episodes to finish; it is left out where it is not installed.\n",
    ]
    for kind in dict.fromkeys(row["kind"] for row in results["rows"]):
        body = [
            [
                f"{row['measured']}: {row['side']}",
                f"{row['per_second']:,.0f}",
                _gain(row),
            ]
            for row in results["rows"]
            if row["kind"] == kind
        ]
        head = [kind, "frames or episodes per second", "times as fast as in step"]
        paragraphs.append(table(head, body))
    return paragraphs


def _gain(row: dict[str, Any]) -> str:
    target, text = row["target"], with_spread(row["gain"])
    if target is None:
        return text
    missed = "" if row["gain"]["median"] >= target else " missed"
    return f"{text}; target {target:g}{missed}"


def _percent(spread: dict[str, float]) -> str:
    low, median, high = (f"{100 * spread[name]:.1f} %" for name in ("low", "median", "high"))
    return f"{median} ({low} to {high})"
