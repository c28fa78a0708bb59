"""Run test episodes to a result and its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl.envs import EnvBase

from tdcollect.evaluation.finishing import check_report_extras
from tdcollect.evaluation.ledger.directory import check_directory
from tdcollect.evaluation.ledger.shards import Shard
from tdcollect.evaluation.replay import replayer
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.runner import InThisProcess, Runner, resumable, run_to_result
from tdcollect.evaluation.settings import (
    EvaluationSettings,
    SettingsArguments,
    check_names,
    takes_settings,
)
from tdcollect.evaluation.workers.driver import Driver
from tdcollect.evaluation.workers.job import Job
from tdcollect.evaluation.workers.local import as_workers
from tdcollect.evaluation.workers.protocol import Workers

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_settings
def evaluate(
    env: str | Callable[..., Any] | EnvBase,
    policy: Any = None,
    episodes: int | Sequence[int] = 100,
    seed: int = 0,
    *,
    keep_trajectories: bool = False,
    output_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    request: Request | None = None,
    workers: Workers | int | None = None,
    shard: tuple[int, int] | None = None,
    allow_mixed: bool = False,
    retry_lost: bool = False,
    recheck: bool = True,
    **settings: Unpack[SettingsArguments],
) -> EvaluationResult:
    """Run test episodes by index, the same to the bit however they are run.

    With ``output_dir``, the ledger grows there as episodes end. Run again with the same arguments,
    it resumes the evaluation found there, or finds it done.

    Args:
        env: see :class:`tdcollect.EvaluationCollector`, as for the policy: a gymnasium id, any
            ``EnvBase``, or a function that makes an env.
        policy: any policy that a collector takes; None for random actions.
        episodes: the number of episodes, or their indices.
        seed: the root seed.
        keep_trajectories: keep the data of episodes: in memory, or under ``output_dir`` as
            memory-mapped TensorDicts. Refused if episodes have ended there without.
        output_dir: the directory for the ledger, the statistics and the report.
        progress: show a progress bar, on a terminal and in a notebook, if tqdm is installed;
            elsewhere a line every 30 seconds.
        request: env and policy by name, as the command line takes them. They are kept in
            ``output_dir``, and the report then has the commands that run episodes again.
        workers: a number of processes that run the episodes, each on slots of its own; or
            :class:`tdcollect.LocalWorkers`, :class:`tdcollect.RayWorkers`, which stay for the
            evaluations that follow. None, or 0, for this process.
        shard: ``(i, n)`` to run only the i-th of n parts, i from 0: the episodes at positions i,
            i + n, i + 2n, .... Each has an ``output_dir`` of its own, with the manifest of the
            whole evaluation; :func:`tdcollect.merge` makes one evaluation of them.
        allow_mixed: take workers, and resume an evaluation, whose ``versions``, ``platform`` or
            ``device`` are others, which may change episodes. The manifest then has the values in
            its entry ``mixed``.
        retry_lost: run the episodes again that ``output_dir`` has as lost: they were given up
            because their workers ended. Nothing else runs again.
        recheck: run the shortest episode once more at the end, alone, and end with an error unless
            it is the same to the bit. False leaves this out, and ``results.json`` says so.
        settings: see :class:`tdcollect.evaluation.EvaluationSettings`.

    Returns:
        The result; ``result.summary()`` gives statistics, ``result.replay(i)`` runs an episode
        again, and ``result.missing`` names the episodes that a shard leaves to others.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured, before an env is made; and for
            a directory of another evaluation, naming the difference.
        NotReproducibleError: if the env or the policy does not give the same episode for the
            same seeds.
        RuntimeError: if workers end again and again as they make env and policy.

    Examples:
        >>> result = evaluate("CartPole-v1", policy, episodes=100, seed=0, output_dir="runs/test")
        >>> print(result.summary())
    """
    if request is not None and not isinstance(request, Request):
        raise TypeError(f"expected request to be a Request, got {type(request).__name__}")
    if request is not None and output_dir is None:
        raise ValueError("expected an output_dir, in which request is kept, got None; pass one")
    if retry_lost and output_dir is None:
        raise ValueError(
            "expected an output_dir, whose lost episodes run again, got None; pass one"
        )
    if output_dir is not None:
        check_directory(Path(output_dir))
        check_report_extras("evaluate(output_dir=...)")
        output_dir = os.path.abspath(output_dir)  # whatever the env's code changes to
    if request is not None:
        request = replace(request, directory=os.path.abspath(request.directory))
    part = None if shard is None else Shard.of(shard)
    check_names(evaluate, settings)
    asked = EvaluationSettings(episodes, seed, **settings)
    crew = as_workers(workers)
    with resumable(output_dir), ExitStack() as stack:
        runner: Runner
        if crew is None or not asked.episode_indices:
            runner = InThisProcess(env, policy, asked)
        else:
            if crew is not workers:
                stack.callback(crew.close)
            runner = Driver(
                crew, Job(env, policy, asked, crew.num_workers), allow_mixed=allow_mixed
            )
        stack.callback(runner.close)
        replay = replayer(env, policy, lambda index: replace(asked, episodes=[index]))
        return run_to_result(
            runner,
            asked.episode_indices,
            replay,
            keep_trajectories=keep_trajectories,
            output_dir=output_dir,
            progress=progress,
            request=request,
            shard=part,
            allow_mixed=allow_mixed,
            retry_lost=retry_lost,
            recheck=recheck,
        )
