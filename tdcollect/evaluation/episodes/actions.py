"""Actions: checks of a policy's, and random ones that are legal.

An env takes the argmax of any tensor in the place of a one-hot action, logits for example: a
policy that forgets to draw from its distribution would be evaluated as another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrl.data import (
    Binary,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from torchrl.envs import EnvBase

from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.episodes import Block
from tdcollect.collect.policy import RandomActions, draws_from_spec, is_masked
from tdcollect.collect.step_dict import StepDict, flat
from tdcollect.evaluation.episodes.data import rows_of
from tdcollect.evaluation.episodes.inference import DrawByRow, Inference, Layout
from tdcollect.evaluation.episodes.opening import SlotEnvs
from tdcollect.keys import Key


class LegalActions:
    """Random actions that the masks of an env's action specs allow, slot by slot.

    A transform or the env itself keeps the masks, in the specs that its ``rand_action`` draws from.
    """

    def __init__(self, env: SteppedEnv, spec: Composite):
        self._env = env
        self._apart = env if isinstance(env, SlotEnvs) and env.apart else None
        plain = not any(isinstance(leaf, MultiCategorical) for leaf in spec.values(True, True))
        self._singly = not (plain and draws_from_spec(env.transformed)) or is_masked(spec)
        self._by_slot = DrawByRow(1)

    def apply(self, slots: Sequence[int]) -> bool:
        """Return whether actions must be drawn slot by slot, for masks, now or at first.

        Or for a ``rand_action`` of the env's own, or ``MultiCategorical``, drawn choice by choice.
        """
        apart = self._apart
        envs = [apart.envs[s] for s in slots] if apart else [self._env.transformed]
        return self._singly or any(is_masked(one.full_action_spec) for one in envs)

    def draw(
        self, rows: StepDict, slots: Sequence[int], streams: Sequence[torch.Generator | None]
    ) -> None:
        """Add the actions of ``slots`` to the rows, each drawn from its own stream."""
        env = self._env
        for slot in slots:
            self._by_slot.streams = [streams[slot]]
            with self._by_slot:
                drawn = self._of(rows, slot)
            for key in env.transformed.action_keys:
                value = drawn[key]
                if slot == slots[0]:
                    rows[key] = value.new_zeros((*env.batch_size, *value.shape))
                (rows[key][slot] if env.batch_size else rows[key]).copy_(value)

    def _of(self, rows: StepDict, slot: int) -> Mapping[Key, torch.Tensor]:
        env, apart = self._env, self._apart
        if apart:
            row = apart.given(StepDict((key, value[slot]) for key, value in rows.items()))
            return apart.entries(apart.envs[slot].rand_action(row))
        spec = env.transformed.full_action_spec
        if not env.batch_size:
            return flat(spec.rand())
        one = spec[slot]
        for key, leaf in spec.items(True, True):
            if getattr(leaf, "mask", None) is not None:  # which an index of Categorical drops
                one[key].update_mask(leaf.mask[slot])
        return flat(one.rand())


class RandomActor(Inference):
    """Random actions of all rows at once, or of one slot after the other where masks tell them."""

    def __init__(self, policy: RandomActions, env: SteppedEnv, layout: Layout):
        super().__init__(policy, layout)
        self._legal = LegalActions(env, policy.spec)
        self._is_probed = False

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        self._carried = carried
        self._is_probed = not self._legal.apply(range(self._slots))
        return super().probe(rows, carried) if self._is_probed else (StepDict(), [])

    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        if self._legal.apply(active):
            self._legal.draw(rows, active, self.streams)
            return
        if not self._is_probed:
            super().probe(rows, self._carried)
            self._is_probed = True
        super().act(rows, active)


class ActionCheck:
    """Checks the action entries: their shapes and dtypes, and the values of discrete ones.

    Floats are refused unless the spec has them, or they are exact one-hot rows. Bounds of
    continuous actions are not checked: TorchRL and gymnasium let envs clip them.
    """

    def __init__(self, env: EnvBase):
        spec, self._specs = env.full_action_spec_unbatched, dict[Key, TensorSpec]()
        for key in env.action_keys:
            if spec[key].dtype is not None:  # of words nothing is checked
                self._specs[key] = spec[key]

    def check_first_call(self, rows: StepDict) -> None:
        """Check the outputs ``[B, ...]`` of a policy's first call."""
        for key, spec in self._specs.items():
            values = rows.get(key)
            if values is None:
                continue  # the env raises for it
            floats = values.is_floating_point() and not spec.dtype.is_floating_point
            floats = floats and not isinstance(spec, _ONE_HOT)
            if values.shape[1:] != spec.shape or floats or values.is_complex():
                raise ValueError(_message(key, spec, values[0]))
            _check_values(key, spec, values)

    def check_block(self, block: Block) -> None:
        for key, spec in self._specs.items():
            entry = block.entries.get(key)
            if entry is not None and block.pieces and isinstance(spec, _LISTED):
                rows = [rows_of(piece, entry) for piece in block.pieces]
                _check_values(key, spec, torch.cat(rows))


_ONE_HOT = (OneHot, MultiOneHot)
_LISTED = (OneHot, MultiOneHot, Categorical, MultiCategorical, Binary)


def _check_values(key: Any, spec: TensorSpec, values: torch.Tensor) -> None:
    fits = _fitting(spec, values)
    if fits is not None and not fits.all():
        rows = fits.reshape(len(values), -1).all(-1)
        raise ValueError(_message(key, spec, values[int(rows.logical_not().nonzero()[0])]))


def _fitting(spec: TensorSpec, values: torch.Tensor) -> torch.Tensor | None:
    """Mark the values ``[B, *shape]`` that a discrete spec has; None for other specs."""
    # Subclasses come before their bases.
    if isinstance(spec, _ONE_HOT):
        sizes = [box.n for box in spec.space] if isinstance(spec, MultiOneHot) else values.shape[-1]
        ones = torch.stack([block.sum(-1) == 1 for block in values.split(sizes, -1)], -1)
        return ones & ((values == 0) | (values == 1)).all(-1, keepdim=True)
    if isinstance(spec, Binary):
        return (values == 0) | (values == 1)
    if isinstance(spec, MultiCategorical):
        return (values >= 0) & (values < spec.nvec.to(values.device))
    if isinstance(spec, Categorical) and spec.space.n >= 0:
        return (values >= 0) & (values < spec.space.n)
    return None


def _message(key: Any, spec: TensorSpec, row: torch.Tensor) -> str:
    what = "actions"
    advice = "write what env.action_spec.rand() gives"
    if isinstance(spec, _ONE_HOT):
        what = "one-hot rows"
        advice = (
            "draw from the logits with ProbabilisticActor(distribution_class=OneHotCategorical), "
            "or write torch.nn.functional.one_hot(logits.argmax(-1), n)"
        )
    elif isinstance(spec, Binary):
        what = "bits"
        advice = "write integers or bools that are 0 or 1"
    elif isinstance(spec, (Categorical, MultiCategorical)):
        what = "numbers of choices"
        advice = "draw from the logits with a Categorical, or write logits.argmax(-1)"
    shape, dtype = tuple(spec.shape), str(spec.dtype).removeprefix("torch.")
    values = str(row.detach().cpu().tolist())
    return (
        f"expected {what} of shape {shape} and dtype {dtype} in the policy's entry {key!r}, as the "
        f"env's action spec says, got {str(row.dtype).removeprefix('torch.')} of shape "
        f"{tuple(row.shape)}: {values if len(values) <= 80 else values[:80] + '...'}; {advice}"
    )
