"""The pages of all evaluations and learning curves below a folder, with an index.

The files may come from somebody else: they are read as data, and every page is made anew. Pages
that are found there are neither copied nor linked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdcollect.display import count_text, number_text, percent_text
from tdcollect.evaluation.beside.curve import BEST_BY, Best, Point, read_csv, value_of
from tdcollect.evaluation.beside.curve_page import curve_page, step_text
from tdcollect.evaluation.beside.folder import BEST, CURVE, step_name
from tdcollect.evaluation.beside.folder import PAGE as CURVE_PAGE
from tdcollect.evaluation.ledger.manifest import manifest_entry
from tdcollect.evaluation.ledger.reading import (
    MANIFEST,
    REFUSED,
    is_finished,
    kept_trajectories,
    number_of_episodes,
    read_directory,
    read_manifest,
    read_object,
    read_shard,
)
from tdcollect.evaluation.reports.report import REPORT, Again, calls_of, commands_of, report_page
from tdcollect.evaluation.reports.sentences import ends, within
from tdcollect.evaluation.reports.statistics import Summary, summarize
from tdcollect.evaluation.request import Request
from tdcollect.files import write_atomically
from tdcollect.pages.html import Figure, figures, link, page, section
from tdcollect.pages.plots import Estimate, intervals
from tdcollect.pages.tables import Cell, Column, table

INDEX = "index.html"
PAGES = "pages"
FINISHED = "finished"
_MARK = b'<meta name="generator" content="tdcollect">'
_STEP = re.compile("step-[0-9]{9,}")
_FIGURES, _ROWS = 6, 20  # of the index: figures, and rows of each


@dataclass(frozen=True)
class Viewed:
    """An evaluation or a learning curve that was found.

    Attributes:
        path: its folder, relative to the one that was viewed.
        kind: ``"evaluation"`` or ``"curve"``.
        status: ``"finished"``; or what it is instead, such as ``"unfinished, 3 of 10 episodes"``.
        page: its page, relative to the index; None unless it is finished.
        env: the env's name.
        policy: the policy's name.
        summary: the statistics of an evaluation.
        curve: the points of a curve.
        best: the best of them.
    """

    path: str
    kind: str
    status: str
    page: str | None = None
    env: str = "-"
    policy: str = "-"
    summary: Summary | None = None
    curve: Sequence[Point] = ()
    best: Best | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what was found as plain dicts, lists, strings and numbers, for JSON."""
        found = {name: getattr(self, name) for name in ("path", "kind", "status", "page", "env")}
        found["policy"] = self.policy
        if self.summary is not None:
            found["summary"] = self.summary.to_dict()
        if self.kind == "curve":
            found["points"] = len(self.curve)
            found["best"] = None if self.best is None else [self.best.step, self.best.value]
        return found


def view(
    directory: str | os.PathLike[str], output_dir: str | os.PathLike[str]
) -> tuple[Path, list[Viewed]]:
    """Write the pages of all evaluations and curves below a folder, and an index of them.

    Nothing that the folder names is run. The same files give the same pages.

    Args:
        directory: the folder; links in it are not followed.
        output_dir: a folder for the pages: new, empty, or one that this function wrote.

    Returns:
        The index, and what was found, by path.

    Raises:
        FileNotFoundError: if there is no such folder, or if it holds no evaluation.
        ValueError: if ``output_dir`` holds something else.
    """
    root, out = Path(directory), Path(output_dir)
    if not root.is_dir():
        raise FileNotFoundError(f"expected a folder with evaluations, got {root}")
    _check(out)
    found = [*_found(root, out)]
    if not found:
        raise FileNotFoundError(
            f"expected evaluations below {root}, as tdcollect.evaluate writes them with an "
            "output_dir, found none"
        )
    return write_atomically(out / INDEX, _index(root, found)), found


def _check(out: Path) -> None:
    """Refuse a folder whose files are not pages of this module."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"expected output_dir to be a folder, got the file {out}")
    if out.is_dir() and any(out.iterdir()):
        index = out / INDEX
        if not index.is_file() or _MARK not in index.read_bytes()[:2000]:
            raise ValueError(
                f"expected output_dir to be empty, or to hold pages of `tdcollect view`, got "
                f"{out}, which holds something else; choose another"
            )


def _found(root: Path, out: Path) -> Iterator[Viewed]:
    """Write the page of each evaluation and curve; yield them, steps of curves left out."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and (here / name).resolve() != out.resolve()
        )
        if MANIFEST in files:
            folders.clear()
            try:
                read_manifest(here)
            except FileNotFoundError:
                continue
            except ValueError as error:
                if "is something else's" in str(error):
                    continue
            yield _evaluation(root, here, out)
        elif CURVE in files:
            steps = [name for name in folders if _STEP.fullmatch(name)]
            folders[:] = [name for name in folders if name not in steps]
            yield _curve(root, here, out, steps)


def _evaluation(root: Path, here: Path, out: Path, back: str = "") -> Viewed:
    """Write the page of an evaluation, if it is finished."""
    path = _relative(here, root)
    try:
        manifest, episodes = read_directory(here)
        env, policy = _env(manifest), _policy(here, manifest)
        count = number_of_episodes(manifest)
        shard = read_shard(here)
        if shard is not None:
            status = f"{shard.shard}, not merged"
            return Viewed(path, "evaluation", status, env=env, policy=policy)
        if len(episodes) < count or not is_finished(here):
            status = f"unfinished, {len(episodes)} of {count_text(count, 'episode')}"
            return Viewed(path, "evaluation", status, env=env, policy=policy)
    except (ValueError, OSError) as error:
        status = "refused" if (here / REFUSED).exists() else "unreadable"
        return Viewed(path, "evaluation", f"{status}: {error}")
    summary = summarize(episodes)
    page_path = f"{PAGES}/{path}/{REPORT}"
    html, _ = report_page(
        manifest,
        episodes,
        summary,
        _again(root, here, manifest),
        dict.fromkeys(kept_trajectories(here)),
        back or _back(page_path, INDEX, "All evaluations"),
    )
    write_atomically(out / page_path, html)
    return Viewed(path, "evaluation", FINISHED, page_path, env, policy, summary)


def _curve(root: Path, here: Path, out: Path, steps: Sequence[str]) -> Viewed:
    """Write the page of a curve, and those of its steps."""
    path = _relative(here, root)
    try:
        curve = read_csv(here / CURVE)
    except (ValueError, OSError) as error:
        return Viewed(path, "curve", f"unreadable: {error}")
    page_path = f"{PAGES}/{path}/{CURVE_PAGE}"
    pages, known = {}, ("-", "-")
    for name in steps:
        back = _back(f"{PAGES}/{path}/{name}/{REPORT}", page_path, "The learning curve")
        one = _evaluation(root, here / name, out, back)
        known = (one.env, one.policy) if known[0] == "-" else known
        if one.page is not None:
            pages[name] = f"{name}/{REPORT}"
    by = _best_by(here)
    finite = [point for point in curve if value_of(point, by) > float("-inf")]
    best = None
    if finite:
        point = max(finite, key=lambda p: (value_of(p, by), -p.step))
        best = Best(point.step, value_of(point, by), None)
    back = _back(page_path, INDEX, "All evaluations")
    html, _ = curve_page(curve, best, known[0], by, lambda step: pages.get(step_name(step)), back)
    write_atomically(out / page_path, html)
    return Viewed(path, "curve", FINISHED, page_path, *known, curve=curve, best=best)


def _best_by(here: Path) -> str:
    try:
        by = read_object(here / BEST).get("by")
    except (ValueError, OSError):
        by = None
    return by if by in BEST_BY else BEST_BY[0]


def _relative(here: Path, root: Path) -> str:
    return here.relative_to(root).as_posix()


def _back(page_path: str, target: str, text: str) -> str:
    """Return a link from a page to another one."""
    return f"<nav>{link(os.path.relpath(target, os.path.dirname(page_path)), text)}</nav>"


def _env(manifest: Mapping[str, Any]) -> str:
    return str(manifest_entry(manifest, "env.id"))


def _policy(here: Path, manifest: Mapping[str, Any]) -> str:
    """Return the policy's name: the one that was typed, else that of its class."""
    request = _request(here)
    if request is not None:
        return request.policy
    return str(manifest_entry(manifest, "policy.class")).rpartition(".")[2]


def _request(here: Path) -> Request | None:
    try:
        return Request.read(here)
    except (ValueError, OSError):
        return None


def _again(root: Path, here: Path, manifest: Mapping[str, Any]) -> Again:
    request = _request(here)
    where = "the folder that was viewed"
    if request is None:
        return calls_of(manifest, _relative(here, root), where)
    return commands_of(request, here, root, where)


def _index(root: Path, found: Sequence[Viewed]) -> bytes:
    evaluations = [one for one in found if one.kind == "evaluation"]
    curves = [one for one in found if one.kind == "curve"]
    parts = []
    if drawn := _figures(evaluations):
        parts.append(section("Mean returns", figures(drawn)))
    if evaluations:
        parts.append(section("Evaluations", _evaluations(evaluations)))
    if curves:
        parts.append(section("Learning curves", _curves(curves)))
    lead = [
        count_text(len(some), name)
        for some, name in [(evaluations, "evaluation"), (curves, "learning curve")]
        if some
    ]
    unfinished = sum(one.status != FINISHED for one in found)
    lead += [f"{unfinished} without a page"] if unfinished else []
    return page(root.resolve().name or "/", " · ".join(lead), parts, kicker="Evaluations")


def _figures(evaluations: Sequence[Viewed]) -> list[Figure]:
    """Return a figure per env with several evaluations: their mean returns."""
    by_env: dict[str, list[Viewed]] = {}
    for one in evaluations:
        if one.summary is not None and one.summary.returns.mean is not None:
            by_env.setdefault(one.env, []).append(one)
    drawn: list[Figure] = []
    for place, (env, ones) in enumerate(sorted(by_env.items())):
        if len(ones) < 2 or len(drawn) == _FIGURES:
            continue
        ones = sorted(ones, key=_mean, reverse=True)
        shown = ones[:_ROWS]
        rows = [Estimate(_name(one), _mean(one), _interval(one)) for one in shown]
        said = [f"{_name(one)}: {_mean_text(one)}." for one in shown[:5]]
        left = len(ones) - len(shown)
        note = f"The {len(shown)} highest are drawn; {left} more are in the table." if left else ""
        drawn.append(
            Figure(f"env_{place}", env, intervals(rows, "mean return"), " ".join(said), note)
        )
    return drawn


def _name(one: Viewed) -> str:
    return one.path if one.path != "." else one.policy


def _mean(one: Viewed) -> float:
    assert one.summary is not None
    assert one.summary.returns.mean is not None
    return one.summary.returns.mean


def _interval(one: Viewed) -> tuple[float, float] | None:
    return None if one.summary is None else ends(one.summary.returns.mean_interval)


def _mean_text(one: Viewed) -> str:
    assert one.summary is not None
    interval = one.summary.returns.mean_interval
    return number_text(_mean(one)) + within(interval, one.summary.confidence)


def _evaluations(evaluations: Sequence[Viewed]) -> str:
    success = any(one.summary and one.summary.success for one in evaluations)
    columns = [
        Column("evaluation"),
        Column("env"),
        Column("policy"),
        Column("episodes", number=True),
        Column("mean return", number=True),
        Column("95% interval", number=True),
        *([Column("success", number=True)] if success else []),
        Column("length", number=True),
        Column("failed", number=True),
        Column("status", text=True),
    ]
    rows: list[list[str | Cell]] = []
    for one in evaluations:
        row: list[str | Cell] = [Cell(one.path, one.page), one.env, one.policy]
        s = one.summary
        if s is None:
            row += ["-"] * (6 if success else 5) + [Cell(one.status, kind="bad")]
            rows.append(row)
            continue
        row += [str(s.episodes), number_text(s.returns.mean), str(s.returns.mean_interval or "-")]
        if success:
            row.append("-" if s.success is None else percent_text(round(s.success.rate, 3)))
        row += [number_text(s.lengths.mean), str(s.failed), one.status]
        rows.append(row)
    return table(columns, rows, hint="words, or mean>100")


def _curves(curves: Sequence[Viewed]) -> str:
    columns = [
        Column("learning curve"),
        Column("env"),
        Column("policy"),
        Column("evaluations", number=True),
        Column("best", number=True),
        Column("at step", number=True),
        Column("last mean return", number=True),
        Column("status", text=True),
    ]
    rows: list[list[str | Cell]] = []
    for one in curves:
        best = one.best
        rows.append(
            [
                Cell(one.path, one.page),
                one.env,
                one.policy,
                str(len(one.curve)),
                "-" if best is None else number_text(best.value),
                "-" if best is None else step_text(best.step),
                number_text(one.curve[-1].mean) if one.curve else "-",
                one.status if one.status == FINISHED else Cell(one.status, kind="bad"),
            ]
        )
    return table(columns, rows)
