"""`GymnasiumEnv`: the TorchRL env over a stepper; TensorDicts in, TensorDicts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Discrete, MultiDiscrete
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect._upstream.torchrl import as_plain_tensors
from tdcollect.cleanup import ended_on_error
from tdcollect.envs.process.agents import ACTION_MASK
from tdcollect.envs.process.backend import WorkerLost
from tdcollect.envs.process.values import Array, is_number
from tdcollect.envs.slots import Can, Stepper
from tdcollect.envs.spaces import StepBuffers, TextLeaf, compose, drawable, nested, told
from tdcollect.envs.traits import base_of
from tdcollect.keys import key_of
from tdcollect.seeding import slot_seed, slot_seeds


class SharedMask(torch.Tensor):
    """The legal actions now. Copies of a spec share it, those of transforms and policies, too."""

    __torch_function__ = as_plain_tensors  # type: ignore[assignment]

    def show(self, entry: Array) -> None:
        """Take over an env's masks; all is legal where they allow nothing, as at an end."""
        legal = torch.from_numpy(entry).view_as(self).bool()
        self.copy_(legal | ~legal.any(-1, keepdim=True))

    def clone(self, *args: Any, **kwargs: Any) -> SharedMask:
        return self

    def expand(self, *shape: Any) -> torch.Tensor:  # type: ignore[override]
        expanded = super().expand(*shape)
        return self if expanded.shape == self.shape else expanded

    def __deepcopy__(self, memo: Any) -> SharedMask:
        return super().clone().as_subclass(SharedMask)


class GymnasiumEnv(EnvBase):
    """A TorchRL env over gymnasium slots; made by :func:`tdcollect.make_env`.

    Keys, shapes, dtypes and specs are those of TorchRL's ``GymEnv`` for the same space. Rewards are
    float32 ``[N, 1]``, flags bool ``[N, 1]``; an unbatched env lacks the N. Every entry is freshly
    allocated at each step: nothing that was given out changes later.

    A name that the env does not know itself is looked up on the gymnasium env of the slot, as
    ``env.unwrapped``, ``env.spec``, ``env.metadata``, ``env.render_mode`` or
    ``env.get_wrapper_attr("lives")``. With several slots, it gives a list with one value per slot;
    with a vector env, the vector env's own. Values come from worker processes as copies.

    Args:
        stepper: the slots.
        batched: ``batch_size=[N]``; False for one slot with ``batch_size=[]``.
        device: of the entries; None, as in ``GymEnv``, for the CPU and no device of TensorDicts.
        remake: makes the slots with other ``env_kwargs``; None if that cannot be done.

    Attributes:
        masks: the legal actions now, ``[*batch, choices]``, those of agents ``[*batch, agents,
            choices]``, by action key.
        first_slot: the number of its first slot, of those of all workers that share a root seed.
        texts: the entries of text, by key, present and under ``"next"``.
    """

    first_slot = 0
    _kept_texts: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        stepper: Stepper,
        *,
        batched: bool,
        device: torch.device | str | int | None = None,
        remake: Callable[[Mapping[str, Any]], Stepper] | None = None,
    ):
        super().__init__(device=device, batch_size=torch.Size([stepper.num_envs] * batched))
        self.stepper = stepper
        self._batched = batched
        self._remake = remake
        self._infos: dict[str, Any] = {}  # those that read_infos was given
        self.masks: dict[tuple[str, ...], torch.Tensor] = {}
        self.texts = stepper.backend.observation.texts
        self._make_specs()
        self._exact = False
        self._kept: dict[str, Any] | None = None
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        stepper = vars(self).get("stepper")
        if name.startswith("_") or stepper is None or stepper.is_closed:
            return super().__getattr__(name)
        vector = stepper.backend.vector_env
        if vector is not None:
            return getattr(vector, name)
        try:
            values = stepper.backend.attributes(name)
        except (AttributeError, NotImplementedError, WorkerLost) as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and the envs of its "
                f"slots give none: {error}"
            ) from error
        if not self.batch_size:
            return values[0]
        if all(callable(value) for value in values):
            return lambda *args, **kwargs: [value(*args, **kwargs) for value in values]
        return values

    @property
    def name(self) -> str:
        """The env's name in messages."""
        return self.stepper.name

    @property
    def backend_name(self) -> str:
        """The ``backend`` argument of :func:`tdcollect.make_env`."""
        return self.stepper.backend.name

    @property
    def num_envs(self) -> int:
        """N; 1 for an unbatched env."""
        return self.stepper.num_envs

    @property
    def observation_space(self) -> Space[Any]:
        """The gymnasium observation space of one slot."""
        return self.stepper.backend.observation.space

    @property
    def action_space(self) -> Space[Any]:
        """The gymnasium action space of one slot."""
        return self.stepper.backend.action.space

    @property
    def env_spec(self) -> EnvSpec | None:
        """The gymnasium spec of a slot's env, wrappers included; None if nothing is known."""
        return self.stepper.backend.spec

    @property
    def slot_envs(self) -> Sequence[gym.Env[Any, Any]]:
        """The gymnasium envs, one per slot; empty unless they live in this process, singly."""
        return self.stepper.backend.envs

    @property
    def can(self) -> Can:
        """Abilities of the slots: pause, be reset or seeded singly, be rebuilt, be resumed."""
        return self.stepper.can

    @property
    def restarts(self) -> int | None:
        """The envs built again after failures so far; None where failures raise."""
        return None if self.stepper.max_restarts is None else self.stepper.restarts

    @property
    def broken_episodes(self) -> Mapping[int, Exception]:
        """The failures of the latest step that broke off an episode, by slot."""
        return self.stepper.broken

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """The infos of a slot's latest step; empty if it took no part in the latest one."""
        return self.stepper.backend.latest_info(slot)

    def rebuild_slots(self, slots: Sequence[int]) -> list[int]:
        """Make envs again, to be reset next; returns these slots, and those lost with them."""
        return self.stepper.rebuild(slots)

    @property
    def group_map(self) -> Mapping[str, Sequence[str]]:
        """The agents of each group; an AttributeError for an env of a single agent."""
        if not self.stepper.group_map:
            raise AttributeError(f"{self.name} has no groups of agents")
        return self.stepper.group_map

    def _make_specs(self) -> None:
        batch, groups = self.batch_size, self.stepper.group_map
        codec = self.stepper.backend.action
        flags = {name: Categorical(2, shape=(*batch, 1), dtype=torch.bool) for name in keys.FLAGS}
        entries = [(entry.path, entry.spec) for entry in self.stepper.entries]
        rewards = [entry for entry in entries if is_of_agents(entry[0], groups, keys.REWARD)]
        ends = [entry for entry in entries if is_of_agents(entry[0], groups, *keys.FLAGS)]
        seen = [entry for entry in entries if entry not in rewards and entry not in ends]
        specs = {
            "observation_spec": compose(seen, batch),
            "action_spec": compose(
                zip(codec.paths, map(drawable, codec.leaves), strict=True), batch
            ),
            "reward_spec": Unbounded((*batch, 1), dtype=torch.float32),
            "done_spec": Composite({**flags, **compose(ends, batch)}, shape=batch),
        }
        if rewards:
            specs["reward_spec"] = compose(rewards, batch)
        for spec_name, spec in specs.items():
            _shape_groups(spec, batch, groups)
            setattr(self, spec_name, spec if self.device is None else spec.to(self.device))
        paths = [entry.path for entry in self.stepper.entries]
        # The entries that a step writes, in the order of the tensors of its buffers.
        self.writes = [*map(key_of, paths), keys.REWARD, keys.TERMINATED, keys.TRUNCATED, keys.DONE]
        for scope in ((), *((group,) for group in groups)):
            mask, action = (*scope, ACTION_MASK), (*scope, keys.ACTION)
            leaf = self.full_action_spec.get(action)
            if mask in paths and isinstance(leaf, (Categorical, OneHot)):
                legal = torch.ones(leaf.to_one_hot_spec().shape, dtype=torch.bool)
                if legal.numel() == self.full_observation_spec[mask].shape.numel():
                    self.masks[action] = legal.to(self.device).as_subclass(SharedMask)
                    self.stepper.shown[paths.index(mask)] = self.masks[action]
                    leaf.update_mask(self.masks[action])

    def read_masks(self) -> None:
        """Store the masks of actions that are infos, if there are any; the slots must be reset."""
        if self.masks or not isinstance(self.action_space, (Discrete, MultiDiscrete)):
            return
        with suppress(Exception):  # of an env that fails, as whoever steps it is told
            if is_number(mask := self.stepper.backend.sample_info()[ACTION_MASK]):
                self.read_infos({ACTION_MASK: mask})

    def read_infos(self, examples: Mapping[str, Any]) -> None:
        """Store further infos with the observations; the slots must be reset."""
        self.stepper.check_open("read the infos of")
        self.stepper.read_info(examples)
        self._infos.update(examples)
        locked = self.is_spec_locked
        self.set_spec_lock_(False)
        self._make_specs()
        self.set_spec_lock_(locked)

    def allocate(self, count: int, pinned: bool = False, exact: bool = False) -> list[StepBuffers]:
        """Zeroed buffers for ``count`` steps, of the env's batch size; see Stepper.allocate."""
        return self.stepper.allocate(count, self._batched, pinned, exact)

    def exact_reward(self, buffers: StepBuffers | None = None) -> torch.Tensor:
        """The rewards ``[N, 1]`` as the envs gave them, float64, of exact buffers or the latest."""
        buffers = self.stepper.latest if buffers is None else buffers
        assert buffers is not None
        return buffers.raw_reward

    @contextmanager
    def exact_rewards(self) -> Iterator[None]:
        """Have steps on TensorDicts keep the reward in float64, for :meth:`exact_reward`."""
        self._exact = True
        try:
            yield
        finally:
            self._exact = False

    def _pack(self, buffers: StepBuffers) -> TensorDict:
        entries = dict(zip(self.writes, buffers.tensors, strict=True))
        if self.texts:
            entries = told(self.texts, entries)
            self.keep_texts(*self._kept_texts)
        packed = nested(entries.items(), self.batch_size)
        if self.stepper.group_map:
            del packed[keys.REWARD]
            _shape_groups(packed, self.batch_size, self.stepper.group_map)
        return packed if self.device is None else packed.to(self.device)

    def keep_texts(self, *numbers: torch.Tensor) -> None:
        """Forget other texts than those that slots show, and those of these numbers."""
        self._kept_texts, latest = numbers, self.stepper.latest
        for leaf in self.texts.values():
            leaf.keep([*latest.raw.observation, *numbers])  # type: ignore[union-attr]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        (buffers,) = self.allocate(1, exact=self._exact)
        slots = self._slots(tensordict, keys.STEP)
        actions = self.stepper.backend.action.of_step(tensordict, self.batch_size)
        self.stepper.step(actions, slots, buffers)
        return self._pack(buffers)

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> TensorDictBase:
        """Reset the slots that ``"_reset"`` marks, ``[N, 1]`` or ``[N]``, or all.

        ``seed`` is an int, which seeds slot i with ``slot_seed(seed, i)``, or one int per slot that
        is reset; a ValueError if the backend cannot honour it. ``options`` are gymnasium's.
        """
        slots = self._slots(tensordict, keys.RESET)
        targets = range(self.num_envs) if slots is None else slots
        seeds = None if seed is None else self.seeds_of(seed, targets)
        (buffers,) = self.allocate(1)
        self.stepper.reset(slots, buffers, seeds, options)
        return self._pack(buffers).exclude(*self.reward_keys)

    def _slots(self, tensordict: TensorDictBase | None, key: str) -> list[int] | None:
        mask = None if tensordict is None else tensordict.get(key, None)
        if mask is None or mask.all():
            return None
        marked: list[int] = np.flatnonzero(mask.reshape(self.num_envs).numpy(force=True)).tolist()
        return marked

    def _set_seed(self, seed: int | None) -> None:
        """Seed slot i with ``slot_seed(seed, i)`` at its next reset."""
        if seed is not None:
            self.stepper.set_seeds(self.seeds_of(seed, range(self.num_envs)))

    def seeds_of(self, seed: int | Sequence[int], slots: Sequence[int]) -> list[int]:
        """One seed for each of ``slots``, from a root or from one int per slot.

        A vector env with one generator counts on from one int, as it may for its slots.
        """
        seeds = slot_seeds(seed, [self.first_slot + slot for slot in slots])
        if self.can.each_seed or not isinstance(seed, Integral):
            return seeds
        first = slot_seed(int(seed), self.first_slot)
        return [first + slot for slot in slots]

    def rebuild(self, **env_kwargs: Any) -> None:
        """Make the envs of all slots again, and close the old ones.

        Transforms around this env, and collectors over it, stay as they are; the next thing to call
        is ``reset`` (:meth:`tdcollect.Collector.rebuild_env` does both). Seeds do not carry over:
        ``set_seed`` gives new ones. If it raises, the old envs go on.

        Args:
            **env_kwargs: put over the ``env_kwargs`` of :func:`tdcollect.make_env`; none, for envs
                like the old.

        Raises:
            TypeError: if :func:`tdcollect.make_env` was given envs that were made already.
            ValueError: if the new envs have other spaces.

        Examples:
            >>> env = make_env("MountainCarContinuous-v0", 4, env_kwargs={"goal_velocity": 0.0})
            >>> env.rebuild(goal_velocity=0.02)
        """
        self.stepper.check_open("rebuild")
        if self._remake is None:
            raise TypeError(
                f"cannot make {self.name} anew: make_env was given an env that is made already; "
                "give it an id or a callable"
            )
        settings = {**(self.stepper.makes[1] or {}), **env_kwargs}
        stepper = self._remake(settings)
        with ended_on_error(stepper.close):
            stepper.read_info(self._infos)
            _check_alike(self.stepper, stepper)
        stepper.restarts = self.stepper.restarts  # one count for the env's life
        stepper.backend.observation = self.stepper.backend.observation  # with its texts
        stepper.shown = self.stepper.shown
        old, self.stepper = self.stepper, stepper
        old.close()

    def save_slots(self) -> dict[str, Any]:
        """The state of the slots, and of their envs as far as these can be saved.

        It is made of built-in and NumPy types. Of a closed env, the one that :meth:`keep_slots`
        took.
        """
        if self.is_closed and self._kept is not None:
            return self._kept
        return {
            "entries": self._described(),
            "envs": self.stepper.backend.save_states(),
            "stepper": self.stepper.save_state(),
        }

    def keep_slots(self) -> None:
        with suppress(Exception):  # of a user's snapshot(), say: whoever saves later is told
            self._kept = self.save_slots()

    def _described(self) -> list[Any]:
        return [["/".join(e.path), list(e.shape), e.dtype.str] for e in self.stepper.entries]

    def check_slots(self, state: dict[str, Any]) -> None:
        """Raise if the env is closed, or if a state of :meth:`save_slots` is of other entries."""
        self.stepper.check_open("load")
        here = self._described(), self.num_envs
        saved = state["entries"], len(state["envs"])
        if here != saved:
            raise ValueError(
                f"expected the state of an env with {here[1]} slots and the entries {here[0]}, "
                f"got one with {saved[1]} slots and the entries {saved[0]}; make the env as it was"
            )

    def load_slots(self, state: dict[str, Any]) -> dict[int, str]:
        """Bring slots back to a state of :meth:`save_slots` that was checked.

        Returns:
            The reason by slot, for slots that could not be brought back. They must be reset.
        """
        self.stepper.recall()
        failed = self.stepper.backend.load_states(state["envs"])
        slots = [slot for slot in range(self.num_envs) if slot not in failed]
        self.stepper.load_state(state["stepper"], slots)
        return failed

    def render(self) -> Any:
        """The rendered frames: a list with one per slot; a single frame if unbatched."""
        frames = self.stepper.backend.render()
        return frames if self.batch_size else frames[0]

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the slots; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.stepper.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name}, backend={self.stepper.backend.name}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )


def texts_of(env: EnvBase) -> Mapping[keys.Key, TextLeaf]:
    """Return the entries of text of an env of :func:`tdcollect.make_env`; of another, none."""
    base = base_of(env)
    return base.texts if isinstance(base, GymnasiumEnv) else {}


def shares_masks(spec: Any) -> bool:
    """Return whether an action spec, or a copy of one, tells the legal actions now."""
    leaves = spec.values(True, True) if isinstance(spec, Composite) else (spec,)
    return any(isinstance(getattr(leaf, "mask", None), SharedMask) for leaf in leaves)


def is_of_agents(path: keys.Key, groups: Mapping[str, Any], *names: str) -> bool:
    """Return whether an entry is a group's, of one of these names."""
    return len(path) == 2 and path[0] in groups and path[1] in names


def _shape_groups(entries: Any, batch: torch.Size, groups: Mapping[str, Sequence[str]]) -> None:
    def widen(part: Any, shape: torch.Size) -> None:
        for inner in part.values():
            if isinstance(inner, (Composite, TensorDictBase)):
                widen(inner, shape)
        part.batch_size = shape

    for group, agents in groups.items():
        if group in entries.keys():  # noqa: SIM118 - neither is a dict
            widen(entries[group], torch.Size([*batch, len(agents)]))


def _check_alike(old: Stepper, new: Stepper) -> None:
    pairs = {
        "observation space": (old.backend.observation.space, new.backend.observation.space),
        "action space": (old.backend.action.space, new.backend.action.space),
        "infos": (list(old.backend.info), list(new.backend.info)),
    }
    for name, (expected, got) in pairs.items():
        if expected != got:
            raise ValueError(
                f"expected envs with the {name} {expected}, as before, got {got}: policies and "
                "batches are made for it; call make_env for another env"
            )
