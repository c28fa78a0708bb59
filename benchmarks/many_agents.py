"""Collecting from envs with several agents: processor time, side by side, in turns.

    OMP_NUM_THREADS=1 python benchmarks/many_agents.py

PettingZoo's simple_spread, 8 slots of 3 agents, and VMAS's balance, 32 envs of 3 agents in one
batch; a network for all agents. The envs alone are stepped in a plain loop without a policy.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench import QUICK, Effort, Program, collecting, spread
from mpe2 import simple_spread_v3
from tables import table, with_spread
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, SerialEnv, VmasEnv
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal

import tdcollect

SLOTS, ENVS, AGENTS = 8, 32, 3
SPREAD = {"N": AGENTS, "max_cycles": 25}
OURS, THEIRS, CHANGED, ALONE = (
    "tdcollect",
    "TorchRL Collector",
    "tdcollect's Collector, TorchRL's env",
    "envs alone",
)
EFFORT = Effort(steps=64, rounds=11, seconds=0.0)  # one batch per turn


def policy(env: EnvBase) -> Any:
    """One network that acts for each agent."""
    torch.manual_seed(0)
    (key,) = env.action_keys
    group, spec = key[0], env.full_action_spec[key]
    continuous = spec.dtype.is_floating_point
    seen = env.full_observation_spec[group, "observation"].shape[-1]
    out = 2 * spec.shape[-1] if continuous else int(spec.space.n)
    mlp = MultiAgentMLP(
        seen,
        out,
        AGENTS,
        centralized=False,
        share_params=True,
        depth=2,
        num_cells=64,
        activation_class=nn.Tanh,
    )
    names = ["loc", "scale"] if continuous else ["logits"]
    net = nn.Sequential(mlp, NormalParamExtractor()) if continuous else mlp
    inner = [(group, name) for name in names]
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=[(group, "observation")], out_keys=inner),
        in_keys=inner,
        out_keys=[key],
        distribution_class=TanhNormal if continuous else torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key=(group, "log_prob"),
    )


def _spread(steps: int) -> dict[str, Program]:
    def theirs() -> EnvBase:
        return SerialEnv(SLOTS, lambda: PettingZooWrapper(simple_spread_v3.parallel_env(**SPREAD)))

    ours = tdcollect.make_env("pettingzoo/mpe2/simple_spread_v3", SLOTS, env_kwargs=SPREAD)
    programs = {
        OURS: collecting(tdcollect.Collector, ours, policy(ours), steps),
        THEIRS: collecting(TorchRLCollector, theirs(), policy(ours), steps),
        CHANGED: collecting(tdcollect.Collector, theirs(), policy(ours), steps),
    }
    envs = [simple_spread_v3.parallel_env(**SPREAD) for _ in range(SLOTS)]
    for env in envs:
        env.reset()
    drawn = torch.randint(5, (steps, SLOTS, AGENTS)).numpy()

    def run() -> None:
        for rows in drawn:
            for env, row in zip(envs, rows, strict=True):
                *_, truncated, _ = env.step(dict(zip(env.agents, row, strict=True)))
                if any(truncated.values()):
                    env.reset()

    return {**programs, ALONE: Program(run, SLOTS * steps)}


def _balance(steps: int) -> dict[str, Program]:
    def make() -> EnvBase:
        return VmasEnv("balance", num_envs=ENVS, n_agents=AGENTS, max_steps=100, seed=0)

    world = make()._env
    still = [torch.zeros(ENVS, 2) for _ in range(AGENTS)]

    def run() -> None:
        for _ in range(steps):
            *_, done, _ = world.step(still)
            for slot in done.nonzero().flatten().tolist():
                world.reset_at(slot)

    return {
        OURS: collecting(tdcollect.Collector, make(), policy(make()), steps),
        THEIRS: collecting(TorchRLCollector, make(), policy(make()), steps),
        ALONE: Program(run, ENVS * steps),
    }


CELLS: dict[str, tuple[Callable[[int], dict[str, Program]], float | None]] = {
    f"simple_spread_v3, N={SLOTS}": (_spread, 2.0),
    f"VMAS balance, N={ENVS}": (_balance, None),
}
"""By name: the programs, and the target against TorchRL's collector."""


def many_agents(effort: Effort) -> list[dict[str, Any]]:
    """Processor time of a step of all slots, by side; that of each over ours in the same round."""
    effort = effort if effort == QUICK else EFFORT
    warnings.filterwarnings("ignore", message="PettingZoo in TorchRL is tested")
    rows = []
    for name, (make, target) in CELLS.items():
        programs = make(effort.steps)
        times: dict[str, list[float]] = {side: [] for side in programs}
        for turn in range(effort.rounds + 1):
            for side, program in programs.items():
                start = time.process_time()
                program.run()
                if turn:  # the first is not counted
                    times[side].append((time.process_time() - start) / effort.steps)
        for program in programs.values():
            program.close()
        for side, values in times.items():
            over = [value / own for value, own in zip(values, times[OURS], strict=True)]
            rows.append(
                {
                    "workload": name,
                    "side": side,
                    "us": 1e6 * spread(values).median,
                    "ratio": spread(over)._asdict(),
                    "target": target if side == THEIRS else None,
                }
            )
    return rows


def section(rows: list[dict[str, Any]]) -> list[str]:
    """The part of the page of benchmarks."""
    body = []
    for row in rows:
        ratio = "1" if row["side"] == OURS else with_spread(row["ratio"])
        if row["target"] is not None:
            missed = "" if row["ratio"]["median"] >= row["target"] else " missed"
            ratio += f"; target {row['target']:g}{missed}"
        body.append([row["workload"], row["side"], f"{row['us']:,.0f}", ratio])
    return [
        "## Many agents\n",
        f"{AGENTS} agents with one network. Processor time of a step of all slots, and that time "
        f"over tdcollect's in the same round. On VMAS, tdcollect's collector steps TorchRL's env, "
        "and the envs alone are its simulator, with resets.\n",
        table(["workload", "side", "us per step", "over tdcollect's"], body),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    torch.set_num_threads(1)
    print("\n".join(section(many_agents(QUICK if parser.parse_args().quick else EFFORT))))
