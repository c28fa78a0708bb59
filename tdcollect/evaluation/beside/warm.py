"""An env and a policy kept from one evaluation to the next, in the process that evaluates."""

from __future__ import annotations

import pickle
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect.evaluation.beside.job import Job, check_recorders, make_policy
from tdcollect.evaluation.beside.messages import Request
from tdcollect.evaluation.beside.weights import POLICY, Weights, set_policy, set_transforms
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.ledger.directory import Directory
from tdcollect.evaluation.ledger.manifest import describe
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.reports.report import write_report
from tdcollect.evaluation.result import EvaluationResult


class Ran(NamedTuple):
    """An evaluation that has run.

    Attributes:
        result: its records and statistics.
        policy: the policy, with the weights that it had.
        episodes: the data ``[L]`` of its completed episodes, by index, if they are kept.
        frames_per_second: steps of episodes per second; 0 if all had been run before.
    """

    result: EvaluationResult
    policy: Any
    episodes: dict[int, TensorDict]
    frames_per_second: float


class Warm:
    """Runs the evaluations of a job one after the other, in this process.

    Env, policy and the verdict of the env's probe are kept.

    Args:
        job: the subject of the evaluations.

    Attributes:
        applied: True once the weights of the latest request have been set.
    """

    def __init__(self, job: Job):
        self._job = job
        self._collector: EvaluationCollector | None = None
        self._policy: bytes | None = None  # the latest policy that came with a request
        self.applied = False

    def manifest(self, request: Request) -> dict[str, Any]:
        """Set the weights of a request; returns the manifest of its evaluation.

        Raises:
            TypeError, ValueError: for weights of another model, and for an env or a policy that
                cannot be evaluated.
            NotReproducibleError: if the env does not give the same episode for the same seeds.
        """
        self.applied = False
        collector = self._opened(request.policy)
        weights: dict[str, Weights] = {
            name: pickle.loads(blob) for name, blob in request.weights.items()
        }
        own = weights.pop(POLICY, None)

        def prepare(env: EnvBase) -> None:
            if weights:
                set_transforms(env, weights)

        collector.prepare_envs(prepare)
        if own is not None:
            set_policy(collector.policy, own)
        self.applied = True
        return describe(collector)

    def run(self, manifest: dict[str, Any], output_dir: Path | None) -> Ran:
        """Run the evaluation that :meth:`manifest` has prepared.

        Args:
            manifest: its manifest.
            output_dir: the directory of its files, or None.

        Raises:
            NotReproducibleError: as :func:`tdcollect.evaluate` does.
            ValueError: for a directory of another evaluation.
        """
        assert self._collector is not None
        keep = self._job.metrics_fn is not None
        try:
            return _run(self._collector, manifest, output_dir, keep)
        except BaseException:
            self.close()  # its envs may be anywhere
            raise

    def _opened(self, policy: bytes | None) -> EvaluationCollector:
        if policy is not None and policy != self._policy:
            self.close()
            self._job = self._job._replace(policy=pickle.loads(policy))
            self._policy = policy
        if self._collector is None:
            job = self._job
            self._collector = EvaluationCollector.from_settings(
                job.env, make_policy(job), job.settings
            )
            try:
                if job.dump_video:
                    check_recorders(self._collector.env)
            except ValueError:
                self.close()
                raise
        return self._collector

    def close(self) -> None:
        """Close the env; the next evaluation makes a new one."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None


def _run(
    collector: EvaluationCollector, manifest: dict[str, Any], output_dir: Path | None, keep: bool
) -> Ran:
    """Run an evaluation to its result and its files, as :func:`tdcollect.evaluate` does."""
    with ExitStack() as stack:
        ended: list[Episode] = []
        directory = None
        if output_dir is not None:
            directory = Directory(output_dir, manifest)
            stack.callback(directory.close)
            ended = list(directory.episodes)
        there = {episode.index: episode for episode in ended}
        episodes: dict[int, TensorDict] = {}
        asked = collector.settings.episode_indices
        collector.episode_indices = [index for index in asked if index not in there]
        ran, steps = len(collector.episode_indices), 0
        began, start = time.time(), time.perf_counter()
        try:
            for record, data in collector.run(keep):
                ended.append(record)
                steps += record.length or 0
                if directory is not None:
                    directory.add(record)
                if data is not None:
                    episodes[record.index] = data
        except BaseException as error:
            if directory is not None:
                directory.give_up(error)
            raise
        seconds = time.perf_counter() - start
        errors = dict(collector.errors)
        if keep and there:
            _run_again(collector, there, episodes)
        result = EvaluationResult(manifest, ended, output_dir, errors=errors)
        if directory is not None:
            summary = result.summary()
            directory.finish(result.episodes)
            files = write_report(directory.path, manifest, result.episodes, summary)
            directory.write_results(summary.to_dict(), files)
            if ran:
                directory.note_run(began, ran, {"env": repr(collector.base), "threads": 1})
        return Ran(result, collector.policy, episodes, steps / seconds if ran else 0.0)


def _run_again(
    collector: EvaluationCollector, there: dict[int, Episode], episodes: dict[int, TensorDict]
) -> None:
    """Run episodes of the ledger again for their data, which no file keeps."""
    collector.episode_indices = [index for index, record in there.items() if record.completed]
    for record, data in collector.run(keep_trajectories=True):
        if record.digest != there[record.index].digest or data is None:
            raise NotReproducibleError(
                f"episode {record.index} is not what the ledger says, now that it runs again for "
                "metrics_fn: env or policy do not give the same episode for the same seeds"
            )
        episodes[record.index] = data
