"""Collectors with the policy on the GPU: tdcollect's beside TorchRL's, which take turns.

TorchRL's collector runs in its fastest setting that gives the right batches; `settings` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import torch
from bench import Effort, Program, ratios, spread
from gpu_pipelines import CARTPOLE, CHEETAH, PONG, SERIAL, VECTOR, Pipeline
from gpu_setting import (
    CORES,
    Plan,
    Row,
    Setting,
    closing,
    collecting,
    first_line,
    in_turns,
    median,
    need,
)
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

import tdcollect

OURS, THEIRS, EAGER, WORKERS = "tdcollect", "TorchRL", "tdcollect, eager", "tdcollect, workers"
TARGET, GRAPH_TARGET = 2.0, 1.5
WIDTHS = (64, 512)
KIND, STORING = "env", "storing_device"
OPTIONS = (KIND, "env_device", STORING, "no_cuda_sync")
"""A setting of TorchRL's collector in words: its kind of env, and the options."""


def settings(setting: Setting) -> Plan:
    """Find TorchRL's fastest correct setting."""
    yield "TorchRL's settings", partial(_settings, setting)


def _settings(setting: Setting) -> Row:
    """Check and time TorchRL's collector in each setting; CartPole, 64 x 64.

    On paper, `no_cuda_sync=True` reads no unfinished copy from the GPU: copies to the CPU then
    block (`non_blocking=False`), and those to the GPU are ordered on its stream. The batches are
    compared all the same.
    """
    (slots,) = setting.slots(8)
    effort = setting.effort(slots)
    effort = effort._replace(steps=min(effort.steps, 32), rounds=2 if setting.quick else 3)
    stored = dict.fromkeys((None, "cpu", setting.device))
    choices = [(VECTOR, *each) for each in product((None, "cpu"), stored, (False, True))]
    choices += [(SERIAL, None, None, False), (SERIAL, "cpu", "cpu", True)]
    if setting.quick:
        choices = [choices[0], choices[1], choices[-1]]
    envs = {kind: CARTPOLE.theirs(slots, kind) for kind in (VECTOR, SERIAL)}
    policy = CARTPOLE.policy(64)
    rows: list[Row] = []
    safest: dict[str, Any] = {"env_device": "cpu", STORING: "cpu"}
    with closing(*envs.values()):
        expected = {
            kind: _batches(TorchRLCollector, env, policy, effort.steps, setting, **safest)
            for kind, env in envs.items()
        }
        for choice in choices:
            row = dict(zip(OPTIONS, choice, strict=True))
            options = {key: value for key, value in row.items() if key != KIND}
            kind = row[KIND]
            make = (TorchRLCollector, envs[kind], policy, effort.steps, setting)
            row["us_per_step"] = None
            try:
                row["differs"] = _difference(expected[kind], _batches(*make, **options))
            except RuntimeError as error:
                row["differs"] = first_line(error)
            if not row["differs"]:
                times = in_turns({THEIRS: collecting(*make, **options)}, effort)
                row["us_per_step"] = median(times[THEIRS]) * slots * 1e6
            rows.append(row)
    right = [row for row in rows if row["us_per_step"] is not None]
    fastest = min(right, key=lambda row: row["us_per_step"])
    return {"slots": slots, "settings": rows, "fastest": fastest}


def eager(setting: Setting) -> Plan:
    """Yield the measurements without compilation."""
    for slots in setting.slots(8, 64, 256, 1024):
        for pipeline in (CARTPOLE, CHEETAH):
            name = f"{pipeline.title}, N={slots}"
            yield name, partial(_against_torchrl, pipeline, slots, WIDTHS, setting)
        if slots in setting.slots(64):
            for few in setting.slots(16, 64):
                yield f"Pong, N={few}", partial(_against_torchrl, PONG, few, [0], setting)


def graphs(setting: Setting) -> Plan:
    """Yield the measurements with CUDA graphs."""
    cells = [(CARTPOLE, 8), (CHEETAH, 8), (PONG, 16), (CARTPOLE, 256), (CHEETAH, 256), (PONG, 64)]
    return _modes("cudagraph_policy", True, cells, setting)


def compiled(setting: Setting) -> Plan:
    """Yield the measurements with compiled policies, each of which compiles for a while."""
    option = {"backend": "eager"} if setting.quick else True
    cells = [(CARTPOLE, 8), (CHEETAH, 8), (CARTPOLE, 256), (CHEETAH, 256), (PONG, 16), (PONG, 64)]
    return _modes("compile_policy", option, cells, setting)


def _modes(option: str, value: Any, cells: list[tuple[Pipeline, int]], setting: Setting) -> Plan:
    for pipeline, slots in dict(cells).items() if setting.quick else cells:
        (count,) = setting.slots(slots)
        name = f"{pipeline.title}, N={count}, {option}"
        yield name, partial(_mode, pipeline, count, {option: value}, setting)


def _against_torchrl(
    pipeline: Pipeline, slots: int, widths: Iterable[int], setting: Setting
) -> Row:
    """Compare the collectors; all policies with the same envs, one after the other."""
    _need(pipeline)
    effort = setting.effort(slots)
    if slots >= 256:
        effort = effort._replace(rounds=min(effort.rounds, 4))
    ours, theirs = pipeline.ours(slots), pipeline.theirs(slots, setting.torchrl.get(KIND, VECTOR))
    parallel = None
    if pipeline is CHEETAH and slots >= 64 and CORES > 2:
        count = min(CORES, slots)
        parallel = pipeline.ours(slots, backend="process", num_workers=count)
    rows = []
    with closing(ours, theirs, *([parallel] if parallel is not None else [])):
        for width in widths:
            make = partial(_program, pipeline.policy(width), effort.steps, setting)
            programs = {
                OURS: make(tdcollect.Collector, ours),
                THEIRS: make(TorchRLCollector, theirs),
            }
            if parallel is not None:
                programs[WORKERS] = make(tdcollect.Collector, parallel)
            row = _compared(programs, effort, OURS)
            rows.append({"policy": _named(width), "target": {THEIRS: TARGET}, **row})
    differs = _bits(pipeline, slots, {}, setting) if slots <= 16 else None
    return {"workload": pipeline.title, "N": slots, "mode": "eager", "rows": rows,
            "differs": differs, "T": effort.steps}  # fmt: skip


def _mode(pipeline: Pipeline, slots: int, mode: dict[str, Any], setting: Setting) -> Row:
    """Compare the collectors with one mode of the policy, and with tdcollect's eager one."""
    _need(pipeline)
    torch.compiler.reset()  # dynamo compiles the code of all policies together 8 times at most
    effort = setting.effort(slots)
    envs = [
        pipeline.ours(slots),
        pipeline.ours(slots),
        pipeline.theirs(slots, setting.torchrl.get(KIND, VECTOR)),
    ]
    with closing(*envs):
        make = partial(_program, pipeline.policy(64), effort.steps, setting)
        sides = {
            OURS: partial(make, tdcollect.Collector, envs[0], **mode),
            EAGER: partial(make, tdcollect.Collector, envs[1]),
            THEIRS: partial(make, TorchRLCollector, envs[2], **mode),
        }
        programs, raised = {}, {}
        for name, begin in sides.items():
            try:
                program = begin()
                for _ in range(3):  # the first calls compile, warm up and capture
                    program.run()
            except Exception as error:
                if name == OURS:
                    raise
                raised[name] = first_line(error)
            else:
                programs[name] = program
        row = _compared(programs, effort, OURS)
    (option,) = mode
    target = {THEIRS: TARGET}
    if option == "cudagraph_policy" and slots == 8:
        target[EAGER] = GRAPH_TARGET
    differs = _bits(pipeline, slots, mode, setting) if slots <= 16 else None
    return {"workload": pipeline.title, "N": slots, "mode": option, "differs": differs,
            "T": effort.steps, "rows": [
                {"policy": _named(0 if pipeline is PONG else 64), "target": target, **row,
                 "raised": raised}
            ]}  # fmt: skip


def _need(pipeline: Pipeline) -> None:
    if pipeline is CHEETAH:
        need("mujoco")


def _named(width: int) -> str:
    return f"{width} x {width}" if width else "convolutions"


def _program(
    policy: Any, steps: int, setting: Setting, kind: Any, env: EnvBase, **options: Any
) -> Program:
    """A collector in the setting found for TorchRL; the batch is stored alike on both sides."""
    given = {key: value for key, value in setting.torchrl.items() if key != KIND}
    if kind is not TorchRLCollector:
        given = {STORING: given.get(STORING)}
    return collecting(kind, env, policy, steps, setting, **given, **options)


def _compared(programs: dict[str, Program], effort: Effort, base: str) -> Row:
    frames = programs[base].frames / effort.steps
    times = in_turns(programs, effort)
    return {
        "us_per_step": {name: median(values) * frames * 1e6 for name, values in times.items()},
        "ratios": {name: spread(values)._asdict() for name, values in ratios(times, base).items()},
    }


def _bits(pipeline: Pipeline, slots: int, mode: dict[str, Any], setting: Setting) -> str:
    """The first entry in which batches of the two collectors differ on like envs, or nothing."""
    torch.compiler.reset()
    policy, found = pipeline.policy(64), []
    given = {STORING: setting.torchrl.get(STORING), **mode}
    for kind in (TorchRLCollector, tdcollect.Collector):
        env = pipeline.ours(slots, seed=0)
        with closing(env):
            try:
                found.append(_batches(kind, env, policy, 16, setting, seeded=True, **given))
            except Exception as error:
                return f"{kind.__module__.split('.')[0]} raises {first_line(error)}"
    return _difference(*found)


def _batches(
    kind: Any,
    env: EnvBase,
    policy: Any,
    steps: int,
    setting: Setting,
    seeded: bool = False,
    **options: Any,
) -> list[Any]:
    """Two batches of a collector with given seeds, on the CPU."""
    if not seeded:
        env.set_seed(0)
    torch.manual_seed(0)
    collector = kind(
        env,
        policy,
        frames_per_batch=env.batch_size.numel() * steps,
        auto_register_policy_transforms=False,
        **{"policy_device": setting.device, **options},
    )
    torch.manual_seed(1)
    batches = iter(collector)
    found = []
    for _ in range(2):
        # A copy at once: an entry that was read too early shows as another number.
        batch = next(batches)
        found.append({key: value.cpu().clone() for key, value in batch.items(True, True)})
    collector.shutdown(close_env=False)
    return found


def _difference(expected: list[Any], got: list[Any]) -> str:
    for batch, (one, other) in enumerate(zip(expected, got, strict=True)):
        if set(one) != set(other):
            return f"keys {sorted(map(str, set(one) ^ set(other)))}"
        for key, value in one.items():
            if not torch.equal(value, other[key]):
                return f"{key} in batch {batch}"
    return ""
