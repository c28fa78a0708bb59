"""The result of an evaluation: its records, statistics and data; replays, and exports."""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tdcollect import check
from tdcollect.display import html_escaped, listed_text, one_line
from tdcollect.evaluation import ledger
from tdcollect.evaluation.directory import (
    Directory,
    check_data,
    read_trajectory,
    write_trajectory,
)
from tdcollect.evaluation.episodes.data import first_difference
from tdcollect.evaluation.ledger import Episode, trajectory_name, trajectory_path
from tdcollect.evaluation.statistics import Summary, exact_mean, metrics_of, summarize
from tdcollect.evaluation.step_files import read_steps, read_witness
from tdcollect.files import check_no_links

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from torchrl.envs import EnvBase

    from tdcollect.evaluation.comparison import Comparison
    from tdcollect.evaluation.episodes.data import Finished
    from tdcollect.evaluation.replay import Replay, Replayed

# Entries of a manifest that may change an episode. The first differs if it is filmed.
_MATTERS = (
    *("env", "policy", "inference_batch_size", "inference_threads"),
    *(ledger.BATCHES, "device", "versions", "platform", ledger.PROCESS, "git"),
)


class EvaluationResult:
    """The ledger of an evaluation: its records, statistics, data and replays.

    Args:
        trajectories: the data of episodes that are held in memory, by index.
        replay: runs one episode again.
        witness: the first listed episode that completed, with its first steps.

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
        witness: Finished | None = None,
    ):
        self.manifest = dict(manifest)
        self.episodes = sorted(episodes, key=attrgetter("index"))
        self.directory = None if directory is None else Path(os.path.abspath(directory))
        self._trajectories = dict(trajectories or {})
        self.errors = dict(errors or {})
        self._replay, self._witness = replay, witness

    @property
    def witness(self) -> Finished | None:
        """The first listed episode that completed, with its first 1,000 steps; None without one."""
        if self._witness is None and self.directory is not None:
            self._witness = read_witness(self.directory)
        return self._witness

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
            ValueError: for files that were altered, with the file and the line; for an env to
                replay the episodes of another program.

        Warns:
            UserWarning: if data that were kept are missing.
        """
        files = ledger.read_directory(directory)
        result = cls(files.manifest, files.episodes, directory)
        there = map(trajectory_name, ledger.kept_trajectories(files.root))
        if gone := (files.kept or {}).keys() - {*there}:
            text = f"files of data of {directory} are missing, {min(gone)} first: use replay()"
            warnings.warn(f"{len(gone)} {text}", stacklevel=2)
        if env is not None:
            if "tdcollect" not in files.manifest["versions"]:
                raise ValueError(
                    f"expected an evaluation that tdcollect ran, got {directory}, which another "
                    "program wrote: that program alone can run its episodes again"
                )
            from tdcollect.evaluation.replay import run_again, settings_of

            how: Any = {"env_kwargs": env_kwargs, "backend": backend, "device": device}
            result._replay = partial(
                run_again,
                env,
                policy,
                lambda these: settings_of(files.manifest, [*map(result.record, these)], **how),
            )
        return result

    @cached_property
    def _listed(self) -> Mapping[str, str] | None:
        """The digests of the files with data; None if the evaluation is unfinished."""
        if self.directory is None or (last := ledger.read_last(self.directory)[1]) is None:
            return None
        return last.get(ledger.TRAJECTORIES, {})

    @property
    def missing(self) -> list[int]:
        """The indices of the episodes that the ledger lacks; empty if it is complete."""
        indices = ledger.asked_indices(self.manifest)
        if len(self.episodes) == len(indices):
            return []
        there = {episode.index for episode in self.episodes}
        return [index for index in indices if index not in there]

    @property
    def digest(self) -> str:
        """SHA-256 of the ledger: equal for equal episodes, however they were run."""
        return ledger.ledger_digest(self.episodes)

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
    def metrics(self) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """The values of each metric, as :attr:`returns`; NaN for an episode without one."""
        columns = metrics_of([episode for episode in self.episodes if episode.completed])
        return {name: np.array(values, np.float64) for name, values in columns.items()}

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

        No code in a file of data runs, whoever wrote it; writes to the tensors stay in memory.
        Where tensordict is not installed, they are NumPy arrays in nested dicts.

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
                f"the data of episode {index} were not kept: evaluate with keep_trajectories=True "
                "(--keep-trajectories), or run it again with replay()"
            )
        check_data(self.directory, record, self.manifest, self._listed)
        return read_trajectory(trajectory_path(self.directory, index))

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
        (again,) = self._replay([index], video)
        if not recorded.lost and again.unlike(recorded):
            there = {} if self.directory is None else read_steps(self.directory, [index])
            first = None
            if there and again.steps is not None:
                first = first_difference(there[index], again.steps)
            changed = again.changed(self.manifest, _MATTERS[video is not None :])
            raise RuntimeError(again.told(recorded, first) + changed)
        return again

    def film(self, which: str) -> list[Path]:
        """Run episodes again as :meth:`replay` does, and film them; the env must render to arrays.

        The films go to ``films/`` in the directory, with the data of episodes whose data were not
        kept: `tdcollect view` makes a page of each.

        Args:
            which: ``"worst:3"`` for the three lowest returns; ``"failed"`` for the episodes whose
                env raised, or said that they were no success; or indices, ``"1,5"``. The film of
                an episode whose env raises ends there.

        Returns:
            The films; one whose env raised before there was a picture has none.

        Raises:
            KeyError, RuntimeError: as :meth:`replay`.
            ValueError: for anything else to film, or for a result without a directory.
        """
        indices = ledger.indices_of(which, self.episodes)
        if self.directory is None:
            raise ValueError(
                "expected a result with a directory, which the films go to, got one without: "
                "evaluate with output_dir, or film an episode with replay(index, video=FILE)"
            )
        records = [self.record(index) for index in indices]
        return [path for record in records if (path := self._film(self.directory, record)).exists()]

    def _film(self, root: Path, record: Episode) -> Path:
        from tdcollect.evaluation.replay import RaisedAgainError

        path = ledger.film_path(root, record.index)
        try:
            data = self.replay(record.index, path)
        except RaisedAgainError:
            if record.status != ledger.FAILED:
                raise
            return path
        if not trajectory_path(root, record.index).exists():
            file = trajectory_path(root, record.index, ledger.FILMS)
            check_no_links(file.parent, file.name)
            write_trajectory(file, data)
        return path

    def __repr__(self) -> str:
        returns = self.returns
        lost = sum(episode.lost for episode in self.episodes)
        failed = f"{len(self.episodes) - len(returns) - lost} failed"
        mean = f"{exact_mean(returns):.6g}" if len(returns) else "none"
        counts = [f"{len(self.episodes)} episodes", failed, *[f"{lost} lost"] * bool(lost)]
        more = (f"mean return {mean}", f"digest {self.digest[:16]}")
        return one_line(self, self.manifest["env"]["id"], *counts, *more)

    def _repr_html_(self) -> str:
        return f"<p>{html_escaped(repr(self))}</p>\n{self.summary()._repr_html_()}"


def finish(directory: Directory, result: EvaluationResult, recheck: bool = True) -> None:
    """Sort the ledger, and write all that follows from it; the last file marks it as finished.

    The same result gives the same bytes, whoever ran its episodes. Without ``recheck``, no episode
    ran once more, which the last file then says.
    """
    note = {} if recheck else {ledger.RECHECK: False}
    directory.finish(result.episodes)
    if directory.shard is not None:
        directory.finish_shard(**note)
        return
    from tdcollect.pages.evaluation import write_report

    summary = result.summary()
    write_report(directory.path, directory.manifest, result.episodes, summary)
    directory.write_results(**note, **summary.to_dict())


def export(
    results: EvaluationResult | Comparison,
    format: Literal["html"],
    path: str | os.PathLike[str],
) -> Path:
    """Write results for readers; the same results give the same bytes.

    Args:
        results: what :func:`tdcollect.evaluate` or :func:`tdcollect.compare` returns.
        format: ``"html"``: a page that embeds its figures and needs no network, and the figures as
            SVG under ``figures/``.
        path: the directory of the page.

    Returns:
        The path of the page.

    Raises:
        ValueError: for another format.
        TypeError: for other results.
    """
    check.one_of(("html",), format=format)
    from tdcollect.evaluation.comparison import Comparison
    from tdcollect.pages.evaluation import write_comparison_report, write_report

    if isinstance(results, Comparison):
        return write_comparison_report(path, results)[-1]
    if not isinstance(results, EvaluationResult):
        raise TypeError(
            "expected the result of an evaluation, or a comparison, got "
            f"{type(results).__name__}; pass what evaluate() or compare() returns"
        )
    return write_report(path, results.manifest, results.episodes, results.summary())[-1]
