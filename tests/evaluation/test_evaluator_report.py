"""The report of an evaluator's best checkpoint, on episodes that chose nothing."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcollect
from tdcollect import Evaluator
from tdcollect.lab.pages.view import view
from tdcollect.seeding import report_seed

from .envs import Walk
from .evaluators import normalized, statistics
from .ledgers import alter, contents
from .policies import categorical, deterministic
from .test_evaluator_files import POLICIES, STEPS, evaluator, run

pytestmark = pytest.mark.usefixtures("quick_children")

reporting = partial(run, report_episodes=7)


@pytest.fixture(scope="module")
def plain(quick_children: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "curve"
    run(path)
    return path


@pytest.fixture(scope="module")
def whole(quick_children: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "curve"
    reporting(path)
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def seeds(folder: Path) -> set[int]:
    return {record.env_seed for record in tdcollect.EvaluationResult.load(folder).episodes}


def test_the_report_is_an_evaluation_of_the_best_on_other_episodes(
    plain: Path, whole: Path, tmp_path: Path
) -> None:
    with evaluator(whole) as beside:
        best = beside.best.step
    seed = report_seed(0)
    tdcollect.evaluate(
        Walk, POLICIES[best], 7, seed=seed, output_dir=tmp_path / "it", progress=False
    )
    report, chosen = whole / f"report-{best:09d}", whole / f"step-{best:09d}"
    assert contents(report) == contents(tmp_path / "it")
    assert not seeds(report) & seeds(chosen)
    assert report_seed(1) != seed != 0
    # All else is as without a report, but for the page.
    added = {n: data for n, data in contents(whole).items() if not n.startswith(report.name)}
    before, page = contents(plain), added.pop("curve.html").decode()
    assert b"Reported" not in before.pop("curve.html")
    assert added == before
    for folder in (report, chosen):
        mean = tdcollect.EvaluationResult.load(folder).summary().returns.mean
        assert f"{mean:.3f}" in page
        assert f'<a href="./{folder.name}/report.html">' in page
    assert "on episodes of another root seed, which chose nothing" in page
    found = tdcollect.verify(whole)
    assert (found.passed, found.episodes) == (True, 3 * 5 + 7)
    (one,) = view(whole, tmp_path / "pages")[1]
    viewed = tmp_path / "pages" / one.page
    assert f'<a href="./{report.name}/report.html">reported</a>' in viewed.read_text()
    assert (viewed.parent / report.name / "report.html").is_file()


def test_a_report_that_is_done_is_found_and_another_winner_has_its_own(
    whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "curve"
    reporting(path, STEPS[::2])
    (first,) = path.glob("report-*")
    before = contents(path)
    with evaluator(path, report_episodes=7) as beside:
        done = beside.report()
        assert beside.report() is done
    assert contents(path) == before
    with evaluator(path, report_episodes=7) as beside:
        beside.evaluate(POLICIES[2000], step=2000)
    assert beside.best.step == 2000
    report = beside.report()  # that of the end
    assert report.directory == path / "report-000002000" != first == done.directory
    assert len(report.replay(3)) == report.record(3).length
    assert {n: d for n, d in contents(path).items() if first.name not in n} == contents(whole)
    assert tdcollect.verify(path).passed


def with_statistics(path: Path, **options: Any) -> Evaluator:
    return Evaluator(normalized, deterministic(4), num_trajectories=3, output_dir=path, **options)


def test_a_training_that_was_stopped_reports_the_weights_that_won(tmp_path: Path) -> None:
    """Those of the env's transforms, too."""
    path = tmp_path / "curve"
    stopped = with_statistics(path, report_episodes=4)
    for seed in (1, 2):
        stopped.evaluate(step=seed, weights_dict={"env.transform[0]": statistics(seed)})
    stopped.shutdown()
    assert not [*path.glob("report-*")]
    with with_statistics(path, report_episodes=4) as beside:
        pass
    report = beside.report()
    step = beside.best.step
    chosen = tdcollect.EvaluationResult.load(path / f"step-{step:09d}")
    assert report.manifest["env"] == chosen.manifest["env"]  # has the digest of the statistics
    assert len(report.replay(2)) == report.record(2).length
    shutil.rmtree(report.directory)
    (path / "best-transforms.pt").unlink()
    with with_statistics(path, report_episodes=4) as beside:
        with pytest.raises(ValueError, match=rf"weights of .*step-0*{step}, .*env\.transforms"):
            beside.report()
        beside.evaluate(step=step, weights_dict={"env.transform[0]": statistics(step)})
        assert beside.report().digest == report.digest


def test_options_of_episodes_that_chose_are_not_those_of_a_report(tmp_path: Path) -> None:
    how: dict[str, Any] = {"episode_options": [{"at": i} for i in range(8)]}
    with pytest.raises(ValueError, match="up to index 8, got 8 dicts"):
        evaluator(tmp_path / "none", report_episodes=4, **how)
    with evaluator(tmp_path / "curve", report_episodes=3, **how) as beside:
        beside.evaluate(step=1)
        assert [record.index for record in beside.report().episodes] == [5, 6, 7]


def test_a_report_without_a_directory_is_of_the_weights_at_the_call() -> None:
    how: dict[str, Any] = {"num_trajectories": 5, "report_episodes": 7}
    with Evaluator(Walk, categorical(), **how) as beside:
        with pytest.raises(RuntimeError, match="expected an evaluation with a finite return"):
            beside.report()
        for step in STEPS:
            beside.trigger_eval(POLICIES[step], step=step)
        report = beside.report()
        best = POLICIES[beside.best.step]
        seed = report_seed(0)
        assert report.digest == tdcollect.evaluate(Walk, best, 7, seed, progress=False).digest
        beside.evaluate(categorical(), step=beside.best.step)
        assert beside.evaluate()["eval/step"] == 0  # the weights of the report are not its latest
    with Evaluator(Walk, categorical()) as beside, pytest.raises(RuntimeError, match="report_epis"):
        beside.report()


def test_a_report_that_fails_at_the_end_is_told(copied: Path, caplog: Any) -> None:
    (done,) = copied.glob("report-*")
    shutil.rmtree(done)
    torch.save(categorical().state_dict(), copied / "best.pt")
    reporting(copied, ())
    assert "the report of step" in caplog.text
    assert "policy.digest is" in caplog.text
    assert not done.exists()


def of_the_choice(report: Path) -> None:
    """The evaluation that chose, in the place of the report."""
    shutil.rmtree(report)
    shutil.copytree(report.with_name(report.name.replace("report", "step")), report)


ALTERED: dict[str, tuple[str, Any, str]] = {
    "the choice": (
        "",
        of_the_choice,
        r"step-000002000, got another: seeds\.root is \d+ for this step and 0 here",
    ),
    "a ledger": ("episodes.jsonl", {"return": 9.0}, "was altered"),
    "unfinished": ("results.json", None, "unfinished"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_verify_finds_a_report_that_is_none(copied: Path, name: str) -> None:
    file, how, told = ALTERED[name]
    (report,) = copied.glob("report-*")
    alter(report / file, how)
    assert re.search(told, str(tdcollect.verify(copied)))
