"""Test episodes beside a training that goes on, in the place of TorchRL's evaluator."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tdcollect import check, keys
from tdcollect.display import count_text, one_line
from tdcollect.envs.make import vec_env_advice
from tdcollect.evaluation.background import Courier, Order, Setup, logger
from tdcollect.evaluation.curve import BEST_BY, Best, Point
from tdcollect.evaluation.episodes.groups import of_groups
from tdcollect.evaluation.requested import check_env
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.statistics import in_order
from tdcollect.evaluation.workers import worker
from tdcollect.evaluation.workers.local import LocalWorkers, Workers, as_workers, pickled_part
from tdcollect.packages import extra_module
from tdcollect.policies import SpacePolicy, recognized

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
        episode_sampling: ``"per_env"`` and ``"first_done"``, TorchRL's default, are the same here:
            numbered episodes, whichever end first.
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
        settings: ``num_envs``, ``metrics``, and others of
            :class:`tdcollect.evaluation.EvaluationSettings` that have no name above.

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
        episode_sampling: str = "per_env",
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
        **settings: Any,
    ):
        policy = of_groups(recognized(policy))
        _check_subject(env, policy, policy_factory)
        check.arguments(Evaluator, settings, [*SETTINGS])
        check.callables(metrics_fn=metrics_fn, on_result=on_result, init_fn=init_fn)
        check.one_of(("per_env", "first_done"), episode_sampling=episode_sampling)
        check.one_of(("queue", "skip", "error"), busy_policy=busy_policy)
        check.one_of(("thread", "process", "ray"), backend=backend)
        check.one_of(BEST_BY, best=best)
        check.positive_int(num_trajectories=num_trajectories, queue_size=queue_size)
        extra_module("scipy", "tdcollect.Evaluator")
        chosen = EvaluationSettings(
            num_trajectories,
            seed,
            exploration_type=exploration_type,
            max_episode_steps=max_steps or None,  # 0 is no limit for TorchRL
            reward_keys=_without_next(reward_keys),
            device=device,
            **settings,
        )
        chosen.check_whole(workers is None)
        if isinstance(env, EnvBase) and dump_video:
            worker.check_recorders(env)
        self._policy = policy
        self._named = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self._busy_policy = busy_policy
        self._step_counter = 0
        self._has_warned = False
        crew = _crew_of(workers, backend, init_fn, num_gpus, ray_kwargs)
        own = worker.Job(env, policy, chosen, crew.num_workers, policy_factory, dump_video)
        job, around = own.pickled()[2:]
        folder = None if output_dir is None else Path(os.path.abspath(output_dir))
        metrics = pickled_part("metrics_fn", metrics_fn)
        setup = Setup(job, crew, metrics, folder, best, log_prefix, recheck, around)
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

    def evaluate_episodes(
        self,
        weights: Source | None = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Source] | None = None,
        seed: int | None = None,
    ) -> TensorDictBase:
        """Evaluate, and return one entry per episode; evaluations that are pending run first.

        It changes no curve, file or count of calls, and calls no function of metrics or results.

        Args:
            weights, step, weights_dict: as for :meth:`evaluate`.
            seed: the root seed of these episodes; None for that of the evaluator.

        Returns:
            A TensorDict ``[num_trajectories]``, by index, of ``"episode_reward"`` (float64; NaN of
            one that failed), ``"episode_length"`` (int64, in steps), ``"truncated"`` (bool), and
            ``"env_index"`` (int64), the index of the episode, which belongs to no slot.
        """
        check.count(seed=seed or 0, step=step or 0)
        if self._courier.in_thread():
            raise RuntimeError("expected evaluate_episodes() in the training loop")
        snapshots, policy = worker.snapshots_of(weights, weights_dict, self._policy)
        order = Order(step or 0, snapshots, policy, True, seed)
        episodes = in_order(self._courier.ask(order, "episodes").result())
        rewards = [e.episode_return if e.completed else math.nan for e in episodes]
        columns = {
            "episode_reward": torch.tensor(rewards, dtype=torch.float64),
            "episode_length": torch.tensor([e.length or 0 for e in episodes]),
            "truncated": torch.tensor([bool(e.truncated) for e in episodes]),
            "env_index": torch.tensor([e.index for e in episodes]),
        }
        return TensorDict(columns, [len(episodes)])

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
                        or all(errand.kind != "trigger" for errand in courier.pending)
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
        """Wait for pending evaluations, unless there is an exception; shut down."""
        if kind is None:
            with self._courier.changed:
                self._courier.changed.wait_for(
                    lambda: self._courier.closed or not self._courier.pending
                )
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
        at_best = "" if best is None else f"best {best.value:.6g} at {best.step}"
        return one_line(self, *filter(None, (str(self._named), points, at_best, state)))

    # --- requests ---

    def _request(
        self, weights: Source | None, step: int | None, by_id: Mapping[str, Source] | None
    ) -> Order:
        """Return a request, with a snapshot of its weights as they are now."""
        snapshots, policy = worker.snapshots_of(weights, by_id, self._policy)
        return Order(self._next_step(step), snapshots, policy)

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
    check_env(env, vec_env_advice(env) or "pass a function that makes it", policy)
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


SETTINGS = {one.name for one in fields(EvaluationSettings) if one.init}
SETTINGS -= {"episodes", "seed", "max_episode_steps"}  # which have other names here


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
