"""Memory of a collection; each measurement is a process of its own (Linux).

python benchmarks/memory.py peak tdcollect --steps 128
python benchmarks/memory.py growth tdcollect --iterations 1000
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COLLECTORS = ("tdcollect", "torchrl")


def measure(what: str, collector: str, **options: int) -> dict[str, Any]:
    """Run a measurement of this module, ``"peak"`` or ``"growth"``, in a new process."""
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-W", "ignore", __file__, what, collector, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _peak(collector: str, steps: int, iterations: int) -> dict[str, Any]:
    """Peak memory of the pixel cell, above that of the process once env and policy were used.

    Each batch is read and dropped before the next is collected.
    """
    import torch
    import workloads

    torch.manual_seed(0)
    env = _pixel_env(16)
    policy = workloads.discrete_actor(workloads.pong_net())
    with torch.no_grad():
        env.step(policy(env.reset()))
    gc.collect()
    idle = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    batches = _batches(collector, env, policy, steps)
    for _ in range(iterations):
        batch = next(batches)
        batch["next", "reward"].sum().item()
        size = sum(value.numel() * value.element_size() for value in batch.values(True, True))
        del batch
    above = _status("VmHWM") - idle
    return {"idle": idle, "batch": size, "peak_above_idle": above, "in_batches": above / size}


def _growth(collector: str, steps: int, iterations: int) -> dict[str, Any]:
    """Memory after each tenth of a run of small batches, and its slope in bytes per iteration."""
    import numpy as np
    import torch
    import workloads

    import tdcollect

    torch.manual_seed(0)
    env = tdcollect.make_env("CartPole-v1", 8, categorical_action_encoding=True)
    batches = _batches(collector, env, workloads.discrete_actor(workloads.mlp(4, 2)), steps)
    for _ in range(max(1, iterations // 10)):
        next(batches)
    at, resident = [], []
    for i in range(iterations + 1):
        if i % max(1, iterations // 10) == 0:
            gc.collect()
            at.append(i)
            resident.append(_status("VmRSS"))
        next(batches)
    return {
        "iterations": at,
        "resident": resident,
        "grown": resident[-1] - resident[0],
        "bytes_per_iteration": float(np.polyfit(at, resident, 1)[0]),
    }


def _pixel_env(num_envs: int) -> Any:
    import workloads

    import tdcollect

    return tdcollect.make_env(
        "Pong-v5",
        num_envs,
        backend="envpool",
        env_kwargs={"num_threads": workloads.POOL_THREADS},
        categorical_action_encoding=True,
    )


def _batches(collector: str, env: Any, policy: Any, steps: int) -> Any:
    from torchrl.collectors import Collector

    import tdcollect

    kind = tdcollect.Collector if collector == "tdcollect" else Collector
    frames = env.batch_size.numel() * steps
    return iter(
        kind(
            env,
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
    )


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {name} in /proc/self/status")


def _main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("peak", "growth"), help="the measurement")
    parser.add_argument("collector", choices=COLLECTORS)
    parser.add_argument("--steps", type=int, default=16, help="T")
    parser.add_argument("--iterations", type=int, default=1000, help="number of batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = _peak if options.what == "peak" else _growth
    print(json.dumps(run(options.collector, options.steps, options.iterations)))


if __name__ == "__main__":
    _main()
