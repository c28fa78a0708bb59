"""Slots on arrays: what a backend gives, and the `Stepper`, the one place where envs are stepped.

A backend resets and steps N gymnasium slots, and writes the results straight into arrays that its
caller owns. The ``EnvBase`` wrapper and the collector drive it through a :class:`Stepper`, which
adds counters, a time limit, waiting seeds, checks, and restarts of envs that fail.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from enum import IntEnum
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tdcollect import keys
from tdcollect.envs import spaces
from tdcollect.envs.process import values
from tdcollect.envs.process.agents import AgentSpace
from tdcollect.envs.process.values import Array, InfoEntry, as_flag, as_reward
from tdcollect.envs.process.worker import old_api
from tdcollect.envs.spaces import Bookkeeping, SlotBuffers, SpaceCodec, StepBuffers
from tdcollect.seeding import WaitingSeeds

RESUMABLE = ("serial", "process")
"""Backends whose envs can be brought back, in another process too."""


class Can(NamedTuple):
    """Abilities of an env's slots. The layers above hand them on, less what they take away."""

    pause: bool = True  # some slots can be stepped while others wait
    step_ended: bool = False  # else a step after an episode's end would lose its action
    reset_singly: bool = True  # else a slot alone starts anew only after its episode has ended
    seed_singly: bool = True  # some slots can be reset with seeds while others go on
    each_seed: bool = True  # each slot has a generator; else one draws for all of them
    rebuild: bool = False  # the env of a single slot can be built anew
    resume: bool = False  # the envs can be saved and brought back
    each_options: bool = True  # resets take options of each slot
    wait_num: int | None = None  # the slots that an asynchronous step waits for
    only_by_arrival: str = ""  # why slots can only begin again in a step of the others

    @property
    def asynchronous(self) -> bool:
        """Slots that are ready may go on while others step."""
        return self.wait_num is not None


class Phase(IntEnum):
    """The state of a slot between two steps."""

    RUNNING = 0  # amid an episode, or in flight
    ENDED = 1  # as the flag done has it, or its env has failed
    UNSTARTED = 2  # to be reset before it is stepped
    FALLEN = 3  # amid an episode, but its env was built again together with one that failed
    UNSENT = 4  # fallen, and sent: receive() gives its failure


Starts: TypeAlias = Mapping[int, int | None]
"""The slots to reset, ascending, each with its seed; None leaves it to its own generator."""


def are_seeded(starts: Starts) -> bool:
    """Return whether a slot has a seed."""
    return not {None}.issuperset(starts.values())


class Came(NamedTuple):
    """The slots that have come back from what they were sent to do.

    The rows of ``stepped`` and of ``begun`` are written; those of other slots mean nothing new.
    ``failed`` and ``failed_begins`` are the failures of steps and of resets, if there are any.
    """

    stepped: list[int]
    begun: list[int]
    failed: SlotError | None
    failed_begins: SlotError | None


# --- errors ------------------------------------------------------------------------------------


class SlotError(RuntimeError):
    """The envs of some slots failed; the other slots were stepped or reset all the same.

    Args:
        verb: what was asked of the env: ``"step"``, ``"reset"`` or ``"rebuild"``.
        causes: what went wrong in each of these envs, by slot.
        where: of some of these slots, the words that name episode, step and seed.

    Attributes:
        causes: as given. What an env raised has the env's own traceback.
    """

    def __init__(
        self,
        verb: str,
        causes: Mapping[int, Exception],
        where: Mapping[int, str] = MappingProxyType({}),
    ):
        self.verb = verb
        self.causes = dict(causes)
        self.where = dict(where)
        slots = "; ".join(
            f"slot {s}{self.where.get(s, '')}: {type(e).__name__}: {e}"
            for s, e in self.causes.items()
        )
        advice = old_api(slots)
        super().__init__(f"the env failed in {verb}() of {slots}" + f"; {advice}" * bool(advice))
        self.__cause__ = next(iter(self.causes.values()), None)

    def __reduce__(self) -> Any:
        return type(self), (self.verb, self.causes, self.where)


def joined(one: SlotError | None, other: SlotError | None) -> SlotError | None:
    if one is None or other is None:
        return one or other
    return SlotError(one.verb, {**one.causes, **other.causes}, {**one.where, **other.where})


class RestartsExhausted(RuntimeError):
    """An env failed after as many had been built again as ``max_restarts`` allows."""


def not_finite(
    verb: str,
    observation: SpaceCodec,
    slots: Iterable[int],
    out: SlotBuffers,
    failed: SlotError | None,
    reward: Array | None = None,
) -> SlotError | None:
    """Join failures with those of slots whose observations or stored rewards are not finite."""
    causes: dict[int, Exception] = {}
    named = zip(map("/".join, observation.paths), out.observation, strict=True)
    for name, array in (*named, *([] if reward is None else [("reward", reward)])):
        finite: Any = np.isfinite(array) if array.dtype.kind == "f" else True
        if finite is True or finite.all():
            continue
        odd = ~finite.reshape(len(array), -1).all(1)
        for slot in slots:
            if odd[slot] and slot not in causes and (failed is None or slot not in failed.causes):
                row = np.atleast_1d(array[slot])
                where = tuple(np.argwhere(~np.isfinite(row))[0].tolist())
                causes[slot] = ValueError(
                    "expected finite numbers, as check_finite=True asks for, got "
                    f"{row[where]} at {list(where)} of {name!r}"
                )
    return joined(failed, SlotError(verb, dict(sorted(causes.items()))) if causes else None)


def _rows_of(slots: Collection[int]) -> Any:
    """An index of rows; a slot alone is a number, which NumPy takes in a tenth of the time."""
    return next(iter(slots)) if len(slots) == 1 else np.fromiter(slots, np.intp)


# --- backends ----------------------------------------------------------------------------------


class Backend(abc.ABC):
    """N slots of one env."""

    name: ClassVar[str]  # the `backend` argument of make_env
    can = Can()
    num_envs: int
    observation: SpaceCodec
    action: SpaceCodec
    info: Sequence[InfoEntry] = ()  # the infos that are written; see read_info
    envs: Sequence[gym.Env[Any, Any]] = ()  # one per slot, if they are plain ones in this process
    vector_env: Any = None  # that holds all slots, if they have no env each
    spec: EnvSpec | None = None  # of a slot's env, wrappers included
    in_flight: Set[int] = frozenset()  # slots that were sent, and have not been received

    def _set_spaces(
        self, observation: gym.Space[Any], action: gym.Space[Any], categorical: bool | None
    ) -> None:
        name = spaces.observation_name(observation)
        of_agents = isinstance(observation, AgentSpace)  # encoded as TorchRL's PettingZooEnv does
        self.observation = SpaceCodec(
            observation,
            name,
            categorical=bool(categorical) and not of_agents,
            rename_state=not of_agents,
        )
        integers = of_agents if categorical is None else categorical
        self.action = SpaceCodec(action, keys.ACTION, categorical=integers)

    def _write_row(
        self, slot: int, observation: Any, reward: Any, ends: tuple[Any, Any], out: SlotBuffers
    ) -> None:
        """Write one slot's step, but for the infos; ``ends`` are terminated and truncated."""
        self.observation.write_slot(observation, out.observation, slot)
        out.reward[slot] = as_reward(reward)
        out.terminated[slot] = as_flag("terminated", ends[0])
        out.truncated[slot] = as_flag("truncated", ends[1])

    @abc.abstractmethod
    def reset(self, starts: Starts, options: dict[str, Any] | None, out: SlotBuffers) -> None:
        """Start an episode in each slot of ``starts``; write the rows of those slots only.

        ``out`` receives observations and infos; its reward and flags are left alone.

        Raises:
            ValueError: if seeds or options cannot be honoured.
            SlotError: if the envs of some slots raised; the rows of the others are written.
        """

    @abc.abstractmethod
    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        """Step ``slots`` (ascending, None for all) and write their rows.

        ``actions`` are the action entries, ``[N, *shape]`` each. At the end of an episode, the
        observation is the true final one.

        Raises:
            SlotError: if the envs of some slots raised; the rows of the others are written.
        """

    def send(self, actions: Sequence[Array], slots: Sequence[int]) -> None:
        """Have idle ``slots`` take a step, and go on; :meth:`receive` gives its outcome."""
        raise NotImplementedError

    def send_reset(self, starts: Starts, options: dict[str, Any] | None) -> None:
        """Reset idle slots, and go on; :meth:`receive` gives the outcome."""
        raise NotImplementedError

    def receive(self, out: SlotBuffers) -> Came:
        """Wait for slots that were sent, and write their rows."""
        raise NotImplementedError

    def recall(self) -> None:  # noqa: B027 - nothing is in flight in synchronous slots
        """Wait for the slots that are in flight, and forget where they came to."""

    def is_idle(self, slot: int) -> bool:
        """Return whether a slot may be sent; those that share a worker are busy together."""
        return True

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """The infos of a slot's latest step; empty if they are not kept."""
        return {}

    def latest_infos(
        self, slots: Sequence[int], names: Sequence[str]
    ) -> Mapping[int, Mapping[str, Any]]:
        """The infos of these names, of the latest step of each slot; other names may be there."""
        return {slot: self.latest_info(slot) for slot in slots}

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make the envs of ``slots``, and of those lost together with them, again; returns all."""
        raise NotImplementedError(f"the backend {self.name!r} cannot build single slots anew")

    def save_states(self) -> dict[int, dict[str, Any]]:
        """The states of the envs, by slot, for :meth:`load_states`: built-in and NumPy types."""
        why = f"the backend {self.name!r} cannot save its envs"
        if self.name in RESUMABLE:
            why = "it was made without make_env(resumable=True)"
        return {slot: {"how": "nothing", "why": why} for slot in range(self.num_envs)}

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> dict[int, str]:
        """Bring envs back to saved states; returns the reasons by slot, of those that are not."""
        here = Backend.save_states(self)
        return {
            slot: str(state["why"] if state["how"] == "nothing" else here[slot]["why"])
            for slot, state in states.items()
        }

    def check_seeds(self, seeds: Sequence[int]) -> None:  # noqa: B027
        """Raise ValueError if no reset of this backend could honour these seeds."""

    def generators(self) -> dict[int, bytes]:
        """The states of the global generators in processes of its own, in short, by their pids."""
        return {}

    @abc.abstractmethod
    def sample_info(self) -> Mapping[str, Any]:
        """Infos of one slot, which show their shapes and dtypes."""

    def read_info(self, info_keys: Sequence[str] | Mapping[str, Any]) -> None:
        """Choose the infos to write: names, or a mapping from names to example values.

        Shapes and dtypes of names are read off one reset and one step of the env.
        """
        examples = info_keys if isinstance(info_keys, Mapping) else self.sample_info()
        if missing := [key for key in info_keys if key not in examples]:
            raise KeyError(
                f"info_keys {missing} are in the info of neither the first reset nor the first "
                f"step, which hold {sorted(examples)}; to read an info that appears later, pass "
                "info_keys as a dict from its name to an example value"
            )
        self.info = [InfoEntry.like(key, examples[key]) for key in info_keys]

    def attributes(self, name: str) -> list[Any]:
        """An attribute of the env of each slot: values, or functions that call a method there."""
        raise AttributeError(f"the backend {self.name!r} has no env per slot")

    @abc.abstractmethod
    def render(self) -> list[Any]:
        """The rendered frame of each slot."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the envs and free their resources."""


# --- counters ----------------------------------------------------------------------------------


_numbers = count()


class EpisodeCounters:
    """Counts the episodes and steps of N slots.

    One clock goes up at each step; the length of a slot's episode is its difference to the clock
    at the reset.
    """

    def __init__(self, num_envs: int):
        self.number = next(_numbers)  # that no others have
        self.seeded: dict[int, tuple[int, int]] = {}  # each slot's latest seed, and its episode
        self._clock = 0
        self._begun = np.zeros(num_envs, np.int64)
        self.episodes = np.zeros(num_envs, np.int64)  # resets so far

    def stepped(self, slots: Sequence[int] | None) -> None:
        self._clock += 1
        if slots is not None:  # the others wait
            self._begun += 1
            self._begun[list(slots)] -= 1

    def started(self, starts: Starts, rows: Any) -> None:
        self._begun[rows] = self._clock
        self.episodes[rows] += 1
        for slot, seed in starts.items() if are_seeded(starts) else ():
            if seed is not None:
                self.seeded[slot] = seed, int(self.episodes[slot]) - 1

    def lengths(self) -> Array:
        return self._clock - self._begun

    def save_state(self) -> dict[str, Any]:
        return {
            "lengths": self.lengths(),
            "episodes": self.episodes.copy(),
            "seeds": dict(self.seeded),
        }

    def load_state(self, state: Mapping[str, Any], slots: Sequence[int]) -> None:
        rows = list(slots)
        self._begun[rows] = self._clock - state["lengths"][rows]
        self.episodes[rows] = state["episodes"][rows]
        for slot in rows:
            self.seeded.pop(slot, None)
            if slot in state["seeds"]:
                self.seeded[slot] = tuple(state["seeds"][slot])

    def located(self, failed: SlotError, starts: Starts = MappingProxyType({})) -> SlotError:
        """The same error, with words for episode, step and seed of each slot."""
        words = {}
        for slot in failed.causes:
            resets = failed.verb == "reset"
            episode = int(self.episodes[slot]) - (not resets)
            step = "" if resets else f", step {int(self._clock - self._begun[slot])}"
            place = f", episode {episode}{step}"
            seed, at = starts.get(slot), episode
            if seed is None:
                seed, at = self.seeded.get(slot, (None, 0))
            if seed is not None:
                place += f", seed {seed}" + ("" if at == episode else f" at episode {at}")
            words[slot] = place
        return SlotError(failed.verb, failed.causes, words)


# --- steps -------------------------------------------------------------------------------------


class Stepper:
    """Steps and resets slots on arrays.

    ``check_finite`` takes NaN or infinite observations and rewards for failures of the env; with
    ``max_restarts``, so many envs may be built again after failures, which raise otherwise.

    Attributes:
        entries: the entries beside reward and flags: observations, infos, bookkeeping.
        latest: the buffers of the latest step or reset, which hold the present state of all slots;
            None before the first reset.
        broken: the failures of the latest step, by slot, after which the envs were built again and
            the episodes broken off.
        restarts: the envs built again after failures so far.
        makes: the function that made the envs, if one did, and its arguments.
        group_map: the agents of each group, in an env of many agents.
        shown: masks of actions, by the place of their entry, that follow whenever slots have moved.
    """

    makes: tuple[Any, Mapping[str, Any] | None] = (None, None)

    def __init__(
        self,
        backend: Backend,
        bookkeeping: Bookkeeping = Bookkeeping(),
        *,
        name: str = "the env",
        check_finite: bool = False,
        max_restarts: int | None = None,
    ):
        self.shown: dict[int, Any] = {}
        self.group_map = getattr(backend.observation.space, "group_map", {})
        if self.group_map and bookkeeping.episode_reward:
            raise ValueError(
                "expected no episode_reward: each agent has rewards of its own; append RewardSum, "
                "whose in_keys are env.reward_keys"
            )
        if bookkeeping.max_episode_steps is not None and not backend.can.reset_singly:
            raise ValueError(
                "expected no max_episode_steps: this vector env cannot reset single slots, which a "
                "limit asks for; make the env itself with one, or use backend='serial'"
            )
        self.backend = backend
        self.can = backend.can
        self.name = name
        self.is_closed = False
        self.latest: StepBuffers | None = None
        self.max_restarts = max_restarts
        self.restarts = 0
        self.broken: Mapping[int, Exception] = {}
        self.num_envs = backend.num_envs
        self.bookkeeping = bookkeeping
        self._every_slot = range(self.num_envs)
        self._set_entries()
        self._counters = EpisodeCounters(self.num_envs)
        self._finite = check_finite
        self._fallen: dict[int, Exception] = {}  # the failures of slots that have fallen
        self._returns = np.zeros(self.num_envs, np.float32)
        self._seeds = WaitingSeeds()
        self._starting: dict[int, tuple[int | None, Any]] = {}  # seeds, options of resets in flight

    def _set_entries(self) -> None:
        backend, wanted, codec = self.backend, self.bookkeeping, self.backend.observation
        self.entries = [
            spaces.Entry(path, leaf.shape, leaf.dtype, leaf.spec)
            for path, leaf in zip(codec.paths, codec.leaves, strict=True)
        ]
        for key, shape, dtype in backend.info:
            kind = torch.from_numpy(np.empty((), dtype)).dtype
            self.entries.append(spaces.Entry((key,), shape, dtype, Unbounded(shape, dtype=kind)))
        count = Bounded(0, torch.iinfo(torch.int64).max, (1,), dtype=torch.int64)
        total = Unbounded((1,), dtype=torch.float32)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        further: list[tuple[bool, str, type, TensorSpec]] = [
            (wanted.step_count, keys.STEP_COUNT, np.int64, count),
            (wanted.episode_reward, keys.EPISODE_REWARD, np.float32, total),
            (wanted.is_init, keys.IS_INIT, bool, flag),
            (self.max_restarts is not None, keys.ENV_ERROR, bool, flag),
        ]
        for is_wanted, name, number, spec in further:
            if is_wanted:
                self.entries.append(spaces.Entry((name,), (1,), np.dtype(number), spec))
        paths = [entry.path for entry in self.entries]
        spaces.check_names(paths, backend.action.paths)
        self._outcomes = [
            [paths.index((group, name)) for name in (keys.REWARD, *keys.FLAGS)]
            for group in self.group_map
        ]
        self._phases = np.full(self.num_envs, Phase.UNSTARTED, np.uint8)

    def allocate(
        self, count: int, batched: bool = True, pinned: bool = False, exact: bool = False
    ) -> list[StepBuffers]:
        """Zeroed buffers for ``count`` steps, allocated together.

        ``pinned`` ones are page-locked; in ``exact`` ones, the backend writes rewards in float64.
        """
        wanted = [((self.num_envs, *entry.shape), entry.dtype) for entry in self.entries]
        numbers = map(np.dtype, [np.float32, *[np.float64] * exact])
        rows = -(-self.num_envs // spaces.ALIGNMENT) * spaces.ALIGNMENT  # each flag is aligned
        wanted += [((3, rows, 1), np.dtype(bool))]
        wanted += [((self.num_envs, 1), number) for number in numbers]
        written, memory = spaces.aligned_zeros(count, wanted, pinned)
        last = len(self.entries)
        flags = written[last][:, :, : self.num_envs]
        state = memory[:, : written[last + 1].ctypes.data - memory.ctypes.data]
        written[last : last + 1] = flags.swapaxes(0, 1)
        tensors = [torch.from_numpy(b if batched else b[:, 0]).unbind(0) for b in written]
        columns = [list(array[..., 0]) for array in written[last:]]
        terminated, truncated, done, stored = columns[:4]
        steps = list(zip(*written[:last], strict=True))
        infos = len(self.backend.observation.leaves)
        counts = infos + len(self.backend.info)
        parts = slice(infos), slice(infos, counts), slice(counts, None)
        observed, told, counted = (map(operator.itemgetter(part), steps) for part in parts)
        raw = map(SlotBuffers, observed, told, columns[-1], terminated, truncated)
        by_step = zip(*tensors[:last], tensors[last + 3], *tensors[last : last + 3], strict=True)
        ends = flags[..., 0]
        return list(
            map(StepBuffers, raw, counted, steps, stored, done, ends, by_step, tensors[-1], state)
        )

    def set_seeds(self, seeds: Sequence[int]) -> None:
        """Keep one seed per slot for that slot's next reset."""
        self.backend.check_seeds(seeds)
        self._seeds.ask(seeds)

    def derive_seeds(self) -> None:
        """Seed the next reset of each slot from its seed before: timing moved its generator."""
        if self.can.each_seed:
            self._seeds.derive(self._every_slot, self._counters.seeded)

    def _arrive(self, out: StepBuffers) -> None:
        self.latest = out
        for entry, mask in self.shown.items():
            mask.show(out.entries[entry])

    def places(self) -> Array:
        """``[5, N]``: what stays the same of a slot while nobody moves it or waits for it."""
        counters, places = self._counters, np.zeros((5, self.num_envs), np.int64)
        places[0], places[1] = counters.number, counters.episodes
        places[2], places[3] = counters.lengths(), self._phases
        places[4, [*self.away]] = 1
        return places

    def follow(self) -> None:
        """Go on from slots that somebody else has reset or stepped."""
        episodes = self._counters.episodes
        begun = [slot for slot in self._in_phase(Phase.UNSTARTED) if not episodes[slot]]
        self._counters.started(dict.fromkeys(begun), begun)
        self._phases[:] = Phase.RUNNING
        self.latest = None

    def read_info(self, examples: Mapping[str, Any]) -> None:
        """Have steps write further infos, with examples by name; all slots must be reset."""
        if examples:
            present = {i.key: np.zeros(i.shape, i.dtype) for i in self.backend.info}
            self.backend.read_info({**present, **examples})
            self._set_entries()
            self.latest = None

    # --- all at once ---------------------------------------------------------------------------

    def reset(
        self,
        slots: Sequence[int] | None,
        out: StepBuffers,
        seeds: Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an episode in each of ``slots`` (None for all); slots in flight are waited for.

        ``out`` receives the rows of these slots, flags set to False, but for the reward; the rows
        of the others show their present state. Without ``seeds``, one per slot, those of
        :meth:`set_seeds` are used, or the env's own generators.

        Raises:
            RuntimeError: if the stepper is closed.
            SlotError: if the envs of some slots failed; the others are reset.
            RestartsExhausted: if a failure exceeds ``max_restarts``.
        """
        self.check_open("reset")
        if slots is None:
            slots = self._every_slot
        else:
            self._hold_present(out)
        self.recall()
        starts = self._seeds.of(slots)
        if seeds is not None:
            starts.update(zip(slots, seeds, strict=True))
        left, failed = starts, None
        while left:
            try:
                failed = None
                self.backend.reset(left, options, out.raw)
            except SlotError as error:
                failed = error
            failed = self._begin(left, failed, out)
            if failed is None or self.max_restarts is None:
                break
            again = sorted(failed.causes)
            self._restart(failed, again)
            if seeds is None:
                starts.update(self._seeds.of(again))
            left = {slot: starts[slot] for slot in again}
        self._seeds.drop(slots)
        self._arrive(out)
        if failed is not None:
            raise failed

    def _begin(
        self, starts: Starts, failed: SlotError | None, out: StepBuffers
    ) -> SlotError | None:
        """Complete the rows of resets but for those that failed; returns the failures, located."""
        if self._finite:
            failed = not_finite("reset", self.backend.observation, starts, out.raw, failed)
        if failed is not None:
            failed = self._counters.located(failed, starts)
            starts = {slot: starts[slot] for slot in starts if slot not in failed.causes}
        rows = _rows_of(starts)
        self._counters.started(starts, rows)
        if self.bookkeeping.episode_reward:
            self._returns[rows] = 0
        self._phases[rows] = Phase.RUNNING
        out.flags[:, rows] = False
        for slot in starts if self._fallen else ():
            self._fallen.pop(slot, None)
        if out.bookkeeping:
            self._write_bookkeeping(rows, True, out)
        return failed

    def step(
        self,
        actions: Sequence[Array],
        slots: Sequence[int] | None,
        out: StepBuffers,
        *,
        restart: bool = True,
    ) -> None:
        """Step ``slots`` (None for all); slots in flight are waited for.

        ``out`` receives the rows of these slots: observations (at an episode's end the true final
        one), reward and flags. The rows of the others show their present state. ``restart=False``
        raises SlotError also where ``max_restarts`` would have envs built again.

        Raises:
            RuntimeError: if the stepper is closed, before the first reset, or if an action would
                be lost.
            SlotError: if the envs of some slots failed; the others are stepped.
            RestartsExhausted: if a failure exceeds ``max_restarts``; the others are stepped.
        """
        self.recall()
        self._check_step(slots)
        if slots is not None:
            if not self.can.pause:
                raise RuntimeError(
                    f"expected a step of all {self.num_envs} slots, got one of slots {list(slots)}:"
                    " this vector env steps its slots together; use backend='serial' to step some"
                )
            self._hold_present(out)
        stepped, failed = self._without_fallen(slots)
        try:
            self.backend.step(actions, stepped, out.raw)
        except SlotError as error:
            failed = joined(failed, error)
        failed = self._stepped(slots, stepped, failed, out, restart)
        self._arrive(out)
        if failed is not None:
            raise failed

    def _stepped(
        self,
        slots: Sequence[int] | None,
        stepped: Sequence[int] | None,
        failed: SlotError | None,
        out: StepBuffers,
        restart: bool,
    ) -> SlotError | None:
        """Complete the rows of a step of ``slots``, of which the backend has done ``stepped``."""
        buffers = out.raw
        if out.reward is not buffers.reward:
            out.reward[...] = buffers.reward
        if self._finite:
            checked = self._every_slot if stepped is None else stepped
            failed = not_finite(
                "step", self.backend.observation, checked, buffers, failed, out.reward
            )
        self.broken = {}
        if failed is not None:
            slots, failed = self._failed_step(failed, slots, out, restart)
        rows: Any = ... if slots is None else list(slots)
        self._counters.stepped(slots)
        if (limit := self.bookkeeping.max_episode_steps) is not None:
            late = self._counters.lengths() >= limit
            buffers.truncated[rows] |= late[rows]
            self._truncate_agents(late, out)
        if self.bookkeeping.episode_reward:
            self._returns[rows] += out.reward[rows]
        np.logical_or(buffers.terminated, buffers.truncated, out=out.done)
        if self._outcomes:  # some agents may have terminated, and all others been truncated
            ends = [out.entries[done].all((1, 2)) for _, done, _, _ in self._outcomes]
            np.logical_or(out.done, np.logical_and.reduce(ends), out=out.done)
        self._phases[rows] = out.done[rows]  # running, or ended
        if self.broken:
            self._phases[list(self.broken)] = Phase.UNSTARTED
        if out.bookkeeping:
            self._write_bookkeeping(rows, False, out)
        return failed

    # --- slots that are ready: a step in two parts ---------------------------------------------

    @property
    def away(self) -> set[int]:
        """The slots that were sent and have not been received."""
        return {*self.backend.in_flight, *(self._in_phase(Phase.UNSENT) if self._fallen else ())}

    def _in_phase(self, phase: Phase) -> list[int]:
        slots: list[int] = np.flatnonzero(self._phases == phase).tolist()
        return slots

    def idle(self, slots: Iterable[int]) -> list[int]:
        """Those of ``slots`` that can be sent, ascending; others share a worker that is busy."""
        return sorted(slot for slot in slots if self.backend.is_idle(slot))

    def send(self, actions: Sequence[Array], slots: Sequence[int]) -> None:
        """Have ``slots``, idle ones, take a step, and go on; see :meth:`receive`."""
        self._check_step(slots)
        sent, failed = self._without_fallen(slots)
        if failed is not None:
            self._phases[list(failed.causes)] = Phase.UNSENT
        self.backend.send(actions, sent)

    def send_reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an episode in ``slots``, idle ones, and go on; see :meth:`receive`.

        Seeds that are None, or not given, are those that wait, or the env's own generator.
        """
        self.check_open("reset")
        starts = self._seeds.of(slots)
        if seeds is not None:
            pairs = zip(slots, seeds, strict=True)
            starts.update({slot: seed for slot, seed in pairs if seed is not None})
        self._seeds.drop(slots)
        self._starting.update({slot: (seed, options) for slot, seed in starts.items()})
        self.backend.send_reset(starts, options)

    def receive(self, out: StepBuffers, *, restart: bool = True) -> Came:
        """Wait for slots that were sent, and write their rows, as :meth:`step` and reset do.

        The rows of other slots show their present state.

        Raises:
            RestartsExhausted: if a failure exceeds ``max_restarts``.
        """
        self._hold_present(out)
        failed = self._take_unsent()
        came = self.backend.receive(out.raw) if failed is None else Came([], [], failed, None)
        begun, failed_begins = self._receive_begun(came, out)
        failed = joined(came.failed, self._take_unsent())
        slots = sorted([*came.stepped, *(() if failed is None else failed.causes)])
        if slots:
            failed = self._stepped(slots, came.stepped, failed, out, restart)
            gone = () if failed is None else failed.causes
            slots = [slot for slot in slots if slot not in gone]
        self._arrive(out)
        return Came(slots, begun, failed, failed_begins)

    def _take_unsent(self) -> SlotError | None:
        """The failures of slots that could not be sent, once their workers are idle."""
        unsent = self._in_phase(Phase.UNSENT) if self._fallen else ()
        taken = {slot: self._fallen[slot] for slot in unsent if self.backend.is_idle(slot)}
        self._phases[list(taken)] = Phase.FALLEN
        return SlotError("step", taken) if taken else None

    def _receive_begun(self, came: Came, out: StepBuffers) -> tuple[list[int], SlotError | None]:
        """Complete the rows of resets that have come; returns their slots, and the failures."""
        failed = came.failed_begins
        if not came.begun and failed is None:
            return [], None
        back = sorted([*came.begun, *(() if failed is None else failed.causes)])
        sent = {slot: self._starting.pop(slot) for slot in back}
        starts = {slot: seed for slot, (seed, _) in sent.items()}
        failed = self._begin(starts, failed, out)
        begun = [slot for slot in back if failed is None or slot not in failed.causes]
        if failed is not None and self.max_restarts is not None:
            again = sorted(failed.causes)
            self._restart(failed, again)
            each = {s: values.options_of(sent[s][1], s) for s in again}
            self.send_reset(again, [starts[s] for s in again], values.EachOptions(each))
            failed = None
        return begun, failed

    def recall(self) -> None:
        """Wait for slots in flight; they must be reset before they are stepped."""
        if self.can.asynchronous and (away := self.away):
            self.backend.recall()
            self._starting = {}
            self._phases[list(away)] = Phase.UNSTARTED

    # --- failures ------------------------------------------------------------------------------

    def _without_fallen(self, slots: Sequence[int] | None) -> tuple[Any, SlotError | None]:
        if not self._fallen:
            return slots, None
        every = self._every_slot if slots is None else slots
        fallen = {slot: self._fallen[slot] for slot in every if slot in self._fallen}
        rest = [slot for slot in every if slot not in fallen]
        return rest, SlotError("step", fallen) if fallen else None

    def _failed_step(
        self, failed: SlotError, slots: Sequence[int] | None, out: StepBuffers, restart: bool
    ) -> tuple[Sequence[int] | None, SlotError | None]:
        """Deal with failures; returns the slots that have stepped, and the error to raise."""
        failed = self._counters.located(failed)
        rows = list(failed.causes)
        if restart and self.max_restarts is not None:  # their episodes are truncated
            assert self.latest is not None  # a step follows a reset
            self._restart(failed, [slot for slot in rows if slot not in self._fallen])
            out.copy_state(self.latest.state, rows)
            out.reward[rows] = out.raw.reward[rows] = 0
            out.raw.terminated[rows] = False
            out.raw.truncated[rows] = True
            self._truncate_agents(rows, out)
            for reward, _, terminated, _ in self._outcomes:
                out.entries[reward][rows] = out.entries[terminated][rows] = 0
            for slot in rows:
                self._fallen.pop(slot, None)
            self.broken = failed.causes
            return slots, None
        self._phases[[slot for slot in rows if slot not in self._fallen]] = Phase.ENDED
        every = self._every_slot if slots is None else slots
        return [slot for slot in every if slot not in failed.causes], failed

    def _truncate_agents(self, slots: Any, out: StepBuffers) -> None:
        for _, done, _, truncated in self._outcomes:
            out.entries[done][slots] = out.entries[truncated][slots] = True

    def _hold_present(self, out: StepBuffers) -> None:
        if self.latest is not None:
            np.copyto(out.memory, self.latest.memory)

    def _restart(self, failed: SlotError, slots: list[int]) -> None:
        assert self.max_restarts is not None
        while slots:
            if self.restarts + len(slots) > self.max_restarts:
                raise RestartsExhausted(
                    f"{failed}; {self.restarts} envs were built anew already and max_restarts="
                    f"{self.max_restarts}: correct the env, or pass a larger max_restarts to "
                    "make_env"
                ) from failed
            try:
                built = self.rebuild(slots)
            except Exception as error:
                self.restarts += len(slots)
                failed = SlotError("rebuild", dict.fromkeys(slots, error))
                continue
            self.restarts += len(built)
            self._seeds.derive(built, self._counters.seeded)
            return

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make the envs of ``slots``, and those lost with them, again; returns all, ascending.

        Each must be reset. The next step of one that was amid an episode fails.
        """
        built = self.backend.rebuild(slots)
        for slot in built:
            if slot in slots or self._phases[slot] in (Phase.ENDED, Phase.UNSTARTED):
                self._phases[slot] = Phase.UNSTARTED
                continue
            self._fallen[slot] = RuntimeError(
                f"its env was built anew together with that of slot {slots[0]}"
            )
            self._phases[slot] = max(self._phases[slot], Phase.FALLEN)  # or unsent
        return built

    # --- state, checks, end --------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        return {
            "counters": self._counters.save_state(),
            "returns": self._returns.copy(),
            "must_reset": (self._phases == Phase.ENDED) | (self._phases == Phase.UNSTARTED),
            "unstarted": self._in_phase(Phase.UNSTARTED),
            "seeds": self._seeds.save_state(),
            "restarts": None if self.max_restarts is None else self.restarts,
            "latest": None if self.latest is None else [a.copy() for a in self.latest.state],
        }

    def load_state(self, state: dict[str, Any], slots: Sequence[int]) -> None:
        """Restore the part of a :meth:`save_state` that concerns ``slots``, once their envs are."""
        if not slots or state["latest"] is None:
            return
        rows = list(slots)
        self._counters.load_state(state["counters"], rows)
        self._returns[rows] = state["returns"][rows]
        self._phases[rows] = state["must_reset"][rows]  # running, or ended
        self._phases[list(set(rows).intersection(state["unstarted"]))] = Phase.UNSTARTED
        self._seeds.load_state(state["seeds"], rows)
        if self.max_restarts is not None and state["restarts"] is not None:
            self.restarts = state["restarts"]
        (out,) = self.allocate(1)
        self._hold_present(out)
        out.copy_state(state["latest"], rows)
        self._arrive(out)

    def _write_bookkeeping(self, rows: Any, is_init: bool, out: StepBuffers) -> None:
        arrays = iter(out.bookkeeping)
        if self.bookkeeping.step_count:
            next(arrays)[rows, 0] = self._counters.lengths()[rows]
        if self.bookkeeping.episode_reward:
            next(arrays)[rows, 0] = self._returns[rows]
        if self.bookkeeping.is_init:
            next(arrays)[rows] = is_init
        if self.max_restarts is not None:
            marks = next(arrays)
            marks[rows] = False
            if self.broken and not is_init:
                marks[list(self.broken)] = True

    def check_open(self, verb: str) -> None:
        if self.is_closed:
            raise RuntimeError(f"cannot {verb} {self.name}: the env is closed; make a new one")

    def _check_step(self, slots: Sequence[int] | None) -> None:
        self.check_open("step")
        phases = (self._phases if slots is None else self._phases[list(slots)]).tobytes()
        if Phase.UNSTARTED in phases:
            raise RuntimeError("expected reset() before the first step(); call env.reset()")
        if not self.can.step_ended and Phase.ENDED in phases:
            raise RuntimeError(
                f"the episodes of slots {self._in_phase(Phase.ENDED)} have ended and the env "
                "would ignore their actions; reset these slots first (a '_reset' mask, "
                "env.maybe_reset or env.step_and_maybe_reset do)"
            )

    def close(self) -> None:
        self.is_closed = True
        self.backend.close()
