"""The pages of all evaluations below a folder, and their index."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.request
from pathlib import Path

import pytest

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import Request
from tdcollect.evaluation.curve import point_of, to_csv
from tdcollect.lab.pages.view import Viewed, view

from ..evaluation.ledgers import GONE, alter, contents, unfinished


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations in many states."""
    root = tmp_path_factory.mktemp("view") / "runs"
    request = Request("CartPole-v1", "random", directory=str(root))
    result = tdcollect.evaluate(
        "CartPole-v1", None, 3, output_dir=root / "a" / "whole", progress=False, request=request,
        keep_trajectories=True,
    )  # fmt: skip
    for name in ("b", "altered", "half", "their <pages>#?"):
        shutil.copytree(root / "a" / "whole", root / name)
    (root / "b" / "run.json").unlink()
    shutil.rmtree(root / "b" / "trajectories")
    alter(root / "b" / "results.json", {"trajectories": GONE})
    unfinished(root / "half", 2)
    lines = (root / "altered" / "episodes.jsonl").read_text()
    (root / "altered" / "episodes.jsonl").write_text(
        lines.replace('"restarts": 0', '"restarts": 1')
    )
    (root / "their <pages>#?" / "report.html").write_text("<script>alert(1)</script>")
    (root / "other").mkdir()
    (root / "other" / "manifest.json").write_text('{"name": "an extension of a browser"}')
    curve = root / "curve"
    for step in (100, 200):
        shutil.copytree(root / "b", curve / f"step-{step:09d}")
    points = [point_of(step, result.summary(), result.digest) for step in (100, 200)]
    (curve / "curve.csv").write_bytes(to_csv(points))
    return root


@pytest.fixture(scope="module")
def viewed(runs: Path) -> tuple[Path, list[Viewed]]:
    """The index of their pages, and what was found."""
    return view(runs, runs.parent / "out")


@pytest.fixture(scope="module")
def out(viewed: tuple[Path, list[Viewed]]) -> Path:
    """The folder of the pages."""
    return viewed[0].parent


def test_each_evaluation_and_curve_is_in_the_index(viewed: tuple[Path, list[Viewed]]) -> None:
    index, found = viewed
    assert {one.path: one.status.partition(":")[0] for one in found} == {
        "a/whole": "finished",
        "altered": "unreadable",
        "b": "finished",
        "curve": "finished",
        "half": "unfinished, 2 of 3 episodes",
        "their <pages>#?": "finished",
    }
    text = index.read_text()
    assert '<a href="./pages/their%20%3Cpages%3E%23%3F/report.html">their &lt;pages&gt;#?<' in text
    assert "unfinished, 2 of 3 episodes" in text
    for one in found:
        assert (one.page is None) == (one.status != "finished")
        assert one.page is None or (index.parent / one.page).is_file()


def test_links_between_the_pages_lead_to_files(out: Path) -> None:
    seen = set()
    for file in out.rglob("*.html"):
        for link in re.findall('<a href="(.*?)"', file.read_text()):
            target = file.parent / urllib.request.url2pathname(link)
            assert target.is_file(), (file, link)
            seen.add(target.resolve())
    assert len(seen) == 7 + 2 * 3  # two have a page for each episode, too


def test_the_page_of_an_episode_leads_to_those_beside_it(out: Path) -> None:
    folder = out / "pages" / "a" / "whole" / "episodes"
    beside = [["Next: episode 1"], ["Previous: episode 0", "Next: episode 2"]]
    for index, expected in enumerate([*beside, ["Previous: episode 1"]]):
        text = (folder / f"{index:06d}.html").read_text()
        links = re.findall('<a href="(.*?)">(.*?)</a>', text.partition("</nav>")[0])
        assert [words for _, words in links] == ["The evaluation", *expected]
        assert [f"{int(words[-1]):06d}.html" for _, words in links[1:]] == [
            link.removeprefix("./") for link, _ in links[1:]
        ]


def test_no_page_of_the_folder_is_taken_over(runs: Path, out: Path) -> None:
    pages = b"".join(contents(out).values())
    assert b"alert(1)" not in pages
    assert str(runs).encode() not in pages


def test_the_same_files_give_the_same_pages_wherever_they_are(
    runs: Path, out: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(runs, tmp_path / "elsewhere" / "runs")
    two = Path(shutil.copytree(out, tmp_path / "two"))
    (two / "pages" / "b" / "report.html").unlink()
    view(moved, two)  # over its own
    assert contents(out) == contents(two)


def test_a_folder_without_evaluations_is_refused(runs: Path, out: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(out, tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match=r"expected evaluations below .*other"):
        view(runs / "other", mine)
    with pytest.raises(FileNotFoundError, match="expected a folder with evaluations, got"):
        view(runs / "none", mine)
    assert contents(mine) == contents(out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_pages_that_came_with_the_folder_are_replaced_only_if_asked(
    runs: Path, out: Path, tmp_path: Path
) -> None:
    here = shutil.copytree(runs / "b", tmp_path / "their" / "b").parent
    theirs = shutil.copytree(out, here / "pages")
    (theirs / "script.html").write_text("<script>alert(1)</script>")
    before = contents(theirs)
    with pytest.raises(ValueError, match=r"lies in the folder to view, .* \(--overwrite\), or"):
        view(here, theirs)
    assert contents(theirs) == before
    view(here, theirs, overwrite=True)
    assert sorted(contents(theirs)) == ["index.html", "pages/b/report.html"]
    assert [entry.name for entry in here.iterdir()] == ["b", "pages"]


def test_nothing_is_written_through_a_link_that_came_with_the_folder(
    runs: Path, out: Path, tmp_path: Path
) -> None:
    """To a file, to a folder, and to where the pages are to go."""
    here = shutil.copytree(runs / "b", tmp_path / "their" / "b").parent
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.html").write_text("mine")
    shutil.copytree(out, here / "files")
    shutil.rmtree(here / "files" / "pages" / "b")
    shutil.copytree(here / "files", here / "folders")
    (here / "files" / "pages" / "b").mkdir()
    (here / "files" / "pages" / "b" / "report.html").symlink_to(mine / "report.html")
    (here / "folders" / "pages" / "b").symlink_to(mine)
    (here / "link").symlink_to(mine)
    for name in ("files", "folders"):
        index, _ = view(here, here / name, overwrite=True)
        assert not [path for path in index.parent.rglob("*") if path.is_symlink()]
    for behind in ("link", "link/pages"):
        with pytest.raises(ValueError, match="which is a link, or lies behind one; choose another"):
            view(here, here / behind, overwrite=True)
    assert contents(mine) == {"report.html": b"mine"}


def test_a_folder_with_other_files_is_kept(runs: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("my home page")
    with pytest.raises(ValueError, match=r"to hold pages of `tdcollect view`, got "):
        view(runs, tmp_path)
    assert contents(tmp_path) == {"index.html": b"my home page"}
    mine = shutil.copytree(out, tmp_path / "mine")
    (mine / "CNAME").write_text("my.site")
    with pytest.raises(ValueError, match="or holds more: replace all of it"):
        view(runs, mine)
    with pytest.raises(ValueError, match="which holds the folder to view; choose another"):
        view(mine / "pages", mine, overwrite=True)
    assert (mine / "CNAME").exists()


def test_only_what_an_evaluation_wrote_is_viewed(runs: Path, tmp_path: Path) -> None:
    """No pipe, no page of a comparison, and no page below the folder itself."""
    here = shutil.copytree(runs / "b", tmp_path / "runs" / "b").parent
    for name in ("manifest.json", "suite.json", "curve.csv"):
        (here / name).mkdir()
        os.mkfifo(here / name / name)
    (here / "compared").mkdir()
    (here / "compared" / "comparison.html").write_text("<script>alert(1)</script>")
    for _ in range(2):
        index, found = view(here, here / "out", overwrite=True)
        kinds = [(one.kind, one.path) for one in found]
        assert kinds == [("evaluation", "b"), ("comparison", "compared")]
        assert "left out, as what it compares is not below this folder" in index.read_text()
        shutil.copytree(runs / "b", here / "out" / "b")
    with pytest.raises(ValueError, match="lies in the folder to view, or holds more"):
        view(here, here / "out")
    with pytest.raises(FileNotFoundError, match="expected evaluations below"):
        view(here / "compared", tmp_path / "out")


def test_comparisons_are_made_again_from_what_was_viewed(runs: Path, tmp_path: Path) -> None:
    """With the numbers that were compared, wherever the evaluations lie; a page is no source."""
    here = tmp_path / "runs"
    for name in ("a", "b"):
        shutil.copytree(runs / "b", here / name)
    out = here / "both"
    assert main(["compare", f"{here / 'a'}", f"{here / 'b'}", "--output-dir", f"{out}"]) == 0
    compared = json.loads((out / "comparison.json").read_text())
    before = (out / "comparison.html").read_text()
    (out / "comparison.html").write_text("<script>alert(1)</script>")
    (here / "a").rename(here / "moved")
    index, found = view(here, tmp_path / "pages")
    assert (found[-1].kind, found[-1].path, found[-1].policy) == ("comparison", "both", "b minus a")
    assert '<a href="./pages/both/comparison.html">both</a>' in index.read_text()
    again = (tmp_path / "pages" / "pages" / "both" / "comparison.html").read_text()
    assert re.sub("<nav>.*?</nav>\n", "", again) == before
    wrong = {"ledgers": [[1]], "resamples": "9", "confidence": None, "seed": -1, "across_envs": 2}
    for name, value in wrong.items():
        (out / "comparison.json").write_text(json.dumps(compared | {name: value}))
        _, found = view(here, tmp_path / "pages")
        assert found[-1].status.startswith("left out")


def test_commands_are_those_of_the_evaluations(runs: Path, out: Path, capsys) -> None:
    page = (out / "pages" / "a" / "whole" / "report.html").read_text()
    (command,) = re.findall("<code>tdcollect (.*?)</code>", page)
    assert main(command.replace("DIR", str(runs / "a" / "whole")).split()) == 0
    assert "the same to the bit" in capsys.readouterr().out
    page = (out / "pages" / "b" / "report.html").read_text()
    assert "tdcollect.EvaluationResult.load(&#34;b&#34;, env).replay(" in page


def test_the_command_prints_what_it_found(runs: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(runs)
    assert main(["view", "b", "--output-dir", "../text"]) == 0
    assert capsys.readouterr().out == "1 page of 1 found below b\nindex ../text/index.html\n"
    assert main(["view", "half", "--output-dir", "../text"]) == 0
    assert "tdcollect: .: unfinished, 2 of 3 episodes" in capsys.readouterr().err
    monkeypatch.chdir(runs.parent)
    told = []
    for name in ("b", "curve"):
        assert main(["view", f"runs/{name}", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [one["index"] for one in told] == ["pages/index.html"] * 2
    (evaluation,), (curve,) = (one["found"] for one in told)
    assert (evaluation["summary"]["episodes"], curve["points"]) == (3, 2)
    assert main(["view", "none"]) == 1
