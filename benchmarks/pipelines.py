"""TorchRL's training scripts under TorchRL's collector and under tdcollect's.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --only sac --only ppo_mujoco --level 1

Level 1 changes the collector's import, level 2 those of the envs, too. For each script and level,
the first batches are compared to the bit, ``explain()`` is asked for obstacles, and the programs
take turns. Prints a table, and writes pipelines.md and pipelines.json into runs/bench.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pipelines_report
import pixel_floor
import short_pipelines
import torch
import torchrl_scripts as scripts
from bench import QUICK, Effort, Program, alternate, ratios, spread
from machine import machine, versions
from tensordict import TensorDictBase
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

import tdcollect

TORCHRL = "TorchRL"
LEVELS = {1: "collector's import", 2: "envs' imports, too"}
SIZE = scripts.Size(frames=256, slots=8, random_frames=256, pixel_frames=128)
SMALL = scripts.Size(frames=16, slots=2, random_frames=16, steps=6)
EFFORT = Effort(rounds=5, seconds=0.25)
TRAINING = "training scripts (sota-implementations)"
GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    TRAINING: lambda row: row["counts"],
    "examples, tutorials and variants": lambda row: not row["counts"],
}
COMPARED = 2
"""Batches that are compared; the first has random actions where a script asks for them."""


class Case(NamedTuple):
    """A pipeline to measure: its parts from env classes; whether it sets the collector's seed."""

    name: str
    make: Callable[[scripts.Envs], scripts.Pipeline]
    sets_seed: bool = False


class Run:
    """One collector on one pipeline, from the same random states as the others.

    Its seed is set only with ``as_written``.
    """

    def __init__(self, case: Case, kind: Any, envs: scripts.Envs, as_written: bool = False):
        _seed(0)
        pipeline = case.make(envs)
        env = pipeline.seeded_env()
        _seed(1)
        try:
            self.collector = kind(env, pipeline.policy, **pipeline.options)
        except Exception:
            _close(env)  # or its workers would keep this process alive
            raise
        if as_written and case.sets_seed:
            self.collector.set_seed(scripts.SEED)
        self._batches: Any = iter(self.collector)
        self.record = []
        for _ in range(COMPARED):
            batch = next(self._batches).clone()
            self.record.append((batch, torch.get_rng_state()))

    def program(self) -> Program:
        """The rest of the batches, to time."""
        frames = self.record[-1][0].numel()
        return Program(partial(next, self._batches), frames, self.close)

    def close(self) -> None:
        """Free envs and workers."""
        self._batches.close()
        self.collector.shutdown()


def pipelines(
    effort: Effort = EFFORT,
    only: list[str] | None = None,
    levels: tuple[int, ...] = (1, 2),
    say: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """The figures of each script's pipeline."""
    rows = []
    for script in scripts.SCRIPTS.values():
        if only and script.name not in only:
            continue
        say(script.name)
        row: dict[str, Any] = {"name": script.name, "path": script.path, "note": script.note}
        row["counts"] = script.is_training()
        missing = script.missing()
        if missing:
            row["left_out"] = f"{', '.join(missing)} cannot be imported"
        else:
            case = Case(script.name, partial(script.make, size=_size(effort)), script.sets_seed)
            try:
                row |= measure(case, effort, levels, pixel_floor.floor(script.name))
            except Exception as error:
                row["left_out"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        rows.append(row)
    return rows


def measure(
    case: Case,
    effort: Effort,
    levels: tuple[int, ...] = (1, 2),
    floor: Mapping[str, Program] = MappingProxyType({}),
) -> dict[str, Any]:
    """The figures of one pipeline: at each level its bits, its obstacles and its ratio.

    ``floor`` has programs that take turns with it; no loop can take less than their sum.
    """
    row: dict[str, Any] = {"levels": {}}
    ours = scripts.ours()
    runs: dict[str, Run] = {}
    try:
        runs[TORCHRL] = Run(case, TorchRLCollector, scripts.TORCHRL)
        for level in levels:
            envs = scripts.TORCHRL if level == 1 else ours
            if envs is None:
                row["levels"][str(level)] = {"error": "tdcollect.envs has no GymEnv yet"}
                continue
            try:
                run = Run(case, tdcollect.Collector, envs)
            except Exception as error:  # the table shows it beside the others' figures
                row["levels"][str(level)] = {"error": f"{type(error).__name__}: {error}"}
                continue
            runs[str(level)] = run
            row["levels"][str(level)] = {
                "differs": difference(run.record, runs[TORCHRL].record),
                "obstacles": scripts.obstacles(run.collector.explain()),
                "explained": [list(part) for part in run.collector.explain()],
            }
            if case.sets_seed:
                row["levels"][str(level)]["as_written"] = _as_written(case, envs)
        programs = {name: run.program() for name, run in runs.items()}
        times = alternate({**programs, **floor}, effort)
    finally:
        for made in (*runs.values(), *floor.values()):
            made.close()
    row["us_per_frame"] = {
        name: spread([1e6 * value for value in values])._asdict() for name, values in times.items()
    }
    if floor:
        row["floor_us_per_frame"] = sum(row["us_per_frame"][name]["median"] for name in floor)
    for name, values in times.items():
        if name in row["levels"]:
            ratio = ratios({TORCHRL: times[TORCHRL], name: values}, name)[TORCHRL]
            row["levels"][name]["ratio"] = spread(ratio)._asdict()
    return row


def _as_written(case: Case, envs: scripts.Envs) -> str:
    """The first entry in which the batches differ where the collector's seed is set."""
    records = []
    for kind, of in ((tdcollect.Collector, envs), (TorchRLCollector, scripts.TORCHRL)):
        run = Run(case, kind, of, as_written=True)
        run.close()
        records.append(run.record)
    return difference(*records)


def shorts(
    effort: Effort, only: list[str] | None, levels: tuple[int, ...], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The figures of the short pipelines, each with its target and its floor."""
    rows = []
    for short in short_pipelines.SHORT:
        if only and short.name not in only:
            continue
        say(short.name)
        case = Case(short.name, partial(short.make, size=_size(effort)))
        both = tuple(level for level in levels if level in short.levels)
        found = measure(case, effort, both, short_pipelines.floor(short, effort.steps))
        rows.append({"name": short.name, "title": short.title, "target": short.target} | found)
    return rows


def difference(ours: list[Any], theirs: list[Any]) -> str:
    """The first entry in which two records differ; empty if none does."""
    for i, ((batch, state), (expected, expected_state)) in enumerate(
        zip(ours, theirs, strict=True)
    ):
        found = _unequal(batch, expected)
        if not found and not torch.equal(state, expected_state):
            found = "torch's random state"
        if found:
            return f"batch {i}: {found}"
    return ""


def _unequal(batch: TensorDictBase, expected: TensorDictBase) -> str:
    ours, theirs = (
        {str(key): value for key, value in td.items(True, True)} for td in (batch, expected)
    )
    if ours.keys() != theirs.keys():
        return f"entries {sorted(ours.keys() ^ theirs.keys())}"
    if batch.batch_size != expected.batch_size:
        return f"batch size {tuple(batch.batch_size)} for {tuple(expected.batch_size)}"
    for key, value in theirs.items():
        if not _same(ours[key], value):
            return key
    return ""


def _same(ours: Any, theirs: Any) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return bool(ours == theirs)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours, theirs) or torch.equal(
        ours.isnan() | (ours == theirs), theirs == theirs
    )


def _size(effort: Effort) -> scripts.Size:
    return SMALL if effort.seconds <= QUICK.seconds else SIZE


def _close(env: Any) -> None:
    if isinstance(env, EnvBase) and not env.is_closed:
        env.close(raise_if_closed=False)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  envs and transforms may draw from it
    random.seed(seed)


@contextmanager
def _workers_start_quickly() -> Iterator[None]:
    """Fork workers from a server that has imported torch; spawned, each takes seconds."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(["torchrl.envs", "torchrl.collectors", "tdcollect"])
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per level and group: how many ran, were equal, were on arrays; the mean and least ratio."""
    found = []
    for level in LEVELS:
        for group, member in GROUPS.items():
            ran = [
                row["levels"].get(str(level), {}) for row in rows if "levels" in row and member(row)
            ]
            ran = [entry for entry in ran if "ratio" in entry]
            if not ran:
                continue
            whole = [entry for entry in ran if not entry["obstacles"]]
            line = {
                "level": level,
                "group": group,
                "scripts": len(ran),
                "equal": sum(not entry["differs"] for entry in ran),
                "as_written": sum(
                    not (entry["differs"] or entry.get("as_written")) for entry in ran
                ),
                "on_arrays": len(whole),
                "mean": _geometric_mean(ran),
                "mean_on_arrays": _geometric_mean(whole),
                "lowest": min(entry["ratio"]["median"] for entry in ran),
            }
            found.append(line)
    return found


def _geometric_mean(entries: list[dict[str, Any]]) -> float | None:
    if not entries:
        return None
    return math.exp(sum(math.log(entry["ratio"]["median"]) for entry in entries) / len(entries))


def results_of(
    effort: Effort = EFFORT,
    only: list[str] | None = None,
    levels: tuple[int, ...] = (1, 2),
    say: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Everything that the report's section needs."""
    with _workers_start_quickly():
        rows = pipelines(effort, only, levels, say)
        short = shorts(effort, only, levels, say)
    return {
        "scripts": rows,
        "short": short,
        "identity": short_pipelines.identity(effort) if short else None,
        "summary": summary(rows),
        "unavailable": scripts.UNAVAILABLE,
        "resize_stand_in": scripts.RESIZE_STAND_IN,
        "settings": effort._asdict(),
    }


def main(arguments: list[str]) -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*scripts.SCRIPTS, *(short.name for short in short_pipelines.SHORT)]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--level", type=int, choices=list(LEVELS), help="this level alone")
    parser.add_argument("--rounds", type=int, default=EFFORT.rounds)
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/bench"))
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    effort = QUICK if options.quick else EFFORT._replace(rounds=options.rounds)
    levels = (options.level,) if options.level else tuple(LEVELS)
    results = results_of(
        effort, options.only, levels, lambda name: print(f"... {name}", file=sys.stderr, flush=True)
    )
    results |= {"machine": machine(), "versions": versions()}
    text = "\n".join(pipelines_report.section(results))
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "pipelines.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output_dir / "pipelines.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
