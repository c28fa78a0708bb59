"""One episode of an evaluation, run again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tdcollect import keys
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.film import filmed
from tdcollect.evaluation.ledger.manifest import describe
from tdcollect.evaluation.ledger.records import Episode


class Replayed(NamedTuple):
    """An episode that ran again.

    Attributes:
        record: of this run.
        data: its steps ``[L]``.
        manifest: how it was run this time.
    """

    record: Episode
    data: TensorDict
    manifest: dict[str, Any]


Replay = Callable[[int, "str | os.PathLike[str] | None"], Replayed]


def replayer(
    env: str | Callable[..., Any] | EnvBase,
    policy: Any,
    env_kwargs: dict[str, Any] | None,
    settings: Mapping[str, Any],
) -> Replay:
    """What runs an episode again, given its index and where a video of it goes, if anywhere.

    Args:
        env: as :func:`tdcollect.evaluate` takes it; and the policy.
        policy: likewise.
        env_kwargs: for the env's constructor.
        settings: the other arguments of :class:`tdcollect.EvaluationCollector`.
    """

    def replay(index: int, video: str | os.PathLike[str] | None) -> Replayed:
        with (
            filmed(env, env_kwargs, video) as shown,
            EvaluationCollector(shown, policy, [index], env_kwargs=env_kwargs, **settings) as again,
        ):
            manifest = describe(again, env_kwargs or {})
            (finished,) = again.run(keep_trajectories=True)
        if finished.data is None:
            raise RuntimeError(
                f"the env raised in episode {index} again, at every try: "
                f"{type(again.error).__name__}: {again.error}"
            ) from again.error
        return Replayed(finished.record, finished.data, manifest)

    return replay


def unequal(recorded: Episode, again: Replayed, format: int) -> list[str]:
    """Compare a record with that of the same episode run again, entry by entry.

    How often its env raised is not compared: that is of the run, and not of the episode.

    Returns:
        The differences, a phrase each.
    """
    record = replace(again.record, restarts=recorded.restarts)
    if format == 1:  # in which returns are sums of rewards in float32
        rewards = again.data[keys.NEXT, keys.REWARD].flatten().tolist()
        record = replace(record, episode_return=math.fsum(rewards))
    was, now = (json.loads(of.to_json()) for of in (recorded, record))
    return [
        f"{name} is {now[name]!r}, in the ledger {was[name]!r}"
        for name in was
        if repr(was[name]) != repr(now[name])  # NaN is NaN
    ]


def settings_of(manifest: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, Any]:
    """The settings that an evaluation's episodes were run with, from what it wrote."""
    return {
        "seed": manifest["seeds"]["root"],
        "env_seeds": {episode.index: episode.env_seed for episode in episodes}.__getitem__,
        "max_episode_steps": manifest["max_episode_steps"],
        "inference_batch_size": manifest["inference_batch_size"],
        # Protocol 1 had neither: it ran with the threads and in the modes that it found.
        "inference_threads": manifest.get("inference_threads", torch.get_num_threads()),
        "eval_mode": manifest["policy"].get("mode") == "eval",
        "exploration_type": ExplorationType[manifest["policy"]["exploration"].upper()],
    }
