"""A worker of the ``process`` backend: some gymnasium slots, stepped when the parent says so.

This file runs in a fresh interpreter, or in a fork of the parent. It imports nothing of tdcollect,
which would bring torch along: seconds of start, and threads.

Commands and replies are short messages on a socket, in which a worker and its parent sleep. What is
large or frequent (actions, observations, rewards, flags, infos) lies in shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

Array = np.ndarray[Any, Any]
Tree = Any
"""How a value nests: the index of an array, a dict of trees, or a list of trees for a tuple."""

STEP, RESET, CALL = range(3)
"""Kinds of commands."""

_HEADER = struct.Struct("<BBHQ")  # kind, number, a mark, bytes that follow
_MARK = 0x7DC0
_AT_ONCE = 2**15
"""Bytes that the kernel takes in one go: no interrupt tears them apart."""
_ZERO = np.zeros((), bool)
_let_others_run = getattr(os, "sched_yield", lambda: None)


class Field(NamedTuple):
    """An array ``[N, *shape]`` in shared memory.

    ``kinds`` are NumPy's letters of the dtypes that may be written into it; others would not come
    out as the ``serial`` backend would write them.
    """

    shape: tuple[int, ...]
    dtype: str
    kinds: str = "biuf"


class Shared(NamedTuple):
    """What lies in shared memory, and how the values nest there."""

    num_envs: int
    observation_tree: Tree
    observation: Sequence[Field]
    action_tree: Tree
    action: Sequence[Field]

    @property
    def fields(self) -> list[Field]:
        """Every field, in order; reward, terminated and truncated come first."""
        return [Field((), "f8"), Field((), "?"), Field((), "?"), *self.observation, *self.action]

    def plain(self) -> tuple[Any, ...]:
        """As built-in types: a class of this package would have a worker import it, and torch."""
        observation, action = ([tuple(f) for f in part] for part in (self[2], self[4]))
        return (self.num_envs, self.observation_tree, observation, self.action_tree, action)

    @classmethod
    def from_plain(cls, plain: tuple[Any, ...]) -> Shared:
        """What :meth:`plain` gave, on the other side."""
        num_envs, observation_tree, observation, action_tree, action = plain
        fields = ([Field(*field) for field in part] for part in (observation, action))
        return cls(num_envs, observation_tree, next(fields), action_tree, next(fields))


Failure = tuple[bytes | None, str, str]
"""What an env raised: pickled where that can be done, in a line, and with its traceback."""


_INTERRUPTS = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


class InterruptsHeld:
    """Hold signals back whose handlers may raise: from amid a launch, and from amid a message.

    A worker is launched with them held, until it has said which it ignores.
    """

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def soon(waiting: select.poll, seconds: float) -> list[tuple[int, int]]:
    """Poll without sleep for a moment: to wake a core that has gone idle costs many steps' time.

    Whoever else wants the core has it meanwhile.
    """
    end = time.monotonic() + seconds
    while not (events := waiting.poll(0)) and time.monotonic() < end:
        _let_others_run()
    return events


class Connection:
    """Messages on a socket.

    Args:
        end: one end of a socket pair; owned from now on.
    """

    def __init__(self, end: socket.socket):
        self._socket = end

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def send(self, kind: int, number: int, payload: bytes = b"", descriptor: int = -1) -> None:
        """Send a message; with it, a file descriptor."""
        message = _HEADER.pack(kind, number, _MARK, len(payload)) + payload
        if len(payload) <= _AT_ONCE and descriptor < 0:
            self._socket.sendall(message)
            return
        with InterruptsHeld():
            self._socket.sendall(message)
            if descriptor >= 0:
                socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive(self) -> tuple[int, int, bytes]:
        """Wait for a message: its kind, its number and its payload.

        Raises:
            EOFError: where the other side has gone; or where the rest of an earlier message stands,
                whose reading an interrupt cut short.
        """
        kind, number, mark, length = _HEADER.unpack(self._exactly(_HEADER.size))
        if mark != _MARK:
            raise EOFError
        if not length:
            return kind, number, b""
        with InterruptsHeld():
            return kind, number, self._exactly(length)

    def receive_descriptor(self) -> int:
        """Wait for the descriptor that follows a message."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise EOFError
        return descriptors[0]

    def _exactly(self, count: int) -> bytes:
        received = self._socket.recv(count)
        if len(received) == count:
            return received
        parts = [received]
        while received:
            count -= len(received)
            if not count:
                return b"".join(parts)
            received = self._socket.recv(min(count, 2**20))
            parts.append(received)
        raise EOFError

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def layout(num_envs: int, fields: Sequence[Field]) -> tuple[list[int], int]:
    """Where each field begins, and the bytes of all. Each begins a cache line."""
    offsets, end = [], 0
    for field in fields:
        offsets.append(end)
        size = num_envs * int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
        end += -(-size // 64) * 64
    return offsets, end


def map_arrays(descriptor: int, num_envs: int, fields: Sequence[Field]) -> list[Array]:
    """The fields as arrays ``[N, *shape]`` that share the memory of a file."""
    offsets, size = layout(num_envs, fields)
    memory = mmap.mmap(descriptor, max(size, 1))
    return [
        np.ndarray((num_envs, *field.shape), field.dtype, memory, offset)
        for field, offset in zip(fields, offsets, strict=True)
    ]


class Arrays:
    """The arrays ``[N, *shape]`` of shared memory.

    Args:
        shared: what lies there.
        descriptor: the file that is shared.
    """

    def __init__(self, shared: Shared, descriptor: int):
        arrays = map_arrays(descriptor, shared.num_envs, shared.fields)
        split = 3 + len(shared.observation)
        self.shared = shared
        self.outcome = arrays[:3]
        self.observation = arrays[3:split]
        self.action = arrays[split:]


def check_env(slot: int, env: Any, others: Mapping[int, Any]) -> None:
    """Raise where what a factory returned is no new single env.

    Args:
        slot: where it is to stand.
        env: what the factory returned.
        others: the envs made so far, by slot.
    """
    if isinstance(env, gym.vector.VectorEnv):
        env.close()
        raise TypeError(
            "expected a callable that makes a single gymnasium.Env, got one that makes the "
            f"vector env {env}; call it and pass the vector env itself"
        )
    if not isinstance(env, gym.Env):
        raise TypeError(
            "expected a callable that makes a gymnasium.Env, got one that returned "
            f"{type(env).__name__}"
        )
    for other, made in others.items():
        if env is made:
            raise ValueError(
                "expected a callable that makes a new env at each call, got that of slot "
                f"{other} for slot {slot} again"
            )


def check_spaces(slot: int, expected: Sequence[Any], got: Sequence[Any]) -> None:
    """Raise where the spaces of ``slot`` (observation, action) are not those of slot 0."""
    for name, one, other in zip(("observation_space", "action_space"), expected, got, strict=True):
        if one != other:
            raise ValueError(
                f"expected the same {name} in every slot, got {one} in slot 0 and {other} in slot "
                f"{slot}; make envs of one kind share a batch, or wrap them to agree"
            )


def keeps(values: Array, dtype: np.dtype[Any]) -> bool:
    """Tell whether an array of a dtype takes these numbers as they are.

    A float may lose digits there, as TorchRL has it (float64 into float32). A whole number must lie
    in its range, and a fraction goes into floats only.
    """
    given = values.dtype
    if given == dtype:
        return True
    if given.kind not in ("biuf" if dtype.kind == "f" else "biu"):
        return False
    if dtype.kind == "f" or not values.size or np.can_cast(given, dtype, "safe"):
        return True
    low, high = limits(dtype)
    return low <= int(values.min()) and int(values.max()) <= high


def limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least and the largest number of a dtype of whole numbers."""
    if dtype.kind == "b":
        return 0, 1
    bounds = np.iinfo(dtype)
    return int(bounds.min), int(bounds.max)


def as_reward(value: Any) -> float:
    """A reward as a float: any one real number, as a scalar or in an array.

    Raises:
        ValueError: for anything else.
    """
    if type(value) is float:
        return value
    array = np.asarray(value)
    if array.size == 1:
        item, kind = array.item(), array.dtype.kind
        if kind in "biuf" or (kind == "O" and isinstance(item, Real)):
            return float(item)
    raise ValueError(
        f"expected a reward that is one real number, got {_told(value)}; correct the env"
    )


def as_flag(name: str, value: Any) -> bool:
    """A flag of a step as a bool: any one number that is 0 or 1, as a scalar or in an array.

    Raises:
        ValueError: for anything else.
    """
    if value is True or value is False:
        return value
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "biuf" and array.item() in (0, 1):
        return bool(array.item())
    raise ValueError(f"expected {name} to be one bool, got {_told(value)}; correct the env")


def _told(value: Any) -> str:
    told = repr(value)
    return f"{type(value).__name__} {told if len(told) <= 80 else told[:80] + '...'}"


def unstack(tree: Tree, arrays: Sequence[Array]) -> Sequence[Any] | Array:
    """One nested value a row of ``arrays``."""
    if isinstance(tree, int):
        return arrays[tree]
    if isinstance(tree, dict):
        parts = {name: unstack(part, arrays) for name, part in tree.items()}
        count = len(arrays[0])
        return [{name: part[i] for name, part in parts.items()} for i in range(count)]
    return list(zip(*(unstack(part, arrays) for part in tree), strict=True))


class Worker:
    """The envs of a run of slots.

    Args:
        first: the slot of the first env.
        factories: one callable an env.
        control: two int64: the slot at work, and how many calls of an env have begun.
    """

    def __init__(
        self, first: int, factories: Sequence[Callable[[], Any]], control: memoryview
    ) -> None:
        self.first = first
        self.factories = factories
        self.control = control
        self.envs: dict[int, gym.Env[Any, Any]] = {}
        self.latest: dict[int, Mapping[str, Any]] = {}
        self.infos: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]] = ()
        self.info_arrays: Sequence[Array] = ()
        self.closed = False
        self._spaces: tuple[Any, Any] = (None, None)

    def _begin(self, slot: int) -> None:
        """Note that an env is at work, for a parent that wonders whether it hangs."""
        self.control[0] = slot
        self.control[1] += 1

    def start(self) -> tuple[Any, list[tuple[int, Any]]]:
        """Make the envs.

        Returns:
            The spaces of the first one; and of each that has others, its slot and its spaces.
        """
        differing = []
        for slot, factory in enumerate(self.factories, self.first):
            self._begin(slot)
            env = factory()
            check_env(slot, env, self.envs)
            self.envs[slot] = env
            given = (env.observation_space, env.action_space)
            if slot == self.first:
                self._spaces = given
            elif given != self._spaces:
                differing.append((slot, given))
        return self._spaces, differing

    def share(self, shared: tuple[Any, ...], descriptor: int) -> None:
        """Map the memory that actions come from and what the envs give goes to."""
        arrays = Arrays(Shared.from_plain(shared), descriptor)
        last = self.first + len(self.factories)
        self.reward, self.terminated, self.truncated = arrays.outcome
        self.fields, self.observation = arrays.shared.observation, arrays.observation
        self.action = [array[self.first : last] for array in arrays.action]
        self.observation_tree = arrays.shared.observation_tree
        self.action_tree = arrays.shared.action_tree

    def share_infos(
        self, num_envs: int, infos: Sequence[tuple[str, Any, str]], descriptor: int
    ) -> None:
        """Map the memory that infos go to; of each, its key, shape and dtype are given."""
        self.infos = [(key, tuple(shape), np.dtype(dtype)) for key, shape, dtype in infos]
        fields = [Field(shape, dtype) for _, shape, dtype in infos]
        self.info_arrays = map_arrays(descriptor, num_envs, fields)

    def step(
        self, slots: Sequence[int] | None, actions: Sequence[Array] | None = None
    ) -> tuple[dict[int, Failure], dict[int, Any]]:
        """Step some slots.

        Args:
            slots: which; None for all.
            actions: of all slots here; None for those in shared memory.

        Returns:
            What failed, by slot; and what does not fit the shared memory, by slot: the
            observation, and the infos or None.
        """
        # Copies: an env may keep or change the array that it is given.
        given = [array.copy() for array in self.action] if actions is None else actions
        unbatched = unstack(self.action_tree, given)
        failed: dict[int, Failure] = {}
        odd: dict[int, Any] = {}
        self.latest = {}
        for slot in self.envs if slots is None else slots:
            self._begin(slot)
            try:
                observation, reward, terminated, truncated, info = self.envs[slot].step(
                    unbatched[slot - self.first]
                )
                self.reward[slot] = as_reward(reward)
                self.terminated[slot] = as_flag("terminated", terminated)
                self.truncated[slot] = as_flag("truncated", truncated)
            except Exception as error:
                failed[slot] = describe(error)
                continue
            self.latest[slot] = info
            self._write(slot, observation, info, odd)
        return failed, odd

    def reset(
        self, slots: Sequence[int], seeds: Sequence[int] | None, options: dict[str, Any] | None
    ) -> tuple[dict[int, Failure], dict[int, Any]]:
        """Reset some slots, with one seed each or none; returns what :meth:`step` does."""
        failed: dict[int, Failure] = {}
        odd: dict[int, Any] = {}
        for row, slot in enumerate(slots):
            self._begin(slot)
            seed = None if seeds is None else seeds[row]
            try:
                observation, info = self.envs[slot].reset(seed=seed, options=options)
            except Exception as error:
                failed[slot] = describe(error)
                continue
            self._write(slot, observation, info, odd)
        return failed, odd

    def _write(
        self, slot: int, observation: Any, info: Mapping[str, Any], odd: dict[int, Any]
    ) -> None:
        fits = self._put(self.observation_tree, observation, slot)
        infos_fit = not self.infos or self._put_infos(info, slot)
        if not (fits and infos_fit):
            chosen = {key: info[key] for key, _, _ in self.infos if key in info}
            odd[slot] = (observation, chosen)

    def _put(self, tree: Tree, value: Any, slot: int) -> bool:
        """Write an observation; False where the parent has to look at it."""
        if isinstance(tree, int):
            field, array, target = self.fields[tree], np.asarray(value), self.observation[tree]
            if array.shape != field.shape or array.dtype.kind not in field.kinds:
                return False
            if array.dtype is not target.dtype and not keeps(array, target.dtype):
                return False
            target[slot] = array
            return True
        if isinstance(tree, dict):
            return (
                isinstance(value, Mapping)
                and tree.keys() <= value.keys()
                and all(self._put(part, value[name], slot) for name, part in tree.items())
            )
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(tree)
            and all(self._put(part, item, slot) for part, item in zip(tree, value, strict=True))
        )

    def _put_infos(self, info: Mapping[str, Any], slot: int) -> bool:
        for (key, shape, dtype), array in zip(self.infos, self.info_arrays, strict=True):
            value = np.asarray(info.get(key, _ZERO))
            fits = value is _ZERO or value.shape == shape
            if not (fits and keeps(value, dtype)):
                return False
            array[slot] = value
        return True

    def sample_info(self) -> Mapping[str, Any]:
        """Infos of a reset and a step of the first env."""
        env = self.envs[self.first]
        self._begin(self.first)
        info = dict(env.reset()[1])
        info.update(env.step(env.action_space.sample())[4])
        return info

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """What an env told beside its latest step."""
        return self.latest.get(slot, {})

    def spec(self) -> Any:
        """What gymnasium knows of how the first env is made; None where it cannot be sent."""
        spec = self.envs[self.first].spec
        with contextlib.suppress(Exception):
            cloudpickle.dumps(spec)
            return spec
        return None

    def rebuild(self, slots: Sequence[int]) -> None:
        """Make the envs of some slots anew."""
        for slot in slots:
            self._begin(slot)
            with contextlib.suppress(Exception):  # closing it may fail as it did
                self.envs[slot].close()
            env = self.factories[slot - self.first]()
            check_env(slot, env, self.envs)
            check_spaces(slot, self._spaces, (env.observation_space, env.action_space))
            self.envs[slot] = env

    def save_states(self) -> dict[int, Any]:
        """The state of each env, by slot; they are resumable ones."""
        states = {}
        for slot, env in self.envs.items():
            self._begin(slot)
            states[slot] = env.save_state()  # type: ignore[attr-defined]
        return states

    def load_states(self, states: Mapping[int, Any]) -> dict[int, str]:
        """Bring the envs back of those of the slots given that are here; why some are not."""
        failed = {}
        for slot, env in self.envs.items():
            if slot in states:
                # A replay takes many steps: each is a call that may take its time.
                begin = partial(self._begin, slot)
                begin()
                why = env.load_state(states[slot], begin)  # type: ignore[attr-defined]
                if why is not None:
                    failed[slot] = why
        return failed

    def render(self) -> list[Any]:
        """What each slot renders."""
        frames = []
        for slot, env in self.envs.items():
            self._begin(slot)
            frames.append(env.render())
        return frames

    def close(self) -> None:
        """Close every env; raise what the first that failed raised."""
        self.closed = True
        errors = []
        for slot, env in self.envs.items():
            self._begin(slot)
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        self.envs = {}
        if errors:
            raise errors[0]

    def serve(self, connection: Connection, awake: float) -> None:
        """Answer commands until told to close, or until the parent has gone.

        Args:
            connection: leads to the parent.
            awake: seconds for which the next command is awaited without sleep.
        """
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        while not self.closed:
            soon(waiting, awake)
            try:
                kind, number, payload = connection.receive()
            except (EOFError, OSError):
                with contextlib.suppress(Exception):
                    self.close()
                return
            if kind == CALL:
                answer = self._call(connection, payload)
            else:
                arguments = pickle.loads(payload) if payload else (None,)
                failed, odd = (self.step if kind == STEP else self.reset)(*arguments)
                answer = _packed_outcome(failed, odd) if failed or odd else b""
            try:
                connection.send(kind, number, answer)
            except OSError:
                return

    def _call(self, connection: Connection, payload: bytes) -> bytes:
        """Call a method by its name; answer with its failure or its result."""
        name, takes_descriptor, arguments = pickle.loads(payload)
        if takes_descriptor:
            descriptor = connection.receive_descriptor()
            arguments = (*arguments, descriptor)
        try:
            return packed((None, getattr(self, name)(*arguments)))
        except Exception as error:
            return packed(((self.control[0], describe(error)), None))
        finally:
            if takes_descriptor:
                os.close(descriptor)


def packed(value: Any) -> bytes:
    """A value to be sent, classes of the main program included."""
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def _packed_outcome(failed: dict[int, Failure], odd: dict[int, Any]) -> bytes:
    try:
        return packed((failed, odd))
    except Exception as error:  # an observation or an info that is no data at all
        return packed(({**failed, **dict.fromkeys(odd, describe(error))}, {}))


def describe(error: Exception) -> Failure:
    """An exception in a form that crosses processes, its traceback without this file's frame."""
    trace = error.__traceback__
    trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        pickled: bytes | None = cloudpickle.dumps(error)
    except Exception:  # whatever a class's own __reduce__ raises
        pickled = None
    return pickled, f"{type(error).__name__}: {error}", text


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process when the parent's end of a pipe closes.

    This also ends a worker that hangs in an env, were it in C code that holds the interpreter's
    lock, which no thread and no handler of ours could do. Where the kernel does not signal pipes,
    an idle worker still sees its socket close.
    """
    try:
        import fcntl

        signal.signal(signal.SIGIO, signal.SIG_DFL)  # which ends the process
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    except (ImportError, AttributeError, OSError):
        return
    waiting = select.poll()
    waiting.register(lifeline, 0)
    if waiting.poll(0):  # it closed before the kernel was asked
        os._exit(1)


def main(
    end: socket.socket, lifeline: int, factories: Sequence[Callable[[], Any]] | None = None
) -> None:
    """Serve a parent.

    Args:
        end: this worker's end of the socket pair.
        lifeline: the read end of a pipe that the parent holds open.
        factories: one callable an env; None to read them, pickled, from the socket.
    """
    # Ctrl-C is for the parent. The launch has kept it, and other signals, from us so far.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _end_with_parent(lifeline)
    connection = Connection(end)
    try:
        _, number, payload = connection.receive()
        descriptor = connection.receive_descriptor()
    except EOFError:
        return
    index, first, awake, blob = pickle.loads(payload)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    control = memoryview(memory).cast("q")[2 * index : 2 * index + 2]
    worker = Worker(first, (), control)
    try:
        worker.factories = pickle.loads(blob) if factories is None else factories
        answer = packed((None, worker.start()))
    except Exception as error:
        answer = packed(((control[0], describe(error)), None))
        with contextlib.suppress(Exception):
            worker.close()
    connection.send(CALL, number, answer)
    worker.serve(connection, awake)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[3])), int(sys.argv[4]))
