"""The gymnasium envs of consecutive slots, and the worker process that steps them for a parent.

The ``serial`` backend has such envs in its own process. A worker runs in a fresh interpreter, or in
a fork of the parent; torch is not imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import pickle
import random
import re
import select
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from tdcollect.cleanup import close_env
from tdcollect.envs.process import values
from tdcollect.envs.process.agents import Agents, agents_of, is_agents_id
from tdcollect.envs.process.values import (
    Array,
    as_flag,
    as_info,
    as_reward,
    nest,
    unstack,
    write_info,
)
from tdcollect.processes.child import Connection, Described, described, packed, poll_awake

STEP, RESET, CALL = range(3)
"""Kinds of commands."""

EnvFactory = Callable[[], "gym.Env[Any, Any]"]
Spaces = tuple[Any, Any]
"""The observation space and the action space."""
Answer = tuple[dict[int, Described], dict[int, Any]]
"""By slot, the failures, and the results that fit no array."""

_OLD = re.compile(r"argument 'seed'|reset\(\) to return|d 5, got 4|step gave 4 v|<class 'gym\.")
_OLD_API = (
    "this is the API of gym before 0.26: wrap the env in shimmy's GymV21CompatibilityV0, or have "
    "it take reset(seed=, options=) and return five values from step()"
)


def old_api(message: str) -> str:
    """The advice for an env of gym's old API, if an error's message shows it; else empty."""
    return _OLD_API if _OLD.search(message) else ""


def make_by_id(name: Any, /, **kwargs: Any) -> Any:
    if not is_agents_id(name):
        return gym.make(name, **kwargs)
    kwargs.pop("disable_env_checker", None)
    return agents_of(name, **kwargs)


def spec_of(name: str) -> Any:
    if is_agents_id(name):
        return None
    try:
        return gym.spec(name)
    except (gym.error.NamespaceNotFound, gym.error.NameNotFound) as error:
        raise type(error)(
            f"{error} If a package that is installed has it, import that, or name it in the id: "
            f"'package:{name}', such as gymnasium_robotics:FetchReach-v4"
        ) from None


class EnvSlots:
    """The envs of consecutive slots in this process; made by :meth:`make`."""

    spaces: Spaces  # of the first env, which those of the others must equal

    def __init__(self, factories: Sequence[EnvFactory], first: int = 0):
        self.factories = factories
        self.first = first
        self.envs: list[gym.Env[Any, Any]] = []

    def begin(self, slot: int) -> None:
        """Is called before each call of an env."""

    def make(self) -> tuple[Spaces, list[tuple[int, Spaces]]]:
        """Make the envs; returns the first one's spaces, and the slots with others, with theirs."""
        differing = []
        for slot, factory in enumerate(self.factories, self.first):
            self.begin(slot)
            env = factory()
            self._check_new(slot, env)
            self.envs.append(env)
            spaces = (env.observation_space, env.action_space)
            if slot == self.first:
                self.spaces = spaces
            elif spaces != self.spaces:
                differing.append((slot, spaces))
        return self.spaces, differing

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make the envs of ``slots`` again, and close the old ones; returns these slots."""
        for slot in slots:
            self.begin(slot)
            old = self.envs[slot - self.first]
            with contextlib.suppress(Exception):  # closing it may fail as it did
                close_env(old)
            env = self.factories[slot - self.first]()
            if env is old:
                raise RuntimeError(
                    f"cannot build the env of slot {slot} anew: it was given as one env; pass its "
                    "id or a callable that makes a new one at each call"
                )
            self._check_new(slot, env)
            check_spaces(slot, self.spaces, (env.observation_space, env.action_space))
            self.envs[slot - self.first] = env
        return list(slots)

    def _check_new(self, slot: int, env: Any) -> None:
        if not isinstance(env, gym.Env):
            advice = old_api(str(type(env).__mro__))
            if isinstance(env, gym.vector.VectorEnv):
                close_env(env)
                advice = "call it and pass the vector env itself"
            raise TypeError(
                "expected a callable that makes a single gymnasium.Env, got one that returned "
                f"{type(env).__name__}" + f"; {advice}" * bool(advice)
            )
        for name in ("observation_space", "action_space"):
            if not isinstance(space := getattr(env, name, None), gym.Space):
                got = "none" if space is None else f"a {type(space).__name__}"
                raise TypeError(
                    f"expected {name} to be of gymnasium.spaces, got {got} in {env}; set "
                    f"self.{name} in its __init__"
                )
        for other, other_env in enumerate(self.envs, self.first):
            one, other_one = (e.env if isinstance(e, Agents) else e for e in (env, other_env))
            if one is other_one:
                raise ValueError(
                    "expected a callable that makes a new env at each call, got that of slot "
                    f"{other} for slot {slot} again"
                )

    def sample_info(self) -> Mapping[str, Any]:
        """Infos of a reset and a step of the first env; of the reset if it refuses the action."""
        env = self.envs[0]
        self.begin(self.first)
        info = dict(as_info(values.as_begun(env.reset())[1]))
        with contextlib.suppress(Exception):  # of an env with illegal actions
            info.update(as_info(env.step(env.action_space.sample())[4]))
        return info

    def call(
        self,
        slots: Sequence[int],
        name: str,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Call a method of the envs of ``slots``; returns one result per slot."""
        results = []
        for slot in slots:
            self.begin(slot)
            results.append(getattr(self.envs[slot - self.first], name)(*arguments, **keywords))
        return results

    def save_states(self) -> dict[int, Any]:
        """The state of each env, by slot; the envs are resumable."""
        slots = range(self.first, self.first + len(self.envs))
        return dict(zip(slots, self.call(slots, "save_state"), strict=True))

    def load_states(self, states: Mapping[int, Any]) -> dict[int, str]:
        """Bring envs back to saved states; returns the reasons by slot, of those that are not."""
        failed = {}
        for slot, env in enumerate(self.envs, self.first):
            if slot in states:
                # A replay takes many steps: each is a call that may take its time.
                begin = partial(self.begin, slot)
                begin()
                why = env.load_state(states[slot], begin)  # type: ignore[attr-defined]
                if why is not None:
                    failed[slot] = why
        return failed

    def close(self) -> None:
        """Close every env; raises the error of the first that failed, once all were asked to."""
        errors = []
        for slot, env in enumerate(self.envs, self.first):
            self.begin(slot)
            try:
                close_env(env)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def check_spaces(slot: int, expected: Spaces, got: Spaces) -> None:
    """Raise ValueError if the spaces of ``slot`` are not those of slot 0."""
    for name, one, other in zip(("observation_space", "action_space"), expected, got, strict=True):
        if one != other:
            advice = "make envs of one kind share a batch, or wrap them to agree"
            if "__eq__" not in vars(type(one)) or str(one) == str(other):
                advice = f"give {type(one).__name__} an __eq__, without which no two are the same"
            raise ValueError(
                f"expected the same {name} in every slot, got {one} in slot 0 and {other} in slot "
                f"{slot}; {advice}"
            )


class EnvWorker(EnvSlots):
    """The envs of consecutive slots, in a process of their own.

    ``control`` are two int64: the slot whose env is at work, and how many calls of envs have begun.
    ``files`` are those of the memory of values and of infos.
    """

    def __init__(self, first: int, control: memoryview, files: Sequence[int]):
        super().__init__((), first)
        self.control = control
        self.files = files
        self.latest: dict[int, Mapping[str, Any]] = {}
        self.closed = False

    def begin(self, slot: int) -> None:
        """Note the slot, for a parent that wonders whether its env hangs."""
        self.control[0] = slot
        self.control[1] += 1

    def share(self, shared: values.Shared, infos: Sequence[values.InfoEntry]) -> None:
        outcome, self.observation, action = shared.mapped(self.files[0])
        self.reward, self.terminated, self.truncated = outcome
        last = self.first + len(self.factories)
        self.action = [array[self.first : last] for array in action]
        self.observation_tree = shared.observation_tree
        self.action_tree = shared.action_tree
        self.infos = infos
        self.info_arrays = values.map_arrays(self.files[1], shared.num_envs, infos)

    def step(self, slots: Sequence[int] | None, actions: Sequence[Array] | None = None) -> Answer:
        """Step ``slots`` (ascending, None for all), with the actions in shared memory unless given.

        Returns, by slot, failures, and observation and infos that do not fit the shared memory.
        """
        # Copies: an env may keep or change the array that it is given.
        arrays = [array.copy() for array in self.action] if actions is None else actions
        unbatched = unstack(nest(self.action_tree, arrays), len(self.envs))
        self.latest = {}
        first, envs = self.first, self.envs

        def step(slot: int) -> tuple[Any, Mapping[str, Any]]:
            observation, reward, terminated, truncated, info = envs[slot - first].step(
                unbatched[slot - first]
            )
            self.reward[slot] = as_reward(reward)
            self.terminated[slot] = as_flag("terminated", terminated)
            self.truncated[slot] = as_flag("truncated", truncated)
            self.latest[slot] = info
            return observation, info

        return self._each(range(first, first + len(envs)) if slots is None else slots, step)

    def reset(self, starts: Mapping[int, int | None], options: dict[str, Any] | None) -> Answer:
        """Reset some slots, with one seed each or none; returns what :meth:`step` does."""

        def reset(slot: int) -> tuple[Any, Mapping[str, Any]]:
            own = values.options_of(options, slot)
            env = self.envs[slot - self.first]
            return values.as_begun(env.reset(seed=starts[slot], options=own))

        return self._each(starts, reset)

    def _each(
        self, slots: Iterable[int], call: Callable[[int], tuple[Any, Mapping[str, Any]]]
    ) -> Answer:
        failed: dict[int, Described] = {}
        misfits: dict[int, Any] = {}
        for slot in slots:
            self.begin(slot)
            try:
                observation, info = call(slot)
                fits = self._put(self.observation_tree, observation, slot)
                if fits and self.infos:
                    write_info(self.infos, info, self.info_arrays, slot)
            except Exception as error:
                failed[slot] = described(error, 2)
                continue
            if not fits:
                if isinstance(info, Mapping):  # only what is asked for: the rest may not travel
                    info = {entry.key: info[entry.key] for entry in self.infos if entry.key in info}
                misfits[slot] = (observation, info)
        return failed, misfits

    def _put(self, tree: values.Tree, value: Any, slot: int) -> bool:
        """Write an observation; False if the parent has to look at it."""
        if isinstance(tree, int):
            array, target = np.asarray(value), self.observation[tree]
            fits = array.dtype is target.dtype or values.keeps(array, target.dtype)
            if isinstance(value, str):  # NumPy drops zeros at its end
                fits = array.itemsize <= target.itemsize and "\0" not in value
            if array.shape != target.shape[1:] or not fits:
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

    def generators(self) -> bytes:
        torch = sys.modules.get("torch")
        states = (
            random.getstate(),
            np.random.get_state(legacy=False),  # noqa: NPY002
            None if torch is None else torch.get_rng_state().numpy().tobytes(),
        )
        return hashlib.sha256(pickle.dumps(states)).digest()

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        return as_info(self.latest.get(slot))

    def latest_infos(
        self, slots: Sequence[int], names: Sequence[str]
    ) -> dict[int, Mapping[str, Any]]:
        """The infos of these names, of the latest steps of those of ``slots`` that are here."""
        infos = {slot: as_info(info) for slot, info in self.latest.items() if slot in slots}
        wanted = {*names, *(name.partition("/")[0] for name in names)}
        return {
            slot: {name: info[name] for name in wanted if name in info}
            for slot, info in infos.items()
        }

    def look_up(self, slots: Sequence[int], name: str) -> list[bytes | None]:
        """An attribute of the envs of ``slots``: its value, pickled, or None for a method."""
        pickled = []
        for slot in slots:
            self.begin(slot)
            value = getattr(self.envs[slot - self.first], name)
            is_method = callable(value) and not isinstance(value, gym.Env)
            try:
                pickled.append(None if is_method else packed(value))
            except Exception as error:
                raise AttributeError(
                    f"{name!r} cannot be sent from its process: {error}"
                ) from error
        return pickled

    def spec(self) -> Any:
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

        The next command is awaited without sleep for ``awake`` seconds.
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
                name, operands = pickle.loads(payload)
                answer = self.result_of(getattr(self, name), *operands)
            else:
                arguments = pickle.loads(payload) if payload else (None,)
                failed, misfits = (self.step if kind == STEP else self.reset)(*arguments)
                answer = _packed_outcome(failed, misfits) if failed or misfits else b""
            try:
                connection.send(kind, sequence, answer)
            except OSError:
                return

    def result_of(self, function: Callable[..., Any], *arguments: Any) -> bytes:
        """Call a function; answer with its failure or its result."""
        try:
            return packed((None, function(*arguments)))
        except Exception as error:
            return packed(((self.control[0], described(error)), None))


def _packed_outcome(failed: dict[int, Described], misfits: dict[int, Any]) -> bytes:
    try:
        return packed((failed, misfits))
    except Exception as error:  # an observation or an info that is no data at all
        return packed(({**failed, **dict.fromkeys(misfits, described(error))}, {}))


def main(
    end: int, control: int, *files: int, factories: Sequence[EnvFactory] | None = None
) -> None:
    """Serve a parent at a socket's descriptor, from which the factories come unless given."""
    connection = Connection(socket.socket(fileno=end))
    try:
        _, sequence, payload = connection.receive()
    except EOFError:
        return
    index, first, awake, around, blob = pickle.loads(payload)
    memory = memoryview(mmap.mmap(control, 0)).cast("q")[2 * index : 2 * index + 2]
    worker = EnvWorker(first, memory, files)

    def make() -> Any:
        try:
            around.enter()
            worker.factories = pickle.loads(blob) if factories is None else factories
            around.enter_torch()  # which the factories may have imported
            had_torch = "torch" in sys.modules
            spaces = worker.make()
            if not had_torch:
                around.enter_torch()
            return spaces
        except Exception:
            with contextlib.suppress(Exception):
                worker.close()
            raise

    connection.send(CALL, sequence, worker.result_of(make))
    worker.serve(connection, awake)
    connection.close()
