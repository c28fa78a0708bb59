"""Test episodes beside a training that goes on, in the place of TorchRL's evaluator."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tdcollect import check, keys
from tdcollect.collect.collector import Collector
from tdcollect.display import count_text, one_line
from tdcollect.evaluation import curve
from tdcollect.evaluation.background import Answer, Failure, Request, Setup
from tdcollect.evaluation.curve import BEST_BY, Best, Point
from tdcollect.evaluation.episodes.groups import of_groups
from tdcollect.evaluation.episodes.opening import check_env
from tdcollect.evaluation.replay import Replay, Replayed, replayer
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings, Metrics, Options, check_names
from tdcollect.evaluation.workers import worker
from tdcollect.evaluation.workers.local import LocalWorkers, Workers, as_workers, pickled_part
from tdcollect.packages import extra_module
from tdcollect.policies import SpacePolicy, recognized
from tdcollect.processes.channel import raised_there
from tdcollect.processes.child import Spawned
from tdcollect.seeding import report_seed

logger = logging.getLogger("tdcollect")

Source: TypeAlias = TensorDictBase | nn.Module


class Evaluator:
    """Runs test episodes beside a training, in a process of their own.

    It has the constructor and the methods of ``torchrl.collectors.Evaluator``. Each evaluation
    runs the same numbered episodes, on a snapshot of the weights at the call. Its results are
    those of :func:`tdcollect.evaluate` with these weights, to the bit, and training's batches are
    the same with and without it. The process keeps env and policy from one evaluation to the next;
    if it dies, a new one goes on. In the training process, one thread waits for messages.

    Args:
        env: a gymnasium id, a callable that makes an env, or an ``EnvBase`` that can be pickled,
            which is copied as it is now; as for :func:`tdcollect.evaluate`.
        policy: the policy, or a function or agents of :mod:`tdcollect.policies`; copied. Without
            other weights, an evaluation uses a snapshot of those that it has at the call.
        policy_factory: instead of ``policy``, makes it in the process that evaluates. It is called
            with an env, after ``torch.manual_seed(0)``. Without weights, an evaluation uses the
            latest ones given, else those that it was made with.
        num_trajectories: the number of episodes of each evaluation.
        max_steps: truncate episodes at this length; ``math.inf`` for any length.
        log_prefix: the first part of the metrics' names.
        reward_keys: the reward entries that count, with or without ``"next"``; None for all.
        device: the device that the policy runs on; None for that of its parameters.
        exploration_type: of the policy; by default its most likely action.
        metrics_fn: returns further metrics, by name, given the completed episodes as a padded
            batch ``[B, L]`` in the order of their indices, with ``("collector", "mask")`` and
            ``("collector", "traj_ids")``. Runs in the process that evaluates.
        dump_video: True refuses an env that records videos.
        on_result: called after each evaluation with its metrics, a flat TensorDict: in the thread
            that waits for messages, and by :meth:`evaluate` in its own. Its exceptions are logged.
        busy_policy: if an evaluation is pending, :meth:`trigger_eval` puts the request into a
            ``"queue"`` (TorchRL's default is ``"skip"``), drops it (``"skip"``), or raises
            (``"error"``).
        backend: ``"ray"`` runs the episodes in one actor; ``"thread"`` and ``"process"`` are the
            same, a process.
        init_fn: called first in the workers, before torch is imported there.
        num_gpus: the number of GPUs of the worker, for ``backend="ray"``.
        ray_kwargs: further arguments of :class:`tdcollect.RayWorkers`.
        seed: the root seed of the episodes.
        output_dir: a directory for ``curve.csv`` and ``curve.html``, the best policy's weights
            (``best.pt``, its ``state_dict``), and the files of each evaluation, in folders named
            by step. An evaluator of the same arguments goes on with the curve found there.
        queue_size: the number of evaluations that may wait while one runs. If there are as many,
            :meth:`trigger_eval` waits, and warns once.
        workers: the workers that run the episodes, as for :func:`tdcollect.evaluate`: None for one
            process. They are started by the process that evaluates, and stay.
        best: choose the best evaluation by ``"mean"`` or by ``"iqm"``, the interquartile mean.
        recheck: as for :func:`tdcollect.evaluate`, in each evaluation.
        num_envs, inference_batch_size, env_kwargs, on_env_error, max_restarts: see
            :class:`tdcollect.evaluation.EvaluationSettings`.
        metrics, episode_options: likewise.
        report_episodes: evaluate the best checkpoint once more, on so many episodes that chose
            nothing: at the end of the ``with`` block, or when :meth:`report` is called.
        torchrl_only: arguments of TorchRL's evaluator that are checked and have no effect here:
            ``frames_per_batch``, ``collector_cls`` (None or ``"Collector"``), ``collector_kwargs``
            (none), ``weight_sync_schemes`` (whose keys are model ids), and ``done_keys``
            (``("next", "done")``).

    Raises:
        TypeError, ValueError: if an argument cannot be honoured, before a process starts.

    Examples:
        >>> evaluator = Evaluator("CartPole-v1", policy, num_trajectories=20, output_dir="runs/ppo")
        >>> for step, batch in enumerate(collector):
        ...     train(batch)
        ...     if step % 10 == 0:
        ...         evaluator.trigger_eval(step=step)
    """

    def __init__(
        self,
        env: str | EnvBase | Callable[..., Any],
        policy: Callable[..., Any] | SpacePolicy | None = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: float | None = None,
        log_prefix: str = "eval",
        reward_keys: NestedKey | list[NestedKey] | None = None,
        device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDict], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], Any] | None = None,
        busy_policy: str = "queue",
        backend: str = "thread",
        init_fn: Callable[[], Any] | None = None,
        num_gpus: int = 1,
        ray_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
        output_dir: str | os.PathLike[str] | None = None,
        queue_size: int = 2,
        workers: Any = None,
        best: str = "mean",
        recheck: bool = True,
        num_envs: int | None = None,
        inference_batch_size: int = 16,
        env_kwargs: dict[str, Any] | None = None,
        on_env_error: str = "restart",
        max_restarts: int = 2,
        metrics: Metrics | None = None,
        episode_options: Options | None = None,
        report_episodes: int | None = None,
        **torchrl_only: Any,
    ):
        policy = of_groups(recognized(policy))
        _check_subject(env, policy, policy_factory)
        _check_torchrl_only(**torchrl_only)
        check.callables(metrics_fn=metrics_fn, on_result=on_result, init_fn=init_fn)
        check.one_of(("queue", "skip", "error"), busy_policy=busy_policy)
        check.one_of(("thread", "process", "ray"), backend=backend)
        check.one_of(BEST_BY, best=best)
        check.positive_int(num_trajectories=num_trajectories, queue_size=queue_size)
        check.positive_int_or_none(report_episodes=report_episodes)
        for name in ("scipy", "matplotlib")[: 1 if output_dir is None else 2]:
            extra_module(name, "tdcollect.Evaluator")
        settings_of = partial(
            EvaluationSettings,
            exploration_type=exploration_type,
            max_episode_steps=max_steps or None,  # 0 is no limit for TorchRL
            reward_keys=_without_next(reward_keys),
            inference_batch_size=inference_batch_size,
            device=device,
            env_kwargs=env_kwargs,
            num_envs=num_envs,
            on_env_error=on_env_error,
            max_restarts=max_restarts,
            metrics=metrics,
            episode_options=episode_options,
        )
        settings, report = settings_of(num_trajectories, seed), None
        if report_episodes is not None:
            # The options of an episode that chose may make it the same under any seed.
            first = 0 if episode_options is None else num_trajectories
            others = settings_of(range(first, first + report_episodes), report_seed(seed))
            report = pickled_part("settings", others)
        if isinstance(env, EnvBase) and dump_video:
            worker.check_recorders(env)
        self._policy = policy
        self._named = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self._busy_policy = busy_policy
        self._step_counter = 0
        self._has_warned = False
        crew = _crew_of(workers, backend, init_fn, num_gpus, ray_kwargs)
        kept = worker.Job(
            env, policy, settings, crew.num_workers, policy_factory, no_recorders=dump_video
        )
        job, around = kept.pickled()[2:]
        directory = None if output_dir is None else Path(os.path.abspath(output_dir))
        functions = pickled_part("metrics_fn", metrics_fn)
        setup = Setup(job, crew, functions, directory, best, log_prefix, recheck, report, around)
        self._courier = Courier(setup, on_result, queue_size)
        self._end = weakref.finalize(self, _close, self._courier)

    # --- evaluations ---

    def evaluate(
        self,
        weights: Source | None = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Source] | None = None,
    ) -> dict[str, Any]:
        """Evaluate, and return the metrics; evaluations that are pending run first.

        Args:
            weights: the policy's weights: a module, or ``TensorDict.from_module(policy).data``;
                None for those of the policy given, or the latest ones.
            step: the training step; None for the number of calls before this one without it.
            weights_dict: weights by model id: ``"policy"``, and ``"env.transform[0]"`` for the
                running statistics of the env's first transform. Those of transforms hold until
                others are given.

        Returns:
            Numbers by name, each after the prefix. ``reward`` is the mean return, ``reward_low``
            and ``reward_high`` its 95% interval; the others are ``reward_std``, ``num_episodes``
            that completed, ``failed``, ``episode_length``, their mean length in steps, ``fps``,
            ``step``, the mean of each metric (``metrics/cost``), and those of ``metrics_fn``.

        Raises:
            TypeError, ValueError: for weights of another model.
            RuntimeError: if the process that evaluates died again and again.
            Exception: as :func:`tdcollect.evaluate`.
        """
        if self._courier.in_thread():
            raise RuntimeError("expected evaluate() in the training loop, not in on_result")
        request = self._request(weights, step, weights_dict)
        metrics: dict[str, Any] = self._courier.ask(request, "evaluate").result()
        self._courier.tell(metrics)
        return metrics

    def trigger_eval(
        self,
        weights: Source | None = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Source] | None = None,
    ) -> bool:
        """Evaluate beside what follows; :meth:`poll`, :meth:`wait` or ``on_result`` has the result.

        Arguments are those of :meth:`evaluate`; weights that change afterwards change nothing.

        Returns:
            True; or False if an evaluation is pending and ``busy_policy`` is ``"skip"``.

        Raises:
            RuntimeError: if an evaluation is pending and ``busy_policy`` is ``"error"``.

        Warns:
            UserWarning: when it first waits for its place in the queue.
        """
        if self._busy_policy != "queue" and self.pending:
            if self._busy_policy == "skip":
                self._next_step(step)
                return False
            raise RuntimeError(
                "expected no evaluation to be pending for busy_policy='error'; wait() for it, or "
                "set busy_policy='queue' or busy_policy='skip'"
            )
        request = self._request(weights, step, weights_dict)
        if not (self._has_warned or self._courier.has_room()):
            self._has_warned = True
            warnings.warn(
                "evaluations take longer than the training between them: trigger_eval() waits "
                "until the queue has room. Evaluate less often or fewer episodes, or set "
                "busy_policy='skip'",
                stacklevel=2,
            )
        self._courier.ask(request, "trigger")
        return True

    def submit(
        self,
        weights: Source | None = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Source] | None = None,
    ) -> Future[EvaluationResult]:
        """Evaluate beside what follows; returns a future of the result.

        The result has records, statistics and replays, as that of :func:`tdcollect.evaluate`. A
        full queue is waited for, whatever ``busy_policy`` is. :meth:`poll` and :meth:`wait` do not
        return it. Arguments are those of :meth:`trigger_eval`.
        """
        return self._courier.ask(self._request(weights, step, weights_dict), "submit")

    def report(self) -> EvaluationResult:
        """Evaluate the best checkpoint on episodes that chose nothing; return the result.

        The mean of the best of many checkpoints is too high on the episodes that chose it. These
        are as many as ``report_episodes`` says, of the root seed
        :func:`tdcollect.seeding.report_seed`; with ``episode_options``, their indices follow those
        that chose. Evaluations that are pending run first. A report that is done for the best of
        now is returned as it is; when another one wins, its report is a new one. The files are in
        ``output_dir``, in a folder ``report-`` with the step of the best.

        Raises:
            RuntimeError: without ``report_episodes``, before an evaluation with a finite return,
                and in ``on_result``.
            ValueError: if the weights of the best are not kept, as those of an earlier process may
                not be.
            Exception: as :meth:`evaluate`.
        """
        courier = self._courier
        if not courier.reports:
            raise RuntimeError("expected an Evaluator(report_episodes=...) for a report")
        if courier.in_thread():
            raise RuntimeError("expected report() in the training loop, not in on_result")
        if courier.closed and courier.report is not None:
            return courier.report[1]
        _, policy = worker.snapshots_of(None, None, self._policy)
        report: EvaluationResult = courier.ask(Request(0, {}, policy, "report"), "report").result()
        return report

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Return the metrics of the next triggered evaluation that has ended, as :meth:`wait`."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next triggered evaluation; returns its metrics.

        Args:
            timeout: seconds to wait at most; None for any time.

        Returns:
            None if none is pending (where TorchRL waits for ever), or after the timeout.

        Raises:
            Exception: that of the evaluation, once.
        """
        courier = self._courier
        with courier.changed:
            if not courier.unread and not courier.in_thread():
                courier.changed.wait_for(
                    lambda: (
                        courier.unread
                        or courier.closed
                        or all(asked.kind != "trigger" for asked in courier.pending)
                    ),
                    timeout,
                )
            outcome = courier.unread.popleft() if courier.unread else None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def pending(self) -> bool:
        """True if an evaluation runs or waits."""
        return bool(self._courier.pending)

    # --- results so far ---

    @property
    def curve(self) -> list[Point]:
        """The points of the learning curve, in the order of steps."""
        return list(self._courier.curve)

    @property
    def best(self) -> Best | None:
        """The best evaluation: its step, value and file of weights; None before the first."""
        return self._courier.best

    # --- life ---

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the process; evaluations that are pending are lost. A second call does nothing.

        Args:
            timeout: seconds that the process has to close its env, if it is idle.
        """
        self._end.detach()
        self._courier.close(timeout)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        """Wait for pending evaluations, and report, unless there is an exception; shut down."""
        if kind is None:
            with self._courier.changed:
                self._courier.changed.wait_for(
                    lambda: self._courier.closed or not self._courier.pending
                )
            if self._courier.reports and self.best is not None and not self._courier.closed:
                try:
                    self.report()
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                    logger.warning("the report of step %s failed: %s", self.best.step, text)
        self.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of calls without a step; the curve is in ``output_dir``.

        Raises:
            RuntimeError: if evaluations are pending, or unread and not given to ``on_result``.
        """
        self._check_settled()
        return {"step_counter": self._step_counter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the number of calls without a step.

        Raises:
            RuntimeError: as for :meth:`state_dict`.
        """
        self._check_settled()
        self._step_counter = int(state_dict.get("step_counter", 0))

    def _check_settled(self) -> None:
        unread = self._courier.on_result is None and bool(self._courier.unread)
        if self.pending or unread:
            raise RuntimeError(
                "expected no evaluation to be pending, queued, or unread for a state dict; call "
                "wait() until it returns None"
            )

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDict:
        """Return a copy of a policy's parameters and buffers, detached, on the CPU."""
        return TensorDict.from_module(policy).data.detach().clone().cpu()

    def __repr__(self) -> str:
        state = "shut down" if self._courier.closed else f"{len(self._courier.pending)} pending"
        points, best = count_text(len(self.curve), "point"), self.best
        found = "" if best is None else f"best {best.value:.6g} at {best.step}"
        return one_line(self, *filter(None, (str(self._named), points, found, state)))

    # --- requests ---

    def _request(
        self, weights: Source | None, step: int | None, by_id: Mapping[str, Source] | None
    ) -> Request:
        """Return a request, with a snapshot of its weights as they are now."""
        snapshots, policy = worker.snapshots_of(weights, by_id, self._policy)
        return Request(self._next_step(step), snapshots, policy)

    def _next_step(self, step: int | None) -> int:
        if step is not None:
            check.count(step=step)
            return int(step)
        self._step_counter += 1
        return self._step_counter - 1


def _close(courier: Courier) -> None:
    """End what belongs to an evaluator that is gone."""
    if lost := courier.close(2.0):
        logger.warning(
            "%s lost: the Evaluator ended first; call wait() until it returns None, or use it in a "
            "with block",
            count_text(lost, "evaluation"),
        )


# --- arguments ---


def _check_subject(env: Any, policy: Any, policy_factory: Any) -> None:
    check_env(env, "pass a function that makes it")
    if policy is not None and policy_factory is not None:
        raise ValueError("expected policy or policy_factory, not both; leave one out")
    if policy is None and policy_factory is None:
        raise ValueError(
            "expected that policy or policy_factory must be provided, got neither; for random "
            "actions pass torchrl.modules.RandomPolicy(env.action_spec)"
        )
    if not isinstance(policy, SpacePolicy):
        check.callables(policy=policy)
    check.callables(policy_factory=policy_factory)


def _check_torchrl_only(
    frames_per_batch: int | None = None,
    collector_cls: Any = None,
    collector_kwargs: Mapping[str, Any] | None = None,
    weight_sync_schemes: Mapping[str, Any] | None = None,
    done_keys: Any = ("next", "done"),
    **unknown: Any,
) -> None:
    check_names(Evaluator, unknown, _TORCHRL_ONLY)
    check.positive_int_or_none(frames_per_batch=frames_per_batch)
    if collector_cls not in (None, "Collector", "SyncDataCollector", TorchRLCollector, Collector):
        raise ValueError(
            f"expected collector_cls to be None or 'Collector', got {collector_cls!r}: test "
            "episodes are collected by tdcollect.EvaluationCollector; leave it out"
        )
    for key in collector_kwargs or ():
        instead = _INSTEAD.get(key, key)
        known = instead in inspect.signature(Evaluator).parameters
        advice = f"pass {instead}= instead" if known else "leave it out"
        raise ValueError(
            f"expected no collector_kwargs, got {key!r}: test episodes are collected by "
            f"tdcollect.EvaluationCollector; {advice}"
        )
    worker.check_model_ids(weight_sync_schemes or (), "weight_sync_schemes")
    if _without_next(done_keys) not in (keys.DONE, (keys.DONE,)):
        raise ValueError(
            f"expected done_keys to be ('next', 'done'), got {done_keys!r}: an episode ends where "
            "the env's done entry says; leave it out"
        )


_TORCHRL_ONLY = tuple(inspect.signature(_check_torchrl_only).parameters)[:-1]


# Keyword arguments of TorchRL's collectors, and what takes their place; others keep their names.
_INSTEAD = {
    "max_frames_per_traj": "max_steps",
    "trajs_per_batch": "num_trajectories",
    "policy_device": "device",
}


def _crew_of(
    workers: Any,
    backend: str,
    init_fn: Callable[[], Any] | None,
    num_gpus: int,
    ray_kwargs: Mapping[str, Any] | None,
) -> Workers:
    """Return the workers that run the episodes, not started."""
    if backend != "ray" and ray_kwargs:
        raise ValueError(
            f"expected ray_kwargs for backend='ray' only, got some for backend={backend!r}; leave "
            "them out"
        )
    if workers is not None:
        crew = as_workers(workers)
        if crew is None or init_fn is not None or backend == "ray":
            raise ValueError(
                f"expected workers without backend='ray' and without init_fn, and at least one, "
                f"got workers={workers!r}, backend={backend!r}; pass LocalWorkers(init_fn=...) or "
                "RayWorkers(...)"
            )
        return crew
    if backend == "ray":
        from tdcollect.evaluation.workers.ray import RayWorkers

        return RayWorkers(1, num_gpus=num_gpus, init_fn=init_fn, **(ray_kwargs or {}))
    return LocalWorkers(1, init_fn=init_fn)


def _without_next(key: Any) -> Any:
    """Return a key, or each of a list, as evaluations take it: without a leading ``"next"``."""
    if isinstance(key, list):
        return [_without_next(one) for one in key]
    if isinstance(key, tuple) and len(key) > 1 and key[0] == keys.NEXT:
        return key[1] if len(key) == 2 else key[1:]
    return key


# --- the thread and the process ---


Kind = Literal["evaluate", "trigger", "submit", "report"]
"""The method that a request came by."""

MOST_RESTARTS = 3
"""Restarts of the process for one request."""

LOOK = 10.0
"""Seconds between two looks at a process that is idle."""

_SECONDS = 1.0  # for a process that closed its connection to end by itself
_GRACE = 5.0  # seconds for the thread to end, beside those for the process


class DriverProcess(Spawned):
    """A process that evaluates, in a fresh interpreter."""

    def __init__(self) -> None:
        super().__init__("tdcollect.evaluation.background:main")
        self.connection = Connection(self.socket.detach())

    def send(self, message: bytes) -> None:
        """Send a message, unless it has gone; may wait until the process reads."""
        with suppress(OSError):  # which reading tells
            self.connection.send_bytes(message)

    def end(self, seconds: float = 0.0) -> str:
        """Close the connection, and reap the process; say how it ended."""
        self.connection.close()
        return super().end(seconds)


class Asked:
    """A request on its way, with the future of its outcome."""

    def __init__(self, request: Request, kind: Kind):
        self.request, self.kind = request, kind
        self.future: Future[Any] = Future()


class Courier:
    """Takes requests to a process one at a time, in their order; has the curve of the answers.

    One daemon thread waits for both sides; no executor of the standard library, whose threads the
    end of the interpreter waits for. It runs no env and no policy, and draws no random numbers.
    """

    def __init__(
        self, setup: Setup, on_result: Callable[[TensorDictBase], Any] | None, queue_size: int
    ):
        self._setup, self.on_result, self._size = setup, on_result, queue_size
        self._first = pickle.dumps(setup)
        self.curve: list[Point] = []
        self.best: Best | None = None
        self.reports = setup.report is not None
        self.report: tuple[int, EvaluationResult] | None = None  # of the best at a step
        self._winner: Request | None = None  # with the weights of the best
        if setup.output_dir is not None:
            found = curve.read_folder(setup.output_dir, setup.best_by, logger.warning)
            self.curve, self.best, _ = found
        self._owner = os.getpid()
        self.changed = threading.Condition()  # of all that follows: a request starts or ends
        self.unread: deque[Any] = deque()  # outcomes of triggered evaluations, also exceptions
        self.closed = False
        self.pending: deque[Asked] = deque()  # the first one may run
        self._seconds = 0.0
        self._latest: dict[str, bytes] = {}  # weights that hold where a request has none
        self._process: DriverProcess | None = DriverProcess()
        self._thread = threading.Thread(target=self._serve, name="tdcollect-evaluator", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Tell whether a request would be taken without waiting."""
        return len(self.pending) <= self._size

    def in_thread(self) -> bool:
        """Tell whether the caller runs in the courier's thread, as ``on_result`` does."""
        return threading.current_thread() is self._thread

    def ask(self, request: Request, kind: Kind) -> Future[Any]:
        """Add a request; waits while the queue is full."""
        asked = Asked(request, kind)
        with self.changed:
            if self.in_thread() and not self.has_room():
                raise RuntimeError(
                    "the queue of evaluations is full, and on_result runs in the thread that "
                    "empties it; trigger evaluations in the training loop"
                )
            self.changed.wait_for(lambda: self.closed or self.has_room())
            if self.closed:
                raise RuntimeError("this Evaluator is shut down; make a new one")
            self.pending.append(asked)
            self.changed.notify_all()
        return asked.future

    def close(self, seconds: float = 0.0) -> int:
        """End the process, and with it the request that runs; returns the number of lost ones."""
        if os.getpid() != self._owner:  # a fork has neither the thread nor the process
            return 0
        with self.changed:
            running = [asked for asked in self.pending if asked.future.running()]
            lost = [asked for asked in self.pending if asked not in running]
            self.pending, process = deque(running), self._process
            if not self.closed:
                self.closed, self._seconds = True, seconds
            self.changed.notify_all()
        for asked in lost:
            asked.future.cancel()
        if process is not None and running:
            process.kill()
        if not self.in_thread():
            self._thread.join(seconds + _GRACE)
            if self._thread.is_alive() and process is not None:  # which sends to one that hangs
                process.kill()
                self._thread.join(_GRACE)
        return len(lost) + len(running)

    # --- the thread ---

    def _serve(self) -> None:
        if self._process is not None:
            self._process.send(self._first)
        while (asked := self._next()) is not None:
            try:
                outcome = self._outcome(asked)
            except Exception as error:
                outcome = error
            self._complete(asked, outcome)
        with self.changed:
            process, self._process = self._process, None
        if process is not None:
            process.end(self._seconds)

    def _next(self) -> Asked | None:
        """Wait for the next request that was not cancelled; None once closed."""
        with self.changed:
            while True:
                while not self.changed.wait_for(lambda: self.closed or self.pending, LOOK):
                    self._reap()
                if self.closed:
                    return None
                if self.pending[0].future.set_running_or_notify_cancel():
                    return self.pending[0]
                self.pending.popleft()
                self.changed.notify_all()

    def _outcome(self, asked: Asked) -> Any:
        """Return the metrics of a request, or its result if it came by ``submit``."""
        if asked.kind == "report":
            return self._report_of_best(asked)
        request = asked.request
        asked.request = request._replace(weights={**self._latest, **request.weights})
        answer = self._answer(asked.request)
        self.curve = curve.with_point(self.curve, answer.point)
        self.best = answer.best or _best_of(self.curve, self._setup.best_by)
        if self.reports and self.best is not None and self.best.step == request.step:
            self._winner = asked.request
        if asked.kind == "evaluate":  # whose caller calls on_result itself
            return answer.metrics
        self.tell(answer.metrics)
        if asked.kind == "trigger":
            return answer.metrics
        return self._result(asked.request, answer)

    def _answer(self, request: Request) -> Answer:
        """Send a request; return its answer, or raise the error of its failure."""
        answer: Answer | Failure = pickle.loads(self._answered(request))
        if request.kind == "step" and (isinstance(answer, Answer) or answer.applied):
            self._latest.update(request.weights)
        if isinstance(answer, Failure):
            raise raised_there(answer.error, "the process that evaluates")
        for line in answer.lost:
            logger.warning("%s, at step %s", line, request.step)
        return answer

    def _result(self, request: Request, answer: Answer) -> EvaluationResult:
        manifest, episodes, errors = pickle.loads(answer.records)
        replay = _replay_of(self._setup, request)
        return EvaluationResult(manifest, episodes, answer.directory, replay=replay, errors=errors)

    def _report_of_best(self, asked: Asked) -> EvaluationResult:
        """Return the report of the best, which is run unless it is there."""
        best, folder, request = self.best, self._setup.output_dir, self._winner
        if best is None:
            raise RuntimeError("expected an evaluation with a finite return before a report")
        if self.report is not None and self.report[0] == best.step:
            return self.report[1]
        wanted = [*pickle.loads(self._setup.report or b"").episode_indices]
        found = None if folder is None else curve.read_report(folder, best.step)
        if found is None or [e.index for e in found.episodes if not e.lost] != wanted:
            if request is None or request.step != best.step:
                if folder is None:
                    raise ValueError(f"step {best.step} is the best again: evaluate it once more")
                weights = curve.kept_weights(folder, best)  # of a process before this one
                request = asked.request._replace(step=best.step, weights=weights)
            asked.request = request._replace(kind="report")
            found = self._result(asked.request, self._answer(asked.request))
        self.report = best.step, found
        return found

    def tell(self, metrics: Mapping[str, Any]) -> None:
        if self.on_result is None:
            return
        try:
            values = {name: torch.as_tensor(value) for name, value in metrics.items()}
            self.on_result(TensorDict(values))
        except Exception:
            logger.warning("on_result of the Evaluator failed", exc_info=True)

    def _answered(self, request: Request) -> bytes:
        """Send a request and wait for its answer; repeat it if the process ends meanwhile."""
        message = pickle.dumps(request)
        self._reap()
        ends = 0
        while True:
            with self.changed:  # so that close() knows each process
                if self.closed:
                    raise RuntimeError(
                        f"the Evaluator was shut down before the evaluation at step {request.step}"
                    )
                messages = [message] if self._process is not None else [self._first, message]
                process = self._process = self._process or DriverProcess()
            for one in messages:
                process.send(one)
            try:
                wait([process.connection])  # where other evaluations see that this thread waits
                return process.connection.recv_bytes()
            except (EOFError, OSError):
                how = process.end(_SECONDS)
                self._process = None
            ends += 1
            what = f"the process that evaluates beside training {how} at step {request.step}"
            if ends > MOST_RESTARTS:
                raise RuntimeError(
                    f"{ends} times in a row: {what}; see its standard error, or run "
                    "tdcollect.evaluate with this env and policy"
                )
            if not self.closed:
                logger.warning("%s; a new one goes on", what)

    def _reap(self) -> None:
        """Let a process go that has ended while it was idle."""
        if self._process is not None and self._process.connection.poll():
            self._process.end(_SECONDS)
            self._process = None

    def _complete(self, asked: Asked, outcome: Any) -> None:
        failed = isinstance(outcome, BaseException)
        is_read = asked.kind == "trigger" and not (failed and self.closed)
        if failed and is_read:  # nobody may ever ask for its result
            text = f"{type(outcome).__name__}: {outcome}"
            logger.warning("the evaluation at step %s failed: %s", asked.request.step, text)
        with self.changed:
            self.pending.popleft()
            if is_read:
                self.unread.append(outcome)
            self.changed.notify_all()
        if failed:
            asked.future.set_exception(outcome)
        else:
            asked.future.set_result(outcome)


def _best_of(points: list[Point], by: str) -> Best | None:
    """Return the best point, of equal ones the earliest; None without a finite return."""
    best = max(points, key=lambda point: curve.value_of(point, by))  # the first of the greatest
    value = curve.value_of(best, by)
    return None if value == float("-inf") else Best(best.step, value, None)


def _replay_of(setup: Setup, request: Request) -> Replay:
    """Return a function that runs an episode again, with env and policy made anew."""

    def replay(index: int, video: str | os.PathLike[str] | None) -> Replayed:
        parts = worker.unpickled(setup.job)
        if request.kind == "report" and setup.report is not None:
            parts = replace(parts, settings=pickle.loads(setup.report))
        if request.policy is not None:
            parts = replace(parts, policy=pickle.loads(request.policy))
        again = replayer(
            parts.env,
            parts.made_policy(),
            lambda i: replace(parts.settings, episodes=[i]),
            partial(worker.set_weights, weights=request.weights),
        )
        return again(index, video)

    return replay
