"""Masks of valid actions: what ``action_masks()`` of gymnasium envs tells, shown to the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, Transform, TransformedEnv

from tdcollect import keys
from tdcollect.collect.fast.transforms import base_of
from tdcollect.envs.serial import SerialBackend
from tdcollect.envs.wrapper import GymnasiumEnv

ACTION_MASKS = "action_masks"
"""The method of envs, as sb3-contrib has it, and the entry of its masks."""


def with_masks(env: EnvBase, policy: Any) -> EnvBase:
    """The env, under a transform that shows its masks where a module of the policy asks for them.

    A module asks with an attribute ``mask_size``.

    Raises:
        ValueError: for an env without masks, or one whose masks cannot be read.
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
    backend = base.stepper.backend if isinstance(base, GymnasiumEnv) else None
    if not isinstance(backend, SerialBackend):
        raise ValueError(  # noqa: TRY004, the backend is an argument's value
            f"expected backend='serial', got {getattr(backend, 'name', type(base).__name__)!r}: "
            "the policy asks for masks of valid actions, and the envs' action_masks() can be "
            "called in this process only; make the env with backend='serial'"
        )
    for slot, one in enumerate(backend.envs):
        try:
            one.get_wrapper_attr(ACTION_MASKS)
        except AttributeError:
            raise ValueError(
                f"expected an env with a method action_masks(), got {one} in slot {slot}: the "
                "policy asks for masks of valid actions; wrap the env as in training "
                "(sb3_contrib.common.wrappers.ActionMasker)"
            ) from None


def read_mask(env: Any, slot: int, size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The mask bool ``[size]`` of valid actions of one gymnasium env.

    Raises:
        ValueError: for a mask of another size.
    """
    mask = np.asarray(env.get_wrapper_attr(ACTION_MASKS)())
    if mask.size != size:
        raise ValueError(
            f"expected action_masks() of slot {slot} to give {size} values, one for each choice, "
            f"got shape {mask.shape}; correct the env"
        )
    return mask.reshape(-1).astype(bool)


class ActionMasks(Transform):
    """Shows the masks of the envs in this process, bool ``[N, size]``, True for valid actions.

    They are read after each reset and step of a slot; where its episode has ended, all is True.

    Args:
        size: the number of choices, of all parts of the action together.
    """

    def __init__(self, size: int):
        super().__init__(in_keys=[], out_keys=[ACTION_MASKS])
        self._size = size

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict.get(keys.DONE).reshape(-1).tolist()
        return self._shown(next_tensordict, done)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        done = tensordict_reset.get(keys.DONE).reshape(-1).tolist()
        return self._shown(tensordict_reset, done)

    def _shown(self, tensordict: TensorDictBase, done: list[bool]) -> TensorDictBase:
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
