"""The global generators of torch, NumPy and Python: saved, watched, and as streams of episodes.

Some envs and transforms draw from them, ``NoopResetEnv`` and VMAS say: a :class:`GlobalStream` is
swapped in while the env of its episode runs, so that its draws depend on its seed alone.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.random import mtrand

from tdcollect.seeding import global_seeds
from tdcollect.states import equal
from tdcollect.threads import other_threads

_MT19937_BYTES = 2500  # 624 words and a position
_LOOKS = 5


def _of_vmas() -> list[Any] | None:
    module = sys.modules.get("vmas.simulator.environment.environment")
    return None if module is None else module.Environment.vmas_random_state


LIBRARIES: dict[str, Callable[[], list[Any] | None]] = {"vmas": _of_vmas}
"""Libraries that hold generators for all envs of a process: functions that return the list that
holds their states, each of which the library puts another in the place of; None before its import.
Others can be added."""


def library_states() -> dict[str, list[Any]]:
    """The states of :data:`LIBRARIES` that are imported, by name."""
    states = {}
    for name, find in LIBRARIES.items():
        if (held := find()) is not None:
            states[name] = list(held)
    return states


def set_library_states(states: Mapping[str, Sequence[Any]]) -> None:
    """Set the states to what :func:`library_states` gave."""
    for name, find in LIBRARIES.items():
        held = find()
        if held is not None and name in states:
            held[:] = states[name]


class OwnLibraryStates:
    """States of :data:`LIBRARIES` that belong to one env, and are there while it is called.

    Its neighbours in the process, made or seeded, then leave it alone.
    """

    def __init__(self) -> None:
        self._states = library_states()

    def give_to(self, env: Any) -> None:
        """Have the methods of an env that take a library's states take these from here on."""
        kind = type(env)
        for name in dir(kind):
            wrapped = hasattr(getattr(kind, name), "__wrapped__") and not name.startswith("__")
            if kind.__module__.partition(".")[0] in LIBRARIES and wrapped:
                vars(env).setdefault(name, partial(self._call, getattr(env, name)))

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outside = library_states()
        set_library_states(self._states)
        try:
            return method(*args, **kwargs)
        finally:
            self._states = library_states()
            set_library_states(outside)


def held_generators(module: str) -> dict[str, bytes]:
    """The states of generators that the modules of a module's package hold, by name."""
    package, kinds = module.partition(".")[0], (np.random.Generator, np.random.RandomState)
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == package]
    return {
        f"{one.__name__}.{name}": pickle.dumps(value)
        for one in modules
        for name, value in list(vars(one).items())
        if isinstance(value, (*kinds, random.Random))
    }


def global_states() -> dict[str, Any]:
    """The states, by ``"torch"``, ``"cuda"`` (one per device, none where CUDA is not in use)...

    Those of :data:`LIBRARIES` are among them.
    """
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [state.cpu() for state in torch.cuda.get_rng_state_all()] if in_use else [],
        "numpy": np.random.get_state(),  # noqa: NPY002  envs may draw from it
        "python": random.getstate(),
        **library_states(),
    }


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set the states to what :func:`global_states` gave, for the devices that are here."""
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state.cpu(), device)
    np.random.set_state(states["numpy"])  # noqa: NPY002
    random.setstate(states["python"])
    set_library_states(states)


@contextmanager
def global_states_kept() -> Iterator[None]:
    """Set the states to what they were, however the body ends."""
    before = global_states()
    try:
        yield
    finally:
        set_global_states(before)


class NotReproducibleError(RuntimeError):
    """The policy or the env does not give the same episode for the same seeds."""


class GlobalRandomness:
    """The global random states of torch, NumPy and Python, as they are now."""

    def __init__(self) -> None:
        # In this order, and in the other one at the end, no time of this thread's is counted.
        here = time.thread_time_ns()
        self._elsewhere = time.process_time_ns() - here
        self._beside = other_threads()
        self._states = global_states()

    def settle(self) -> bool:
        """Set them to what they were; False if another thread may draw from them."""
        if not self.moved():
            return True
        if self._suspects():
            return False
        set_global_states(self._states)
        return True

    def moved(self) -> list[str]:
        """Return the modules whose states have moved: ``"torch"``, ``"numpy"``, ``"random"``..."""
        now, moved = global_states(), []
        for name, state in self._states.items():
            # CUDA has no state before its first use, which moves nothing.
            if name != "python" and len(state) and not equal(state, now[name]):
                moved.append(name)
        # 625 ints, which a tuple compares fastest.
        return moved + ["random"] * (self._states["python"] != now["python"])

    def check(self, who: str) -> None:
        """Raise if one of them has moved since."""
        moved = self.moved()
        if not moved:
            return
        if suspects := self._suspects():
            check_alone(0.1)
        message = (
            f"{who} drew from the global random numbers of {', '.join(moved)}, which no seed "
            "of an episode reaches: its episodes would depend on what runs beside them. Draw "
            "from env.np_random in envs; put transforms that draw over one slot, in a function "
            "that makes one; and draw with torch operations on whole batches in policies"
        )
        if suspects:
            message += (
                f". Or another thread drew from them ({', '.join(suspects)}): then evaluate while "
                "none does"
            )
        raise NotReproducibleError(message)

    def _suspects(self) -> list[str]:
        """Return the names of other threads that may have drawn since; empty if none has run.

        Threads that wait or read from a socket have used no CPU time.
        """
        all_threads = time.process_time_ns()
        if all_threads - time.thread_time_ns() <= self._elsewhere:
            return []
        return sorted(self._beside | other_threads())


def check_alone(seconds: float = 0.005) -> None:
    """Raise if another thread draws from the global random states."""
    busy = other_threads(busy=True)
    if not busy:
        return
    before = GlobalRandomness()
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        if before.moved():
            names = ", ".join(sorted(busy))
            raise RuntimeError(
                "expected no other thread to draw random numbers during an evaluation, but the "
                f"global random states move while this thread waits; busy threads: {names}. "
                "Evaluate between two batches in the thread that trains, with workers=1, or beside "
                "training with tdcollect.Evaluator"
            )


class GlobalStream:
    """The global generators as one episode finds them; swapped in inside of :class:`Outside`.

    Examples:
        >>> stream = GlobalStream(7)
        >>> with Outside(), stream:
        ...     observation, info = env.reset(seed=7)
    """

    def __init__(self, seed: int, device: torch.device | None = None):
        of_torch, of_numpy, of_python = global_seeds(seed)
        self._generators = torch_generators(device)
        self._torch = [torch.Generator(g.device).manual_seed(of_torch) for g in self._generators]
        self._numpy = np.random.MT19937()
        seeded: Any = np.random.RandomState(of_numpy).get_state()
        self._numpy.state = seeded
        # NumPy keeps every second normal number for the next call, beside the generator.
        self._spare: float | None = None
        self._python = random.Random(of_python).getstate()
        self._libraries: Mapping[str, Sequence[Any]] = {}  # seeded by their envs alone

    def __enter__(self) -> GlobalStream:
        for generator, own in zip(self._generators, self._torch, strict=True):
            generator.set_state(own.get_state())
        mtrand.set_bit_generator(self._numpy)
        if self._spare is not None:
            _keep_spare(self._spare)
        self._before = _numpy_bytes(self._numpy)
        random.setstate(self._python)
        set_library_states(self._libraries)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._libraries = library_states()
        for generator, own in zip(self._generators, self._torch, strict=True):
            own.set_state(generator.get_state())
        if self._spare is not None or _numpy_bytes(self._numpy) != self._before:
            self._spare = _spare()
        self._python = random.getstate()


class Outside:
    """Keeps the global generators as they are outside, and sets them back at the end."""

    def __init__(self, device: torch.device | None = None):
        self._generators = torch_generators(device)

    def __enter__(self) -> Outside:
        self._torch = [generator.get_state() for generator in self._generators]
        self._numpy: Any = mtrand.get_bit_generator()
        self._spare = _spare()
        self._python = random.getstate()
        self._libraries = library_states()
        return self

    def __exit__(self, *exception: Any) -> None:
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)
        mtrand.set_bit_generator(self._numpy)  # it has drawn nothing meanwhile
        if self._spare is not None:
            _keep_spare(self._spare)
        random.setstate(self._python)
        set_library_states(self._libraries)


def torch_generators(device: torch.device | None) -> list[torch.Generator]:
    """Return torch's global generators that an env on a device may draw from."""
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def _numpy_bytes(generator: np.random.MT19937) -> bytes:
    """Return the memory of a generator; its ``state`` takes thirty times as long."""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _spare() -> float | None:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return state["gauss"] if state["has_gauss"] else None


def _keep_spare(value: float) -> None:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    np.random.set_state({**state, "has_gauss": 1, "gauss": value})  # noqa: NPY002


class EpisodeStreams(gym.Wrapper[Any, Any, Any, Any]):
    """A gymnasium env whose draws from the global generators come from its episode's stream.

    A reset with a seed starts the stream; calls before it find the generators as they are.
    """

    _stream: GlobalStream | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the env; a seed starts a stream."""
        if seed is not None:
            self._stream = GlobalStream(seed)
        return self._streamed(self.env.reset, seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step the env."""
        return self._streamed(self.env.step, action)

    def _streamed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stream is None:
            return call(*args, **kwargs)
        with Outside(), self._stream:
            return call(*args, **kwargs)


class WithStreams:
    """A function that makes a gymnasium env, and gives it streams."""

    def __init__(self, make: Callable[..., gym.Env[Any, Any]], name: str):
        self._make = make
        self.__name__ = name

    def __call__(self, **kwargs: Any) -> gym.Env[Any, Any]:
        with Outside(), GlobalStream(0):
            return EpisodeStreams(self._make(**kwargs))
