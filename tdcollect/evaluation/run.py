"""Run test episodes to a result and its files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.finishing import check_report_extras, finish
from tdcollect.evaluation.ledger.directory import Directory, check_directory
from tdcollect.evaluation.ledger.manifest import describe
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.ledger.shards import Shard
from tdcollect.evaluation.replay import replayer
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import (
    EvaluationSettings,
    SettingsArguments,
    takes_settings,
)
from tdcollect.progress import progress_bar

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
    shard: tuple[int, int] | None = None,
    allow_mixed: bool = False,
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
        shard: ``(i, n)`` to run only the i-th of n parts, i from 0: the episodes at positions i,
            i + n, i + 2n, .... Each has an ``output_dir`` of its own, with the manifest of the
            whole evaluation; :func:`tdcollect.merge` makes one evaluation of them.
        allow_mixed: resume an evaluation whose ``versions``, ``platform`` or ``device`` were
            others, which may change episodes. The manifest then has the values in its entry
            ``mixed``.
        settings: see :class:`tdcollect.evaluation.EvaluationSettings`.

    Returns:
        The result; ``result.summary()`` gives statistics, ``result.replay(i)`` runs an episode
        again, and ``result.missing`` names the episodes that a shard leaves to others.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured, before an env is made; and for
            a directory of another evaluation, naming the difference.
        NotReproducibleError: if the env or the policy does not give the same episode for the
            same seeds.

    Examples:
        >>> result = evaluate("CartPole-v1", policy, episodes=100, seed=0, output_dir="runs/test")
        >>> print(result.summary())
    """
    if request is not None and not isinstance(request, Request):
        raise TypeError(f"expected request to be a Request, got {type(request).__name__}")
    if request is not None and output_dir is None:
        raise ValueError("expected an output_dir, in which request is kept, got None; pass one")
    if output_dir is not None:
        check_directory(Path(output_dir))
        check_report_extras("evaluate(output_dir=...)")
    part = None if shard is None else Shard.of(shard)
    asked = EvaluationSettings(episodes, seed, **settings)

    with ExitStack() as stack:
        running = stack.enter_context(EvaluationCollector.from_settings(env, policy, asked))
        manifest = describe(running)
        ended: list[Episode] = []
        directory = None
        if output_dir is not None:
            directory = Directory(output_dir, manifest, part, allow_mixed)
            stack.callback(directory.close)
            ended = list(directory.episodes)
            if keep_trajectories:
                directory.check_kept(ended)
        trajectories: dict[int, TensorDict] = {}
        there = {episode.index for episode in ended}
        own = running.episode_indices if part is None else part.select(running.episode_indices)
        running.episode_indices = [i for i in own if i not in there]
        started, left = time.time(), len(running.episode_indices)
        if directory is not None:
            if left:
                directory.note_mixed(manifest)
            manifest = directory.manifest
        run = running.run(keep_trajectories)
        try:
            for record, data in _with_progress(run, left) if progress and left else run:
                ended.append(record)
                if directory is not None:
                    directory.add(record, data)
                elif data is not None:
                    trajectories[record.index] = data
        except BaseException as error:
            if directory is not None:
                directory.give_up(error)
            raise
        replay = replayer(env, policy, lambda index: replace(asked, episodes=[index]))
        result = EvaluationResult(manifest, ended, output_dir, trajectories, replay, running.errors)
        if directory is not None:
            finish(directory, result, request)
            if left:
                how: dict[str, Any] = {
                    "env": repr(running.base),
                    "threads": torch.get_num_threads(),
                }
                if part is not None:
                    how["shard"] = list(part)
                directory.note_run(started, left, how)
        return result


def _with_progress(run: Generator[Finished, None, None], total: int) -> Iterator[Finished]:
    """Yield the finished episodes, with a progress bar."""
    with closing(run), progress_bar(total, "test episodes", leave=False) as bar:
        for finished in run:
            bar.update(1)
            yield finished
            del finished  # else its data would stay in memory beside the next one's
