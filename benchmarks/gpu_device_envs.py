"""Envs that live on the GPU, collected by both libraries, and stepped in a bare loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import networks
import torch
from bench import Program
from gpu_collectors import CALLS, GRAPH, SIDES, THEIRS
from gpu_setting import Plan, Row, Setting, collecting, compared, need
from torch import Tensor, nn
from torch_cartpole import STEPS, TorchCartPole, physics

CARTPOLE, BARE = "CartPole in torch", "bare loop"


def device_envs(setting: Setting) -> Plan:
    """Yield the measurements of envs on the device."""
    for slots in setting.slots(4096):
        yield f"{CARTPOLE}, N={slots}", partial(_cartpole, slots, setting)
        yield f"VMAS balance, N={slots}", partial(_vmas, slots, setting)


def cartpole(side: str, slots: int, setting: Setting, steps: int) -> Program:
    """A side's collector of CartPole in torch; whole turns are one graph on tdcollect's."""
    env = TorchCartPole(slots, setting.device)
    env.steps_as_graph = side == GRAPH
    policy = networks.discrete_actor(networks.mlp(4, 2).to(setting.device))
    return _collected(side, env, policy, steps, setting)


def _cartpole(slots: int, setting: Setting) -> Row:
    effort = setting.effort(slots)._replace(steps=4 if setting.quick else 64)
    makes: dict[str, Callable[[], Program]] = {
        side: partial(cartpole, side, slots, setting, effort.steps)
        for side in (GRAPH, CALLS, THEIRS)
    }
    makes[BARE] = partial(_bare, slots, effort.steps, setting)
    return compared(CARTPOLE, makes, slots, effort, {THEIRS: 8, BARE: 3})


def _vmas(slots: int, setting: Setting) -> Row:
    """VMAS with random actions."""
    need("vmas")
    from torchrl.envs.libs.vmas import VmasEnv

    effort = setting.effort(slots)._replace(steps=4 if setting.quick else 32)

    def make(side: str) -> Program:
        env = VmasEnv("balance", num_envs=slots, device=setting.device, max_steps=100)
        return _collected(side, env, None, effort.steps, setting)

    makes = {side: partial(make, side) for side in (CALLS, THEIRS)}
    return compared("VMAS balance, random actions", makes, slots, effort, {})


def _collected(side: str, env: Any, policy: Any, steps: int, setting: Setting) -> Program:
    kind, options = SIDES[side]
    return collecting(kind, env, policy, steps, setting, device=setting.device, **options)


def _bare(slots: int, steps: int, setting: Setting) -> Program:
    """Physics, network, sampling and restarts on tensors, call by call; nothing is stored."""
    env = TorchCartPole(slots, setting.device)
    net: nn.Module = networks.mlp(4, 2).to(setting.device)
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
