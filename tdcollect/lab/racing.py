"""Running a race: policies play the same episodes in blocks, until it is decided which is better.

Whatever runs the episodes, the decision and the files are those of one process: looks follow from
the records of blocks in their order, and what was begun beyond the last one is discarded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from torchrl.envs import EnvBase

from tdcollect import check
from tdcollect.display import number_texts
from tdcollect.evaluation import ledger
from tdcollect.evaluation.directory import check_report_extras
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.episodes.groups import is_measure
from tdcollect.evaluation.episodes.opening import SLOTS
from tdcollect.evaluation.evaluate import Recording, followed
from tdcollect.evaluation.replay import run_again
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.requested import recognized
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings, takes_settings
from tdcollect.evaluation.workers.dispatcher import Evaluation
from tdcollect.evaluation.workers.local import Workers, as_workers
from tdcollect.evaluation.workers.worker import Job
from tdcollect.files import write_json
from tdcollect.lab import race as files
from tdcollect.lab.sequential import Rule
from tdcollect.pages.build import REPORT, write_page
from tdcollect.randomness import NotReproducibleError


@takes_settings
def race(
    env: str | Callable[..., Any],
    policies: Mapping[str, Any],
    max_episodes: int = 1000,
    seed: int = 0,
    *,
    on: str = "return",
    return_range: tuple[float, float] | None = None,
    alpha: float = 0.05,
    margin: float | None = None,
    failed: str | None = None,
    lower_is_better: bool = False,
    block: int = 10,
    keep_trajectories: bool = False,
    output_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    requests: Mapping[str, Request] | None = None,
    workers: Workers | int | None = None,
    recheck: bool = True,
    **settings: Any,
) -> files.RaceResult:
    """Have policies play the same test episodes until it is decided which is better.

    After each block of episodes there is a look, and the probability of a wrong decision is at most
    ``alpha`` over all looks and all policies together. A policy that is shown to be worse than
    another plays no more. With ``output_dir``, the same call resumes a race.

    Args:
        env: a gymnasium id, or a function that makes an env; see :func:`tdcollect.evaluate`.
        policies: two policies or more, by name.
        max_episodes: the most episodes of a policy: those of indices from 0.
        seed: the root seed.
        on: ``"return"``, ``"success"`` as the env reports it, the name of one of ``metrics``, or a
            number of a group of agents, such as ``"return/red"``.
        return_range: the lowest and the highest return (or value of the metric) that an episode can
            have; needed to compare means. Without it, the race is on the sign of the difference.
        alpha: the probability of a wrong decision.
        margin: end, too, once no difference is larger than this.
        failed: how episodes that failed, were lost or have no value count: ``"worst"``, or
            ``"leave out"`` the pair. By default the first where there is a worst value.
        lower_is_better: of a metric such as a cost.
        block: the number of episodes between two looks. It belongs to the rule: workers and slots
            do not change it.
        keep_trajectories, progress, workers, recheck, settings: as for :func:`tdcollect.evaluate`.
        output_dir: the directory of the race, with the evaluation of each policy in
            ``policies/NAME``: that of the episodes that count, as ``evaluate`` writes it.
        requests: env and policy of each, by name, as the command line takes them.

    Returns:
        The result; print it.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured, before an env is made; for a
            directory of another race; and for a return outside the range, naming the episode.
        NotReproducibleError, RuntimeError: as :func:`tdcollect.evaluate`.

    Examples:
        >>> result = race("CartPole-v1", {"old": a, "new": b}, return_range=(0, 500))
        >>> print(result)
    """
    check.arguments(race, settings)
    _check_racers(env, policies)
    rule = Rule((*policies,), on, return_range, alpha, margin, failed, lower_is_better)
    looks = files.Looks(files.RacePlan(rule, block, max_episodes))
    most = _settings(on, max_episodes, seed, settings)
    _check_distinct(policies, requests or {})
    output_dir = _claimed(output_dir, looks.plan)
    crew = as_workers(workers)
    count = 1 if crew is None else crew.num_workers
    evaluations, results = {}, dict[str, EvaluationResult]()
    how = {"keep_trajectories": keep_trajectories, "recheck": recheck}
    for name, policy in policies.items():
        racer = _evaluation(
            Job(env, recognized(policy, env, most), most, max(1, count // len(policies))),
            looks=looks,
            name=name,
            slots=count * (most.num_envs or SLOTS),
            output_dir=None if output_dir is None else files.path_of(output_dir, name),
            request=(requests or {}).get(name),
            **how,
        )
        evaluations[racer] = name
    shown = max_episodes * progress
    with followed(evaluations, workers, crew, output_dir, shown) as (events, bar):
        for one, what in events:
            if isinstance(what, EvaluationResult):
                results[evaluations[one]] = what
            elif what is not None and bar is not None:
                bar.set_postfix(_running(looks))
            del what
    result = files.RaceResult(looks, results, output_dir)
    if output_dir is not None:
        write_page(output_dir / REPORT, files.race_page(result))
        write_json(output_dir / ledger.RACE, {"format": files.FORMAT, **result.to_dict()})
    return result


def _claimed(output_dir: str | os.PathLike[str] | None, plan: files.RacePlan) -> Path | None:
    """Return the directory of a race as an absolute path, made that of this race."""
    if output_dir is None:
        return None
    check_report_extras("race(output_dir=...)")
    root = Path(os.path.abspath(output_dir))
    files.claim(root, plan)
    return root


def _evaluation(job: Job, **how: Any) -> Evaluation:
    """Return the evaluation of a policy of a race."""
    env, policy, most = job.env, job.policy, job.settings
    replay = partial(run_again, env, policy, lambda indices: replace(most, episodes=indices))
    record = partial(_Racer, indices=most.episode_indices, replay=replay, **how)
    return Evaluation(lambda: job, record, how["keep_trajectories"])


def _check_racers(env: Any, policies: Any) -> None:
    if not isinstance(policies, Mapping):
        raise TypeError(
            f"expected policies by name, {{'old': a, 'new': b}}, got {type(policies).__name__}"
        )
    if isinstance(env, EnvBase):
        raise TypeError(
            f"expected env to be an id or a function that makes an env, got {type(env).__name__}: "
            "policies race side by side, each in envs of its own; pass a function"
        )


def _check_distinct(policies: Mapping[str, Any], requests: Mapping[str, Request]) -> None:
    for one, other in combinations(policies, 2):
        named = one in requests and requests[one] == requests.get(other)
        if named or policies[one] is policies[other]:
            got = f"one policy as {one!r} and as {other!r}"
            raise ValueError(f"expected policies that differ, got {got}; leave one out")


def _settings(
    on: str, max_episodes: int, seed: int, settings: dict[str, Any]
) -> EvaluationSettings:
    """Return the settings of a policy that plays most episodes."""
    if is_measure(on):
        settings["metrics"] = {on: on, **(settings.get("metrics") or {})}
    most = EvaluationSettings(max_episodes, seed, **settings)
    if most.episodes_per_slot is not None:
        raise ValueError(
            "expected no episodes_per_slot in a race, which looks at numbered episodes block by "
            "block; evaluate each policy in batches, and compare them"
        )
    if on not in ("return", "success", *(most.metrics or {})):
        raise ValueError(
            f"expected on to be 'return', 'success' or one of metrics, {[*(most.metrics or {})]}, "
            f"got {on!r}; name it in metrics"
        )
    return most


def _running(looks: files.Looks) -> dict[str, str]:
    """Return what is known so far, for a progress bar."""
    playing = looks.standing.playing
    if len(playing) == 2 and (known := looks.standing.history[playing]):
        difference, low, high = number_texts([known[-1].difference, known[-1].low, known[-1].high])
        return {" - ".join(playing): f"{difference} [{low}, {high}]"}
    return {"playing": ", ".join(playing)}


class _Racer(Recording):
    """The episodes of one policy of a race as they end.

    Its directory asks for the most episodes while the race is open, as the manifest does, and then
    for those that count. All policies share the slots.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        indices: Sequence[int],
        *,
        looks: files.Looks,
        name: str,
        slots: int,
        output_dir: Path | None,
        **how: Any,
    ):
        self._looks, self._name, self._slots = looks, name, slots
        most = len(indices)
        if output_dir is not None and (output_dir / ledger.MANIFEST).exists():
            most = min(most, len(ledger.asked_indices(ledger.read_manifest(output_dir))))
        self._open = most == len(indices)
        # An episode that was lost counts as the rule says: the race may have been decided by it.
        how = {**how, "output_dir": output_dir, "retry_lost": False}
        super().__init__(first(manifest, most), range(most), **how)
        for record in self._ended:
            looks.take(name, record)

    def rounds(self) -> Iterator[Sequence[int] | None]:
        """Yield the indices to run, block by block until the race is decided."""
        if not self._open:
            yield from super().rounds()
            return
        yield from self.witnessed()
        while (indices := self._looks.following(self._name, self._slots)) != []:
            yield indices
        self._settle(self._looks.played[self._name])
        yield from self.once_more()

    def add(self, ended: Finished) -> None:
        """Take an episode that has ended, and look."""
        record = ended.record
        if self.again:
            super().add(ended)
            return
        before = self._looks.records[self._name].get(record.index)
        if before is None:
            super().add(ended)
            self._looks.take(self._name, record)
        elif before.digest != record.digest:  # of a worker that was given up
            raise NotReproducibleError(
                f"expected one digest of episode {record.index} of {self._name}, which ran twice, "
                f"got {before.digest} and {record.digest}: something that no seed reaches decides "
                "the episode"
            )

    def _settle(self, count: int) -> None:
        """Go on with the episodes that count alone."""
        self._ended = [episode for episode in self._ended if episode.index < count]
        self._trajectories = {n: data for n, data in self._trajectories.items() if n < count}
        self.left = [index for index in self.left if index < count]
        self.manifest = first(self.manifest, count)
        if self.directory is not None:
            self.directory.cut(self._ended, self.manifest)


def first(manifest: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the manifest of the first so many episodes of an evaluation of more."""
    seeds = dict(manifest["seeds"])
    if "env" in seeds:
        seeds["env"] = seeds["env"][:count]
    shorter = {**manifest, "episodes": count, "seeds": seeds}
    if ledger.OPTIONS in shorter:
        options = shorter[ledger.OPTIONS]
        shorter[ledger.OPTIONS] = {**options, "options": options["options"][:count]}
    return shorter
