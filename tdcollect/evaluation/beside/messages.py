"""Messages between a training process and the process that evaluates beside it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import cloudpickle

from tdcollect.evaluation.beside.curve import Best, Point


class Setup(NamedTuple):
    """The first message: the subject of all evaluations.

    Attributes:
        job: env, policy and settings, pickled.
        workers: those that run the episodes, pickled.
        metrics_fn: the function or None, pickled.
        output_dir: the directory of the curve; None for none.
        best_by: ``"mean"`` or ``"iqm"``, the value that the best evaluation is chosen by.
        log_prefix: the first part of the metrics' names.
        recheck: as for :func:`tdcollect.evaluate`.
    """

    job: bytes
    workers: bytes
    metrics_fn: bytes
    output_dir: str | None
    best_by: str
    log_prefix: str
    recheck: bool


class Request(NamedTuple):
    """One evaluation.

    Attributes:
        step: the training step.
        weights: pickled :class:`~tdcollect.evaluation.weights.Weights`, by model id.
        policy: a pickled policy that is no module, as it was at the call; None for the job's own.
    """

    step: int
    weights: Mapping[str, bytes]
    policy: bytes | None = None


class Answer(NamedTuple):
    """The outcome of a request.

    Attributes:
        records: manifest, records and errors of the evaluation, pickled: few callers want them.
        directory: that of the evaluation, if it has one.
        metrics: for loggers, by name.
        point: its point of the curve.
        best: the best point so far.
        lost: how each worker ended that was lost, in lines.
    """

    records: bytes
    directory: str | None
    metrics: dict[str, Any]
    point: Point
    best: Best | None
    lost: list[str]


class Failure(NamedTuple):
    """A request that raised.

    Attributes:
        error: the exception.
        applied: True if its weights had been set, and are those of requests without any.
    """

    error: Exception
    applied: bool


def failure(error: Exception, applied: bool) -> Failure:
    """Return the message for an exception, with its traceback as a note."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    try:
        # By cloudpickle, as the classes of a main program came here: they are the same again there.
        sent: Exception = pickle.loads(cloudpickle.dumps(error))
    except Exception:  # of a class that cannot travel
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.__cause__ = None
    if not hasattr(sent, "__notes__"):
        sent.add_note(f"In the process that evaluates:\n{lines}")
    return Failure(sent, applied)
