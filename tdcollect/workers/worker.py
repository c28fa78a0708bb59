"""A worker of the ``process`` backend: some gymnasium slots, stepped when the parent says so.

It runs in a fresh interpreter, or in a fork of the parent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from tdcollect.workers.child import begin
from tdcollect.workers.protocol import (
    CALL,
    STEP,
    Connection,
    Failure,
    Field,
    Shared,
    SharedArrays,
    describe,
    map_arrays,
    packed,
    poll_awake,
)
from tdcollect.workers.slots import EnvFactory, EnvSlots, Spaces
from tdcollect.workers.values import (
    Array,
    InfoEntry,
    Tree,
    as_flag,
    as_reward,
    keeps,
    nest,
    unstack,
    write_info,
)


class Worker(EnvSlots):
    """The envs of consecutive slots, in a process of their own.

    Args:
        factories: one callable per slot.
        first: the first slot.
        control: two int64: the slot whose env is at work, and how many calls of envs have begun.
    """

    def __init__(self, factories: Sequence[EnvFactory], first: int, control: memoryview):
        super().__init__(factories, first)
        self.control = control
        self.latest: dict[int, Mapping[str, Any]] = {}
        self.infos: Sequence[InfoEntry] = ()
        self.info_arrays: Sequence[Array] = ()
        self.closed = False

    def begin(self, slot: int) -> None:
        """Note that an env is at work, for a parent that wonders whether it hangs."""
        self.control[0] = slot
        self.control[1] += 1

    def start(self) -> tuple[Spaces, list[tuple[int, Spaces]]]:
        """Make the envs.

        Returns:
            The spaces of the first env; and the slots with other spaces, each with its own.
        """
        differing = self.make()
        return self.spaces, differing

    def share(self, shared: Shared, descriptor: int) -> None:
        """Map the memory of actions, observations, rewards and flags."""
        arrays = SharedArrays(shared, descriptor)
        last = self.first + len(self.factories)
        self.reward, self.terminated, self.truncated = arrays.outcome
        self.fields, self.observation = shared.observation, arrays.observation
        self.action = [array[self.first : last] for array in arrays.action]
        self.observation_tree = shared.observation_tree
        self.action_tree = shared.action_tree

    def share_infos(self, num_envs: int, infos: Sequence[InfoEntry], descriptor: int) -> None:
        """Map the memory of infos."""
        self.infos = infos
        fields = [Field(info.shape, info.dtype.str) for info in infos]
        self.info_arrays = map_arrays(descriptor, num_envs, fields)

    def step(
        self, slots: Sequence[int] | None, actions: Sequence[Array] | None = None
    ) -> tuple[dict[int, Failure], dict[int, Any]]:
        """Step some slots.

        Args:
            slots: ascending; None for all.
            actions: of all slots here; None for those in shared memory.

        Returns:
            The failures, by slot; and the observation and infos, by slot, where these do not fit
            the shared memory.
        """
        # Copies: an env may keep or change the array that it is given.
        given = [array.copy() for array in self.action] if actions is None else actions
        unbatched = unstack(nest(self.action_tree, given), len(self.envs))
        failed: dict[int, Failure] = {}
        misfits: dict[int, Any] = {}
        self.latest = {}
        first, envs = self.first, self.envs
        for slot in range(first, first + len(envs)) if slots is None else slots:
            self.begin(slot)
            try:
                observation, reward, terminated, truncated, info = envs[slot - first].step(
                    unbatched[slot - first]
                )
                self.reward[slot] = as_reward(reward)
                self.terminated[slot] = as_flag("terminated", terminated)
                self.truncated[slot] = as_flag("truncated", truncated)
            except Exception as error:
                failed[slot] = describe(error)
                continue
            self.latest[slot] = info
            self._write(slot, observation, info, failed, misfits)
        return failed, misfits

    def reset(
        self, slots: Sequence[int], seeds: Sequence[int] | None, options: dict[str, Any] | None
    ) -> tuple[dict[int, Failure], dict[int, Any]]:
        """Reset some slots, with one seed each or none; returns what :meth:`step` does."""
        failed: dict[int, Failure] = {}
        misfits: dict[int, Any] = {}
        for i, slot in enumerate(slots):
            self.begin(slot)
            seed = None if seeds is None else seeds[i]
            try:
                observation, info = self.envs[slot - self.first].reset(seed=seed, options=options)
            except Exception as error:
                failed[slot] = describe(error)
                continue
            self._write(slot, observation, info, failed, misfits)
        return failed, misfits

    def _write(
        self,
        slot: int,
        observation: Any,
        info: Mapping[str, Any],
        failed: dict[int, Failure],
        misfits: dict[int, Any],
    ) -> None:
        """Write an observation and infos to shared memory, or note that they do not fit."""
        try:
            fits = self._put(self.observation_tree, observation, slot)
            if fits and self.infos:
                write_info(self.infos, info, self.info_arrays, slot)
        except ValueError:
            fits = False  # the parent will raise the same
        except Exception as error:
            failed[slot] = describe(error)
            return
        if not fits:
            if isinstance(info, Mapping):  # only those that are asked for: others may not travel
                info = {entry.key: info[entry.key] for entry in self.infos if entry.key in info}
            misfits[slot] = (observation, info)

    def _put(self, tree: Tree, value: Any, slot: int) -> bool:
        """Write an observation; False if the parent has to look at it."""
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

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """The infos of an env's latest step."""
        return self.latest.get(slot, {})

    def look_up(self, slots: Sequence[int], name: str) -> list[bytes | None]:
        """An attribute of the envs of ``slots``: its value, pickled, or None for a method.

        Raises:
            AttributeError: if there is none, or it cannot be pickled.
        """
        found = []
        for slot in slots:
            self.begin(slot)
            value = getattr(self.envs[slot - self.first], name)
            is_method = callable(value) and not isinstance(value, gym.Env)
            try:
                found.append(None if is_method else packed(value))
            except Exception as error:
                raise AttributeError(
                    f"{name!r} cannot be sent from its process: {error}"
                ) from error
        return found

    def spec(self) -> Any:
        """The gymnasium spec of the first env; None if it cannot be sent."""
        spec = self.envs[0].spec
        with contextlib.suppress(Exception):
            cloudpickle.dumps(spec)
            return spec
        return None

    def close(self) -> None:
        """Close every env; raises the error of the first that failed."""
        self.closed = True
        super().close()

    def serve(self, connection: Connection, awake: float) -> None:
        """Answer commands until one says to close, or until the parent has gone.

        Args:
            connection: to the parent.
            awake: seconds for which the next command is awaited without sleep.
        """
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        while not self.closed:
            poll_awake(waiting, awake)
            try:
                kind, sequence, payload = connection.receive()
            except (EOFError, OSError):
                with contextlib.suppress(Exception):
                    self.close()
                return
            if kind == CALL:
                answer = self._call(connection, payload)
            else:
                arguments = pickle.loads(payload) if payload else (None,)
                failed, misfits = (self.step if kind == STEP else self.reset)(*arguments)
                answer = _packed_outcome(failed, misfits) if failed or misfits else b""
            try:
                connection.send(kind, sequence, answer)
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


def _packed_outcome(failed: dict[int, Failure], misfits: dict[int, Any]) -> bytes:
    try:
        return packed((failed, misfits))
    except Exception as error:  # an observation or an info that is no data at all
        return packed(({**failed, **dict.fromkeys(misfits, describe(error))}, {}))


def main(end: int, lifeline: int, factories: Sequence[EnvFactory] | None = None) -> None:
    """Serve a parent.

    Args:
        end: the descriptor of this worker's end of the socket pair.
        lifeline: the read end of a pipe that the parent holds open.
        factories: one callable per slot; None to read them, pickled, from the socket.
    """
    begin(lifeline)
    connection = Connection(socket.socket(fileno=end))
    try:
        _, sequence, payload = connection.receive()
        descriptor = connection.receive_descriptor()
    except EOFError:
        return
    index, first, awake, blob = pickle.loads(payload)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    control = memoryview(memory).cast("q")[2 * index : 2 * index + 2]
    worker = Worker((), first, control)
    try:
        worker.factories = pickle.loads(blob) if factories is None else factories
        answer = packed((None, worker.start()))
    except Exception as error:
        answer = packed(((control[0], describe(error)), None))
        with contextlib.suppress(Exception):
            worker.close()
    connection.send(CALL, sequence, answer)
    worker.serve(connection, awake)
