"""What an evaluation gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from tdcollect.evaluation.directory import read_directory, trajectory_path
from tdcollect.evaluation.records import Episode, ledger_digest
from tdcollect.evaluation.statistics import Summary, summarize

Replay = Callable[[int, "str | os.PathLike[str] | None"], tuple[Episode, TensorDict]]


class EvaluationResult:
    """The ledger of an evaluation, with what can be asked of it.

    Args:
        manifest: how it was made.
        episodes: its records.
        directory: where its files are, if anywhere.
        trajectories: the data of episodes that are held in memory, by index.
        replay: runs one episode again.

    Attributes:
        manifest: how it was made.
        episodes: its records, by index.
        directory: where its files are, or None.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        episodes: Sequence[Episode],
        directory: str | os.PathLike[str] | None = None,
        trajectories: Mapping[int, TensorDict] | None = None,
        replay: Replay | None = None,
    ):
        self.manifest = dict(manifest)
        self.episodes = sorted(episodes, key=lambda episode: episode.index)
        self.directory = None if directory is None else Path(directory)
        self._trajectories = dict(trajectories or {})
        self._replay = replay

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> EvaluationResult:
        """The result that a directory holds; it may be unfinished.

        Raises:
            FileNotFoundError: where the directory is none of an evaluation.
        """
        manifest, episodes = read_directory(directory)
        return cls(manifest, episodes, directory)

    @property
    def digest(self) -> str:
        """SHA-256 of the ledger: equal for equal episodes, however they were run."""
        return ledger_digest(self.episodes)

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

    def trajectory(self, index: int) -> TensorDict:
        """The data ``[L]`` of an episode that was kept.

        Raises:
            KeyError: where they were not.
        """
        if index in self._trajectories:
            return self._trajectories[index]
        path = None if self.directory is None else trajectory_path(self.directory, index)
        if path is None or not path.exists():
            raise KeyError(
                f"the data of episode {index} were not kept: evaluate with keep=True, or run it "
                "again with replay()"
            )
        return TensorDict.load_memmap(path)

    def replay(self, index: int, video: str | os.PathLike[str] | None = None) -> TensorDict:
        """Run an episode again, and check that it is the same to the bit.

        Args:
            index: its number.
            video: write a video of it here (``.mp4``); the env must be able to render to arrays.

        Returns:
            Its data ``[L]``.

        Raises:
            KeyError: for an episode that is not in the ledger.
            RuntimeError: where the digest is another, or where there is no policy to run, as in a
                result that was loaded.
        """
        recorded = {episode.index: episode for episode in self.episodes}.get(index)
        if recorded is None:
            raise KeyError(f"episode {index} is not among the {len(self.episodes)} of this ledger")
        if self._replay is None:
            raise RuntimeError(
                "a result that was loaded has no env and no policy to run; evaluate again with "
                "the same arguments and out=, which finds it complete, and replay that"
            )
        episode, data = self._replay(index, video)
        if episode.digest != recorded.digest:
            raise RuntimeError(
                f"episode {index} is not what it was: digest {episode.digest} and return "
                f"{episode.episode_return}, in the ledger {recorded.digest} and "
                f"{recorded.episode_return}; something that the manifest does not hold has changed"
            )
        return data

    def __repr__(self) -> str:
        failed = len(self.episodes) - len(self.returns)
        mean = f"{self.returns.mean():.6g}" if len(self.returns) else "none"
        return (
            f"{type(self).__name__}({self.manifest['env']['id']}, {len(self.episodes)} episodes, "
            f"{failed} failed, mean return {mean}, digest {self.digest[:16]})"
        )
