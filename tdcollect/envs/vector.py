"""The ``gymnasium`` backend: a ``gymnasium.vector.VectorEnv`` as it is.

In each of gymnasium's autoreset modes every row is a real step, none a reset:

- DISABLED: ended slots are reset singly, with ``options["reset_mask"]``.
- NEXT_STEP: the same, right after the step that ended the episode and so before the vector env
  would reset by itself; its next step is then a real one.
- SAME_STEP: the vector env has already reset; its infos hold the true final observation, and the
  observation of the new episode is kept here until it is asked for.

A vector env that resets only by itself, one step late (``CartPoleVectorEnv``), would swallow one
action per episode and is refused, and so are gymnasium's wrappers that break these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorObservationWrapper,
    VectorWrapper,
)
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from tdcollect.envs.buffers import SlotBuffers
from tdcollect.envs.process.values import (
    Array,
    as_flag,
    as_flags,
    as_reward,
    as_rewards,
    slot_of,
    write_info,
)
from tdcollect.envs.slots import Backend, Can, SlotError

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
        unchanged = getattr(type(layer), "step", None) is VectorObservationWrapper.step
        if mode == AutoresetMode.SAME_STEP and unchanged:
            raise ValueError(
                f"expected no {type(layer).__name__} in AutoresetMode.SAME_STEP: it changes "
                "observations, but not the final ones in info['final_obs']. Make the vector env "
                "with AutoresetMode.DISABLED or NEXT_STEP, or wrap each env instead"
            )
    return resets_subset


def share_no_options(env: VectorEnv[Any, Any, Any]) -> None:
    """Have ``RecordEpisodeStatistics`` pass on a copy of its reset options.

    gymnasium's vector envs pop the mask of slots from the options. The wrapper looks for the mask
    afterwards, in the same dict, and would reset the sums of all slots.
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


_RESETS_SINGLY = (SyncVectorEnv, AsyncVectorEnv)


class VectorBackend(Backend):
    """The slots of a gymnasium vector env, which is owned, and closed with the backend."""

    name = "gymnasium"

    def __init__(self, env: VectorEnv[Any, Any, Any], categorical: bool = False):
        self.env = self.vector_env = env
        self.num_envs = env.num_envs
        self._mode = _autoreset_mode(env)
        resets_singly = isinstance(env.unwrapped, _RESETS_SINGLY)
        wrappers_do = check_wrappers(env, self._mode)
        singly = wrappers_do and (resets_singly or self._mode == AutoresetMode.DISABLED)
        self.can = Can(pause=False, reset_singly=singly, seed_singly=singly)
        if self._mode == AutoresetMode.NEXT_STEP and not resets_singly:
            raise ValueError(
                f"{env} resets itself one step late (AutoresetMode.NEXT_STEP) and cannot reset "
                "single slots: one action an episode would be ignored and its row be no "
                "transition. Pass the env's id or a callable with backend='serial', or a vector "
                "env made with gymnasium.make_vec(..., vectorization_mode='sync' or 'async')"
            )
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
        self.spec = env.unwrapped.get_attr("spec")[0] if resets_singly else env.spec  # type: ignore[attr-defined]
        # SAME_STEP: first observations and infos of episodes that the vector env began by itself.
        self._fresh: dict[int, tuple[list[Array], list[Any]]] = {}

    def reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> None:
        given: dict[int, int | None] = dict.fromkeys(slots)
        if seeds is not None:
            given = dict(zip(slots, seeds, strict=True))
        if options is None:
            left = self._show_fresh([slot for slot in slots if given[slot] is None], out)
            slots = [slot for slot in slots if given[slot] is not None or slot in left]
            if not slots:
                return
        options = dict(options or {})
        if len(slots) == self.num_envs:
            observation, info = self.env.reset(
                seed=_compact(seeds),  # type: ignore[arg-type]
                options=options or None,
            )
        else:
            if not self.can.reset_singly:
                raise ValueError(
                    f"{self.env} cannot reset slots {list(slots)} alone; reset all of its "
                    f"{self.num_envs} slots, or use backend='serial'"
                )
            mask = np.zeros(self.num_envs, dtype=bool)
            mask[slots] = True
            observation, info = self.env.reset(
                seed=seeds and [given.get(slot) for slot in range(self.num_envs)],  # type: ignore[arg-type]
                options={**options, "reset_mask": mask},
            )
        if not isinstance(info, Mapping):
            raise TypeError(
                f"expected the infos of {self.env} to be a dict, as gymnasium.vector has it, got "
                f"{type(info).__name__}; have it give one"
            )
        for slot in slots:
            self._fresh.pop(slot, None)

        def write(slot: int) -> None:
            self.observation.write_slot(slot_of(observation, slot), out.observation, slot)
            self._write_info(info, out, slot)

        _singly("reset", slots, write)

    def _show_fresh(self, slots: Sequence[int], out: SlotBuffers) -> Sequence[int]:
        """Write the episodes that the vector env began by itself; returns the slots still to reset.

        Where the vector env can only reset all slots at once, all of them are still to reset.
        """
        waiting = [slot for slot in slots if slot not in self._fresh]
        if waiting and not self.can.reset_singly:
            return slots
        for slot in slots:
            if slot in self._fresh:
                for arrays, rows in zip(
                    (out.observation, out.info), self._fresh.pop(slot), strict=True
                ):
                    for array, row in zip(arrays, rows, strict=True):
                        array[slot] = row
        return waiting

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        observation, reward, terminated, truncated, info = self.env.step(self.action.read(actions))
        self._latest = info
        try:
            self.observation.write(observation, out.observation)
            out.reward[...] = as_rewards(reward, self.num_envs)
            out.terminated[...] = as_flags("terminated", terminated, self.num_envs)
            out.truncated[...] = as_flags("truncated", truncated, self.num_envs)
        except (ValueError, TypeError):  # written singly, they show whose result is at fault

            def write(slot: int) -> None:
                self.observation.write_slot(slot_of(observation, slot), out.observation, slot)
                out.reward[slot] = as_reward(reward[slot])
                out.terminated[slot] = as_flag("terminated", terminated[slot])
                out.truncated[slot] = as_flag("truncated", truncated[slot])

            _singly("step", range(self.num_envs), write)
            raise
        if self.info:
            _singly("step", range(self.num_envs), lambda slot: self._write_info(info, out, slot))
        if self._mode == AutoresetMode.SAME_STEP:
            ended = np.flatnonzero(out.terminated | out.truncated).tolist()
            if ended:
                final = self._final(info, "final_obs")
                final_info = self._final(info, "final_info") if self.info else {}
                _singly("step", ended, lambda slot: self._end(slot, final, final_info, out))

    def _end(self, slot: int, final: Any, info: Mapping[str, Any], out: SlotBuffers) -> None:
        """Keep the first observation of the slot's next episode, and write this one's final one."""
        self._fresh[slot] = (
            [array[slot].copy() for array in out.observation],
            [array[slot].copy() for array in out.info],
        )
        self.observation.write_slot(slot_of(final, slot), out.observation, slot)
        if self.info:
            self._write_info(info, out, slot)

    def _final(self, info: Mapping[str, Any], name: str) -> Any:
        """The entry of a step's infos about the episodes that it ended."""
        if name not in info:
            raise ValueError(
                f"expected info[{name!r}] of {self.env} at a step that ends an episode, as "
                f"AutoresetMode.SAME_STEP has it, got infos of {sorted(info)}: the true final one "
                "is lost otherwise. Have it say so, or make it with another autoreset mode"
            )
        return info[name]

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        info = self._latest
        if "final_info" in info and info["_final_info"][slot]:
            info = info["final_info"]
        return {
            key: value[slot]
            for key, value in info.items()
            if f"_{key}" in info and info[f"_{key}"][slot] and not isinstance(value, dict)
        }

    def _write_info(self, info: Mapping[str, Any], out: SlotBuffers, slot: int) -> None:
        here = {}
        for entry in self.info:
            given = info.get(f"_{entry.key}")
            if entry.key in info and (given is None or given[slot]):
                here[entry.key] = info[entry.key][slot]
        write_info(self.info, here, out.info, slot)

    def sample_info(self) -> Mapping[str, Any]:
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
        self.env.close()


def _singly(verb: str, slots: Sequence[int], write: Callable[[int], None]) -> None:
    """Write slot by slot; raises SlotError for the slots whose results are refused."""
    failed: dict[int, Exception] = {}
    for slot in slots:
        try:
            write(slot)
        except Exception as error:
            failed[slot] = error
    if failed:
        raise SlotError(verb, failed)


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise ValueError(
            f"{env} does not say how it resets: expected metadata['autoreset_mode'] to be a "
            "gymnasium.vector.AutoresetMode, got nothing; set it, or use backend='serial'"
        )
    return AutoresetMode(mode)


def _compact(seeds: Sequence[int | None] | None) -> int | list[int | None] | None:
    """Consecutive seeds as the first of them, which vector envs of one generator accept, too."""
    if seeds is None:
        return None
    first = seeds[0]
    consecutive = first is not None and all(s == first + i for i, s in enumerate(seeds))
    return first if consecutive else list(seeds)
