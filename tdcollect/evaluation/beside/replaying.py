"""Episodes of an evaluation beside training, run again in the process of the caller."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchrl.envs import EnvBase

from tdcollect.evaluation.beside.messages import Request
from tdcollect.evaluation.replay import Replay, Replayed, replayer
from tdcollect.evaluation.weights import Weights, set_policy, set_transforms, unpickled_weights
from tdcollect.evaluation.workers.job import unpickled


def replay_of(job: bytes, request: Request) -> Replay:
    """Return a function that runs an episode of a request again, with the weights that it had.

    Env and policy are made at each call.

    Args:
        job: the subject of the evaluation, pickled.
        request: its weights.
    """

    def replay(index: int, video: str | os.PathLike[str] | None) -> Replayed:
        parts = unpickled(job)
        if request.policy is not None:
            parts = replace(parts, policy=pickle.loads(request.policy))
        own, weights = unpickled_weights(request.weights)
        policy = parts.made_policy()
        if own is not None:
            set_policy(policy, own)
        env = _with_statistics(parts.env, weights) if weights else parts.env
        again = replayer(env, policy, lambda i: replace(parts.settings, episodes=[i]))
        return again(index, video)

    return replay


def _with_statistics(env: Any, weights: Mapping[str, Weights]) -> Any:
    if isinstance(env, EnvBase):
        set_transforms(env, weights)
        return env
    make: Callable[..., Any] = env

    def made(**kwargs: Any) -> Any:
        one = make(**kwargs)
        set_transforms(one, weights)
        return one

    return made
