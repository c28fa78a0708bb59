"""Policies that must predict the counting env."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer

from tdcollect import keys
from tdcollect.display import one_line
from tdcollect.testing.counting import CountingRules

HIDDEN = "counting_hidden"
"""Entry of the recurrent policy's hidden state, float32 ``[N, 1]``: the step count, if all is well.
"""


class CountingPolicy(TensorDictModuleBase):
    """A recurrent policy that predicts the counting env from its hidden state alone.

    It never sees the observation. It reads its hidden state at the root, takes zero for it where
    ``"is_init"`` says so, acts by it, and writes it plus one under ``"next"``, as TorchRL's
    recurrent modules do. A hidden state that is lost, carried over an episode's end, reset too
    often or handed to another slot therefore shows as a wrong action.

    The env needs ``"is_init"`` (``InitTracker``, or ``make_env(is_init=True)``) and the primer that
    :meth:`make_tensordict_primer` makes. tdcollect's collector adds both, and TorchRL's does with
    ``auto_register_policy_transforms=True``.

    Args:
        rules: those of the env.
        categorical_action_encoding: actions int64 ``[N]`` rather than one-hot ``[N, num_actions]``.
    """

    def __init__(
        self, rules: CountingRules = CountingRules(), *, categorical_action_encoding: bool = False
    ):
        super().__init__()
        self.in_keys = [HIDDEN, keys.IS_INIT]
        self.out_keys = [keys.ACTION, (keys.NEXT, HIDDEN)]
        self.rules = rules
        self.categorical = categorical_action_encoding

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        hidden = tensordict[HIDDEN].masked_fill(tensordict[keys.IS_INIT], 0)
        action = _encode(hidden.squeeze(-1).long(), self.rules, self.categorical)
        tensordict[keys.ACTION] = action
        tensordict[keys.NEXT, HIDDEN] = hidden + 1
        return tensordict

    def __repr__(self) -> str:
        return one_line(self, repr(self.rules), f"categorical={self.categorical}")

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that starts the hidden state at zero, at each reset."""
        return TensorDictPrimer({HIDDEN: Unbounded(shape=(1,))}, expand_specs=True)


class StatelessCountingPolicy(TensorDictModuleBase):
    """A policy that predicts the counting env from its observation.

    Args:
        rules: those of the env.
        categorical_action_encoding: actions int64 ``[N]`` rather than one-hot ``[N, num_actions]``.
    """

    def __init__(
        self, rules: CountingRules = CountingRules(), *, categorical_action_encoding: bool = False
    ):
        super().__init__()
        self.in_keys = [keys.OBSERVATION]
        self.out_keys = [keys.ACTION]
        self.rules = rules
        self.categorical = categorical_action_encoding

    def __repr__(self) -> str:
        return one_line(self, repr(self.rules), f"categorical={self.categorical}")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = tensordict[keys.OBSERVATION][..., 0].long()
        tensordict[keys.ACTION] = _encode(step, self.rules, self.categorical)
        return tensordict


def _encode(step: torch.Tensor, rules: CountingRules, categorical: bool) -> torch.Tensor:
    action = rules.action(step)
    return action if categorical else torch.nn.functional.one_hot(action, rules.num_actions)
