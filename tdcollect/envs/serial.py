"""The default backend: plain gymnasium envs, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tdcollect.envs.buffers import SlotBuffers
from tdcollect.envs.process.values import (
    Array,
    as_flag,
    as_flags,
    as_reward,
    as_rewards,
    write_info,
)
from tdcollect.envs.process.worker import EnvFactory, EnvSlots, check_spaces
from tdcollect.envs.slots import Backend, Can, SlotError

_SMALL = 4096  # bytes


class SerialBackend(Backend):
    """N gymnasium envs in this process, one of each factory."""

    name = "serial"
    can = Can(step_ended=True, rebuild=True)

    def __init__(self, factories: Sequence[EnvFactory], categorical: bool = False):
        self.num_envs = len(factories)
        self._latest: tuple[Sequence[int], Sequence[Mapping[str, Any]]] = ((), ())
        self._envs = EnvSlots(list(factories))
        self.envs = self._envs.envs
        try:
            for slot, spaces in self._envs.make():
                check_spaces(slot, self._envs.spaces, spaces)
            self.spec = self.envs[0].spec
            self._set_spaces(*self._envs.spaces, categorical)
        except BaseException:
            self.close()
            raise
        self._slots = range(self.num_envs)
        leaf = self.observation.leaves[0]
        small = self.observation.direct and leaf.nbytes <= _SMALL
        # Small plain observations are gathered in one go; large ones are copied once only.
        self._small_shape = (self.num_envs, *leaf.shape) if small else None
        self._leaf = leaf

    def reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> None:
        failed: dict[int, Exception] = {}
        for i, slot in enumerate(slots):
            seed = None if seeds is None else seeds[i]
            try:
                observation, info = self.envs[slot].reset(seed=seed, options=options)
                self.observation.write_slot(observation, out.observation, slot)
                if self.info:
                    write_info(self.info, info, out.info, slot)
            except Exception as error:
                failed[slot] = error
        if failed:
            raise SlotError("reset", failed)

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
        """Write the results that fit their spaces; returns the errors of the others, by slot."""
        failed: dict[int, Exception] = {}
        for slot, result in zip(stepped, results, strict=True):
            try:
                observation, reward, terminated, truncated, info = result
                self.observation.write_slot(observation, out.observation, slot)
                out.reward[slot] = as_reward(reward)
                out.terminated[slot] = as_flag("terminated", terminated)
                out.truncated[slot] = as_flag("truncated", truncated)
                write_info(self.info, info, out.info, slot)
            except Exception as error:
                failed[slot] = error
        written = [i for i, slot in enumerate(stepped) if slot not in failed]
        self._latest = [stepped[i] for i in written], [results[i][4] for i in written]
        return failed

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        stepped, infos = self._latest
        return infos[stepped.index(slot)] if slot in stepped else {}

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        self._envs.rebuild(slots)
        return list(slots)

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
        return self._envs.save_states() if self.can.resume else super().save_states()

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> dict[int, str]:
        return self._envs.load_states(states) if self.can.resume else super().load_states(states)

    def sample_info(self) -> Mapping[str, Any]:
        return self._envs.sample_info()

    def attributes(self, name: str) -> list[Any]:
        return [getattr(env, name) for env in self.envs]

    def call(self, name: str, *arguments: Any, slots: Sequence[int] | None = None) -> list[Any]:
        return self._envs.call(self._slots if slots is None else slots, name, arguments)

    def render(self) -> list[Any]:
        return self.call("render")

    def close(self) -> None:
        self._envs.close()
