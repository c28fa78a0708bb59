"""The ``process`` backend: gymnasium envs in worker processes, several in each.

A step goes out as a few bytes a worker, on whose arrival it wakes; actions, observations, rewards,
flags and infos lie in shared memory. What an env gives is written there as the ``serial`` backend
would write it; where it does not fit (another shape or dtype than its space says) it comes pickled,
and is written, or refused, by the very code that ``serial`` runs. So the data are the same.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from tdcollect.envs.backend import Backend, Frame, write_info
from tdcollect.envs.errors import SlotError
from tdcollect.envs.launch import (
    GRACE,
    START_METHODS,
    WorkerLost,
    WorkerProcess,
    interrupts_held,
    named,
    shared_file,
)
from tdcollect.envs.serial import EnvFactory
from tdcollect.envs.spaces import WIDENED, Array
from tdcollect.envs.worker import (
    RESET,
    STEP,
    Arrays,
    Failure,
    Field,
    Shared,
    Tree,
    check_spaces,
    layout,
    map_arrays,
    packed,
)

_START_SECONDS = 60.0
"""An interpreter and an env have at least so long to start, whatever the timeout."""


class RemoteTraceback(Exception):
    """Where an exception was raised in a worker, as text."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


class ProcessBackend(Backend):
    """N gymnasium envs in worker processes.

    Args:
        factories: one callable a slot, each returning a new ``gymnasium.Env``. It is called in a
            worker, to which it is sent with cloudpickle.
        categorical: integers rather than one-hot for discrete entries.
        num_workers: how many processes; None for as many as this process may use cores, and no
            more than slots.
        timeout: seconds that an env may take for one call before it counts as hanging and its
            worker is killed, noticed within twice as long; None to wait for ever.
        start_method: ``"spawn"`` (a fresh interpreter) or ``"fork"``.

    Raises:
        ValueError: where the envs' spaces differ.
        TypeError: where a factory cannot be sent, or returns something else than a
            ``gymnasium.Env``.
        WorkerLost: where a worker ends while it makes its envs.
    """

    name = "process"
    steps_ended_slots = True
    rebuilds = True

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        categorical: bool = False,
        *,
        num_workers: int | None = None,
        timeout: float | None = None,
        start_method: str = "spawn",
    ):
        if os.name != "posix":
            raise RuntimeError(
                "backend='process' needs a POSIX system (Linux, macOS); use backend='serial'"
            )
        assert start_method in START_METHODS
        self.num_envs = len(factories)
        self.timeout = timeout
        self._method = start_method
        self._factories = list(factories)
        self._seeds: dict[int, int | None] = {}
        self._stepped: Sequence[int] = ()
        self._shared: tuple[Any, ...] = ()
        self._memory = self._info_memory = -1
        count = min(num_workers or usable_cores(), self.num_envs)
        bounds = [self.num_envs * i // count for i in range(count + 1)]
        runs = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._control_file = shared_file(16 * count)
        self._control = _map_control(self._control_file)
        self._processes: list[WorkerProcess] = []
        self._files: list[int] = [self._control_file]
        self._close = weakref.finalize(self, _end_all, self._processes, self._files)
        self._poll = select.poll()
        try:
            blobs = [self._pickled(slots) for slots in runs]
            with interrupts_held():
                for index, slots in enumerate(runs):
                    self._processes.append(self._launch(index, slots, blobs[index]))
            self._make_spaces(self._started(self._processes), categorical)
        except BaseException:
            self._close()
            raise

    # --- starting ------------------------------------------------------------------------------

    def _pickled(self, slots: range) -> bytes | None:
        """The factories of some slots, for a worker that is not forked."""
        if self._method == "fork":
            return None
        try:
            blob: bytes = cloudpickle.dumps(self._factories[slots.start : slots.stop])
        except Exception as error:
            raise TypeError(
                f"expected an env that can be sent to a worker process, got one that cannot be "
                f"pickled ({error}); let the callable make inside what it needs, or use "
                "start_method='fork'"
            ) from error
        return blob

    def _launch(self, index: int, slots: range, blob: bytes | None) -> WorkerProcess:
        factories = self._factories[slots.start : slots.stop]
        process = WorkerProcess(index, slots, self._method, factories, self._control)
        process.ask(0, packed((index, slots.start, blob)), self._control_file)
        self._poll.register(process.connection, select.POLLIN)
        return process

    def _started(self, processes: Sequence[WorkerProcess]) -> list[Any]:
        """The spaces that each worker found, once all have made their envs."""
        timeout = None if self.timeout is None else max(self.timeout, _START_SECONDS)
        return [self._result(p, a) for p, a in self._wait("start", processes, timeout).items()]

    def _make_spaces(self, found: Sequence[Any], categorical: bool) -> None:
        first = found[0][0]
        for process, (given, differing) in zip(self._processes, found, strict=True):
            for slot, other in ((process.slots.start, given), *differing):
                check_spaces(slot, first, other)
        observation, action = first
        self._set_spaces(observation, action, categorical)
        fields: list[Field] = []
        tree = _tree(observation, fields)
        actions: list[Array] = []
        zeros = [np.zeros((self.num_envs, *e.shape), e.dtype) for e in self.action.leaves]
        action_tree = _flatten(self.action.read(zeros), actions)
        action_fields = [Field(a.shape[1:], a.dtype.str) for a in actions]
        shared = Shared(self.num_envs, tree, fields, action_tree, action_fields)
        self._shared = shared.plain()
        self._memory = shared_file(layout(self.num_envs, shared.fields)[1])
        self._files.append(self._memory)
        arrays = Arrays(shared, self._memory)
        self._reward, self._terminated, self._truncated = arrays.outcome
        self._observation = _nest(tree, arrays.observation)
        self._actions = arrays.action
        self._call_all("share", self._shared, descriptor=self._memory)

    def read_info(self, info_keys: Sequence[str] | Mapping[str, Any]) -> None:
        super().read_info(info_keys)
        fields = [Field(info.shape, info.dtype.str) for info in self.info]
        self._info_memory = shared_file(layout(self.num_envs, fields)[1])
        self._files.append(self._info_memory)
        self._infos = map_arrays(self._info_memory, self.num_envs, fields)
        self._share_infos(self._processes)

    def _share_infos(self, processes: Sequence[WorkerProcess]) -> None:
        if self.info:
            infos = [(info.key, info.shape, info.dtype.str) for info in self.info]
            self._call_all(
                "share_infos",
                self.num_envs,
                infos,
                descriptor=self._info_memory,
                processes=processes,
            )

    # --- asking --------------------------------------------------------------------------------

    def _wait(
        self, verb: str, asked: Iterable[WorkerProcess], timeout: float | None
    ) -> dict[WorkerProcess, bytes]:
        """The answers of the workers that were asked; a worker that is lost gives none."""
        waiting = {process.connection.fileno(): process for process in asked if not process.lost}
        answers: dict[WorkerProcess, bytes] = {}
        limit = None if timeout is None else timeout * 1000
        seen = {process: process.at_work for process in waiting.values()} if limit else {}
        while waiting:
            events = self._poll.poll(limit)
            for descriptor, _ in events:
                process = waiting.get(descriptor) or self._process_of(descriptor)
                try:
                    answer = process.answer()
                except EOFError:
                    self._lose(process)
                    waiting.pop(descriptor, None)
                    continue
                if answer is not None:
                    answers[process] = answer
                    waiting.pop(descriptor, None)
            if not events:
                for descriptor, process in list(waiting.items()):
                    if seen[process] == process.at_work:
                        self._lose(process, f"was ended, as {verb}() took more than {timeout:g} s")
                        del waiting[descriptor]
                    seen[process] = process.at_work
        return answers

    def _process_of(self, descriptor: int) -> WorkerProcess:
        for process in self._processes:
            if not process.lost and process.connection.fileno() == descriptor:
                return process
        raise AssertionError(f"no worker has the descriptor {descriptor}")

    def _lose(self, process: WorkerProcess, reason: str | None = None) -> None:
        if not process.lost:
            self._poll.unregister(process.connection)
        process.lose(reason)

    def _call_all(
        self,
        name: str,
        *arguments: Any,
        descriptor: int = -1,
        processes: Sequence[WorkerProcess] | None = None,
    ) -> list[Any]:
        """What a method of the workers returns, worker by worker.

        Raises:
            WorkerLost: where one is lost.
            Exception: what the first env that failed raised.
        """
        asked = self._processes if processes is None else processes
        for process in asked:
            if not process.lost and not process.call(name, *arguments, descriptor=descriptor):
                self._lose(process)
        answers = self._wait(name, asked, self.timeout)
        return [self._result(process, answers.get(process)) for process in asked]

    def _result(self, process: WorkerProcess, answer: bytes | None) -> Any:
        if answer is None:
            raise WorkerLost(f"{process.lost}; close the env and make a new one")
        failure, result = pickle.loads(answer)
        if failure is not None:
            raise self._raised(*failure)
        return result

    def _raised(self, slot: int, failure: Failure) -> Exception:
        """What an env raised in a worker, with its traceback there as the cause."""
        pickled, summary, trace = failure
        try:
            error = pickle.loads(pickled) if pickled is not None else None
        except Exception:  # an exception that does not survive its own pickling
            error = None
        if not isinstance(error, Exception):
            error = RuntimeError(summary)
        seed = self._seeds.get(slot)
        seeded = "" if seed is None else f", last reset with seed {seed}"
        error.__cause__ = RemoteTraceback(f"in the worker of slot {slot}{seeded}:\n\n{trace}")
        return error

    def _ask(self, verb: str, kind: int, payloads: Mapping[WorkerProcess, bytes]) -> Any:
        """Step or reset.

        Returns:
            What failed, by slot; and what did not fit the shared memory, by slot.
        """
        for process, payload in payloads.items():
            if not process.lost and not process.ask(kind, payload):
                self._lose(process)
        answers = self._wait(verb, payloads, self.timeout)
        failed: dict[int, Exception] = {}
        odd: dict[int, Any] = {}
        for process in payloads:
            answer = answers.get(process)
            if answer is None:
                at = process.at_work[0]
                failed.update((slot, _lost(process, slot, at)) for slot in process.slots)
            elif answer:
                failures, misfits = pickle.loads(answer)
                failed.update((slot, self._raised(slot, f)) for slot, f in failures.items())
                odd.update(misfits)
        return failed, odd

    # --- the contract --------------------------------------------------------------------------

    def reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
        out: Frame,
    ) -> None:
        payloads = {}
        for process in self._processes:
            rows = [row for row, slot in enumerate(slots) if slot in process.slots]
            if rows:
                mine = [slots[row] for row in rows]
                given = None if seeds is None else [seeds[row] for row in rows]
                payloads[process] = packed((mine, given, options))
        self._seeds.update(zip(slots, [None] * len(slots) if seeds is None else seeds, strict=True))
        failed, odd = self._ask("reset", RESET, payloads)
        self._write([slot for slot in slots if slot not in failed], odd, out)
        if failed:
            raise SlotError("reset", {slot: failed[slot] for slot in slots if slot in failed})

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: Frame) -> None:
        values: list[Array] = []
        _flatten(self.action.read(actions), values)
        for shared, value in zip(self._actions, values, strict=True):
            shared[...] = value
        if slots is None:
            payloads = dict.fromkeys(self._processes, b"")
        else:
            payloads = {}
            for process in self._processes:
                mine = [slot for slot in slots if slot in process.slots]
                if mine:
                    payloads[process] = packed((mine,))
        failed, odd = self._ask("step", STEP, payloads)
        stepped: Sequence[int] = range(self.num_envs) if slots is None else slots
        if failed:
            failed = {slot: failed[slot] for slot in stepped if slot in failed}
            stepped = [slot for slot in stepped if slot not in failed]
        self._stepped = stepped
        self._write(stepped, odd, out)
        rows: Any = slice(None) if len(stepped) == self.num_envs else list(stepped)
        out.reward[rows] = self._reward[rows]
        out.terminated[rows] = self._terminated[rows]
        out.truncated[rows] = self._truncated[rows]
        if failed:
            raise SlotError("step", failed)

    def _write(self, slots: Sequence[int], odd: Mapping[int, Any], out: Frame) -> None:
        """Write the observations and infos of some slots, from shared memory or as they came."""
        if len(slots) == self.num_envs and not odd:
            try:
                self.observation.write(self._observation, out.observation)
            except ValueError:  # written one by one, the slot's own value is told
                self._write_singly(slots, odd, out)
            for array, values in zip(out.info, self._infos, strict=True) if self.info else ():
                array[...] = values
        else:
            self._write_singly(slots, odd, out)

    def _write_singly(self, slots: Sequence[int], odd: Mapping[int, Any], out: Frame) -> None:
        for slot in slots:
            if slot in odd:
                observation, info = odd[slot]
                self.observation.write_slot(observation, out.observation, slot)
                write_info(self.info, info, out, slot)
                continue
            self.observation.write_slot(_row(self._observation, slot), out.observation, slot)
            for array, values in zip(out.info, self._infos, strict=True) if self.info else ():
                array[slot] = values[slot]

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        if slot not in self._stepped:
            return {}
        (process,) = (p for p in self._processes if slot in p.slots)
        (info,) = self._call_all("latest_info", slot, processes=[process])
        return info

    def rebuild(self, slots: Sequence[int]) -> None:
        """Make the envs of ``slots`` anew; each must be reset before it is stepped.

        A worker that was lost is started again with all of its slots, which must all be given.

        Raises:
            ValueError: where some slots only of a lost worker are given.
        """
        for i, process in enumerate(self._processes):
            mine = [slot for slot in slots if slot in process.slots]
            if not mine:
                continue
            if process.lost is None:
                self._call_all("rebuild", mine, processes=[process])
                continue
            if len(mine) < len(process.slots):
                raise ValueError(
                    f"{process.lost}: expected all of its slots to be built anew together, got "
                    f"{mine}"
                )
            blob = self._pickled(process.slots)
            self._control[2 * i + 1] = 0
            with interrupts_held():
                process = self._processes[i] = self._launch(i, process.slots, blob)
            ((given, differing),) = self._started([process])
            expected = (self.observation.space, self.action.space)
            for slot, other in ((process.slots.start, given), *differing):
                check_spaces(slot, expected, other)
            self._call_all("share", self._shared, descriptor=self._memory, processes=[process])
            self._share_infos([process])

    def sample_info(self) -> Mapping[str, Any]:
        (info,) = self._call_all("sample_info", processes=self._processes[:1])
        return info

    def render(self) -> list[Any]:
        return [frame for frames in self._call_all("render") for frame in frames]

    def close(self) -> None:
        """Close the envs and end the workers; a second call does nothing.

        An env that has not closed after 5 seconds is killed with its worker.
        """
        if not self._close.alive:
            return
        try:
            living = [process for process in self._processes if not process.lost]
            for process in living:
                process.call("close")
            answers = self._wait("close", living, min(self.timeout or GRACE, GRACE))
        finally:
            self._close()
        for process, answer in answers.items():
            self._result(process, answer)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_envs} slots in {len(self._processes)} workers, "
            f"{self._method})"
        )


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lost(process: WorkerProcess, slot: int, at: int) -> WorkerLost:
    if slot == at:
        return WorkerLost(f"{process.lost}")
    return WorkerLost(f"went with {named(process.slots)}, whose worker is lost")


def _end_all(processes: Sequence[WorkerProcess], files: list[int]) -> None:
    """End workers that may still run, and free the shared memory."""
    for process in processes:
        process.abandon()
    for process in processes:
        process.end(kill=False)
    while files:
        os.close(files.pop())


def _map_control(descriptor: int) -> memoryview:
    import mmap

    return memoryview(mmap.mmap(descriptor, 0)).cast("q")


def _tree(space: spaces.Space[Any], fields: list[Field]) -> Tree:
    """How values of a space nest, with a field for each array in them."""
    if isinstance(space, spaces.Dict):
        return {name: _tree(part, fields) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_tree(part, fields) for part in space.spaces]
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        shape = () if isinstance(space, spaces.Discrete) else space.nvec.shape
        fields.append(Field(tuple(shape), "i8", "i"))
    else:
        assert space.shape is not None
        assert space.dtype is not None
        dtype = np.dtype(WIDENED.get(space.dtype.type, space.dtype))
        fields.append(Field(tuple(space.shape), dtype.str))
    return len(fields) - 1


def _flatten(value: Any, arrays: list[Array]) -> Tree:
    """The arrays of a nested value, and how it nests."""
    if isinstance(value, dict):
        return {name: _flatten(part, arrays) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_flatten(part, arrays) for part in value]
    arrays.append(np.asarray(value))
    return len(arrays) - 1


def _nest(tree: Tree, arrays: Sequence[Array]) -> Any:
    """Arrays as the value that nests like ``tree``."""
    if isinstance(tree, int):
        return arrays[tree]
    if isinstance(tree, dict):
        return {name: _nest(part, arrays) for name, part in tree.items()}
    return tuple(_nest(part, arrays) for part in tree)


def _row(value: Any, slot: int) -> Any:
    """One slot's part of a nested value."""
    if isinstance(value, dict):
        return {name: _row(part, slot) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_row(part, slot) for part in value)
    return value[slot]
