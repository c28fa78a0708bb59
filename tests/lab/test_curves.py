"""Learning curves over several training runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import Episode
from tdcollect.lab import curves
from tdcollect.lab.curves import Curves, curves_page, over_runs

from ..evaluation.envs import Walk
from ..evaluation.policies import categorical
from ..forkserver import run_script

ROOT = Path(__file__).parents[2]
STEPS = (0, 10, 40, 100)
VALUES = np.random.default_rng(0).normal([0, 3, 5, 9], 2, (7, 4)).round(2)


def together(values: Any = VALUES, steps: Any = STEPS, **settings: Any) -> Curves:
    means = {f"r{at}": dict(zip(steps, row, strict=True)) for at, row in enumerate(values.tolist())}
    return curves.together(means, env="Walk", episodes=5, **{"resamples": 500, **settings})


@pytest.mark.slow
def test_the_table_of_coverage_has_the_rows_of_its_script() -> None:
    script = ROOT / "benchmarks" / "curve_intervals.py"
    done = run_script(script, "--steps", "1", "--runs", "3")
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.strip().splitlines()
    _, shown = coverage_table()
    assert [row.split(" | ")[0] for row in rows] == [row.split(" | ")[0] for row in shown]


def coverage_table() -> tuple[list[str], list[str]]:
    text = (ROOT / "docs" / "beside-training.md").read_text().split("\n| means of runs | ", 1)[1]
    head, _, *rows = text.split("\n\n", 1)[0].splitlines()
    return head.split(" | "), rows


def test_the_notes_of_few_runs_have_the_figures_of_the_table() -> None:
    columns, rows = coverage_table()
    for runs, (low, high) in curves.COVERAGE.items():
        place = columns.index(f"{runs} runs")
        shown = [float(re.findall(r"([\d.]+)%", row)[place]) for row in rows]
        assert (round(min(shown)), round(max(shown))) == (low, high)


def test_estimates_are_scipys() -> None:
    found = together(resamples=4000)
    (area,) = found.measures
    areas = integrate.trapezoid(VALUES, STEPS) / 100
    assert area.runs == pytest.approx(areas)
    for measure, values in zip([*found.points, area], [*VALUES.T, areas], strict=True):
        estimate = measure.estimate
        assert estimate.value == pytest.approx(stats.trim_mean(values, 0.25))
        wanted = stats.bootstrap(
            [values], lambda x, axis: stats.trim_mean(x, 0.25, axis), n_resamples=4000,
            method="percentile", rng=np.random.default_rng(1),
        ).confidence_interval  # fmt: skip
        drawn = 0.1 * values.std()  # error of the ends by the resamples
        assert estimate.interval.low == pytest.approx(wanted.low, abs=drawn)
        assert estimate.interval.high == pytest.approx(wanted.high, abs=drawn)
    narrow, wide = (together(confidence=c).points[0].estimate.interval for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_seed_decides_and_the_order_of_runs_does_not() -> None:
    one, same, turned, other = together(), together(), together(VALUES[::-1]), together(seed=1)
    estimates = [[m.estimate for m in (*c.points, *c.measures)] for c in (one, turned, other)]
    assert one == same
    assert estimates[0] == estimates[1] != estimates[2]


@pytest.mark.parametrize("threshold", [-50.0, 5.0, 8.0, 50.0])
def test_steps_to_a_threshold_are_those_of_the_first_mean_there(threshold: float) -> None:
    found = together(threshold=threshold)
    measure = found.measures[-1]
    for row, step in zip(VALUES, measure.runs, strict=True):
        there = [at for at, value in zip(STEPS, row, strict=True) if value >= threshold]
        assert step == (there[0] if there else math.inf)
    assert measure.estimate.value == stats.trim_mean(measure.runs, 0.25)
    assert not math.isnan(measure.estimate.interval.high)
    below = together(-VALUES, threshold=-threshold, lower_is_better=True).measures[-1]
    assert (below.runs, below.estimate) == (measure.runs, measure.estimate)
    last = found.rows()[-1]
    assert [cell == "never" for cell in last[3:]] == [math.isinf(step) for step in measure.runs]
    told = "A run that never comes to the threshold" in found.notes()[-1]
    assert told == ("never" in last)
    assert f">{last[-1]}<" in curves_page(found).html().decode()


def test_runs_that_share_some_steps_are_compared_on_these() -> None:
    means = {"a": {0: 1.0, 5: 2.0, 9: 3.0}, "b": {5: 4.0, 7: 1.0, 9: 6.0}}
    found = curves.together(means, env="Walk", episodes=5)
    assert (found.steps, found.left_out) == ((5, 9), (0, 7))
    assert [point.runs for point in found.points] == [(2.0, 4.0), (3.0, 6.0)]
    told = "All runs share 2 steps; those that some lack are left out: 0 and 7."
    assert told in found.notes()
    assert "2 runs are too few for the intervals: in simulations" in str(found)
    with pytest.raises(ValueError, match="in common, got none: a has 0 and 1; b has none"):
        curves.together({"a": {0: 1.0, 1: 2.0}, "b": {}}, env="Walk", episodes=5)
    for threshold in (math.nan, math.inf):
        with pytest.raises(ValueError, match="expected a finite threshold"):
            curves.together(means, env="Walk", episodes=5, threshold=threshold)


def test_one_run_at_one_step_has_neither_interval_nor_area() -> None:
    found = together(VALUES[:1, :1], STEPS[:1])
    assert found.points[0].estimate.interval is None
    assert found.measures == ()
    assert "One run: no interval." in str(found)
    assert b"One run: no interval." in curves_page(found).html()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with a step that only one has, and one that is unfinished."""
    root = tmp_path_factory.mktemp("runs")
    asked = [(run, step) for run in range(3) for step in (10, 20)] + [(1, 30)]
    for run, step in asked:
        torch.manual_seed(7 * run + step)
        policy = categorical()
        with torch.no_grad():
            policy.module[0].module[-1].bias += torch.randn(2)
        path = root / f"r{run}" / "curve" / f"step-{step:09d}"
        how: dict[str, Any] = {"output_dir": path, "progress": False, "metrics": {"moves": len}}
        tdcollect.evaluate(Walk, policy, 3, **how)
    shutil.copytree(root / "r0/curve/step-000000020", root / "r0/curve/step-000000030")
    (root / "r0/curve/step-000000030/results.json").unlink()
    return root


def test_curves_come_from_the_ledgers_of_the_runs(runs: Path, tmp_path: Path, capsys: Any) -> None:
    paths = {path.parent.name: path for path in sorted(runs.glob("*/curve"))}
    typed = [*map(str, paths.values())]
    assert main(["curves", *typed, "--threshold", "-99", "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    found, moves = over_runs(paths, threshold=-99), over_runs(paths, on="moves")
    assert out == f"{found}\n\nreport {tmp_path / 'curves.html'}\n"
    for at, step in enumerate((10, 20)):
        for run, mean, count in zip(
            paths, found.points[at].runs, moves.points[at].runs, strict=True
        ):
            result = tdcollect.EvaluationResult.load(runs / run / f"curve/step-{step:09d}")
            assert (mean, count) == (result.summary().returns.mean, result.lengths.mean())
    assert (found.steps, found.left_out, found.episodes) == ((10, 20), (30,), 3)
    assert (tmp_path / "curves.html").read_bytes() == curves_page(found).html()
    assert main(["curves", *typed, "--json", "--threshold", "1e9"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["points"][0]["runs"] == [*found.points[0].runs]
    assert set(told["measures"][-1]["runs"]) == {None}
    assert main(["curves", typed[0]]) == 0
    assert "One run: no interval." in capsys.readouterr().out


def test_runs_that_cannot_be_put_together_are_refused(runs: Path, tmp_path: Path) -> None:
    one = runs / "r0" / "curve"
    with pytest.raises(ValueError, match=r"one of return, moves, success in .* got 'cost'"):
        over_runs({"a": one}, on="cost")
    with pytest.raises(ValueError, match=r"got .*none, which holds no finished evaluation"):
        over_runs({"a": one, "b": runs / "none"})
    for env, seed, told in [
        ("CartPole-v1", 0, "env.id is 'Walk' in a and 'CartPole-v1' in b"),
        (Walk, 7, "seeds.root is 0 in a and 7 in b"),
    ]:
        path = tmp_path / str(seed)
        how: dict[str, Any] = {"output_dir": path / "step-000000010", "progress": False}
        tdcollect.evaluate(env, None, 3, seed, metrics={"moves": len}, **how)
        with pytest.raises(ValueError, match=f"on the same episodes, but a and b differ: .*{told}"):
            over_runs({"a": one, "b": path}, on="moves")
    assert main(["curves", str(one), str(one)]) == 2
    assert main(["curves", str(one), "--lower-is-better"]) == 2


def ended(time: int, how: str, index: int = 0) -> Episode:
    """An episode of that many steps that ended by success, by its env, or by a time limit."""
    ends = {"success": how == "success", "terminated": how != "limit", "truncated": how == "limit"}
    return Episode(index, 0, 0, episode_return=0.0, length=time, **ends)


def test_the_time_to_success_of_whole_episodes_is_that_of_plain_means() -> None:
    times = [3, 5, 5, 8, 9]
    told = [ended(time, "success") for time in times] + [
        ended(4, "end"),
        Episode(9, 0, 0, "failed"),
    ]
    found = curves.time_to_success(SimpleNamespace(episodes=told, manifest={}), horizon=8)
    waited = np.array([3, 5, 5, 8, 8, 8, 8])  # the two that ended otherwise never succeed
    assert (found.steps, found.episodes) == ((3, 5, 8), 7)
    assert found.success == pytest.approx((1 / 7, 3 / 7, 4 / 7))
    assert found.mean == pytest.approx(waited.mean())
    reach = stats.norm.ppf(0.975) * waited.std() / np.sqrt(7)
    assert found.interval.high == pytest.approx(min(8, waited.mean() + reach))
    assert found.interval.low == pytest.approx(waited.mean() - reach)
    assert all(a < b < c for a, b, c in zip(found.low, found.success, found.high, strict=True))


def test_time_limits_censor_the_time_to_success() -> None:
    """With the numbers of Freireich et al. (1963), in weeks, as in textbooks; + is censored."""
    weeks = "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
    told = [ended(int(w.strip("+")), "limit" if "+" in w else "success") for w in weeks.split()]
    found = curves.time_to_success(SimpleNamespace(episodes=told, manifest={}), confidence=0.9)
    left = [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448]
    assert found.steps == (6, 7, 10, 13, 16, 22, 23)
    assert found.success == pytest.approx([1 - one for one in left], abs=6e-4)
    with pytest.raises(ValueError, match="a horizon of at most the steps of the longest"):
        curves.time_to_success(SimpleNamespace(episodes=told, manifest={}), horizon=36)
    with pytest.raises(ValueError, match="of an env that reports success"):
        curves.time_to_success(SimpleNamespace(episodes=[Episode(0, 0, 0)], manifest={}))


def test_the_interval_of_the_mean_time_to_success_holds_it_as_often_as_it_says() -> None:
    rng, held = np.random.default_rng(0), 0
    truth = sum(0.9**step for step in range(20))
    for _ in range(500):
        times, limits = rng.geometric(0.1, 60), rng.integers(5, 60, 60)
        told = [
            ended(int(min(t, limit)), "success" if t <= limit else "limit")
            for t, limit in zip(times, limits, strict=True)
        ]
        told.append(ended(60, "limit"))  # so that the horizon is within the data
        found = curves.time_to_success(SimpleNamespace(episodes=told, manifest={}), 20, 0.9)
        held += found.interval.low <= truth <= found.interval.high
    assert held / 500 == pytest.approx(0.9, abs=0.04)
