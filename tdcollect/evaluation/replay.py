"""One episode of an evaluation, run again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.film import filmed
from tdcollect.evaluation.ledger.manifest import describe
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.settings import EvaluationSettings


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
    settings_of: Callable[[int], EvaluationSettings],
) -> Replay:
    """Return a function that runs an episode again, given its index and where its video goes.

    Args:
        env: as :func:`tdcollect.evaluate` takes it; and the policy.
        policy: likewise.
        settings_of: returns the settings of one episode, given its index.
    """

    def replay(index: int, video: str | os.PathLike[str] | None) -> Replayed:
        settings = settings_of(index)
        with (
            filmed(env, settings.env_kwargs, video) as filmed_env,
            EvaluationCollector.from_settings(filmed_env, policy, settings) as again,
        ):
            manifest = describe(again)
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
