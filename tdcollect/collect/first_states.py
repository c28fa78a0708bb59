"""The states of transforms before the unseeded reset at construction, for ``set_seed``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect._upstream.torchrl import serial_envs
from tdcollect.envs.adopted import SERIAL
from tdcollect.envs.transforms import all_transforms_of, innermost


class FirstStates:
    """The states that transforms had when a collector was made.

    A state is a ``state_dict()`` without parameters. A transform whose state somebody else has
    moved since (loaded it, or stepped the env) keeps it. Transforms in the processes of a
    ``ParallelEnv`` are not reached.

    Args:
        env: the env, before its first reset.
    """

    def __init__(self, env: EnvBase):
        base, members = innermost(env), []
        if type(base) in SERIAL:
            if base.is_closed:
                base.start()  # as its first reset would
            members = serial_envs(base) or []
        self._records = [_Record(t) for part in (env, *members) for t in all_transforms_of(part)]

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Run what moves states in the name of the collector."""
        untouched = [record for record in self._records if record.untouched]
        yield
        for record in untouched:
            record.note()

    def forget(self) -> None:
        """Let go of them."""
        self._records = []

    def restore(self) -> None:
        """Give transforms their first states, but for those that somebody else has moved."""
        for record in self._records:
            if record.untouched:
                record.restore()


class _Record:
    def __init__(self, transform: T.Transform):
        self.transform = transform
        self.note()
        self.first = self.latest

    def note(self) -> None:
        self.latest = _copy(_state(self.transform))

    @property
    def untouched(self) -> bool:
        return self.first is not None and _equal(_state(self.transform), self.latest)

    def restore(self) -> None:
        live, first = _state(self.transform), self.first
        if isinstance(self.transform, (T.VecNorm, T.VecNormV2)):
            first = _begun(first, live)
        with torch.no_grad():
            _fill(live, first)  # in place: the memory may be shared
        now = _state(self.transform)
        if not _equal(now, first):
            self.transform.load_state_dict({**now, **first})
        self.note()


def _state(transform: T.Transform) -> Any:
    """The live state of a transform; None where it gives none yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # VecNorm warns that it has none yet
        try:
            state = transform.state_dict()
        except Exception:  # whatever a user's own may raise; CatFrames does before its first frame
            return None
    learned = {name for name, _ in transform.named_parameters()}
    return {name: value for name, value in state.items() if name not in learned}


def _copy(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other)


def _begun(first: Any, live: Any) -> Any:
    """Zeros in the place of running statistics that had not begun."""
    if isinstance(live, dict):
        return {key: _begun((first or {}).get(key), value) for key, value in live.items()}
    return torch.zeros_like(live) if first is None else first


def _fill(live: Any, first: Any) -> None:
    """Copy tensors into those of a state."""
    for key, value in live.items():
        if isinstance(value, dict):
            _fill(value, first.get(key) or {})
        elif isinstance(value, torch.Tensor) and _fits(value, first.get(key)):
            value.copy_(first[key])


def _fits(tensor: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and other.shape == tensor.shape
