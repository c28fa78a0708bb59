"""Any TorchRL env on rows: stepped as it is, through TensorDicts."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect._upstream.torchrl import carried_entries
from tdcollect.collect.fast.transforms import ExactReward, base_of
from tdcollect.collect.step_dict import Key, StepDict, flat, from_next
from tdcollect.envs.wrapper import GymnasiumEnv, nested


class TensorDictEnv:
    """An env that cannot be taken apart into arrays, with the methods of :class:`ArrayEnv`
    that the loop by episodes calls.

    Args:
        whole: the env with its transforms.
        exact: as :class:`ArrayEnv` takes it.

    Raises:
        ValueError: where its slots do not end one by one, each with a flag of its own, or show
            something else than tensors of fixed shapes.
    """

    def __init__(self, whole: EnvBase, exact: ExactReward | None = None):
        if keys.DONE not in whole.done_keys or len(whole.done_keys_groups) > 1:
            raise ValueError(
                f"expected an env with one {keys.DONE!r} flag a slot, got the flags "
                f"{list(whole.done_keys)}; collect by frames, and split the batch"
            )
        leaves = dict(whole.observation_spec.items(True, True))
        odd = [key for key, leaf in leaves.items() if leaf.dtype is None or -1 in leaf.shape]
        if odd:
            raise ValueError(
                "expected an env whose observations are tensors of fixed shapes, got other ones "
                f"in {odd}; collect by frames"
            )
        self.whole = whole
        self._exact = exact
        self.carried = carried_entries(whole)
        self.batch_size = whole.batch_size
        self.row_bytes = sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves.values())

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        """Nothing to write into, so many times."""
        return [None] * count

    def advance(
        self, rows: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> tuple[StepDict, None]:
        """Step all slots; see :meth:`ArrayEnv.advance`. What an env raises is raised."""
        given = nested(rows.items(), self.batch_size, self.whole.device)
        if self._exact is None:
            following = flat(self.whole.step(given).get(keys.NEXT))
        else:
            base: GymnasiumEnv = base_of(self.whole)
            with base.exact_rewards():
                following = flat(self.whole.step(given).get(keys.NEXT))
            reward = base.exact_reward().to(following[keys.REWARD].device)
            following[keys.EXACT_REWARD] = self._exact(reward)
        for key in next_keys:
            following.setdefault(from_next(key), rows[key])
        return following, None

    def begin(
        self,
        following: StepDict,
        first: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        """Start an episode in ``slots``, where ``first`` is true."""
        left_out = (keys.REWARD, keys.EXACT_REWARD)
        entries = {key: value for key, value in following.items() if key not in left_out}
        given = nested(entries.items(), self.batch_size, self.whole.device)
        given.set(keys.RESET, first.to(given.device) if given.device else first)
        arguments = _reset_arguments(self.whole, seeds, options)
        return flat(self.whole.reset(given, select_reset_only=True, **arguments))


def reset_all(whole: EnvBase, seeds: list[int] | None, options: dict[str, Any] | None) -> StepDict:
    """Start an episode in every slot."""
    return flat(whole.reset(**_reset_arguments(whole, seeds, options)))


def _reset_arguments(
    whole: EnvBase, seeds: list[int] | None, options: dict[str, Any] | None
) -> dict[str, Any]:
    seed = seeds if seeds is None or whole.batch_size else seeds[0]
    given = {"seed": seed, "options": options}
    return {name: value for name, value in given.items() if value is not None}
