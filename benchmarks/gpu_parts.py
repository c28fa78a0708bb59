"""What a step does on the GPU, in numbers that noise does not move; and where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import Program
from gpu_collectors import CALLS, GRAPH, THEIRS, need_for, our_env, program
from gpu_device_envs import CARTPOLE as TORCH_CARTPOLE
from gpu_device_envs import cartpole
from gpu_pipelines import CARTPOLE, CHEETAH, ONE_HOT, PONG, Pipeline
from gpu_setting import Plan, Row, Setting, in_turns, median, started
from slots_alone import slots_alone
from torch.profiler import ProfilerActivity, profile

ENV, HALF_ENV, HALF = "env", "env, half", "half of the slots"
WORTH_IT = 1.2
LAUNCHES, COPIES, WAITS, BUSY = "launches", "copies", "waits", "GPU busy, us"
KINDS = {
    LAUNCHES: ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"),
    COPIES: ("cudaMemcpy", "cudaMemset"),
    WAITS: ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
"""How the calls of CUDA's runtime begin, by kind."""

MOST = {
    (ONE_HOT.title, CALLS): 23,
    (CHEETAH.title, CALLS): 16,
    **{(title, GRAPH): 1 for title in (ONE_HOT.title, CHEETAH.title, TORCH_CARTPOLE)},
}
"""The aims for launches."""


def counts(setting: Setting) -> Plan:
    """Yield the counts of launches, copies and waits per step."""
    cells = ((ONE_HOT, 8), (CHEETAH, 8), (None, 4096), (CARTPOLE, 64))
    for pipeline, count in cells[::2] if setting.quick else cells:
        (slots,) = setting.slots(count)
        title = pipeline.title if pipeline is not None else TORCH_CARTPOLE
        for side in (CALLS, GRAPH, THEIRS):
            yield f"{title}, N={slots}, {side}", partial(_counted, pipeline, slots, side, setting)


def _counted(pipeline: Pipeline | None, slots: int, side: str, setting: Setting) -> Row:
    """Count in batches of two lengths: what a batch has once, as its statistics, drops out."""
    make: Callable[[int], Program] = partial(cartpole, side, slots, setting)
    title = TORCH_CARTPOLE
    if pipeline is not None:
        need_for(pipeline)
        make, title = partial(program, pipeline, side, slots, 64, setting), pipeline.title
    lengths = (4, 8) if setting.quick else (16, 48)
    found = []
    for steps in lengths:
        programs, _ = started({side: partial(make, steps)})
        try:
            found.append(_events(programs[side], setting))
        finally:
            programs[side].close()
    further = lengths[1] - lengths[0]
    at_most = {LAUNCHES: MOST.get((title, side)), WAITS: 1 if side != THEIRS else None}
    if not setting.on_gpu:
        at_most = {}
    return {
        "workload": title,
        "N": slots,
        "side": side,
        "per_step": {kind: (found[1][kind] - found[0][kind]) / further for kind in found[0]},
        "at_most": {kind: most for kind, most in at_most.items() if most is not None},
    }


def _events(made: Program, setting: Setting) -> dict[str, float]:
    """The calls of CUDA's runtime in a batch, and the time of its kernels."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    with profile(activities=kinds) as profiler:
        made.run()
    found: dict[str, float] = dict.fromkeys([*KINDS, BUSY], 0)
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            found[BUSY] += event.self_device_time_total
        for kind, begins in KINDS.items():
            found[kind] += event.name.startswith(begins)
    return found


def shares(setting: Setting) -> Plan:
    """Yield the measurements of a step's parts."""
    for slots in setting.slots(8, 64, 256):
        for pipeline in (CARTPOLE, CHEETAH)[: 1 if setting.quick else 2]:
            yield f"{pipeline.title}, N={slots}", partial(_parts, pipeline, slots, setting)


def overlap(setting: Setting) -> Plan:
    """Yield the measurements for the model of overlap: envs on workers, or EnvPool's threads."""
    cells = ((CHEETAH, 64), (PONG, 64), (CARTPOLE, 64), (CHEETAH, 256), (PONG, 16))
    for pipeline, count in cells[:1] if setting.quick else cells:
        (slots,) = setting.slots(count)
        name = f"{pipeline.title}, N={count}"
        yield name, partial(_parts, pipeline, slots, setting, overlapping=True)


def _parts(pipeline: Pipeline, slots: int, setting: Setting, overlapping: bool = False) -> Row:
    """Time envs alone and whole steps; the rest of a step is the policy, copies and the loop."""
    need_for(pipeline)
    effort = setting.effort(slots)
    effort = effort._replace(rounds=min(effort.rounds, 3), seconds=min(effort.seconds, 0.1))

    # All programs have one env: no slot is at an episode's end when a batch is full.
    envs = {count: our_env(pipeline, count, overlapping)
            for count in ((slots, slots // 2) if overlapping else (slots,))}  # fmt: skip

    def whole(side: str, count: int) -> Program:
        return program(pipeline, side, count, 64, setting, effort.steps, envs[count])

    def alone(count: int) -> Program:
        return slots_alone(envs[count], effort.steps)

    makes: dict[str, Callable[[], Program]] = {
        ENV: partial(alone, slots),
        CALLS: partial(whole, CALLS, slots),
        GRAPH: partial(whole, GRAPH, slots),
    }
    if overlapping:
        makes |= {HALF_ENV: partial(alone, slots // 2), HALF: partial(whole, GRAPH, slots // 2)}
    programs, _ = started(makes)
    times = in_turns(programs, effort)
    per_step = {
        name: median(values) * programs[name].frames / effort.steps * 1e6
        for name, values in times.items()
    }
    row: Row = {"workload": pipeline.title, "N": slots, "us_per_step": per_step, "T": effort.steps}
    if overlapping:
        row["gain"] = gain(
            per_step[ENV], per_step[GRAPH] - per_step[ENV], per_step[HALF] - per_step[HALF_ENV]
        )
    return row


def gain(env: float, rest: float, half: float) -> float:
    """Speed of two groups of slots that take turns, over that of one group, by the model.

    All else of a step is done for one group while the envs of the other step.

    Args:
        env: E, the time of the envs of all slots.
        rest: R, that of all else of a step of all slots.
        half: R', that of all else for half of them.
    """
    return (env + rest) / max(env, 2 * half, env / 2 + half)
