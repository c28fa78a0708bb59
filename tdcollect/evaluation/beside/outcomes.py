"""Answers of the process that evaluates, as the training process keeps and hands them on."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tdcollect.evaluation.beside.courier import Asked, Kind
from tdcollect.evaluation.beside.curve import Best, Point, value_of, with_point
from tdcollect.evaluation.beside.folder import read_folder
from tdcollect.evaluation.beside.messages import Answer
from tdcollect.evaluation.beside.replaying import replay_of
from tdcollect.evaluation.result import EvaluationResult

logger = logging.getLogger("tdcollect")


class Outcomes:
    """The curve so far, and the outcome of each request.

    Args:
        job: the subject of the evaluations, packed.
        directory: that of the curve, which is read; None for none.
        best_by: ``"mean"`` or ``"iqm"``.
        on_result: called with the metrics of each evaluation; its exceptions are logged.

    Attributes:
        curve: the points, in the order of steps.
        best: the best of them.
    """

    def __init__(
        self,
        job: bytes,
        directory: Path | None,
        best_by: str,
        on_result: Callable[[TensorDictBase], Any] | None,
    ):
        self._job = job
        self._best_by = best_by
        self.on_result = on_result
        self.curve: list[Point] = []
        self.best: Best | None = None
        if directory is not None:
            self.curve, self.best, _ = read_folder(directory, best_by, logger.warning)

    def of(self, asked: Asked, answer: Answer) -> Any:
        """Note an answer; returns the metrics, or the result of a request by ``submit``."""
        for line in answer.lost:
            logger.warning("%s, at step %s", line, asked.request.step)
        self.curve = with_point(self.curve, answer.point)
        if answer.directory is not None:
            self.best = answer.best
        else:
            self.best = _best_of(self.curve, self._best_by)
        if asked.kind is Kind.EVALUATE:  # whose caller calls on_result itself
            return answer.metrics
        self.tell(answer.metrics)
        if asked.kind is Kind.TRIGGER:
            return answer.metrics
        manifest, episodes, errors = pickle.loads(answer.records)
        replay = replay_of(self._job, asked.request)
        return EvaluationResult(manifest, episodes, answer.directory, replay=replay, errors=errors)

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Call ``on_result`` with metrics as a flat TensorDict."""
        if self.on_result is None:
            return
        try:
            values = {name: torch.as_tensor(value) for name, value in metrics.items()}
            self.on_result(TensorDict(values))
        except Exception:
            logger.warning("on_result of the Evaluator failed", exc_info=True)


def _best_of(curve: list[Point], by: str) -> Best | None:
    """Return the best point, of equal ones the earliest; None without a finite return."""
    best = max(curve, key=lambda point: value_of(point, by))  # the first of the greatest
    value = value_of(best, by)
    return None if value == float("-inf") else Best(best.step, value, None)
