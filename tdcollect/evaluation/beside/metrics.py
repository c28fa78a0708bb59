"""The metrics of one evaluation, under the names that TorchRL's evaluator gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tdcollect import keys
from tdcollect.evaluation.beside.curve import Point
from tdcollect.trajectories import split_trajectories


def metrics_of(
    point: Point,
    returns: np.ndarray[Any, np.dtype[np.float64]],
    frames_per_second: float,
    custom: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    """Return the metrics by name, each after ``prefix/``.

    Args:
        point: the point of the curve.
        returns: of the completed episodes.
        frames_per_second: of the run.
        custom: further metrics, which replace others of their name.
        prefix: the first part of each name.
    """
    # Means of returns that are not finite are what arithmetic makes of them.
    with np.errstate(invalid="ignore"):
        mean = point.mean if point.mean is not None or not len(returns) else float(returns.mean())
    found: dict[str, Any] = {
        "reward": _or_nan(mean),
        "reward_std": _std(returns),
        "reward_low": _or_nan(point.low),
        "reward_high": _or_nan(point.high),
        "num_episodes": len(returns),
        "failed": point.failed,
        "episode_length": _or_nan(point.length),
        "fps": frames_per_second,
        "step": point.step,
        **custom,
    }
    return {f"{prefix}/{name}": value for name, value in found.items()}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _std(returns: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the standard deviation with ``count - 1``; 0 for one return, as TorchRL does."""
    if len(returns) < 2:
        return 0.0 if len(returns) else math.nan
    return float(torch.from_numpy(returns).std())


def custom_metrics(
    metrics_fn: Callable[[TensorDict], Any], episodes: Mapping[int, TensorDict]
) -> dict[str, Any]:
    """Return the user's metrics of the episodes' data, by name.

    Args:
        metrics_fn: called with the padded episodes.
        episodes: the data ``[L]`` of the completed episodes, by index.

    Raises:
        TypeError: if it does not return a dict of names.
    """
    if not episodes:
        return {}
    found = metrics_fn(padded(episodes))
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"expected metrics_fn to return a dict from names to numbers, got {found!r:.200}"
        )
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


def padded(episodes: Mapping[int, TensorDict]) -> TensorDict:
    """Return the episodes as a padded batch ``[B, L]``, in the order of their indices.

    ``("collector", "mask")`` is true where there is a step, and ``("collector", "traj_ids")`` is
    the episode's index.
    """
    rows = []
    for index in sorted(episodes):
        data = episodes[index]
        rows.append(data.copy())
        rows[-1].set(keys.TRAJ_IDS, torch.full(data.batch_size, index))
    return split_trajectories(torch.cat(rows))
