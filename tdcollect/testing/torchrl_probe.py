"""StepDict of a TorchRL ``EnvBase``, for the rules to look at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.testing.rules import Player


class Row(NamedTuple):
    """One step of N slots, as copies.

    ``step`` is what ``step`` gave, with ``next``; ``after`` is the root of the next row, in which
    ended slots are reset. ``given`` are the very TensorDicts.
    """

    step: TensorDictBase
    after: TensorDictBase
    given: tuple[TensorDictBase, TensorDictBase]


class Probe(Player[EnvBase, Row]):
    """Plays one ``EnvBase``, and others like it; see :class:`Player`."""

    def act(self, env: EnvBase, root: TensorDictBase, seed: int) -> TensorDictBase:
        """The root with an action, which depends on nothing but ``seed`` and the root."""
        if self.policy is not None:
            return self.policy(root)
        # The action's draw must neither disturb nor follow an env that uses torch's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return env.rand_action(root)

    def start(self, env: EnvBase, seed: int) -> TensorDictBase:
        env.set_seed(seed)
        return env.reset()

    def rows(self, env: EnvBase, seed: int) -> Iterator[Row]:
        """StepDict from a seeded reset on, through resets of the slots that end.

        Random actions are the same for every seed, so that a seed shows by what the env does.
        """
        root = self.start(env, seed)
        for i in range(self.steps):
            step, after = env.step_and_maybe_reset(self.act(env, root, self.seed + i))
            yield Row(step.clone(), after.clone(), (step, after))
            root = after.clone()

    def play(self, env: EnvBase, seed: int) -> list[Row]:
        """StepDict until each slot has ended once, and two more."""
        rows: list[Row] = []
        ended = torch.zeros(env.batch_size, dtype=torch.bool)
        more = 2
        for row in self.rows(env, seed):
            rows.append(row)
            if ended.all():
                more -= 1
                if not more:
                    break
            ended |= ends(env, row)
        return rows

    @cached_property
    def plays(self) -> list[list[Row]]:
        """The env played on three seeds."""
        return [self.play(self.env, self.seed + i) for i in range(3)]

    def close_env(self, env: EnvBase) -> None:
        _close(env)

    def close(self) -> None:
        _close(self.env)


def _close(env: EnvBase) -> None:
    if not env.is_closed:
        env.close()


def ends(env: EnvBase, row: Row) -> torch.Tensor:
    """Which slots ended in a row: bool ``[N]``, on the CPU."""
    ended = torch.zeros(env.batch_size, dtype=torch.bool)
    for key in env.done_keys:
        flag = row.step[keys.NEXT][key].cpu()
        ended |= flag.reshape(*env.batch_size, -1).any(-1)
    return ended
