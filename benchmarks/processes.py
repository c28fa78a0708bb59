"""Collection on two processes, against TorchRL's class, and against one process with their slots.

    OMP_NUM_THREADS=1 python benchmarks/processes.py

TorchRL's `MultiSyncCollector` takes each of its batched envs in turn; the fastest counts. Processes
take one torch thread each. Sides take turns, and wait while another has its turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import workers_report
import workloads
from bench import QUICK, Effort, Program, alternate, ratios, spread
from burn import Burn, rounds_of
from torchrl import collectors as theirs
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv

import tdcollect
from tdcollect import collectors as ours

PROCESSES = 2
TARGET = 3.0
COSTS = (30, 100, 300, 1000)
OURS, ONE = "tdcollect", "tdcollect, one process"
CHEETAH = "HalfCheetah-v5"


class Task:
    """Envs of each library, and a policy for them; workers have it by name."""

    def __init__(self, env: Any, continuous: bool = False):
        self.env, self.continuous = env, continuous

    def policy(self) -> Any:
        """A policy of 64 x 64 with log-probabilities."""
        torch.manual_seed(0)
        if self.continuous:
            return workloads.continuous_actor(workloads.cheetah_net())
        return workloads.discrete_actor(workloads.mlp(4, 2))

    def ours(self, slots: int) -> EnvBase:
        """The slots as tdcollect's env."""
        return tdcollect.make_env(self.env, slots, categorical_action_encoding=True)

    def vector(self, slots: int) -> EnvBase:
        """The slots as a vector env of gymnasium."""
        return workloads.torchrl_env(self.env, slots)

    def serial(self, slots: int) -> EnvBase:
        """The slots as TorchRL's `SerialEnv`."""
        return SerialEnv(slots, self._single())

    def parallel(self, slots: int) -> EnvBase:
        """The slots as TorchRL's `ParallelEnv`, one process each."""
        return ParallelEnv(slots, self._single(), mp_start_method="fork")

    def _single(self) -> Callable[[], EnvBase]:
        return partial(GymEnv, self.env, categorical_action_encoding=True)


KINDS = {
    "TorchRL, GymWrapper of SyncVectorEnv": Task.vector,
    "TorchRL, SerialEnv": Task.serial,
    "TorchRL, ParallelEnv": Task.parallel,
}


def processes(effort: Effort) -> dict[str, Any]:
    """Ratios of other ways to collect, to tdcollect's on two processes, for each workload."""
    quick = effort == QUICK
    slots = 2 if quick else 8
    gym_ids = {"CartPole-v1": Task("CartPole-v1"), CHEETAH: Task(CHEETAH, continuous=True)}
    burning = {f"{cost} us per step": Task(partial(Burn, rounds_of(cost * 1e-6))) for cost in COSTS}
    rows = []
    with from_a_fork_server():
        for name, task in gym_ids.items():
            rows.append(_against(name, task, slots, KINDS, effort))
        for name, task in ({} if quick else burning).items():
            rows.append(_against(name, task, slots, {}, effort))
    return {"slots": slots, "target": TARGET, "rows": rows}


@contextmanager
def from_a_fork_server() -> Iterator[None]:
    """Start TorchRL's processes from a server that has imported what they need."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["processes"])
    yield
    multiprocessing.set_start_method(before, force=True)


def _against(
    name: str, task: Task, slots: int, kinds: dict[str, Any], effort: Effort
) -> dict[str, Any]:
    programs: dict[str, Program] = {}
    try:
        programs[OURS] = _multi(ours.MultiSyncCollector, task, task.ours, slots, effort.steps)
        programs[ONE] = workloads.ours(task.ours(PROCESSES * slots), task.policy(), effort.steps)
        for kind, env in kinds.items():
            make = partial(env, task)
            programs[kind] = _multi(theirs.MultiSyncCollector, task, make, slots, effort.steps)
        times = alternate(programs, effort)
    finally:
        for program in programs.values():
            program.close()
    return {
        "workload": name,
        "frames_per_second": 1 / spread(times[OURS]).median,
        "ratios": {kind: spread(values)._asdict() for kind, values in ratios(times, OURS).items()},
    }


def _multi(
    kind: Any, task: Task, make: Callable[[int], EnvBase], slots: int, steps: int
) -> Program:
    frames = PROCESSES * slots * steps
    collector = kind(
        [partial(make, slots)] * PROCESSES,
        task.policy(),
        frames_per_batch=frames,
        total_frames=-1,
        num_threads=1,
        num_sub_threads=1,
        auto_register_policy_transforms=False,  # no policy here has a hidden state
    )
    batches = iter(collector)
    return Program(partial(next, batches), frames, collector.shutdown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torchrl")
    effort = QUICK if parser.parse_args().quick else Effort()
    print("\n".join(workers_report.processes(processes(effort))))
