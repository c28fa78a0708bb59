"""An env and its transforms, stepped on arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.utils import contains_lazy_spec
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from tdcollect import keys
from tdcollect._upstream.torchrl import carried_entries, replaced_methods, steps_alone
from tdcollect._upstream.transforms import skipped_step
from tdcollect.collect.env_parts import ExactReward
from tdcollect.collect.fast.inner import InnerEnv, RewardShape, SlotArrays, TorchRLEnv
from tdcollect.collect.fast.islands import NotOnArrays, StepTransform
from tdcollect.collect.fast.members import Shown, member_slots
from tdcollect.collect.fast.transforms import lower_transforms
from tdcollect.collect.step_dict import Key, StepDict, flat, from_next, like_rows, sent, with_index
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.envs.adopted import NotAdopted, adopt
from tdcollect.envs.errors import SlotError
from tdcollect.envs.parallel import ParallelEnv as OurParallelEnv
from tdcollect.envs.ready_stepper import ReadyStepper, Received
from tdcollect.envs.spaces import nested
from tdcollect.envs.transforms import base_of, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv


class Arrived(NamedTuple):
    """Slots that have done what they were sent to do; rows of other slots mean nothing.

    Attributes:
        following: the entries that steps led to.
        begun: the entries that episodes begin with; None where none has begun.
        received: which slots have stepped or begun, and the failures.
        written: the entries as the env wrote them, in which the rows of other slots are their
            present ones.
    """

    following: StepDict
    begun: StepDict | None
    received: Received
    written: StepDict


class ArrayEnv(SteppedEnv):
    """An env, its transforms included, stepped on arrays.

    Args:
        inner: the env itself.
        transforms: its transforms, innermost first.
        transformed: the env with its transforms.
        exact: carries float64 rewards through the transforms; they are added to each step under
            ``"_exact_reward"``. None to leave them out.

    Attributes:
        ends_by_done: whether a trajectory is known to end only where the flag ``"done"`` is true.
            A user's env or transform may truncate without it: TorchRL then resets nothing, but
            gives a new trajectory id, and the next step keeps the flag.
        drops_unspecified: whether entries without a spec are left out of the following step, as
            TorchRL's preallocated batches have no room for them.
    """

    drops_unspecified = False

    def __init__(
        self,
        inner: InnerEnv,
        transforms: list[StepTransform],
        transformed: EnvBase,
        exact: ExactReward | None = None,
    ):
        self.transformed = transformed
        self.carried = carried_entries(transformed)
        self.batch_size = transformed.batch_size
        self.step_bytes = inner.step_bytes
        self.base = inner.slots
        self.waits = (
            inner.slots is not None
            and inner.slots.steps_singly
            and all(transform.steps_singly for transform in transforms)
        )
        self.transforms = transforms
        self.inner = inner
        self.home = inner.home
        self._away = inner.home.type != "cpu"
        # A transform that mixes rows must see in all of them what it sees under TorchRL. Slots
        # that go on get their own rows back afterwards.
        self._merges = inner.whole or not all(transform.by_row for transform in transforms)
        for transform in transforms:
            transform.merged = self._merges
        self._exact = exact
        self._taken = StepDict()
        known = inner.follows_specs and all(transform.follows_specs for transform in transforms)
        self._unspecified: list[Key] | None = [] if known else None
        self.ends_by_done = known
        if not known:
            self.carried += transformed.done_keys
        self._inverse = list(reversed(transforms))

    @property
    def parts(self) -> list[StepTransform]:
        """The user's transforms, innermost first, those inside of the env included."""
        return [part for part in (*self.inner.transforms, *self.transforms) if part.label]

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """Buffers for ``count`` steps; see :meth:`GymnasiumEnv.allocate`."""
        return self.inner.allocate(count, pinned, self._exact is not None)

    def advance(
        self,
        step: StepDict,
        next_keys: list[Key],
        buffers: Any,
        slots: list[int] | None = None,
    ) -> tuple[StepDict, SlotError | None]:
        """Step ``slots`` (None for all); see :meth:`SteppedEnv.advance`."""
        given = self._taken = step
        if self.transforms:
            given = StepDict(step)
            for transform in self._inverse:
                transform.inv(given)
            if keys.STEP in given:
                slots = self._chosen(given, slots)
                if slots == []:
                    return self._skipped(given, next_keys), None
        following, error = self.inner.step(given, slots, buffers)
        for key in next_keys:
            following.setdefault(from_next(key), step[key])  # the env's own entry wins
        for transform in self.transforms:
            transform.step(given, following)
        if self._away:
            self._bring_home(following)
        if self.drops_unspecified:
            if self._unspecified is None:
                self._unspecified = self._without_spec(following, next_keys)
            for key in self._unspecified:
                following.pop(key, None)
        if self._exact is not None and self.base is not None:
            following[keys.EXACT_REWARD] = self._exact(self.base.exact_reward(buffers))
        return following, error

    @property
    def resets_by_mask(self) -> bool:
        """True if slots are reset at every step, by marks that the host does not know.

        The env must say that it allows for this; and so must its transforms.
        """
        return self.inner.resets_by_mask and all(part.own_pace for part in self.parts)

    @property
    def own_pace(self) -> bool:
        """True if slots that are ready go on while others step."""
        return self.in_step_for is None

    @property
    def in_step_for(self) -> str | None:
        """The reason why all slots step together; empty where nothing else was asked for.

        None where slots that are ready go on.
        """
        if self.base is None or self.base.stepper.backend.wait_num is None:
            return ""
        needy = [part.label for part in self.parts if not part.own_pace]
        if needy:
            return f"{', '.join(needy)} may depend on all slots together"
        if self.home.type != "cpu":
            return f"transforms have tensors on {self.home}"
        return None if self.ends_by_done else "a trajectory may end without done"

    @property
    def stepper(self) -> ReadyStepper:
        """The slots, where :attr:`in_step_for` is None."""
        assert self.base is not None
        assert isinstance(self.base.stepper, ReadyStepper)
        return self.base.stepper

    # The three below for slots that are ready: `advance` in two parts, which rows take at their
    # own pace. The rows of slots in flight stay in the step as they were when they were sent.

    def send(self, step: StepDict, slots: list[int]) -> None:
        """Have ``slots`` take a step, and go on."""
        given = step
        if self.transforms:
            given = StepDict(step)
            for transform in self._inverse:
                transform.inv(given)
        self._taken = given
        self.stepper.send(self.base.read_actions(given), slots)  # type: ignore[union-attr]

    def send_reset(
        self, slots: list[int], seeds: list[int] | None, options: dict[str, Any] | None
    ) -> None:
        """Start an episode in ``slots``, and go on."""
        self.stepper.send_reset(slots, seeds, options)

    def receive(self, next_keys: list[Key], buffers: Any) -> Arrived:
        """Wait for slots that were sent.

        Args:
            next_keys: the policy's outputs that belong to the following step.
            buffers: are written.
        """
        assert isinstance(self.inner, SlotArrays)
        written, received = self.inner.receive(buffers)
        following, begun = StepDict(written), None
        if received.stepped:
            stepped = torch.zeros(self.batch_size, dtype=torch.bool)
            stepped[received.stepped] = True
            for key in next_keys:
                following.setdefault(from_next(key), self._taken[key])
            for transform in self.transforms:
                transform.rows = stepped
                transform.step(self._taken, following)
            if self._exact is not None:
                following[keys.EXACT_REWARD] = self._exact(self.base.exact_reward(buffers))  # type: ignore[union-attr]
        if received.begun:
            marks = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
            marks[received.begun] = True
            begun = StepDict(written)
            del begun[keys.REWARD]
            # Resets may come back alone: the entries of transforms are those of the step then.
            before = following if received.stepped else StepDict({**self._taken, **following})
            for transform in self.transforms:
                transform.reset(begun, StepDict({keys.RESET: marks}), before)
        return Arrived(following, begun, received, written)

    def _chosen(self, given: StepDict, slots: list[int] | None) -> list[int] | None:
        """Of ``slots``, those that a transform has chosen to be stepped; None for all."""
        chosen = given[keys.STEP].reshape(-1)
        if chosen.all():
            del given[keys.STEP]
            return slots
        if not isinstance(self.inner, SlotArrays | TorchRLEnv):
            raise NotImplementedError(
                "expected a transform that steps all slots, got one that writes "
                f"{keys.STEP!r} over envs with transforms of their own; set "
                "tdcollect.collect.path.RUN_ON_ARRAYS to False"
            )
        found: list[int] = chosen.nonzero()[:, 0].tolist()
        return found if slots is None else [slot for slot in slots if slot in found]

    def _skipped(self, given: StepDict, next_keys: list[Key]) -> StepDict:
        """The entries of a step that no slot takes: no transform sees it."""
        env = self.transformed
        following = flat(skipped_step(env, nested(given.items(), env.batch_size, env.device)))
        for key in next_keys:
            following.setdefault(from_next(key), given[key])
        return following

    def ends(self, following: StepDict) -> tuple[list[int], list[int]]:
        """The slots to reset, and those whose trajectories end; a GPU is waited for once."""
        names = [keys.DONE] if self.ends_by_done else [keys.DONE, *self.transformed.done_keys]
        flags = [following[name] for name in names]
        if self._away:
            flags = self._on_host(flags)
        done = flags[0].numpy().reshape(-1)
        ended = done.nonzero()[0].tolist() if np.count_nonzero(done) else []  # the quickest way
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

    def over(self, following: StepDict) -> torch.Tensor:
        """The flag of slots whose trajectories end, at home."""
        over = following[keys.DONE]
        if not self.ends_by_done:
            for name in self.transformed.done_keys:
                over = over if name == keys.DONE else over | following[name]
        return over

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int] | None,
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``; see :meth:`SteppedEnv.begin`.

        Without them, ``starting`` alone says where, which the host need not know.
        """
        marks = StepDict({keys.RESET: starting})
        for transform in self._inverse:
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


def array_env(env: EnvBase, exact: ExactReward | None = None) -> ArrayEnv:
    """The env on arrays; see :class:`ArrayEnv`.

    Raises:
        NotOnArrays: for an env that must be stepped as TorchRL does.
    """
    base = env.base_env if type(env) is TransformedEnv else env
    transforms: list[StepTransform] = []
    replaced = {*replaced_methods(env), *replaced_methods(base)}
    reasons = [f"the env has a {name} of its own" for name in sorted(replaced)]
    if len(env.done_keys_groups) > 1 or not set(keys.FLAGS).issuperset(env.done_keys):
        reasons.append(f"the env has the flags {list(env.done_keys)}, not one of each per slot")
    if any(env.full_done_spec[key].dtype is not torch.bool for key in env.done_keys):
        reasons.append("the env has flags of another dtype than bool")
    plain = type(env) is GymnasiumEnv or _has_plain_entries(env)
    if not plain:
        reasons.append("the env has entries that are no tensors of one shape")
    try:
        transforms = lower_transforms(transforms_of(env), env)
        if plain:
            inner, further = _inner(
                base, env is not base, mixes=not all(t.by_row for t in transforms)
            )
    except NotOnArrays as refused:
        reasons += refused.reasons
    if reasons:
        raise NotOnArrays(*reasons)
    inner.home = _home(inner, [*further, *transforms], env)
    for transform in transforms:
        transform.attach(inner, further)
    last = [RewardShape(env)] if isinstance(inner, TorchRLEnv) else []
    return ArrayEnv(inner, [*further, *transforms, *last], env, exact)


def _home(inner: InnerEnv, transforms: list[StepTransform], env: EnvBase) -> torch.device:
    """The device of the env's entries: the one that it names, unless the CPU gives the same."""
    if env.device is None or all(transform.anywhere for transform in transforms):
        return inner.home
    return with_index(env.device)


def _inner(
    base: EnvBase, under_transforms: bool, mixes: bool
) -> tuple[InnerEnv, list[StepTransform]]:
    """The env without its transforms, and those of its own envs, on StepDicts.

    Args:
        base: the env without its transforms.
        under_transforms: whether it has some.
        mixes: whether these mix rows.
    """
    if type(base) is GymnasiumEnv:
        return SlotArrays(base), []
    if type(base) is OurParallelEnv and base.inner is not None:
        lifted = lower_transforms(transforms_of(base.inner), base.inner)
        return SlotArrays(base_of(base.inner)), [*lifted, Shown(base.shown, mixes)]
    try:
        slots, members, shown = adopt(base)
        if members:
            return member_slots(SlotArrays(slots), members, shown, mixes)
        return SlotArrays(slots), []
    except (NotAdopted, NotOnArrays) as error:
        on_cpu = base.device is None or base.device.type == "cpu"
        reason = str(error) if on_cpu else f"its tensors are on {base.device}"
        return _as_it_is(base, under_transforms, reason), []


def _as_it_is(base: EnvBase, under_transforms: bool, reason: str) -> TorchRLEnv:
    """An env that its own code steps.

    Raises:
        NotOnArrays: for one that steps in other ways than by ``_step`` and ``_reset``.
    """
    reasons = []
    # TorchRL's ParallelEnv steps and resets by one message, where no transform comes in between.
    if not (steps_alone(base) or (under_transforms and type(base) is ParallelEnv)):
        reasons.append(f"{reason}, and steps in a way of its own")
    if reasons:
        raise NotOnArrays(*reasons)
    return TorchRLEnv(base, reason)


_PLAIN = (None, TensorDict)


def _has_plain_entries(env: EnvBase) -> bool:
    """Tell whether all entries are single tensors of fixed shapes."""
    for spec in (env.output_spec, env.input_spec):
        nodes = [spec, *spec.values(True, False)]
        if contains_lazy_spec(spec) or any(
            getattr(node, "data_cls", None) not in _PLAIN for node in nodes
        ):
            return False
        if any(leaf.dtype is None or -1 in leaf.shape for leaf in spec.values(True, True)):
            return False
    return True
