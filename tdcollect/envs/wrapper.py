"""The ``EnvBase`` face of a stepper: TensorDicts in, TensorDicts out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.envs.spaces import Array, Path, compose
from tdcollect.envs.stepper import StepFrame, Stepper
from tdcollect.seeding import slot_seeds


class GymnasiumEnv(EnvBase):
    """A TorchRL env over gymnasium slots; made by :func:`tdcollect.make_env`.

    Keys, shapes, dtypes and specs are those of TorchRL's ``GymEnv`` for the same space. Rewards are
    float32 ``[N, 1]``, flags bool ``[N, 1]``; an unbatched env lacks the N. Every entry is freshly
    allocated at each step: nothing that was given out changes later.

    Args:
        stepper: the slots.
        batched: ``batch_size=[N]``; False for one slot with ``batch_size=[]``.
        name: what to call the env in messages.
        device: where entries are placed; None, as in ``GymEnv``, for the CPU without saying so.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        batched: bool,
        name: str,
        device: torch.device | str | int | None = None,
    ):
        batch_size = torch.Size([stepper.num_envs] if batched else [])
        super().__init__(device=device, batch_size=batch_size)
        self.stepper = stepper
        self.name = name
        self._action_paths = stepper.backend.action.paths
        self._make_specs()
        # The latest frame that was given out: a partial reset shows the other slots' rows from it.
        self._latest: TensorDictBase | None = None
        self.is_closed = False

    @property
    def num_envs(self) -> int:
        """N; 1 for an unbatched env."""
        return self.stepper.num_envs

    def _make_specs(self) -> None:
        batch, entries = self.batch_size, self.stepper.entries
        action = self.stepper.backend.action
        flags = {
            name: Categorical(2, shape=(*batch, 1), dtype=torch.bool)
            for name in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)
        }
        specs = {
            "observation_spec": compose(
                [e.path for e in entries], [e.spec for e in entries], batch
            ),
            "action_spec": compose(action.paths, [leaf.spec for leaf in action.leaves], batch),
            "reward_spec": Unbounded((*batch, 1), dtype=torch.float32),
            "done_spec": Composite(flags, shape=batch),
        }
        for spec_name, spec in specs.items():
            setattr(self, spec_name, spec if self.device is None else spec.to(self.device))

    def _new_frame(self) -> tuple[StepFrame, list[Array], dict[str, Array]]:
        """A frame over new arrays, and these arrays: the entries, and reward and flags [N, 1]."""
        stepper, n = self.stepper, self.num_envs
        entries = [np.zeros((n, *entry.shape), entry.dtype) for entry in stepper.entries]
        scalars = {
            keys.REWARD: np.zeros((n, 1), np.float32),
            keys.TERMINATED: np.zeros((n, 1), bool),
            keys.TRUNCATED: np.zeros((n, 1), bool),
        }
        frame = stepper.frame(entries, *(array[:, 0] for array in scalars.values()))
        return frame, entries, scalars

    def _pack(self, entries: Sequence[Array], scalars: dict[str, Array]) -> TensorDictBase:
        source: dict[str, Any] = {}
        for entry, array in zip(self.stepper.entries, entries, strict=True):
            parent = source
            for name in entry.path[:-1]:
                parent = parent.setdefault(name, {})
            parent[entry.path[-1]] = self._tensor(array)
        for name, array in scalars.items():
            source[name] = self._tensor(array)
        # Nested dicts become TensorDicts of the env's batch size.
        packed = TensorDict(source, batch_size=self.batch_size)
        return packed if self.device is None else packed.to(self.device)

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array if self.batch_size else array[0, ...])

    def _rows(self, tensor: torch.Tensor) -> Array:
        """A tensor of the env's batch size as an array ``[N, ...]`` on the CPU."""
        array: Array = tensor.detach().cpu().numpy()
        return array if self.batch_size else array[None]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_open("step")
        actions = [self._action(tensordict, path) for path in self._action_paths]
        slots = self._slots(tensordict, keys.STEP)
        frame, entries, scalars = self._new_frame()
        if slots is not None:
            self._hold_waiting_rows(tensordict, entries, scalars)
        self.stepper.step(actions, slots, frame)
        scalars[keys.DONE] = scalars[keys.TERMINATED] | scalars[keys.TRUNCATED]
        self._latest = self._pack(entries, scalars)
        return self._latest.copy()

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> TensorDictBase:
        """Reset the slots that ``"_reset"`` marks, or all.

        Args:
            tensordict: may hold a bool mask ``"_reset"`` of shape ``[N, 1]`` or ``[N]``.
            seed: an int, which seeds slot i with ``seed + i``, or one int a slot that is reset.
            options: gymnasium's reset options, for each slot that is reset.

        Raises:
            ValueError: for seeds that the backend cannot honour.
        """
        self._check_open("reset")
        slots = self._slots(tensordict, keys.RESET)
        targets = range(self.num_envs) if slots is None else slots
        seeds = None if seed is None else slot_seeds(seed, targets)
        frame, entries, scalars = self._new_frame()
        if slots is not None and self._latest is not None:
            self._hold_waiting_rows(self._latest, entries, scalars)
            for flag in (keys.TERMINATED, keys.TRUNCATED):
                scalars[flag][slots] = False
        self.stepper.reset(targets, frame, seeds, options)
        del scalars[keys.REWARD]
        scalars[keys.DONE] = scalars[keys.TERMINATED] | scalars[keys.TRUNCATED]
        self._latest = self._pack(entries, scalars)
        return self._latest.copy()

    def _hold_waiting_rows(
        self, source: TensorDictBase, entries: Sequence[Array], scalars: dict[str, Array]
    ) -> None:
        """Show the present state of slots that this call leaves alone."""
        paths = [
            (entry.path, array) for entry, array in zip(self.stepper.entries, entries, strict=True)
        ]
        paths += [((flag,), scalars[flag]) for flag in (keys.TERMINATED, keys.TRUNCATED)]
        for path, array in paths:
            value = source.get(path, None)
            if value is not None:
                array[...] = self._rows(value)

    def _slots(self, tensordict: TensorDictBase | None, key: str) -> list[int] | None:
        """The slots that a mask entry marks, or None for all of them."""
        mask = None if tensordict is None else tensordict.get(key, None)
        if mask is None or mask.all():
            return None
        marked: list[int] = np.flatnonzero(self._rows(mask).reshape(self.num_envs)).tolist()
        return marked

    def _action(self, tensordict: TensorDictBase, path: Path) -> Array:
        action = tensordict.get(path, None)
        shown = path[0] if len(path) == 1 else path
        if action is None:
            raise KeyError(
                f"expected the entry {shown!r} in the input of step(), got "
                f"{sorted(map(str, tensordict.keys()))}; have the policy write it (its out_keys)"
            )
        spec = self.full_action_spec[path]
        if action.shape != spec.shape:
            raise ValueError(
                f"expected {shown!r} of shape {list(spec.shape)}, as the action spec says, got "
                f"{list(action.shape)}; compare the policy's output with env.action_spec"
            )
        return self._rows(action)

    def _check_open(self, verb: str) -> None:
        if self.is_closed:
            raise RuntimeError(f"cannot {verb} {self.name}: the env is closed; make a new one")

    def _set_seed(self, seed: int | None) -> None:
        """Seed slot i with ``seed + i`` at its next reset."""
        if seed is not None:
            self.stepper.set_seeds(slot_seeds(seed, range(self.num_envs)))

    def render(self) -> Any:
        """What the backend renders: a list of frames, one a slot; one frame if unbatched."""
        frames = self.stepper.backend.render()
        return frames if self.batch_size else frames[0]

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the slots; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.stepper.close()

    def __repr__(self) -> str:
        backend = type(self.stepper.backend).__name__.removesuffix("Backend").lower()
        return (
            f"{type(self).__name__}({self.name}, backend={backend}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )
