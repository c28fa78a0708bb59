"""TorchRL envs for tests of evaluation. Apart from ``envs``, which workers import without torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase


class Drift(EnvBase):
    """A random walk whose noise comes from the global generators of torch, NumPy and Python.

    Observations are float32 ``[3]``; actions are one-hot of two. Its seed does nothing. Step
    ``fails_at`` of every episode raises; 0 is the reset.
    """

    longest = 15

    def __init__(self, batch_size: tuple[int, ...] = (), fails_at: int | None = None):
        super().__init__(batch_size=torch.Size(batch_size))
        shape = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*shape, 3)), shape=shape)
        self.action_spec = OneHot(2, shape=(*shape, 2))
        self.reward_spec = Unbounded((*shape, 1))
        self.fails_at = fails_at
        self.steps = 0

    def noise(self) -> torch.Tensor:
        """Normal numbers ``[*batch, 3]``."""
        scale = 1 + random.random() + np.random.normal()  # noqa: NPY002
        return torch.randn(*self.batch_size, 3) * scale

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.place = self.noise()
        self.steps = 0
        self._fail()
        return TensorDict({"observation": self.place.clone()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        self._fail()
        push = tensordict["action"].float().argmax(-1, keepdim=True)
        self.place = 0.9 * self.place + 0.1 * self.noise() + 0.1 * push
        done = (self.place.sum(-1, keepdim=True) > 2) | (self.steps >= self.longest)
        entries = {"observation": self.place.clone(), "reward": self.place.sum(-1, keepdim=True)}
        return TensorDict({**entries, "done": done}, batch_size=self.batch_size)

    def _fail(self) -> None:
        if self.steps == self.fails_at:
            raise RuntimeError("broken")


class Seeded(Drift):
    """The walk with noise from a generator of its own, which its seed sets."""

    generator: torch.Generator

    def noise(self) -> torch.Tensor:
        return torch.randn(*self.batch_size, 3, generator=self.generator)

    def _set_seed(self, seed: int | None) -> None:
        self.generator = torch.Generator()
        if seed is not None:
            self.generator.manual_seed(seed)


class Unreached(Drift):
    """The walk with noise that no seed reaches."""

    def noise(self) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng().normal(size=3)).float()


class Carrying(Seeded):
    """The walk, which begins where the episode before it ended."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        before = getattr(self, "place", torch.zeros(3))
        given = super()._reset(tensordict, **kwargs)
        self.place = self.place + before
        return given.set("observation", self.place.clone())


class Teams(EnvBase):
    """Two red agents and three blue ones, whose rewards are of their groups.

    Observations are float32 ``[agents, 2]``, actions ``[agents, 1]`` in -1 to 1. Agent i of blue
    is done after i + 2 steps, red ones after 4. With ``root``, all have a flag together, too.
    """

    groups = {"blue": 3, "red": 2}  # noqa: RUF012

    def __init__(self, root: bool = True):
        super().__init__(batch_size=torch.Size([]))
        self.root = root

        def per_group(make: Any) -> dict[str, Composite]:
            return {
                name: Composite(make(count), shape=(count,)) for name, count in self.groups.items()
            }

        self.observation_spec = Composite(
            per_group(lambda count: {"observation": Unbounded((count, 2))})
        )
        self.action_spec = Composite(
            per_group(lambda count: {"action": Bounded(-1, 1, (count, 1))})
        )
        self.reward_spec = Composite(per_group(lambda count: {"reward": Unbounded((count, 1))}))
        flag = lambda *shape: Categorical(2, shape=(*shape, 1), dtype=torch.bool)  # noqa: E731
        done: dict[str, Any] = per_group(lambda count: {"done": flag(count)})
        self.done_spec = Composite({**done, "done": flag()} if root else done)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(0 if seed is None else seed)  # as VMAS does

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = 0
        return TensorDict(
            {name: {"observation": torch.randn(n, 2)} for name, n in self.groups.items()}
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        found: dict[str, Any] = {}
        for name, count in self.groups.items():
            seen = tensordict[name, "observation"]
            last = torch.tensor([4, 4] if name == "red" else [2, 3, 4])[:, None]
            found[name] = {
                "observation": 0.5 * seen + torch.randn(count, 2),
                "reward": seen.sum(-1, keepdim=True) + tensordict[name, "action"],
                "done": self.steps >= last,
            }
        if self.root:
            found["done"] = torch.tensor([self.steps >= 4])
        return TensorDict(found)


def teams() -> Teams:
    """The teams, with done flags of groups only; named on command lines."""
    return Teams(root=False)


class Masked(Seeded):
    """The walk where some of four actions are legal, other ones at each step; counts the others.

    The mask is in the env's own action spec, as PettingZoo's wrapper has it, in a group of two
    agents, if it ``keeps`` it; else it is an entry for ``ActionMask``.
    """

    def __init__(self, keeps: bool = False, kind: Any = OneHot):
        super().__init__()
        self.keeps, self.kind, self.illegal, self.taken = keeps, kind, 0, 0
        mask = Composite(legal=Binary(4, dtype=torch.bool))
        self.observation_spec = Composite(observation=Unbounded((3,)), masks=mask)
        self.action_spec = kind(4)
        if keeps:
            shape = (2,) if kind is Categorical else (2, 4)
            group = Composite(action=kind(4, shape=shape), shape=(2,))
            self.action_spec = Composite(group=group)

    def _seen(self, entries: TensorDictBase) -> TensorDictBase:
        count = 2 if self.keeps else 1
        self.legal = torch.rand(count, 4, generator=self.generator) < 0.4
        self.legal[:, self.steps % 4] = True
        if self.keeps:
            self.full_action_spec["group", "action"].update_mask(self.legal)
        return entries.set(("masks", "legal"), self.legal[0])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._seen(super()._reset(tensordict))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict[("group", "action") if self.keeps else "action"]
        if self.kind is Categorical:
            action = torch.nn.functional.one_hot(action, 4)
        action = action.reshape(-1, 4)
        self.taken += len(action)
        self.illegal += int((action.bool() & ~self.legal).any(-1).sum())
        return self._seen(super()._step(TensorDict(action=action[0, 2:])))
