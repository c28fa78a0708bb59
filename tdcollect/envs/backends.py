"""The backends in this process: ``serial``, ``gymnasium`` and ``envpool``.

``serial``, the default, steps plain gymnasium envs one after the other.

``gymnasium`` has a ``gymnasium.vector.VectorEnv`` as it is. In each of gymnasium's autoreset modes
every row is a real step, none a reset:

- DISABLED: ended slots are reset singly, with ``options["reset_mask"]``.
- NEXT_STEP: the same, right after the step that ended the episode and so before the vector env
  would reset by itself; its next step is then a real one. One that resets only by itself
  (``CartPoleVectorEnv``) does so in a step of the others: its slots come back as if they stepped
  asynchronously, and the action and the reward of that step are nobody's.
- SAME_STEP: the vector env has already reset; its infos hold the true final observation, and the
  observation of the new episode is kept here until it is asked for.

gymnasium's wrappers that break these rules are refused.

``envpool`` has EnvPool's C++ envs, in lock step. EnvPool declares NEXT_STEP, but a subset of its
slots restarts at once with ``reset(env_ids)``, and the next step is then a real one. It takes seeds
at construction only: for other seeds, the pool is built again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import vector
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from tdcollect._upstream.others import flat_pool, takes_reset_mask
from tdcollect.cleanup import close_env, ended_on_error
from tdcollect.envs.process import values
from tdcollect.envs.process.values import (
    Array,
    as_begun,
    as_flags,
    as_info,
    as_rewards,
    slot_of,
    write_info,
)
from tdcollect.envs.process.worker import EnvFactory, EnvSlots, check_spaces
from tdcollect.envs.slots import Backend, Came, Can, SlotError, Starts, are_seeded
from tdcollect.envs.spaces import SlotBuffers
from tdcollect.packages import extra_module

# --- serial ---------------------------------------------------------------------------------------


_SMALL = 4096  # bytes


class SerialBackend(EnvSlots, Backend):
    """N gymnasium envs in this process, one of each factory."""

    name = "serial"
    envs: list[gym.Env[Any, Any]]
    can = Can(step_ended=True, rebuild=True)

    def __init__(self, factories: Sequence[EnvFactory], categorical: bool | None = None):
        super().__init__(factories)
        self.num_envs = len(factories)
        self._latest: tuple[Sequence[int], Sequence[Mapping[str, Any]]] = ((), ())
        with ended_on_error(self.close):
            spaces, differing = self.make()
            for slot, others in differing:
                check_spaces(slot, spaces, others)
            self.spec = self.envs[0].spec
            self._set_spaces(*spaces, categorical)
        self._slots = range(self.num_envs)
        leaf = self.observation.leaves[0]
        small = self.observation.direct and leaf.nbytes <= _SMALL
        # Small plain observations are gathered in one go; large ones are copied once only.
        self._small_shape = (self.num_envs, *leaf.shape) if small else None
        self._leaf = leaf

    def reset(self, starts: Starts, options: dict[str, Any] | None, out: SlotBuffers) -> None:
        def begin(slot: int) -> None:
            own = values.options_of(options, slot)
            begun = self.envs[slot].reset(seed=starts[slot], options=own)
            observation, info = begun if type(begun) is tuple else as_begun(begun)
            self.observation.write_slot(observation, out.observation, slot)
            if self.info:
                write_info(self.info, info, out.info, slot)

        for_each_slot("reset", starts, begin)

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        envs, unbatched = self.envs, self.action.read_slots(actions)
        stepped = self._slots if slots is None else slots
        if slots is not None:
            envs, unbatched = [envs[slot] for slot in slots], [unbatched[slot] for slot in slots]
        failed: dict[int, Exception] = {}
        results: list[Any] = []
        for slot, env, action in zip(stepped, envs, unbatched, strict=True):
            try:
                results.append(env.step(action))
            except Exception as error:  # the others are stepped all the same
                failed[slot] = error
        if failed:
            stepped = [slot for slot in stepped if slot not in failed]
        if results:
            try:
                self._write(results, stepped, out)
            except Exception:  # written singly, they show whose result is at fault
                failed.update(self._write_singly(results, stepped, out))
        if failed:
            raise SlotError("step", dict(sorted(failed.items())))

    def _write(self, results: Sequence[Any], stepped: Sequence[int], out: SlotBuffers) -> None:
        observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
        rows: Any = ... if len(stepped) == self.num_envs else list(stepped)
        self._write_observations(observations, stepped, out)
        count = len(stepped)
        out.reward[rows] = as_rewards(rewards, count)
        out.terminated[rows] = as_flags("terminated", terminated, count)
        out.truncated[rows] = as_flags("truncated", truncated, count)
        self._latest = (stepped, infos)
        if self.info:
            for slot, info in zip(stepped, infos, strict=True):
                write_info(self.info, info, out.info, slot)

    def _write_singly(
        self, results: Sequence[Any], stepped: Sequence[int], out: SlotBuffers
    ) -> dict[int, Exception]:
        by_slot = dict(zip(stepped, results, strict=True))

        def write(slot: int) -> None:
            observation, reward, terminated, truncated, info = by_slot[slot]
            self._write_row(slot, observation, reward, (terminated, truncated), out)
            write_info(self.info, info, out.info, slot)

        failed = failures(stepped, write)
        written = [slot for slot in stepped if slot not in failed]
        self._latest = written, [by_slot[slot][4] for slot in written]
        return failed

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        stepped, infos = self._latest
        return as_info(infos[stepped.index(slot)]) if slot in stepped else {}

    def _write_observations(
        self, observations: Sequence[Any], slots: Sequence[int], out: SlotBuffers
    ) -> None:
        if self._small_shape is not None and len(slots) == self.num_envs:
            try:
                stacked = np.array(observations)
            except ValueError:  # unlike shapes: writing them singly says which is wrong
                stacked = np.empty(0)
            fits = stacked.dtype is self._leaf.exact or self._leaf.takes(stacked)
            if fits and stacked.shape == self._small_shape:
                out.observation[0][...] = stacked
                return
        for slot, observation in zip(slots, observations, strict=True):
            self.observation.write_slot(observation, out.observation, slot)

    def save_states(self) -> dict[int, dict[str, Any]]:
        return super().save_states() if self.can.resume else Backend.save_states(self)

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> dict[int, str]:
        return super().load_states(states) if self.can.resume else Backend.load_states(self, states)

    def attributes(self, name: str) -> list[Any]:
        return [getattr(env, name) for env in self.envs]

    def render(self) -> list[Any]:
        return self.call(self._slots, "render")


# --- gymnasium ------------------------------------------------------------------------------------


_MODULES = "gymnasium.wrappers.vector."

_REFUSED = {
    "DictInfoToList": "gives infos as a list, and final observations are read from infos as a "
    "dict; leave it out: make_env(..., info_keys=[...]) collects infos",
    "NormalizeObservation": "takes no reset of single slots; use gymnasium.wrappers."
    "NormalizeObservation around each env, or torchrl.envs.VecNormV2 around make_env's",
    "NumpyToTorch": "gives tensors, infos included; leave it out: make_env's entries are tensors",
    "JaxToTorch": "gives tensors, infos included; use gymnasium.wrappers.vector.JaxToNumpy",
}


def check_wrappers(env: VectorEnv[Any, Any, Any], mode: AutoresetMode) -> bool:
    """Refuse wrappers that cannot keep the contract; returns whether slots can be reset singly."""
    resets_subset = True
    for layer in _layers(env):
        ours = {c.__name__ for c in type(layer).__mro__ if c.__module__.startswith(_MODULES)}
        for name in sorted(ours & _REFUSED.keys()):
            raise ValueError(f"expected no {name} around the vector env: it {_REFUSED[name]}")
        if "NormalizeReward" in ours:
            # Its reset forgets the running returns of all slots, whichever are reset.
            if mode != AutoresetMode.SAME_STEP:
                raise ValueError(
                    f"expected no NormalizeReward in AutoresetMode.{mode.name}: a reset of one "
                    "slot makes it forget the running returns of all. Make the vector env with "
                    "autoreset_mode=AutoresetMode.SAME_STEP, or use torchrl.envs.VecNormV2"
                )
            resets_subset = False
        unchanged = getattr(type(layer), "step", None) is vector.VectorObservationWrapper.step
        if mode == AutoresetMode.SAME_STEP and unchanged:
            raise ValueError(
                f"expected no {type(layer).__name__} in AutoresetMode.SAME_STEP: it changes "
                "observations, but not the final ones in info['final_obs']. Make the vector env "
                "with AutoresetMode.DISABLED or NEXT_STEP, or wrap each env instead"
            )
    return resets_subset


def share_no_options(env: VectorEnv[Any, Any, Any]) -> None:
    """Have ``RecordEpisodeStatistics`` pass on a copy of its reset options.

    The vector env pops the mask of slots, for which the wrapper looks afterwards.
    """
    for layer in _layers(env):
        if isinstance(layer, RecordEpisodeStatistics) and not isinstance(layer.env, _OwnOptions):
            layer.env = _OwnOptions(layer.env)


class _OwnOptions(VectorWrapper):  # without type arguments: gymnasium takes them from 1.4 on
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=None if options is None else dict(options))


def _layers(env: VectorEnv[Any, Any, Any]) -> Iterator[VectorWrapper[Any, Any, Any, Any, Any]]:
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env


_OF_ENVS = (vector.SyncVectorEnv, vector.AsyncVectorEnv)


class VectorBackend(Backend):
    """The slots of a gymnasium vector env, which is owned, and closed with the backend."""

    name = "gymnasium"

    def __init__(self, env: VectorEnv[Any, Any, Any], categorical: bool | None = None):
        self.env = self.vector_env = env
        self.num_envs = env.num_envs
        self._mode = _autoreset_mode(env)
        of_envs = isinstance(env.unwrapped, _OF_ENVS)
        resets_singly = of_envs or takes_reset_mask(env.unwrapped)
        wrappers_do = check_wrappers(env, self._mode)
        singly = wrappers_do and (resets_singly or self._mode == AutoresetMode.DISABLED)
        # In SAME_STEP it begins episodes by itself, without options.
        asks = singly and self._mode != AutoresetMode.SAME_STEP
        self.can = Can(pause=False, reset_singly=singly, seed_singly=singly, each_options=asks)
        self.can = self.can._replace(each_seed=of_envs)
        if self._mode == AutoresetMode.NEXT_STEP and not resets_singly:
            why = (
                f"{env} resets slots by itself alone, one step late (AutoresetMode.NEXT_STEP): "
                "collect with Collector(..., by_arrival=True), which leaves out the rows of resets,"
                " or pass the env's id or a callable with backend='serial'"
            )
            self.can = self.can._replace(wait_num=self.num_envs, only_by_arrival=why)
        shares_memory = getattr(env.unwrapped, "shared_memory", True)
        if self._mode == AutoresetMode.NEXT_STEP and not shares_memory:
            raise ValueError(
                f"{env} has shared_memory=False, with which gymnasium's AsyncVectorEnv in "
                "AutoresetMode.NEXT_STEP resets a slot again that was reset singly, and ignores "
                "its action; use shared_memory=True or autoreset_mode=AutoresetMode.DISABLED"
            )
        share_no_options(env)
        self._set_spaces(env.single_observation_space, env.single_action_space, categorical)
        self._latest: Mapping[str, Any] = {}
        self._has_begun = False
        self._sent: set[int] = set()
        self._beginning: set[int] = set()
        self.spec = env.unwrapped.get_attr("spec")[0] if of_envs else env.spec  # type: ignore[attr-defined]
        # SAME_STEP: first observations and infos of episodes that the vector env began by itself in
        # its latest step, and the place of each slot among them; -1 if it has none to show.
        self._fresh: list[Array] = []
        self._fresh_at = np.full(self.num_envs, -1)

    def reset(self, starts: Starts, options: dict[str, Any] | None, out: SlotBuffers) -> None:
        if isinstance(options, values.EachOptions):  # a vector env takes one slot's at a time
            if not self._has_begun:  # and must have been reset as a whole
                self.env.reset(options=values.options_of(options, next(iter(starts))))
            for slot in starts:
                self.reset({slot: starts[slot]}, values.options_of(options, slot) or {}, out)
            return
        rows = np.fromiter(starts, np.intp)
        seeds: Any = None
        if are_seeded(starts):
            seeds = [starts.get(slot) for slot in range(self.num_envs)]
        if options is None and self._fresh:
            rows = self._show_fresh(rows, seeds, out)
            if not len(rows):
                return
        passed = dict(options or {})
        if len(rows) < self.num_envs:
            if not self.can.reset_singly:
                raise ValueError(
                    self.can.only_by_arrival
                    or f"{self.env} cannot reset slots {rows.tolist()} alone; reset all of its "
                    f"{self.num_envs} slots, or use backend='serial'"
                )
            passed["reset_mask"] = mask = np.zeros(self.num_envs, bool)
            mask[rows] = True
        elif seeds is not None:
            seeds = _compact(seeds)
        try:
            observation, info = self.env.reset(seed=seeds, options=passed or None)
        except Exception as error:
            if self.can.each_seed or not isinstance(seeds, list):
                raise
            raise ValueError(
                f"expected one int, the seed of all slots, or ints in a row for {self.env}, got "
                f"{seeds}, which it does not take ({type(error).__name__}: {error}); pass an id or "
                "a function that makes one env, with num_envs, for seeds of each slot, or evaluate "
                "it in batches, with episodes_per_slot=1"
            ) from error
        self._has_begun = True
        if not isinstance(info, Mapping):
            raise TypeError(
                f"expected the infos of {self.env} to be a dict, as gymnasium.vector has it, got "
                f"{type(info).__name__}; have it give one"
            )
        if self._fresh:
            self._fresh_at[rows] = -1
        self._write_rows("reset", observation, info, rows, out)

    def _show_fresh(self, rows: Array, seeds: list[int | None] | None, out: SlotBuffers) -> Array:
        """Write episodes that the vector env began by itself; returns the slots still to reset."""
        at = self._fresh_at[rows]
        if seeds is not None:
            at[[seeds[row] is not None for row in rows]] = -1
        shown = at >= 0
        if not (self.can.reset_singly or shown.all()):
            return rows
        for array, first in zip((*out.observation, *out.info), self._fresh, strict=True):
            array[rows[shown]] = first[at[shown]]
        self._fresh_at[rows[shown]] = -1
        return rows[~shown]

    def _write_rows(
        self, verb: str, observation: Any, info: Mapping[str, Any], rows: Array, out: SlotBuffers
    ) -> None:
        """Write the rows of some slots, of what the vector env gives of all."""
        try:
            self.observation.write_rows(slot_of(observation, rows), out.observation, rows)
            misfit = False
        except (ValueError, TypeError):  # written singly, they show whose is at fault
            misfit = True
        if not (misfit or self.info):
            return

        def write(slot: int) -> None:
            if misfit:
                self.observation.write_slot(slot_of(observation, slot), out.observation, slot)
            self._write_info(info, out, slot)

        for_each_slot(verb, rows.tolist(), write)

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        self._step(self.action.read(actions), out)

    def _step(self, actions: Any, out: SlotBuffers) -> None:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self._latest = info
        try:
            self.observation.write(observation, out.observation)
            out.reward[...] = as_rewards(reward, self.num_envs)
            out.terminated[...] = as_flags("terminated", terminated, self.num_envs)
            out.truncated[...] = as_flags("truncated", truncated, self.num_envs)
        except (ValueError, TypeError):  # written singly, they show whose result is at fault

            def write(slot: int) -> None:
                ends = terminated[slot], truncated[slot]
                self._write_row(slot, slot_of(observation, slot), reward[slot], ends, out)

            for_each_slot("step", range(self.num_envs), write)
            raise
        if self.info:
            for_each_slot(
                "step", range(self.num_envs), lambda slot: self._write_info(info, out, slot)
            )
        if self._mode == AutoresetMode.SAME_STEP:
            ended = np.flatnonzero(out.terminated | out.truncated)
            if len(ended):
                final = self._final(info, "final_obs")
                final_info = self._final(info, "final_info") if self.info else {}
                self._fresh = [array[ended] for array in (*out.observation, *out.info)]
                self._fresh_at[:] = -1
                self._fresh_at[ended] = np.arange(len(ended))
                self._write_rows("step", final, final_info, ended, out)

    # A vector env that resets by itself alone: sent are a step of some slots, and the begin of
    # others, and its next step is both. Slots that wait take their latest action, unseen.

    @property
    def in_flight(self) -> Set[int]:  # type: ignore[override]
        return self._sent | self._beginning

    def is_idle(self, slot: int) -> bool:
        return slot not in self.in_flight

    def send(self, actions: Sequence[Array], slots: Sequence[int]) -> None:
        self._actions = self.action.read(actions)
        self._sent.update(slots)

    def send_reset(self, starts: Starts, options: dict[str, Any] | None) -> None:
        self._beginning.update(starts)

    def receive(self, out: SlotBuffers) -> Came:
        self._step(self._actions, out)
        came = Came(sorted(self._sent), sorted(self._beginning), None, None)
        self.recall()
        return came

    def recall(self) -> None:
        self._sent, self._beginning = set(), set()

    def _final(self, info: Mapping[str, Any], name: str) -> Any:
        if name not in info:
            raise ValueError(
                f"expected info[{name!r}] of {self.env} at a step that ends an episode, as "
                f"AutoresetMode.SAME_STEP has it, got infos of {sorted(info)}: the true final one "
                "is lost otherwise. Have it say so, or make it with another autoreset mode"
            )
        part = info[name]
        while isinstance(part, (dict, tuple)) and part:
            part = next(iter(part.values() if isinstance(part, dict) else part))
        if len(part) != self.num_envs:
            raise ValueError(
                f"expected info[{name!r}] of {self.env} with one row per slot, {self.num_envs}, as "
                f"gymnasium.vector has it, got {len(part)}; give rows to slots that go on, too"
            )
        return info[name]

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        info = self._latest
        if "final_info" in info and info["_final_info"][slot]:
            info = info["final_info"]
        return _row_of(info, slot)

    def _write_info(self, info: Mapping[str, Any], out: SlotBuffers, slot: int) -> None:
        here = {}
        for entry in self.info:
            flags = info.get(f"_{entry.key}")
            if entry.key in info and (flags is None or flags[slot]):
                here[entry.key] = info[entry.key][slot]
        write_info(self.info, here, out.info, slot)

    def sample_info(self) -> Mapping[str, Any]:
        self._fresh = []  # those episodes are over
        info = dict(self.env.reset()[1])
        info.update(self.env.step(self.env.action_space.sample())[4])
        return {
            key: value[0]
            for key, value in info.items()
            if not key.startswith("_") and not isinstance(value, dict)
        }

    def render(self) -> list[Any]:
        return list(self.env.render() or [])

    def close(self) -> None:
        close_env(self.env)


def for_each_slot(verb: str, slots: Iterable[int], call: Callable[[int], None]) -> None:
    """Call for each slot in turn; raises SlotError for the slots that fail."""
    if failed := failures(slots, call):
        raise SlotError(verb, failed)


def failures(slots: Iterable[int], call: Callable[[int], None]) -> dict[int, Exception]:
    """Call a function for each of ``slots``; returns what it raised, by slot."""
    failed: dict[int, Exception] = {}
    for slot in slots:
        try:
            call(slot)
        except Exception as error:
            failed[slot] = error
    return failed


def _row_of(info: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """Return one slot's infos, out of those that a vector env has for all, nested ones too."""
    return {
        key: _row_of(value, slot) if isinstance(value, dict) else value[slot]
        for key, value in info.items()
        if f"_{key}" in info and info[f"_{key}"][slot]
    }


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if env.metadata is env.unwrapped.metadata:  # which all envs of a class may share
        mode = getattr(env.unwrapped, "autoreset_mode", mode)
    if mode is None:
        raise ValueError(
            f"{env} does not say how it resets: expected metadata['autoreset_mode'] to be a "
            "gymnasium.vector.AutoresetMode, got nothing; set it, or use backend='serial'"
        )
    return AutoresetMode(mode)


def _compact(seeds: list[int | None]) -> int | list[int | None] | None:
    first = seeds[0]
    consecutive = first is not None and all(s == first + i for i, s in enumerate(seeds))
    return first if consecutive else seeds


# --- envpool --------------------------------------------------------------------------------------


_MAX_SEED = 2**31 - 1


def check_task_id(task_id: str) -> Any:
    """The envpool package, which is installed and has an env of this id."""
    envpool = extra_module("envpool", "backend='envpool'")
    if task_id not in envpool.list_all_envs():
        raise ValueError(
            f"expected an id of envpool.list_all_envs(), got {task_id!r}; gymnasium's own ids "
            "run with backend='serial'"
        )
    return envpool


class EnvPoolBackend(Backend):
    """The slots of an EnvPool, made with ``options`` of ``envpool.make_gymnasium``."""

    name = "envpool"
    can = Can(seed_singly=False, each_options=False)

    def __init__(
        self,
        task_id: str,
        num_envs: int,
        seeds: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
        categorical: bool | None = None,
    ):
        envpool = check_task_id(task_id)
        options = dict(options or {})
        if options.get("batch_size", num_envs) != num_envs:
            raise ValueError(
                f"expected batch_size={num_envs}, the number of envs, got "
                f"{options['batch_size']}: an asynchronous pool does not step in order"
            )
        if seeds is None:
            # EnvPool's own default is a constant; gymnasium's users expect fresh episodes.
            seeds = (np.random.SeedSequence().generate_state(num_envs, np.uint32) >> 1).tolist()
        self.check_seeds(seeds)
        self.num_envs = num_envs
        self._make = lambda seed: envpool.make_gymnasium(
            task_id, num_envs=num_envs, seed=seed, **options
        )
        self._build(list(seeds))
        with ended_on_error(self.close):
            if self._pool.config.get("max_num_players", 1) != 1:
                raise ValueError(
                    f"expected a single-agent env, got {task_id} with several players per slot; "
                    "use another id"
                )
            self._set_spaces(self._pool.observation_space, self._pool.action_space, categorical)
        # EnvPool hands over a flat list of arrays, which its step() and reset() nest into
        # observations and infos. We read the list itself: at 64 slots a collector's step, which
        # nearly always holds a step and a reset, takes 0.87 of the time.
        self._at = {name: i for i, name in enumerate(self._flat.names)}
        plain = next(name for name in self._at if name.split(":")[0] == "obs")
        self._observation_at = self._at[plain] if self.observation.direct else None

    def _build(self, seeds: list[int]) -> None:
        with warnings.catch_warnings():
            # EnvPool states its bounds as float64 and gymnasium remarks on the cast.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")
            self._pool = self.vector_env = self._make(seeds)
            self._flat = flat_pool(self._pool)
            self._pool.observation_space, self._pool.action_space  # noqa: B018  cached in here
        self._seeds: list[int] | None = seeds

    def check_seeds(self, seeds: Sequence[int]) -> None:
        if not all(0 <= seed <= _MAX_SEED for seed in seeds):
            raise ValueError(f"expected EnvPool seeds in [0, 2**31), got {list(seeds)}")

    def reset(self, starts: Starts, options: dict[str, Any] | None, out: SlotBuffers) -> None:
        if options:
            raise ValueError(f"EnvPool takes no reset options, got {options}; pass env_kwargs")
        seeds = [seed for seed in starts.values() if seed is not None]
        if seeds:
            self.check_seeds(seeds)
            if len(starts) != self.num_envs:
                raise ValueError(
                    f"EnvPool seeds at construction only, so seeds for slots {list(starts)} alone "
                    f"cannot be honoured; reset all {self.num_envs} slots with them (env.reset())"
                )
            if seeds != self._seeds:
                self._pool.close()
                self._build(seeds)
        self._seeds = None  # used up: the next reset goes on from here
        self._flat.reset(np.asarray(list(starts), dtype=np.int32))
        self._receive(out)

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        action = self.action.read(actions)
        ids = None
        if slots is not None:
            ids = np.asarray(slots, dtype=np.int32)
            action = slot_of(action, ids)
        self._pool.send(action, ids)
        state, rows = self._latest = self._receive(out)
        truncated = state[self._at["trunc"]]
        out.reward[rows] = state[self._at["reward"]]
        out.terminated[rows] = state[self._at["done"]] & ~truncated
        out.truncated[rows] = truncated

    def latest_infos(
        self, slots: Sequence[int], names: Sequence[str]
    ) -> Mapping[int, Mapping[str, Any]]:
        state, rows = self._latest
        at = range(self.num_envs) if isinstance(rows, slice) else rows.tolist()
        places = {name: self._at.get(name, self._at.get(f"info:{name}")) for name in names}
        known = {name: state[place] for name, place in places.items() if place is not None}
        return {
            slot: {name: array[at.index(slot)] for name, array in known.items()} for slot in slots
        }

    def _receive(self, out: SlotBuffers) -> tuple[list[Array], Any]:
        """Write the pool's next observations and infos; returns all arrays, and their slots."""
        state: list[Array] = self._flat.receive()
        rows: Any = state[self._at["info:env_id"]]
        if self._observation_at is not None:
            observation = state[self._observation_at]
        else:
            observation = self._flat.nest(state, True, True)[0]
        if len(rows) == self.num_envs and (rows == self._pool.all_env_ids).all():
            self.observation.write(observation, out.observation)
            rows = slice(None)
        else:
            self.observation.write_rows(observation, out.observation, rows)
        for entry, array in zip(self.info, out.info, strict=True):
            name = entry.key if entry.key in self._at else f"info:{entry.key}"
            array[rows] = state[self._at[name]]
        return state, rows

    def sample_info(self) -> Mapping[str, Any]:
        specs = {"elapsed_step": self._pool.spec.state_array_spec["elapsed_step"]}
        for key, spec in self._pool.spec.state_array_spec.items():
            if key.startswith("info:") and "players" not in key:
                specs[key.removeprefix("info:")] = spec
        return {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()}

    def render(self) -> list[Any]:
        return list(self._pool.render(self._pool.all_env_ids))

    def close(self) -> None:
        self._pool.close()
