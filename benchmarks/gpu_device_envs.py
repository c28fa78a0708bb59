"""Envs that live on the GPU, collected by both libraries, and stepped in a bare loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import networks
import torch
from bench import Program, ratios, spread
from gpu_setting import Plan, Row, Setting, collecting, first_line, in_turns, median, need
from torch import Tensor, nn
from torch_cartpole import STEPS, TorchCartPole, physics
from torchrl.collectors import Collector as TorchRLCollector

import tdcollect

OURS, THEIRS, BARE = "tdcollect", "TorchRL", "bare loop"
TARGET = 0.9


def device_envs(setting: Setting) -> Plan:
    """Yield the measurements of envs on the device."""
    for slots in setting.slots(4096):
        yield f"CartPole in torch, N={slots}", partial(_cartpole, slots, setting)
        yield f"VMAS balance, N={slots}", partial(_vmas, slots, setting)


def _cartpole(slots: int, setting: Setting) -> Row:
    steps = 4 if setting.quick else 64
    effort = setting.effort(slots)._replace(steps=steps)
    net = networks.mlp(4, 2).to(setting.device)
    policy = networks.discrete_actor(net)
    programs = {
        OURS: _collected(tdcollect.Collector, TorchCartPole(slots, setting.device), policy,
                         steps, setting),
        THEIRS: _collected(TorchRLCollector, TorchCartPole(slots, setting.device), policy,
                           steps, setting),
        BARE: _bare(TorchCartPole(slots, setting.device), net, steps, setting),
    }  # fmt: skip
    row = _compared("CartPole in torch", slots, programs, effort, setting)
    envs = {name: TorchCartPole(slots, setting.device) for name in (OURS, THEIRS)}
    row["waits"] = {
        OURS: _waits(tdcollect.Collector, envs[OURS], policy, setting),
        THEIRS: _waits(TorchRLCollector, envs[THEIRS], policy, setting),
    }
    return row


def _vmas(slots: int, setting: Setting) -> Row:
    """VMAS with random actions."""
    need("vmas")
    from torchrl.envs.libs.vmas import VmasEnv

    steps = 4 if setting.quick else 32
    effort = setting.effort(slots)._replace(steps=steps)

    def env() -> Any:
        return VmasEnv("balance", num_envs=slots, device=setting.device, max_steps=100)

    programs = {
        OURS: _collected(tdcollect.Collector, env(), None, steps, setting),
        THEIRS: _collected(TorchRLCollector, env(), None, steps, setting),
    }
    row = _compared("VMAS balance, random actions", slots, programs, effort, setting)
    row["waits"] = {OURS: _waits(tdcollect.Collector, env(), None, setting)}
    return row


def _collected(kind: Any, env: Any, policy: Any, steps: int, setting: Setting) -> Program:
    return collecting(kind, env, policy, steps, setting, device=setting.device)


def _compared(
    name: str, slots: int, programs: dict[str, Program], effort: Any, setting: Setting
) -> Row:
    times = in_turns(programs, effort)
    return {
        "workload": name,
        "N": slots,
        "T": effort.steps,
        "us_per_step": {kind: median(values) * slots * 1e6 for kind, values in times.items()},
        "ratios": {kind: spread(values)._asdict() for kind, values in ratios(times, OURS).items()},
        "target": {BARE: TARGET} if BARE in programs else {},
    }


def _bare(env: TorchCartPole, net: nn.Module, steps: int, setting: Setting) -> Program:
    """Physics, network, sampling and restarts on tensors; nothing is stored."""
    slots = env.batch_size[0]
    held: list[Tensor] = [env.fresh(), torch.zeros((slots, 1), device=env.device)]

    @torch.no_grad()
    def run() -> None:
        state, count = held
        for _ in range(steps):
            logits = net(state).log_softmax(-1)
            action = torch.multinomial(logits.exp(), 1, True)
            logits.gather(-1, action)  # the log-probability
            state, fell = physics(state, action.squeeze(-1))
            count = count + 1
            done = fell | (count >= STEPS)
            state = torch.where(done, env.fresh(), state)
            count = torch.where(done, 0, count)
        held[:] = [state, count]
        setting.wait()

    return Program(run, slots * steps)


def _waits(kind: Any, env: Any, policy: Any, setting: Setting) -> str:
    """The place at which the host first waits for the device in a batch; empty for none.

    torch raises at each operation that waits.
    """
    if not setting.on_gpu:
        return "not measured on the CPU"
    collector = kind(
        env,
        policy,
        frames_per_batch=8 * env.batch_size.numel(),
        total_frames=-1,
        device=setting.device,
        auto_register_policy_transforms=False,
    )
    batches = iter(collector)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        next(batches)
    except Exception as error:  # tdcollect's message may name the slot or the module
        return _place(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        collector.shutdown()
    return ""


def _place(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = (
        "" if trace is None else f"{trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno}: "
    )
    return where + first_line(error)
