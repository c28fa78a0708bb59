"""The parts of a step with the policy on the GPU, and the gain that overlap would have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench import Effort, Program
from gpu_pipelines import CARTPOLE, CHEETAH, PONG, Pipeline, burning
from gpu_setting import CORES, Plan, Row, Setting, closing, collecting, in_turns, median, need
from slots_alone import slots_alone
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

import tdcollect
from tdcollect import keys
from tdcollect.collect.policy import LoweredPolicy
from tdcollect.collect.step_dict import StepDict

ENV, UP, POLICY, DOWN, LOOP, WHOLE = "env", "up", "policy", "down", "loop", "whole"
BOTH, HALF = "policy, up and down", "policy for half of the slots"
WORTH_IT = 1.2


def shares(setting: Setting) -> Plan:
    """Yield the measurements of a step's parts."""
    for slots in setting.slots(8, 64, 256, 1024):
        for pipeline in (CARTPOLE, CHEETAH):
            name = f"{pipeline.title}, N={slots}"
            yield name, partial(_shares, pipeline, slots, setting)


def overlap(setting: Setting) -> Plan:
    """Yield the measurements for the model of overlap."""
    for slots in setting.slots(64, 256, 16):
        for name, make in _PIPELINES.items():
            yield f"{name}, N={slots}", partial(_overlap, make, slots, setting)


_PIPELINES: dict[str, Callable[[], Pipeline]] = {
    "CartPole-v1": lambda: CARTPOLE,
    "HalfCheetah-v5": lambda: CHEETAH,
    "Pong": lambda: PONG,
    "100 us per step": lambda: burning(100),
    "1,000 us per step": lambda: burning(1000),
}


def _shares(pipeline: Pipeline, slots: int, setting: Setting) -> Row:
    """Time each part by itself, waiting for the device; the loop is the rest of a whole step."""
    if pipeline is CHEETAH:
        need("mujoco")
    effort = _short(setting.effort(slots))
    env, policy = pipeline.ours(slots), pipeline.policy(64)
    with closing(env):  # of both programs: no slot is at an episode's end when a batch is full
        programs = {
            ENV: slots_alone(env, effort.steps),
            **_calls(policy, env, slots, effort.steps, setting),
            WHOLE: collecting(tdcollect.Collector, env, policy, effort.steps, setting),
        }
        del programs[BOTH]
        times = in_turns(programs, effort)
    micros = {name: median(values) * slots * 1e6 for name, values in times.items()}
    whole = micros.pop(WHOLE)
    micros[LOOP] = whole - sum(micros.values())
    return {"workload": pipeline.title, "N": slots, "us_per_step": whole, "us": micros,
            "T": effort.steps}  # fmt: skip


def _overlap(make: Callable[[], Pipeline], slots: int, setting: Setting) -> Row:
    """Time the envs (E), the policy for all slots (P) and for half of them (P').

    The envs run on worker processes, or on EnvPool's threads.
    """
    pipeline = make()
    if pipeline is CHEETAH:
        need("mujoco")
    effort = _short(setting.effort(slots))._replace(steps=4 if setting.quick else 32)
    workers = min(CORES, slots)
    options = {"backend": "process", "num_workers": workers} if pipeline.workers else {}
    envs, policy = pipeline.ours(slots, **options), pipeline.policy(64)
    with closing(envs):
        programs = {
            ENV: slots_alone(envs, effort.steps),
            BOTH: _calls(policy, envs, slots, effort.steps, setting)[BOTH],
            HALF: _calls(policy, envs, slots // 2, effort.steps, setting)[BOTH],
            WHOLE: collecting(tdcollect.Collector, envs, policy, effort.steps, setting),
        }
        times = in_turns(programs, effort)
    per_step = {
        name: median(values) * programs[name].frames / effort.steps * 1e6
        for name, values in times.items()
    }
    env, both, half_of_it = per_step[ENV], per_step[BOTH], per_step[HALF]
    loop = max(0.0, per_step[WHOLE] - env - both)
    return {
        "workload": pipeline.title,
        "N": slots,
        "workers": workers,
        "us_per_step": per_step,
        "gain": gain(env, both, half_of_it),
        "gain_with_loop": gain(env, both + loop, half_of_it + loop),
        "T": effort.steps,
    }


def _short(effort: Effort) -> Effort:
    return effort._replace(rounds=min(effort.rounds, 3), seconds=min(effort.seconds, 0.1))


def gain(env: float, policy: float, half: float) -> float:
    """Speed of two groups of slots that take turns, over that of one group, by the model.

    The policy is called for one group while the envs of the other step.

    Args:
        env: E, the time of the envs of all slots.
        policy: P, that of a policy call for all slots.
        half: P', that of a policy call for half of them.
    """
    return (env + policy) / max(env, 2 * half, env / 2 + half)


def _calls(
    policy: Any, env: EnvBase, slots: int, steps: int, setting: Setting
) -> dict[str, Program]:
    """The parts of a policy call for the first ``slots`` slots, each with a wait for the device."""
    device = torch.device(setting.device)
    policy = policy.to(device)
    observed = env.reset()[keys.OBSERVATION][:slots].contiguous()
    if setting.on_gpu:
        observed = observed.pin_memory()
    upon = observed.to(device)
    with set_exploration_type(ExplorationType.RANDOM):
        call = LoweredPolicy(
            policy, StepDict({keys.OBSERVATION: upon}), torch.Size([slots]), device
        )

    def act(observation: torch.Tensor) -> torch.Tensor:
        step = StepDict({keys.OBSERVATION: observation})
        call(step)
        return step[keys.ACTION]

    with torch.no_grad():
        action = act(upon)

    def up() -> None:
        observed.to(device, non_blocking=True)
        setting.wait()

    def called() -> None:
        act(upon)
        setting.wait()

    def down() -> None:
        action.cpu()

    def both() -> None:
        act(observed.to(device, non_blocking=True)).cpu()

    parts = {UP: up, POLICY: called, DOWN: down, BOTH: both}
    return {
        name: Program(partial(_repeat, part, steps), slots * steps) for name, part in parts.items()
    }


@torch.no_grad()
def _repeat(call: Callable[[], object], times: int) -> None:
    with set_exploration_type(ExplorationType.RANDOM):
        for _ in range(times):
            call()
