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
from tdcollect.cli import main
from tdcollect.display import number_texts
from tdcollect.evaluation.curve import Best, Folder, Point, curve_page, read_folder, to_csv
from tdcollect.evaluation.ledger import LOST, Episode, sha256
from tdcollect.lab.pages.view import view

from .envs import Walk
from .evaluators import shape_of
from .ledgers import alter, contents
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


def test_curve_and_page_have_a_line_per_step(whole: Path) -> None:
    """The page leads to the report of each."""
    curve = read_folder(whole)[0]
    assert [point.step for point in curve] == [*STEPS]
    assert (whole / "curve.csv").read_bytes() == to_csv(curve)
    page = (whole / "curve.html").read_text()
    for point, mean in zip(curve, number_texts([p.mean for p in curve]), strict=True):
        folder = whole / f"step-{point.step:09d}"
        result = tdcollect.EvaluationResult.load(folder)
        returns = result.summary().returns
        interval = returns.mean_interval
        assert point.digest == result.digest
        assert (point.episodes, point.failed) == (5, 0)
        assert (point.mean, point.low, point.high) == (returns.mean, interval.low, interval.high)
        assert (point.std, point.iqm) == (returns.std, returns.interquartile_mean)
        link = f'<a href="./{folder.name}/report.html">{point.step:,}</a>'
        assert f'<tr><th scope="row">{link}</th><td>{mean}</td>' in page
        assert (folder / "report.html").is_file()
    best = json.loads((whole / "best.json").read_text())
    assert f"The best mean return, {best['value']:.5g}, is that of step {best['step']:,}." in page
    assert (whole / "curve.svg").read_text().count("<path") > 5


def test_a_page_draws_what_is_finite_and_no_curve_twice() -> None:
    def page(curve: list[Point], best: Best | None = None) -> Any:
        return curve_page(curve, best, "<Walk>", "mean", lambda step: None)

    point = Point(1, 2, 0, None, None, None, None, None, 7.0, "ab" * 32)
    assert page([point]).sections[0] == ("Figures", ["No return is finite."])
    assert b"<h1>&lt;Walk&gt;: learning curve</h1>" in page([point]).html()
    drawn = page([point, POINT], Best(10, 0.1, None)).figures()
    assert [figure.name for figure in drawn] == ["curve", "lengths"]
    assert "The mean length, in steps, is the same" not in drawn[0].note
    same = [POINT._replace(length=POINT.mean), POINT._replace(length=POINT.mean, step=20)]
    (drawn_once,) = page(same).figures()
    assert "The mean length, in steps, is the same" in drawn_once.note


def test_the_best_weights_load_into_the_policy(whole: Path, tmp_path: Path) -> None:
    kept = json.loads((whole / "best.json").read_text())
    curve = read_folder(whole)[0]
    best = max(curve, key=lambda point: point.mean)
    assert kept == {
        "step": best.step,
        "by": "mean",
        "value": best.mean,
        "weights": "best.pt",
        "digest": sha256(whole / "best.pt"),
    }
    policy = categorical()
    policy.load_state_dict(torch.load(whole / "best.pt", weights_only=True))
    result = tdcollect.evaluate(Walk, policy, 5, progress=False)
    assert result.digest == best.digest
    with evaluator(whole) as beside:
        assert beside.best == (best.step, best.mean, whole / "best.pt")
        assert beside.curve == curve
    run(tmp_path / "iqm", STEPS[:2], best="iqm")
    best = max(read_folder(tmp_path / "iqm")[0], key=lambda point: point.iqm)
    kept = json.loads((tmp_path / "iqm" / "best.json").read_text())
    assert (kept["step"], kept["by"], kept["value"]) == (best.step, "iqm", best.iqm)


def test_a_training_goes_on_with_its_curve(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "parts"
    run(path, STEPS[1::-1])  # steps in any order make the same files
    with evaluator(path) as beside:
        assert [point.step for point in beside.curve] == [*STEPS[:2]]
        done = beside.submit(POLICIES[2000], step=2000).result(60)  # since the last checkpoint
        assert done.digest == beside.curve[1].digest
        beside.trigger_eval(POLICIES[3000], step=3000)
    assert contents(path) == contents(whole)


def cut_short(step: Path, lost: bool = False) -> None:
    """Leave two records, as of a process that was killed, or all with one of a lost worker."""
    (step / "results.json").unlink()
    first, *rest = (step / "episodes.jsonl").read_text().splitlines(keepends=True)
    record = Episode.from_json(first)
    gone = Episode(record.index, record.env_seed, record.policy_seed, LOST).to_json() + "\n"
    (step / "episodes.jsonl").write_text("".join([gone, *rest] if lost else [first, rest[0]]))


@pytest.mark.parametrize("lost", ["episodes", "workers"])
def test_what_is_lost_to_a_crash_comes_back(copied: Path, whole: Path, lost: str) -> None:
    for name in ("curve.csv", "curve.html", "curve.svg"):
        (copied / name).unlink()
    cut_short(copied / "step-000003000", lost == "workers")
    run(copied, STEPS[2:])
    assert contents(copied) == contents(whole)


def test_other_weights_or_episodes_are_refused_and_nothing_is_overwritten(copied: Path) -> None:
    before = contents(copied)
    with evaluator(copied) as beside:
        beside.trigger_eval(POLICIES[1000], step=2000)
        with pytest.raises(ValueError, match=r"step-000002000 holds another .*policy\.digest is"):
            beside.wait(60)
    with (
        evaluator(copied, seed=1) as beside,
        pytest.raises(ValueError, match=r"curve of other episodes: seeds\.root is 0 there and 1 h"),
    ):
        beside.evaluate(step=9000)
    with pytest.raises(ValueError, match="keeps the best evaluation by 'mean', got best='iqm'"):
        evaluator(copied, best="iqm")
    assert contents(copied) == before


@pytest.mark.slow
def test_two_evaluators_do_not_write_to_one_directory(copied: Path) -> None:
    with evaluator(copied) as one, evaluator(copied) as other:
        assert one.evaluate(POLICIES[1000], step=1000)
        with pytest.raises(RuntimeError, match="another process is writing to"):
            other.evaluate(POLICIES[1000], step=1000)


def test_metrics_of_the_user_are_there_for_evaluations_that_go_on(copied: Path) -> None:
    cut_short(copied / "step-000003000")
    with evaluator(copied, metrics_fn=shape_of) as beside:
        for step in (3000, 3000, 1000):
            metrics = beside.evaluate(POLICIES[step], step=step)
            assert metrics["eval/episodes"] == 5
            assert metrics["eval/in_order"]


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
    (point,) = read_folder(tmp_path / "curve")[0]
    assert (point.mean, point.low, point.episodes) == (None, None, 2)


POINT = Point(10, 2, 1, 0.1, None, None, None, 1 / 3, 7.0, "ab" * 32)


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1}'])
def test_a_best_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(ValueError, match=r"best.json to be as tdcollect.Evaluator writes it"):
        evaluator(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:1],
        lambda rows: [rows[0], rows[2], rows[1]],
        lambda rows: [rows[0], rows[1].replace("1000,", "2500,"), *rows[2:]],
        lambda rows: [rows[0], rows[1][:-65] + "ab" * 32 + "\n", *rows[2:]],
        lambda rows: ["\xff"],
    ],
)
def test_a_table_that_was_altered_is_found_and_written_again(copied: Path, change: Any) -> None:
    table = copied / "curve.csv"
    before = table.read_text()
    table.write_text("".join(change(before.splitlines(keepends=True))))
    (problem,) = tdcollect.verify(copied).problems
    assert "curve.csv: it is not what the evaluations give" in str(problem)
    run(copied, [1000])
    assert table.read_text() == before


ALTERED: dict[str, tuple[str, Any, str]] = {
    "best step": ("best.json", {"step": 2999}, r"best\.json has .* of step 2999, and its .* None"),
    "best value": ("best.json", {"value": 500.0}, r"best\.json has 500\.0 of .*, and its .* -?\d"),
    "best by": ("best.json", {"by": "luck"}, r"best\.json to be as tdcollect\.Evaluator wr.*luck"),
    "a ledger": ("step-000002000/episodes.jsonl", {"return": 9.0}, "was altered"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_curve_that_was_altered_is_not_gone_on_with(copied: Path, name: str) -> None:
    file, how, told = ALTERED[name]
    alter(copied / file, how)
    before = contents(copied)
    with pytest.raises(ValueError, match=told):
        evaluator(copied)
    assert not tdcollect.verify(copied).passed
    assert contents(copied) == before


def test_weights_that_are_not_those_of_the_best_are_told(copied: Path, caplog) -> None:
    """As after a process was killed between the two files."""
    (copied / "best.pt").write_bytes(b"other")
    curve, best, _ = read_folder(copied, "mean")
    assert best is not None
    assert best.path is None
    told: list[str] = []
    assert read_folder(copied, "mean", told.append)[0] == curve
    assert "best.pt has the digest" in told[0]
    folder = Folder(copied, "mean")
    point = next(point for point in curve if point.step == best.step)
    folder.note(point, POLICIES[best.step].state_dict)  # the same step once more
    folder.close()
    assert read_folder(copied, "mean")[1] == (best.step, best.value, copied / "best.pt")
    assert tdcollect.verify(copied).passed


def test_verify_takes_a_curve(whole: Path, copied: Path, capsys) -> None:
    assert main(["verify", str(whole)]) == 0
    assert f"{whole}: 15 records and the data of 0 checked: passed" in capsys.readouterr().out
    (copied / "curve.csv").unlink()
    (copied / "step-000003000" / "results.json").unlink()
    found = str(tdcollect.verify(copied))
    assert "results.json: the evaluation is unfinished" in found


def test_a_curve_is_viewed_from_its_ledgers(copied: Path, tmp_path: Path) -> None:
    lines = (copied / "curve.csv").read_text().splitlines(keepends=True)
    (copied / "curve.csv").write_text("".join(lines[:-1]))  # its process was killed
    (one,) = view(copied, tmp_path / "pages")[1]
    assert [point.step for point in one.curve] == [*STEPS]


def test_the_directory_of_a_step_is_no_link(tmp_path: Path, caplog) -> None:
    """A folder that somebody sent may hold links to anywhere."""
    (mine := tmp_path / "mine").mkdir()
    (sent := tmp_path / "sent").mkdir()
    (sent / "step-000001000").symlink_to(mine)
    run(sent, [1000])
    assert "step-000001000 to be no link" in caplog.text
    assert not [*mine.iterdir()]
