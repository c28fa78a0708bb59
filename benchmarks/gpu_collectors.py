"""Collectors with the policy on the GPU: tdcollect's beside TorchRL's, which take turns.

TorchRL's collector runs in its fastest setting that gives the right batches; `settings` finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from bench import Program
from gpu_pipelines import CARTPOLE, CHEETAH, ONE_HOT, PONG, SERIAL, VECTOR, Pipeline
from gpu_setting import (
    CORES,
    Plan,
    Row,
    Setting,
    collecting,
    compared,
    first_line,
    in_turns,
    median,
    need,
)
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

import tdcollect

CALLS, GRAPH, COMPILED = "tdcollect", "tdcollect, graph", "tdcollect, compiled"
ON_CPU, WORKERS = "policy on the CPU", "tdcollect, workers"
THEIRS, THEIR_COMPILED = "TorchRL", "TorchRL, compiled"
OURS: Any = tdcollect.Collector
SIDES: dict[str, tuple[Any, dict[str, Any]]] = {
    CALLS: (OURS, {"cudagraph_policy": False}),
    GRAPH: (OURS, {"cudagraph_policy": True}),
    COMPILED: (OURS, {"compile_policy": True}),
    ON_CPU: (OURS, {"policy_device": "cpu"}),
    WORKERS: (OURS, {"cudagraph_policy": False}),
    THEIRS: (TorchRLCollector, {}),
    THEIR_COMPILED: (TorchRLCollector, {"compile_policy": True}),
}
"""What is compared: a class of collectors, and its options."""

KIND, STORING = "env", "storing_device"
OPTIONS = (KIND, "env_device", STORING, "no_cuda_sync")
"""A setting of TorchRL's collector in words: its kind of env, and the options."""

SAFE = {KIND: VECTOR, "env_device": "cpu", STORING: None, "no_cuda_sync": False}
"""TorchRL's setting that is right and was the fastest on an H100."""


def settings(setting: Setting) -> Plan:
    """Time TorchRL's settings, and check their batches; each has an env of its own.

    TorchRL moves the env that it is given to ``env_device``: the next one would find it there.
    """
    choices = [
        SAFE,
        {**SAFE, "no_cuda_sync": True},
        {**SAFE, STORING: "cpu"},
        {**SAFE, STORING: setting.device},
        {**SAFE, "env_device": None},
        {**SAFE, STORING: "cpu", "no_cuda_sync": True},
        {**SAFE, STORING: setting.device, "no_cuda_sync": True},
        {**SAFE, KIND: SERIAL, STORING: "cpu"},
    ]
    right = cache(partial(_right_batches, setting))  # of each kind of env
    for choice in choices[:2] + choices[-1:] if setting.quick else choices:
        name = ", ".join(f"{key}={value}" for key, value in choice.items())
        yield name, partial(_setting, choice, right, setting)


def _settings_steps(setting: Setting) -> tuple[int, int]:
    (slots,) = setting.slots(8)
    return slots, min(setting.effort(slots).steps, 32)


def _right_batches(setting: Setting, kind: str) -> list[Any]:
    """Batches whose copies to the CPU are waited for."""
    slots, steps = _settings_steps(setting)
    safest = {"env_device": "cpu", STORING: "cpu"}
    env, policy = CARTPOLE.theirs(slots, kind), _seeded_policy()
    return _batches(TorchRLCollector, env, policy, steps, setting, **safest)


def _seeded_policy() -> Any:
    torch.manual_seed(0)
    return CARTPOLE.policy(64)


def _setting(choice: Row, right: Callable[[str], list[Any]], setting: Setting) -> Row:
    """Check and time TorchRL's collector in a setting; CartPole, 64 x 64."""
    slots, steps = _settings_steps(setting)
    kind, options = choice[KIND], {key: choice[key] for key in OPTIONS if key != KIND}
    row = {**choice, "slots": slots, "us_per_step": None}
    policy = _seeded_policy()
    try:
        env = CARTPOLE.theirs(slots, kind)
        found = _batches(TorchRLCollector, env, policy, steps, setting, **options)
        row["differs"] = _difference(right(kind), found)
    except RuntimeError as error:
        row["differs"] = first_line(error)
    if not row["differs"]:
        env = CARTPOLE.theirs(slots, kind)
        made = collecting(TorchRLCollector, env, policy, steps, setting, **options)
        effort = setting.effort(slots)
        times = in_turns({THEIRS: made}, effort._replace(steps=steps, rounds=min(effort.rounds, 3)))
        row["us_per_step"] = median(times[THEIRS]) * slots * 1e6
    return row


def graphs(setting: Setting) -> Plan:
    """Yield the measurements with CUDA graphs, call by call beside them."""
    cells = [
        (ONE_HOT, 8, 64, {CALLS: 1.8, THEIRS: 3.5}),
        (CHEETAH, 8, 64, {CALLS: 1.8, THEIRS: 3.5}),
        (CARTPOLE, 64, 64, {CALLS: 1.4}),
        (CARTPOLE, 8, 64, {THEIRS: 3.5}),
        (CARTPOLE, 8, 512, {THEIRS: 3.5}),
        (PONG, 16, 0, {}),
        (CHEETAH, 64, 64, {}),
        (PONG, 64, 0, {}),
    ]
    # TorchRL's own graphs are not among them: a capture that fails, as that of a TanhNormal, leaves
    # the GPU's generator unfit for all that comes after.
    sides = (GRAPH, CALLS, THEIRS, ON_CPU)
    return _plan(cells[:3] if setting.quick else cells, sides, setting)


def eager(setting: Setting) -> Plan:
    """Yield the measurements call by call."""
    both = [(ONE_HOT, 64), (CHEETAH, 64)]
    cells = [(*of, 8, {THEIRS: 2.0}) for of in both] + [(*of, 64, {}) for of in both]
    cells += [(CARTPOLE, 512, 8, {THEIRS: 2.0}), (CHEETAH, 512, 64, {}), (PONG, 0, 16, {})]
    cells += [(CARTPOLE, 64, 256, {}), (PONG, 0, 64, {}), (CARTPOLE, 64, 1024, {})]
    ordered = [(of, slots, width, aims) for of, width, slots, aims in cells]
    sides = (CALLS, THEIRS, WORKERS)
    return _plan(ordered[:1] if setting.quick else ordered, sides, setting)


def compiled(setting: Setting) -> Plan:
    """Yield the measurements with compiled policies, each of which compiles for a while."""
    cells = [(of, slots, 64, {THEIR_COMPILED: 2.0}) for of, slots in
             ((CARTPOLE, 8), (CHEETAH, 8), (CHEETAH, 64))]  # fmt: skip
    sides = (COMPILED, CALLS, THEIR_COMPILED)
    return _plan(cells[:1] if setting.quick else cells, sides, setting)


def _plan(cells: list[Any], sides: tuple[str, ...], setting: Setting) -> Plan:
    for pipeline, slots, width, aims in cells:
        (count,) = setting.slots(slots)
        named = f"{width} x {width}" if width else "convolutions"
        name = f"{pipeline.title}, {named}"
        measure = partial(_compared, name, pipeline, count, width, aims, sides, setting)
        yield f"{name}, N={count}", measure


def _compared(
    name: str,
    pipeline: Pipeline,
    slots: int,
    width: int,
    aims: dict[str, float],
    sides: tuple[str, ...],
    setting: Setting,
) -> Row:
    """Time the sides in turns, each with an env and a policy of its own; the first is the base."""
    need_for(pipeline)
    torch.compiler.reset()  # dynamo compiles the code of all policies together 8 times at most
    effort = setting.effort(slots)
    if slots >= 256:
        effort = effort._replace(rounds=min(effort.rounds, 4))
    makes: dict[str, Callable[[], Program]] = {
        side: partial(program, pipeline, side, slots, width, setting, effort.steps)
        for side in sides
        if side != WORKERS or (pipeline.workers and slots >= 64 and CORES > 2)
    }
    row = compared(name, makes, slots, effort, aims)
    if slots <= 16:
        row["differs"] = _bits(pipeline, sides[0], slots, width, setting)
    return row


def need_for(pipeline: Pipeline) -> None:
    """Leave a measurement out if the pipeline's package is missing."""
    if pipeline is CHEETAH:
        need("mujoco")


def program(
    pipeline: Pipeline,
    side: str,
    slots: int,
    width: int,
    setting: Setting,
    steps: int,
    env: EnvBase | None = None,
) -> Program:
    """A side's collector with a policy of its own, and an env of its own unless one is given.

    Closing it closes the env. TorchRL's is in the setting found for it; the batch is stored alike
    on both sides.
    """
    kind, options = _side(side, setting)
    if env is None and kind is TorchRLCollector:
        env = pipeline.theirs(slots, setting.torchrl[KIND])
    elif env is None:
        env = our_env(pipeline, slots, side == WORKERS)
    try:
        return collecting(kind, env, pipeline.policy(width), steps, setting, **options)
    except BaseException:
        env.close()
        raise


def our_env(pipeline: Pipeline, slots: int, workers: bool) -> EnvBase:
    """tdcollect's env; on a worker process per core, where it can be."""
    if not (workers and pipeline.workers):
        return pipeline.ours(slots)
    return pipeline.ours(slots, backend="process", num_workers=min(CORES, slots))


def _side(side: str, setting: Setting) -> tuple[Any, dict[str, Any]]:
    """The class of collectors of a side, and its options in this setting."""
    kind, options = SIDES[side]
    if "compile_policy" in options and setting.quick:
        options = {"compile_policy": {"backend": "eager"}}
    given = {key: value for key, value in setting.torchrl.items() if key != KIND}
    return kind, {**(given if kind is TorchRLCollector else {STORING: given[STORING]}), **options}


def _bits(pipeline: Pipeline, side: str, slots: int, width: int, setting: Setting) -> str:
    """The first entry in which batches differ from TorchRL's on like envs, or nothing."""
    torch.compiler.reset()
    policy, found = pipeline.policy(width), []
    for each in (THEIR_COMPILED if side == COMPILED else THEIRS, side):
        kind, options = _side(each, setting)
        env = pipeline.ours(slots, seed=0)
        try:
            found.append(_batches(kind, env, policy, 16, setting, seeded=True, **options))
        except Exception as error:
            return f"{each} raises {first_line(error)}"
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
    """Two batches of a collector with given seeds, on the CPU; the env is closed then."""
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
    try:
        for _ in range(2):
            # A copy at once: an entry that was read too early shows as another number.
            batch = next(batches)
            found.append({key: value.cpu().clone() for key, value in batch.items(True, True)})
    finally:
        collector.shutdown()
    return found


def _difference(expected: list[Any], got: list[Any]) -> str:
    for batch, (one, other) in enumerate(zip(expected, got, strict=True)):
        if set(one) != set(other):
            return f"keys {sorted(map(str, set(one) ^ set(other)))}"
        for key, value in one.items():
            if not torch.equal(value, other[key]):
                return f"{key} in batch {batch}"
    return ""
