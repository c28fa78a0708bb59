"""TorchRL's own gymnasium envs, on the slots of this package.

``ParallelEnv`` and ``GymEnv`` stand here under TorchRL's names: a ``ParallelEnv`` has several slots
in each worker process where its envs are understood; a ``GymEnv`` is put right where some arguments
go wrong.

A ``GymEnv``, a ``GymWrapper``, or a ``SerialEnv`` of these stays the user's, with its methods and
its state. The collector steps the gymnasium envs that are in it, as a :class:`GymnasiumEnv`
would. There is no second set of envs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import gymnasium as gym
import numpy as np
import torch
import torchrl.envs
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv
from torchrl.envs import SerialEnv as SerialEnv  # is right as it is
from torchrl.envs import transforms as T
from torchrl.envs.batched_envs import BatchedEnvBase

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect.cleanup import ended_on_error
from tdcollect.envs.backends import SerialBackend
from tdcollect.envs.beside import (
    Parts,
    SlotSettings,
    check_gym_env,
    check_methods,
    described,
    make_slot,
    parts_of_made,
    repeated,
)
from tdcollect.envs.process.agents import INFO, Agents
from tdcollect.envs.process.backend import ProcessBackend
from tdcollect.envs.slots import Can, Stepper
from tdcollect.envs.traits import NotKnown, base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.randomness import global_states
from tdcollect.states import equal


class ParallelEnv(torchrl.envs.ParallelEnv):
    """TorchRL's ``ParallelEnv``, several slots in each worker process.

    Its functions may make a ``GymEnv`` or ``GymWrapper`` over a gymnasium env, or a
    ``TransformedEnv`` of one with known transforms. Any other env runs in TorchRL's own workers,
    one per process; :attr:`fallback_reason` says why. The data are the same either way.

    A slot has global random states of its own, as it has in a process of its own: torch's is seeded
    with the env. It takes them where a transform beside the env may draw (``NoopResetEnv``).

    Seeds are chained as in TorchRL: ``set_seed(s)`` gives ``s`` to the first slot, and the seed
    that follows to the next. :attr:`seeds` has them.

    Args:
        num_workers: the number of slots, as in TorchRL; as many processes share them as there are
            cores to use.
        create_env_fn: makes the env of a slot; or one such function per slot.
        **kwargs: those of TorchRL's ``ParallelEnv``. ``daemon`` concerns TorchRL's workers only:
            ours never outlive this process.

    Attributes:
        inner: the env ``[N]`` that runs the slots: a :class:`GymnasiumEnv`, or a ``TransformedEnv``
            of one with the transforms that run once for all slots. None before the start and in
            TorchRL's workers.
        shown: the entries ``[N, ...]`` that a reset of some slots gives for the others, by key. As
            in TorchRL, they are those of each slot's latest reset; of its latest step, too, without
            shared buffers.
    """

    # Written to __dict__: what is assigned would be a submodule.
    inner: EnvBase | None = None
    shown: Mapping[Any, torch.Tensor] = MappingProxyType({})
    _known: Parts | str | None = None  # the parts of a slot's env, or why they are not known

    @classmethod
    def adopt(cls, env: EnvBase) -> str | None:
        """Turn a ``ParallelEnv`` of TorchRL's into one of this class, in place.

        Args:
            env: its workers have not started. One env is made, looked at and closed.

        Returns:
            None if it was turned; else the reason why it stays as it is.
        """
        if type(env) is not torchrl.envs.ParallelEnv:
            return f"it is a {type(env).__name__}, not TorchRL's ParallelEnv"
        if not upstream.owns_workers(env):
            return "it is an index into another env"
        if not vars(env)["is_closed"]:
            return "its workers have started"
        env.__class__ = cls
        assert isinstance(env, ParallelEnv)
        reason = env.fallback_reason
        if reason is not None:
            env.__class__ = torchrl.envs.ParallelEnv
        return reason

    @property
    def fallback_reason(self) -> str | None:
        """Why TorchRL's own workers run the env; None where ours do."""
        parts = self._parts()
        return parts if isinstance(parts, str) else None

    @property
    def seeds(self) -> list[int] | None:
        """The seeds of the latest ``set_seed``, one per slot; None before it."""
        return upstream.chain_of_seeds(self)

    def _parts(self) -> Parts | str:
        if self._known is None:
            try:
                self._known = self._find_parts()
            except NotKnown as reason:
                self._known = str(reason)
        return self._known

    def _find_parts(self) -> Parts:
        options = {
            "metadata_from_workers=True": upstream.has_metadata_from_workers(self),
            "share_individual_td=True": bool(self.share_individual_td),
            "shared_memory=False": not upstream.shares_memory(self),
            "policy_proof": self.policy_proof is not None,
            "a system without POSIX": os.name != "posix",
        }
        for name, theirs in options.items():
            if theirs:
                raise NotKnown(f"{name} is TorchRL's")
        kinds: list[tuple[Any, Any, Parts]] = []
        for create, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True):
            if not any(create is other and kwargs == theirs for other, theirs, _ in kinds):
                kinds.append((create, kwargs, parts_of_made(create, kwargs, SINGLE)))
        first = kinds[0][2]
        for _, _, parts in kinds[1:]:
            if first._replace(lifted=(), name="") != parts._replace(lifted=(), name=""):
                raise NotKnown("its slots have different envs or transforms")
        return first

    def update_kwargs(self, kwargs: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Update the arguments with which envs are made, from the next start on."""
        super().update_kwargs(kwargs)
        self._known = None

    # ------------------------------------------------------------------------------ start and end

    def _create_td(self) -> None:
        if self.fallback_reason is not None:
            super()._create_td()

    def _start_workers(self) -> None:
        parts = self._parts()
        if not isinstance(parts, str):
            try:
                self._start_slots(parts)
                return
            except NotKnown as reason:
                self._known = str(reason)
            self._create_td()
        super()._start_workers()

    def _start_slots(self, parts: Parts) -> None:
        forks = upstream.start_method(self) == "fork"
        settings = SlotSettings(
            parts.beside,
            global_states() if forks else None,
            upstream.uses_buffers(self),
            self.num_sub_threads,
        )
        factories = [
            partial(make_slot, create, kwargs, settings)
            for create, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True)
        ]
        base = _env_of_slots(
            factories,
            parts,
            device=self.device,
            start_method="fork" if forks else "spawn",
            timeout=upstream.pipe_timeout(),
            grace=self.shutdown_timeout,
        )
        with ended_on_error(base.close):
            backend: Any = base.stepper.backend
            lifted = [transform.clone() for transform in parts.lifted]
            for transform in lifted:
                if isinstance(transform, T.TensorDictPrimer):
                    transform.expand_specs = True
            inner = TransformedEnv(base, T.Compose(*lifted)) if lifted else base
            if any(digest != parts.digest for digest in backend.call("digest")):
                raise NotKnown("the transforms of its slots have different settings")
            theirs, ours = described(self.specs), described(inner.specs)
            for key in {**theirs, **ours}:
                if theirs.get(key) != ours.get(key):
                    raise NotKnown(f"the entry {key!r} would have another spec")
        self.__dict__["inner"] = inner
        channels = [
            _Channel(backend, slot, lifted, parts.digest) for slot in range(self.num_workers)
        ]
        upstream.set_channels(self, channels)
        upstream.limit_threads(self)
        self.is_closed = False
        self.set_spec_lock_()

    def _shutdown_workers(self) -> None:
        inner = self.inner
        if inner is None:
            super()._shutdown_workers()
            return
        self.__dict__.update(inner=None, shown={})
        upstream.drop_channels(self)
        inner.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: v for name, v in state.items() if name not in ("_known", "inner", "shown")}

    def _ours(self) -> EnvBase | None:
        if self.is_closed and upstream.owns_workers(self):  # TorchRL says that a view is closed
            self._create_td()
            self._start_workers()
        return self.inner

    # --------------------------------------------------------------------------- steps and resets

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        inner = self._ours()
        if inner is None:
            return super()._step(tensordict)
        mask = tensordict.get(keys.STEP, None)
        with torch.no_grad():
            following = upstream.env_step_of(inner)(tensordict)
            if mask is not None and not mask.all():
                waiting = (~mask).flatten().nonzero().flatten().tolist()
                following = _with_rows(following, waiting, tensordict)
            if not upstream.uses_buffers(self):
                self._show(following)
        return following

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, and reset the slots whose episodes have ended."""
        if self._ours() is None:
            return super().step_and_maybe_reset(tensordict)
        with torch.no_grad():
            return EnvBase.step_and_maybe_reset(self, tensordict)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Reset the slots that ``"_reset"`` marks, or all, with seeds and options of each."""
        inner = self._ours()
        if inner is None:
            if isinstance(kwargs.get("seed"), Sequence):
                own = kwargs.pop("seed")
                kwargs["list_of_kwargs"] = [{**kwargs, "seed": seed} for seed in own]
            return super()._reset(tensordict, **kwargs)
        arguments = _reset_arguments(self.num_workers, **kwargs)
        mask = None if tensordict is None else tensordict.get(keys.RESET, None)
        every = list(range(self.num_workers))
        marked = every if mask is None else mask.flatten().nonzero().flatten().tolist()
        with torch.no_grad():
            for slots, own in _calls(marked, arguments):
                reset = upstream.env_reset_of(inner)(self._mark(tensordict, slots), **own)
                others = [slot for slot in every if slot not in slots]
                self._show(_with_rows(reset, others, self.shown))
        return reset

    def _mark(self, tensordict: TensorDictBase | None, slots: Sequence[int]) -> TensorDictBase:
        rows = torch.zeros((self.num_workers, 1), dtype=torch.bool, device=self.device)
        rows[list(slots)] = True
        marks = TensorDict({keys.RESET: rows}, self.batch_size, device=self.device)
        return marks if tensordict is None else tensordict.copy().update(marks)

    def _show(self, entries: TensorDictBase) -> None:
        wanted = (*self.full_observation_spec.keys(True, True), *self.done_keys)
        self.shown = {key: entries.get(key).clone() for key in wanted}

    def __repr__(self) -> str:
        how = "not started" if self.is_closed else "in TorchRL's workers"
        if not self.is_closed and self.inner is not None:
            how = repr(base_of(self.inner).stepper.backend)
        return f"{type(self).__name__}({self.num_workers} slots, {how})"

    def to(self, device: Any) -> ParallelEnv:
        """Give the entries on another device; the slots stay where they are."""
        super().to(device)
        if self.inner is not None:
            self.__dict__["inner"] = self.inner.to(self.device)
        return self

    def __getitem__(self, item: Any) -> EnvBase:
        if self._ours() is not None:
            raise NotImplementedError(
                "expected a whole ParallelEnv, got an index into one: its slots share workers; "
                "make an env of fewer slots, or use torchrl.envs.ParallelEnv"
            )
        return super().__getitem__(item)


def _reset_arguments(
    count: int,
    *,
    seed: int | Sequence[int] | None = None,
    options: dict[str, Any] | None = None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    seeds = [seed] * count if seed is None or isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"expected one seed per slot, {count}, got {len(seeds)}; pass as many")
    further = [{}] * count if list_of_kwargs is None else list_of_kwargs
    if len(further) != count:
        raise ValueError(
            f"expected list_of_kwargs with one dict per slot, {count}, got {len(further)}; pass "
            "as many"
        )
    unknown = {name for own in further for name in own} - {"seed", "options"}
    if unknown:
        raise TypeError(f"reset() takes seed and options, got {sorted(unknown)}; leave it out")
    together = zip(seeds, further, strict=True)
    every = [{"seed": one, "options": options, **own} for one, own in together]
    return [{name: v for name, v in own.items() if v is not None} for own in every]


def _calls(
    slots: Sequence[int], arguments: Sequence[Mapping[str, Any]]
) -> list[tuple[Sequence[int], dict[str, Any]]]:
    """The slots and the arguments of each reset: of all together, or else of one by one."""
    shared = [{**arguments[slot], "seed": "seed" in arguments[slot]} for slot in slots]
    calls = []
    for group in [slots] if all(one == shared[0] for one in shared) else [[s] for s in slots]:
        own = dict(arguments[group[0]]) if group else {}
        if "seed" in own:
            own["seed"] = [arguments[slot]["seed"] for slot in group]
        calls.append((group, own))
    return calls


def _with_rows(
    entries: TensorDictBase,
    slots: Sequence[int],
    others: Mapping[Any, torch.Tensor] | TensorDictBase,
) -> TensorDictBase:
    if slots:
        for key in entries.keys(True, True):
            source = others.get(key, None)
            entries.get(key)[slots] = 0 if source is None else source[slots]
    return entries


@dataclass
class _Channel:
    """The channel to one slot; ``digest`` is that of the lifted transforms."""

    slots: ProcessBackend
    slot: int
    lifted: Sequence[T.Transform]
    digest: str
    answer: Any = None

    def send(self, message: tuple[Any, Any]) -> None:
        name, data = message
        (self.answer,) = self.slots.call("command", name, data, slots=[self.slot])
        if self.lifted and self.slot == self.slots.num_envs - 1:
            self._follow()

    def _follow(self) -> None:
        """Give the lifted transforms the state that a command has given to those of the slots."""
        digests = self.slots.call("digest")
        if all(digest == self.digest for digest in digests):
            return
        (states,) = self.slots.call("lifted_state", slots=[0])
        same = all(
            equal(dict(transform.state_dict()), state)
            for transform, state in zip(self.lifted, states, strict=True)
        )
        if len(set(digests)) > 1 or same:
            raise RuntimeError(
                "expected the same transforms in all slots, which run once for all of them, got "
                "others; use torchrl.envs.ParallelEnv for slots with settings of their own"
            )
        for transform, state in zip(self.lifted, states, strict=True):
            transform.load_state_dict(state)
        self.digest = digests[0]

    def recv(self) -> Any:
        return self.answer

    def close(self) -> None:
        """Do nothing: the workers are closed together."""


def _env_of_slots(
    factories: Sequence[Callable[[], Any]],
    parts: Parts,
    *,
    device: torch.device | None,
    **options: Any,
) -> GymnasiumEnv:
    """An env ``[N]`` over slots of :func:`make_slot`, with the specs that TorchRL gives them."""
    backend = ProcessBackend(factories, parts.categorical, **options)
    with ended_on_error(backend.close):
        if parts.entries:
            backend.read_info({e.key: np.zeros(e.shape, e.dtype) for e in parts.entries})
        env = GymnasiumEnv(Stepper(backend, name=parts.name), batched=True, device=device)
        count = len(factories)
        env.observation_spec = _on(parts.observation_spec, env.device).expand(count)
        env.full_action_spec = _on(parts.action_spec, env.device).expand(count)
    return env


def _on(spec: Composite, device: torch.device | None) -> Composite:
    on_device: Composite = spec.clone().clear_device_() if device is None else spec.to(device)
    return on_device


def _vector_env(num_envs: int, create: Callable[[], EnvBase]) -> GymnasiumEnv:
    try:
        parts = parts_of_made(create, {}, SINGLE)
    except NotKnown as reason:
        raise ValueError(
            f"expected an env that can be one of several slots, but {reason}; use ParallelEnv"
        ) from reason
    make: Callable[[], Any]
    if parts.spec is not None:  # its worker needs no torch, and starts at once
        make = partial(gym.make, parts.spec)
    else:
        make = partial(make_slot, create, {}, SlotSettings(parts.beside, None, True, 1))
    factories = [make] * num_envs
    return _env_of_slots(factories, parts, device=parts.observation_spec.device)


class _GymMeta(upstream.GymEnvMeta):
    """Gives an env of several slots for ``num_workers`` and ``num_envs``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        num_workers = kwargs.pop("num_workers", None) or 1
        if num_workers > 1:
            env = ParallelEnv(num_workers, partial(cls, *args, **kwargs))
            env.start()  # as TorchRL's has
            return env
        num_envs = kwargs.pop("num_envs", 0)
        if num_envs:
            return _vector_env(num_envs, partial(cls, *args, **kwargs))
        return super().__call__(*args, **kwargs)


class _Library:
    """A library of envs, whose ``make`` takes ``frames`` in place of TorchRL's; None for those."""

    def __init__(self, library: Any, frames: Mapping[str, Any] | None):
        self._library, self._frames = library, frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def make(self, env_name: str, **kwargs: Any) -> Any:
        if self._frames is not None:
            kwargs.pop("frameskip", None)
            kwargs.update(self._frames)
        try:
            return self._library.make(env_name, **kwargs)
        except TypeError as error:
            if "frameskip" in kwargs and "takes no arguments" in str(error):
                # In the words by which TorchRL knows that it must repeat actions itself.
                raise TypeError(f"unexpected keyword argument 'frameskip': {error}") from error
            raise


class GymEnv(torchrl.envs.GymEnv, metaclass=_GymMeta):
    """TorchRL's ``GymEnv``.

    It is TorchRL's class in all but three points:

    - ``num_workers=n`` gives a :class:`tdcollect.envs.ParallelEnv`;
    - ``num_envs=n`` gives a :class:`tdcollect.envs.GymnasiumEnv` on worker processes, with true
      final observations and without rows that join two episodes. Its slots are seeded as those
      of :func:`tdcollect.make_env`;
    - without ``frame_skip``, an Atari env repeats actions as its id says, where TorchRL's plays
      each frame.

    Args:
        env_name: a gymnasium id.
        **kwargs: those of TorchRL's ``GymEnv``, and of ``gymnasium.make``.
    """

    def __init__(self, env_name: str, **kwargs: Any):
        if "frame_skip" not in kwargs:
            self.__dict__["own_frames"] = {n: kwargs[n] for n in ("frameskip",) if n in kwargs}
        super().__init__(env_name, **kwargs)

    @property
    def lib(self) -> Any:
        """The library that makes the env."""
        return _Library(super().lib, vars(self).get("own_frames"))


SINGLE = (GymEnv, torchrl.envs.GymEnv, GymWrapper)
"""The classes of one gymnasium env that are known to the letter."""

OF_AGENTS = (torchrl.envs.PettingZooEnv, torchrl.envs.PettingZooWrapper)


# --- envs that are adopted ------------------------------------------------------------------------


class Adopted(NamedTuple):
    """The slots of a TorchRL env."""

    slots: GymnasiumEnv
    members: Sequence[EnvBase]  # with transforms of their own; empty for a single env
    shown: dict[Any, torch.Tensor]  # what each slot's latest reset gave, [N, ...], by entry


def chain(seed: int, count: int, static: bool = False) -> list[int]:
    """The seeds that ``set_seed(seed)`` of TorchRL's batched envs gives their envs, in order."""
    seeds = [seed]
    for _ in range(count - 1):
        seeds.append(seeds[-1] if static else upstream.seed_generator(seeds[-1]))
    return seeds


def early_seeds(env: EnvBase, seed: int, static: bool = False) -> list[int] | None:
    """The seeds of the episodes that ``set_seed`` starts at once, one per slot.

    ``GymWrapper`` resets its env as it is seeded: the reset that follows begins another episode,
    unless it is given the seed again. None for envs that seed their next reset.
    """
    if isinstance(env, GymWrapper):  # a vector env counts on from the seed
        return list(range(seed, seed + env.batch_size.numel()))
    if isinstance(env, ParallelEnv) and env.inner is not None:
        return chain(seed, env.num_workers, static)
    if isinstance(env, SerialEnv):
        members = [base_of(member) for member in upstream.serial_envs(env) or ()]
        if members and all(isinstance(member, GymWrapper) for member in members):
            return chain(seed, len(members), static)
    return None


def lost_ends(env: EnvBase) -> str:
    """Say what TorchRL loses of a vector env's episodes, and the remedy; empty if nothing."""
    inside = upstream.wrapped_env(env) if isinstance(env, GymWrapper) else None
    if getattr(inside, "autoreset_mode", None) != AutoresetMode.NEXT_STEP:
        return ""
    return (
        "final observations are zeros, and a row joins each episode to the next, as TorchRL takes "
        "AutoresetMode.NEXT_STEP for SAME_STEP; import GymEnv from tdcollect.envs, or use make_env"
    )


def reset_arguments(
    env: EnvBase, seeds: Sequence[int] | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arguments with which the ``reset`` of an env without transforms seeds its slots."""
    arguments: dict[str, Any] = {} if options is None else {"options": options}
    if seeds is None:
        return arguments
    if isinstance(env, BatchedEnvBase):
        return {"list_of_kwargs": [{"seed": seed, **arguments} for seed in seeds]}
    return {"seed": seeds if env.batch_size else seeds[0], **arguments}


class _Borrowed(SerialBackend):
    """gymnasium envs that belong to a TorchRL env."""

    can = Can(step_ended=True)

    def close(self) -> None:
        """Do nothing: their owner closes them."""


_made: WeakKeyDictionary[EnvBase, tuple[Sequence[Any], GymnasiumEnv]] = WeakKeyDictionary()


def take_over(env: EnvBase) -> None:
    """Have a ``ParallelEnv`` of TorchRL's start our workers, if it has started none."""
    ParallelEnv.adopt(base_of(env))


def adopt(env: EnvBase) -> Adopted:
    """The slots of a TorchRL env, without its transforms.

    Types and ``vars`` alone tell what it is: looking up other attributes may start processes.

    Raises:
        NotKnown: for an env whose own code must step it.
    """
    members: Sequence[EnvBase] = ()
    shown: dict[Any, torch.Tensor] = {}
    if type(env) is SerialEnv:
        check_methods(env)
        envs, buffers = upstream.serial_envs(env), upstream.shown_by_resets(env)
        if envs is None or buffers is None:
            raise NotKnown("it is closed, or its envs cannot share a batch")
        members, shown = envs, buffers
        singles = [_check_single(_member(member)) for member in members]
    elif isinstance(env, BatchedEnvBase):
        why = env.fallback_reason if isinstance(env, ParallelEnv) else None
        raise NotKnown(
            "its envs are in processes of TorchRL's: "
            + (why or "they have started; import ParallelEnv from tdcollect.envs")
        )
    else:
        singles = [_check_single(env)]
    # Kept, since making it costs more than a batch; a user may have put other envs inside.
    parts = [part for single in singles for part in _settings_of(single)]
    known = _made.get(env)
    if known is None or list(map(id, known[0])) != list(map(id, parts)):
        known = _made[env] = (parts, _make(env, singles))
    slots = known[1]
    slots.stepper.follow()
    return Adopted(slots, members, shown)


def _member(env: EnvBase) -> EnvBase:
    if type(env) is not TransformedEnv:
        return env
    check_methods(env)
    return env.base_env


def _settings_of(env: Any) -> Sequence[Any]:
    if type(env) in OF_AGENTS:
        own = env.group_map, env.use_mask, env.return_state, env.categorical_actions
        return upstream.wrapped_env(env), *own
    return upstream.wrapped_env(env), env.wrapper_frame_skip, upstream.is_categorical(env)


def _inside(env: Any) -> gym.Env[Any, Any]:
    """The env in one of TorchRL's, as slots take it; it is not reset."""
    if type(env) not in OF_AGENTS:
        return repeated(env)
    inside, groups, use_mask, return_state, _ = _settings_of(env)
    infos: dict[str, dict[str, Any]] = {}
    for group, agents in groups.items():
        told = env.observation_spec[group].zero().get(INFO, {})
        for i, agent in enumerate(agents):
            infos[agent] = {name: value[i].numpy(force=True) for name, value in told.items()}
    return Agents(inside, groups, use_mask, return_state, infos=infos)


def _check_single(env: Any) -> EnvBase:
    if type(env) in OF_AGENTS:
        check_methods(env)
        for fault, there in (
            ("agents that take turns", not env.parallel),
            ("done_on_any=False", not env.done_on_any),
            ("masks of actions", any(env.has_action_mask.values())),
        ):
            if there:
                raise NotKnown(f"it has {fault}; make_env takes parallel envs, masks too")
        return env
    check_gym_env(env, SINGLE)
    return env


def _make(env: EnvBase, singles: Sequence[Any]) -> GymnasiumEnv:
    categorical = _settings_of(singles[0])[-1]

    def over(batched: bool) -> GymnasiumEnv:
        name = type(backend.envs[0]).__name__ if backend.spec is None else str(backend.spec.id)
        return GymnasiumEnv(Stepper(backend, name=name), batched=batched, device=env.device)

    try:
        backend = _Borrowed([partial(_inside, single) for single in singles], categorical)
        one = over(batched=False)
    except (TypeError, ValueError) as error:
        raise NotKnown(str(error)) from error
    for single in singles:
        for spec in ("output_spec", "input_spec"):
            if getattr(single, spec).to("cpu") != getattr(one, spec).to("cpu"):
                raise NotKnown(f"its {spec} is not that of its gymnasium spaces")
    return over(batched=bool(env.batch_size))
