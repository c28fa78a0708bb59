"""Trajectories of a batch: split, join, sum, reassemble. Free functions on TensorDicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.trajectories.assemble import TrajectoryAssembler as TrajectoryAssembler
    from tdcollect.trajectories.split import TrajectoryIndex as TrajectoryIndex
    from tdcollect.trajectories.split import discounted_returns as discounted_returns
    from tdcollect.trajectories.split import first as first
    from tdcollect.trajectories.split import flatten_time as flatten_time
    from tdcollect.trajectories.split import join_trajectories as join_trajectories
    from tdcollect.trajectories.split import last as last
    from tdcollect.trajectories.split import lengths as lengths
    from tdcollect.trajectories.split import returns as returns
    from tdcollect.trajectories.split import segment_sum as segment_sum
    from tdcollect.trajectories.split import split_trajectories as split_trajectories
    from tdcollect.trajectories.split import unflatten_time as unflatten_time
    from tdcollect.trajectories.split import unpad as unpad

__getattr__, __dir__, __all__ = lazy(__name__)
