"""Common parts of the GPU benchmarks: the setting of a run, programs that wait for the device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from bench import QUICK, Effort, Program, alternate, ratios, spread

CORES = len(os.sched_getaffinity(0))

Row = dict[str, Any]
"""The result of one measurement, for JSON."""

Plan = Iterator[tuple[str, Callable[[], Row]]]
"""Named measurements, the most important first."""


class LeftOut(Exception):
    """Raised by a measurement that cannot be taken here; says why."""


class Setting(NamedTuple):
    """The setting of a run.

    Attributes:
        device: of the policies: ``"cuda:0"`` or ``"cpu"``.
        quick: use small sizes, to see that it runs.
        torchrl: TorchRL's fastest correct setting: its kind of env, and its collector's options.
    """

    device: str
    quick: bool
    torchrl: dict[str, Any]

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device != "cpu"

    def slots(self, *counts: int) -> tuple[int, ...]:
        """The numbers of slots to measure."""
        return (2,) if self.quick else counts

    def effort(self, slots: int, frames: int = 8192, most: int = 64) -> Effort:
        """Rounds, and T for about so many frames per batch."""
        if self.quick:
            return QUICK._replace(steps=4)
        return Effort(steps=max(4, min(most, frames // slots)), rounds=5, seconds=0.15)

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()


def need(*modules: str) -> None:
    """Leave a measurement out if a package is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise LeftOut(f"{module} is not installed")


def collecting(
    kind: Any, env: Any, policy: Any, steps: int, setting: Setting, **options: Any
) -> Program:
    """Batches of a collector; each ends when the device has done its work."""
    frames = env.batch_size.numel() * steps
    collector = kind(
        env,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        auto_register_policy_transforms=False,  # no policy here has a hidden state
        **{"policy_device": setting.device, **options},
    )
    batches = iter(collector)

    def run() -> None:
        next(batches)
        setting.wait()

    return Program(run, frames, collector.shutdown)  # which closes the env


def started(
    makes: dict[str, Callable[[], Program]], may_fail: Collection[str] = ()
) -> tuple[dict[str, Program], dict[str, str]]:
    """Programs that have run three times, and the errors of those that failed.

    The first calls compile, warm up and capture. An error of one that may not fail is raised.
    """
    programs: dict[str, Program] = {}
    raised: dict[str, str] = {}
    try:
        for name, make in makes.items():
            try:
                made = programs[name] = make()
                for _ in range(3):
                    made.run()
            except Exception as error:
                if name not in may_fail:
                    raise
                raised[name] = first_line(error)
                if name in programs:
                    programs.pop(name).close()
    except BaseException:
        for program in programs.values():
            program.close()
        raise
    return programs, raised


def in_turns(programs: dict[str, Program], effort: Effort) -> dict[str, list[float]]:
    """As :func:`measure.alternate`, after which the programs are closed."""
    try:
        return alternate(programs, effort)
    finally:
        for program in programs.values():
            program.close()


def compared(
    workload: str,
    makes: dict[str, Callable[[], Program]],
    slots: int,
    effort: Effort,
    aims: dict[str, float],
) -> Row:
    """Time programs in turns; ratios are over the first, which alone may not fail.

    ``aims`` are for the times of others over that of the first.
    """
    base = next(iter(makes))
    programs, raised = started(makes, may_fail={*makes} - {base})
    times = in_turns(programs, effort)
    return {
        "workload": f"{workload}, N={slots}",
        "T": effort.steps,
        "base": base,
        "us_per_step": {name: median(values) * slots * 1e6 for name, values in times.items()},
        "ratios": {name: spread(values)._asdict() for name, values in ratios(times, base).items()},
        "target": aims,
        "raised": raised,
    }


def median(values: list[float]) -> float:
    """The median of some values."""
    return spread(values).median


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
