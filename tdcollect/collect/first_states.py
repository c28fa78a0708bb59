"""The states of transforms before the unseeded reset at construction, for ``set_seed``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrl.envs import EnvBase
from torchrl.envs import transforms as T

from tdcollect._upstream.torchrl import serial_envs
from tdcollect.envs.adopted import SERIAL
from tdcollect.envs.traits import all_transforms_of, innermost
from tdcollect.states import equal


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
        self._transforms = [t for part in (env, *members) for t in all_transforms_of(part)]
        self._first = [copy.deepcopy(_state(transform)) for transform in self._transforms]
        self._latest = list(self._first)

    def _untouched(self) -> list[int]:
        there = [i for i, first in enumerate(self._first) if first is not None]
        return [i for i in there if equal(_state(self._transforms[i]), self._latest[i])]

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Run what moves states in the name of the collector."""
        untouched = self._untouched()
        yield
        for i in untouched:
            self._latest[i] = copy.deepcopy(_state(self._transforms[i]))

    def restore(self) -> None:
        """Give transforms their first states, but for those that somebody else has moved."""
        with self.moving(), torch.no_grad():
            for i in self._untouched():
                transform, first = self._transforms[i], self._first[i]
                live = _state(transform)
                if isinstance(transform, (T.VecNorm, T.VecNormV2)):
                    _fill(live, first)
                else:
                    transform.load_state_dict({**live, **first})


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


def _fill(live: Any, first: Any) -> None:
    """Set running statistics in place, since others may share their memory.

    Those that had not begun become zero.
    """
    for key, value in live.items():
        if isinstance(value, dict):
            _fill(value, first.get(key) or {})
        elif isinstance(value, torch.Tensor):
            value.copy_(first.get(key, torch.zeros(())))
