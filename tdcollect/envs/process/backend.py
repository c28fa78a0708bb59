"""The ``process`` backend: gymnasium envs in worker processes, several in each.

A step is a message of a few bytes to each worker, which awaits it awake for a moment, and then
asleep. Actions, observations, rewards, flags and infos lie in shared memory, where workers write
them as the ``serial`` backend would. A value that does not fit there (its shape or dtype differs
from the space) comes pickled, and the code of ``serial`` writes or refuses it. So the data are the
same.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium.vector.utils import create_empty_array

from tdcollect.cleanup import ended_on_error
from tdcollect.display import one_line
from tdcollect.envs.backends import failures
from tdcollect.envs.process import values, worker
from tdcollect.envs.process.values import Array, flatten, slot_of, write_info
from tdcollect.envs.process.worker import RESET, STEP, EnvFactory, check_spaces
from tdcollect.envs.slots import Backend, Came, Can, SlotError, Starts
from tdcollect.envs.spaces import SlotBuffers
from tdcollect.processes.child import (
    GRACE,
    Child,
    Connection,
    Described,
    Forked,
    InterruptsHeld,
    Spawned,
    check_can_start,
    disown_in_forks,
    packed,
    poll_awake,
    raised_there,
    shared_file,
)
from tdcollect.surroundings import Surroundings

START_METHODS = ("spawn", "fork")

_START_SECONDS = 60.0
"""An interpreter and its envs have at least so long to start, whatever the timeout."""

# Seconds before a sleep. A worker has its core to itself; the parent may share one with a worker.
_WORKER_AWAKE, _PARENT_AWAKE = 1e-3, 2e-4

_NOT_HELD = nullcontext()


class WorkerLost(RuntimeError):
    """A worker process ended, or was killed as it hung; the envs of its slots are gone."""


class WorkerProcess:
    """The worker process of some slots; in ``control`` it notes the slot at work and its calls."""

    def __init__(self, index: int, slots: range, child: Child, control: memoryview):
        self.index = index
        self.slots = slots
        self.child = child
        self.lost: str | None = None  # the reason; None while it can be asked
        self._control = control
        self._sequence = 0
        self.pid = child.pid
        self.connection = Connection(child.socket)
        disown_in_forks(self)

    @property
    def at_work(self) -> tuple[int, int]:
        return self._control[2 * self.index], self._control[2 * self.index + 1]

    def ask(self, kind: int, payload: bytes) -> bool:
        """Send a command; False if the worker has gone."""
        self._sequence = (self._sequence + 1) % 256
        try:
            self.connection.send(kind, self._sequence, payload)
        except OSError:
            return False
        return True

    def answer(self) -> bytes | None:
        """The answer to the latest command; None for one to an earlier, interrupted command."""
        try:
            _, sequence, payload = self.connection.receive()
        except OSError as error:
            raise EOFError from error
        return payload if sequence == self._sequence else None

    def lose(self, reason: str | None) -> None:
        """End the process, for a reason unless it ended by itself; note why it was lost."""
        if self.lost is None:
            slot, calls = self.at_work
            how = self.child.end(GRACE if reason is None else 0.0)
            where = f" while slot {slot} was at work" if calls else ""
            self.lost = f"the worker of {named(self.slots)} {reason or how}{where}"

    def disown(self) -> None:
        """In a fork of the parent, which can ask nothing."""
        self.lost = "belongs to the process that this one was forked from"


def named(slots: Sequence[int]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"


class Outcome(NamedTuple):
    """Of a step or a reset: errors, and values that did not fit the shared memory, by slot."""

    failed: dict[int, Exception]
    misfits: dict[int, Any]


Commands = Mapping[WorkerProcess, tuple[Sequence[int], bytes]]
"""The slots that each worker is to step or reset, and the payload that says so."""


class Command:
    """A command that was sent to a worker, for some of its slots."""

    answer: bytes | None = None
    """None until it is done, and of a worker that was lost."""
    done = False

    def __init__(
        self, verb: str, slots: Sequence[int], process: WorkerProcess, timeout: float | None
    ):
        self.verb = verb
        self.slots = slots
        self.process = process
        self.timeout = timeout
        if timeout is not None:
            self.at_work, self.since = process.at_work, time.monotonic()


class WorkerPool:
    """Worker processes that share out N slots, each with a run of them.

    An env may take ``timeout`` seconds for one call; those of a worker ``grace`` seconds to close.
    ``values`` and ``infos`` are files for memory to share, which the workers have open.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        num_workers: int,
        timeout: float | None,
        method: str,
        grace: float = GRACE,
    ):
        self.processes: list[WorkerProcess] = []
        self.seeds: dict[int, int | None] = {}  # of each slot's latest reset, for messages
        self.method = method
        self._timeout = timeout
        self._grace = grace
        self._factories, self._around = list(factories), Surroundings.here()
        one_core_each = num_workers <= usable_cores()
        self._awake = (_PARENT_AWAKE, _WORKER_AWAKE) if one_core_each else (0.0, 0.0)
        bounds = [len(factories) * i // num_workers for i in range(num_workers + 1)]
        runs = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._poll = select.poll()
        self._by_descriptor: dict[int, WorkerProcess] = {}  # those that live
        self._awaited: dict[WorkerProcess, Command] = {}  # the latest commands, until they are done
        self._posted: dict[WorkerProcess, Command] = {}  # until they are collected
        self.in_flight: set[int] = set()  # the slots of sent commands
        self.busy: set[int] = set()  # the slots of workers that are at something
        self._files = [shared_file(16 * num_workers), shared_file(0), shared_file(0)]
        _, self.values, self.infos = self._files
        # Also if nobody closes the env: when it is garbage collected, and when the program ends.
        self.end = weakref.finalize(self, _end_all, self.processes, self._files)
        self._control = memoryview(mmap.mmap(self._files[0], 0)).cast("q")
        with ended_on_error(self.end):
            pickled = [self._pickled(slots) for slots in runs]
            with InterruptsHeld():
                each = zip(range(num_workers), runs, pickled, strict=True)
                self.launched = list(itertools.starmap(self._launch, each))

    # --- starting ------------------------------------------------------------------------------

    def _pickled(self, slots: range) -> bytes | None:
        if self.method == "fork":
            return None
        try:
            return cloudpickle.dumps(self._factories[slots.start : slots.stop])
        except Exception as error:
            raise TypeError(
                "expected an env that can be sent to a worker process, got one that cannot be "
                f"pickled ({error}); make inside the callable what it needs, or use "
                "start_method='fork'"
            ) from error

    def _launch(self, index: int, slots: range, pickled: bytes | None) -> Command:
        """Start a worker, in the place of another if there is one, and have it make its envs."""
        child: Child
        if pickled is None:
            factories = self._factories[slots.start : slots.stop]
            child = Forked(partial(worker.main, factories=factories), self._files)
        else:
            child = Spawned("tdcollect.envs.process.worker:main", self._files)
        process = WorkerProcess(index, slots, child, self._control)
        self.processes[index : index + 1] = [process]
        self._poll.register(process.connection, select.POLLIN)
        self._by_descriptor[process.connection.fileno()] = process
        payload = packed((index, slots.start, self._awake[1], self._around, pickled))
        timeout = None if self._timeout is None else max(self._timeout, _START_SECONDS)
        return self._ask("make", process, worker.CALL, slots, payload, timeout)

    def relaunch(self, lost: WorkerProcess) -> Command:
        """Start a new worker in the place of one that was lost; see :meth:`results`."""
        if lost in self._posted:
            self._take(lost)
        pickled = self._pickled(lost.slots)
        self._control[2 * lost.index + 1] = 0
        with InterruptsHeld():
            return self._launch(lost.index, lost.slots, pickled)

    # --- asking --------------------------------------------------------------------------------

    def _ask(
        self,
        verb: str,
        process: WorkerProcess,
        kind: int,
        slots: Sequence[int],
        payload: bytes,
        timeout: float | None,
    ) -> Command:
        self._awaited[process] = command = Command(verb, slots, process, timeout)
        if process.lost or not process.ask(kind, payload):
            self.lose(process)
        return command

    def call(
        self,
        name: str,
        *arguments: Any,
        processes: Sequence[WorkerProcess] | None = None,
        verb: str | None = None,
    ) -> list[Any]:
        """Call a method of the workers by name; returns their results, worker by worker.

        Messages say ``verb``, or the name.

        Raises:
            WorkerLost: if one is lost.
            Exception: the exception of the first env that failed.
        """
        verb, processes = verb or name, self.processes if processes is None else processes
        if processes and not self.end.alive:
            raise RuntimeError(f"cannot {verb}: the env is closed; make a new one")
        self.settle(processes)
        payload = packed((name, arguments))
        return self.results(
            [self._ask(verb, p, worker.CALL, p.slots, payload, self._timeout) for p in processes]
        )

    def results(self, calls: Sequence[Command]) -> list[Any]:
        """Wait for the results of calls; raises as :meth:`call`."""
        self._wait(calls)
        return [self._result(call) for call in calls]

    def ask(self, verb: str, kind: int, commands: Commands) -> Outcome:
        """Have workers step or reset, and wait for all of them."""
        self.settle(commands)
        sent = [
            self._ask(verb, process, kind, *command, self._timeout)
            for process, command in commands.items()
        ]
        self._wait(sent)
        outcome = Outcome({}, {})
        for command in sent:
            for whole, part in zip(outcome, self.outcome(command), strict=True):
                whole.update(part)
        return outcome

    def post(self, verb: str, kind: int, commands: Commands) -> None:
        """Have idle workers step or reset, and go on; :meth:`collect` gives the answers."""
        with InterruptsHeld():  # a command that is on record has been sent
            for process, (slots, payload) in commands.items():
                assert process not in self._posted, "a worker has one command at a time"
                self.in_flight.update(slots)
                self.busy.update(process.slots)
                command = self._ask(verb, process, kind, slots, payload, self._timeout)
                self._posted[process] = command

    def collect(self, slots: int, seconds: float | None = None) -> list[Command]:
        """Wait for posted commands of so many slots, or for ``seconds`` and the next one.

        Returns those that are done, in the order of their workers.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        posted = self._posted.values()
        while not all(command.done for command in posted):
            ready = sum(len(command.slots) for command in posted if command.done)
            left = end - time.monotonic()
            if ready >= slots or (left <= 0 and ready):
                break
            waits = [t for t in (left, self._timeout) if t is not None and 0 < t < math.inf]
            self._receive(min(waits, default=None))
            self._end_hanging(posted)
        done = [process for process in self.processes if process in self._posted]
        return [self._take(process) for process in done if self._posted[process].done]

    def settle(self, processes: Iterable[WorkerProcess]) -> None:
        """Wait until workers have done what was posted; its answers are kept."""
        if self._posted:
            self._wait([self._posted[p] for p in processes if p in self._posted])

    def forget(self) -> None:
        """Drop the answers to what was posted; workers that are still at it finish first."""
        self.settle(self.processes)
        for process in list(self._posted):
            self._take(process)

    def _take(self, process: WorkerProcess) -> Command:
        command = self._posted.pop(process)
        self.in_flight.difference_update(command.slots)
        self.busy.difference_update(process.slots)
        return command

    def _wait(self, commands: Sequence[Command]) -> None:
        for command in commands:
            while not command.done:
                self._receive(command.timeout)
                self._end_hanging(commands)

    def _receive(self, seconds: float | None) -> None:
        """Read answers as they arrive, for up to ``seconds``."""
        events = poll_awake(self._poll, self._awake[0])
        events = events or self._poll.poll(None if seconds is None else 1000 * seconds)
        with InterruptsHeld() if self._posted else _NOT_HELD:  # an answer that was read is kept
            for descriptor, _ in events:
                process = self._by_descriptor[descriptor]
                try:
                    answer = process.answer()
                except EOFError:
                    self.lose(process)
                    continue
                if answer is not None and process in self._awaited:
                    command = self._awaited.pop(process)
                    command.answer, command.done = answer, True

    def _end_hanging(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if command.timeout is None or command.done:
                continue
            now, at_work = time.monotonic(), command.process.at_work
            if now - command.since < command.timeout:
                continue
            if at_work == command.at_work:
                took = f"{command.verb}() took more than {command.timeout:g} s"
                self.lose(command.process, f"was ended, as {took}")
            command.at_work, command.since = at_work, now

    def lose(self, process: WorkerProcess, reason: str | None = None) -> None:
        """Note that a worker has ended, or end it for a reason; its slots are lost with it."""
        if not process.lost:
            self._poll.unregister(process.connection)
            del self._by_descriptor[process.connection.fileno()]
        process.lose(reason)
        if (command := self._awaited.pop(process, None)) is not None:
            command.done = True

    def outcome(self, command: Command) -> Outcome:
        """The outcome of a step or a reset that is done, for its slots."""
        process, slots = command.process, command.slots
        if command.answer is None:
            return Outcome({slot: _lost(process, slot) for slot in slots}, {})
        if not command.answer:
            return Outcome({}, {})
        failures, misfits = pickle.loads(command.answer)
        return Outcome({slot: self._raised(slot, f) for slot, f in failures.items()}, misfits)

    def _result(self, command: Command) -> Any:
        if command.answer is None:
            raise WorkerLost(command.process.lost)
        failure, result = pickle.loads(command.answer)
        if failure is not None:
            raise self._raised(*failure)
        return result

    def _raised(self, slot: int, failure: Described) -> Exception:
        """The exception of an env in a worker; its cause is the traceback there."""
        seed = self.seeds.get(slot)
        seeded = "" if seed is None else f", last reset with seed {seed}"
        return raised_there(failure, f"the worker of slot {slot}{seeded}")

    # --- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the envs and end the workers; a second call does nothing."""
        if not self.end.alive:
            return
        payload = packed(("close", ()))
        try:
            commands = [
                self._ask("close", process, worker.CALL, process.slots, payload, self._grace)
                for process in self.processes
                if not process.lost
            ]
            self._wait(commands)
        finally:
            self.end()
        for each in commands:
            if each.answer is not None:
                self._result(each)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lost(process: WorkerProcess, slot: int) -> WorkerLost:
    at_work, calls = process.at_work
    if not calls or slot == at_work:
        return WorkerLost(process.lost)
    return WorkerLost(f"went with the worker of {named(process.slots)}")


def _end_all(processes: Sequence[WorkerProcess], files: list[int]) -> None:
    for process in processes:
        process.connection.close()
    for process in processes:
        process.child.end(GRACE)
    while files:
        os.close(files.pop())


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
