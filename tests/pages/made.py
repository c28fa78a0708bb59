"""Pages of each kind, from hand-written ledgers with hostile texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tdcollect import compare
from tdcollect.evaluation import Request, summarize
from tdcollect.evaluation.curve import Best, Point
from tdcollect.pages.curve import curve_page, write_curves_page
from tdcollect.pages.evaluation import write_comparison_report, write_report
from tdcollect.pages.suite import suite_page
from tdcollect.suites.curves import together
from tdcollect.suites.tables import Policy, Score, Task

from ..evaluation.ledgers import ENV, ledger, manifest, run
from ..suites.made import results

EVIL = (
    "</svg></style></textarea><script>document.title='run'</script>"
    "<img src=https://evil.test/x.png onerror=\"document.title='run'\">"
    "<style>@import 'https://evil.test/y.css'</style>"
    '"\' onmouseover="document.title=1" $1 {} ]]> &lt; \u202e'
)
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
    }


def _evaluation(folder: Path) -> Path:
    records = ledger(RETURNS, failed=[7], success={i: i % 3 == 0 for i in range(EPISODES)})
    records[3] = replace(records[3], restarts=1, terminated=False, truncated=True)
    records[5] = replace(records[5], status=EVIL, restarts=2)
    records[9] = replace(records[9], digest=records[8].digest, length=1000)
    (folder / "trajectories" / "000003").mkdir(parents=True)
    described = manifest(policy=f"lab.{EVIL}", env=ENV | {"id": f"Walk {EVIL}"})
    described[EVIL] = {EVIL: [EVIL, "https://evil.test/"]}
    request = Request("CartPole-v1", f"{EVIL}.py:f", env_kwargs={EVIL: EVIL}, directory=str(folder))
    return write_report(folder, described, records, summarize(records, resamples=99), request)[-1]


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
    page = curve_page(
        curve,
        Best(12000, 120.0, None),
        EVIL,
        "mean",
        lambda step, kind="step": f"{kind} {step}/{EVIL}.html",
        curve[-1],
    )
    folder.mkdir()
    (folder / "curve.html").write_bytes(page.html())
    return folder / "curve.html"


def _curves(folder: Path) -> Path:
    means = {name: {step: step * (2.0 + at) for step in range(9)}
             for at, name in enumerate([EVIL, "long " * 30, "b"])}  # fmt: skip
    found = together(means, env=EVIL, episodes=20, on=EVIL, threshold=17.0, resamples=99)
    return write_curves_page(folder, found)[-1]


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
