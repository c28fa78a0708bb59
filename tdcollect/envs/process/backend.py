"""The ``process`` backend: gymnasium envs in worker processes, several in each.

A step is a message of a few bytes to each worker, which awaits it awake for a moment, and then
asleep. Actions, observations, rewards, flags and infos lie in shared memory, where workers write
them as the ``serial`` backend would. A value that does not fit there (its shape or dtype differs
from the space) comes pickled, and the code of ``serial`` writes or refuses it. So the data are the
same.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector.utils import create_empty_array

from tdcollect.cleanup import ended_on_error
from tdcollect.display import one_line
from tdcollect.envs.backends import failures
from tdcollect.envs.process import values
from tdcollect.envs.process.pool import Commands, Outcome, WorkerPool, WorkerProcess, usable_cores
from tdcollect.envs.process.values import Array, flatten, slot_of, write_info
from tdcollect.envs.process.worker import RESET, STEP, EnvFactory, check_spaces
from tdcollect.envs.slots import Backend, Came, Can, SlotError, Starts
from tdcollect.envs.spaces import SlotBuffers
from tdcollect.processes.channel import packed
from tdcollect.processes.child import GRACE, check_can_start


class ProcessBackend(Backend):
    """N gymnasium envs in worker processes; the arguments are those of ``make_env``.

    An env that raises leaves its worker as it is: the other slots are stepped or reset all the
    same. A worker that is killed, or ended as an env in it hangs (noticed within twice the
    ``timeout``), is lost with all of its slots until they are built again. Its envs may
    take ``grace`` seconds to close before it is killed.
    """

    name = "process"
    can = Can(step_ended=True, rebuild=True)

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        categorical: bool | None = None,
        *,
        num_workers: int | None = None,
        timeout: float | None = None,
        start_method: str = "spawn",
        grace: float = GRACE,
        wait_num: int | None = None,
        wait_timeout: float | None = None,
    ):
        check_can_start()
        self.num_envs = len(factories)
        self._stepped: Sequence[int] = ()
        self.can = self.can._replace(wait_num=wait_num)
        self._wait_timeout = wait_timeout
        count = min(num_workers or usable_cores(), self.num_envs)
        self._pool = WorkerPool(factories, count, timeout, start_method, grace)
        self.in_flight = self._pool.in_flight
        with ended_on_error(self._pool.end):
            answers = self._pool.results(self._pool.launched)
            observation, action = answers[0][0]
            for process, answer in zip(self._pool.processes, answers, strict=True):
                _check_alike(process, answer, answers[0][0])
            self._set_spaces(observation, action, categorical)
            self._share()
            (self.spec,) = self._pool.call("spec", processes=self._pool.processes[:1])

    def _share(self) -> None:
        zeros = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in self.action.leaves]
        tree, fields = values.fields_of(create_empty_array(self.observation.space))
        of_action = values.fields_of(self.action.read(zeros))
        self._shared = values.Shared(self.num_envs, tree, fields, *of_action)
        outcome, observation, self._actions = self._shared.mapped(self._pool.values)
        self._reward, self._terminated, self._truncated = outcome
        self._observation = values.nest(tree, observation)
        self._infos: Sequence[Array] = ()
        self._pool.call("share", self._shared, self.info)

    def read_info(self, info_keys: Sequence[str] | Mapping[str, Any]) -> None:
        super().read_info(info_keys)
        self._infos = values.map_arrays(self._pool.infos, self.num_envs, self.info)
        self._pool.call("share", self._shared, self.info)

    def reset(self, starts: Starts, options: dict[str, Any] | None, out: SlotBuffers) -> None:
        outcome = self._pool.ask("reset", RESET, self._resets(starts, options))
        self._write(list(starts), outcome, out)
        if outcome.failed:
            raise SlotError("reset", dict(sorted(outcome.failed.items())))

    def _resets(self, starts: Starts, options: dict[str, Any] | None) -> Commands:
        self._pool.seeds.update(starts)
        commands = {}
        for process in self._pool.processes:
            mine = {slot: seed for slot, seed in starts.items() if slot in process.slots}
            if mine:
                commands[process] = list(mine), packed((mine, options))
        return commands

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        stepped: Sequence[int] = range(self.num_envs) if slots is None else slots
        outcome = self._pool.ask("step", STEP, self._steps(actions, slots))
        self._write_outcome(self._write(stepped, outcome, out), out)
        if outcome.failed:
            raise SlotError("step", dict(sorted(outcome.failed.items())))

    def _steps(self, actions: Sequence[Array], slots: Sequence[int] | None) -> Commands:
        """The steps of ``slots``, by worker; actions of an odd dtype are sent, not shared."""
        arrays: list[Array] = []
        flatten(self.action.read(actions), arrays)
        shared = all(v.dtype == a.dtype for v, a in zip(arrays, self._actions, strict=True))
        if shared:
            rows: Any = ... if slots is None else list(slots)
            for array, value in zip(self._actions, arrays, strict=True):
                array[rows] = value[rows]
        commands: dict[WorkerProcess, tuple[Sequence[int], bytes]] = {}
        for process in self._pool.processes:
            own = process.slots
            mine = own if slots is None else [slot for slot in slots if slot in own]
            if not mine:
                continue
            payload = b""
            if not shared:
                payload = packed((list(mine), [v[own.start : own.stop] for v in arrays]))
            elif len(mine) < len(own):
                payload = packed((mine, None))
            commands[process] = mine, payload
        return commands

    def _write_outcome(self, stepped: Sequence[int], out: SlotBuffers) -> None:
        self._stepped = stepped
        rows: Any = slice(None) if len(stepped) == self.num_envs else list(stepped)
        out.reward[rows] = self._reward[rows]
        out.terminated[rows] = self._terminated[rows]
        out.truncated[rows] = self._truncated[rows]

    def send(self, actions: Sequence[Array], slots: Sequence[int]) -> None:
        self._pool.post("step", STEP, self._steps(actions, slots))

    def send_reset(self, starts: Starts, options: dict[str, Any] | None) -> None:
        self._pool.post("reset", RESET, self._resets(starts, options))

    def is_idle(self, slot: int) -> bool:
        return slot not in self._pool.busy

    def receive(self, out: SlotBuffers) -> Came:
        assert self.can.wait_num is not None
        came: dict[str, list[int]] = {"step": [], "reset": []}
        errors: dict[str, dict[int, Exception]] = {"step": {}, "reset": {}}
        for command in self._pool.collect(self.can.wait_num, self._wait_timeout):
            outcome = self._pool.outcome(command)
            came[command.verb] += self._write(command.slots, outcome, out)
            errors[command.verb].update(sorted(outcome.failed.items()))
        self._write_outcome(came["step"], out)
        told = [SlotError(verb, failed) if failed else None for verb, failed in errors.items()]
        return Came(came["step"], came["reset"], *told)

    def recall(self) -> None:
        self._pool.forget()

    def _write(self, slots: Sequence[int], outcome: Outcome, out: SlotBuffers) -> Sequence[int]:
        """Write observations and infos; returns the slots, and adds the errors of the others."""
        failed, misfits = outcome
        if failed:
            slots = [slot for slot in slots if slot not in failed]
        if len(slots) == self.num_envs and not misfits:
            with suppress(ValueError):  # written singly, they show whose result is at fault
                self.observation.write(self._observation, out.observation)
                for array, rows in zip(out.info, self._infos, strict=True):
                    array[...] = rows
                return slots

        def write(slot: int) -> None:
            if slot in misfits:
                observation, info = misfits[slot]
                self.observation.write_slot(observation, out.observation, slot)
                write_info(self.info, info, out.info, slot)
                return
            self.observation.write_slot(slot_of(self._observation, slot), out.observation, slot)
            for array, rows in zip(out.info, self._infos, strict=True):
                array[slot] = rows[slot]

        failed.update(failures(slots, write))
        return [slot for slot in slots if slot not in failed]

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        if slot not in self._stepped:
            return {}
        holder = [process for process in self._pool.processes if slot in process.slots]
        return self._pool.call("latest_info", slot, processes=holder)[0]

    def latest_infos(
        self, slots: Sequence[int], names: Sequence[str]
    ) -> Mapping[int, Mapping[str, Any]]:
        holders = [p for p in self._pool.processes if not p.lost and {*p.slots}.intersection(slots)]
        infos = self._pool.call("latest_infos", slots, names, processes=holders)
        return _by_slot(infos)

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make envs again; all those of a worker that was lost come back together."""
        built: list[int] = []
        for process in list(self._pool.processes):
            mine = [slot for slot in slots if slot in process.slots]
            if mine and process.lost is None:
                self._pool.call("rebuild", mine, processes=[process])
                built += mine
            elif mine:
                self._replace(process)
                built += process.slots
        return built

    def _replace(self, lost: WorkerProcess) -> None:
        launched = self._pool.relaunch(lost)
        new = launched.process
        half_made = "was ended, as its envs could not be made"
        with ended_on_error(lambda: self._pool.lose(new, half_made)):
            (answer,) = self._pool.results([launched])
            _check_alike(new, answer, (self.observation.space, self.action.space))
            self._pool.call("share", self._shared, self.info, processes=[new])

    def save_states(self) -> dict[int, dict[str, Any]]:
        if not self.can.resume:
            return super().save_states()
        is_open = self._pool.end.alive
        why = "its worker was lost" if is_open else "the env was closed before it was saved"
        unknown = {slot: {"how": "nothing", "why": why} for slot in range(self.num_envs)}
        living = [process for process in self._pool.processes if is_open and not process.lost]
        return unknown | _by_slot(self._pool.call("save_states", processes=living))

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> dict[int, str]:
        if not self.can.resume:
            return super().load_states(states)
        return _by_slot(self._pool.call("load_states", dict(states)))

    def generators(self) -> dict[int, bytes]:
        living = [process for process in self._pool.processes if not process.lost]
        states = self._pool.call("generators", processes=living)
        return {process.pid: state for process, state in zip(living, states, strict=True)}

    def sample_info(self) -> Mapping[str, Any]:
        return self._pool.call("sample_info", processes=self._pool.processes[:1])[0]

    def attributes(self, name: str) -> list[Any]:
        pickled = self._found("look_up", None, name)
        return [
            partial(self._call_one, slot, name) if value is None else pickle.loads(value)
            for slot, value in enumerate(pickled)
        ]

    def _call_one(self, slot: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._found("call", [slot], method, args, kwargs)[0]

    def call(self, name: str, *arguments: Any, slots: Sequence[int] | None = None) -> list[Any]:
        return self._found("call", slots, name, arguments)

    def _found(self, method: str, slots: Sequence[int] | None, *arguments: Any) -> list[Any]:
        results: list[Any] = []
        verb = arguments[0] if method == "call" else method
        for process in self._pool.processes:
            mine = [slot for slot in process.slots if slots is None or slot in slots]
            if mine:
                answers = self._pool.call(method, mine, *arguments, processes=[process], verb=verb)
                results += answers[0]
        return results

    def render(self) -> list[Any]:
        return self.call("render")

    def close(self) -> None:
        """Close the envs and end the workers; a second call does nothing.

        A worker whose envs have not closed after ``grace`` seconds is killed.
        """
        self._pool.close()

    def __repr__(self) -> str:
        slots = f"{self.num_envs} slots in {len(self._pool.processes)} workers"
        return one_line(self, slots, self._pool.method)


def _by_slot(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    return {slot: value for part in parts for slot, value in part.items()}


def _check_alike(process: WorkerProcess, answer: Any, expected: tuple[Any, Any]) -> None:
    first, differing = answer
    for slot, spaces in ((process.slots.start, first), *differing):
        check_spaces(slot, expected, spaces)
