"""Envs as the loop by episodes steps them, and any TorchRL env stepped through TensorDicts."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect._upstream.torchrl import carried_entries
from tdcollect.collect.env_parts import ExactReward
from tdcollect.collect.step_dict import Key, StepDict, flat, from_next
from tdcollect.envs.adopted import reset_arguments
from tdcollect.envs.errors import SlotError
from tdcollect.envs.spaces import nested
from tdcollect.envs.transforms import base_of
from tdcollect.envs.wrapper import GymnasiumEnv


class SteppedEnv(abc.ABC):
    """An env that the loops step on StepDicts: a :class:`TensorDictEnv` or an ``ArrayEnv``.

    Attributes:
        transformed: the env with its transforms.
        carried: the entries that a step hands on to the next one.
        batch_size: the env's.
        step_bytes: the size of one step's observations, over all slots.
        base: the env itself; None where it is not tdcollect's.
        waits: whether some slots can be stepped while the others wait.
        home: the device of the entries that it takes and gives.
    """

    transformed: EnvBase
    carried: list[Key]
    batch_size: torch.Size
    step_bytes: int
    base: GymnasiumEnv | None
    waits = False
    home = torch.device("cpu")

    @property
    def own_pace(self) -> bool:
        """True if slots that are ready go on while others step."""
        return False

    @property
    def seeds_singly(self) -> bool:
        """True if single slots can be seeded."""
        return self.base is None or self.base.seeds_singly

    @property
    def resets_singly(self) -> bool:
        """True if single slots can be reset."""
        return self.base is None or self.base.resets_singly

    @property
    def rebuilds_singly(self) -> bool:
        """True if single slots can be built anew."""
        return self.base is not None and self.base.rebuilds_singly

    @property
    def marks_truncation(self) -> bool:
        """True if steps have a flag to mark a time limit with."""
        return keys.TRUNCATED in self.transformed.done_keys

    @property
    def broken_episodes(self) -> Mapping[int, Exception]:
        """The errors of slots whose envs the latest step built anew, by slot."""
        return {} if self.base is None else self.base.broken_episodes

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """The info of a slot's latest step; empty where the env is not tdcollect's."""
        return {} if self.base is None else self.base.latest_info(slot)

    def rebuild_slots(self, slots: list[int]) -> None:
        """Build the envs of ``slots`` anew."""
        assert self.base is not None
        self.base.rebuild_slots(slots)

    def reset_all(self, seeds: list[int] | None, options: dict[str, Any] | None) -> StepDict:
        """Start an episode in every slot; the entries of its first step."""
        arguments = reset_arguments(base_of(self.transformed), seeds, options)
        return flat(self.transformed.reset(**arguments))

    @abc.abstractmethod
    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """Buffers for ``count`` steps."""

    @abc.abstractmethod
    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> tuple[StepDict, SlotError | None]:
        """Step ``slots`` (None for all).

        Args:
            step: the step to take, with the policy's outputs.
            next_keys: the policy's outputs that belong to the following step.
            buffers: are written.
            slots: ascending.

        Returns:
            The following step's entries, of all slots; and the error of slots whose envs raised,
            whose rows mean nothing.
        """

    @abc.abstractmethod
    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``.

        Args:
            following: the entries that the latest step led to.
            starting: bool ``[N, 1]`` (``[1]`` unbatched), true for these slots.
            slots: ascending.
            seeds: one per slot in ``slots``.
            options: gymnasium's reset options.

        Returns:
            The entries that begin the next step, of all slots.
        """


class TensorDictEnv(SteppedEnv):
    """Any TorchRL env, stepped as it is, through TensorDicts.

    Args:
        transformed: the env with its transforms.
        exact: carries float64 rewards through the transforms; they are added to each step under
            ``"_exact_reward"``. None to leave them out.

    Raises:
        ValueError: for an env whose slots do not end one by one, each with a flag of its own, or
            whose observations are not tensors of fixed shapes.
    """

    def __init__(self, transformed: EnvBase, exact: ExactReward | None = None):
        if keys.DONE not in transformed.done_keys or len(transformed.done_keys_groups) > 1:
            raise ValueError(
                f"expected an env with one {keys.DONE!r} flag per slot, got the flags "
                f"{list(transformed.done_keys)}; collect by frames, and split the batch"
            )
        leaves = dict(transformed.observation_spec.items(True, True))
        odd = [key for key, leaf in leaves.items() if leaf.dtype is None or -1 in leaf.shape]
        if odd:
            raise ValueError(
                "expected an env whose observations are tensors of fixed shapes, got other ones "
                f"in {odd}; collect by frames"
            )
        base = base_of(transformed)
        self.transformed = transformed
        self.carried = carried_entries(transformed)
        self.batch_size = transformed.batch_size
        self.step_bytes = sum(v.shape.numel() * v.dtype.itemsize for v in leaves.values())
        self.base = base if isinstance(base, GymnasiumEnv) else None
        self.home = transformed.device or self.home
        self._exact = exact

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """``count`` Nones: this env allocates its own output."""
        return [None] * count

    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> tuple[StepDict, None]:
        """Step all slots; an env's error is raised."""
        env = self.transformed
        given = nested(step.items(), self.batch_size, env.device)
        if self._exact is None:
            following = flat(env.step(given).get(keys.NEXT))
        else:
            base: GymnasiumEnv = base_of(env)
            with base.exact_rewards():
                following = flat(env.step(given).get(keys.NEXT))
            reward = base.exact_reward().to(following[keys.REWARD].device)
            following[keys.EXACT_REWARD] = self._exact(reward)
        for key in next_keys:
            following.setdefault(from_next(key), step[key])
        return following, None

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``, where ``starting`` is true."""
        left_out = (keys.REWARD, keys.EXACT_REWARD)
        entries = {key: value for key, value in following.items() if key not in left_out}
        given = nested(entries.items(), self.batch_size, self.transformed.device)
        given.set(keys.RESET, starting.to(given.device) if given.device else starting)
        arguments = reset_arguments(base_of(self.transformed), seeds, options)
        return flat(self.transformed.reset(given, select_reset_only=True, **arguments))
