"""Trajectories of a batch: split, join, sum, reassemble. Free functions on TensorDicts."""

from tdcollect.trajectories.assemble import TrajectoryAssembler
from tdcollect.trajectories.index import TrajectoryIndex
from tdcollect.trajectories.split import (
    discounted_returns,
    first,
    flatten_time,
    join_trajectories,
    last,
    lengths,
    returns,
    segment_sum,
    unflatten_time,
    unpad,
)
from tdcollect.trajectories.split import split_trajectories as split_trajectories

__all__ = [
    "TrajectoryAssembler",
    "TrajectoryIndex",
    "discounted_returns",
    "first",
    "flatten_time",
    "join_trajectories",
    "last",
    "lengths",
    "returns",
    "segment_sum",
    "unflatten_time",
    "unpad",
]
