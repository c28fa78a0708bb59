"""Any TorchRL envs as slots: each is seeded and stepped by itself, with streams of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.torchrl import carried_entries, resets_with_seed, wrapped_env
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.step_dict import StepDict, flat
from tdcollect.display import one_line
from tdcollect.envs.slots import Can, SlotError
from tdcollect.envs.spaces import nested
from tdcollect.envs.traits import all_transforms_of, innermost
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key, from_next
from tdcollect.randomness import GlobalStream, Outside

_SUCCESS = ("is_success", "success")


class SlotEnvs(SteppedEnv):
    """Env slots that are envs of their own, each with its transforms; stepped one after the other.

    Slots wait while others run. Each episode has streams of its own in the place of the global
    generators. Where an env has flags of groups of agents only, its episode ends when all agents
    are done.

    Args:
        envs: one per slot, all alike, each of batch size ``[]`` or of one element.
        make: makes another such env; None if nothing does.

    Attributes:
        name: the env's name in messages.
        device: the envs'.
        prepare: called on each env that is built anew; None for nothing.

    Raises:
        ValueError: for an env whose entries are not tensors of fixed shapes.
    """

    base = None
    marks_truncation = True

    def __init__(self, envs: Sequence[EnvBase], make: Callable[[], EnvBase] | None = None):
        self.envs = list(envs)
        self._closed = False
        self._make = make
        self.can = Can(rebuild=make is not None)
        self.prepare: Callable[[EnvBase], None] | None = None
        env = self.envs[0]
        leaves = {
            key: leaf
            for spec in (env.full_observation_spec, env.full_reward_spec, env.full_done_spec)
            for key, leaf in spec.items(True, True)
        }
        odd = [key for key, leaf in leaves.items() if leaf.dtype is None or -1 in leaf.shape]
        if odd:
            raise ValueError(
                "expected an env whose entries are tensors of fixed shapes, got other ones in "
                f"{odd}; encode text as numbers, pad what varies, and put agents that differ into "
                "groups of their own (group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)"
            )
        self.name = env_name(env)
        self.transformed = env
        self.carried = carried_entries(env)
        self.batch_size = torch.Size([len(self.envs)])
        self.step_bytes = len(self.envs) * sum(
            leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves.values()
        )
        self._dims = len(env.batch_size)
        self.device = env.device
        self.home = env.device or self.home
        self._seeds_in_reset = resets_with_seed(innermost(env))
        self._streams: list[GlobalStream | None] = [None] * len(self.envs)
        self._latest: list[StepDict] = [StepDict() for _ in self.envs]
        self._following: list[StepDict | None] = [None] * len(self.envs)

    @property
    def is_closed(self) -> bool:
        """True if the envs are closed, as far as they tell."""
        base = innermost(self.envs[0])
        tells = isinstance(base, GymnasiumEnv) or wrapped_env(base) is not base
        return self._closed or (tells and base.is_closed)

    @property
    def transforms(self) -> list[T.Transform]:
        """The transforms of all slots."""
        return [transform for env in self.envs for transform in all_transforms_of(env)]

    def outside(self) -> Outside:
        """Keep the global generators as they are outside, while slots are reset and stepped."""
        return Outside(self.device)

    def close(self) -> None:
        """Close the envs; a second call does nothing."""
        if not self._closed:
            self._closed = True
            for env in self.envs:
                env.close()

    def unseed(self) -> None:
        """Have the envs' next episodes start from fresh entropy."""
        fresh = np.random.SeedSequence().generate_state(len(self.envs), np.uint32) >> 1
        for env, seed in zip(self.envs, fresh.tolist(), strict=True):
            with self.outside(), GlobalStream(seed, self.device):
                env.set_seed(seed)

    def rebuild_slots(self, slots: list[int]) -> None:
        """Build the envs of ``slots`` anew."""
        assert self._make is not None
        for slot in slots:
            with suppress(Exception):  # of an env that has failed
                self.envs[slot].close()
            self.envs[slot] = self._make()
            if self.prepare is not None:
                self.prepare(self.envs[slot])
            self._streams[slot] = None
        self.transformed = self.envs[0]

    def latest_info(self, slot: int) -> dict[str, Any]:
        """The entries of a slot's latest step that tell of success, under gymnasium's names."""
        base = innermost(self.envs[slot])
        if isinstance(base, GymnasiumEnv):
            return dict(base.latest_info(0))
        row = self._following[slot] or StepDict()
        return {name: row[name].cpu().numpy() for name in _SUCCESS if name in row}

    def reset_slot(self, slot: int, seed: int | None) -> StepDict:
        """Start an episode in one slot, within :meth:`outside`; the row of its first step."""
        env = self.envs[slot]
        if seed is not None:
            self._streams[slot] = GlobalStream(seed, self.device)
        with self._stream(slot):
            if seed is None:
                given = env.reset()
            elif self._seeds_in_reset:
                given = env.reset(seed=seed)
            else:
                env.set_seed(seed)
                given = env.reset()
        self._latest[slot] = self._row(given)
        return self._latest[slot]

    def step_slot(self, slot: int, given: TensorDictBase) -> StepDict:
        """Step one slot, within :meth:`outside`; the row of the following step."""
        with self._stream(slot):
            stepped = self.envs[slot].step(given).get(keys.NEXT)
        row = self._following[slot] = self._row(stepped)
        self._latest[slot] = StepDict({**self._latest[slot], **row})
        return row

    def given(self, row: StepDict) -> TensorDictBase:
        """The TensorDict of one slot's row, as its env takes it."""
        env = self.transformed
        lead = (1,) * self._dims
        entries = ((key, value.reshape(lead + value.shape)) for key, value in row.items())
        return nested(entries, env.batch_size, self.device)

    def reset_all(self, seeds: list[int] | None, options: dict[str, Any] | None) -> StepDict:
        """Start an episode in every slot; the entries of its first step."""
        slots = list(range(len(self.envs)))
        rows = self._reset(slots, seeds)
        return StepDict((key, torch.stack([row[key] for row in rows])) for key in rows[0])

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """``count`` Nones: envs allocate their own output."""
        return [None] * count

    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> tuple[StepDict, SlotError | None]:
        """Step ``slots`` (None for all); the others wait.

        Raises:
            KeyError: if the policy has not written an action.
            SlotError: if all envs raised before any had been stepped.
        """
        missing = [key for key in self.transformed.action_keys if key not in step]
        if missing:
            raise KeyError(
                f"expected the entry {missing[0]!r} in the input of step(), got the entries "
                f"{', '.join(map(repr, step))}; have the policy write it (its out_keys)"
            )
        causes: dict[int, Exception] = {}
        if self.device is not None:  # each entry crosses once, rather than once per slot
            step = StepDict((key, value.to(self.device)) for key, value in step.items())
        with self.outside():
            for slot in range(len(self.envs)) if slots is None else slots:
                given = self.given(StepDict((key, value[slot]) for key, value in step.items()))
                try:
                    self.step_slot(slot, given)
                except Exception as error:
                    causes[slot] = error
        some = next((row for row in self._following if row is not None), None)
        if some is None:
            raise SlotError("step", causes)
        rows = [row or some for row in self._following]
        following = StepDict((key, torch.stack([row[key] for row in rows])) for key in some)
        for key in next_keys:
            following.setdefault(from_next(key), step[key])
        return following, SlotError("step", causes) if causes else None

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``."""
        rows = self._reset(slots, seeds)
        begun = StepDict(following)
        for key in self.carried:
            if key in following:
                begun[key] = following[key].clone()
            elif key in rows[0]:
                begun[key] = torch.stack([row[key] for row in self._latest])
            else:
                continue
            for slot, row in zip(slots, rows, strict=True):
                # As nothing of an episode may reach the next one.
                begun[key][slot] = row.get(key, 0)
        return begun

    def _reset(self, slots: list[int], seeds: list[int] | None) -> list[StepDict]:
        """Start an episode in ``slots``; their rows."""
        causes: dict[int, Exception] = {}
        rows = []
        given: list[int] | list[None] = seeds or [None] * len(slots)
        with self.outside():
            for slot, seed in zip(slots, given, strict=True):
                try:
                    rows.append(self.reset_slot(slot, seed))
                except Exception as error:
                    causes[slot] = error
        if causes:
            raise SlotError("reset", causes)
        return rows

    def _stream(self, slot: int) -> GlobalStream:
        stream = self._streams[slot]
        if stream is None:
            stream = self._streams[slot] = GlobalStream(0, self.device)
        return stream

    def entries(self, tensordict: TensorDictBase) -> StepDict:
        """The entries of one slot's TensorDict, without its batch dimensions."""
        dims, row = self._dims, flat(tensordict)
        return StepDict((k, v.reshape(v.shape[dims:])) for k, v in row.items()) if dims else row

    def _row(self, tensordict: TensorDictBase) -> StepDict:
        """The entries of one slot, with flags of its own."""
        row = self.entries(tensordict)
        if keys.DONE not in row:
            row[keys.DONE] = _all_groups(row, keys.DONE)
            row[keys.TERMINATED] = _all_groups(row, keys.TERMINATED) & row[keys.DONE]
        if keys.TRUNCATED not in row:
            row[keys.TRUNCATED] = row[keys.DONE] & ~row[keys.TERMINATED]
        return row

    def __repr__(self) -> str:
        return one_line(self, self.name, f"{len(self.envs)} slots")


_NAMES = ("scenario_name", "env_name", "task_name")
"""Attributes of TorchRL's wrappers that tell which env of a library it is."""


def env_name(env: EnvBase) -> str:
    """Return the name of an env: gymnasium's id, or its class with what it was made from."""
    base = innermost(env)
    if isinstance(base, GymnasiumEnv):
        return base.name
    inner = wrapped_env(base)
    if isinstance(inner, gym.Env) and inner.spec is not None:
        return inner.spec.id
    told = [value for name in _NAMES if isinstance(value := vars(base).get(name), str)]
    metadata = getattr(inner, "metadata", None)
    if not told and isinstance(metadata, Mapping) and isinstance(metadata.get("name"), str):
        told = [metadata["name"]]  # as PettingZoo's envs have it
    return f"{type(base).__name__}({', '.join(told)})" if told else type(base).__name__


def _all_groups(row: StepDict, name: str) -> torch.Tensor:
    """The flag ``[1]`` of an episode, from those of its groups of agents."""
    flags = [v.all() for key, v in row.items() if not isinstance(key, str) and key[-1] == name]
    return torch.stack(flags).all().reshape(1)
