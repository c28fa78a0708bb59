"""Comparison on the same episodes: results, and evaluations that it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import xlogy

from tdcollect import env_seed
from tdcollect.evaluation.comparison import Comparison, Difference, compare, episodes_needed
from tdcollect.evaluation.statistics import (
    Interval,
    Quantity,
    clustered,
    exact_mean,
    paired_rates_interval,
)

from .ledgers import ENV, ledger, run

pytestmark = pytest.mark.filterwarnings("error")

RNG = np.random.default_rng(0)
EASE = RNG.normal(300, 80, size=100)  # how good an episode's start is, for any policy


def text_of(comparison: Comparison) -> str:
    return json.dumps(comparison.to_dict(), allow_nan=False)


# Numbers


def test_a_difference_is_the_policys_return_minus_the_baselines() -> None:
    found = compare(run([1.0, 2.0, 3.0]), run([2.0, 2.0, 2.5]), names=["old", "new"])
    (d,) = found.differences
    assert (d.name, d.baseline) == ("new", "old")
    assert (d.episodes, d.values) == ((0, 1, 2), (1.0, 0.0, -0.5))
    assert (d.won, d.tied, d.lost) == (1, 1, 1)
    assert (d.mean, d.baseline_mean) == (6.5 / 3, 2.0)
    assert d.difference.mean == pytest.approx(1 / 6)
    assert (d.exact, d.p_value) == (True, 1.0)  # all sign flips are as extreme


def test_holms_correction_over_the_policies_compared() -> None:
    """Two need none, and a further one changes no other numbers."""
    shifts = [0.0, 1.5, 4.0, 2.5]
    runs = [run(EASE), *(run(EASE + RNG.normal(shift, 12, size=100)) for shift in shifts)]
    two, found = (compare(*runs[:count], names="abcde"[:count]) for count in (2, 5))
    raw = [d.p_value for d in found.differences]
    order = np.argsort(raw)
    expected = np.minimum(1, np.maximum.accumulate(np.array(raw)[order] * [4, 3, 2, 1]))
    assert [found.differences[i].adjusted_p_value for i in order] == expected.tolist()
    assert "Holm's correction" in str(found)
    (d,), (same, *_) = two.differences, found.differences
    assert d.adjusted_p_value == d.p_value == same.p_value
    assert d.difference == same.difference
    assert "Holm" not in str(two)


def test_seeds_alone_decide_the_bits_and_not_the_order_of_records() -> None:
    better = EASE + RNG.normal(2, 12, size=100)
    first, second = run(EASE), run(better)
    (one,), (other,) = (compare(first, second, names="ab", seed=s).differences for s in (0, 1))
    assert one.difference.mean == other.difference.mean
    assert one.difference.mean_interval != other.difference.mean_interval
    assert one.p_value != other.p_value
    assert not one.exact
    paired = stats.ttest_rel(better, EASE)
    assert one.p_value == pytest.approx(paired.pvalue, abs=0.02)
    interval = one.difference.mean_interval
    assert (interval.low, interval.high) == pytest.approx(paired.confidence_interval(0.95), abs=0.3)
    expected = text_of(compare(first, second, names="ab"))
    second.episodes.reverse()
    assert text_of(compare(first, second, names="ab")) == expected


# Success, what differs, and verdicts


def successes(first: str, second: str, **options: Any) -> Difference:
    """The difference of two runs, with a letter for each episode: y, n, or ? for no report."""
    runs = [
        run([1.0] * len(said), success={i: c == "y" for i, c in enumerate(said) if c != "?"})
        for said in (first, second)
    ]
    for at in options.get("failed", ()):
        runs[1].episodes[at] = ledger([0.0] * (at + 1), failed=[at])[at]
    (found,) = compare(*runs, names=["old", "new"]).differences
    return found


def test_success_is_compared_episode_by_episode() -> None:
    """Bentur et al. (2009) as in Fagerland, Lydersen and Laake, Statistics in Medicine 33, 2014."""
    d = successes("y" * 8 + "n" * 13, "y" + "n" * 7 + "y" + "n" * 12)
    s = d.success
    assert (s.count, s.unknown, s.gained, s.lost) == (21, 0, 1, 7)
    assert (s.rate, s.baseline_rate, s.difference) == (2 / 21, 8 / 21, -6 / 21)
    assert (s.interval.low, s.interval.high) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert s.p_value == s.adjusted_p_value == pytest.approx(0.0703, abs=5e-5)
    assert (d.differing, d.differing_outcomes) == (0, 8)


def test_a_failed_episode_is_no_success_and_one_without_a_report_is_left_out() -> None:
    s = successes("yy?yn", "y?yyy", failed=[0]).success
    assert (s.count, s.unknown, s.gained, s.lost) == (3, 2, 1, 1)
    assert s.p_value == 1.0
    assert successes("??", "??").success is None
    assert successes("y?", "?y").success is None


@pytest.mark.parametrize(("gained", "lost", "count"), [(3, 9, 30), (0, 2, 15), (6, 0, 40)])
def test_ends_of_the_score_interval_are_where_the_score_test_rejects(gained, lost, count) -> None:
    """The statistic with the most likely probabilities, found here by a numerical search."""
    interval = paired_rates_interval(gained, lost, count, 0.9)
    for end, expected in ((interval.low, 1.6449), (interval.high, -1.6449)):

        def unlikely(loss: float, end: float = end) -> float:
            chances = np.array([loss + end, loss, 1 - 2 * loss - end])
            return -float(xlogy([gained, lost, count - gained - lost], chances).sum())

        edges = (max(0.0, -end), (1 - end) / 2)
        loss = minimize_scalar(unlikely, bounds=edges, method="bounded", options={"xatol": 1e-10}).x
        variance = count * (2 * loss + end - end**2)
        assert (gained - lost - count * end) / variance**0.5 == pytest.approx(expected, abs=1e-3)


def test_score_intervals_at_the_edges() -> None:
    assert paired_rates_interval(0, 0, 20, 0.95).high == pytest.approx(
        1.96**2 / (20 + 1.96**2), 1e-4
    )
    assert paired_rates_interval(20, 0, 20, 0.95).high == 1.0
    one, other = paired_rates_interval(3, 8, 20, 0.95), paired_rates_interval(8, 3, 20, 0.95)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_holms_correction_of_success_is_over_its_own_p_values() -> None:
    runs = [run(EASE[:40], success={i: i < 40 - lost for i in range(40)}) for lost in (0, 4, 8, 12)]
    found = compare(*runs, names="abcd")
    raw = [d.success.p_value for d in found.differences]
    assert raw == sorted(raw, reverse=True)
    expected = np.minimum(1, np.maximum.accumulate(np.array(raw[::-1]) * [3, 2, 1]))[::-1]
    assert [d.success.adjusted_p_value for d in found.differences] == expected.tolist()
    assert str(found).count("Holm's correction") == 2


def test_episodes_that_differ_are_counted_by_digest_and_by_outcome() -> None:
    first, second = run([1.0, 2.0, 0.0, 4.0]), run([1.0, 3.0, -0.0, 4.0], failed=[3])
    second.episodes[0] = replace(second.episodes[0], digest="f" * 64)
    (d,) = compare(first, second, names="ab").differences
    # Another digest; another return; the same; one that failed.
    assert (d.differing, d.differing_outcomes) == (2, 2)
    assert "differ in data, in outcome" in str(compare(first, second, names="ab"))
    nan = run([float("nan")])
    assert compare(nan, nan, names="ab").differences[0].differing_outcomes == 0
    second.episodes[1] = replace(second.episodes[1], digest=None)
    found = compare(first, second, names="ab")
    assert found.differences[0].differing is None
    assert re.search("in outcome +-, 2", str(found))


def test_worse_is_what_the_whole_interval_shows() -> None:
    worse = run(EASE - 10 + RNG.normal(0, 5, size=100))
    (d,) = compare(run(EASE), worse, names="ab").differences
    low, high = d.difference.mean_interval.low, d.difference.mean_interval.high
    assert low < -10 < high < 0
    assert d.is_worse()
    assert d.is_worse(-high - 0.01)
    assert not d.is_worse(-high)
    assert d.is_not_worse(-low + 0.01)
    assert not d.is_not_worse(-low)
    (same,) = compare(run(EASE), run(EASE), names="ab").differences
    assert not same.is_worse()
    assert same.is_not_worse(0.01)
    assert not same.is_not_worse(0)
    (one,) = compare(run([1.0]), run([0.0]), names="ab").differences
    assert not one.is_worse()
    assert not one.is_not_worse(100)  # without an interval nothing is shown


def test_verdicts_on_success_and_what_they_refuse() -> None:
    d = successes("y" * 40, "y" * 30 + "n" * 10)
    assert d.is_worse(0.1, on="success")
    assert not d.is_worse(0.2, on="success")
    assert not d.is_worse()  # returns are equal
    assert d.is_not_worse(0.5, on="success")
    assert not d.is_not_worse(0.3, on="success")
    with pytest.raises(ValueError, match="reports success, to compare new with old on it, got one"):
        successes("?", "?").is_worse(on="success")
    with pytest.raises(ValueError, match="expected on to be 'return' or 'success', got 'cost'"):
        d.is_worse(on="cost")
    for margin in (-1, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="a margin that is finite and not negative, got"):
            d.is_not_worse(margin)


# A baseline with more episodes, and one policy in several envs


def test_more_episodes_of_the_baseline_are_left_out() -> None:
    new = run(EASE[:50] + RNG.normal(2, 12, size=50))
    more, same = (compare(run(old), new, names="ab") for old in (EASE, EASE[:50]))
    assert (more.episodes, more.differences) == (50, same.differences)


def test_groups_of_episodes_cluster_the_errors_of_a_comparison() -> None:
    rng = np.random.default_rng(4)
    starts, better = np.repeat(rng.normal(0, 5, 12), 5), rng.normal(1, 1, 60)
    old, new = run(EASE[:60]), run(EASE[:60] + starts + better)
    how = {"names": "ab", "groups": lambda index: index // 5}
    d = compare(old, new, **how).differences[0]
    offsets = np.array(d.values) - d.difference.mean
    error = np.sqrt(12 / 11 * sum(one.sum() ** 2 for one in offsets.reshape(12, 5))) / 60
    assert d.difference.standard_error == pytest.approx(error)
    low, high = stats.t.interval(0.95, 11, d.difference.mean, error)
    interval = d.difference.mean_interval
    assert (interval.low, interval.high) == pytest.approx((low, high))
    sums = np.array(d.values).reshape(12, 5).sum(1)
    flipped = stats.permutation_test((sums,), np.sum, permutation_type="samples")
    assert d.p_value == pytest.approx(flipped.pvalue)
    assert d.groups == 12
    assert d.difference.std == pytest.approx(error * np.sqrt(60))
    alone = compare(old, new, names="ab")
    assert d.detectable() > 1.5 * alone.differences[0].detectable()
    assert "Episodes share 12 groups" in str(compare(old, new, **how))
    assert "groups" not in alone.to_dict()["differences"][0]
    named = {at: f"task {at % 3}" for at in range(60)}
    assert compare(old, new, names="ab", groups=named).differences[0].groups == 3
    for wrong in ({0: "a"}, lambda index: 7):
        with pytest.raises(ValueError, match="expected groups to give each episode a group"):
            compare(old, new, groups=wrong)


def test_success_by_groups() -> None:
    said = "ynyn" * 6
    runs = [
        run([1.0] * 24, success={i: c == "y" for i, c in enumerate(one)})
        for one in (said, "y" * 12 + said[12:])
    ]
    alone, grouped = (
        compare(*runs, names="ab", groups=groups).differences[0].success
        for groups in (None, lambda index: index // 4)
    )
    assert grouped.difference == alone.difference == 6 / 24
    # Three groups gain two each, three none.
    assert grouped.p_value == 0.25 > alone.p_value
    error = np.sqrt(6 / 5 * 6) / 24
    low, high = stats.t.interval(0.95, 5, 0.25, error)
    assert (grouped.interval.low, grouped.interval.high) == pytest.approx((low, high))


def test_clustered_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(5), np.zeros(2)
    places = np.repeat(np.arange(15), rng.integers(2, 8, 15))
    for _ in range(2000):
        values = rng.normal(0, 1, 15)[places] + rng.normal(0, 1, len(places))
        quantity = Quantity(len(values), mean=exact_mean(values))
        interval = clustered(quantity, values, places, 0.9).mean_interval
        held[0] += interval.low <= 0 <= interval.high
        reach = stats.t.ppf(0.95, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        held[1] += abs(values.mean()) <= reach  # as if episodes were independent
    assert held[0] / 2000 == pytest.approx(0.9, abs=0.025)
    assert held[1] / 2000 < 0.75


def test_one_policy_is_compared_across_envs() -> None:
    windy = {"env": ENV | {"kwargs": {"wind": 5}}, "max_episode_steps": 200}
    calm, other = run([1.0, 2.0, 3.0]), run([1.0, 1.5, 3.0], changed=windy)
    found = compare(calm, other, names=["calm", "windy"], across_envs=True)
    assert found.differences[0].values == (0.0, -0.5, 0.0)
    assert found.remarks == (
        "The envs differ: env.kwargs.wind is None in calm and 5 in windy.",
        "The envs differ: max_episode_steps is None in calm and 200 in windy.",
        "Whether they are of one policy could not be tried, as no episode of both begins with the "
        "same observation: their settings and weights alone were compared.",  # no witness is here
    )
    named = {"env": ENV | {"id": "Windy-v0"}}
    found = compare(calm, run([1.0] * 3, changed=named), names="ab", across_envs=True)
    assert found.env == "CartPole-v1 and Windy-v0"
    told = "but a and b differ: policy.class is 'lab.policies.Actor' in a and 'lab.Net' in b"
    with pytest.raises(ValueError, match=told):
        compare(calm, run([1.0] * 3, "lab.Net", windy), names="ab", across_envs=True)
    told = f"env_seed of episode 0 is {env_seed(0, 0)} in a and {env_seed(1, 0)} in b"
    with pytest.raises(ValueError, match=told):
        compare(calm, run([1.0] * 3, changed=windy, root=1), names="ab", across_envs=True)
    with pytest.raises(ValueError, match=r"env\.kwargs\.wind is None in a and 5 in b"):
        compare(calm, other, names="ab")


# How many episodes


def test_episodes_needed_have_the_power_of_the_paired_t_test() -> None:
    for effect, power, confidence in [
        *((0.1, 0.5, 0.95), (0.1, 0.8, 0.99)),
        *((0.3, 0.95, 0.9), (0.3, 0.8, 0.95), (1.0, 0.8, 0.9)),
    ]:
        n = episodes_needed(effect, 1.0, power, confidence)
        # The formula is an approximation: within two episodes of the exact number.
        fewer, more = np.maximum([n - 2, n + 2], 2)
        assert power_of(more, effect, confidence) >= power
        assert power_of(fewer, effect, confidence) < power


def power_of(n: int, effect: float, confidence: float) -> float:
    edge, shift = stats.t.ppf(0.5 + confidence / 2, n - 1), effect * n**0.5
    return stats.nct.sf(edge, n - 1, shift) + stats.nct.cdf(-edge, n - 1, shift)


def test_episodes_needed_depend_on_the_ratio_alone_or_have_no_answer() -> None:
    assert episodes_needed(-5, 50) == episodes_needed(0.1, 1) == episodes_needed(0.1, 1, 0.8, 0.95)
    assert episodes_needed(1.0, 0.0) == 2
    (d,) = compare(run(EASE), run(EASE + RNG.normal(2, 12, size=100)), names="ab").differences
    assert d.episodes_needed(d.detectable() * 1.0001) == 100
    assert d.episodes_needed(d.detectable() * 0.99) > 100
    for arguments, said in [
        ((0, 1), "expected a finite difference other than zero, got 0"),
        ((1, -1), "expected a finite standard deviation, not negative, got -1"),
        ((1, 1, 80), "expected power to be between 0 and 1, got 80"),
        ((1, 1, 0.8, 1.0), r"expected confidence to be between 0 and 1, got 1\.0"),
    ]:
        with pytest.raises(ValueError, match=said):
            episodes_needed(*arguments)
    (d,) = compare(run([1.0]), run([2.0]), names="ab").differences
    with pytest.raises(ValueError, match=r"at least two episodes .* got 1"):
        d.episodes_needed(1.0)


# Failures and degenerate evaluations


def test_failed_episodes_are_counted_and_not_compared() -> None:
    first = run([1.0, 2.0, 3.0, 4.0, 5.0], failed=[0, 1])
    second = run([9.0, 9.0, 9.0, 9.0, 9.0], failed=[1, 2])
    found = compare(first, second, names=["old", "new"])
    (d,) = found.differences
    assert (d.failed, d.baseline_failed, d.both_failed) == (1, 1, 1)
    assert (d.episodes, d.values) == ((3, 4), (5.0, 4.0))
    said = "new: of 5 episodes, 1 with new, 1 with old, 1 with both failed"
    assert said in str(found)


def test_comparisons_without_statistics() -> None:
    (d,) = compare(run([]), run([]), names="ab").differences
    assert d.mean is d.difference.mean is d.p_value is d.adjusted_p_value is d.detectable() is None
    one = compare(run([1.0]), run([2.0]), names="ab")
    (d,) = one.differences
    assert (d.difference.mean, d.difference.mean_interval, d.p_value) == (1.0, None, 1.0)
    assert "b: with 1 episode no p-value is below 1." in str(one)
    (d,) = compare(run(EASE), run(EASE), names="ab").differences
    assert (d.difference.mean_interval, d.p_value, d.tied) == (Interval(0, 0), 1.0, 100)
    nan = compare(run([1.0, 2.0]), run([1.0, float("nan")]), names="ab")
    (d,) = nan.differences
    assert (d.difference.mean, d.p_value, d.difference.not_finite) == (None, None, 1)
    assert "b: 1 differences are NaN or infinite: no statistics." in str(nan)
    text_of(nan)


# What is refused, and what is only said


DIFFER: list[tuple[Any, str]] = [
    ({"protocol": 3}, "protocol is 2 in a and 3 in b"),
    ({"max_episode_steps": 200}, "max_episode_steps is None in a and 200 in b"),
    (
        {"env": ENV | {"id": "Acrobot-v1", "kwargs": {"g": 9}}},
        "env.id is 'CartPole-v1' in a and 'Acrobot-v1' in b; env.kwargs.g is None in a and 9 in b",
    ),
    (
        {"env": ENV | {"wrappers": ["TimeLimit"]}},
        "env.wrappers is ['TimeLimit', 'OrderEnforcing'] in a and ['TimeLimit'] in b",
    ),
]


def test_other_episodes_are_refused_with_what_differs() -> None:
    first = run([1.0] * 3)
    for changed, said in DIFFER:
        told = f"episodes, but a and b differ: .*{re.escape(said)}"
        with pytest.raises(ValueError, match=told):
            compare(first, run([1.0] * 3, changed=changed), names="ab")
    told = f"env_seed of episode 0 is {env_seed(0, 0)} in a and {env_seed(1, 0)} in b, and 2 more d"
    with pytest.raises(ValueError, match=told):
        compare(first, run([1.0] * 3, root=1), names="ab")
    with pytest.raises(ValueError, match="a has 2 episodes and b has 3"):
        compare(run([1.0] * 2), first, names="ab")
    with pytest.raises(ValueError, match="a has 3 episodes and b has 2"):
        compare(first, run([1.0] * 2), first, names="abc")
    second = run([1.0] * 4)
    del second.episodes[0]
    with pytest.raises(ValueError, match="but a and c differ: episode 0 is in only one of a and c"):
        compare(first, first, second, names="abc")
    with pytest.raises(ValueError, match="differ: episode 0 is in only one of a and b"):
        compare(first, second, names="ab")


def test_a_refusal_of_other_envs_names_across_envs() -> None:
    windy = {"env": ENV | {"kwargs": {"wind": 5}}}
    for changed, advised in [(windy, True), (windy | {"protocol": 1}, False)]:
        with pytest.raises(
            ValueError, match=r"env\.kwargs\.wind is None in a and 5 in b"
        ) as caught:
            compare(run([1.0]), run([1.0], changed=changed), names="ab")
        assert ("pass across_envs=True (--across-envs)" in str(caught.value)) is advised


def test_other_versions_and_platforms_are_allowed_and_said() -> None:
    other = run(
        [1.0, 3.0],
        changed={
            "versions": {"torch": "2.12.0", "torchrl": "0.14.1"},
            "inference_batch_size": 32,
            "device": "cuda:0",
            "process": {"onednn": False},  # which the other does not tell
        },
    )
    found = compare(run([1.0, 2.0]), other, names="ab")
    assert found.remarks == (
        "Not the same in both: inference_batch_size is 16 in a and 32 in b.",
        "Not the same in both: device is 'cpu' in a and 'cuda:0' in b.",
        "Not the same in both: versions.torch is '2.13.0' in a and '2.12.0' in b.",
    )
    assert found.remarks[2] in str(found)
    other = run([1.0, 3.0], changed={"env": ENV | {"transforms": ["VecNormV2(0123)"]}})
    (remark,) = compare(run([1.0, 2.0]), other, names="ab").remarks
    assert remark.startswith("Not the same in both: env.transforms is ")
    assert remark.endswith("Returns can be compared if these leave rewards alone.")


@pytest.mark.parametrize(("named", "count"), [("random actions", 0), ("lab.Other", 2)])
def test_random_actions_have_no_mode_and_no_exploration_to_remark(named: str, count: int) -> None:
    baseline, actor = run([1.0], policy=named), run([2.0])
    baseline.manifest["policy"] |= {"exploration": "deterministic", "mode": None}
    actor.manifest["policy"] |= {"exploration": "random", "mode": "eval"}
    found = compare(baseline, actor)
    assert len([remark for remark in found.remarks if "policy." in remark]) == count


def test_policies_are_called_by_their_class_and_numbered_where_it_is_one() -> None:
    assert compare(run([1.0], "a.Actor"), run([1.0], "b.Random")).names == ("Actor", "Random")
    assert compare(run([1.0], "a.Net"), run([1.0], "b.Net")).names == ("Net 1", "Net 2")
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="expected 2 distinct names, one per evaluation, got"):
            compare(run([1.0]), run([1.0]), names=names)


def test_the_table_reads_like_this() -> None:
    first, second = run([10.0, 20.0, 30.0, 40.0]), run([11.0, 22.0, 33.0, 44.0])
    assert str(compare(first, second, names=["random", "ppo"])).splitlines()[:6] == [
        "CartPole-v1: ppo minus random on the same 4 episodes",
        "",
        "                                     ppo",
        "episodes compared                      4",
        "mean return                        27.50",
        "mean return of random              25.00",
    ]
