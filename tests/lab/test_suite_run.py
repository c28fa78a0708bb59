"""Suites that run: each cell is an evaluation, whoever runs it and however often it is killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tdcollect
from tdcollect import LocalWorkers
from tdcollect.cli import main
from tdcollect.evaluation.evaluate import Recording
from tdcollect.evaluation.ledger import sha256
from tdcollect.lab import Suite
from tdcollect.lab import run as module
from tdcollect.lab.pages.suite import suite_page
from tdcollect.lab.pages.view import view
from tdcollect.lab.results import claim_folder, described_cells, state_of
from tdcollect.randomness import NotReproducibleError

from ..evaluation.envs import Walk
from ..evaluation.ledgers import alter, contents
from ..forkserver import start
from ..zoo.reports import shrink
from . import parts
from .parts import FILE, HERE, changed, net, save_runs, small, tables

pytestmark = pytest.mark.usefixtures("small_reports")


@pytest.fixture(scope="module")
def crew(quick_children: None) -> Iterator[LocalWorkers]:
    """Two workers."""
    with LocalWorkers(2) as workers:
        yield workers


def quiet(suite: Suite, out: Path, **how: Any) -> Any:
    return suite.run(out, progress=False, **how)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, small_reports: None) -> Path:
    """The small suite, run in this process."""
    folder = tmp_path_factory.mktemp("small")
    save_runs(folder)
    results = quiet(small(folder), folder / "whole")
    assert results.finished
    assert not results.failures
    return folder / "whole"


def test_a_directory_that_somebody_sent_is_written_through_no_link(folder: Path) -> None:
    """The directories of its evaluations are refused, and files replace links."""
    (mine := folder / "mine").mkdir()
    (sent := folder / "sent").mkdir()
    (mine / "file").write_text("mine")
    claim_folder(sent, described_cells(small(folder), small(folder).cells()))
    for name in ("report.html", "results.json"):
        (sent / name).symlink_to(mine / "file")
    small(folder).report(sent)
    assert not (sent / "report.html").is_symlink()
    (sent / "evaluations").symlink_to(mine)
    with pytest.raises(ValueError, match=r"sent/evaluations/.* to be no link, and behind none"):
        quiet(small(folder), sent)
    assert [(file.name, file.read_text()) for file in mine.iterdir()] == [("file", "mine")]


@pytest.fixture
def whole(once: Path, folder: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(once, folder / "whole"))


def test_each_cell_is_an_evaluation_as_evaluate_writes_it(whole: Path, folder: Path) -> None:
    for cell in small(folder).cells()[1::2]:
        policy = None
        if cell.policy.name == "net":
            policy = net()
            policy.load_state_dict(torch.load(cell.files["checkpoints"]))
        env = cell.request().made_env()
        out = whole / "alone" / cell.path.relative_to("evaluations")
        request = cell.request()
        tdcollect.evaluate(env, policy, 6, 3, output_dir=out, progress=False, request=request)
        assert contents(out) == contents(whole / cell.path)
        assert tdcollect.verify(whole / cell.path).passed


def test_equal_evaluations_under_several_names_run_on_workers(
    crew: LocalWorkers, folder: Path
) -> None:
    given = tables()
    given["tasks"][1] |= {key: given["tasks"][0][key] for key in ("env", "group")}
    given["policies"] = [{"name": name, "factory": "random"} for name in ("one", "two")]
    results = quiet(Suite.of(given, folder), folder / "many", workers=crew)
    assert results.finished
    assert len({cell.mean for cell in results.cells}) == 1


def test_shards_end_with_the_same_files(whole: Path, folder: Path) -> None:
    """In one directory; and in several that are put together."""
    ran = []
    for position in (2, 0, 1):
        results = quiet(small(folder), folder / "shards", shard=(position, 3))
        ran.append(sum(cell.status == "finished" for cell in results.cells))
        quiet(small(folder), folder / f"part{min(position, 1)}", shard=(position, 3))
    assert ran == [2, 4, 6]
    assert contents(folder / "shards") == contents(whole)
    shutil.copytree(folder / "part0", folder / "part1", dirs_exist_ok=True)
    quiet(small(folder), folder / "part1")
    assert contents(folder / "part1") == contents(whole)


def typed_quickly(typed: list[str]) -> None:
    shrink(pytest.MonkeyPatch())
    main(typed)


def test_killed_as_it_writes_and_run_again(folder: Path, whole: Path) -> None:
    (file := folder / "small.toml").write_text(FILE)
    typed = ["suite", "run", str(file), "--output-dir", str(out := folder / "killed"), "--quiet"]

    def lines() -> int:
        found = out.glob("evaluations/*/*/*/episodes.jsonl")
        return sum(ledger.read_bytes().count(b"\n") for ledger in found)

    for most in (1, 20):
        process = start(typed_quickly, typed)
        while process.is_alive() and lines() < most:
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
    assert main(typed) == 0
    assert contents(out) == contents(whole)


# --- what changes --------------------------------------------------------------------------------


def cells_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the cells that begin from now on."""
    begun: list[str] = []

    def noting(*given: Any, output_dir: Path, **how: Any) -> Recording:
        begun.append("/".join(output_dir.parts[-3:]))
        return Recording(*given, output_dir=output_dir, **how)

    monkeypatch.setattr(module, "Recording", noting)
    return begun


def test_added_tasks_policies_and_runs_run_alone(
    whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(whole)
    begun = cells_run(monkeypatch)
    assert quiet(small(folder), whole).finished
    assert begun == []
    more = tables()
    more["tasks"].append({"name": "third", "env": "tests.evaluation.envs:Walk"})
    more["tasks"][-1]["env_kwargs"] = {"longest": 3}
    more["policies"].append({"name": "drawn", "factory": f"{HERE}:sampling"})
    more["policies"][-1]["exploration"] = "random"
    more["policies"][1]["runs"] = [0, 1, 2]
    for run in range(3):
        file = folder / "runs" / "net" / "third" / f"{run}.pt"
        file.parent.mkdir(exist_ok=True)
        torch.save(net().state_dict(), file)
    save_runs(folder, 3)
    results = quiet(Suite.of(more, folder), whole)
    assert results.finished
    assert begun == [
        "walk/net/2",
        "walk/drawn/0",
        "short/net/2",
        "short/drawn/0",
        *(f"third/{name}" for name in ("random/0", "net/0", "net/1", "net/2", "drawn/0")),
    ]
    after = contents(whole)
    evaluations = {name for name in before if name.startswith("evaluations/")}
    assert {name: after[name] for name in evaluations} == {n: before[n] for n in evaluations}


WALK = "tests.evaluation.envs:Walk"
SCALED = [{"call": "wrappers:Scaled", "kwargs": {"factor": 2}}]
DIFFERENCES = [
    ("tasks.1.env", WALK, "tasks.short.env is 'tests.lab.parts:Short' there and 'tests"),
    ("tasks.1.env_kwargs", {"longest": 4}, "tasks.short.env_kwargs.longest is None there"),
    ("tasks.0.wrappers", SCALED, "tasks.walk.wrappers is [] there and [{'call': "),
    ("tasks.0.max_episode_steps", 2, "tasks.walk.settings.max_episode_steps is None"),
    ("defaults.max_episode_steps", 2, "tasks.short.settings.max_episode_steps is None there"),
    ("policies.1.factory", f"{HERE}:sampling", "policies.net.factory is 'tests.lab.parts:net'"),
    ("policies.1.exploration", "random", "policies.net.settings.exploration is None"),
    ("policies.1.checkpoints", "runs/net/walk/0{run}.pt", "files.short/net/0.checkpoints is '"),
    ("suite.version", 2, "version is 1 there and 2 here"),
    ("suite.seed", 4, "seed is 3 there and 4 here"),
    ("suite.episodes", 7, "episodes is 6 there and 7 here"),
    ("suite.name", "other", "name is 'small' there and 'other' here"),
]


def test_what_has_changed_is_refused_with_the_difference(
    whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begun = contents(whole), cells_run(monkeypatch)
    for run in range(2):
        (folder / f"runs/net/walk/0{run}.pt").write_bytes(b"others")
    for where, value, difference in DIFFERENCES:
        with pytest.raises(ValueError, match="another suite: .*" + re.escape(difference)):
            quiet(Suite.of(changed(where, value), folder), whole)
    assert contents(whole) == before
    assert begun == []


def test_a_value_that_is_not_equal_to_itself_has_not_changed(folder: Path) -> None:
    given = tables()
    given["tasks"] = [{"name": "nan", "env": f"{HERE}:Any", "env_kwargs": {"x": [float("nan")]}}]
    suite = Suite.of(given, folder)
    for _ in range(2):
        claim_folder(folder / "out", described_cells(suite, suite.cells(policies=["random"])))


def test_what_decides_no_episode_may_change(whole: Path, folder: Path) -> None:
    before, given = contents(whole), tables()
    given["defaults"] = {"num_envs": 1, "max_restarts": 5}
    given["tasks"][0] |= {"group": "other", "score": {"low": 0, "high": 1}}
    given["policies"][1]["checkpoints"] = "elsewhere/{task}/{run}.pt"
    shutil.copytree(folder / "runs" / "net", folder / "elsewhere")
    results = quiet(Suite.of(given, folder), whole)
    assert results.ranges["walk"] == (0.0, 1.0)
    changed = {name for name, text in contents(whole).items() if before.get(name) != text}
    assert not [name for name in changed if name.startswith("evaluations/")]


def test_missing_files_are_named_before_anything_runs(folder: Path) -> None:
    (folder / "runs" / "net" / "short" / "1.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"short/1\.pt of short/net/1; train these runs"):
        quiet(small(folder), folder / "out")
    assert not (folder / "out").exists()
    results = quiet(small(folder), folder / "out", tasks=["walk"])  # which lacks none
    assert [cell.status for cell in results.cells] == ["finished"] * 3 + ["missing"] * 3


def test_settings_that_cannot_be_honoured_are_refused_before_anything_runs(folder: Path) -> None:
    for defaults, match in [
        ({"num_envs": 0}, "task walk with policy random: expected num_envs to be a positive int"),
        ({"device": "gpu"}, "expected device to be one of torch, such as 'cpu' or 'cuda:0'"),
        ({"device": 0.5}, "expected device to be one of torch"),
        ({"fresh_envs": "no"}, "expected fresh_envs to be a bool or None"),
        ({"exploration": "sometimes"}, "exploration to be 'mode', 'median'"),
        ({"backend": "cloud"}, "expected backend to be"),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            quiet(small(folder, defaults=defaults), folder / "out")
    assert not (folder / "out").exists()


# --- cells that fail -----------------------------------------------------------------------------


def test_a_cell_that_cannot_run_keeps_no_other_from_running(
    crew: LocalWorkers, folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tables()
    given["policies"] += [
        {"name": "broken", "factory": f"{HERE}:broken"},
        {"name": "misfit", "factory": f"{HERE}:wrong_shape"},
        {"name": "leaving", "factory": f"{HERE}:leaving"},
    ]
    given["tasks"].append({"name": "unseeded", "env": "tests.evaluation.envs:Unseeded"})
    given["policies"][1]["runs"] = [0]
    shutil.copytree(folder / "runs/net/walk", folder / "runs/net/unseeded")
    out = folder / "out"
    results = quiet(Suite.of(given, folder), out, workers=crew)
    assert results.failures.keys() == {
        *("walk/broken/0", "walk/misfit/0", "short/broken/0", "short/misfit/0"),
        *("walk/leaving/0", "short/leaving/0"),
        *(f"unseeded/{name}/0" for name in ("random", "net", "broken", "misfit", "leaving")),
    }
    assert "ended the program by sys.exit(3)" in results.failures["walk/leaving/0"]
    assert results.failures["walk/broken/0"] == "RuntimeError: this policy is broken"
    assert "ValueError: expected a policy for observations" in results.failures["walk/misfit/0"]
    assert "NotReproducibleError: " in results.failures["unseeded/random/0"]
    for name in ("walk/random/0", "walk/net/0", "short/random/0", "short/net/0"):
        assert contents(out / "evaluations" / name) == contents(whole / "evaluations" / name)
    assert not list(out.glob("evaluations/*/broken/0/*"))
    assert any("Could not run: " in remark for remark in results.remarks)
    text = (out / "report.html").read_text()
    assert "this policy is broken" in text
    # Another process knows of it, and writes the same report; until the evaluation has run.
    assert Suite.of(given, folder).report(out).failures == results.failures
    assert (out / "report.html").read_text() == text
    monkeypatch.setattr(parts, "broken", parts.net)
    healed = quiet(Suite.of(given, folder), out, tasks=["walk"], policies=["broken"])
    assert results.failures.keys() - healed.failures.keys() == {"walk/broken/0"}
    assert not (out / "evaluations/walk/broken/0.error.json").exists()


def test_a_cell_that_was_refused_keeps_no_other_from_the_report(
    whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add: Callable[..., None] = Recording.add

    def refusing(self: Recording, ended: Any) -> None:
        directory = self.directory
        assert directory is not None
        if "walk/net/1" in str(directory.path) and directory.begun and directory.is_tried:
            raise NotReproducibleError("two digests")
        add(self, ended)

    monkeypatch.setattr(Recording, "add", refusing)
    out = folder / "out"
    results = quiet(small(folder), out)
    assert results.failures.keys() == {"walk/net/1"}
    assert sum(cell.status == "finished" for cell in results.cells) == 5
    again = small(folder).report(out)
    assert again == results
    assert "two digests; remove the directory" in again.failures["walk/net/1"]
    assert state_of(small(folder).cells()[2], out) == ("failed", 0)
    assert "two digests; remove" in quiet(small(folder), out).failures["walk/net/1"]
    ledger = out / "evaluations/walk/net/1/episodes.jsonl"
    (ledger.parent / "refused.json").unlink()
    ledger.write_text("not a record\n")
    assert "line 1 of" in quiet(small(folder), out).failures["walk/net/1"]
    shutil.rmtree(ledger.parent)
    monkeypatch.setattr(Recording, "add", add)
    quiet(small(folder), out)
    assert contents(out) == contents(whole)


def test_workers_that_die_cost_their_episode_and_no_other_cell(
    crew: LocalWorkers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tables()
    deadly = {"deadly": tdcollect.env_seed(3, 4)}
    given["tasks"][1] |= {"env": f"{HERE}:Deadly", "env_kwargs": deadly}
    suite, out = Suite.of(given, folder), folder / "out"
    with pytest.warns(UserWarning, match="worker . .* ended with exit code 3"):
        results = quiet(suite, out, workers=crew)
    assert not results.failures
    assert [cell.lost for cell in results.cells] == [0, 0, 0, 1, 1, 1]
    assert (results.failed_episodes, results.lost_episodes) == (0, 3)
    told = "short/net/0: 1 of 6 episodes were lost with their workers (16.7%), and are in no mean."
    assert told in results.remarks
    for cell in results.cells:
        assert tdcollect.verify(results.directory / cell.path).passed
    assert suite.results(out) == results
    monkeypatch.setattr(parts.Deadly, "reset", Walk.reset)
    again = quiet(suite, out, tasks=["short"], policies=["net"])
    assert {cell.name for cell in again.cells if cell.lost} == {"short/random/0"}
    quiet(suite, out)
    quiet(suite, folder / "whole")
    assert contents(out) == contents(folder / "whole")


def test_data_of_episodes_are_kept_if_asked_before_they_run(whole: Path, folder: Path) -> None:
    kept = {"keep_trajectories": True, "tasks": ["walk"], "policies": ["net"]}
    results = quiet(small(folder), folder / "out", **kept)
    cell = results.cell("walk", "net", 1)
    result = tdcollect.EvaluationResult.load(results.directory / cell.path)
    assert len(result.trajectory(2)) == result.record(2).length
    assert quiet(small(folder), folder / "out", **kept) == results
    before = contents(whole)
    with pytest.raises(ValueError, match="with the data of their episodes, got walk/random/0, "):
        quiet(small(folder), whole, keep_trajectories=True)
    assert contents(whole) == before


# --- results -------------------------------------------------------------------------------------


def test_scores_follow_from_the_ledgers(whole: Path, folder: Path) -> None:
    results = small(folder).results(whole)
    mean = {
        cell.name: np.mean(tdcollect.EvaluationResult.load(whole / cell.path).returns)
        for cell in results.cells
    }
    low = mean["walk/random/0"]
    assert results.ranges == {"walk": (pytest.approx(low, rel=1e-14), 20.0), "short": (-3.0, 5.0)}
    for cell in results.cells:
        ends = (low, 20.0) if cell.task == "walk" else (-3.0, 5.0)
        expected = (mean[cell.name] - ends[0]) / (ends[1] - ends[0])
        assert cell.score == pytest.approx(expected, rel=1e-12, abs=1e-15)
    scores = results.scores()
    assert {name: value.shape for name, value in scores.items()} == {
        "random": (1, 2),
        "net": (2, 2),
    }
    assert scores["net"][1, 0] == results.cell("walk", "net", 1).score
    assert scores["random"][0, 0] == 0.0
    with np.load(whole / "scores.npz") as archive:
        assert all((archive[name] == scores[name]).all() for name in ("random", "net"))
    assert results.aggregates is not None
    best = results.aggregates.estimates["net"]["mean"].value
    assert best == pytest.approx(scores["net"].mean())
    reported = json.loads((whole / "evaluations/walk/net/0/results.json").read_text())
    interval = results.cell("walk", "net", 0).interval
    assert vars(interval) == reported["returns"]["mean_interval"]


def test_the_report_can_be_written_again_and_does_not_depend_on_where(
    whole: Path, folder: Path
) -> None:
    before = contents(whole)
    for name in [name for name in before if not name.startswith(("evaluations/", "suite.json"))]:
        (whole / name).unlink()
    small(folder).report(whole)
    assert contents(whole) == before
    whole.rename(folder / "moved")
    small(folder).report(folder / "moved")
    assert contents(folder / "moved") == before
    found = {name for name in before if "/" not in name}
    assert found == {
        *("suite.json", "results.json", "report.html"),
        *("scores.npz", "scores.json", "leaderboard.csv"),
    }


def test_unfinished_suites_are_reported_as_far_as_they_are(whole: Path, folder: Path) -> None:
    shutil.rmtree(whole / "evaluations/short/net/1")
    (whole / "evaluations/walk/net/0/results.json").unlink()
    results = small(folder).report(whole)
    assert not results.finished
    status = {cell.name: cell.status for cell in results.cells}
    assert (status["short/net/1"], status["walk/net/0"]) == ("missing", "unfinished")
    assert results.aggregates is not None
    assert results.aggregates.policies == ("random",)
    assert results.remarks[0] == "Not finished: walk/net/0 and short/net/1."
    assert results.remarks[1] == "No aggregates of net: a score of theirs is missing."
    shutil.rmtree(whole / "evaluations/walk/random")
    results = small(folder).report(whole)  # the low end of a score
    assert results.ranges["walk"] is None
    assert results.aggregates is None
    assert not (whole / "scores.npz").exists()
    assert "0 of 1 run" in str(results)


def test_remarks_name_what_is_not_the_same_for_all(whole: Path, folder: Path) -> None:
    root = whole / "evaluations/walk/net/0"
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["versions"]["torch"] = "9.9"
    (root / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    results = json.loads((root / "results.json").read_text())
    results["manifest"] = sha256(root / "manifest.json")
    (root / "results.json").write_text(json.dumps(results))
    remarks = small(folder).results(whole).remarks
    own = torch.__version__.split("+")[0]
    assert any(
        "Not the same for all evaluations: versions.torch" in text and "9.9" in text and own in text
        for text in remarks
    )


def test_tasks_without_scores_have_returns_alone(folder: Path) -> None:
    given = tables()
    for task in given["tasks"]:
        del task["score"]
    given["tasks"][0].pop("group")
    results = quiet(Suite.of(given, folder), folder / "out", policies=["random"])
    assert results.aggregates is None
    assert results.scores() == {}
    assert "(return)" in str(results)
    assert tdcollect.verify(folder / "out").passed


def test_progress_tells_of_each_cell(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.progress.SECONDS_BETWEEN_LINES", 0.0)
    small(folder).run(folder / "out", policies=["random"])
    lines = capsys.readouterr().err.splitlines()
    ended = [line for line in lines if "mean return" in line]
    assert ended[0].startswith("tdcollect: walk/random/0: mean return ")
    assert ended[-1].endswith("(2 of 2)")
    assert any("12 of 12 test episodes" in line for line in lines)
    small(folder).run(folder / "out", policies=["random"])
    assert capsys.readouterr().err == ""


# Viewing its directory


def viewed(folder: Path, out: Path) -> Any:
    """View the one thing in a folder."""
    (one,) = view(folder, out, overwrite=True)[1]
    return one


def test_a_suite_is_viewed_without_its_file(whole: Path, folder: Path, tmp_path: Path) -> None:
    one = viewed(tmp_path, tmp_path / "out")
    assert (one.kind, one.path, one.status) == ("suite", "whole", "finished")
    page = (tmp_path / "out" / one.page).read_bytes()
    links = [("All evaluations", "../../index.html")]
    assert page == suite_page(small(folder).results(whole), links).html()
    for cell in one.suite.cells:
        report = tmp_path / "out" / "pages" / "whole" / cell.path / "report.html"
        assert b'<p class="kicker">Evaluation</p>' in report.read_bytes()
    assert 'href="./pages/whole/report.html">whole<' in (tmp_path / "out/index.html").read_text()
    shutil.rmtree(whole / "evaluations" / "walk" / "net" / "1")
    one = viewed(tmp_path, tmp_path / "out")
    assert one.status == "unfinished, 5 of 6 evaluations"
    assert "missing" in (tmp_path / "out" / one.page).read_text()


ALTERED = [
    ("results.json", {"cells": [{"task": "../..", "policy": "net", "run": "0"}]}, "it lacks short"),
    ("results.json", {"episodes": 7}, "its episodes are not what suite.json and the eval"),
    ("results.json", {"remarks": ["All is well."]}, "its remarks are not what suite.json"),
    ("results.json", {"aggregates": None}, "its aggregates are not what suite.json and"),
    ("results.json", None, "no report yet"),
    ("suite.json", {"episodes": 7}, "expected 7 episodes of root seed 3"),
    ("suite.json", {"report": {}}, "as `tdcollect suite report` writes it"),
    ("suite.json", {"format": 9}, "as `tdcollect suite run` of this version writes it"),
    ("suite.json", {"seed": -1}, "as `tdcollect suite report` writes it"),
]


def test_a_suite_of_other_files_is_listed_with_the_reason(whole: Path, tmp_path: Path) -> None:
    for file, change, told in ALTERED:
        text = (whole / file).read_text()
        alter(whole / file, change)
        one = viewed(tmp_path, tmp_path / "out")
        (whole / file).write_text(text)
        assert one.page is None
        assert one.status.startswith("unreadable: ")
        assert told in one.status


def test_suite_json_holds_what_decides_the_report(whole: Path, folder: Path) -> None:
    decided = json.loads((whole / "suite.json").read_text())
    (walk, short), told = decided["report"]["tasks"], decided["report"]
    assert walk["score"] == {"low": "random", "high": 20.0, "source": "made up"}
    assert (walk["group"], short["group"], short["score"]["low"]) == ("long", None, -3.0)
    other = replace(small(folder), confidence=0.5, metrics=("mean",))
    other.report(whole)  # which need not be the one that ran
    now = json.loads((whole / "suite.json").read_text())["report"]
    assert now == {**told, "confidence": 0.5, "metrics": ["mean"]}
    one = viewed(folder, folder / "out")
    assert one.suite.aggregates.confidence == 0.5
    assert tdcollect.verify(whole).passed
    small(folder).report(whole)
    assert json.loads((whole / "suite.json").read_text()) == decided


def test_a_relative_directory_of_a_suite_holds_wherever_the_process_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    suite = Suite.of(tables())
    results = quiet(suite, Path("out"), policies=["random"])
    monkeypatch.chdir("/")
    assert sum(cell.status == "finished" for cell in results.cells) == 2
    quiet(suite, folder / "out", tasks=["short"])
    cells = suite.results(folder / "out").cells
    assert sum(cell.status == "finished" for cell in cells) == 4


def test_a_suite_is_audited_by_cell(once: Path) -> None:
    """A cell whose env is not gymnasium's own says so, and each cell is audited with its env."""
    audits = tdcollect.audit(once)
    assert len(audits) == len([*once.glob("evaluations/*/*/*/manifest.json")])
    assert all("not audited: expected --env ENV" in str(audit) for audit in audits)
    with pytest.raises(ValueError, match=r"expected evaluations of one env, got .*; name one of"):
        tdcollect.audit(once, Walk)
    cells = {audit.directory: json.loads((audit.directory / "manifest.json").read_text())
             for audit in audits}  # fmt: skip
    (first, *_) = [cell for cell, told in cells.items() if told["env"]["id"] == "Walk"]
    assert tdcollect.audit(first, Walk, sample=2)[0].wrong == []
