"""The process that evaluates beside a training: requests in, answers out."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from tdcollect import keys
from tdcollect.evaluation.curve import Best, Folder, Kind, Point, check_report, point_of
from tdcollect.evaluation.evaluate import Recording, run
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import exact_mean
from tdcollect.evaluation.workers.dispatcher import Evaluation
from tdcollect.evaluation.workers.local import LocalWorkers, Workers
from tdcollect.evaluation.workers.worker import POLICY, set_policy, template, unpickled
from tdcollect.processes.channel import Described, described, packed
from tdcollect.processes.child import leave
from tdcollect.surroundings import Surroundings
from tdcollect.trajectories import split_trajectories


class Setup(NamedTuple):
    """The first message: arguments of the :class:`~tdcollect.Evaluator`, as bytes where pickled."""

    job: bytes
    workers: Workers
    metrics_fn: bytes
    output_dir: Path | None
    best_by: str
    log_prefix: str
    recheck: bool
    report: bytes | None  # the settings of a report
    around: Surroundings


class Request(NamedTuple):
    """One evaluation, at a training step, with pickled weights by model id.

    ``policy`` is pickled if it is no module, as it was at the call; None for the job's own. A
    ``"report"`` is of the weights of a step, with settings of its own.
    """

    step: int
    weights: Mapping[str, bytes]
    policy: bytes | None = None
    kind: Kind = "step"


class Answer(NamedTuple):
    """The outcome of a request.

    ``records`` are manifest, records and errors, pickled, as few callers want them; ``lost`` tells
    in lines how workers ended.
    """

    records: bytes
    directory: Path | None
    metrics: dict[str, Any]
    point: Point
    best: Best | None
    lost: list[str]


class Failure(NamedTuple):
    """A request that raised."""

    error: Described
    applied: bool


def metrics_of(
    point: Point,
    returns: np.ndarray[Any, np.dtype[np.float64]],
    frames_per_second: float,
    custom: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    # Means of returns that are not finite are what arithmetic makes of them.
    mean = point.mean if point.mean is not None or not len(returns) else exact_mean(returns)
    found = {
        "reward": mean,
        "reward_std": _std(returns),
        "reward_low": point.low,
        "reward_high": point.high,
        "num_episodes": len(returns),
        "failed": point.failed,
        "episode_length": point.length,
        "fps": frames_per_second,
        "step": point.step,
        **{f"metrics/{metric.name}": metric.mean for metric in point.metrics},
    }
    known = {name: math.nan if value is None else value for name, value in found.items()}
    return {f"{prefix}/{name}": value for name, value in {**known, **custom}.items()}


def _std(returns: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the standard deviation with ``count - 1``; 0 for one return, as TorchRL does."""
    if len(returns) < 2:
        return 0.0 if len(returns) else math.nan
    return float(torch.from_numpy(returns).std())


def custom_metrics(
    metrics_fn: Callable[[TensorDict], Any], episodes: Mapping[int, TensorDict]
) -> dict[str, Any]:
    """Return the user's metrics of the data ``[L]`` of completed episodes."""
    if not episodes:
        return {}
    found = metrics_fn(padded(episodes))
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"expected metrics_fn to return a dict from names to numbers, got {found!r:.200}"
        )
    return _on_cpu(found)


def padded(episodes: Mapping[int, TensorDict]) -> TensorDict:
    """Return the episodes as a padded batch ``[B, L]``, whose trajectory ids are their indices."""
    rows = []
    for index in sorted(episodes):
        data = episodes[index]
        rows.append(data.copy())
        rows[-1].set(keys.TRAJ_IDS, torch.full(data.batch_size, index))
    return split_trajectories(torch.cat(rows))


class Answering:
    """Runs requests on workers that stay, and keeps their curve."""

    def __init__(self, setup: Setup):
        setup.around.enter()
        self._setup = setup
        self._job = unpickled(setup.job)
        self._metrics_fn = pickle.loads(setup.metrics_fn)
        self._report = None if setup.report is None else pickle.loads(setup.report)
        self._workers = setup.workers
        if isinstance(self._workers, LocalWorkers):
            self._workers.template = template
        self._folder: Folder | None = None
        self._policy: bytes | None = None  # the latest one that came with a request
        self._model: Any = None  # a policy whose weights can be set
        self._applied = False

    def answer(self, request: Request) -> bytes:
        """Run a request; return the pickled :class:`Answer` or :class:`Failure`."""
        self._applied = False
        try:
            # In here, as an odd metric of the user's is a failure, too.
            return packed(self._evaluate(request))
        except Exception as error:
            return packed(Failure(described(error), self._applied))

    def _evaluate(self, request: Request) -> Answer:
        if request.policy is not None and request.policy != self._policy:
            self._job = replace(self._job, policy=pickle.loads(request.policy))
            self._policy = request.policy
        if self._folder is None and self._setup.output_dir is not None:
            self._folder = Folder(self._setup.output_dir, self._setup.best_by)
        path: Path | None = None
        job, with_data = self._job, self._metrics_fn is not None
        if request.kind == "report" and self._report is not None:
            job, with_data = replace(job, settings=self._report), False

        def record(manifest: Mapping[str, Any]) -> Recording:
            nonlocal path
            self._applied = True
            if self._folder is not None:
                if request.kind == "report":
                    check_report(self._folder.step_path(request.step), manifest)
                else:
                    self._folder.check_same_episodes(manifest)
                path = self._folder.step_path(request.step, request.kind)
            return Recording(
                manifest,
                job.settings.episode_indices,
                output_dir=path,
                retry_lost=True,
                recheck=self._setup.recheck,
                every_data=with_data,
            )

        evaluation = Evaluation(lambda: job, record, with_data, request.weights)
        data: dict[int, TensorDict] = {}
        steps, start, now = 0, 0.0, 0.0
        # The training process says which workers were lost.
        events = run([evaluation], self._workers, note=lambda line: None)
        with closing(events):
            for _, what in events:
                if isinstance(what, Exception):
                    raise what
                if isinstance(what, EvaluationResult):
                    pace = steps / (now - start) if steps else 0.0
                    return self._answer(request, evaluation, what, pace, data)
                now = time.perf_counter()
                if what is None:
                    start = now
                else:
                    steps += what.record.length or 0
                    if what.data is not None:
                        data[what.record.index] = what.data
        raise AssertionError("expected a result")

    def _answer(
        self,
        request: Request,
        evaluation: Evaluation,
        result: EvaluationResult,
        pace: float,
        data: dict[int, TensorDict],
    ) -> Answer:
        point = point_of(request.step, result.summary(), result.digest)
        dispatcher = evaluation.dispatcher
        assert dispatcher is not None
        name = str(evaluation.manifest["env"]["id"])
        if self._folder is not None and request.kind == "report":
            self._folder.write(name)
        elif self._folder is not None:
            kept = {} if self._report is None else _of_transforms(request.weights)
            self._folder.note(point, name, lambda: self._policy_state(request.weights), kept)
        custom = {} if self._metrics_fn is None else custom_metrics(self._metrics_fn, data)
        metrics = metrics_of(point, result.returns, pace, custom, self._setup.log_prefix)
        records = pickle.dumps((result.manifest, result.episodes, result.errors))
        best = None if self._folder is None else self._folder.best
        return Answer(records, result.directory, metrics, point, best, dispatcher.lost)

    def _policy_state(self, weights: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the ``state_dict`` of the policy with these weights, on the CPU; or no entries."""
        if self._model is None:
            job = unpickled(self._setup.job)  # workers are sent the other one, as it was
            self._model = replace(job, settings=replace(job.settings, device=None)).made_policy()
        if not isinstance(self._model, nn.Module):
            return {}
        if POLICY in weights:
            set_policy(self._model, pickle.loads(weights[POLICY]))
        return _on_cpu(self._model.state_dict())

    def close(self) -> None:
        self._workers.close()
        if self._folder is not None:
            self._folder.close()


def _on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, those that are tensors detached and on the CPU."""
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _of_transforms(weights: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the weights of a request that are not the policy's, as torch saves them."""
    others = (name for name in weights if name != POLICY)
    return {name: pickle.loads(weights[name]).to_save() for name in others}


def main(end: int) -> None:
    """Answer requests until the training process closes the connection."""
    connection = Connection(end)
    with suppress(EOFError, OSError):
        answering = Answering(pickle.loads(connection.recv_bytes()))
        try:
            while True:
                connection.send_bytes(answering.answer(pickle.loads(connection.recv_bytes())))
        finally:
            answering.close()
    leave()
