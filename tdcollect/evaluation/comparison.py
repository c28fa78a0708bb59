"""Comparison of policies, episode by episode, on the same episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tdcollect import check, display
from tdcollect.evaluation import ledger, statistics
from tdcollect.evaluation.episodes.data import policy_difference
from tdcollect.evaluation.ledger import Episode, manifest_entry, policy_name
from tdcollect.evaluation.statistics import (
    Interval,
    MetricDifference,
    SuccessDifference,
    mean_text,
)
from tdcollect.packages import extra_module

OF_POLICY = ("policy.exploration", "policy.mode")
_SLOTS = (f"{ledger.BATCHES}.slots", PER_SLOT := f"{ledger.BATCHES}.episodes_per_slot")
SAME = ("protocol", *_SLOTS, "env", "max_episode_steps", "returns")
REMARKED = (
    *(ledger.METRICS, "inference_batch_size", "inference_threads"),
    *("device", f"{ledger.BATCHES}.device", "platform", "versions"),
)
SAME_ACROSS = ("protocol", *_SLOTS, "returns", "policy.class", "policy.digest", *OF_POLICY)
OF_ENV = ("env", "max_episode_steps")  # what may differ across envs
_ACROSS = ("env.", "max_episode_steps", ledger.OPTIONS)
TRANSFORMS = "env.transforms"  # those of one policy may normalise its observations, say
RETURN, SUCCESS = "return", "success"  # what a policy may be better in

Test = TypeVar("Test", bound="MetricDifference | SuccessDifference")


class Evaluated(Protocol):
    """An evaluation to compare: its manifest and its records."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...
    @property
    def episodes(self) -> Sequence[Episode]: ...


def check_same_episodes(
    first: Evaluated, second: Evaluated, names: tuple[str, str], across_envs: bool = False
) -> None:
    """Refuse evaluations that are not of the same episodes; or, across envs, of the same policy."""
    unlike = _manifest_differences(first, second, SAME_ACROSS if across_envs else SAME, names)
    reasons = [text for text in unlike if not text.startswith(TRANSFORMS)]
    a, b = (
        {e.index: e.env_seed for e in statistics.in_order(one.episodes)} for one in (first, second)
    )
    if len(a) != len(b):
        reasons.append(f"{names[0]} has {len(a)} episodes and {names[1]} has {len(b)}")
    unequal = sorted(index for index in a.keys() & b.keys() if a[index] != b[index])
    if unequal:
        index, others = unequal[0], len(unequal) - 1
        text = _differs(f"env_seed of episode {index}", a[index], b[index], names)
        reasons.append(text + (f", and {others} more differ" if others else ""))
    options, others_options = map(ledger.options_by_index, (first.manifest, second.manifest))
    # Across envs, options may be what differs.
    for index in () if across_envs else sorted(a.keys() & b.keys()):
        one, other = options.get(index), others_options.get(index)
        if one != other:
            reasons.append(_differs(f"{ledger.OPTIONS} of episode {index}", one, other, names))
            break
    tried = _policy_difference(first, second) if across_envs else None
    if tried is not None and tried[1] is not None:
        text = f"for the same observations of episode {tried[0]}, {tried[1]}"
        reasons.append(f"they are not of one policy: {text}")
    if len(a) == len(b) and a.keys() != b.keys():
        missing = min(a.keys() ^ b.keys())
        reasons.append(f"episode {missing} is in only one of {' and '.join(names)}")
    if reasons:
        of_env = not across_envs and all(text.startswith(_ACROSS) for text in reasons)
        advice = "; to compare one policy in several envs, pass across_envs=True (--across-envs)"
        raise ValueError(
            f"expected evaluations on the same episodes, but {' and '.join(names)} differ: "
            + "; ".join(reasons)
            + advice * of_env
        )


def _policy_difference(first: Evaluated, second: Evaluated) -> tuple[int, Any] | None:
    """Return the episode by which policies were compared, and how they differ; None without one."""
    one, other = (getattr(evaluation, "witness", None) for evaluation in (first, second))
    if one is None or other is None or one.record.index != other.record.index:
        return None
    alike, found = policy_difference(one.steps, other.steps)
    return (one.record.index, found) if alike else None


def remarks(
    first: Evaluated, second: Evaluated, names: tuple[str, str], across_envs: bool = False
) -> Iterator[str]:
    """Yield their other differences that may change a return, one sentence each."""
    if across_envs:
        for text in _manifest_differences(first, second, OF_ENV, names):
            yield f"The envs differ: {text}."
        if _policy_difference(first, second) is None:
            yield (
                "Whether they are of one policy could not be tried, as no episode of both begins "
                "with the same observation: their settings and weights alone were compared."
            )
    acting = (manifest_entry(e.manifest, "policy.class") != ledger.RANDOM for e in (first, second))
    # Random actions do not depend on the mode, nor on the exploration type.
    keys = REMARKED + (OF_POLICY if all(acting) else ())
    if all(ledger.PROCESS in one.manifest for one in (first, second)):
        keys += (ledger.PROCESS,)
    for text in _manifest_differences(first, second, keys, names):
        yield f"Not the same in both: {text}."
    transforms = [] if across_envs else [TRANSFORMS]
    for text in _manifest_differences(first, second, transforms, names):
        more = "Returns can be compared if these leave rewards alone."
        yield f"Not the same in both: {text}. {more}"
    if (manifest_entry(first.manifest, PER_SLOT) or 1) > 1:
        yield (
            "Only the first episode of each slot begins alike in both: later ones are paired by "
            "their number alone, which makes no interval narrower."
        )
    for name, evaluation in zip(names, (first, second), strict=True):
        if ledger.BATCHES in evaluation.manifest:
            yield f"{name}: {ledger.repeatability(evaluation.manifest)}"


def _manifest_differences(
    first: Evaluated, second: Evaluated, keys: Sequence[str], names: tuple[str, str]
) -> list[str]:
    entries = [
        (k, manifest_entry(first.manifest, k), manifest_entry(second.manifest, k)) for k in keys
    ]
    return [
        _differs(*difference, names)
        for entry in entries
        for difference in ledger.leaf_differences(*entry)
    ]


def _differs(path: str, a: Any, b: Any, names: tuple[str, str]) -> str:
    return ledger.differences_text([(path, a, b)], *(f"in {name}" for name in names))


@dataclass(frozen=True, kw_only=True)
class Difference(MetricDifference):
    """The return of one policy minus that of the baseline, episode by episode.

    Attributes:
        name: the policy.
        baseline: the policy that it is compared with.
        episodes: the indices of the episodes that both completed.
        values: for each of these, the policy's return minus the baseline's.
        returns: for each of these, the policy's return.
        baseline_returns: for each of these, the baseline's return.
        failed: the number of episodes that failed with the policy alone. Like the next two, they
            have no difference, and do not count below.
        baseline_failed: the number of episodes that failed with the baseline alone.
        both_failed: the number of episodes that failed with both.
        mean: mean return of the policy over ``episodes``; None if there are none.
        baseline_mean: mean return of the baseline over them.
        difference: the statistics of ``values``, with their intervals.
        won: the number of episodes with a higher return of the policy.
        tied: the number of episodes with equal returns.
        lost: the number of episodes with a higher return of the baseline.
        p_value: of the sign-flip permutation test of a mean difference of zero, two-sided.
        adjusted_p_value: the same by Holm's correction over all policies compared.
        exact: True if all sign flips were tried, rather than ``resamples`` random ones.
        confidence: of the intervals; the significance is one minus it.
        differing: the number of episodes, failed ones too, whose digests are not the same in both;
            None if a record has no digest.
        differing_outcomes: the number of them that end otherwise: with another return or success,
            or not at all.
        success: the difference of the success rates; None if the env does not report success.
        metrics: the difference of each metric that both evaluations have, by name.
        groups: the number of groups by which errors are clustered; None without.
    """

    name: str
    baseline: str
    episodes: tuple[int, ...]
    values: tuple[float, ...]
    returns: tuple[float, ...]
    baseline_returns: tuple[float, ...]
    failed: int
    baseline_failed: int
    both_failed: int
    won: int
    tied: int
    lost: int
    exact: bool
    confidence: float
    differing: int | None
    differing_outcomes: int
    success: SuccessDifference | None
    metrics: Mapping[str, MetricDifference] = field(default_factory=dict)
    groups: int | None = None

    def __repr__(self) -> str:
        names = f"{self.name} minus {self.baseline}"
        counts = (display.count_text(len(self.values), "episode"), mean_text(self.difference))
        return display.one_line(self, names, *counts, f"p-value {display.p_text(self.p_value)}")

    @property
    def improvement(self) -> float | None:
        """The probability of improvement: ``(won + tied / 2) / episodes``.

        None if there are no episodes, or if a difference is not finite.
        """
        if not self.values or self.difference.not_finite:
            return None
        return (self.won + self.tied / 2) / len(self.values)

    def is_worse(
        self, margin: float = 0.0, on: str = RETURN, lower_is_better: bool = False
    ) -> bool:
        """Return whether the policy is shown to be worse than the baseline by over ``margin``.

        It is if the whole interval of the difference lies below ``-margin``. Without an interval
        nothing is shown.

        Args:
            margin: in units of ``on``, finite and not negative.
            on: ``"return"`` for the mean return, ``"success"`` for the success rate, or the name
                of a metric that both evaluations have, for its mean.
            lower_is_better: of a metric such as a cost.

        Raises:
            ValueError: for another margin, or if the env does not report success.
        """
        interval = self._upwards(on, lower_is_better)
        return interval is not None and interval.high < -_margin(margin)

    def is_not_worse(self, margin: float, on: str = RETURN, lower_is_better: bool = False) -> bool:
        """Return whether the policy is shown to be worse by less than ``margin``, if at all.

        It is if the whole interval of the difference lies above ``-margin``; see :meth:`is_worse`.
        """
        interval = self._upwards(on, lower_is_better)
        return interval is not None and interval.low > -_margin(margin)

    def _upwards(self, on: str, lower_is_better: bool) -> Interval | None:
        """Return the interval of the difference, turned so that higher is better."""
        interval = self.measured(on)[1]
        if interval is None or not lower_is_better:
            return interval
        return Interval(-interval.high, -interval.low)

    def measured(self, on: str) -> tuple[float | None, Interval | None]:
        """Return the difference in ``on``, with its interval; see :meth:`is_worse`."""
        check.one_of([RETURN, SUCCESS, *self.metrics], on=on)
        if on != SUCCESS or on in self.metrics:
            difference = self.metrics.get(on, self).difference
            return difference.mean, difference.mean_interval
        if self.success is None:
            raise ValueError(
                f"expected an env that reports success, to compare {self.name} with "
                f"{self.baseline} on it, got one that does not; compare returns"
            )
        return self.success.difference, self.success.interval

    def episodes_needed(self, difference: float, power: float = 0.8) -> int:
        """Return :func:`episodes_needed`, for the standard deviation of these differences."""
        if self.difference.std is None:
            raise ValueError(
                "expected at least two episodes that both policies completed, to know how the "
                f"differences vary, got {len(self.values)}"
            )
        return episodes_needed(difference, self.difference.std, power, self.confidence)

    def detectable(self, power: float = 0.8) -> float | None:
        """Return the mean difference that this many episodes would show with this power.

        See :func:`episodes_needed`; None for fewer than three episodes.
        """
        factor, correction = _sample_size_terms(power, self.confidence)
        if self.difference.std is None or len(self.values) <= correction:
            return None
        return self.difference.std * math.sqrt(factor / (len(self.values) - correction))


@dataclass(frozen=True)
class Comparison(display.ShownAsTable):
    """Policies compared with the first of them; print it to see a table.

    Attributes:
        names: the policies, the baseline first.
        env: the name of the env.
        episodes: the number of episodes of each evaluation.
        differences: one for each policy after the first.
        remarks: other differences of the evaluations, one sentence each.
        ledgers: the digests of the evaluations, as ``names``.
        across_envs: True for one policy in several envs.
        confidence: of every interval.
        resamples: bootstrap resamples, and random sign flips.
        seed: the seed of the generators.
    """

    names: tuple[str, ...]
    env: str
    episodes: int
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]
    ledgers: tuple[str, ...]
    across_envs: bool
    confidence: float
    resamples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain dicts, lists, numbers and None, for JSON.

        The differences of single episodes are left out: the ledgers hold the returns.
        """
        differences = []
        names = ("episodes", "values", "returns", "baseline_returns")
        single: dict[str, Any] = dict.fromkeys(names, ())
        for d in self.differences:
            known = asdict(replace(d, **single))
            known |= {"detectable": d.detectable(), "improvement": d.improvement}
            left_out = {*single, *(name for name in ("groups", "metrics") if not known[name])}
            differences.append({name: known[name] for name in known if name not in left_out})
        lists = {name: [*getattr(self, name)] for name in ("names", "remarks", "ledgers")}
        return {**vars(self), **lists, "differences": differences}

    def __repr__(self) -> str:
        means = (mean_text(d.difference) for d in self.differences)
        return display.one_line(self, self._head(), *means)

    def header(self) -> list[str]:
        return ["", *self.names[1:]]

    def _head(self) -> str:
        return (
            f"{self.env}: {', '.join(self.names[1:])} minus {self.names[0]} on the same "
            f"{display.count_text(self.episodes, 'episode')}"
        )

    def rows(self) -> list[list[str]]:
        """Return the table's rows: a label, then a cell per difference."""
        return [*self.success_rows(), *self.return_rows()]

    def success_rows(self) -> list[list[str]]:
        """Return the rows that are about success; none if no env reports it."""
        tests = [d.success for d in self.differences]
        if not any(tests):
            return []
        return self._block("success rate", "difference of success rates", tests, "  gained, lost")

    def return_rows(self) -> list[list[str]]:
        """Return the rows that are about returns, and the episodes that differ."""
        percent = display.percent_text(self.confidence)

        def row(label: str, cell: Any) -> list[str]:
            return [label, *(cell(difference) for difference in self.differences)]

        interval = f"  {percent} interval"
        rows = [
            row("episodes compared", lambda d: str(len(d.values))),
            row("mean return", lambda d: d.mean),
            row(f"mean return of {self.names[0]}", lambda d: d.baseline_mean),
            row("mean difference", lambda d: d.difference.mean),
            row(interval, lambda d: statistics.ends(d.difference.mean_interval)),
            row("standard deviation", lambda d: d.difference.std),
            row("won, tied, lost", lambda d: f"{d.won}, {d.tied}, {d.lost}"),
            row(
                "differ in data, in outcome",
                lambda d: f"{display.number_text(d.differing)}, {d.differing_outcomes}",
            ),
            row("probability of improvement", lambda d: display.number_text(d.improvement)),
            row("p-value", lambda d: display.p_text(d.p_value)),
        ]
        if len(self.differences) > 1:
            rows.append(row("  Holm's correction", lambda d: display.p_text(d.adjusted_p_value)))
        rows.append(row("detectable difference", lambda d: d.detectable()))
        for name in _metric_names(self.differences):
            tests = [d.metrics.get(name) for d in self.differences]
            rows += self._block(f"mean {name}", f"difference of {name}", tests)
        if any(map(_failed_text, self.differences)):
            rows.append(row("failed, no difference", lambda d: _failed_text(d) or "0"))
        return display.number_columns(rows)

    def _block(
        self,
        what: str,
        difference: str,
        tests: Sequence[SuccessDifference | MetricDifference | None],
        *more: str,
    ) -> list[list[str]]:
        """Return the rows of success or of a metric, its numbers apart from those of returns."""
        interval = f"  {display.percent_text(self.confidence)} interval"
        labels = [what, f"{what} of {self.names[0]}", difference, interval, *more]
        labels += ["  p-value", "    Holm's correction"][: len(self.differences)]
        columns = [display.column_texts(_cells(one)) if one else ["-"] * 7 for one in tests]
        return [[*row] for row in zip(labels, *columns, strict=False)]

    def notes(self) -> list[str]:
        alpha = 1 - self.confidence
        notes = [
            "p-value: sign-flip permutation test of the mean difference, two-sided. Detectable: "
            f"with power 80% at significance {display.number_text(alpha)}."
        ]
        if any(d.success for d in self.differences):
            notes.append(
                "Success: score interval; p-value of McNemar's exact test, two-sided. An episode "
                "that did not complete counts as no success."
            )
        if groups := {d.groups for d in self.differences if d.groups}:
            notes.append(
                f"Episodes share {max(groups)} groups: standard errors are clustered by them, and "
                "intervals of success too; p-values flip the signs of whole groups."
            )
        for d in self.differences:
            if d.success and d.success.unknown:
                notes.append(
                    f"{d.name}: of {display.count_text(d.success.unknown, 'episode')} the env did "
                    "not say whether they were a success: these are not in the rates."
                )
            if failed := _failed_text(d):
                notes.append(
                    f"{d.name}: of {display.count_text(self.episodes, 'episode')}, {failed} "
                    "failed: these have no difference and are not in the numbers."
                )
            if d.difference.not_finite:
                notes.append(
                    f"{d.name}: {d.difference.not_finite} differences are NaN or infinite: no "
                    "statistics."
                )
            if 2 <= len(d.values) < statistics.FEW:
                notes.append(
                    f"{d.name}: intervals of fewer than {statistics.FEW} episodes hold the truth "
                    "less often than they say."
                )
            smallest = 2 * 0.5 ** len(d.values)
            if d.p_value is not None and smallest > alpha:
                notes.append(
                    f"{d.name}: with {display.count_text(len(d.values), 'episode')} no p-value is "
                    f"below {display.number_text(smallest)}."
                )
        return [*notes, *self.remarks]


def compare(
    first: Evaluated,
    second: Evaluated,
    *more: Evaluated,
    names: Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    across_envs: bool = False,
    groups: Mapping[int, Any] | Callable[[int], Any] | None = None,
) -> Comparison:
    """Compare policies with the first of them, on the same episodes.

    An episode's start and random numbers affect all policies alike. The difference of two returns
    of one episode cancels that, and separates policies that two means do not.
    ``docs/statistics.md`` has the formulas.

    The baseline may have more episodes than the others: those are left out.

    Args:
        first: the baseline.
        second: the evaluation to compare with it.
        more: further ones; each is compared with the baseline.
        names: the policies' names, in this order; by default those of their classes.
        confidence: of every interval, between 0 and 1.
        resamples: the number of bootstrap resamples, and of sign flips, unless there are fewer. By
            default 10,000, and fewer for more than 2,000 episodes, down to 1,000.
        seed: the seed of the generators.
        across_envs: compare one policy in several envs, such as perturbed ones, on episodes of the
            same numbers; the envs may differ, and the policies may not.
        groups: what episodes share, such as a start or a task, so that they are not independent: a
            mapping from an episode's index, or a function of it. Errors are clustered by it.

    Raises:
        ValueError: if protocol, env, step limit, or an episode's env seed differ, with each
            difference; if a number is out of range; if names are not distinct, one per evaluation.
        ModuleNotFoundError: without scipy, which the extra ``evaluate`` brings.
    """
    check.bools(across_envs=across_envs)
    evaluations = [first, second, *more]
    called = _names(evaluations, names)
    shared = _shared(first, evaluations[1:])
    resamples = statistics.check_settings(confidence, resamples, seed, len(shared.episodes))
    labels = None if groups is None else _labels(groups, [e.index for e in shared.episodes])
    others = [((called[0], name), e) for name, e in zip(called[1:], evaluations[1:], strict=True)]
    for pair, evaluation in others:
        check_same_episodes(shared, evaluation, pair, across_envs)
    differences = [
        _difference(shared, evaluation, pair, confidence, resamples, (seed, place), labels)
        for place, (pair, evaluation) in enumerate(others)
    ]
    ids = [str(manifest_entry(e.manifest, "env.id") or "env") for e in evaluations]
    return Comparison(
        names=tuple(called),
        env=display.listed_text([*dict.fromkeys(ids)]),
        episodes=len(shared.episodes),
        differences=_corrected(differences),
        remarks=tuple(
            text for pair, other in others for text in remarks(shared, other, pair, across_envs)
        ),
        ledgers=tuple(ledger.ledger_digest(e.episodes) for e in evaluations),
        across_envs=across_envs,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def episodes_needed(
    difference: float, std: float, power: float = 0.8, confidence: float = 0.95
) -> int:
    """Return the number of episodes that show a mean difference, by a two-sided paired test.

    ``n = (z(1 - a/2) + z(power))^2 (std / difference)^2 + z(1 - a/2)^2 / 2``, rounded up, with
    ``a = 1 - confidence`` and ``z`` the normal quantile: Guenther, Sample Size Formulas for Normal
    Theory T Tests, The American Statistician 35(4), 1981.

    Args:
        difference: the mean difference that matters, in units of return; its sign does not matter.
        std: the standard deviation of the paired differences, in units of return.
        power: the chance that the test finds a difference as large as this.
        confidence: one minus the significance of the test.

    Raises:
        ValueError: a difference of zero, a negative deviation, or a chance not between 0 and 1.
    """
    if not (math.isfinite(difference) and difference):
        raise ValueError(f"expected a finite difference other than zero, got {difference}")
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"expected a finite standard deviation, not negative, got {std}")
    factor, correction = _sample_size_terms(power, confidence)
    if (ratio := std / abs(difference)) > 1e150:  # its square is no float
        least = f"expected a difference above {std / 1e150:g}, as the standard deviation is {std:g}"
        raise ValueError(f"{least}, got {difference:g}: no number of samples shows it")
    return math.ceil(factor * ratio**2 + correction)


def _sample_size_terms(power: float, confidence: float) -> tuple[float, float]:
    """Return factor and correction of :func:`episodes_needed`."""
    check.share(power=power, confidence=confidence)
    stats = extra_module("scipy.stats", "the number of episodes needed")
    z_test, z_power = stats.norm.ppf([0.5 + confidence / 2, power]).tolist()
    return (z_test + z_power) ** 2, z_test**2 / 2


class _Sample(NamedTuple):
    """Some episodes of an evaluation."""

    manifest: Mapping[str, Any]
    episodes: Sequence[Episode]
    witness: Any = None


def _shared(first: Evaluated, others: Sequence[Evaluated]) -> Evaluated:
    """Return the episodes of the first that the others have, if these have the same, and fewer."""
    indices, *more = ({episode.index for episode in other.episodes} for other in others)
    there = {episode.index for episode in first.episodes}
    if not indices < there or any(other != indices for other in more):
        return first
    episodes = [e for e in first.episodes if e.index in indices]
    return _Sample(first.manifest, episodes, getattr(first, "witness", None))


def _difference(
    first: Evaluated,
    second: Evaluated,
    names: tuple[str, str],
    confidence: float,
    resamples: int,
    seed: tuple[int, int],
    labels: Mapping[int, str] | None = None,
) -> Difference:
    records = (statistics.in_order(one.episodes) for one in (first, second))
    pairs: list[tuple[Episode, Episode]] = [*zip(*records, strict=True)]
    digests = [(a.digest, b.digest) for a, b in pairs]
    unknown = any(e.completed and e.digest is None for pair in pairs for e in pair)
    both = [(a, b) for a, b in pairs if a.completed and b.completed]
    returns = [(a.episode_return, b.episode_return) for a, b in both]
    returns_a, returns_b = np.array(returns, np.float64).reshape(-1, 2).T
    values = statistics.minus(returns_b, returns_a)
    how = statistics.Resampling(confidence, resamples, seed)
    grouped = None if labels is None else [labels[a.index] for a, _ in both]
    of_returns = statistics.metric_difference(returns, how, 0, grouped)
    return Difference(
        **vars(of_returns),
        name=names[1],
        baseline=names[0],
        episodes=tuple(a.index for a, _ in both),
        values=tuple(values.tolist()),
        returns=tuple(returns_b.tolist()),
        baseline_returns=tuple(returns_a.tolist()),
        failed=sum(a.completed > b.completed for a, b in pairs),
        baseline_failed=sum(a.completed < b.completed for a, b in pairs),
        both_failed=sum(not (a.completed or b.completed) for a, b in pairs),
        won=int((values > 0).sum()),
        tied=int((values == 0).sum()),
        lost=int((values < 0).sum()),
        exact=statistics.flips_are_exact(len(both), resamples),
        confidence=confidence,
        differing=None if unknown else sum(one != other for one, other in digests),
        differing_outcomes=sum(not _end_alike(a, b) for a, b in pairs),
        success=statistics.success_difference(
            pairs, how, None if labels is None else [labels[a.index] for a, _ in pairs]
        ),
        metrics={
            name: statistics.metric_difference(
                [(a.numbers.get(name), b.numbers.get(name)) for a, b in both],
                how,
                3 * place,
                grouped,
            )
            for place, name in enumerate(_metrics_of_both(first, second), 1)
        },
        groups=None if grouped is None else len({*grouped}),
    )


def _labels(groups: Any, indices: Sequence[int]) -> dict[int, str]:
    """Return the group of each episode, as text."""
    look = groups.get if isinstance(groups, Mapping) else groups
    labels = {index: repr(one) for index in indices if (one := look(index)) is not None}
    if len(labels) < len(indices) or len({*labels.values()}) < 2:
        raise ValueError(
            "expected groups to give each episode a group, and two groups or more: a mapping from "
            f"indices, or a function of one; got {len({*labels.values()})} groups for "
            f"{len(labels)} of {len(indices)} episodes"
        )
    return labels


def _metrics_of_both(first: Evaluated, second: Evaluated) -> Iterator[str]:
    """Yield the metrics that are defined alike in both evaluations, and the returns of groups."""
    rewards = manifest_entry(first.manifest, "returns.rewards") or ()
    # Whether they were asked for or not.
    known = {name: name for name in map(ledger.return_name, rewards)}
    there = {**known, **(second.manifest.get(ledger.METRICS) or {})}
    for name, how in {**known, **(first.manifest.get(ledger.METRICS) or {})}.items():
        if there.get(name) == how:
            yield name


def _end_alike(a: Episode, b: Episode) -> bool:
    one, other = a.episode_return, b.episode_return
    equal = one == other or (one != one and other != other)  # NaN is not equal to itself
    return equal and (a.status, a.success) == (b.status, b.success)


def _corrected(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Add the p-values by Holm's correction, those of returns, success and metrics apart."""
    returns = _adjusted({d.name: d for d in differences})
    success = _adjusted({d.name: d.success for d in differences if d.success})
    metrics = {
        name: _adjusted({d.name: d.metrics[name] for d in differences if name in d.metrics})
        for name in _metric_names(differences)
    }
    return tuple(
        replace(
            d,
            success=success.get(name),
            metrics={metric: metrics[metric][name] for metric in d.metrics},
        )
        for name, d in returns.items()
    )


def _adjusted(tests: Mapping[str, Test]) -> dict[str, Test]:
    """Return tests by the policies' names with their p-values by Holm's correction.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    known = sorted((t.p_value, name) for name, t in tests.items() if t.p_value is not None)
    weighted = ((len(known) - rank) * p_value for rank, (p_value, _) in enumerate(known))
    running = zip(known, accumulate(weighted, max), strict=True)
    adjusted = {name: min(1.0, value) for (_, name), value in running}
    return {
        name: replace(test, adjusted_p_value=adjusted.get(name)) for name, test in tests.items()
    }


def _metric_names(differences: Sequence[Difference]) -> list[str]:
    return [*dict.fromkeys(name for d in differences for name in d.metrics)]


def _names(evaluations: Sequence[Evaluated], names: Sequence[str] | None) -> list[str]:
    if names is None:
        names = [policy_name(e.manifest) for e in evaluations]
        if len(set(names)) < len(names):
            names = [f"{name} {number}" for number, name in enumerate(names, 1)]
    if len(names) != len(evaluations) or len(set(names)) < len(names):
        raise ValueError(
            f"expected {len(evaluations)} distinct names, one per evaluation, got {list(names)}"
        )
    return list(names)


def _margin(value: float) -> float:
    if not (check.is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"expected a margin that is finite and not negative, got {value!r}")
    return value


def _cells(test: SuccessDifference | MetricDifference) -> list[Any]:
    """Return the cells of a test, those of its p-values last."""
    p_values = map(display.p_text, (test.p_value, test.adjusted_p_value))
    if isinstance(test, SuccessDifference):
        numbers = [test.rate, test.baseline_rate, test.difference, statistics.ends(test.interval)]
        return [*numbers, f"{test.gained}, {test.lost}", *p_values]
    interval = statistics.ends(test.difference.mean_interval)
    return [test.mean, test.baseline_mean, test.difference.mean, interval, *p_values]


def _failed_text(difference: Difference) -> str:
    counts = [
        (difference.failed, difference.name),
        (difference.baseline_failed, difference.baseline),
        (difference.both_failed, "both"),
    ]
    return ", ".join(f"{count} with {name}" for count, name in counts if count)
