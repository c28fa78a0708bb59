"""Run test episodes to a result and its files: one evaluation, or many that share workers."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect import check
from tdcollect.cleanup import ended_on_error
from tdcollect.evaluation.directory import Directory, check_directory, check_report_extras
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.data import MOST, POLICY_ADVICE, Finished, unlike
from tdcollect.evaluation.episodes.trial import Again, Feed
from tdcollect.evaluation.ledger import (
    COMPLETED,
    CUT,
    FAILED,
    FRESH_ENVS,
    REPEATED,
    REQUEST,
    RUN,
    Batches,
    Episode,
    Shard,
    repeatability,
)
from tdcollect.evaluation.manifest import describe, known_of
from tdcollect.evaluation.replay import Replay, run_again
from tdcollect.evaluation.request import Request, exits_refused
from tdcollect.evaluation.requested import recognized
from tdcollect.evaluation.result import EvaluationResult, finish
from tdcollect.evaluation.settings import EvaluationSettings, takes_settings
from tdcollect.evaluation.workers.dispatcher import Dispatcher, Evaluation
from tdcollect.evaluation.workers.local import Found, Workers, as_workers
from tdcollect.evaluation.workers.worker import Job, set_weights
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
    keep_steps: bool = True,
    output_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    request: Request | None = None,
    workers: Workers | int | None = None,
    shard: tuple[int, int] | None = None,
    recheck: bool = True,
    **settings: Any,
) -> EvaluationResult:
    """Run test episodes by index, the same to the bit however they are run.

    With ``output_dir``, the ledger grows there as episodes end. Run again with the same arguments,
    it resumes the evaluation found there, or finds it done. Episodes that were lost, given up
    because their workers ended, run again then.

    Args:
        env: see :class:`tdcollect.EvaluationCollector`, as for the policy: a gymnasium id, any
            ``EnvBase``, or a function that makes an env.
        policy: any policy that a collector takes; None for random actions.
        episodes: the number of episodes, or their indices.
        seed: the root seed.
        keep_trajectories: keep the data of episodes: in memory, or under ``output_dir`` as
            ``.npz`` files. Refused if episodes have ended there without.
        keep_steps: keep actions, rewards, and one number of each other entry, of all steps, under
            ``output_dir``; some tens of bytes a step. Without, those of the witness alone.
        output_dir: the directory for the ledger, the statistics and the report.
        progress: show a progress bar, on a terminal and in a notebook, if tqdm is installed;
            elsewhere a line every 30 seconds.
        request: env and policy by name, as the command line takes them. ``run.json`` keeps the
            names, and the report then has the commands that run episodes again.
        workers: a number of processes that run the episodes, each on slots of its own; or
            :class:`tdcollect.LocalWorkers`, :class:`tdcollect.RayWorkers`, which stay for the
            evaluations that follow. None, or 0, for this process.
        shard: ``(i, n)`` to run only the i-th of n parts, i from 0: the episodes at positions i,
            i + n, i + 2n, .... Each has an ``output_dir`` of its own, with the manifest of the
            whole evaluation; :func:`tdcollect.merge` makes one evaluation of them.
        recheck: run a short episode once more at the end, in its first 1,000 steps, and end with an
            error unless it is the same to the bit. Whoever goes on with an evaluation,
            or finds it finished, runs the witness likewise: the first listed episode that
            completed. False leaves both out, and ``results.json`` says so.
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
    if output_dir is not None:
        check_directory(Path(output_dir))
        check_report_extras("evaluate(output_dir=...)")
        output_dir = os.path.abspath(output_dir)  # whatever the env's code changes to
    elif request is not None:
        raise ValueError("expected an output_dir, which keeps the names of request; pass one")
    part = None if shard is None else Shard.of(shard)
    check.arguments(evaluate, settings)
    chosen = EvaluationSettings(episodes, seed, **settings)
    chosen.check_whole(part is None and workers in (None, 0))
    policy = recognized(policy, env, chosen)
    crew = None
    if workers is not None and chosen.episode_indices:
        crew = as_workers(workers)
    job = partial(Job, env, policy, chosen, 1 if crew is None else crew.num_workers)

    record = partial(
        Recording,
        indices=chosen.episode_indices,
        keep_trajectories=keep_trajectories,
        keep_steps=keep_steps,
        output_dir=output_dir,
        shard=part,
        recheck=recheck,
        request=request,
        replay=partial(run_again, env, policy, lambda these: replace(chosen, episodes=these)),
    )
    evaluation = Evaluation(job, record, keep_trajectories)
    indices = chosen.episode_indices if part is None else part.select(chosen.episode_indices)
    shown = len(indices) * progress
    with followed([evaluation], workers, crew, output_dir, shown) as (events, _):
        for _, what in events:
            if isinstance(what, EvaluationResult):
                return what
            del what
    raise AssertionError("expected a result")


_WITNESSES = 3  # episodes of other shards that may fail, before a shard has a witness of its own
Event = tuple[Evaluation, Finished | EvaluationResult | Exception | None]
"""An evaluation and what came of it: None once its recording is open, an episode that has ended,
and at last its result, or the error that ended it."""


def run(
    evaluations: Iterable[Evaluation],
    workers: Workers | None = None,
    *,
    note: Callable[[str], None] = warn,
    refuse_exits: bool = False,
) -> Generator[Event, None, None]:
    """Run evaluations: one after the other in this process, or all together on workers; close it.

    One that fails leaves the others alone, with ``refuse_exits`` even where its code ends the
    program. One that waits for others lets the next one run. ``note`` is told in a line of each
    worker that is lost.
    """
    every = list(evaluations)
    if workers is None:
        return _by_turns(every, refuse_exits)
    return _dispatched(every, workers, note)


def _dispatched(
    every: Sequence[Evaluation], workers: Workers, note: Callable[[str], None]
) -> Generator[Event, None, None]:
    try:
        with closing(Dispatcher(workers, note)) as dispatcher:
            yield from _on_workers(every, dispatcher)
    except BaseException as error:
        for one in every:
            _given_up(one, error)
        raise


def _by_turns(every: Sequence[Evaluation], refuse_exits: bool) -> Generator[Event, None, None]:
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
    except BaseException as error:
        for one, events in running:
            events.close()
            _given_up(one, error)
        raise


def _in_this_process(one: Evaluation) -> Generator[Event | None, None, None]:
    """Run an evaluation; yields None where it waits for others."""
    job = one.make_job()
    if one.weights is None:
        collector = EvaluationCollector.from_settings(job.env, job.policy, job.settings)
    else:  # of a copy of the policy
        collector = job.open()
    with closing(collector):
        if one.weights:
            set_weights(collector, one.weights)
        recording = one.recording = one.record(describe(collector))
        collector.tell(recording.manifest.get(FRESH_ENVS))
        yield one, None
        for indices in recording.rounds():
            if indices is None:
                yield None
                continue
            collector.episode_indices = indices
            feed = Feed(map(Again, indices) if recording.cuts else indices)
            with closing(
                collector.run(one.keep, feed, keep_steps=recording.keep_steps)
            ) as episodes:
                for finished in episodes:
                    recording.note(known_of(collector))
                    recording.add(finished)
                    yield one, finished
                    del finished  # else its data would stay in memory beside the next one's
            recording.note(known_of(collector))
            one.errors |= collector.errors
        one.about = {"env": repr(collector.base), "threads": torch.get_num_threads()}
        yield one, _finished(one, one.about)


def _on_workers(every: Sequence[Evaluation], dispatcher: Dispatcher) -> Iterator[Event]:
    running, ended = set(every), deque[Evaluation]()
    rounds: dict[Evaluation, Iterator[Sequence[int] | None]] = {}

    def given_up(one: Evaluation, error: Exception) -> Event:
        running.remove(one)
        dispatcher.remove(one)
        return one, _given_up(one, error)

    def taken_in(events: Iterable[Any]) -> Iterator[Event]:
        for one, what in events:
            if one not in running:
                continue
            try:
                if isinstance(what, Exception):
                    raise what
                if what is None:
                    one.recording = one.record(one.manifest)
                    dispatcher.tell(one, one.recording.manifest.get(FRESH_ENVS))
                    rounds[one] = one.recording.rounds()
                    dispatcher.begin(one, [])
                elif isinstance(what, Finished):
                    one.recording.add(what)
                if not isinstance(what, Found):
                    yield one, what
                what = None  # else its data would stay in memory beside the next one's
            except Exception as error:
                what = None  # else the error would refer to itself by its traceback
                yield given_up(one, error)

    def gone_on() -> Iterator[Event]:
        """Begin the next round of each evaluation whose last one has ended, or note its end.

        All are looked at: what one is told of an env may end the round of another.
        """
        for one in [one for one in rounds if one in running and not dispatcher.left(one)]:
            try:
                indices = next(rounds[one], [])
            except Exception as error:
                yield given_up(one, error)
                continue
            if indices:
                dispatcher.begin(one, indices)
            elif indices is not None:  # else it waits for others
                running.remove(one)
                ended.append(one)

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
        yield from gone_on()


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

    ``close`` it after ``finish``, or its directory after an error. With ``every_data``, those that
    have ended before run once more, too, as their data are asked for.

    Attributes:
        manifest: that of the evaluation, and what is known of it once episodes run.
        left: the indices of the episodes to run.
        again: what those were before that run once more now, by index; None of one that was not
            there, and is the witness from then on.
        cuts: those that run once more are cut after 1,000 steps.
        keep_steps: the steps of all episodes are kept.
        witness: the first listed episode that completed, with its steps.
        directory: the directory, or None.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        indices: Sequence[int],
        *,
        keep_trajectories: bool = False,
        keep_steps: bool = True,
        output_dir: str | os.PathLike[str] | None = None,
        shard: Shard | None = None,
        retry_lost: bool = True,
        recheck: bool = True,
        request: Request | None = None,
        replay: Replay | None = None,
        every_data: bool = False,
    ):
        self.manifest, self._shard, self.recheck = dict(manifest), shard, recheck
        self._keeps, self._request, self._replay = keep_trajectories, request, replay
        self.keep_steps = keep_steps and output_dir is not None
        self._listed, self._every_data = indices, every_data
        self.again: dict[int, Finished | None] = {}
        self.cuts = False
        self.witness: Finished | None = None
        self._place: Callable[[int], int] = indices.index
        if not isinstance(indices, range):
            self._place = {index: at for at, index in enumerate(indices)}.__getitem__
        self._settled = 0  # so many of those listed first have ended, and others, by their places
        self._others_ended = set[int]()
        self._candidate: Finished | None = None  # for the episode that runs once more at the end
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
            self.directory = Directory(output_dir, manifest, shard, retry_lost)
            self.manifest = self.directory.manifest
            self._ended = list(self.directory.episodes)
            self.witness = self.directory.witness
        with ended_on_error(self.close):
            if self.directory is not None and keep_trajectories:
                self.directory.check_kept(self._ended)
            there = {episode.index for episode in self._ended}
            own = indices if shard is None else shard.select(indices)
            self.left = [index for index in own if index not in there]
            self._started = time.time()
            if not self.left and self.directory is not None and self.directory.was_finished:
                self._was_finished = True
                self.recheck = recheck and bool(self.directory.rechecked)
            self._has_witness = self.recheck and self._batches is None

    def note(self, entries: Mapping[str, Any]) -> None:
        """Note entries of the manifest that are known once episodes run.

        That envs are used again is not noted: after an interruption, too few episodes may be left
        to find out, and the files are to be those of one run.
        """
        if self.directory is not None:
            if not self.directory.begun:
                return  # what is there may be of another env; later rounds tell it again
            self.directory.is_tried |= FRESH_ENVS in entries
        for name, value in entries.items():
            if value and self.manifest.get(name) != value:
                self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        if self.directory is None:
            self.manifest[name] = value
        else:  # whose manifest it is, too
            self.directory.note({name: value})

    def rounds(self) -> Iterator[Sequence[int] | None]:
        """Yield the indices to run, round by round; None to wait for other evaluations."""
        yield from self.witnessed()
        if self.left:
            yield self.left
        yield from self.once_more()

    def witnessed(self) -> Iterator[Sequence[int]]:
        """Yield the index of the witness, before anything is written.

        In a shard that begins, it is the first listed episode of another shard.
        """
        asks = self._has_witness
        if asks and self.witness is not None and self.directory is not None:
            yield self._run_again({self.witness.record.index: self.witness})
        if self.directory is not None:
            self.directory.begin()
        own = {*self.left}
        if asks and self._shard is not None and self.witness is None and self.left:
            for index in self._listed[:_WITNESSES]:
                if index in own or self.witness is not None:
                    break
                yield self._run_again({index: None})
        self.again, self.cuts = {}, False

    def _run_again(self, expected: Mapping[int, Finished | None], cuts: bool = True) -> list[int]:
        self.again, self.cuts = dict(expected), cuts
        return [*expected]

    def once_more(self) -> Iterator[Sequence[int]]:
        """Yield the index of an episode to run again, in the slot that was used most.

        It is the shortest that ran first in its slot.
        """
        completed = [episode for episode in self._ended if episode.completed]
        if completed and self.recheck and not self._was_finished:
            if self._batches is not None:
                again = self._shortest_batch(completed)
                batch = again[0].index // self._batches.size
                self._repeated = {"batch": batch, "episodes": len(again), "differing": 0}
                expected = [Finished(episode) for episode in again]
            else:
                expected = [self._candidate or Finished(min(completed, key=_length))]
            cuts = self._batches is None
            yield self._run_again({one.record.index: one for one in expected}, cuts)
        run = {*self.left}
        if self._every_data and any(episode.index not in run for episode in completed):
            before = {one.index: Finished(one) for one in completed if one.index not in run}
            yield self._run_again(before, cuts=False)

    def _shortest_batch(self, completed: Sequence[Episode]) -> list[Episode]:
        """Return the episodes of the shortest batch of a simulator."""
        assert self._batches is not None
        steps: dict[int, dict[int, int]] = {}  # of each slot, by batch
        for episode in completed:
            batch, slot, _ = self._batches.place(episode.index).values()
            slots = steps.setdefault(batch, {})
            slots[slot] = slots.get(slot, 0) + (episode.length or 0)
        shortest = min(steps, key=lambda batch: (max(steps[batch].values()), batch))
        indices = self._batches.indices(shortest)
        return [episode for episode in completed if episode.index in indices]

    def add(self, ended: Finished) -> None:
        """Take an episode that has ended; one that runs once more is compared, and not kept."""
        record = ended.record
        if self.again:
            self._compare(ended)
            return
        self._ended.append(record)
        self._others_ended.add(self._place(record.index))
        while self._settled in self._others_ended:
            self._others_ended.remove(self._settled)
            self._settled += 1
        if record.completed:
            self._take_as_witness(ended)
        if self.directory is not None:
            self.directory.add(record, ended.data, ended.steps if self.keep_steps else None)
        elif ended.data is not None and self._keeps:
            self._trajectories[record.index] = ended.data

    def _take_as_witness(self, ended: Finished) -> None:
        """Keep the steps of an episode as a witness, and of one to run again at the end."""
        seen = ended._replace(data=None, steps=None if ended.steps is None else ended.steps[:MOST])
        best = self._candidate
        if seen.nth == 1 and (best is None or _length(seen.record) < _length(best.record)):
            self._candidate = seen
        before = self.witness
        at = self._place(seen.record.index)
        if before is None or at < self._place(before.record.index):
            self.witness = seen
            if self.directory is not None:
                self.directory.keep_witness(seen)

    def _compare(self, ended: Finished) -> None:
        record = ended.record
        if record.index not in self.again:  # it comes late, from a lost worker
            return
        before = self.again[record.index]
        if before is None:
            if record.status in (COMPLETED, CUT):
                self._take_as_witness(ended)
            return
        differs = unlike(before, ended)
        if self._repeated:
            self._repeated["differing"] += differs is not None
            return
        if differs is None or record.status == FAILED:  # by chance: it tells nothing
            return
        what = f"episode {record.index} is another one when it runs once more: {differs}"
        if self.directory is not None and not self.directory.begun:
            raise ValueError(
                f"{self.directory.path} holds an evaluation of another policy or env: {what}. "
                "Choose another directory, or remove this one to start again; if env and policy "
                f"are those of then, {POLICY_ADVICE}"
            )
        raise NotReproducibleError(
            f"{what}. The env keeps something from one episode to the next, or draws random "
            f"numbers that no seed reaches, or {POLICY_ADVICE}; tdcollect doctor looks at the env"
        )

    @property
    def proof(self) -> int | None:
        """The index of the witness, if it is found and other workers are to run it, too."""
        if not self._has_witness or self.again or self.witness is None:
            return None
        index = self.witness.record.index
        return index if self._place(index) <= self._settled else None

    def prove(self, ended: Finished, by: str) -> None:
        """Raise NotReproducibleError if the witness is another one on another worker."""
        assert self.witness is not None
        differs = unlike(self.witness, ended)
        if differs is not None and ended.record.status != FAILED:
            raise NotReproducibleError(
                f"episode {ended.record.index} is another one on {by}: {differs}. The machines "
                f"differ, or the env draws random numbers that no seed reaches, or {POLICY_ADVICE}"
            )

    def finish(self, errors: Mapping[int, str], about: Mapping[str, Any]) -> EvaluationResult:
        """Write the last files, and return the result; ``about`` is for the notes on the run."""
        directory = self.directory
        if self._repeated:
            self._add(REPEATED, self._repeated)
            if self._repeated["differing"]:
                warnings.warn(repeatability(self.manifest), stacklevel=2)
        if errors:  # also of episodes that completed, elsewhere or later
            failed = {episode.index for episode in self._ended if not episode.completed}
            errors = {index: text for index, text in errors.items() if index in failed}
        result = EvaluationResult(
            self.manifest,
            self._ended,
            None if directory is None else directory.path,
            self._trajectories,
            self._replay,
            errors,
            self.witness,
        )
        if directory is not None:
            # First, as a full disk may have room for it alone; a run that is finished has its note.
            if self.left or not (self._was_finished or (directory.path / RUN).exists()):
                part: dict[str, Any] = {} if self._shard is None else {"shard": self._shard}
                part |= {} if self._request is None else {REQUEST: self._request.names()}
                directory.note_run(self._started, len(self.left), {**about, **part})
            finish(directory, result, self.recheck)
        return result

    def close(self) -> None:
        """Release the directory."""
        if self.directory is not None:
            self.directory.close()


def _length(episode: Episode) -> tuple[int, int]:
    return (episode.length or 0, episode.index)


@contextmanager
def followed(
    evaluations: Collection[Evaluation],
    workers: Workers | int | None,
    crew: Workers | None,
    directory: str | os.PathLike[str] | None,
    episodes: int,
    refuse_exits: bool = False,
) -> Iterator[tuple[Iterator[Event], Any]]:
    """Run evaluations as :func:`run` does; gives the events, and the bar or None.

    The bar is of so many episodes of each. The crew is closed unless it is the user's ``workers``.
    An error that ends an evaluation is raised, unless exits are refused, too.
    """
    bar = None
    with resumable(directory), ExitStack() as stack:
        if crew is not None and crew is not workers:
            stack.callback(crew.close)
        if total := episodes * len(evaluations):
            bar = stack.enter_context(progress_bar(total, "test episodes"))
        if bar is not None and crew is not None:
            bar.set_postfix({"workers": str(crew.num_workers)})
        note = warn if bar is None else partial(line_above, bar)
        events = run(evaluations, crew, note=note, refuse_exits=refuse_exits)

        def counted(event: Event) -> Event:
            one, what = event
            if isinstance(what, Exception) and not refuse_exits:
                try:
                    raise what
                finally:
                    del event, what  # else it would refer to itself by its traceback
            if bar is not None and what is None:
                if there := episodes - len(one.recording.left):
                    bar.update(there)
            elif bar is not None and isinstance(what, Finished) and not one.recording.again:
                bar.update(1)
            return event

        yield map(counted, stack.enter_context(closing(events))), bar


@contextmanager
def resumable(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Have an interrupt say in one line how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        if directory is not None:
            error.add_note(f"the same call goes on with the episodes that {directory} lacks")
        raise
