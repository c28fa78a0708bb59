"""Actions of a policy: masks of the valid ones, random ones, and checks of the ones it writes.

An env takes the argmax of any tensor in the place of a one-hot action, logits for example: a
policy that forgets to draw from its distribution would be evaluated as another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import (
    Binary,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from torchrl.envs import EnvBase, Transform, TransformedEnv

from tdcollect import keys
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.episodes import Block, Piece
from tdcollect.collect.policy import draws_from_spec, is_masked
from tdcollect.collect.step_dict import StepDict, flat
from tdcollect.envs.serial import SerialBackend
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.policy import DrawByRow, Streams
from tdcollect.evaluation.episodes.slot_envs import SlotEnvs
from tdcollect.keys import Key


class LegalActions:
    """Random actions that the masks of an env's action specs allow, slot by slot.

    A transform or the env itself keeps the masks, in the specs that its ``rand_action`` draws from.
    """

    def __init__(self, env: SteppedEnv, spec: Composite):
        self._env = env
        plain = not any(isinstance(leaf, MultiCategorical) for leaf in spec.values(True, True))
        self._singly = not (plain and draws_from_spec(env.transformed)) or is_masked(spec)
        self._streams = Streams(1)
        self._by_slot = DrawByRow(self._streams)

    def apply(self, slots: Sequence[int]) -> bool:
        """Tell whether actions must be drawn slot by slot.

        So they are if there are masks, now or at first, if the env has a ``rand_action`` of its
        own, and for ``MultiCategorical``, which draws batches choice by choice.
        """
        env = self._env
        envs = [env.envs[s] for s in slots] if isinstance(env, SlotEnvs) else [env.transformed]
        return self._singly or any(is_masked(one.full_action_spec) for one in envs)

    def draw(
        self, rows: StepDict, slots: Sequence[int], streams: Sequence[torch.Generator | None]
    ) -> None:
        """Add the actions of ``slots`` to the rows, each drawn from its own stream."""
        env = self._env
        for slot in slots:
            self._streams.current = [streams[slot]]
            with self._by_slot:
                drawn = self._of(rows, slot)
            for key in env.transformed.action_keys:
                value = drawn[key]
                if slot == slots[0]:
                    rows[key] = value.new_zeros((*env.batch_size, *value.shape))
                (rows[key][slot] if env.batch_size else rows[key]).copy_(value)

    def _of(self, rows: StepDict, slot: int) -> Mapping[Key, torch.Tensor]:
        """Return the actions of one slot."""
        env = self._env
        if isinstance(env, SlotEnvs):
            given = env.given(StepDict((key, value[slot]) for key, value in rows.items()))
            return env.entries(env.envs[slot].rand_action(given))
        spec = env.transformed.full_action_spec
        return flat((spec[slot] if env.batch_size else spec).rand())


class ActionCheck:
    """Checks the action entries: their shapes and dtypes, and the values of discrete ones.

    Floats are refused unless the spec has them, or they are exact one-hot rows. Bounds of
    continuous actions are not checked: TorchRL and gymnasium let envs clip them.
    """

    def __init__(self, env: EnvBase, dims: int):
        spec = env.full_action_spec_unbatched
        self._specs = {key: spec[key] for key in env.action_keys}
        self._dims = dims

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
        """Check all actions of the episodes in a block."""
        for key, spec in self._specs.items():
            entry = block.entries.get(key)
            if entry is not None and isinstance(spec, _LISTED):
                _check_values(key, spec, self._of(entry, block.pieces))

    def _of(self, entry: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the rows ``[B, ...]`` of episodes, out of an entry ``[*batch, t, ...]``."""
        entry = entry.flatten(0, self._dims - 1) if self._dims else entry.unsqueeze(0)
        return torch.cat([entry[p.slot, p.begin : p.stop] for p in pieces] or [entry[0, :0]])


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
    if isinstance(spec, MultiOneHot):
        blocks = values.split([box.n for box in spec.space], -1)
        return torch.stack([_one_hot(block) for block in blocks], -1)
    if isinstance(spec, OneHot):
        return _one_hot(values)
    if isinstance(spec, Binary):
        return (values == 0) | (values == 1)
    if isinstance(spec, MultiCategorical):
        return (values >= 0) & (values < spec.nvec.to(values.device))
    if isinstance(spec, Categorical):
        most = spec.space.n
        return (values >= 0) & (values < most) if most >= 0 else None
    return None


def _one_hot(values: torch.Tensor) -> torch.Tensor:
    return ((values == 0) | (values == 1)).all(-1) & (values.sum(-1) == 1)


def _message(key: Any, spec: TensorSpec, row: torch.Tensor) -> str:
    """Return the message for an action that does not fit the spec."""
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


ACTION_MASKS = "action_masks"
"""The name of the envs' method, as in sb3-contrib, and of the entry of the masks."""


def with_masks(env: EnvBase, policy: Any) -> EnvBase:
    """Return the env, under a transform that adds masks if a module of the policy reads them.

    Such a module has an attribute ``mask_size``.
    """
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    sizes = [size for module in modules if (size := getattr(module, "mask_size", None))]
    if not sizes:
        return env
    check_masks(env)
    # Its transforms are those of the env given, which stays as it is.
    own = TransformedEnv(env, auto_unwrap=True)
    return own.append_transform(ActionMasks(sizes[0]))


def check_masks(env: EnvBase) -> None:
    """Raise ValueError for an env without masks, or one whose masks cannot be read."""
    base = base_of(env)
    name = base.backend_name if isinstance(base, GymnasiumEnv) else type(base).__name__
    if name != SerialBackend.name:
        raise ValueError(
            f"expected backend='serial', got {name!r}: "
            "the policy asks for masks of valid actions, and the envs' action_masks() can be "
            "called in this process only; make the env with backend='serial'"
        )
    for slot, one in enumerate(base.slot_envs):
        try:
            one.get_wrapper_attr(ACTION_MASKS)
        except AttributeError:
            raise ValueError(
                f"expected an env with a method action_masks(), got {one} in slot {slot}: the "
                "policy asks for masks of valid actions; wrap the env as in training "
                "(sb3_contrib.common.wrappers.ActionMasker)"
            ) from None


def read_mask(env: Any, slot: int, size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the mask of valid actions of one gymnasium env, bool ``[size]``."""
    mask = np.asarray(env.get_wrapper_attr(ACTION_MASKS)())
    if mask.size != size:
        raise ValueError(
            f"expected action_masks() of slot {slot} to give {size} values, one for each choice, "
            f"got shape {mask.shape}; correct the env"
        )
    return mask.reshape(-1).astype(bool)


class ActionMasks(Transform):
    """Adds the masks of the envs in this process, bool ``[N, size]``, True for valid actions.

    They are read after each reset and step of a slot; all are True once its episode has ended.
    """

    def __init__(self, size: int):
        super().__init__(in_keys=[], out_keys=[ACTION_MASKS])
        self._size = size

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict.get(keys.DONE).reshape(-1).tolist()
        return self._with_masks(next_tensordict, done)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        done = tensordict_reset.get(keys.DONE).reshape(-1).tolist()
        return self._with_masks(tensordict_reset, done)

    def _with_masks(self, tensordict: TensorDictBase, done: list[bool]) -> TensorDictBase:
        masks = np.ones((len(done), self._size), bool)
        base = base_of(self.parent)
        for slot, env in enumerate(base.slot_envs):
            if not done[slot]:
                masks[slot] = read_mask(env, slot, self._size)
        shape = (*tensordict.batch_size, self._size)
        return tensordict.set(ACTION_MASKS, torch.from_numpy(masks).reshape(shape))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the entry of the masks."""
        shape = (*observation_spec.shape, self._size)
        observation_spec[ACTION_MASKS] = Binary(self._size, shape=shape, dtype=torch.bool)
        return observation_spec
