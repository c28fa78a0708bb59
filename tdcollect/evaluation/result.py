"""The result of an evaluation."""

from __future__ import annotations

import json
import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect.display import listed_text, one_line
from tdcollect.evaluation.ledger.manifest import differences, settings_of
from tdcollect.evaluation.ledger.reading import (
    kept_digests,
    kept_trajectories,
    number_of_episodes,
    read_data,
    read_directory,
    trajectory_name,
    trajectory_path,
)
from tdcollect.evaluation.ledger.records import Episode, ledger_digest
from tdcollect.evaluation.replay import Replay, Replayed, replayer, unequal
from tdcollect.evaluation.reports.statistics import Summary, summarize

# Entries of a manifest that may change an episode. The first differs if it is filmed.
_MATTERS = (
    "env",
    "policy",
    "inference_batch_size",
    "inference_threads",
    "device",
    "versions",
    "platform",
    "git",
)


class EvaluationResult:
    """The ledger of an evaluation: its records, statistics, data and replays.

    Args:
        manifest: the manifest of the evaluation.
        episodes: its records.
        directory: the directory of its files, if it has one.
        trajectories: the data of episodes that are held in memory, by index.
        replay: runs one episode again.
        errors: the last error of failed episodes, by index.

    Attributes:
        manifest: the manifest of the evaluation.
        episodes: its records, by index.
        directory: the directory of its files, or None.
        errors: the last error of each episode that failed in this run, by index, as text; the end
            of the worker of one that was lost. No file keeps them: a result that was loaded has
            none.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        episodes: Sequence[Episode],
        directory: str | os.PathLike[str] | None = None,
        trajectories: Mapping[int, TensorDict] | None = None,
        replay: Replay | None = None,
        errors: Mapping[int, str] | None = None,
    ):
        self.manifest = dict(manifest)
        self.episodes = sorted(episodes, key=lambda episode: episode.index)
        self.directory = None if directory is None else Path(os.path.abspath(directory))
        self._trajectories = dict(trajectories or {})
        self.errors = dict(errors or {})
        self._replay = replay

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        env: str | Callable[..., Any] | EnvBase | None = None,
        policy: Any = None,
        *,
        env_kwargs: dict[str, Any] | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> EvaluationResult:
        """Read the result that a directory holds; it may be unfinished.

        Given an env, it can replay its episodes, with this policy (None for random actions) and
        the settings of the manifest.

        Args:
            directory: the ``output_dir`` of the evaluation.
            env: as :func:`tdcollect.evaluate` took it, and so the arguments after it.
            policy: whose episodes these are.
            env_kwargs: for the env's constructor.
            backend: of :func:`tdcollect.make_env`.
            device: the device that the policy runs on.

        Raises:
            FileNotFoundError: if the directory holds no evaluation.
            ValueError: for files that were altered, with the file and the line.

        Warns:
            UserWarning: if data that were kept are missing.
        """
        manifest, episodes = read_directory(directory)
        result = cls(manifest, episodes, directory)
        gone = (result._listed or {}).keys() - {
            *map(trajectory_name, kept_trajectories(Path(directory)))
        }
        if gone:
            text = f"folders of data of {directory} are missing, {min(gone)} first: use replay()"
            warnings.warn(f"{len(gone)} {text}", stacklevel=2)
        if env is not None:
            how = {"env_kwargs": env_kwargs, "backend": backend, "device": device}
            result._replay = replayer(
                env, policy, lambda index: settings_of(manifest, result.record(index), **how)
            )
        return result

    @cached_property
    def _listed(self) -> Mapping[str, str] | None:
        """The digests of the folders with data; None if the evaluation is unfinished."""
        return None if self.directory is None else kept_digests(self.directory)

    @property
    def missing(self) -> list[int]:
        """The indices of the episodes that the ledger lacks; empty if it is complete."""
        if len(self.episodes) == number_of_episodes(self.manifest):
            return []
        episodes = self.manifest["episodes"]
        there = {episode.index for episode in self.episodes}
        asked = range(episodes) if isinstance(episodes, int) else episodes
        return [index for index in asked if index not in there]

    @property
    def digest(self) -> str:
        """SHA-256 of the ledger: equal for equal episodes, however they were run."""
        return ledger_digest(self.episodes)

    @property
    def returns(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The returns of the episodes that completed, float64, by index."""
        return np.array([e.episode_return for e in self.episodes if e.completed], np.float64)

    @property
    def group_returns(self) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """The returns of each reward entry, as :attr:`returns`; empty if the only one is plain."""
        completed = [e.group_returns or {} for e in self.episodes if e.completed]
        names = completed[0] if completed else {}
        return {name: np.array([e[name] for e in completed], np.float64) for name in names}

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The lengths of the episodes that completed, int64, by index."""
        return np.array([e.length for e in self.episodes if e.completed], np.int64)

    def summary(self, **settings: Any) -> Summary:
        """Statistics of the ledger; see :func:`tdcollect.evaluation.summarize`."""
        return summarize(self.episodes, **settings)

    def record(self, index: int) -> Episode:
        """Return the record of an episode.

        Raises:
            KeyError: if the ledger has no such episode.
            TypeError: for an index that is no int.
        """
        if not isinstance(index, Integral):
            raise TypeError(f"expected the index of an episode, an int from 0, got {index!r}")
        at = bisect_left(self.episodes, index, key=lambda episode: episode.index)
        if at == len(self.episodes) or self.episodes[at].index != index:
            there = listed_text([episode.index for episode in self.episodes]) or "none"
            raise KeyError(
                f"episode {index} is not among the {len(self.episodes)} of this ledger: {there}"
            )
        return self.episodes[at]

    def trajectory(self, index: int) -> TensorDict:
        """Return the data ``[L]`` that were kept of an episode.

        Data in a directory are mapped from its files. No code in them runs, whoever wrote them;
        writes to the tensors stay in memory.

        Raises:
            KeyError: if they were not kept.
            ValueError: for files that are missing or altered, whose data are not those of the
                record, or that hold anything but plain tensors.
        """
        if index in self._trajectories:
            return self._trajectories[index]
        record = self.record(index)
        if self.directory is None or not (
            trajectory_name(index) in (self._listed or {})
            or trajectory_path(self.directory, index).exists()
        ):
            raise KeyError(
                f"the data of episode {index} were not kept: evaluate with keep_trajectories=True, "
                "or run it again with replay()"
            )
        return read_data(self.directory, record, self.manifest, self._listed)

    def replay(self, index: int, video: str | os.PathLike[str] | None = None) -> TensorDict:
        """Run an episode again, and check it against its record, to the bit.

        Args:
            index: the episode's index.
            video: write a video of it to this file (``.mp4``); the env must render to arrays.

        Returns:
            Its data ``[L]``.

        Raises:
            KeyError: if the ledger has no such episode.
            RuntimeError: if the episode differs from its record, or if there is no policy to run,
                as in a result that was loaded without one.
        """
        return self.replayed(index, video).data

    def replayed(self, index: int, video: str | os.PathLike[str] | None = None) -> Replayed:
        """Run an episode again as :meth:`replay` does; return its new record and manifest too."""
        recorded = self.record(index)
        if self._replay is None:
            raise RuntimeError(
                "a result that was loaded has no env and no policy to run: give them to "
                "EvaluationResult.load(directory, env, policy)"
            )
        again = self._replay(index, video)
        unlike = unequal(recorded, again)
        if unlike and not recorded.lost:  # of which the record says nothing
            raise RuntimeError(self._unequal(unlike, recorded, again, filmed=video is not None))
        return again

    def _unequal(
        self, unlike: Sequence[str], recorded: Episode, again: Replayed, filmed: bool
    ) -> str:
        """Say why an episode differs from its record, as far as the manifests tell."""
        differs = f"episode {recorded.index} is not what the ledger says: {'; '.join(unlike)}. "
        if recorded.digest == again.record.digest:
            return differs + "Its data are the same to the bit: the ledger was altered"
        then = {key: self.manifest.get(key) for key in _MATTERS[filmed:]}
        now = {key: again.manifest[key] for key in _MATTERS[filmed:]}
        changed = differences(then, json.loads(json.dumps(now)))
        why = "; ".join(f"{where} was {a!r} and is {b!r}" for where, a, b in changed)
        return differs + f"What has changed: {why or 'something that the manifest does not hold'}"

    def __repr__(self) -> str:
        returns = self.returns
        lost = sum(episode.lost for episode in self.episodes)
        failed = f"{len(self.episodes) - len(returns) - lost} failed"
        mean = f"{returns.mean():.6g}" if len(returns) else "none"
        counts = [f"{len(self.episodes)} episodes", failed, f"mean return {mean}"]
        counts[2:2] = [f"{lost} lost"] * bool(lost)
        return one_line(self, self.manifest["env"]["id"], *counts, f"digest {self.digest[:16]}")
