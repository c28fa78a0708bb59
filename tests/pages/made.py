"""Pages of each kind, from hand-written ledgers with hostile texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from tdcollect import compare
from tdcollect.evaluation import summarize
from tdcollect.evaluation.curve import Best, Point, curve_page
from tdcollect.lab.curves import CURVES_REPORT, curves_page, together
from tdcollect.lab.definition import Policy, Score, Task
from tdcollect.lab.pages.episode import Played, episode_page
from tdcollect.lab.pages.suite import suite_page
from tdcollect.pages.build import Commands, write_page
from tdcollect.pages.evaluation import write_comparison_report, write_report

from ..evaluation.ledgers import ENV, ledger, manifest, run
from ..lab.made import results

EVIL = (
    "</svg></style></textarea><script>document.title='run'</script>"
    "<img src=https://evil.test/x.png onerror=\"document.title='run'\">"
    "<style>@import 'https://evil.test/y.css'</style>"
    '"\' onmouseover="document.title=1" $1 {} ]]> &lt; \u202e'
)
AGAIN = Commands("tdcollect replay . ", f" --env {EVIL}", EVIL)
EPISODES = 40
RETURNS = np.random.default_rng(0).normal(300, 80, EPISODES).round(1)


def make_pages(folder: Path) -> dict[str, Path]:
    """Write the pages; return them by kind."""
    return {
        "evaluation": _evaluation(folder / "evaluation"),
        "comparison": _comparison(folder / "comparison"),
        "curve": _curve(folder / "curve"),
        "curves": _curves(folder / "curves"),
        "suite": _suite(folder / "suite"),
        "episode": _episode(folder / "episode"),
    }


def _evaluation(folder: Path) -> Path:
    records = ledger(RETURNS, failed=[7], success={i: i % 3 == 0 for i in range(EPISODES)})
    records[3] = replace(records[3], restarts=1, terminated=False, truncated=True)
    records[5] = replace(records[5], status=EVIL, restarts=2)
    records[9] = replace(records[9], digest=records[8].digest, length=1000)
    (folder / "trajectories" / "000003").mkdir(parents=True)
    described = manifest(policy=f"lab.{EVIL}", env=ENV | {"id": f"Walk {EVIL}"})
    described[EVIL] = {EVIL: [EVIL, "https://evil.test/"]}
    request = {
        "env": "CartPole-v1",
        "policy": f"{EVIL}.py:f",
        "env_kwargs": {EVIL: EVIL},
    }
    (folder / "run.json").write_text(json.dumps([{"request": request}]))
    return write_report(folder, described, records, summarize(records, resamples=99))[-1]


def _comparison(folder: Path) -> Path:
    said = [{i: i % of == 0 for i in range(EPISODES)} for of in (2, 3)]
    runs = [
        run(RETURNS, success=said[0]),
        run(RETURNS + np.arange(EPISODES), success=said[1]),
        run(RETURNS[::-1], failed=[2]),
    ]
    found = compare(*runs, names=["random", EVIL, "long " * 30], resamples=99)
    return write_comparison_report(folder, found)[-1]


def _curve(folder: Path) -> Path:
    curve = [
        Point(1000 * step, 20, step == 3, 10.0 * step, 9.0 * step, 12.0 * step, 3.0, None, 7.0,
              "ab" * 32)
        for step in range(1, 13)
    ]  # fmt: skip
    curve[4] = curve[4]._replace(mean=None, low=None, high=None, std=None)
    best = Best(12000, 120.0, None)
    page = curve_page(curve, best, EVIL, "mean", lambda step: f"step {step}/{EVIL}.html")
    folder.mkdir()
    (folder / "curve.html").write_bytes(page.html())
    return folder / "curve.html"


def _curves(folder: Path) -> Path:
    means = {name: {step: step * (2.0 + at) for step in range(9)}
             for at, name in enumerate([EVIL, "long " * 30, "b"])}  # fmt: skip
    found = together(means, env=EVIL, episodes=20, on=EVIL, threshold=17.0, resamples=99)
    return write_page(folder / CURVES_REPORT, curves_page(found))[-1]


def _film(file: Path) -> bytes:
    """Return a film of 20 pictures, or none where there is no ffmpeg to write it."""
    try:
        from imageio_ffmpeg import write_frames
    except ModuleNotFoundError:
        return b"\0\0\0\x08ftyp"
    writer = write_frames(str(file), (64, 48), fps=10, macro_block_size=2)
    writer.send(None)
    for picture in np.random.default_rng(0).integers(0, 256, (20, 48, 64, 3), np.uint8):
        writer.send(picture)
    writer.close()
    return file.read_bytes()


def _episode(folder: Path) -> Path:
    folder.mkdir()
    (record, other) = (replace(ledger(RETURNS)[length], length=length) for length in (30, 12))
    film = _film(folder / "film.mp4")
    names = {"observation": [EVIL], "action": ["action"], "reward": ["reward"]}
    played = []
    for one, name in ((record, EVIL), (replace(other, index=30), "long " * 30)):
        steps = np.arange(one.length or 0, dtype=np.float64)
        rows = np.sin(steps[:, None] * np.arange(1, 9))
        data = {EVIL: rows, f"next/{EVIL}": rows, "action": steps[:, None], "next/reward": steps}
        data |= {f"value {EVIL}": steps * 1e200, f"image {EVIL}": np.zeros((len(steps), 9, 9))}
        played.append(Played(name, one, AGAIN, names, data, film, [f"{EVIL} is not shown"]))
    page = episode_page(played, EVIL, [("The evaluation", f"../{EVIL}.html")])
    (folder / "episode.html").write_bytes(page.html())
    return folder / "episode.html"


def _suite(folder: Path) -> Path:
    source = Score(0.0, 100.0, EVIL)
    tasks = [Task(f"task{n}", EVIL, group=EVIL, score=source) for n in range(4)]
    tasks += [Task("unscored", "env", presets={EVIL: 1})]
    policies = [Policy("random", "random"), Policy("ppo", "m:ppo", runs=("0", "1", "2"))]
    policies += [Policy("other-with-a-long-name-" * 3, "m:o", runs=("0", "1"))]
    found = results(tasks, policies, missing=[25], failed={27: EVIL}, remarks=[EVIL])
    folder.mkdir()
    (folder / "report.html").write_bytes(suite_page(found).html())
    return folder / "report.html"
