"""Public objects at a prompt and in a notebook: a short line, and a table if there is one."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torchrl.envs import StepCounter, TransformedEnv

import tdcollect
from tdcollect import envs, evaluation, lab, testing, trajectories
from tdcollect.collect import statistics
from tdcollect.evaluation import Episode
from tdcollect.lab.race import Looks, RacePlan
from tdcollect.lab.results import CellResult
from tdcollect.lab.sequential import Rule
from tdcollect.policies import from_function

from ..zoo.agents import Walk
from ..zoo.html import Page

HOSTILE = "<script>alert('x')</script> & co"
PACKAGES = ("", ".collect", ".envs", ".evaluation", ".lab", ".testing", ".trajectories")
MANY = 500


def ledger(shift: float = 0.0) -> list[Episode]:
    returns = np.random.default_rng(0).normal(shift, 1, MANY).tolist()
    return [Episode(i, i, i, episode_return=v, length=9) for i, v in enumerate(returns)]


def result(name: str, shift: float = 0.0) -> tdcollect.EvaluationResult:
    manifest = {"env": {"id": HOSTILE}, "policy": {"class": name}}
    return tdcollect.EvaluationResult(manifest, ledger(shift))


def ended_evaluator() -> tdcollect.Evaluator:
    """An evaluator whose process has gone again."""
    evaluator = tdcollect.Evaluator("CartPole-v1", from_function(len))
    evaluator.shutdown()
    return evaluator


def race_result() -> lab.RaceResult:
    """A race of many policies with long names, as long as a folder's may be."""
    names = [f"{n}{'x' * 99}" for n in range(3)]
    looks = Looks(RacePlan(Rule(tuple(names)), block=250, max_episodes=MANY))
    for shift, name in enumerate(names):
        for record in ledger(shift):
            looks.take(name, record)
    return lab.RaceResult(looks, {name: result(name) for name in names})


def suite_objects() -> list[Any]:
    task = {"name": "t", "env": HOSTILE * 9, "score": {"low": 0, "high": 1}}
    policy = {"name": "p", "factory": "policies:net"}
    suite = tdcollect.Suite.of({"suite": {"name": HOSTILE}, "tasks": [task], "policies": [policy]})
    cell = CellResult("t", "p", "0", "t/p/0", "finished", "", 3, 3, 1.0, None, None, 1.0)
    scores = {name: [[0.5, 1.0], [0.2, 0.4]] for name in (HOSTILE * 9, "p", "q")}
    found = lab.aggregate(scores, resamples=99)
    name, estimate = HOSTILE * 9, found.estimates[HOSTILE * 9]["mean"]
    parts = (suite.tasks, suite.policies, (cell,), {"t": (0.0, 1.0)}, found, (name,))
    results = lab.SuiteResults(name, 1, 3, *parts)
    long = lab.Policy("p" * 99, f"policies:{'net' * 99}")
    return [
        *(suite, suite.tasks[0], suite.tasks[0].score, long, *suite.cells()),
        *(cell, results, found, estimate, found.profiles[name]),
    ]


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """An object of each public class, filled with data, and the objects inside."""
    env = TransformedEnv(tdcollect.make_env("CartPole-v1", 2), StepCounter())
    hooks = [tdcollect.Hooks(), tdcollect.LogStatistics(SimpleNamespace(log_scalar=print))]
    collector = tdcollect.Collector(env, frames_per_batch=200, hooks=hooks[0])
    batch = next(iter(collector))
    long = [HOSTILE * 3 for _ in range(3)]
    results = [result(name) for name in long]
    names = [f"{HOSTILE}{n}" * 9 for n in range(3)]
    comparison = tdcollect.compare(*results, names=names, resamples=99)
    summary = results[0].summary(resamples=99)
    findings = [testing.Finding(HOSTILE, HOSTILE, "failed", HOSTILE * 9) for _ in range(9)]
    stats = collector.stats
    path = Path(HOSTILE * 9)
    problem = evaluation.Problem(path, HOSTILE * 9, 3)
    objects = [
        *(env.base_env, collector, collector.explain(), *hooks, tdcollect.Render()),
        *(stats, stats.latest, stats.lifetime, stats.window, statistics.Spread(1.0, 2.0, 3.0, 4.0)),
        *(summary, summary.returns, comparison, comparison.differences[0], results[0]),
        race_result(),
        *(results[0].episodes[0], Episode(3, 1, 2, "failed", 2)),
        *(tdcollect.EvaluationCollector("CartPole-v1", None, 5), tdcollect.LocalWorkers(2)),
        *(tdcollect.RayWorkers(2), ended_evaluator()),
        *(evaluation.EvaluationSettings(5), evaluation.Request(HOSTILE * 9, HOSTILE * 9)),
        *(problem, evaluation.Verification(path, 3, 0, (problem,) * 9)),
        *(testing.Report(HOSTILE, tuple(findings)), findings[0], envs.EnvAction()),
        testing.Divergence(0, 1, 2, "observation", np.zeros(99), np.ones(99), 1.0),
        *(envs.GymEnv("CartPole-v1"), envs.ParallelEnv(2, partial(envs.GymEnv, "CartPole-v1"))),
        envs.Agents(Walk()),
        *suite_objects(),
        *(trajectories.TrajectoryAssembler(), trajectories.TrajectoryIndex.of(batch)),
    ]
    return {type(thing).__name__ + str(n): thing for n, thing in enumerate(objects)}


def public_classes() -> set[type]:
    modules = [importlib.import_module(f"tdcollect{name}") for name in PACKAGES]
    found = {getattr(module, name) for module in modules for name in module.__all__}
    return {
        thing
        for thing in found
        if inspect.isclass(thing)
        and thing.__module__.startswith("tdcollect.")
        and not issubclass(thing, BaseException)
        and not getattr(thing, "_is_protocol", False)
    }


def test_each_repr_of_a_public_class_is_a_short_line(shown: dict[str, Any]) -> None:
    assert public_classes() <= {type(thing) for thing in shown.values()}
    for thing in shown.values():
        text = repr(thing)
        assert "\n" not in text, text
        assert len(text) <= 200, text


TABLES = ("Summary", "Comparison", "Explanation", "Statistics", "Report")
TABLES += ("Aggregates", "RaceResult", "SuiteResults")


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_tables_in_a_notebook_and_in_print(name: str, shown: dict[str, Any]) -> None:
    (thing,) = (thing for thing in shown.values() if type(thing).__name__ == name)
    page = Page(thing._repr_html_())
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "onclick"}
    allowed = {"p", "pre", "table", "thead", "tbody", "tr", "th", "td"}
    assert set(page.tags) <= allowed  # no script from a name
    assert page.tags == ["pre"] or page.tags.count("tr") > 3
    words = [word for line in str(thing).splitlines() for word in line.split()]
    if name != "Report":  # which wraps, and marks its words
        assert set(words) <= set(page.words.split())
    assert len(str(thing).splitlines()) > 3


def test_a_repr_is_given_of_what_is_shut_down() -> None:
    collector = tdcollect.Collector(tdcollect.make_env("CartPole-v1"), frames_per_batch=8)
    assert "CartPole-v1" in repr(collector)
    collector.shutdown()
    assert repr(collector) == "Collector(shut down)"


def test_no_repr_grows_with_the_number_of_episodes() -> None:
    few, many = result("few"), result("many")
    few.episodes = few.episodes[:100]
    summaries = [found.summary(resamples=99) for found in (few, many)]
    assert np.ptp([len(repr(summary)) for summary in summaries]) < 10
    assert np.ptp([len(summary._repr_html_()) for summary in summaries]) < 100
