"""Metrics: numbers of an episode from its infos or its data, in all that is said of it."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, Transform, TransformedEnv

import tdcollect
from tdcollect import EvaluationResult, Evaluator, compare, evaluate, make_env, merge, verify
from tdcollect.evaluation import EvaluationSettings
from tdcollect.evaluation.comparison import Comparison
from tdcollect.evaluation.curve import MetricPoint, read_folder
from tdcollect.evaluation.ledger import Episode, read_directory
from tdcollect.evaluation.manifest import code_digest
from tdcollect.lab import Suite
from tdcollect.lab.pages.suite import suite_page
from tdcollect.randomness import NotReproducibleError

from ..lab.parts import changed, folder
from .envs import Walk
from .ledgers import alter, contents
from .policies import deterministic
from .test_protocol import check_files

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("quick_children")


class Costly(Walk):
    """The walk, whose infos say what a step costs; most do not say a speed."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        info |= {"cost": np.float32(abs(self.place[0])), "left": self.left}
        if self.left % 3 == 0:
            info["speed"] = [float(self.place[1])]
            info["arm"] = {"joint": {"load": float(self.place[1])}}
        return observation, reward, terminated, truncated, info


def steps_above(data: TensorDict) -> int | None:
    """The first step with a positive observation; None without one."""
    above = (data["observation"] > 0).all(-1).nonzero()
    return int(above[0]) if len(above) else None


METRICS = {
    "cost": "info:cost",
    "worst": "info:cost:max",
    "left": "info:left:last",
    "fastest": "info:speed:max",
    "load": "info:arm/joint/load",
    "above": steps_above,
    "length-squared": lambda data: len(data) ** 2,
}


def run(episodes: int = 9, **settings: Any) -> EvaluationResult:
    settings = {"metrics": METRICS, "progress": False, **settings}
    return evaluate(Costly, deterministic(), episodes, 4, **settings)


def played(index: int) -> dict[str, float | None]:
    """The metrics of an episode by a plain loop."""
    env, policy = Costly(), deterministic()
    observation, _ = env.reset(seed=tdcollect.env_seed(4, index))
    infos, seen, ended = [], [], False
    while not ended:
        rows = TensorDict({"observation": torch.as_tensor(observation)[None]}, [1])
        seen.append(observation)
        action = policy(rows)["action"][0].argmax()
        observation, _, *ends, info = env.step(int(action))
        infos.append(info)
        ended = any(ends)
    costs = [float(info["cost"]) for info in infos]
    speeds = [info["speed"][0] for info in infos if "speed" in info]
    above = [step for step, row in enumerate(seen) if (row > 0).all()]
    return {
        "above": float(above[0]) if above else None,
        "cost": math.fsum(costs),
        "fastest": max(speeds, default=None),
        "left": float(infos[-1]["left"]),
        "load": math.fsum(speeds) if speeds else None,
        "length-squared": float(len(infos) ** 2),
        "worst": max(costs),
    }


def test_metrics_are_those_of_a_plain_loop_in_the_order_of_names() -> None:
    found = [episode.metrics for episode in run().episodes]
    expected = [played(index) for index in range(9)]
    assert found == expected
    assert all([*one] == sorted(METRICS) for one in found if one)
    assert None in [one["above"] for one in expected]  # each kind is there
    assert {type(one["above"]) for one in expected} == {float, type(None)}


def vector(**how: Any) -> EnvBase:
    return make_env(gym.vector.SyncVectorEnv([Costly] * 3, **how))


class Unknown(Transform):
    """One that may draw random numbers, for all that is known: slots are stepped apart."""


@pytest.mark.parametrize(
    ("env", "how"),
    [
        (Costly, {"num_envs": 1}),
        (Costly, {"num_envs": 4, "backend": "process"}),
        (partial(make_env, Costly, 3, backend="process", num_workers=2, wait_num=1), {}),
        (vector, {}),
        (partial(vector, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP), {}),
        (lambda: TransformedEnv(make_env(Costly), Unknown()), {"num_envs": 2}),
    ],
    ids=["one", "process", "ready", "vector", "same-step", "alone"],
)
def test_they_are_the_same_however_episodes_run(env: Any, how: dict[str, Any]) -> None:
    again = evaluate(env, deterministic(), 9, 4, metrics=METRICS, progress=False, **how)
    assert [e.metrics for e in again.episodes] == [e.metrics for e in run().episodes]


def test_nested_infos_are_found_by_their_paths() -> None:
    metrics = {"r": "info:episode/r", "steps": "info:episode/l", "none": "info:episode/cost"}
    env: Any = partial(gym.wrappers.RecordEpisodeStatistics, Costly())
    with pytest.warns(UserWarning, match="info 'episode/cost' for .*'episode', 'episode/l'"):
        found = evaluate(env, deterministic(), 3, metrics=metrics, progress=False, num_envs=1)
    for e in found.episodes:
        assert e.metrics == {"none": None, "r": pytest.approx(e.episode_return), "steps": e.length}


def test_envpool_has_infos_too() -> None:
    pytest.importorskip("envpool")
    metrics = {"steps": "info:elapsed_step:max", "none": "info:cost"}
    how: dict[str, Any] = {"num_envs": 3, "backend": "envpool", "metrics": metrics}
    with pytest.warns(UserWarning, match="info 'cost' for the metric 'none' .*'elapsed_step'"):
        found = evaluate("CartPole-v1", None, 5, progress=False, **how).episodes
    assert [e.metrics for e in found] == [{"none": None, "steps": float(e.length)} for e in found]


class Plain(EnvBase):
    """An env of TorchRL, whose step has an entry more."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            observation=Unbounded(2), info=Composite(cost=Unbounded(1))
        )
        self.action_spec, self.reward_spec = Categorical(2), Unbounded(1)
        self.done_spec = Composite(done=Bounded(0, 1, 1, dtype=torch.bool))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        self.steps = 0
        return self._row()

    def _step(self, tensordict: Any) -> TensorDict:
        self.steps += 1
        done = torch.tensor([self.steps == 4])
        return self._row().update({"reward": torch.ones(1), "done": done})

    def _row(self) -> TensorDict:
        cost = {"cost": torch.tensor([float(self.steps)])}
        return TensorDict({"observation": torch.full((2,), float(self.steps)), "info": cost}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.filterwarnings("ignore:Plain does not draw")
def test_entries_of_a_torchrl_env_are_its_infos() -> None:
    found = evaluate(Plain, None, 2, metrics={"cost": "info:info/cost"}, progress=False)
    assert [e.metrics for e in found.episodes] == [{"cost": 10.0}] * 2


class Once(Costly):
    """Raises in the first try of each episode, in its third step."""

    tried: ClassVar[set[int]] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.seed = 0, seed
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and self.seed not in self.tried:
            self.tried.add(self.seed)
            raise RuntimeError("once")
        return super().step(action)


def test_an_episode_that_starts_again_counts_its_steps_anew() -> None:
    metrics = {name: METRICS[name] for name in ("cost", "worst")}
    Once.tried = set()
    again = evaluate(Once, deterministic(), 9, 4, metrics=metrics, num_envs=2, progress=False)
    assert any(e.restarts for e in again.episodes)
    plain = run(metrics=metrics)
    assert [e.metrics for e in again.episodes] == [e.metrics for e in plain.episodes]
    Once.tried = set()
    failed = evaluate(Once, None, 9, 4, metrics=metrics, max_restarts=0, progress=False).episodes
    assert {e.metrics is None for e in failed if not e.completed} == {True}


# --- files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metrics") / "whole"
    run(output_dir=path)
    return path


def test_files_are_those_of_workers_of_shards_and_of_a_run_that_was_interrupted(
    whole: Path, tmp_path: Path
) -> None:
    expected = contents(whole)
    run(output_dir=tmp_path / "two", workers=2)
    for i in range(2):
        run(output_dir=tmp_path / f"part-{i}", shard=(i, 2))
    merge([tmp_path / "part-0", tmp_path / "part-1"], tmp_path / "merged")
    run(output_dir=tmp_path / "cut")
    for name in ("results.json", "report.html"):
        (tmp_path / "cut" / name).unlink()
    lines = (tmp_path / "cut" / "episodes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "episodes.jsonl").write_text("".join(lines[:4]))
    run(output_dir=tmp_path / "cut", num_envs=2)
    for name in ("two", "merged", "cut"):
        assert contents(tmp_path / name) == expected
        assert verify(tmp_path / name).passed


def test_they_stand_in_files_where_they_are_asked_for_alone(whole: Path, tmp_path: Path) -> None:
    check_files(whole)
    run(output_dir=tmp_path / "without", metrics=None)
    check_files(tmp_path / "without")
    manifest, plain = (
        json.loads((path / "manifest.json").read_text()) for path in (whole, tmp_path / "without")
    )
    described = manifest.pop("metrics")
    assert manifest == plain
    assert (manifest["format"], manifest["protocol"]) == (3, 2)
    assert described["worst"] == "info:cost:max"
    assert described["above"]["function"] == f"{__name__}.steps_above"
    assert described["above"]["code"] == code_digest(steps_above)
    records, plain = (read_directory(path).episodes for path in (whole, tmp_path / "without"))
    assert [json.loads(e.to_json()) for e in plain] == [
        {key: value for key, value in json.loads(e.to_json()).items() if key != "metrics"}
        for e in records
    ]
    for name in ("results.json", "episodes.jsonl"):
        assert "metrics" not in (tmp_path / "without" / name).read_text()


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (
            {**METRICS, "worst": "info:cost"},
            "metrics.worst is 'info:cost:max' there and 'info:cost'",
        ),
        ({**METRICS, "length-squared": lambda data: len(data)}, "metrics.length-squared.code is"),
        (None, "metrics is"),
    ],
)
def test_other_metrics_are_another_evaluation(whole: Path, metrics: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"holds another evaluation: .*{told}"):
        run(output_dir=whole, metrics=metrics)


ALTERED = [
    ({("metrics", "cost"): 0.5}, "its digest is"),
    ({("metrics", "cost"): "much"}, "expected metrics to be a float or null by name"),
    ({("metrics", "more"): 1.0}, "as the manifest says"),
    ({"metrics": {}}, "expected metrics to be a float or null by name"),
    ({("metrics", "a b"): 1.0}, "expected metrics to be a float or null by name"),
]


@pytest.mark.parametrize(("how", "told"), ALTERED, ids=range(len(ALTERED)))
def test_altered_metrics_are_found(whole: Path, tmp_path: Path, how: Any, told: str) -> None:
    run(output_dir=tmp_path / "run")
    alter(tmp_path / "run" / "episodes.jsonl", how)
    assert told in str(verify(tmp_path / "run"))


def test_records_read_back_to_the_same_bits() -> None:
    record = run(episodes=1).episodes[0]
    odd = Episode.from_json(record.to_json().replace('"cost": ', '"cost": NaN, "odd": '))
    assert odd.metrics is not None
    assert Episode.from_json(odd.to_json()).to_json() == odd.to_json()
    assert math.isnan(odd.metrics["cost"] or 0)


# --- what they are said to be


def test_statistics_page_and_exports_have_them(whole: Path) -> None:
    result = EvaluationResult.load(whole)
    summary = result.summary()
    found = summary.metrics["above"]
    known = [e.metrics["above"] for e in result.episodes if e.metrics and e.metrics["above"]]
    values = [played(index)["above"] for index in range(9)]
    known = [value for value in values if value is not None]
    assert (found.count, found.mean) == (len(known), math.fsum(known) / len(known))
    assert summary.metrics["cost"].mean_interval is not None
    assert summary.header() == ["", "return", "length (steps)", *sorted(METRICS)]
    assert f"above: {9 - len(known)} of 9 completed episodes without a value" in str(summary)
    assert summary.to_dict()["metrics"]["cost"]["mean"] == summary.metrics["cost"].mean
    assert np.array_equal(result.metrics["above"], np.array(values, float), equal_nan=True)
    page = (whole / "report.html").read_text()
    assert page.count(">length-squared<") >= 2  # statistics and episodes
    assert (whole / "figures" / "metric_2.svg").exists()


def test_replay_runs_them_again_where_it_can(whole: Path, tmp_path: Path) -> None:
    EvaluationResult.load(whole, Costly, deterministic()).replay(3)
    assert len(run().replay(3)) == run().record(3).length
    run(output_dir=tmp_path / "run")
    alter(tmp_path / "run" / "episodes.jsonl", {("metrics", "cost"): 0.5}, 3)
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(RuntimeError, match=r"metrics.cost is [\d.]+, in the ledger 0.5"):
        EvaluationResult.load(tmp_path / "run", Costly, deterministic()).replay(3)


def test_policies_are_compared_by_them() -> None:
    first, second = run(), evaluate(Costly, None, 9, 4, metrics=METRICS, progress=False)
    found = compare(first, second, names=["a", "b"])
    (difference,) = found.differences
    cost = difference.metrics["cost"]
    values = second.metrics["cost"] - first.metrics["cost"]
    assert cost.difference.mean == pytest.approx(values.mean())
    assert cost.difference.mean_interval is not None
    assert 0 < (cost.p_value or 0) <= 1
    assert difference.measured("cost") == (cost.difference.mean, cost.difference.mean_interval)
    both = ~np.isnan(first.metrics["above"]) & ~np.isnan(second.metrics["above"])
    assert difference.metrics["above"].difference.count == both.sum()
    rows = {label: texts for label, *texts in found.rows()}
    assert float(rows["difference of cost"][0]) == pytest.approx(values.mean(), abs=1e-3)
    assert "mean cost of a" in rows
    told = found.to_dict()["differences"][0]["metrics"]["cost"]
    assert told["difference"]["count"] == 9
    json.dumps(told)


def test_metrics_that_are_not_the_same_are_not_compared() -> None:
    first, second = run(metrics={"a": "info:cost"}), run(metrics={"a": "info:cost:max"})
    found: Comparison = compare(first, second, names=["x", "y"])
    assert found.differences[0].metrics == {}
    assert "metrics" not in found.to_dict()["differences"][0]
    told = "Not the same in both: metrics.a is 'info:cost' in x and 'info:cost:max' in y."
    assert told in found.remarks


@pytest.mark.filterwarnings("ignore:expected an info 'none'")
def test_curves_have_them(tmp_path: Path) -> None:
    metrics = {"cost": "info:cost", "none": "info:none"}
    how: dict[str, Any] = {"num_trajectories": 4, "output_dir": tmp_path / "curve"}
    with Evaluator(Costly, deterministic(), metrics=metrics, **how) as beside:
        logged = [beside.evaluate(step=step) for step in (10, 20)]
    step = EvaluationResult.load(tmp_path / "curve" / "step-000000010")
    cost = step.summary().metrics["cost"]
    assert [one["eval/metrics/cost"] for one in logged] == [cost.mean] * 2
    assert math.isnan(logged[0]["eval/metrics/none"])
    points = read_folder(tmp_path / "curve")[0]
    ends = cost.mean_interval
    assert ends is not None
    assert points[0].metrics == (
        MetricPoint("cost", cost.mean, ends.low, ends.high),
        MetricPoint("none", None, None, None),
    )
    header = (tmp_path / "curve" / "curve.csv").read_text().splitlines()[0]
    assert header.endswith(",digest,metrics.cost,metrics.cost.low,metrics.cost.high,metrics.none,"
                           "metrics.none.low,metrics.none.high")  # fmt: skip
    page = (tmp_path / "curve" / "curve.html").read_text()
    assert ">mean cost<" in page
    assert "The mean is" in page
    assert verify(tmp_path / "curve").passed
    other = {"cost": "info:cost:max"}
    with Evaluator(Costly, deterministic(), metrics=other, **how) as beside:
        beside.trigger_eval(step=30)
        with pytest.raises(ValueError, match=r"of other episodes: metrics.cost is 'info:cost'"):
            beside.wait()
    altered = (tmp_path / "curve" / "curve.csv").read_text().replace("metrics.cost.low", "low")
    (tmp_path / "curve" / "curve.csv").write_text(altered)
    assert "it is not what the evaluations give" in str(verify(tmp_path / "curve"))


@pytest.mark.filterwarnings("ignore:expected an info 'none'")
def test_suites_have_them(folder: Path, small_reports: None) -> None:
    (folder / "suite_metrics.py").write_text("def steps(data):\n    return len(data)\n")
    metrics = {"success": 1, "left": "info:left:last"}
    given = changed("defaults.metrics", {"steps": "suite_metrics.py:steps", "none": "info:none"})
    suite = Suite.of(given, folder)
    results = suite.run(folder / "out", progress=False)
    cell = results.cell("walk", "random")
    found = EvaluationResult.load(folder / "out" / cell.path)
    assert cell.metrics == {"none": None, "steps": found.lengths.mean()}
    told = next(one for one in results.to_dict()["cells"] if one["task"] == "walk")
    assert told["metrics"] == cell.metrics
    assert b">mean steps<" in suite_page(results).html()
    found = verify(folder / "out")
    assert found.passed, str(found)
    bad = Suite.of(changed("defaults.metrics", metrics), folder)
    with pytest.raises(ValueError, match=r"task walk with policy random: .*no key of a record"):
        bad.run(folder / "bad", progress=False)
    other = Suite.of(changed("defaults.metrics", {"steps": "info:steps"}), folder)
    with pytest.raises(ValueError, match=r"tasks.walk.settings.metrics.none is 'info:none' there"):
        other.run(folder / "out", progress=False)


# --- refusals


REFUSED = [
    (["cost"], TypeError, "expected metrics to be a mapping from names"),
    ({"return": "info:cost"}, ValueError, "no key of a record, got 'return'"),
    ({"a b": "info:cost"}, ValueError, "expected the name of a metric to be letters"),
    ({"a": "cost"}, ValueError, "expected a metric to be 'info:NAME'"),
    ({"a": "info:cost:mean"}, ValueError, "got 'info:cost:mean'"),
    ({"a": 3}, ValueError, "or a function of the episode's data, got 3"),
]


@pytest.mark.parametrize(("metrics", "error", "told"), REFUSED)
def test_bad_metrics_are_refused_before_an_env_is_made(metrics: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        EvaluationSettings(3, metrics=metrics)


def test_what_is_no_number_ends_the_run() -> None:
    for metric, told in (
        (
            lambda data: data["observation"],
            "the metric 'a' of episode 0 to be one number, got Tens",
        ),
        (lambda data: "much", "the metric 'a' of episode 0 to be one number, got str 'much'"),
    ):
        with pytest.raises(ValueError, match=told):
            run(episodes=1, metrics={"a": metric})
    with pytest.raises(ZeroDivisionError) as caught:
        run(episodes=1, metrics={"a": lambda data: 1 / 0})
    assert caught.value.__notes__ == ["in the metric 'a', of episode 0"]
    with pytest.raises(ValueError, match="the info 'odd' of episode 0 to be one number, got nd"):
        evaluate(Odd, None, 1, metrics={"a": "info:odd"}, progress=False)


class Odd(Walk):
    def step(self, action: Any) -> Any:
        *row, _ = super().step(action)
        return *row, {"odd": np.zeros(2)}


class Timed(Walk):
    clock = 0

    def step(self, action: Any) -> Any:
        type(self).clock += 1
        *row, _ = super().step(action)
        return *row, {"time": self.clock}


def test_a_metric_that_depends_on_something_else_is_found_out() -> None:
    with pytest.raises(
        NotReproducibleError, match=r"its metrics.time is .* something else, such as time"
    ):
        evaluate(Timed, None, 4, metrics={"time": "info:time"}, progress=False)


# --- functions


def counts(data: TensorDict, least: float = 0.0) -> int:
    return int((data["observation"] > least).sum())


def test_a_function_is_told_by_its_code_and_its_values() -> None:
    def above(least: float) -> Any:
        return lambda data: (data["observation"] > least).sum()

    kinds = [counts, partial(counts, least=1.0), partial(counts, least=2.0), above(1.0), above(2.0)]
    assert len({*map(code_digest, [*kinds, steps_above])}) == len(kinds) + 1
    assert code_digest(above(1.0)) == code_digest(above(1.0))
    assert code_digest(len) is None
