"""Audits of ledgers with rows that were made up, and of honest ones.

    python benchmarks/audits.py
    python benchmarks/audits.py --ledgers 100
    python benchmarks/audits.py --switches

Two policies play the same 2,000 episodes, of which each ledger has 200, drawn at random. In each of
them 15 % of the rows are made up, in one of three ways: returns raised, in the steps as well;
actions of another episode; rows of the other policy. Each is audited by 20 episodes, as it is
and made up. With `--switches`, gymnasium's own envs are evaluated, and audited under switches of
torch, NumPy and BLAS that have other instructions run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from scipy.stats import hypergeom

PLAYED, ROWS, SHARE, SAMPLE = 2000, 200, 0.15, 20
FRAUDS = ("returns raised", "actions of another episode", "rows of another policy")
SWITCHES = (
    "ATEN_CPU_CAPABILITY=default",
    "NPY_DISABLE_CPU_FEATURES=X86_V4 X86_V3",
    "OPENBLAS_CORETYPE=Prescott",
)
ENVS = (
    *("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3", "BipedalWalker-v3"),
    *("HalfCheetah-v5", "Humanoid-v5"),
)


class Drift(gym.Env[Any, Any]):
    """Episodes of up to eight steps: a walk that the action pushes, with noise."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.left = self.np_random.normal(size=2), int(self.np_random.integers(3, 9))
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = self.place + 0.1 * self.np_random.normal(size=2) + 0.3 * (2 * int(action) - 1)
        self.left -= 1
        return self.place.astype(np.float32), float(self.place.sum()), self.left == 0, False, {}


class Product(gym.Env[Any, Any]):
    """A float32 matrix product in each step, by NumPy or by torch; it forgets, or is chaotic."""

    observation_space = gym.spaces.Box(-1, 1, (96,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (96,), np.float32)

    def __init__(self, torch: bool = False, gain: float = 0.5):
        weights = np.random.default_rng(0).normal(0, gain / 96**0.5, (96, 96))
        self.weights, self.torch = weights.astype(np.float32), torch

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.left = self.np_random.uniform(-1, 1, 96).astype(np.float32), 200
        return self.place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        import torch

        one, other = self.weights, self.place + np.float32(0.1) * action
        if self.torch:
            total = (torch.from_numpy(one) @ torch.from_numpy(other)).numpy()
        else:
            total = one @ other
        self.place, self.left = np.clip(total, -1, 1), self.left - 1
        return self.place, float(self.place.sum()) + 10, False, self.left == 0, {}


def products() -> dict[str, Any]:
    """Envs of our own by name."""
    return {
        f"{'torch' if torch else 'NumPy'}, {'chaotic' if gain > 1 else 'forgetful'}": partial(
            Product, torch, gain
        )
        for torch in (False, True)
        for gain in (0.5, 4.0)
    }


def write(root: Path, manifest: Mapping[str, Any], records: Any, steps: Any) -> None:
    """Write a finished ledger of some episodes, as a program of its own."""
    from tdcollect.evaluation.ledger import sha256
    from tdcollect.evaluation.step_files import write_arrays

    (root / "steps").mkdir(parents=True)
    whole = {**manifest, "episodes": sorted(records)}
    (root / "manifest.json").write_text(json.dumps(whole))
    lines = "".join(records[index].to_json() + "\n" for index in sorted(records))
    (root / "episodes.jsonl").write_text(lines)
    files = {}
    for first in sorted({index // 1000 * 1000 for index in records}):
        of = [index for index in sorted(records) if index // 1000 * 1000 == first]
        columns = {"episode": np.repeat(np.array(of), [len(steps[index]) for index in of])}
        for name in steps[of[0]].dtype.names:
            columns[name] = np.concatenate([steps[index][name] for index in of])
        file = root / "steps" / f"{first:06d}.npz"
        write_arrays(file, columns)
        files[file.name] = sha256(file)
    digests = {
        "ledger": sha256(root / "episodes.jsonl"),
        "manifest": sha256(root / "manifest.json"),
    }
    mark = {"shard": [0, 1], **digests, "steps": files, "witness": None}
    (root / "shard.json").write_text(json.dumps(mark))


def forge(fraud: str, records: Any, steps: Any, others: Any, draw: np.random.Generator) -> Any:
    """Make up 15 % of the rows; returns records and steps."""
    records, steps = dict(records), dict(steps)
    every = sorted(records)
    for index in draw.choice(every, round(SHARE * len(every)), replace=False).tolist():
        record, own = records[index], steps[index].copy()
        if fraud == "returns raised":
            own["reward/reward"][-1] += 1.0
            value = float(own["reward/reward"].sum())
            records[index] = replace(record, episode_return=value, digest="0" * 64)
        elif fraud == "actions of another episode":
            other = steps[int(draw.choice([one for one in every if one != index]))]
            while len(other) >= 3 and np.array_equal(
                np.resize(other["action/action"], own["action/action"].shape), own["action/action"]
            ):
                other = steps[int(draw.choice([one for one in every if one != index]))]
            own["action/action"] = np.resize(other["action/action"], own["action/action"].shape)
        else:
            records[index] = others[index]
        steps[index] = own
    return records, steps


def ledgers(count: int) -> Counter[str]:
    """Audit so many ledgers, honest and made up; returns how many were blamed."""
    import tdcollect
    from tdcollect.evaluation.step_files import read_block
    from tdcollect.policies import from_function

    draw, blamed = np.random.default_rng(0), Counter[str]()
    policies = [
        from_function(lambda seen: int(seen[0] > 0)),
        from_function(lambda seen: int(seen[0] <= 0)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for place, policy in enumerate(policies):
            out = Path(folder) / f"policy{place}"
            runs.append(tdcollect.evaluate(Drift, policy, PLAYED, output_dir=out, progress=False))
        manifest = runs[0].manifest
        records, others = ({record.index: record for record in run.episodes} for run in runs)
        steps = {}
        for file in sorted((Path(folder) / "policy0" / "steps").iterdir()):
            steps.update(read_block(file))
        for place in range(count):
            own = sorted(draw.choice(PLAYED, ROWS, replace=False).tolist())
            honest = (
                {index: records[index] for index in own},
                {index: steps[index] for index in own},
            )
            fraud = FRAUDS[place % len(FRAUDS)]
            for name, rows in (
                ("honest", honest),
                (fraud, forge(fraud, *honest, others, draw)),
            ):
                root = Path(folder) / "ledger"
                write(root, manifest, *rows)
                (audit,) = tdcollect.audit(root, Drift, sample=SAMPLE, seed=place)
                shutil.rmtree(root)
                blamed[name] += bool(audit.wrong)
                blamed[f"all {name}"] += 1
    return blamed


def switches() -> None:
    """Print which envs give other bits for the same actions under switches."""
    import tdcollect

    with tempfile.TemporaryDirectory() as folder:
        for name, env in {**dict.fromkeys(ENVS), **products()}.items():
            limit = {"max_episode_steps": 100, "output_dir": Path(folder) / name}
            tdcollect.evaluate(env or name, None, 3, progress=False, **limit)
        for switch in SWITCHES:
            environment = dict(os.environ, **dict([switch.split("=")]))
            command = [sys.executable, "-W", "ignore", __file__, "--one", folder]
            print(f"\n{switch}", flush=True)
            subprocess.run(command, env=environment, check=False)


def told(folder: Path) -> None:
    """Audit each env of :func:`switches` in this process."""
    import tdcollect

    for name, env in {**dict.fromkeys(ENVS), **products()}.items():
        (audit,) = tdcollect.audit(folder / name, env, sample=None, seed=0)
        print(name, dict(Counter(audit.verdicts.values())), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ledgers", type=int, default=1000)
    parser.add_argument("--switches", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one is not None:
        told(options.one)
        return
    if options.switches:
        switches()
        return
    start = time.process_time()
    blamed = ledgers(options.ledgers)
    print("| ledgers | number | blamed |\n|---|---:|---:|")
    for name in ("honest", *FRAUDS):
        print(f"| {name} | {blamed[f'all {name}']} | {blamed[name]} |")
    false = round(SHARE * ROWS)
    exact = 1 - hypergeom.pmf(0, ROWS, false, SAMPLE)
    found = sum(blamed[name] for name in FRAUDS) / options.ledgers
    print(
        f"\nfound {found:.1%}; by drawing {SAMPLE} of {ROWS} with {false} made up {exact:.1%}, and "
        f"of endless ones {1 - (1 - SHARE) ** SAMPLE:.1%}; {time.process_time() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
