"""Collecting by count: what may be asked for, and whole episodes as columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any

import torch

from tdcollect.collect.episodes import Block, EpisodeLoop, EpisodeWatch, Start
from tdcollect.collect.fast.devices import Placement
from tdcollect.collect.fast.loop import ArrayEnv, NewIds, forgotten_entries
from tdcollect.collect.fast.policy import Program
from tdcollect.collect.fast.transforms import base_of
from tdcollect.collect.gather import gather
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.collect.tensordict_env import TensorDictEnv
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.trajectories.split import LAYOUTS

_BLOCK_STEPS = 64


def check_count(
    frames: int | None, episodes: int | None, max_episode_steps: int | None, layout: str
) -> int:
    """The count that was asked for."""
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
    """Steps a slot for so many frames; warns where these are more."""
    steps = -(-frames // slots)
    if frames % slots:
        warnings.warn(
            f"{frames} frames are no multiple of the {slots} slots: collecting {steps * slots}, "
            f"{steps} a slot",
            stacklevel=3,
        )
    return steps


def whole_episodes(
    env: ArrayEnv | TensorDictEnv,
    lower: Callable[[StepDict], Program],
    episodes: int,
    new_ids: NewIds,
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
        env: the env on rows.
        lower: gives the policy on rows, for the entries that it first finds.
        episodes: how many.
        new_ids: gives so many new trajectory ids.
        max_episode_steps: episodes are truncated at this length.
        left_out: entries that the columns do without.
        place: moves tensors between devices; None where all is on the CPU.
        first_seeds: one a slot, for the first reset.
        options: gymnasium's reset options, for each reset.
        gradients: keep the graph through the policy.
        noted: is handed the blocks, and hands them on.
        watch: is told of each step; None for nobody.

    Returns:
        The entries, ``[sum of lengths, ...]`` each: episodes in the order of starting.
    """
    program: Program | None = None

    def act(rows: StepDict, slots: list[int]) -> None:
        nonlocal program
        program = program or lower(rows)
        if place is None:
            program(rows)
        else:
            place.run(program, rows)

    def remembered(rows: StepDict) -> list[Key]:
        assert program is not None
        return forgotten_entries(rows, env, program)

    def again(start: Start, error: Exception) -> Start:
        return Start(start.number, None, int(new_ids(1)))

    base = base_of(env.whole)
    restarts = isinstance(base, GymnasiumEnv) and base.restarts is not None
    loop = EpisodeLoop(
        env,
        act,
        remembered,
        (Start(number, None, int(new_ids(1))) for number in range(episodes)),
        steps=_BLOCK_STEPS,
        max_episode_steps=max_episode_steps,
        left_out=left_out,
        place=place,
        first_seeds=first_seeds,
        options=options,
        whole=gradients,
        failed=again if restarts else None,
        watch=watch,
    )

    def checked() -> Iterator[Block]:
        for block in loop:
            if program is not None:
                program.check()
            yield block

    return gather(noted(checked()), env.batch_size)
