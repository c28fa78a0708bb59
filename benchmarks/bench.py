"""Your own figure: both collectors on your env, in turns; and how the benchmarks time programs.

    python benchmarks/bench.py                                # a minute, on CartPole-v1
    python benchmarks/bench.py HalfCheetah-v5 --num-envs 16

Prints the ratios of two pipelines, and whether the batches are the same bits, which is the status.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, GymEnv, GymWrapper, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, TanhNormal

from tdcollect.collect.collector import Collector
from tdcollect.display import count_text, text_table
from tdcollect.envs.make import make_env
from tdcollect.packages import versions
from tdcollect.progress import progress_bar
from tdcollect.threads import with_threads

Name = TypeVar("Name", bound=Hashable)
Batches: TypeAlias = list[dict[str, torch.Tensor]]


class Program(NamedTuple):
    """A program to time.

    ``run`` collects one batch of ``frames`` rows; ``close`` frees its resources.
    """

    run: Callable[[], object]
    frames: int
    close: Callable[[], object] = lambda: None


class Effort(NamedTuple):
    """The amount of measurement.

    Each program has ``rounds`` turns of about ``seconds`` each, in batches of ``steps`` steps (T).
    """

    steps: int = 128
    rounds: int = 11
    seconds: float = 0.2


QUICK = Effort(steps=16, rounds=2, seconds=0.005)


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """The median and quartiles of some values."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(low), float(high))


def alternate(
    programs: Mapping[Name, Program], effort: Effort, after: Callable[[], object] = lambda: None
) -> dict[Name, list[float]]:
    """Seconds per frame of each program in each round.

    Each program first collects two batches that are not counted; the second determines how many
    batches fill a turn. Each round begins with another program; ``after`` is called at its end.
    """
    batches = {}
    for name, program in programs.items():
        program.run()
        batches[name] = max(1, round(effort.seconds / _seconds(program, 1)))
    gc.collect()
    gc.freeze()  # so that garbage collection in one program does not visit another's objects
    times: dict[Name, list[float]] = {name: [] for name in programs}
    names = list(programs)
    try:
        for turn in range(effort.rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                took = _seconds(programs[name], batches[name])
                times[name].append(took / (batches[name] * programs[name].frames))
            after()
    finally:
        gc.unfreeze()
    return times


def _seconds(program: Program, batches: int) -> float:
    start = time.perf_counter()
    for _ in range(batches):
        program.run()
    return time.perf_counter() - start


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, list[float]]:
    """Ratios of each other program's time to that of ``base`` in the same round."""
    return {
        name: [other / ours for other, ours in zip(values, times[base], strict=True)]
        for name, values in times.items()
        if name != base
    }


def processor() -> str:
    """The model of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


OURS, THEIRS = "tdcollect", "TorchRL"


def bench(env_id: str = "CartPole-v1", num_envs: int = 8, seconds: float = 60.0) -> dict[str, Any]:
    """Time two pipelines under this package's collector and under TorchRL's, in turns.

    One is :func:`tdcollect.make_env` beside TorchRL's fastest env that loses no transition; the
    other is TorchRL's env with four of its transforms, under both collectors. The policy is a new
    network with two layers of 64 units. Torch has one thread. The first batches of both collectors,
    in the same env and from the same seeds, are compared bit by bit.

    Args:
        env_id: a gymnasium id; its observations are a Box ``[F]``, its actions Discrete or Box.
        num_envs: slots of the first pipeline; the second has one.
        seconds: about how long this takes, warming up apart.

    Returns:
        The machine, the versions, and for each pipeline microseconds per frame and the ratio of
        TorchRL's time to ours (median and quartiles over rounds), with the first entry whose bits
        differ, or None.

    Raises:
        ValueError: for an env with other spaces, or numbers that are not positive.
    """
    if num_envs < 1 or not seconds > 0:
        raise ValueError(
            f"expected num_envs and seconds to be positive, got {num_envs} and {seconds}"
        )
    single = gym.make(env_id)
    observations, actions = single.observation_space, single.action_space
    single.close()
    flat = isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1
    bounded = isinstance(actions, gym.spaces.Box) and actions.is_bounded()
    if not flat or not (bounded or isinstance(actions, gym.spaces.Discrete)):
        raise ValueError(
            "expected an env with Box observations of one axis, and Discrete or bounded Box "
            f"actions, got {observations} and {actions}; time your own pipeline in its script"
        )

    def vector() -> EnvBase:
        mode = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
        return GymWrapper(gym.make_vec(env_id, num_envs, "sync", vector_kwargs=mode))

    def transformed() -> EnvBase:
        stack = T.Compose(T.InitTracker(), T.DoubleToFloat(), T.RewardSum(), T.StepCounter())
        return TransformedEnv(GymEnv(env_id), stack)

    pipelines: dict[str, tuple[Callable[[], EnvBase], Callable[[], EnvBase]]] = {
        f"make_env, {count_text(num_envs, 'env')}": (partial(make_env, env_id, num_envs), vector),
        "GymEnv, four transforms": (transformed, transformed),
    }
    effort = Effort()
    effort = effort._replace(seconds=seconds / (2 * len(pipelines) * effort.rounds))
    found: dict[str, Any] = {"env": env_id, "steps": effort.steps, "processor": processor()}
    found |= {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "versions": versions()}
    rounds = len(pipelines) * effort.rounds
    with (
        with_threads(1),
        torch.random.fork_rng(devices=[]),
        progress_bar(rounds, "rounds") as bar,
    ):
        rows = [
            {"pipeline": name} | _row(*envs, actions, effort, bar.update)
            for name, envs in pipelines.items()
        ]
    return found | {"load_after": os.getloadavg()[0], "pipelines": rows}


def _row(
    ours: Callable[[], EnvBase],
    theirs: Callable[[], EnvBase],
    actions: gym.Space[Any],
    effort: Effort,
    after: Callable[[], object],
) -> dict[str, Any]:
    with ExitStack() as stack:

        def program(collector: Any, make: Callable[[], EnvBase]) -> Program:
            torch.manual_seed(0)
            env = make()
            env.set_seed(0)
            made = collecting(collector, env, _actor(env, actions), effort.steps)
            stack.callback(made.close)
            return made

        first, second = program(Collector, ours), program(TorchRLCollector, ours)
        differs = _difference(_batches(first), _batches(second))
        times = alternate({OURS: first, THEIRS: program(TorchRLCollector, theirs)}, effort, after)
    return {
        "us_per_frame": {name: 1e6 * spread(values).median for name, values in times.items()},
        "ratio": spread(ratios(times, OURS)[THEIRS])._asdict(),
        "differs": differs,
    }


def collecting(kind: Any, env: EnvBase, policy: Any, steps: int) -> Program:
    """Batches of ``steps`` steps of a collector of class ``kind``."""
    frames = env.batch_size.numel() * steps
    collector = kind(
        env,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        auto_register_policy_transforms=False,  # the policy has no hidden state
    )
    batches = iter(collector)
    return Program(partial(next, batches), frames, collector.shutdown)


def _actor(env: EnvBase, actions: gym.Space[Any]) -> ProbabilisticActor:
    size = env.observation_spec["observation"].shape[-1]
    options: dict[str, Any] = {"in_keys": ["logits"], "distribution_class": OneHotCategorical}
    outputs, last = getattr(actions, "n", 0), []
    if isinstance(actions, gym.spaces.Box):
        bounds = {"low": torch.as_tensor(actions.low), "high": torch.as_tensor(actions.high)}
        options = {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal}
        options["distribution_kwargs"] = bounds
        outputs, last = 2 * int(np.prod(actions.shape)), [NormalParamExtractor()]
    net = nn.Sequential(_Single(), MLP(size, outputs, num_cells=[64, 64]), *last)
    module = TensorDictModule(net, ["observation"], options["in_keys"])
    return ProbabilisticActor(module, return_log_prob=True, **options)


class _Single(nn.Module):
    """Casts to single precision: MuJoCo's observations are double."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.float()


def _batches(program: Program) -> Batches:
    """Two batches, from the same random numbers."""
    torch.manual_seed(1)
    batches: list[Any] = [program.run().clone() for _ in range(2)]  # type: ignore[attr-defined]
    return [{str(key): batch[key] for key in batch.keys(True, True)} for batch in batches]


def _difference(first: Batches, second: Batches) -> str | None:
    """The first entry in which batches differ in a bit, if there is one."""
    for one, other in zip(first, second, strict=True):
        for key in {**one, **other}:
            pair = [batch[key].numpy() for batch in (one, other) if key in batch]
            kinds = {(array.dtype, array.shape, array.tobytes()) for array in pair}
            if len(pair) < 2 or len(kinds) > 1:
                return key
    return None


def bench_text(found: Mapping[str, Any]) -> str:
    """The figures of :func:`bench` as a table, with what they depend on."""
    names = ("torch", "torchrl", "tensordict", "gymnasium")
    packages = ", ".join(f"{name} {found['versions'][name]}" for name in names)
    rows = []
    for row in found["pipelines"]:
        micro = [f"{row['us_per_frame'][name]:.3g} us" for name in (OURS, THEIRS)]
        median, low, high = (f"{part:.2f}" for part in row["ratio"].values())
        same = "same bits" if row["differs"] is None else f"differ in {row['differs']}"
        rows.append([row["pipeline"], *micro, f"{median} ({low} to {high})", same])
    return (
        f"{found['env']}, T={found['steps']}, one torch thread; time per frame, medians of rounds\n"
        f"{found['processor']}, {found['cores']} cores, load {found['load_before']:.1f} before and "
        f"{found['load_after']:.1f} after\n{packages}\n\n"
        + text_table(rows, ["pipeline", OURS, THEIRS, "TorchRL's time over ours", "batches"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env", nargs="?", default="CartPole-v1", help="a gymnasium id")
    parser.add_argument("--num-envs", type=int, default=8, help="number of slots")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long this takes")
    arguments = parser.parse_args()
    found = bench(arguments.env, arguments.num_envs, arguments.seconds)
    print(bench_text(found))
    return int(any(row["differs"] for row in found["pipelines"]))


if __name__ == "__main__":
    sys.exit(main())
