"""The directory of an evaluator: evaluations, the curve, and the best weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcollect
from tdcollect import Evaluator
from tdcollect.display import number_texts
from tdcollect.evaluation.beside.curve import Best, Point, read_csv, to_csv
from tdcollect.evaluation.beside.curve_page import curve_page
from tdcollect.evaluation.ledger.records import LOST, Episode

from .envs import Walk
from .evaluators import shape_of
from .policies import categorical

pytestmark = pytest.mark.usefixtures("quick_children")

STEPS = (1000, 2000, 3000)


def pushed(push: float) -> Any:
    """A policy that prefers one action."""
    policy = categorical()
    with torch.no_grad():
        policy.module[0].module[-1].bias += torch.tensor([0.0, push])
    return policy


POLICIES = dict(zip(STEPS, map(pushed, (0.0, 9.0, -9.0)), strict=True))


def evaluator(path: Path, **options: Any) -> Evaluator:
    return Evaluator(Walk, categorical(), num_trajectories=5, output_dir=path, **options)


def run(path: Path, steps: Any = STEPS, **options: Any) -> None:
    with evaluator(path, **options) as beside:
        for step in steps:
            beside.trigger_eval(POLICIES[step], step=step)


def contents(path: Path) -> dict[str, bytes]:
    """The files of a directory, without those that hold times."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "run.json")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(quick_children: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "curve"
    run(path)
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def test_each_evaluation_is_the_directory_that_evaluate_writes(whole: Path, tmp_path: Path) -> None:
    tdcollect.evaluate(Walk, POLICIES[2000], 5, output_dir=tmp_path / "one", progress=False)
    assert contents(whole / "step-000002000") == contents(tmp_path / "one")
    assert tdcollect.verify(whole / "step-000003000").passed


def test_the_curve_has_a_line_per_step(whole: Path) -> None:
    curve = read_csv(whole / "curve.csv")
    assert [point.step for point in curve] == [*STEPS]
    for point in curve:
        result = tdcollect.EvaluationResult.load(whole / f"step-{point.step:09d}")
        returns = result.summary().returns
        assert point.digest == result.digest
        assert (point.episodes, point.failed) == (5, 0)
        assert (point.mean, point.std, point.iqm) == (
            returns.mean,
            returns.std,
            returns.interquartile_mean,
        )
        assert (point.low, point.high) == (returns.mean_interval.low, returns.mean_interval.high)


def test_the_page_has_each_point_and_leads_to_its_report(whole: Path) -> None:
    page = (whole / "curve.html").read_text()
    points = read_csv(whole / "curve.csv")
    for point, mean in zip(points, number_texts([p.mean for p in points]), strict=True):
        link = f'<a href="./step-{point.step:09d}/report.html">{point.step:,}</a>'
        assert f'<tr><th scope="row">{link}</th><td>{mean}</td>' in page
        assert (whole / f"step-{point.step:09d}" / "report.html").is_file()
    best = json.loads((whole / "best.json").read_text())
    assert f"The best mean return, {best['value']:.5g}, is that of step {best['step']:,}." in page
    assert (whole / "curve.svg").read_text().count("<path") > 5


def test_a_page_of_no_finite_return_has_no_figure() -> None:
    point = Point(1, 2, 0, None, None, None, None, None, 7.0, "ab" * 32)
    page, drawn = curve_page([point], None, "<Walk>", "mean", lambda step: None)
    assert drawn is None
    assert b"No return is finite." in page
    assert b"<h1>&lt;Walk&gt;: learning curve</h1>" in page
    page, drawn = curve_page([point, POINT], Best(10, 0.1, None), "W", "mean", lambda step: None)
    assert drawn is not None


@pytest.mark.parametrize("length", [0.1, 7.0])
def test_mean_lengths_that_equal_the_mean_returns_are_not_drawn(length: float) -> None:
    curve = [POINT, POINT._replace(step=20)]
    curve = [point._replace(length=length) for point in curve]
    page, _ = curve_page(curve, None, "Walk", "mean", lambda step: None)
    assert page.count(b"<svg") == (1 if length == POINT.mean else 2)
    assert (b"The mean length, in steps, is the same" in page) == (length == POINT.mean)


def test_the_best_weights_load_into_the_policy(whole: Path) -> None:
    kept = json.loads((whole / "best.json").read_text())
    curve = read_csv(whole / "curve.csv")
    best = max(curve, key=lambda point: point.mean)
    assert kept == {"step": best.step, "by": "mean", "value": best.mean, "weights": "best.pt"}
    policy = categorical()
    policy.load_state_dict(torch.load(whole / "best.pt", weights_only=True))
    result = tdcollect.evaluate(Walk, policy, 5, progress=False)
    assert result.digest == best.digest
    with evaluator(whole) as beside:
        assert beside.best == (best.step, best.mean, whole / "best.pt")
        assert beside.curve == curve


def test_a_training_goes_on_with_its_curve(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "parts"
    run(path, STEPS[:2])
    with evaluator(path) as beside:
        assert [point.step for point in beside.curve] == [*STEPS[:2]]
        done = beside.submit(POLICIES[2000], step=2000).result(60)  # since the last checkpoint
        assert done.digest == beside.curve[1].digest
        beside.trigger_eval(POLICIES[3000], step=3000)
    assert contents(path) == contents(whole)


def test_steps_in_any_order_make_the_same_files(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "other", (3000, 1000, 2000))
    assert contents(tmp_path / "other") == contents(whole)


@pytest.mark.parametrize(
    "lost",
    [("curve.csv",), ("curve.csv", "curve.html", "curve.svg"), ("episodes",), ("workers",)],
)
def test_files_lost_to_a_crash_come_back(copied: Path, whole: Path, lost: Any) -> None:
    for name in lost:
        if name == "episodes":  # its process was killed within an evaluation
            step = copied / "step-000003000"
            (step / "results.json").unlink()
            lines = (step / "episodes.jsonl").read_text().splitlines(keepends=True)
            (step / "episodes.jsonl").write_text("".join(lines[:2]))
        elif name == "workers":
            step = copied / "step-000003000"
            (step / "results.json").unlink()
            first, *rest = (step / "episodes.jsonl").read_text().splitlines(keepends=True)
            record = Episode.from_json(first)
            lost_one = Episode(record.index, record.env_seed, record.policy_seed, LOST)
            (step / "episodes.jsonl").write_text("".join([lost_one.to_json() + "\n", *rest]))
        else:
            (copied / name).unlink()
    run(copied, STEPS[2:])
    assert contents(copied) == contents(whole)


def test_other_weights_at_a_step_are_refused_and_nothing_is_overwritten(copied: Path) -> None:
    before = contents(copied)
    with evaluator(copied) as beside:
        future = beside.submit(POLICIES[1000], step=2000)
        with pytest.raises(ValueError, match=r"step-000002000 holds another .*policy\.digest is"):
            future.result(60)
        beside.trigger_eval(POLICIES[1000], step=2000)
        with pytest.raises(ValueError, match="holds another evaluation"):
            beside.wait(60)
    assert contents(copied) == before


def test_a_curve_of_other_episodes_is_refused(copied: Path) -> None:
    with (
        evaluator(copied, seed=1) as beside,
        pytest.raises(ValueError, match=r"curve of other episodes: seeds\.root is 0 there and 1 h"),
    ):
        beside.evaluate(step=9000)
    with pytest.raises(ValueError, match="keeps the best evaluation by 'mean', got best='iqm'"):
        evaluator(copied, best="iqm")


@pytest.mark.slow
def test_two_evaluators_do_not_write_to_one_directory(copied: Path) -> None:
    with evaluator(copied) as one, evaluator(copied) as other:
        assert one.evaluate(POLICIES[1000], step=1000)
        with pytest.raises(RuntimeError, match="another process is writing to"):
            other.evaluate(POLICIES[1000], step=1000)


def test_metrics_of_the_user_are_there_for_evaluations_that_go_on(copied: Path) -> None:
    step = copied / "step-000003000"
    (step / "results.json").unlink()
    lines = (step / "episodes.jsonl").read_text().splitlines(keepends=True)
    (step / "episodes.jsonl").write_text("".join(lines[:2]))
    with evaluator(copied, metrics_fn=shape_of) as beside:
        for step in (3000, 3000, 1000):
            metrics = beside.evaluate(POLICIES[step], step=step)
            assert metrics["eval/episodes"] == 5
            assert metrics["eval/in_order"]


def test_the_best_may_be_that_of_the_interquartile_mean(tmp_path: Path) -> None:
    run(tmp_path / "iqm", best="iqm")
    curve = read_csv(tmp_path / "iqm" / "curve.csv")
    best = max(curve, key=lambda point: point.iqm)
    kept = json.loads((tmp_path / "iqm" / "best.json").read_text())
    assert (kept["step"], kept["by"], kept["value"]) == (best.step, "iqm", best.iqm)


class Unrewarded(Walk):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


def test_returns_that_are_not_finite_are_points_without_a_mean(tmp_path: Path) -> None:
    with Evaluator(
        Unrewarded, categorical(), num_trajectories=2, output_dir=tmp_path / "curve"
    ) as beside:
        metrics = beside.evaluate(step=1)
        assert metrics["eval/reward"] != metrics["eval/reward"]
        assert beside.best is None
    (point,) = read_csv(tmp_path / "curve" / "curve.csv")
    assert (point.mean, point.low, point.episodes) == (None, None, 2)


POINT = Point(10, 2, 1, 0.1, None, None, None, 1 / 3, 7.0, "ab" * 32)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"step,mean\n",
        to_csv([POINT]).replace(b"0.1", b"many"),
        to_csv([POINT, POINT]),
        to_csv([POINT._replace(digest="")]),
        b"\xff\xfe",
    ],
    ids=range(6),
)
def test_a_curve_that_is_none_is_refused(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_bytes(to_csv([POINT]))
    assert read_csv(file) == [POINT]
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"to hold a curve as tdcollect.Evaluator writes it"):
        read_csv(file)
    with pytest.raises(ValueError, match=r"to hold a curve as tdcollect.Evaluator writes it"):
        evaluator(tmp_path)


def test_a_best_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", '{"step": 1}'):
        (tmp_path / "best.json").write_text(text)
        with pytest.raises(ValueError, match=r"best.json to be as tdcollect.Evaluator writes it"):
            evaluator(tmp_path)


def test_the_directory_of_a_step_is_no_link(tmp_path: Path, caplog) -> None:
    """A folder that somebody sent may hold links to anywhere."""
    (mine := tmp_path / "mine").mkdir()
    (sent := tmp_path / "sent").mkdir()
    (sent / "step-000001000").symlink_to(mine)
    run(sent, [1000])
    assert "step-000001000 to be no link" in caplog.text
    assert not [*mine.iterdir()]
