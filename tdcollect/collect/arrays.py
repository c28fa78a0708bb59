"""ArrayEnv: an env and its transforms on StepDicts; which envs are stepped so, or why not.

The env inside is gymnasium slots, which write into arrays, or any other TorchRL env, stepped by its
own code on TensorDicts. The plan of an env, and a policy on StepDicts, are kept while what they
depend on is the same.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data.utils import contains_lazy_spec
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from tdcollect import keys
from tdcollect._upstream.names import missing
from tdcollect._upstream.torchrl import (
    arguments_of_resets,
    carried_entries,
    complete_done,
    env_reset_of,
    env_step_of,
    replaced_methods,
    skipped_step,
    steps_alone,
)
from tdcollect.collect.lowering import Shown, joined, lower_members, lower_transforms
from tdcollect.collect.step_dict import (
    StepDict,
    chunk_steps,
    flat,
    like_rows,
    sent,
    with_index,
)
from tdcollect.collect.transforms import StepTransform, inverted
from tdcollect.envs.adopted import ParallelEnv as OurParallelEnv
from tdcollect.envs.adopted import adopt, reset_arguments
from tdcollect.envs.beside import HonouredStarts
from tdcollect.envs.slots import Can, SlotError, Stepper
from tdcollect.envs.spaces import StepBuffers, TextLeaf, nested
from tdcollect.envs.traits import NotKnown, all_transforms_of, base_of, innermost, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv, is_of_agents, texts_of
from tdcollect.keys import Key, from_next, is_next

_CPU = torch.device("cpu")
_AHEAD = 8  # the steps and resets whose buffers are allocated together at first, unless large

Seeds: TypeAlias = list[int] | None
Options: TypeAlias = dict[str, Any] | None
Stepped: TypeAlias = tuple[StepDict, SlotError | None]
"""The following step's entries; the error of slots whose envs raised, whose rows mean nothing."""

Exact: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Carries float64 rewards through the transforms."""


# ------------------------------------------------------------------ envs without their transforms


class InnerEnv:
    """An env without its transforms.

    Attributes:
        slots: the env on gymnasium slots; None where it has none.
        step_bytes: the size of one step's observations, over all slots.
        whole: whether a reset gives entries of slots that go on, too, which mean nothing.
        follows_specs: as of :class:`StepTransform`.
        transforms: those that run inside of it, innermost first.
        home: the device of its entries.
        resets_by_mask: whether resets may be asked for at every step, by marks alone.
        steps_as_graph: whether steps and such resets may be captured in a CUDA graph.
        how: the way in which it is stepped, in words.
        cost: about what that costs where it leaves the arrays; empty on them.
    """

    slots: GymnasiumEnv | None = None
    step_bytes: int
    whole: bool = False
    follows_specs: bool = True
    transforms: Sequence[StepTransform] = ()
    home: torch.device = _CPU
    resets_by_mask: bool = False
    steps_as_graph: bool = False
    how: str = "steps on arrays"
    cost: str = ""
    rewards: Sequence[Key] = (keys.REWARD,)  # the entries that no reset gives

    def on_host(self, flag: torch.Tensor) -> torch.Tensor | None:
        """The flag's copy on the CPU, if there is one already."""
        return None

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[Any]:
        """Buffers for ``count`` steps; see :meth:`GymnasiumEnv.allocate`."""
        return [None] * count

    def step(self, step: StepDict, slots: list[int] | None, buffers: Any) -> Stepped:
        """Step ``slots`` (None for all); see :meth:`SteppedEnv.advance`."""
        raise NotImplementedError

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        """Start an episode in ``slots``, those marked; the entries of all slots, with flags."""
        raise NotImplementedError


class SlotArrays(InnerEnv):
    """gymnasium slots, which write into arrays."""

    slots: GymnasiumEnv

    def __init__(self, slots: GymnasiumEnv):
        self.slots = slots
        self.step_bytes = _bytes_of(slots)
        self.rewards = slots.reward_keys
        self._spare: list[StepBuffers] = []
        self._kind = (False, False)  # of buffers: pinned, and exact
        self._ahead = min(_AHEAD, chunk_steps(self.step_bytes))
        self._done: tuple[torch.Tensor, torch.Tensor] | None = None  # at home, and on the CPU

    def allocate(self, count: int, pinned: bool, exact: bool) -> list[StepBuffers]:
        spare = self._spare if self._kind == (pinned, exact) else []
        if len(spare) < count:
            spare += self.slots.allocate(max(count - len(spare), self._ahead), pinned, exact)
            # Where there are many resets, or short batches, few are left over.
            self._ahead = min(2 * self._ahead, chunk_steps(self.step_bytes))
        self._spare, self._kind = spare[count:], (pinned, exact)
        return spare[:count]

    def step(self, step: StepDict, slots: list[int] | None, buffers: StepBuffers) -> Stepped:
        stepper, error = self.slots.stepper, None
        try:
            actions = stepper.backend.action.of_step(step, self.slots.batch_size)
            stepper.step(actions, slots, buffers)
        except SlotError as raised:
            error = raised
        return self.entries(buffers), error

    def entries(self, buffers: StepBuffers) -> StepDict:
        """The entries of a step or reset, at home."""
        entries = StepDict(zip(self.slots.writes, buffers.tensors, strict=True))
        if self.slots.stepper.group_map:
            del entries[keys.REWARD]  # the sum of the agents'
        if self.home == _CPU:
            return entries
        at_home = StepDict((key, sent(value, self.home)) for key, value in entries.items())
        self._done = at_home[keys.DONE], entries[keys.DONE]
        return at_home

    def on_host(self, flag: torch.Tensor) -> torch.Tensor | None:
        # No transform that is known to follow the specs writes into the flag itself.
        return self._done[1] if self._done is not None and flag is self._done[0] else None

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        (buffers,) = self.allocate(1, *self._kind)
        self.slots.stepper.reset(slots, buffers, seeds, options)
        begun = self.entries(buffers)
        for key in self.rewards:
            del begun[key]
        return begun


class MemberSlots(SlotArrays):
    """The slots of envs that begin their episodes by their own resets, transforms included."""

    whole = True

    def __init__(
        self,
        slots: GymnasiumEnv,
        members: Sequence[EnvBase],
        transforms: Sequence[StepTransform],
        shown: Mapping[Key, torch.Tensor],
    ):
        super().__init__(slots)
        self.transforms = transforms
        self._members, self._shown = members, shown
        self._specified: set[Key] | None = None
        if not all(transform.follows_specs for transform in transforms):
            specs = members[0].output_spec.values()
            self._specified = {key for spec in specs for key in spec.keys(True, True)}

    def step(self, step: StepDict, slots: list[int] | None, buffers: StepBuffers) -> Stepped:
        step = inverted(self.transforms, step)
        following, error = super().step(step, slots, buffers)
        for transform in self.transforms:
            transform.step(step, following)
        if self._specified is not None:  # the SerialEnv has room for no other entries
            for key in [key for key in following if key not in self._specified]:
                del following[key]
        # Its buffers are zero where an env writes nothing, in steps and in resets.
        for key in self._shown.keys() - following.keys():
            following[key] = torch.zeros_like(self._shown[key])
        return following, error

    def entries(self, buffers: StepBuffers) -> StepDict:
        # Its transforms run on the CPU, wherever home is.
        return StepDict(zip(self.slots.writes, buffers.tensors, strict=True))

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        starting = torch.ones(1, dtype=torch.bool)
        for i, slot in enumerate(slots):
            member = self._members[slot]
            packed = nested([(keys.RESET, starting)], member.batch_size, member.device)
            seed = None if seeds is None else [seeds[i]]
            row = flat(member.reset(packed, **reset_arguments(member, seed, options)))
            for key, shown in self._shown.items():
                if key in row:
                    shown[slot] = row[key]
        self.slots.stepper.follow()
        begun = StepDict((key, shown.clone()) for key, shown in self._shown.items())
        flags = torch.zeros_like(marks[keys.RESET])
        begun.update((key, flags) for key in keys.FLAGS)
        return begun


class TorchRLEnv(InnerEnv):
    """Any TorchRL env without its transforms, stepped by its own code on TensorDicts."""

    whole = True
    follows_specs = False
    cost = "its own step, and 30 to 60 us"

    def __init__(self, env: EnvBase, reason: str):
        self.how = f"steps by its own code, on TensorDicts: {reason}"
        self.step_bytes = _bytes_of(env)
        self._env = env
        for name in ("resets_by_mask", "steps_as_graph"):
            # Statically at first: wrappers would ask the env inside.
            has_it = inspect.getattr_static(env, name, False)
            setattr(self, name, bool(has_it and getattr(env, name)))
        self.home = with_index(env.device) if env.device else _CPU
        self._flags = [(key, spec.shape) for key, spec in env.full_done_spec.items(True, True)]
        self._step, self._reset = env_step_of(env), env_reset_of(env)
        self._arguments = arguments_of_resets(env)
        self._starts = HonouredStarts(env)

    def step(self, step: StepDict, slots: list[int] | None, buffers: None) -> Stepped:
        with self._starts:
            return self._completed(self._step(self._packed(step))), None

    def _packed(self, entries: StepDict) -> TensorDict:
        env = self._env
        return nested(entries.items(), env.batch_size, env.device and self.home)

    def _completed(self, answer: TensorDictBase) -> StepDict:
        entries = flat(answer)
        if all(key in entries and entries[key].shape == shape for key, shape in self._flags):
            return entries
        complete_done(self._env, answer)
        return flat(answer)

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        arguments = {**self._arguments, **reset_arguments(self._env, seeds, options)}
        with self._starts:  # transforms may step in resets
            return self._completed(self._reset(self._packed(marks), **arguments))


class WholeEnv(InnerEnv):
    """Any TorchRL env with its transforms, by its own ``step``."""

    def __init__(self, env: EnvBase, exact: bool):
        base = base_of(env)
        self.slots = base if isinstance(base, GymnasiumEnv) else None
        self.step_bytes = _bytes_of(env)
        self.home = with_index(env.device) if env.device else _CPU
        self._env, self._exact, self._starts = env, exact, HonouredStarts(env)

    def step(self, step: StepDict, slots: list[int] | None, buffers: None) -> Stepped:
        packed = nested(step.items(), self._env.batch_size, self._env.device)
        exact = self.slots.exact_rewards() if self._exact and self.slots else nullcontext()
        with exact, self._starts:
            return flat(self._env.step(packed).get(keys.NEXT)), None

    def reset(self, marks: StepDict, slots: list[int], seeds: Seeds, options: Options) -> StepDict:
        packed = nested(marks.items(), self._env.batch_size, self._env.device)
        arguments = reset_arguments(base_of(self._env), seeds, options)
        with self._starts:
            return flat(self._env.reset(packed, select_reset_only=True, **arguments))


def _bytes_of(env: EnvBase) -> int:
    leaves = env.observation_spec.values(True, True)
    return sum(leaf.shape.numel() * (leaf.dtype or torch.int64).itemsize for leaf in leaves)


# ---------------------------------------------------------------------------- with their transforms


class SteppedEnv:
    """An env that the loops step on StepDicts.

    Attributes:
        transformed: the env with its transforms.
        carried: the entries that a step hands on to the next one.
        batch_size: the env's.
        step_bytes: the size of one step's observations, over all slots.
        base: the env itself; None where it is not tdcollect's.
        can: what the slots can do, transforms included.
        home: the device of the entries that it takes and gives.
        texts: the entries of text, whose numbers are on StepDicts.
    """

    transformed: EnvBase
    carried: list[Key]
    batch_size: torch.Size
    step_bytes: int
    base: GymnasiumEnv | None
    can: Can
    home = _CPU
    texts: Mapping[Key, TextLeaf] = MappingProxyType({})

    @property
    def marks_truncation(self) -> bool:
        """True if steps have a flag to mark a time limit with."""
        return keys.TRUNCATED in self.transformed.done_keys

    @property
    def broken_episodes(self) -> Mapping[int, Exception]:
        """The errors of slots whose envs the latest step built again, by slot."""
        return {} if self.base is None else self.base.broken_episodes

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """The info of a slot's latest step; empty where the env is not tdcollect's."""
        return {} if self.base is None else self.base.latest_info(slot)

    def latest_infos(self, slots: Sequence[int], names: Sequence[str]) -> Mapping[int, Any]:
        """The infos of these names, of the latest step of each slot."""
        assert self.base is not None
        return self.base.stepper.backend.latest_infos(slots, names)

    def rebuild_slots(self, slots: list[int]) -> None:
        """Build the envs of ``slots`` again."""
        assert self.base is not None
        self.base.rebuild_slots(slots)

    def attend(self, slots: Sequence[int]) -> None:
        """Have transforms leave the rows of all other slots, which wait, out of statistics."""

    def hands_through(self, key: Key) -> bool:
        """Return whether env and transforms are known not to read an output of the policy."""
        return False

    def reset_all(self, seeds: Seeds, options: Options) -> StepDict:
        """Start an episode in every slot; the entries of its first step."""
        arguments = reset_arguments(base_of(self.transformed), seeds, options)
        return flat(self.transformed.reset(**arguments), self.texts)

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """Buffers for ``count`` steps; Nones for an env that allocates its own output."""
        return [None] * count

    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> Stepped:
        """Step ``slots`` (ascending; None for all).

        ``next_keys`` are the policy's outputs that belong to the following step.
        """
        raise NotImplementedError

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: Seeds = None,
        options: Options = None,
    ) -> StepDict:
        """Start an episode in ``slots``; the entries that begin the next step, of all slots.

        Args:
            following: the entries that the latest step led to.
            starting: bool ``[N, 1]`` (``[1]`` unbatched), true for these slots.
            slots: ascending.
            seeds: one per slot in ``slots``.
            options: gymnasium's reset options.
        """
        raise NotImplementedError


class RewardShape(StepTransform):
    """Gives rewards the shape of their spec, as ``EnvBase.step`` does last."""

    anywhere = True

    def __init__(self, env: EnvBase):
        self._shapes = {key: env.full_reward_spec[key].shape for key in env.reward_keys}

    def step(self, step: StepDict, following: StepDict) -> None:
        for key, shape in self._shapes.items():
            if following[key].shape != shape:
                following[key] = following[key].view(shape)


class Arrived(NamedTuple):
    """Slots that have done what they were sent to do; rows of other slots mean nothing.

    Attributes:
        following: the entries that steps led to.
        stepped: the slots that have stepped, ascending.
        began: those whose episodes have begun.
        failed: the failures of steps.
        failed_begins: those of resets.
        begun: the entries that episodes begin with.
        written: the entries as the env wrote them, in which the rows of other slots are their
            present ones.
    """

    following: StepDict
    stepped: list[int]
    began: list[int]
    failed: SlotError | None
    failed_begins: SlotError | None = None
    begun: StepDict = StepDict()
    written: StepDict = StepDict()


class ArrayEnv(SteppedEnv):
    """An env, its transforms included, stepped on arrays.

    Args:
        inner: the env itself.
        exact: carries float64 rewards through the transforms; they are added to each step under
            ``"_exact_reward"``, and under transforms the actions, as the env got them, under
            ``"_sent"``. None to leave them out.

    Attributes:
        parts: the user's transforms, innermost first, those inside of the env included.
        resets_by_mask: whether slots are reset at every step, by marks that the host does not know.
        steps_as_graph: whether steps and these resets may be captured in a CUDA graph.
        why: the reasons for what the slots can do, and the whole cannot, by field of :attr:`can`.
        ends_by_done: whether a trajectory is known to end only where the flag ``"done"`` is true.
            A user's env or transform may truncate without it: TorchRL then resets nothing, but
            gives a new trajectory id, and the next step keeps the flag.
    """

    _drops_unspecified = False

    def __init__(
        self,
        inner: InnerEnv,
        transforms: list[StepTransform],
        transformed: EnvBase,
        exact: Exact | None = None,
    ):
        self.transformed = transformed
        self.carried = carried_entries(transformed)
        self.batch_size = transformed.batch_size
        self.step_bytes = inner.step_bytes
        self.base, self.texts = inner.slots, getattr(inner.slots, "texts", {})
        self.transforms = transforms
        self.inner = inner
        self.home = inner.home
        self._away = inner.home.type != "cpu"
        # A transform that mixes rows must see in all of them what it sees under TorchRL. Slots
        # that go on get their own rows back afterwards.
        self._merges = inner.whole or not all(transform.by_row for transform in transforms)
        for transform in transforms:
            transform.merged = self._merges
        self._writes_next = any(transform.writes_next for transform in transforms)
        self._exact = exact
        self._taken = self._sent = StepDict()
        self._attended: Sequence[int] = range(self.batch_size.numel())
        known = inner.follows_specs and all(transform.follows_specs for transform in transforms)
        self._unspecified: list[Key] | None = None
        self.ends_by_done = known
        # Agents may be done before their episode ends.
        self.carried += [k for k in transformed.done_keys if not known or isinstance(k, tuple)]
        self._ends = [key for key in transformed.done_keys if key in keys.FLAGS]
        self.parts = [part for part in (*inner.transforms, *transforms) if part.label]
        needy = [part.label for part in self.parts if not part.own_pace]
        self.resets_by_mask = inner.resets_by_mask and not needy
        self.steps_as_graph = inner.steps_as_graph and self.resets_by_mask
        self.can = Can(pause=False) if inner.slots is None else inner.slots.can
        self.why: dict[str, str] = {}
        if not all(transform.steps_singly for transform in transforms):
            self.can = self.can._replace(pause=False)
        if self.can.asynchronous and (needy or self._away or not known):
            reason = f"transforms have tensors on {self.home}"
            if needy:
                reason = f"{', '.join(needy)} may depend on all slots together"
            elif not self._away:
                reason = "a trajectory may end without done"
            self.can, self.why = self.can._replace(wait_num=None), {"asynchronous": reason}

    def start(self, drops_unspecified: bool) -> None:
        """Begin a batch.

        ``drops_unspecified``: leave entries without a spec out of the following step, as TorchRL's
        preallocated batches have no room for them.
        """
        self._drops_unspecified = drops_unspecified and not self.ends_by_done
        self._unspecified = None

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        return self.inner.allocate(count, pinned, self._exact is not None)

    def attend(self, slots: Sequence[int]) -> None:
        if slots == self._attended:
            return
        self._attended = slots
        rows = torch.zeros(self.batch_size, dtype=torch.bool)
        rows.view(-1)[list(slots)] = True
        for transform in (*self.inner.transforms, *self.transforms):
            transform.rows = None if rows.all() else rows

    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> Stepped:
        inner_step = self._taken = step
        if self.transforms:
            inner_step = self._inverted(step)
            if keys.STEP in inner_step:
                slots = self._chosen(inner_step, slots)
                if slots == []:
                    return self._skipped(inner_step, next_keys), None
        following, error = self.inner.step(inner_step, slots, buffers)
        if self._writes_next:
            for key in filter(is_next, inner_step):
                following.setdefault(from_next(key), inner_step[key])
        for key in next_keys:
            following.setdefault(from_next(key), step[key])  # the env's own entry wins
        for transform in self.transforms:
            transform.step(inner_step, following)
        if self._away:
            self._bring_home(following)
        if self._drops_unspecified:
            if self._unspecified is None:
                self._unspecified = self._without_spec(following, next_keys)
            for key in self._unspecified:
                following.pop(key, None)
        self._add_exact(following, buffers)
        return following, error

    def _inverted(self, step: StepDict) -> StepDict:
        inner_step = inverted(self.transforms, step)
        if self._exact is not None and self.transforms:
            names = self.transformed.action_keys
            self._sent = StepDict((keys.under(keys.SENT, key), inner_step[key]) for key in names)
        return inner_step

    def _add_exact(self, following: StepDict, buffers: Any) -> None:
        """Add the entries that evaluations read, which are no part of a batch."""
        if self._exact is not None and self.base is not None:
            following[keys.EXACT_REWARD] = self._exact(self.base.exact_reward(buffers))
            following.update(self._sent)

    @property
    def stepper(self) -> Stepper:
        """The slots, if they are tdcollect's."""
        assert self.base is not None
        return self.base.stepper

    # An asynchronous step has two parts. The rows of slots in flight stay in the step as they were
    # when they were sent.

    def send(self, step: StepDict, slots: list[int]) -> None:
        """Have ``slots`` take a step, and return at once."""
        self._taken = inner_step = self._inverted(step)
        action = self.stepper.backend.action
        self.stepper.send(action.of_step(inner_step, self.batch_size), slots)

    def send_reset(self, slots: list[int], seeds: Seeds, options: Options) -> None:
        """Start an episode in ``slots``, and return at once."""
        self.stepper.send_reset(slots, seeds, options)

    def receive(self, next_keys: list[Key], buffers: Any) -> Arrived:
        """Wait for slots that were sent, whose steps ``buffers`` then hold."""
        assert isinstance(self.inner, SlotArrays)
        came = self.stepper.receive(buffers)
        written = self.inner.entries(buffers)
        following, begun = StepDict(written), StepDict()
        if came.stepped:
            stepped = torch.zeros(self.batch_size, dtype=torch.bool)
            stepped[came.stepped] = True
            for key in next_keys:
                following.setdefault(from_next(key), self._taken[key])
            for transform in self.transforms:
                transform.rows = stepped
                transform.step(self._taken, following)
            self._add_exact(following, buffers)
        if came.begun:
            marks = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
            marks[came.begun] = True
            begun = StepDict(written)
            for key in self.inner.rewards:
                del begun[key]
            # Resets may come back alone: the entries of transforms are those of the step then.
            before = following if came.stepped else StepDict({**self._taken, **following})
            for transform in self.transforms:
                transform.reset(begun, StepDict({keys.RESET: marks}), before)
        return Arrived(following, *came, begun, written)

    def _chosen(self, inner_step: StepDict, slots: list[int] | None) -> list[int] | None:
        """Of ``slots``, those that a transform has chosen to be stepped; None for all."""
        chosen = inner_step[keys.STEP].reshape(-1)
        if chosen.all():
            del inner_step[keys.STEP]
            return slots
        if isinstance(self.inner, MemberSlots):
            raise NotImplementedError(
                "expected a transform that steps all slots, got one that writes "
                f"{keys.STEP!r} over envs with transforms of their own; set "
                "the environment variable TDCOLLECT_ARRAYS=0"
            )
        slots_chosen: list[int] = chosen.nonzero()[:, 0].tolist()
        return slots_chosen if slots is None else [slot for slot in slots if slot in slots_chosen]

    def _skipped(self, step: StepDict, next_keys: list[Key]) -> StepDict:
        """The entries of a step that no slot takes: no transform sees it."""
        env = self.transformed
        following = flat(skipped_step(env, nested(step.items(), env.batch_size, env.device)))
        for key in next_keys:
            following.setdefault(from_next(key), step[key])
        return following

    def ends(self, following: StepDict) -> tuple[list[int], list[int]]:
        """The slots to reset, and those whose trajectories end; a GPU is waited for once."""
        flags = [following[keys.DONE]]
        if not self.ends_by_done:
            flags += [following[name] for name in self._ends]
        if self._away:
            flags = self._on_host(flags)
        done = flags[0].numpy()
        # Of several ways the quickest.
        ended = done.reshape(-1).nonzero()[0].tolist() if 1 in done.tobytes() else []
        if self.ends_by_done:
            return ended, ended
        over = np.logical_or.reduce([flag.numpy().reshape(-1) for flag in flags])
        return ended, over.nonzero()[0].tolist()

    def _on_host(self, flags: list[torch.Tensor]) -> list[torch.Tensor]:
        known = [self.inner.on_host(flag) for flag in flags]
        if all(flag is not None for flag in known):
            return known  # type: ignore[return-value]
        return list(torch.stack([flag.reshape(-1) for flag in flags]).cpu().unbind(0))

    def _without_spec(self, following: StepDict, next_keys: list[Key]) -> list[Key]:
        """The entries that are not the policy's, and that TorchRL's batch has no room for."""
        known = {from_next(key) for key in next_keys}
        for spec in self.transformed.output_spec.values():
            known.update(spec.keys(True, True))
        return [key for key in following if key not in known]

    def hands_through(self, key: Key) -> bool:
        inverse = (transform.in_keys_inv for transform in all_transforms_of(self.transformed))
        known = isinstance(self.inner, SlotArrays) and self.ends_by_done and not self._away
        return known and key not in self.carried and not any(key in entries for entries in inverse)

    def over(self, following: StepDict) -> torch.Tensor:
        """The flag of slots whose trajectories end, at home."""
        over = following[keys.DONE]
        if not self.ends_by_done:
            for name in self._ends:
                over = over if name == keys.DONE else over | following[name]
        return over

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int] | None,
        seeds: Seeds = None,
        options: Options = None,
    ) -> StepDict:
        marks = StepDict()
        if isinstance(self.inner, WholeEnv):  # keeps the rows of the other slots itself
            marks = StepDict(following).exclude(keys.REWARD, keys.EXACT_REWARD, inplace=True)
        marks[keys.RESET] = starting
        for transform in reversed(self.transforms):
            transform.prepare(marks)
        begun = self.inner.reset(marks, slots or [], seeds, options)
        for transform in self.transforms:
            transform.reset(begun, marks, following)
        if self._away:
            self._bring_home(begun)
        if self._merges and (slots is None or len(slots) < self.batch_size.numel()):
            self._merge(begun, following, starting)
        return begun

    def _bring_home(self, entries: StepDict) -> None:
        """Move what a transform wrote on the CPU, as a TensorDict of another device would."""
        for key, value in entries.items():
            if value.device != self.home:
                entries[key] = sent(value, self.home)

    def _merge(self, begun: StepDict, following: StepDict, starting: torch.Tensor) -> None:
        """Give the slots that go on their own rows back."""
        for key in self.carried:
            own = following.get(key, self._taken.get(key))
            if own is None:
                continue
            mask = like_rows(starting, own)
            if key in begun:
                begun[key] = torch.where(mask, begun[key], own)
            else:
                begun[key] = own.masked_fill(mask, 0)  # as TorchRL does


# ------------------------------------------------------------------------------------- the plan

RUN_ON_ARRAYS = os.environ.get("TDCOLLECT_ARRAYS") != "0"
"""False to run TorchRL's loop alone; batches are the same either way."""


class ArrayPlan(NamedTuple):
    """The way in which an env is stepped: on arrays, or by TorchRL's loop, for some reasons."""

    env: ArrayEnv | None
    reasons: Sequence[str] = ()


def plan_for(
    env: EnvBase,
    exact: Exact | None = None,
    reasons: Sequence[str] = (),
    acted: Collection[Key] = (),
) -> ArrayPlan:
    """Decide how an env, with its transforms, is stepped; ``reasons`` are those against arrays.

    ``acted`` are actions of text that a policy gives by their numbers.
    """
    base = env.base_env if type(env) is TransformedEnv else env
    refused = [*reasons, *([] if RUN_ON_ARRAYS else ["TDCOLLECT_ARRAYS=0"]), *missing()]
    replaced = {*replaced_methods(env), *replaced_methods(base)}
    refused += [f"the env has a {name} of its own" for name in sorted(replaced)]
    if any(env.full_done_spec[key].dtype is not torch.bool for key in env.done_keys):
        refused.append("the env has flags of another dtype than bool")
    transforms: list[StepTransform] = []
    inner: InnerEnv | None = None
    further: list[StepTransform] = []
    try:
        transforms = lower_transforms(transforms_of(env), env)
        if _has_plain_entries(env, acted):
            mixes = not all(transform.by_row for transform in transforms)
            inner, further = _inner(base, env is not base, mixes)
        else:
            refused.append("the env has entries that are no tensors of one shape")
    except NotKnown as unknown:
        refused += unknown.reasons
    refused += _odd_flags(env, inner)
    if inner is None or refused:
        return ArrayPlan(None, refused)
    if env.device is not None and not all(part.anywhere for part in (*further, *transforms)):
        inner.home = with_index(env.device)  # the CPU would not give the same
    last = [RewardShape(env)] if isinstance(inner, TorchRLEnv) else []
    return ArrayPlan(ArrayEnv(inner, [*joined([*further, *transforms]), *last], env, exact))


def _odd_flags(env: EnvBase, inner: InnerEnv | None) -> list[str]:
    """The reason against arrays where an env has other flags than one of each per slot."""
    slots = None if inner is None else inner.slots
    groups = {} if slots is None else slots.stepper.group_map
    others = [key for key in env.done_keys if key not in keys.FLAGS]
    if all(is_of_agents(key, groups, *keys.FLAGS) for key in others):
        return []
    how = "" if inner is None else f"; it {inner.how}"
    return [f"the env has the flags {list(env.done_keys)}, not one of each per slot{how}"]


def by_episodes(plan: ArrayPlan, env: EnvBase, exact: Exact | None = None) -> ArrayEnv:
    """The env for the loop by episodes: on arrays if it can be, else through TensorDicts.

    Raises:
        ValueError: for an env whose slots do not end one by one, each with a flag of its own, or
            whose observations are not tensors of fixed shapes.
    """
    planned = plan.env
    if planned is not None and planned.base is not None and planned.home.type == "cpu":
        return planned
    if keys.DONE not in env.done_keys or len(env.done_keys_groups) > 1:
        raise ValueError(
            f"expected an env with one {keys.DONE!r} flag per slot, got the flags "
            f"{list(env.done_keys)}; collect by frames, and split the batch"
        )
    leaves = env.observation_spec.items(True, True)
    odd = [key for key, leaf in leaves if leaf.dtype is None or -1 in leaf.shape]
    odd += [key for key, leaf in env.full_action_spec.items(True, True) if leaf.dtype is None]
    if odd:
        raise ValueError(
            "expected an env whose actions are tensors, and observations tensors of fixed shapes, "
            f"got other ones in {odd}; collect by frames"
        )
    whole = ArrayEnv(WholeEnv(env, exact is not None), [], env, exact)
    # The slots of any other env cannot wait, and cannot be seeded, one by one.
    whole.can = whole.can._replace(pause=False, wait_num=None)
    return whole


def _inner(
    base: EnvBase, under_transforms: bool, mixes: bool
) -> tuple[InnerEnv, list[StepTransform]]:
    """The env without its transforms (do they mix rows?), and those of its own envs."""
    if type(base) is GymnasiumEnv:
        return SlotArrays(base), []
    if type(base) is OurParallelEnv and base.inner is not None:
        lifted = lower_transforms(transforms_of(base.inner), base.inner)
        return SlotArrays(base_of(base.inner)), [*lifted, Shown(base.shown, mixes)]
    try:
        slots, members, shown = adopt(base)
        if not members:
            return SlotArrays(slots), []
        transforms, once = lower_members(members)
        if once:
            return SlotArrays(slots), [*transforms, Shown(shown, mixes)]
        if slots.stepper.group_map:
            raise NotKnown("its envs have transforms that begin episodes by themselves")
        return MemberSlots(slots, members, transforms, shown), []
    except NotKnown as error:
        on_cpu = base.device is None or base.device.type == "cpu"
        reason = str(error) if on_cpu else f"its tensors are on {base.device}"
        # TorchRL's ParallelEnv steps and resets by one message; no transform comes in between.
        if not (steps_alone(base) or (under_transforms and type(base) is ParallelEnv)):
            raise NotKnown(f"{reason}, and steps in a way of its own") from None
        return TorchRLEnv(base, reason), []


def _has_plain_entries(env: EnvBase, acted: Collection[Key]) -> bool:
    texts = {*texts_of(env), *acted}
    for spec in (env.output_spec, env.input_spec):
        if contains_lazy_spec(spec):
            return False
        for node in (spec, *spec.values(True, False)):
            if getattr(node, "data_cls", None) not in (None, TensorDict):
                return False
        for key, leaf in spec.items(True, True):
            if -1 in leaf.shape or (leaf.dtype is None and from_next(key) not in texts):
                return False
    return True


# ----------------------------------------------------------------------------------------- facts

_MOST = 100
"""Lists and dicts of more items count as one object."""
_MOST_NUMBERS = 10_000
"""Tensors of more numbers, likewise."""


class Facts:
    """Objects, their attributes and items of these, compared by identity; values, by equality.

    Tensors among the items, such as the bounds of a distribution, are compared by value, too, but
    for weights and buffers, which are read as they are at each step.
    """

    def __init__(self, objects: Iterable[nn.Module], *values: Any):
        self._objects = [*objects]
        self._values = values
        self._dicts: list[Any] = []
        self._lists: list[Any] = []
        tensors: dict[int, torch.Tensor] = {}
        for each in self._objects:
            for value in vars(each).values():
                self._note(value, tensors)
        for module in self._objects:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensors.pop(id(tensor), None)
        self._tensors = [*tensors.values()]
        self._values_of_tensors = [tensor.detach().clone() for tensor in self._tensors]
        self._held = self._now()

    def _note(self, value: Any, tensors: dict[int, torch.Tensor]) -> None:
        """Note a list or dict, those in it, and their tensors."""
        known = isinstance(value, torch.Tensor) and value.device.type != "meta"
        if known and value.numel() <= _MOST_NUMBERS:
            tensors[id(value)] = value
        if type(value) not in (dict, OrderedDict, list) or len(value) > _MOST:
            return
        is_list = type(value) is list
        (self._lists if is_list else self._dicts).append(value)
        for item in value if is_list else value.values():
            self._note(item, tensors)

    def hold(self, root: Any, *values: Any) -> bool:
        """Return whether all is as it was, of the same first object, and for these values."""
        if root is not self._objects[0] or values != self._values:
            return False
        now = self._now()
        same = len(now) == len(self._held) and all(map(operator.is_, now, self._held))
        return same and all(map(torch.equal, self._tensors, self._values_of_tensors))

    def _now(self) -> list[Any]:
        dicts: list[Any] = [*map(vars, self._objects), *self._dicts]
        items: Iterable[Any] = chain(dicts, map(dict.values, dicts), self._lists)
        return [*map(type, self._objects), *chain.from_iterable(items)]


def facts_of_env(env: EnvBase, *values: Any) -> Facts | None:
    """The facts of an env on gymnasium slots and of its transforms; None for another, not known."""
    base = innermost(env)
    if type(base) is not GymnasiumEnv:
        return None
    layers = [env]
    while layers[-1] is not base:
        layers.append(layers[-1].base_env)
    return Facts([*layers, *all_transforms_of(env)], *values)
