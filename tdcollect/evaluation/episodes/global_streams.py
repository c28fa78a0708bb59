"""The global generators of torch, NumPy and Python, as streams of one episode each.

Some envs and transforms draw from them: ``NoopResetEnv``, VMAS, an env that calls ``torch.randn``.
A stream is swapped in while the env of its episode runs, and swapped out again, so that the
episode's draws depend on its seed alone.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.random import mtrand

from tdcollect.seeding import global_seeds

_MT19937_BYTES = 2500  # 624 words and a position


class GlobalStream:
    """The global generators as one episode finds them; swapped in inside of :class:`Outside`.

    Args:
        seed: the episode's env seed; the generators' seeds follow from it (``global_seeds``).
        device: of the env, whose generator is swapped too.

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
        seeded: Any = np.random.RandomState(of_numpy).get_state(legacy=False)
        self._numpy.state = seeded
        # NumPy keeps every second normal number for the next call, beside the generator.
        self._spare: float | None = None
        self._python = random.Random(of_python).getstate()

    def __enter__(self) -> GlobalStream:
        for generator, own in zip(self._generators, self._torch, strict=True):
            generator.set_state(own.get_state())
        mtrand.set_bit_generator(self._numpy)
        if self._spare is not None:
            _keep_spare(self._spare)
        self._before = _numpy_bytes(self._numpy)
        random.setstate(self._python)
        return self

    def __exit__(self, *exception: Any) -> None:
        for generator, own in zip(self._generators, self._torch, strict=True):
            own.set_state(generator.get_state())
        if self._spare is not None or _numpy_bytes(self._numpy) != self._before:
            self._spare = _spare()
        self._python = random.getstate()


class Outside:
    """Keeps the global generators as they are outside, and sets them back at the end.

    Args:
        device: whose generator is kept too; None for the CPU's alone.
    """

    def __init__(self, device: torch.device | None = None):
        self._generators = torch_generators(device)

    def __enter__(self) -> Outside:
        self._torch = [generator.get_state() for generator in self._generators]
        self._numpy: Any = mtrand.get_bit_generator()
        self._spare = _spare()
        self._python = random.getstate()
        return self

    def __exit__(self, *exception: Any) -> None:
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)
        mtrand.set_bit_generator(self._numpy)  # it has drawn nothing meanwhile
        if self._spare is not None:
            _keep_spare(self._spare)
        random.setstate(self._python)


def torch_generators(device: torch.device | None) -> list[torch.Generator]:
    """Return torch's global generators that an env on a device may draw from."""
    found = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


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
        if self._stream is None:
            return self.env.reset(seed=seed, options=options)
        with Outside(), self._stream:
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step the env."""
        if self._stream is None:
            return self.env.step(action)
        with Outside(), self._stream:
            return self.env.step(action)


class WithStreams:
    """A function that makes a gymnasium env, and gives it streams.

    Args:
        make: makes a ``gymnasium.Env``.
        name: of the env.
    """

    def __init__(self, make: Callable[..., gym.Env[Any, Any]], name: str):
        self._make = make
        self.__name__ = name

    def __call__(self, **kwargs: Any) -> gym.Env[Any, Any]:
        with Outside(), GlobalStream(0):
            return EpisodeStreams(self._make(**kwargs))
