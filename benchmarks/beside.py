"""The share of a training's time that evaluation beside it costs, with a core free for it.

PPO on CartPole-v1 with one torch thread, in two copies that take turns: one triggers an evaluation
of 100 episodes every ten batches, the other none. The turns of the first one end before its
evaluations are waited for; those run beside it.

    python benchmarks/beside.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import workers_report
from bench import Effort, spread
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import tdcollect

ENV, SLOTS, FRAMES, EPOCHS = "CartPole-v1", 8, 256, 4
EVERY, BATCHES, EPISODES = 10, 30, 100
TARGET = 0.02


class Training:
    """A training that goes on batch by batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        env = tdcollect.make_env(ENV, SLOTS)
        self.policy = ProbabilisticActor(
            TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
            in_keys=["logits"],
            spec=env.action_spec,
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        )
        critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
        self._advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
        self._loss = ClipPPOLoss(self.policy, critic)
        # So slow that the work stays the same: episodes of a better policy are longer.
        self._optimizer = torch.optim.Adam(self._loss.parameters(), 1e-9)
        collector = tdcollect.Collector(env, self.policy, frames_per_batch=FRAMES, total_frames=-1)
        collector.set_seed(0)
        self._batches: Iterator[Any] = iter(collector)

    def step(self) -> None:
        """Collect a batch and learn from it."""
        batch = next(self._batches)
        with torch.no_grad():
            self._advantage(batch)
        for _ in range(EPOCHS):
            losses = self._loss(batch)
            self._optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            self._optimizer.step()


def beside(effort: Effort) -> dict[str, Any]:
    """Measure; each round begins with the other training."""
    plain, evaluated = Training(), Training()
    wall: list[float] = []
    cpu: list[float] = []
    calls: list[float] = []
    busy: list[float] = []
    with tdcollect.Evaluator(ENV, evaluated.policy, num_trajectories=EPISODES) as evaluator:
        _turn(plain, None, [])
        _turn(evaluated, evaluator, [])
        while evaluator.wait() is not None:
            pass
        for turn in range(effort.rounds):
            found = {}
            for training in (plain, evaluated) if turn % 2 else (evaluated, plain):
                other = evaluator if training is evaluated else None
                found[training] = _turn(training, other, calls)
                start = time.perf_counter()
                while evaluator.wait() is not None:
                    pass
                if other is not None:
                    busy.append(time.perf_counter() - start)
            wall.append(found[evaluated][0] / found[plain][0] - 1)
            cpu.append(found[evaluated][1] / found[plain][1] - 1)
        # Of what runs in the training process itself; other load does not change it much.
        (thread,) = (t for t in threading.enumerate() if t.name == "tdcollect-evaluator")
        clock = time.pthread_getcpuclockid(thread.ident)
        in_thread = time.clock_gettime(clock) / (effort.rounds + 1)
    own = sum(calls) / effort.rounds + in_thread
    start = time.perf_counter()
    tdcollect.evaluate(ENV, evaluated.policy, EPISODES, progress=False)
    return {
        "share of wall time": spread(wall)._asdict(),
        "share of the process's CPU time": spread(cpu)._asdict(),
        "share of calls and thread": own / found[plain][0],
        "ms of the thread per turn": 1000 * in_thread,
        "ms per call": spread([1000 * call for call in calls])._asdict(),
        "seconds per turn": found[plain][0],
        "seconds per evaluation": time.perf_counter() - start,
        "seconds waited after a turn": spread(busy)._asdict(),
        "target": TARGET,
    }


def _turn(
    training: Training, evaluator: tdcollect.Evaluator | None, calls: list[float]
) -> tuple[float, float]:
    """Run some batches; returns their wall time and this process's CPU time, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in range(BATCHES):
        training.step()
        if evaluator is not None and batch % EVERY == 0:
            start = time.perf_counter()
            evaluator.trigger_eval(step=batch)
            calls.append(time.perf_counter() - start)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    torch.set_num_threads(1)
    results = beside(Effort(rounds=parser.parse_args().rounds))
    print(results)
    print("\n".join(workers_report.beside(results)))
