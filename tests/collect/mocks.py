"""Every env of ``torchrl.testing.mocking_classes``, by name. They take no seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase, SerialEnv, Transform, TransformedEnv
from torchrl.envs.utils import MarlGroupMapType
from torchrl.modules import WorldModelWrapper
from torchrl.testing import mocking_classes as m

from . import policies


def classes(*bases: type) -> set[str]:
    """The public classes of the module with one of these bases."""
    defined = [value for value in vars(m).values() if inspect.isclass(value)]
    return {
        value.__name__
        for value in defined
        if value.__module__ == m.__name__
        and issubclass(value, bases)
        and not value.__name__.startswith("_")
    }


def world_model() -> EnvBase:
    inner = m.ActionObsMergeLinear(5, 4)
    entries = ["hidden_observation", "action"]
    transition = TensorDictModule(inner, entries, ["hidden_observation"])
    reward = TensorDictModule(nn.Linear(4, 1), ["hidden_observation"], ["reward"])
    return m.DummyModelBasedEnvBase(WorldModelWrapper(transition, reward), batch_size=[3])


def nested_reset(at_root: bool) -> EnvBase:
    env = m.MockNestedResetEnv(4, at_root)
    env.set_seed = lambda seed, static_seed=False: seed  # its own takes no argument
    return env


def counting(cls: Any, *batch: int, **options: Any) -> Callable[[], EnvBase]:
    return lambda: cls(max_steps=4, batch_size=list(batch), **options)


def transformed(transform: Callable[[], Transform], env: Callable[[], EnvBase]) -> Any:
    return lambda: TransformedEnv(env(), transform())


_AGENTS = partial(m.MultiAgentCountingEnv, n_agents=2)

ENVS: dict[str, Callable[[], EnvBase]] = {
    "MockSerialEnv": m.MockSerialEnv,
    "MockBatchedLockedEnv": m.MockBatchedLockedEnv,
    "MockBatchedLockedEnv[2]": lambda: m.MockBatchedLockedEnv(batch_size=[2]),
    "MockBatchedUnLockedEnv": m.MockBatchedUnLockedEnv,
    "MockBatchedUnLockedEnv[2]": lambda: m.MockBatchedUnLockedEnv(batch_size=[2]),
    "StateLessCountingEnv": m.StateLessCountingEnv,
    "DiscreteActionVecMockEnv": m.DiscreteActionVecMockEnv,
    "DiscreteActionVecMockEnv, categorical": lambda: m.DiscreteActionVecMockEnv(
        categorical_action_encoding=True
    ),
    "ContinuousActionVecMockEnv": m.ContinuousActionVecMockEnv,
    "DiscreteActionConvMockEnv": m.DiscreteActionConvMockEnv,
    "DiscreteActionConvMockEnvNumpy": m.DiscreteActionConvMockEnvNumpy,
    "ContinuousActionConvMockEnv": m.ContinuousActionConvMockEnv,
    "ContinuousActionConvMockEnvNumpy": m.ContinuousActionConvMockEnvNumpy,
    "DummyModelBasedEnvBase": world_model,
    "CountingEnv": counting(m.CountingEnv),
    "CountingEnv[2]": counting(m.CountingEnv, 2),
    "CountingEnvWithString": counting(m.CountingEnvWithString),
    "CountingEnvWithString[2]": counting(m.CountingEnvWithString, 2),
    "MultiAgentCountingEnv": counting(_AGENTS),
    "MultiAgentCountingEnv, each alone": counting(
        _AGENTS, group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT
    ),
    "IncrementingEnv": counting(m.IncrementingEnv),
    "NestedCountingEnv": counting(m.NestedCountingEnv),
    "NestedCountingEnv[2]": counting(m.NestedCountingEnv, 2),
    "NestedCountingEnv, flags nested": counting(
        m.NestedCountingEnv, nest_done=True, has_root_done=False
    ),
    "NestedCountingEnv, flags nested too": counting(
        m.NestedCountingEnv, nest_done=True, has_root_done=True
    ),
    "CountingBatchedEnv": lambda: m.CountingBatchedEnv(
        max_steps=torch.tensor([2, 4]), batch_size=[2]
    ),
    "HeterogeneousCountingEnv": counting(m.HeterogeneousCountingEnv),
    "HeterogeneousCountingEnv[2]": counting(m.HeterogeneousCountingEnv, 2),
    "HeterogeneousCountingEnv, serial": lambda: SerialEnv(2, ENVS["HeterogeneousCountingEnv"]),
    "MultiKeyCountingEnv": counting(m.MultiKeyCountingEnv),
    "MultiKeyCountingEnv[2]": counting(m.MultiKeyCountingEnv, 2),
    "MultiKeyCountingEnv, serial": lambda: SerialEnv(2, ENVS["MultiKeyCountingEnv"]),
    "EnvWithMetadata": m.EnvWithMetadata,
    "AutoResettingCountingEnv": lambda: m.AutoResettingCountingEnv(4, auto_reset=True),
    "AutoResetHeteroCountingEnv": lambda: m.AutoResetHeteroCountingEnv(4, auto_reset=True),
    "EnvWithDynamicSpec": m.EnvWithDynamicSpec,
    "EnvWithScalarAction": m.EnvWithScalarAction,
    "EnvWithScalarAction, singleton": lambda: m.EnvWithScalarAction(singleton=True),
    "EnvThatDoesNothing": m.EnvThatDoesNothing,
    "Str2StrEnv": m.Str2StrEnv,
    "EnvThatErrorsAfter10Iters": m.EnvThatErrorsAfter10Iters,
    "EnvWithTensorClass": counting(m.EnvWithTensorClass),
    "EnvWithTensorClass[2]": counting(m.EnvWithTensorClass, 2),
    "MockNestedResetEnv": lambda: nested_reset(True),
    "MockNestedResetEnv, not at root": lambda: nested_reset(False),
    "EnvThatErrorsBecauseOfStack": lambda: m.EnvThatErrorsBecauseOfStack(batch_size=[]),
    "FastImageEnv": lambda: m.FastImageEnv((3, 4, 4)),
    "FastImageEnv[2]": lambda: m.FastImageEnv((3, 4, 4), batch_size=(2,)),
    "HistoryTransform": transformed(m.HistoryTransform, counting(m.CountingEnv)),
    "AddPixelsTransform": transformed(m.AddPixelsTransform, counting(m.CountingEnv)),
    "CountingVecNormV2": transformed(
        lambda: m.CountingVecNormV2(in_keys=["observation"]), m.ContinuousActionVecMockEnv
    ),
}
"""Named by the class, and then by its options."""


class Keyless(TensorDictModuleBase):
    """Random actions by its own ``__call__``, without ``in_keys`` and ``out_keys``."""

    def __init__(self, env: EnvBase):
        super().__init__()
        self.action_spec = env.full_action_spec

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.update(self.action_spec.rand())


class Reader(TensorDictModuleBase):
    """Random actions by its own ``forward``; declares that it reads all observations."""

    def __init__(self, env: EnvBase):
        super().__init__()
        self.action_spec = env.full_action_spec
        self.in_keys = list(env.observation_keys)
        self.out_keys = list(env.action_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.update(self.action_spec.rand())


POLICIES: dict[str, Callable[[Any], Any]] = {
    "random": policies.random_policy,
    "keyless": Keyless,
    "reader": Reader,
    "actor": policies.actor,
}
"""For any env."""
