"""Run test episodes to a result and its files: one evaluation, or many that share workers."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect.cleanup import ended_on_error
from tdcollect.evaluation.directory import Directory, check_directory, check_report_extras, finish
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.imports import exits_refused
from tdcollect.evaluation.ledger import MIXED, REPEATED, RUN, Batches, Episode, Shard, repeatability
from tdcollect.evaluation.manifest import describe
from tdcollect.evaluation.replay import Replay, replayer
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.requested import recognized
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import (
    EvaluationSettings,
    SettingsArguments,
    check_names,
    takes_settings,
)
from tdcollect.evaluation.workers.dispatcher import Dispatcher, Evaluation
from tdcollect.evaluation.workers.local import Workers, as_workers
from tdcollect.evaluation.workers.worker import Job
from tdcollect.progress import line_above, progress_bar, warn
from tdcollect.randomness import NotReproducibleError


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
    if output_dir is None and (request is not None or retry_lost):
        why = "whose lost episodes run again" if request is None else "in which request is kept"
        raise ValueError(f"expected an output_dir, {why}, got None; pass one")
    if output_dir is not None:
        check_directory(Path(output_dir))
        check_report_extras("evaluate(output_dir=...)")
        output_dir = os.path.abspath(output_dir)  # whatever the env's code changes to
    if request is not None:
        request = replace(request, directory=os.path.abspath(request.directory))
    part = None if shard is None else Shard.of(shard)
    check_names(evaluate, settings)
    asked = EvaluationSettings(episodes, seed, **settings)
    if asked.episodes_per_slot is not None and (part is not None or workers not in (None, 0)):
        raise ValueError(
            "expected no workers and no shard with episodes_per_slot: a batch runs whole, in this "
            "process, and batches that ran elsewhere need not be the same; leave them out"
        )
    policy = recognized(policy, env, asked)
    crew = as_workers(workers) if asked.episode_indices else None
    job = Job(env, policy, asked, 1 if crew is None else crew.num_workers)

    record = partial(
        Recording,
        indices=asked.episode_indices,
        keep_trajectories=keep_trajectories,
        output_dir=output_dir,
        shard=part,
        allow_mixed=allow_mixed,
        retry_lost=retry_lost,
        recheck=recheck,
        request=request,
        replay=replayer(env, policy, lambda index: replace(asked, episodes=[index])),
    )
    evaluation = Evaluation(lambda: job, record, keep_trajectories)
    bar = None

    def note(line: str) -> None:
        warn(line) if bar is None else line_above(bar, line)

    with resumable(output_dir), ExitStack() as stack:
        if crew is not None and crew is not workers:
            stack.callback(crew.close)
        events = run([evaluation], crew, allow_mixed=allow_mixed, note=note)
        for _, what in stack.enter_context(closing(events)):
            if isinstance(what, Exception):
                try:
                    raise what
                finally:
                    del what  # else it would refer to itself by its traceback
            if isinstance(what, EvaluationResult):
                return what
            if what is None and progress and (left := len(evaluation.recording.left)):
                bar = stack.enter_context(progress_bar(left, "test episodes", leave=False))
                if crew is not None:
                    bar.set_postfix({"workers": str(crew.num_workers)})
            elif what is not None and bar is not None and not evaluation.recording.again:
                bar.update(1)
            del what
    raise AssertionError("expected a result")


Event = tuple[Evaluation, Finished | EvaluationResult | Exception | None]
"""An evaluation and what came of it: None once its recording is open, an episode that has ended,
and at last its result, or the error that ended it."""


def run(
    evaluations: Iterable[Evaluation],
    workers: Workers | None = None,
    *,
    allow_mixed: bool = False,
    note: Callable[[str], None] = warn,
    refuse_exits: bool = False,
) -> Generator[Event, None, None]:
    """Run evaluations: one after the other in this process, or all together on workers; close it.

    One that fails leaves the others alone. One that waits for others lets the next one run.

    Args:
        evaluations: the evaluations.
        workers: the workers; None for this process.
        allow_mixed: as for :func:`tdcollect.evaluate`.
        note: is told in a line of each worker that is lost.
        refuse_exits: an evaluation whose code ends the program fails instead.
    """
    every = list(evaluations)
    try:
        if workers is None:
            yield from _by_turns(every, refuse_exits)
        else:
            with closing(Dispatcher(workers, allow_mixed, note)) as dispatcher:
                yield from _on_workers(every, dispatcher)
    except BaseException as error:
        for one in every:
            _given_up(one, error)
        raise


def _by_turns(every: Sequence[Evaluation], refuse_exits: bool) -> Iterator[Event]:
    """Run evaluations in this process, each until it has ended or waits for the others."""
    running = deque((one, _in_this_process(one)) for one in every)
    try:
        while running:
            one, events = running[0]
            try:
                with exits_refused() if refuse_exits else nullcontext():
                    event = next(events)
            except StopIteration:
                running.popleft()
            except Exception as error:
                running.popleft()
                yield one, _given_up(one, error)
            else:
                if event is None:
                    running.rotate(-1)
                    continue
                yield event
                del event  # else its data would stay in memory beside the next one's
    finally:
        for _, events in running:
            events.close()


def _in_this_process(one: Evaluation) -> Generator[Event | None, None, None]:
    """Run an evaluation; yields None where it waits for others."""
    job = one.make_job()
    with closing(EvaluationCollector.from_settings(job.env, job.policy, job.settings)) as collector:
        one.recording = one.record(describe(collector))
        yield one, None
        for indices in one.recording.rounds():
            if indices is None:
                yield None
                continue
            collector.episode_indices = indices
            with closing(collector.run(one.keep)) as episodes:
                for finished in episodes:
                    one.recording.add(*finished)
                    yield one, finished
                    del finished  # else its data would stay in memory beside the next one's
            one.errors |= collector.errors
        one.about = {"env": repr(collector.base), "threads": torch.get_num_threads()}
        yield one, _finished(one, one.about)


def _on_workers(every: Sequence[Evaluation], dispatcher: Dispatcher) -> Iterator[Event]:
    running, ended = set(every), deque[Evaluation]()
    rounds: dict[Evaluation, Iterator[Sequence[int] | None]] = {}
    waiting: dict[Evaluation, None] = {}

    def go_on(one: Evaluation) -> None:
        """Begin the next round of an evaluation whose last one has ended, or note its end."""
        indices = next(rounds[one], [])
        if indices is None:
            waiting[one] = None
            return
        waiting.pop(one, None)
        if indices:
            dispatcher.begin(one, indices)
        else:
            running.remove(one)
            ended.append(one)

    def taken_in(events: Iterable[Any]) -> Iterator[Event]:
        for one, what in events:
            if one not in running:
                continue
            try:
                if isinstance(what, Exception):
                    raise what
                if what is None:
                    one.recording = one.record(one.manifest)
                    rounds[one] = one.recording.rounds()
                    dispatcher.begin(one, [])
                else:
                    one.recording.add(*what)
                yield one, what
                what = None  # else its data would stay in memory beside the next one's
                for other in dict.fromkeys([*waiting, one]):
                    if not dispatcher.left(other):
                        go_on(other)
            except Exception as error:
                what = None  # else the error would refer to itself by its traceback
                running.remove(one)
                dispatcher.remove(one)
                yield one, _given_up(one, error)

    for one in every:
        dispatcher.add(one)
    while running or ended:
        yield from taken_in(dispatcher.hand_out())
        if ended:  # one at a time, as it writes a report, and while workers have enough to do
            one = ended.popleft()
            try:
                yield one, _finished(one, dispatcher.about(one))
            except Exception as error:
                yield one, _given_up(one, error)
            dispatcher.remove(one)
        if running:
            yield from taken_in(dispatcher.answers(not ended))


def _finished(one: Evaluation, about: Mapping[str, Any]) -> EvaluationResult:
    """Write the last files of an evaluation."""
    result: EvaluationResult = one.recording.finish(one.errors, about)
    one.recording.close()
    one.recording = None
    return result


def _given_up(one: Evaluation, error: Any) -> Any:
    """Leave the directory of an evaluation as it is after an error; return the error."""
    recording, one.recording = one.recording, None
    if recording is not None and recording.directory is not None:
        with closing(recording.directory) as directory:
            directory.give_up(error)
    return error


class Recording:
    """The episodes of one evaluation as they end, in its directory or in memory.

    ``close`` it after ``finish``, or its directory after an error.

    Args:
        manifest: of the evaluation.
        indices: of its episodes.
        replay: for the result.
        every_data: run those that have ended before once more, too: their data are asked for.
        others: as for :func:`tdcollect.evaluate`.

    Attributes:
        left: the indices of the episodes to run.
        again: the records of those that run once more now, by index.
        directory: the directory, or None.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        indices: Sequence[int],
        *,
        keep_trajectories: bool = False,
        output_dir: str | os.PathLike[str] | None = None,
        shard: Shard | None = None,
        allow_mixed: bool = False,
        retry_lost: bool = False,
        recheck: bool = True,
        request: Request | None = None,
        replay: Replay | None = None,
        every_data: bool = False,
    ):
        self._manifest, self._shard, self._recheck = manifest, shard, recheck
        self._keeps, self._request, self._replay = keep_trajectories, request, replay
        self._every_data, self._for_data = every_data, False
        self.again: dict[int, Episode] = {}
        self._batches = Batches.of(manifest)
        self._repeated: dict[str, int] = {}
        if self._batches is not None and not self._batches.fit(manifest):
            raise ValueError(
                f"expected episodes to be a number of whole batches, of {self._batches.size} each "
                f"({self._batches.slots} slots, {self._batches.episodes_per_slot} of each), got "
                f"{len(indices)} episodes; pass a multiple of {self._batches.size}"
            )
        self._was_finished = False
        self._ended: list[Episode] = []
        self._trajectories: dict[int, TensorDict] = {}
        self.directory: Directory | None = None
        if output_dir is not None:
            self.directory = Directory(output_dir, manifest, shard, allow_mixed, retry_lost)
            self._ended = list(self.directory.episodes)
        with ended_on_error(self.close):
            if self.directory is not None and keep_trajectories:
                self.directory.check_kept(self._ended)
            there = {episode.index for episode in self._ended}
            own = indices if shard is None else shard.select(indices)
            self.left = [index for index in own if index not in there]
            self._started = time.time()
            if self.left:
                self.let_in(manifest)
            elif self.directory is not None:
                found = self.directory.rechecked
                self._was_finished = found is not None
                self._recheck = recheck if found is None else found

    def let_in(self, manifest: Mapping[str, Any]) -> None:
        """Note that episodes run under another manifest, too."""
        if self.directory is not None:
            self.directory.note_mixed(manifest)

    def rounds(self) -> Iterator[Sequence[int] | None]:
        """Yield the indices to run, round by round; None to wait for other evaluations."""
        if self.left:
            yield self.left
        yield from self.once_more()

    def once_more(self) -> Iterator[Sequence[int]]:
        """Yield the index of the shortest episode that ended, to run again.

        Where workers may differ (``mixed`` in the manifest), so may an episode: none runs again.
        """
        completed = [episode for episode in self._ended if episode.completed]
        mixed = MIXED in (self._manifest if self.directory is None else self.directory.manifest)
        if completed and self._recheck and not (self._was_finished or mixed):
            again = self._shortest(completed)
            self.again = {episode.index: episode for episode in again}
            if self._batches is not None:
                batch = again[0].index // self._batches.size
                self._repeated = {"batch": batch, "episodes": len(again), "differing": 0}
            yield [*self.again]
        run = {*self.left}
        if self._every_data and any(episode.index not in run for episode in completed):
            self._for_data = True
            self.again = {one.index: one for one in completed if one.index not in run}
            yield [*self.again]

    def _shortest(self, completed: Sequence[Episode]) -> list[Episode]:
        """Return the shortest episode; of a batched simulator, those of the shortest batch."""
        if self._batches is None:
            return [min(completed, key=lambda episode: (episode.length, episode.index))]
        steps: dict[int, dict[int, int]] = {}  # of each slot, by batch
        for episode in completed:
            batch, slot, _ = self._batches.place(episode.index).values()
            slots = steps.setdefault(batch, {})
            slots[slot] = slots.get(slot, 0) + (episode.length or 0)
        shortest = min(steps, key=lambda batch: (max(steps[batch].values()), batch))
        indices = self._batches.indices(shortest)
        return [episode for episode in completed if episode.index in indices]

    def add(self, record: Episode, data: TensorDict | None) -> None:
        """Take an episode that has ended; one that runs once more leaves no trace.

        Raises:
            NotReproducibleError: if it is another one then.
        """
        if self.again:
            before = self.again.get(record.index)  # None: it comes late, from a lost worker
            if before is None:
                return
            if self._repeated:
                outcomes = {(one.digest, repr(one.metrics)) for one in (before, record)}
                self._repeated["differing"] += len(outcomes) > 1
                return
            if record.digest == before.digest:
                if repr(record.metrics) == repr(before.metrics):  # NaN is not equal to itself
                    return
                raise NotReproducibleError(
                    f"the metrics of episode {record.index} are {before.metrics}, and "
                    f"{record.metrics} when it runs once more, though its data are the same to the "
                    "bit: an info or a function of theirs depends on something else, such as time"
                )
            if self._for_data:
                raise NotReproducibleError(
                    f"episode {record.index} is not what the ledger says, now that it runs again "
                    "for metrics_fn: env or policy do not give the same episode for the same seeds"
                )
            if record.completed:  # one that fails now tells nothing
                raise NotReproducibleError(
                    f"episode {record.index}, the shortest, is another one when it runs once more, "
                    "alone: env or policy keep something from one episode to the next, or draw "
                    "random numbers that no seed reaches. Keep what the policy remembers in "
                    "entries of the TensorDict, or in an agent for each episode, "
                    "tdcollect.policies.from_agent(make); tdcollect doctor looks at the env"
                )
            return
        self._ended.append(record)
        if self.directory is not None:
            self.directory.add(record, data)
        elif data is not None and self._keeps:
            self._trajectories[record.index] = data

    def finish(self, errors: Mapping[int, str], about: Mapping[str, Any]) -> EvaluationResult:
        """Write the last files, and return the result.

        Args:
            errors: the last error of each failed episode, by index, as text.
            about: the env and what ran it, for the notes on the run.
        """
        directory = self.directory
        if self._repeated:
            self._manifest = {**self._manifest, REPEATED: self._repeated}
            if directory is not None:
                directory.note_repeated(self._repeated)
            if self._repeated["differing"]:
                warnings.warn(repeatability(self._manifest), stacklevel=2)
        manifest = self._manifest if directory is None else directory.manifest
        output_dir = None if directory is None else directory.path
        failed = {episode.index for episode in self._ended if not episode.completed}
        errors = {index: text for index, text in errors.items() if index in failed}
        result = EvaluationResult(
            manifest, self._ended, output_dir, self._trajectories, self._replay, errors
        )
        if directory is not None:
            # First, as a full disk may have room for it alone; a run that is finished has its note.
            if self.left or not (self._was_finished or (directory.path / RUN).exists()):
                part = {} if self._shard is None else {"shard": self._shard}
                directory.note_run(self._started, len(self.left), {**about, **part})
            finish(directory, result, self._request, self._recheck)
        return result

    def close(self) -> None:
        """Release the directory."""
        if self.directory is not None:
            self.directory.close()


@contextmanager
def resumable(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Have an interrupt say in one line how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        if directory is not None:
            error.add_note(f"the same call goes on with the episodes that {directory} lacks")
        raise
