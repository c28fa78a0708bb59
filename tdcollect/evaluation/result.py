"""What an evaluation gives."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect.display import one_line
from tdcollect.evaluation.ledger.manifest import differences, settings_of
from tdcollect.evaluation.ledger.reading import (
    number_of_episodes,
    read_data,
    read_directory,
    trajectory_path,
)
from tdcollect.evaluation.ledger.records import FORMAT, Episode, ledger_digest
from tdcollect.evaluation.replay import Replay, Replayed, replayer, unequal
from tdcollect.evaluation.reports.statistics import Summary, summarize

# Of a manifest: what may change what an episode is. The env's id changes where it is filmed.
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
    """The ledger of an evaluation, with what can be asked of it.

    Args:
        manifest: how it was made.
        episodes: its records.
        directory: where its files are, if anywhere.
        trajectories: the data of episodes that are held in memory, by index.
        replay: runs one episode again.
        errors: the last error of failed episodes, by index.

    Attributes:
        manifest: how it was made.
        episodes: its records, by index.
        directory: where its files are, or None.
        errors: the last error of each episode that failed in this run, by index, as text. No file
            keeps them: a result that was loaded has none.
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
        self.directory = None if directory is None else Path(directory)
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
        """The result that a directory holds; it may be unfinished.

        With an env, it can replay its episodes: with this policy, None for random actions, and
        the settings that are in the directory.

        Args:
            directory: the ``output_dir`` of the evaluation.
            env: as :func:`tdcollect.evaluate` took it, and so the arguments after it.
            policy: whose episodes these are.
            env_kwargs: for the env's constructor.
            backend: of :func:`tdcollect.make_env`.
            device: where the policy runs.

        Raises:
            FileNotFoundError: where the directory is none of an evaluation.
        """
        manifest, episodes = read_directory(directory)
        result = cls(manifest, episodes, directory)
        if env is not None:
            how = {"env_kwargs": env_kwargs, "backend": backend, "device": device}
            result._replay = replayer(
                env, policy, lambda index: settings_of(manifest, result.record(index), **how)
            )
        return result

    @property
    def missing(self) -> list[int]:
        """The numbers of the episodes that are not in the ledger: it is unfinished."""
        if len(self.episodes) == number_of_episodes(self.manifest):
            return []
        numbers = self.manifest["episodes"]
        there = {episode.index for episode in self.episodes}
        asked = range(numbers) if isinstance(numbers, int) else numbers
        return [number for number in asked if number not in there]

    @property
    def digest(self) -> str:
        """SHA-256 of the ledger: equal for equal episodes, however they were run."""
        return ledger_digest(self.episodes, self.manifest.get("format", FORMAT))

    @property
    def returns(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The returns of the episodes that completed, float64, by index."""
        return np.array([e.episode_return for e in self.episodes if e.completed], np.float64)

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The lengths of the episodes that completed, int64, by index."""
        return np.array([e.length for e in self.episodes if e.completed], np.int64)

    def summary(self, **settings: Any) -> Summary:
        """Statistics of the ledger; see :func:`tdcollect.evaluation.summarize`."""
        return summarize(self.episodes, **settings)

    def record(self, index: int) -> Episode:
        """The record of an episode.

        Raises:
            KeyError: for an episode that is not in the ledger.
        """
        at = bisect_left(self.episodes, index, key=lambda episode: episode.index)
        if at == len(self.episodes) or self.episodes[at].index != index:
            raise KeyError(f"episode {index} is not among the {len(self.episodes)} of this ledger")
        return self.episodes[at]

    def trajectory(self, index: int) -> TensorDict:
        """The data ``[L]`` of an episode that was kept.

        Those in a directory are mapped from its files. No code in them runs, whoever wrote them;
        what is written to them stays in memory.

        Raises:
            KeyError: where they were not.
            ValueError: for files that hold other data than the ledger tells of, or anything but
                plain tensors.
        """
        if index in self._trajectories:
            return self._trajectories[index]
        record = self.record(index)
        if self.directory is None or not trajectory_path(self.directory, index).exists():
            raise KeyError(
                f"the data of episode {index} were not kept: evaluate with keep_trajectories=True, "
                "or run it again with replay()"
            )
        return read_data(self.directory, record, self.manifest)

    def replay(self, index: int, video: str | os.PathLike[str] | None = None) -> TensorDict:
        """Run an episode again, and check that all its record says holds, to the bit.

        Args:
            index: its number.
            video: write a video of it here (``.mp4``); the env must be able to render to arrays.

        Returns:
            Its data ``[L]``.

        Raises:
            KeyError: for an episode that is not in the ledger.
            RuntimeError: where the episode differs from its record, or where there is no policy to
                run, as in a result that was loaded.
        """
        return self.replayed(index, video).data

    def replayed(self, index: int, video: str | os.PathLike[str] | None = None) -> Replayed:
        """Run an episode again as :meth:`replay` does; gives its new record and manifest too."""
        recorded = self.record(index)
        if self._replay is None:
            raise RuntimeError(
                "a result that was loaded has no env and no policy to run: give them to "
                "EvaluationResult.load(directory, env, policy)"
            )
        again = self._replay(index, video)
        unlike = unequal(recorded, again, self.manifest["format"])
        if unlike:
            raise RuntimeError(self._unequal(unlike, recorded, again, filmed=video is not None))
        return again

    def _unequal(
        self, unlike: Sequence[str], recorded: Episode, again: Replayed, filmed: bool
    ) -> str:
        """Tell why an episode differs from its record, as far as the manifests say."""
        told = f"episode {recorded.index} is not what the ledger says: {'; '.join(unlike)}. "
        if recorded.digest == again.record.digest:
            return told + "Its data are the same to the bit: the ledger was altered"
        then = {key: self.manifest.get(key) for key in _MATTERS[filmed:]}
        now = {key: again.manifest[key] for key in _MATTERS[filmed:]}
        changed = differences(then, json.loads(json.dumps(now)))
        if self.manifest["format"] == 1:  # which does not hold all that is held now
            changed = [entry for entry in changed if entry[1] is not None]
        why = "; ".join(f"{where} was {a!r} and is {b!r}" for where, a, b in changed)
        return told + f"What has changed: {why or 'something that the manifest does not hold'}"

    def __repr__(self) -> str:
        returns = self.returns
        failed = len(self.episodes) - len(returns)
        mean = f"{returns.mean():.6g}" if len(returns) else "none"
        told = (f"{len(self.episodes)} episodes", f"{failed} failed", f"mean return {mean}")
        return one_line(self, self.manifest["env"]["id"], *told, f"digest {self.digest[:16]}")
