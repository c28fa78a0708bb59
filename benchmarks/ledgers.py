"""Time and memory per episode, for ledgers of up to a million test episodes (Linux).

    python benchmarks/ledgers.py
    python benchmarks/ledgers.py --episodes 1000 10000

Episodes of one step, on 16 slots of a small gymnasium env, are evaluated into a directory with all
its files; then come the statistics alone, loading the directory, and a comparison with the same
episodes with other returns. Each number of episodes runs in its own process; times are CPU times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

HEADER = [
    "episodes",
    "evaluate, us per episode",
    "summary, s",
    "load, s",
    "compare, s",
    "held, B per episode",
    "peak, B per episode",
    "report.html, kB",
]


class OneStep(gym.Env[Any, Any]):
    """An env whose episodes end at the first step; the reward is drawn at the reset."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._drawn = self.np_random.random(1, np.float32)
        return self._drawn, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._drawn, float(self._drawn[0]), True, False, {}


def measure(episodes: int) -> dict[str, Any]:
    """One row of the table, measured in this process."""
    from tdcollect import EvaluationResult, compare, evaluate

    row: dict[str, Any] = {"episodes": episodes}

    def timed(name: str, call: Any) -> Any:
        start = time.process_time()
        found = call()
        row[name] = time.process_time() - start
        return found

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        evaluate(OneStep, None, 100, output_dir=root / "first", progress=False)  # imports, once
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        result = timed(
            "evaluate",
            lambda: evaluate(OneStep, None, episodes, output_dir=root / "run", progress=False),
        )
        row["peak"] = (_resident("VmHWM") - before) / episodes
        row["held"] = (_resident() - before) / episodes
        timed("summary", result.summary)
        loaded = timed("load", lambda: EvaluationResult.load(root / "run"))
        noise = np.random.default_rng(0).normal(size=episodes).tolist()
        loaded.episodes = [
            replace(episode, episode_return=value)
            for episode, value in zip(loaded.episodes, noise, strict=True)
        ]
        timed("compare", lambda: compare(result, loaded, names=["first", "second"]))
        row["page"] = (root / "run" / "report.html").stat().st_size
    return row


def _resident(name: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {name} in /proc/self/status")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER, ["---:"] * len(HEADER)]
    for row in rows:
        per_episode = row["evaluate"] / row["episodes"] * 1e6
        lines.append(
            [
                f"{row['episodes']:,}",
                f"{per_episode:.0f}",
                *(f"{row[name]:.2f}" for name in ("summary", "load", "compare")),
                *(f"{row[name]:.0f}" for name in ("held", "peak")),
                f"{row['page'] / 1000:.0f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options.row)))
        return
    rows = []
    for episodes in options.episodes:
        command = [sys.executable, __file__, "--row", str(episodes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(table(rows))


if __name__ == "__main__":
    main()
