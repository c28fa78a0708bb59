"""The pages of single episodes: what is drawn, what differs first, films, and hostile files."""

from __future__ import annotations

import base64
import html
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation.directory import write_trajectory
from tdcollect.evaluation.ledger import LOST, Episode, indices_of
from tdcollect.lab.pages.episode import (
    Played,
    _entries,
    _lines,
    episode_page,
    first_difference,
    read_played,
)
from tdcollect.lab.pages.view import view
from tdcollect.pages.build import content_policy

from ..evaluation.ledgers import change_data, ledger, pickled, pipe
from ..pages.made import AGAIN, EVIL

EPISODES = 5
DATA = "trajectories/000000.npz"


def leaning(td: Any) -> Any:
    """Pushes the pole's way, and writes what an actor-critic writes, in several types."""
    angle = td["observation"][..., 2] + td["observation"][..., 3]
    td["action"] = torch.nn.functional.one_hot((angle > 0).long(), 2)
    td["state_value"] = angle[..., None]
    td["half"] = angle.bfloat16()
    td["wide"] = td["observation"].repeat_interleave(5, -1)
    return td


class Fails(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at a step of each episode, whose number it finds."""

    def reset(self, **how: Any) -> Any:
        self.left = 6
        return super().reset(**how)

    def step(self, action: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise RuntimeError("a fault")
        return super().step(action)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies on the same episodes, whose data were kept; and a third without data."""
    root = tmp_path_factory.mktemp("episodes")
    for name, policy in (("lean", leaning), ("random", None), ("bare", None)):
        tdcollect.evaluate(
            "CartPole-v1", policy, EPISODES, output_dir=root / name, progress=False,
            keep_trajectories=name != "bare",
        )  # fmt: skip
    return root


def played(root: Path, index: int = 0, name: str = "lean") -> Played:
    result = tdcollect.EvaluationResult.load(root)
    return read_played(name, root, result.record(index), result.manifest, AGAIN)


def lines(*runs: Played) -> dict[str, Any]:
    """All lines of a page, by the title of their figure."""
    names = [one.name for one in runs]
    return {
        title: drawn for entry in _entries(runs) for title, drawn in _lines(entry, names, 10**9)
    }


def test_each_number_is_drawn_at_its_step(runs: Path) -> None:
    data = tdcollect.EvaluationResult.load(runs / "lean").trajectory(0)
    drawn = lines(played(runs / "lean"))
    last = data["next", "observation"][-1:]
    expected = {
        "reward": (1, data["next", "reward"]),
        "reward, summed up": (1, data["next", "reward"].double().cumsum(0)),
        "action": (1, data["action"].argmax(-1)),
        "observation[0] to observation[3]": (0, torch.cat([data["observation"], last])),
        "state_value": (1, data["state_value"]),
        "half": (1, data["half"]),
    }
    assert drawn.keys() == expected.keys()  # "wide" has 20 numbers a step
    for title, (first, values) in expected.items():
        columns = values.double().reshape(len(values), -1).T.numpy()
        for line, column in zip(drawn[title], columns, strict=True):
            np.testing.assert_array_equal(line.y, column)
            np.testing.assert_array_equal(line.x, first + np.arange(len(column)))
    text = episode_page([played(runs / "lean")], "CartPole-v1").html().decode()
    assert "wide: float32, [20] in each step. Not drawn." in text


@given(st.integers(0, 11), st.integers(0, 5), st.booleans())
def test_the_first_difference_is_that_of_the_bits(row: int, place: int, split: bool) -> None:
    first = np.random.default_rng(row).normal(size=(12, 2, 3)).astype(np.float32)
    second = first.copy()
    first[row:, 1, 2] = first.reshape(12, 6)[row:, place] = 0.0
    second[row:, 1, 2] = second.reshape(12, 6)[row:, place] = -0.0  # equal as a number
    halves = (second[:7], second[7:]) if split else (second,)
    found = first_difference((first,), halves)
    assert found == (row, f"[{place}] is 0.0 and -0.0")
    assert first_difference((first,), (first[:5],)) is None
    assert first_difference((first,), (first.astype(np.float64),)) is not None


def test_policies_are_compared_side_by_side(runs: Path, capsys: Any) -> None:
    """At the first step that differs by TorchRL's own reader, on the episodes that differ most."""
    out = runs / "compared"
    assert main(["compare", *(str(runs / name) for name in ("random", "lean", "bare")),
                 "--output-dir", str(out)]) == 0  # fmt: skip
    results = [tdcollect.EvaluationResult.load(runs / name) for name in ("random", "lean")]
    apart = np.abs(results[0].returns - results[1].returns)
    pages = {int(file.stem): file.read_text() for file in (out / "episodes").glob("*.html")}
    assert {*pages} == {*np.argsort(-apart, kind="stable")[:3].tolist()}
    for index, text in pages.items():
        a, b = (result.trajectory(index)["action"] for result in results)
        count = min(len(a), len(b))
        step = int((a[:count] != b[:count]).any(-1).nonzero()[0]) + 1
        assert f"random and lean first differ in step {step}: action is" in text
        assert "bare" not in html.unescape(text).partition("<main>")[2]
        (link,) = re.findall(rf'<a href="(.*?)">{index}</a>', (out / "comparison.html").read_text())
        assert (out / link).read_text() == text
    same = episode_page([played(runs / "lean"), played(runs / "lean", name="b")], "CartPole-v1")
    assert "lean and b first differ in no step that both have." in same.html().decode()


def test_texts_are_a_transcript_in_the_order_of_their_steps() -> None:
    def run(name: str, last: str) -> Played:
        said = np.array(["one", "two\n<b>", last], object)
        data = {
            "said": said[:-1],
            "next/said": said[1:],
            "action": np.array(["go", "stop"], object),
            "next/reward": np.float32([[1], [0.5]]),
        }
        record = Episode(0, 1, 2, episode_return=1.5, length=2)
        return Played(name, record, AGAIN, {"observation": ["said"], "action": ["action"]}, data)

    def shown(*runs: Played) -> str:
        return episode_page(runs, "Env").html().decode()

    part = shown(run("a", "three")).partition("<h2>Transcript</h2>")[2].partition("</section>")[0]
    assert re.findall(r'<th scope="row">(.*?)</th>\s*<td>(.*?)</td>', part, re.S) == [
        ("0 said", "one"),
        ("1 action", "go"),
        ("1 reward", "1"),
        ("1 said", "two\n&lt;b&gt;"),
        ("2 action", "stop"),
        ("2 reward", "0.5"),
        ("2 said", "three"),
    ]
    both = html.unescape(shown(run("a", "three"), run("b", "four")))
    assert "a and b first differ in step 2: said is 'three' and 'four'" in both


def test_episodes_are_named_by_a_text() -> None:
    returns = np.random.default_rng(0).normal(size=20)
    records = ledger(returns, failed=[3, 8], success={i: i != 11 for i in range(20)})
    records[9] = replace(records[8], index=9, status=LOST)
    done = [index for index in range(20) if index not in (3, 8, 9)]
    assert indices_of("worst:4", records) == sorted(done, key=returns.__getitem__)[:4]
    assert indices_of("worst:99", records) == sorted(done, key=returns.__getitem__)
    assert indices_of("failed", records) == [3, 8, 11]
    assert indices_of("7,1,7", records) == [1, 7]
    records[7] = replace(records[7], episode_return=math.nan)
    assert indices_of("worst:1", records) == [7]
    for text in ("worst", "worst:0", "1,", "-1", "1 2", "all", "", "worst:3,failed"):
        with pytest.raises(ValueError, match="expected episodes as worst:3, failed, or indices"):
            indices_of(text)


def test_films_are_on_the_pages_of_their_episodes(tmp_path: Path, monkeypatch, capsys) -> None:
    """The film is in the page, that alone may play it, and data of the replay are drawn."""
    pytest.importorskip("pygame")
    monkeypatch.chdir(tmp_path)
    command = "evaluate CartPole-v1 --policy random --episodes 4 --output-dir run --quiet"
    assert main([*command.split(), "--film", "worst:1"]) == 0
    (worst,) = indices_of("worst:1", tdcollect.EvaluationResult.load("run").episodes)
    other = (worst + 1) % 4
    named = ["--env", "CartPole-v1", "--policy", "random"]
    assert main(["replay", "run", "--film", f"{other}"]) == 1
    assert (
        f"as in: tdcollect replay run --film {other} {' '.join(named)} (it"
        in capsys.readouterr().err
    )
    assert main(["replay", "run", "--film", f"{other}", *named]) == 0
    film = tmp_path / "run" / "films" / f"{other:06d}.mp4"
    assert f"film run/films/{film.name}\npages tdcollect view run\n" in capsys.readouterr().out
    assert tdcollect.verify("run").passed
    view("run", "out")
    found = {int(file.stem): file for file in Path("out", "pages").rglob("0*.html")}
    assert {*found} == {worst, other}
    text = found[other].read_text()
    address = f"data:video/mp4;base64,{base64.b64encode(film.read_bytes()).decode()}"
    assert re.findall('src="(.*?)"', text) == [address]
    assert html.escape(content_policy(films=True), quote=False) in text
    assert "reward, summed up" in text
    report = Path("out", "pages", "report.html").read_text()
    assert content_policy() in report
    assert "media-src" not in report
    assert f'<a href="./episodes/{other:06d}.html">page</a>' in report


def test_the_film_of_an_episode_that_raises_ends_there(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    env = lambda: Fails(gym.make("CartPole-v1", render_mode="rgb_array"))  # noqa: E731
    result = tdcollect.evaluate(env, None, 2, output_dir=tmp_path / "run", progress=False)
    films = result.film("failed")
    assert len(films) == 2
    assert films == sorted((tmp_path / "run" / "films").iterdir())
    view(tmp_path, tmp_path / "out")
    page = (tmp_path / "out" / "pages" / "run" / "episodes" / "000001.html").read_text()
    assert "<video" in page
    assert "No data of this episode are there" in page


def test_what_cannot_be_filmed_is_refused_before_an_env_is_made(runs: Path, capsys) -> None:
    run = str(runs / "bare")
    for command, told in [
        (["replay", run], "expected INDEX, with --video FILE or without; or --film EPISODES"),
        (["replay", run, "1", "--film", "1"], "expected INDEX"),
        (["replay", run, "--film", "1", "--video", "a.mp4"], "expected INDEX"),
        (["replay", run, "--film", "bad"], "expected episodes as worst:3"),
        (["replay", run, "--film", "1,99"], "episode 99 is not among the 5"),
        (["evaluate", "no:env", "--policy", "no:one", "--film", "1"], "--film needs a directory"),
        (["evaluate", "no:env", "--policy", "no:one", "--film", "x", "--output-dir", f"{run}x"],
         "expected episodes as worst:3"),
        (["view", run, "--episodes", "x", "--output-dir", f"{run}x"], "expected episodes as worst"),
    ]:  # fmt: skip
        assert main(command) != 0
        assert told in capsys.readouterr().err
    assert not Path(f"{run}x").exists()
    held = tdcollect.evaluate("CartPole-v1", None, 1, progress=False)
    with pytest.raises(ValueError, match="expected a result with a directory, which the films"):
        held.film("worst:1")


def sparse(folder: Path) -> None:
    os.truncate(folder / DATA, 1 << 40)


def linked(folder: Path) -> None:
    (folder / "films").mkdir()
    (folder / "films" / "000000.mp4").symlink_to(folder / "manifest.json")


def film(content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "films").mkdir()
        (folder / "films" / "000000.mp4").write_bytes(content)

    return make


def no_film(folder: Path) -> None:
    film(b"")(folder)
    pipe(folder / "films" / "000000.mp4")


def lacking(folder: Path) -> None:
    change_data(folder / DATA, lambda found: found.pop("next/truncated"))


def changed(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: change_data(folder / DATA, lambda found: found.update(entries))


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (sparse, f"expected at most 4294967296 bytes in {DATA}, got 1099"),
        (linked, "to be no link, and behind none"),
        (film(b"<script>alert(1)</script>"), "to be an MP4 file of at most 33554432 bytes"),
        (no_film, "to be an MP4 file of at most 33554432 bytes"),
        (changed(observation=np.zeros((1, 4), np.float32)), "does not hold the data of an episode"),
        (changed(**{"next/terminated/<script>": np.zeros(1)}), "does not hold the data of an epis"),
        (
            changed(**{"é<script>": np.zeros(1)}),
            "of an entry, as a/b or a%2Fb, got 'é<script>'",
        ),
        (lambda folder: pickled(folder / DATA), "is no plain array"),
        (lacking, "the data lack next/truncated"),
    ],
)
def test_files_that_are_not_those_of_the_episode_lead_to_a_sentence(
    runs: Path, tmp_path: Path, tamper: Callable[[Path], None], told: str
) -> None:
    tamper(shutil.copytree(runs / "lean", tmp_path / "runs" / "lean"))
    view(tmp_path / "runs", tmp_path / "out", episodes="0")
    (page,) = (tmp_path / "out" / "pages" / "lean" / "episodes").iterdir()
    text = html.unescape(page.read_text())
    assert f"{told}" in text.partition("<h2>Data</h2>")[2]
    assert "of this episode cannot be shown: " in text
    assert str(tmp_path) not in text
    assert "<video" not in text


def test_data_of_another_replay_are_not_shown(runs: Path, tmp_path: Path) -> None:
    """What lies beside a film must have the digest of the record, as no file lists it."""
    run = shutil.copytree(runs / "bare", tmp_path / "run")
    for source, shown in [("random", True), ("lean", False)]:
        shutil.rmtree(run / "films", ignore_errors=True)
        data = tdcollect.EvaluationResult.load(runs / source).trajectory(0)
        write_trajectory(run / "films" / "000000.npz", data.clone())
        found = played(run)
        assert bool(found.data) == shown == (not found.problems)


HOSTILE = [
    np.full((6, 2), np.nan),
    np.array([[1e308, -1e308]] * 6),
    np.full((6, 3), np.inf, np.float32),
    np.array(["<script>alert(1)</script>"] * 6),
    np.full((6, 2), 2**64 - 1, np.uint64),
    np.zeros((6, 0)),
    np.zeros((6, 10**6), np.uint8),
    np.full(6, 1j),
    np.zeros((6, 16), bool),
]


@pytest.mark.parametrize("values", HOSTILE, ids=lambda values: f"{values.dtype}{values.shape}")
def test_any_data_are_shown_or_named_and_never_run(values: np.ndarray[Any, Any]) -> None:
    """In each part of a page, for one policy and for two, under a hostile name."""
    (record,) = ledger([1.0])
    data = {EVIL: values, "action": values, "next/reward": values, f"next/{EVIL}": values}
    data |= {f"{EVIL}/{n}": values for n in range(60 if values.dtype == bool else 2)}
    names = {"observation": [EVIL], "action": ["action"], "reward": None}
    one = Played(EVIL, replace(record, length=6), AGAIN, names, data, problems=[EVIL])
    for runs in ([one], [one, one._replace(name="other")]):
        text = episode_page(runs, EVIL).html().decode()
        body = text.partition("</head>")[2].rpartition("<script>")[0]
        assert "<script" not in body
        assert "<img" not in body
        assert text.count("<figure>") <= 40
        assert len(text) < 2_000_000


def test_names_of_the_manifest_may_be_those_of_no_data(runs: Path) -> None:
    result = tdcollect.EvaluationResult.load(runs / "lean")
    manifest = {**result.manifest, "entries": {"observation": ["gone"], "action": []}}
    found = read_played("lean", runs / "lean", result.record(0), manifest, AGAIN)
    assert not found.data
    assert "the data lack gone, next/gone" in found.problems[0]
