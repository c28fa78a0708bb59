"""Variants of a pipeline, fast and slow, each compared with the first of its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import workloads
from bench import QUICK, Effort, Program, alternate, ratios, spread
from gymnasium.vector import AutoresetMode
from hand_written import vector_env
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.envs import DoubleToFloat, EnvBase, ObservationNorm, TransformedEnv
from torchrl.modules import OneHotCategorical, ValueOperator

import tdcollect
from tdcollect.collect import arrays

CARTPOLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"


class Shift(ObservationNorm):
    """A user's transform: a subclass is unknown, whatever it does."""


class Opaque(TensorDictModuleBase):
    """A policy with its own ``forward``."""

    def __init__(self, policy: Any):
        super().__init__()
        self.policy = policy
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call the inner policy."""
        return self.policy(tensordict)


def variants(effort: Effort, only: str | None = None) -> list[dict[str, Any]]:
    """Microseconds per frame of each variant, and its ratio to the first of its group."""
    rows = []
    for group, makers in _groups(effort.steps).items():
        if only is not None and group != only:
            continue
        torch.manual_seed(0)
        programs = {name: make() for name, make in makers.items()}
        times = alternate(programs, effort)
        base = next(iter(programs))
        against = ratios(times, base)
        for name, values in times.items():
            row = {"group": group, "variant": name}
            row["us_per_frame"] = spread([value * 1e6 for value in values])._asdict()
            row["ratio"] = spread(against[name])._asdict() if name in against else None
            rows.append(row)
        for program in programs.values():
            program.close()
    return rows


def _groups(steps: int) -> dict[str, dict[str, Callable[[], Program]]]:
    usual = partial(_program, steps=steps)
    slots = (1, 4) if steps == QUICK.steps else (8, 1, 2, 32, 128)
    return {
        "array loop or TorchRL's": {
            "on arrays": usual,
            "the same env and policy, TorchRL's loop": partial(_off_arrays, steps=steps),
        },
        "slots": {f"N={n}": partial(_program, num_envs=n, steps=steps) for n in slots},
        "env": {
            "serial": usual,
            "vector env (SyncVectorEnv)": partial(_program, env=_vector_env, steps=steps),
            "three bookkeeping entries": partial(
                _program, steps=steps, step_count=True, episode_reward=True, is_init=True
            ),
        },
        "EnvPool, N=64": {
            "serial": partial(_program, num_envs=64, steps=steps),
            "EnvPool": partial(
                _program,
                num_envs=64,
                steps=steps,
                backend="envpool",
                env_kwargs={"num_threads": workloads.POOL_THREADS},
            ),
        },
        "transforms": {
            "none": usual,
            "four known": partial(_program, steps=steps, transform=workloads.stack),
            "one unknown": partial(
                _program,
                steps=steps,
                transform=lambda: Shift(loc=0.0, scale=1.0, in_keys=["observation"]),
            ),
        },
        "policy": {
            "integer actions": usual,
            "one-hot actions": partial(_program, steps=steps, policy=_one_hot, categorical=False),
            "with a value network": partial(_program, steps=steps, policy=_with_value),
            "opaque, called on a TensorDict": partial(_program, steps=steps, policy=_opaque),
            "a hook on one layer": partial(_program, steps=steps, policy=_hooked),
        },
        "HalfCheetah-v5": {
            "float64 observations, cast in the network": partial(_cheetah, steps),
            "DoubleToFloat": partial(_cheetah, steps, transform=DoubleToFloat),
            "two info_keys": partial(_cheetah, steps, info_keys=["x_position", "x_velocity"]),
        },
    }


def _program(
    *,
    steps: int,
    env: Any = CARTPOLE,
    num_envs: int | None = 8,
    policy: Callable[[], Any] | None = None,
    transform: Callable[[], Any] | None = None,
    categorical: bool = True,
    **options: Any,
) -> Program:
    if not isinstance(env, str):
        env, num_envs = env(), None
    made: EnvBase = tdcollect.make_env(
        env, num_envs, categorical_action_encoding=categorical, **options
    )
    if transform is not None:
        made = TransformedEnv(made, transform())
    return workloads.ours(made, _actor() if policy is None else policy(), steps)


def _off_arrays(steps: int) -> Program:
    with _arrays_off():
        program = _program(steps=steps)

    def run() -> None:
        with _arrays_off():
            program.run()

    return program._replace(run=run)


@contextmanager
def _arrays_off() -> Iterator[None]:
    arrays.RUN_ON_ARRAYS = False
    try:
        yield
    finally:
        arrays.RUN_ON_ARRAYS = True


def _vector_env() -> Any:
    return vector_env(CARTPOLE, 8, AutoresetMode.DISABLED)


def _actor() -> Any:
    return workloads.discrete_actor(workloads.mlp(4, 2))


def _one_hot() -> Any:
    return workloads.discrete_actor(workloads.mlp(4, 2), OneHotCategorical)


def _with_value() -> Any:
    value = ValueOperator(workloads.mlp(4, 1), in_keys=["observation"])
    return TensorDictSequential(_actor(), value)


def _opaque() -> Any:
    return Opaque(_actor())


def _hooked() -> Any:
    actor = _actor()
    actor.module[0].register_forward_hook(lambda *_: None)
    return actor


def _cheetah(steps: int, transform: Any = None, info_keys: Any = ()) -> Program:
    env: EnvBase = tdcollect.make_env(CHEETAH, 8, info_keys=info_keys)
    if transform is not None:
        env = TransformedEnv(env, transform(in_keys=["observation"]))
    return workloads.ours(env, workloads.continuous_actor(workloads.cheetah_net()), steps)
