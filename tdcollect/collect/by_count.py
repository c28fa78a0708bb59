"""Collecting by count: the counts that are allowed, and whole episodes as entries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from tdcollect.collect.episodes import Block, EpisodeWatch, Piece, Start
from tdcollect.collect.policies import Policy
from tdcollect.collect.ready.episodes import FirstToStart, episode_loop
from tdcollect.collect.step_dict import Key, StepDict, by_slot, forgotten_entries
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.trajectories.split import LAYOUTS

if TYPE_CHECKING:
    from tdcollect.collect.fast.devices import Placement

_BLOCK_STEPS = 64


def check_count(
    frames: int | None, episodes: int | None, max_episode_steps: int | None, layout: str
) -> int:
    """Check the counts of a collection; returns the one that is given."""
    if (frames is None) == (episodes is None):
        raise ValueError(
            f"expected either frames or episodes, got frames={frames} and episodes={episodes}"
        )
    for name, value in (
        ("frames", frames),
        ("episodes", episodes),
        ("max_episode_steps", max_episode_steps),
    ):
        is_int = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (is_int and value > 0):
            raise ValueError(f"expected {name} to be a positive int, got {value!r}")
    if frames is not None and (max_episode_steps is not None or layout != "flat"):
        raise ValueError(
            "max_episode_steps and layout are for collecting by episodes; by frames use make_env's "
            "max_episode_steps, and split_trajectories on the batch"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"expected layout to be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return int(frames or episodes or 0)


def round_up(frames: int, slots: int) -> int:
    """The steps per slot for so many frames; warns where these are more."""
    steps = -(-frames // slots)
    if frames % slots:
        warnings.warn(
            f"{frames} frames are no multiple of the {slots} slots: collecting {steps * slots}, "
            f"{steps} per slot",
            stacklevel=3,
        )
    return steps


def whole_episodes(
    env: SteppedEnv,
    lower: Callable[[StepDict], Policy],
    episodes: int,
    new_ids: Callable[[int], torch.Tensor],
    *,
    max_episode_steps: int | None = None,
    left_out: frozenset[Key] = frozenset(),
    place: Placement | None = None,
    first_seeds: list[int] | None = None,
    options: dict[str, Any] | None = None,
    gradients: bool = False,
    noted: Callable[[Iterable[Block]], Iterable[Block]] = iter,
    watch: EpisodeWatch | None = None,
) -> dict[Key, torch.Tensor]:
    """Collect episodes from the start of each to its end; every slot starts afresh.

    Args:
        env: the env on StepDicts.
        lower: gives the policy on StepDicts, for the entries that it first finds.
        episodes: the number of episodes.
        new_ids: gives so many new trajectory ids.
        max_episode_steps: episodes are truncated at this length.
        left_out: entries to leave out.
        place: moves tensors between devices; None where all is on the CPU.
        first_seeds: one per slot, for the first reset.
        options: gymnasium's reset options, for each reset.
        gradients: keep the graph through the policy.
        noted: is handed the blocks, and hands them on.
        watch: called with each step; None for no hooks.

    Returns:
        The entries, ``[sum of lengths, ...]`` each: episodes in the order of starting.
    """
    policy: Policy | None = None

    def act(step: StepDict, slots: list[int]) -> None:
        nonlocal policy
        policy = policy or lower(step)
        if place is None:
            policy(step)
        else:
            place.run(policy, step)

    def remembered(step: StepDict) -> list[Key]:
        assert policy is not None
        return forgotten_entries(step, env.carried, policy.reads_first, policy.writes)

    order = FirstToStart(episodes) if env.own_pace else None
    starts: Iterator[Start | None] = (
        Start(index, None, int(new_ids(1))) for index in range(episodes)
    )
    if order is not None:
        starts = (order.start(slot, 0) for slot in range(env.batch_size.numel()))

    def again(start: Start, error: Exception) -> Start:
        return Start(start.index, None, int(new_ids(1)) if order is None else order.new_id())

    loop = episode_loop(
        env,
        act,
        remembered,
        starts,
        steps=_BLOCK_STEPS,
        max_episode_steps=max_episode_steps,
        left_out=left_out,
        place=place,
        first_seeds=first_seeds,
        options=options,
        in_one_piece=gradients,
        replace=again if env.base is not None and env.base.restarts is not None else None,
        watch=watch,
        order=order,
    )

    def checked() -> Iterator[Block]:
        for block in loop:
            if policy is not None:
                policy.check()
            yield block

    if order is None:
        return join_episodes(noted(checked()), env.batch_size)
    blocks = order.only_kept(list(checked()), new_ids(episodes))
    assert env.base is not None
    env.base.stepper.derive_seeds()
    return join_episodes(noted(blocks), env.batch_size)


def join_episodes(blocks: Iterable[Block], batch_size: torch.Size) -> dict[Key, torch.Tensor]:
    """Join the pieces of all episodes, each contiguous, in the order of their indices.

    Pieces of an episode whose env failed, and which started again under its index, are left out.

    Args:
        blocks: of a loop that ran to its end.
        batch_size: the env's.

    Returns:
        The entries, ``[sum of lengths, ...]`` each.
    """
    parts: list[dict[Key, torch.Tensor]] = []
    indices: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    failed: list[int] = []
    for entries, pieces in blocks:
        if not pieces:
            continue
        steps = torch.cat([torch.arange(piece.begin, piece.stop) for piece in pieces])
        slots = _per_step(pieces, [piece.slot for piece in pieces])
        indices.append(_per_step(pieces, [piece.start.index for piece in pieces]))
        ids.append(_per_step(pieces, [piece.start.traj_id for piece in pieces]))
        failed += [piece.start.traj_id for piece in pieces if piece.error is not None]
        parts.append(
            {key: _pick(entry, batch_size, slots, steps) for key, entry in entries.items()}
        )
    order = torch.cat(indices).argsort(stable=True)
    if failed:
        order = order[~torch.isin(torch.cat(ids)[order], torch.tensor(failed))]
    return {
        key: torch.cat([part[key] for part in parts])[_on(order, parts[0][key])] for key in parts[0]
    }


def _pick(
    entry: torch.Tensor, batch_size: torch.Size, slots: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """The rows at the given slots and steps, out of an entry ``[*batch, t, ...]``."""
    flat = by_slot(entry, batch_size)
    return flat[_on(slots, flat), _on(steps, flat)]


def _per_step(pieces: list[Piece], values: list[int]) -> torch.Tensor:
    """One value per piece, repeated for each of its steps."""
    lengths = torch.tensor([piece.stop - piece.begin for piece in pieces])
    return torch.tensor(values).repeat_interleave(lengths)


def _on(indices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return indices.to(like.device)
