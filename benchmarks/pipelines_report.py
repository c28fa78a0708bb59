"""The report's section on the pipelines of TorchRL's scripts."""

from __future__ import annotations

from typing import Any

from tables import number, table, with_spread

_LEVELS = {1: "Level 1, only the collector's import changed", 2: "Level 2, the envs', too"}
_TARGETS = {1: {"on_arrays": 13, "mean_on_arrays": 2.0, "lowest": 1.0},
            2: {"on_arrays": 23, "mean": 2.5, "lowest": 1.0}}  # fmt: skip
_IDENTITY = 1.5
_NAMES = {
    "on_arrays": "wholly on arrays",
    "mean": "geometric mean of the ratios",
    "mean_on_arrays": "geometric mean of those on arrays",
    "lowest": "lowest ratio",
}


def section(results: dict[str, Any]) -> list[str]:
    """The section as Markdown, in paragraphs."""
    rows = results["scripts"]
    parts = [
        "## TorchRL's scripts\n",
        "The envs and policies of TorchRL's training scripts, examples and tutorials, written anew "
        "(benchmarks/torchrl_scripts), under TorchRL's collector and tdcollect's. The ratio is "
        "TorchRL's time per frame over tdcollect's, with the quartiles; the programs take turns "
        "with one torch thread each, and random frames at a run's start are not timed. *Same bits* "
        "compares the first two batches, and torch's random state after each. Scripts that call "
        "`collector.set_seed` are compared and timed without that call; *no as written* is the "
        "comparison with it: here it restarts the envs, while TorchRL's collector goes on from "
        "their unseeded reset. *On arrays* means "
        "that `explain()` names no obstacle.\n",
        *_summary(results["summary"]),
    ]
    if results["resize_stand_in"]:
        parts.append(
            "torchvision cannot be imported here: TorchRL's `Resize` calls torch's resampling "
            "directly.\n"
        )
    measured = [row for row in rows if "levels" in row]
    levels = sorted({level for row in measured for level in row["levels"]})
    head = ["script", "TorchRL, us per frame"]
    for level in levels:
        head += [f"level {level}: ratio", "same bits", "on arrays"]
    body = [
        [row["name"], number(row["us_per_frame"]["TorchRL"]["median"])]
        + [text for level in levels for text in _entries(row["levels"].get(level, {}))]
        for row in measured
    ]
    parts.append(table(head, body))
    parts += _pixels(results)
    parts += _short(results)
    parts += _deviations(rows)
    parts += _obstacles(measured, levels)
    left_out = {row["path"]: row["left_out"] for row in rows if "left_out" in row}
    not_here = [[path, why] for path, why in {**left_out, **results["unavailable"]}.items()]
    return [*parts, "Scripts that are not measured:\n", table(["script", "reason"], not_here)]


def _pixels(results: dict[str, Any]) -> list[str]:
    body = []
    for row in results["scripts"]:
        if "floor_us_per_frame" in row:
            theirs, floor = row["us_per_frame"]["TorchRL"]["median"], row["floor_us_per_frame"]
            body.append([row["name"], number(theirs), number(floor), number(theirs / floor)])
    if not body:
        return []
    head = ["script", "TorchRL, us per frame", "floor, us per frame", "ratio at the floor"]
    return [
        "The floor of the Atari scripts: the game's steps, the arithmetic of ToTensorImage, "
        "GrayScale, Resize, CatFrames and VecNorm, and the network, in one process, without "
        "TensorDicts or batches. (Worker processes share the first part among cores.)\n",
        table(head, body),
    ]


def _short(results: dict[str, Any]) -> list[str]:
    body = []
    for row in results["short"]:
        ceiling = row["us_per_frame"]["TorchRL"]["median"] / row["floor_us_per_frame"]
        entries = []
        for level in ("1", "2"):
            ratio = row["levels"].get(level, {}).get("ratio")
            entry = "-" if ratio is None else with_spread(ratio)
            if ratio is not None and ratio["median"] < row["target"]:
                entry = f"**{entry}; missed**"
            entries.append(entry)
        same = all(not level.get("differs") for level in row["levels"].values())
        body.append(
            [row["title"], *entries, f"{row['target']:g}", number(ceiling), "yes" if same else "no"]
        )
    if not body:
        return []
    head = ["pipeline", "level 1: ratio", "level 2: ratio", "target", "at the floor", "same bits"]
    ratio = results["identity"]
    missed = "" if ratio["median"] <= _IDENTITY else ", missed"
    return [
        "Short pipelines. *At the floor* is the ratio that the env's steps and the policy's "
        "arithmetic alone would have, without transforms, batches or a loop:\n",
        table(head, body),
        "A subclass of `ObservationNorm`, which no collector knows, on `make_env`'s CartPole-v1 "
        f"with 8 slots: {with_spread(ratio)} times the time without it (target at most "
        f"{_IDENTITY:g}{missed}).\n",
    ]


def _summary(summary: list[dict[str, Any]]) -> list[str]:
    lines = []
    for found in summary:
        targets = _TARGETS[found["level"]] if found["group"].startswith("training") else {}
        same = f"{found['equal']} with the same bits"
        if found["as_written"] < found["equal"]:
            same += f" ({found['as_written']} as written)"
        parts = [f"{found['scripts']} measured", same]
        for key, name in _NAMES.items():
            value, target = found[key], targets.get(key)
            if value is None:
                continue
            text = f"{name} {number(value) if isinstance(value, float) else value}"
            if target is not None:
                text += f" (target {target:g}{'' if value >= target else ', missed'})"
            parts.append(text)
        level = _LEVELS[found["level"]]
        lines.append(f"- {level}; {found['group']}: {', '.join(parts)}.")
    return ["\n".join(lines) + "\n"] if lines else []


def _entries(level: dict[str, Any]) -> list[str]:
    if "ratio" not in level:
        return ["-", "-", "-"]
    same = "no" if level["differs"] else "yes"
    if level.get("as_written"):
        same += "; no as written"
    return [with_spread(level["ratio"]), same, "no" if level["obstacles"] else "yes"]


def _deviations(rows: list[dict[str, Any]]) -> list[str]:
    # Under the name of their repository: this one has a folder of examples, too.
    body = [[row["name"], f"rl/{row['path']}".replace(", ", ", rl/"), row["note"]] for row in rows]
    return ["Their places, and where they deviate:\n", table(["name", "script", "deviates"], body)]


def _obstacles(rows: list[dict[str, Any]], levels: list[str]) -> list[str]:
    lines = []
    for row in rows:
        for level in levels:
            found = row["levels"].get(level, {})
            place = f"{row['name']}, level {level}"
            if "error" in found:
                lines.append(f"- {place}: {found['error'].splitlines()[0]}")
            if found.get("differs"):
                lines.append(f"- {place}: differs in {found['differs']}")
            reasons = [
                text for text in found.get("obstacles", ()) if not text.endswith("TorchRL does")
            ]
            lines += [f"- {place}: {text}" for text in reasons]
    return ["Differences and obstacles:\n", "\n".join(lines) + "\n"] if lines else []
