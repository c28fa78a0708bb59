"""The pages of all evaluations, curves, races and suites below a folder, with an index.

The files may come from somebody else: they are read as data, and every page is made anew. Pages
that are found there are neither copied nor linked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tdcollect.display import count_text
from tdcollect.evaluation import curve as learning
from tdcollect.evaluation import ledger
from tdcollect.evaluation.comparison import compare
from tdcollect.evaluation.curve import Best, Point, curve_page
from tdcollect.evaluation.statistics import MOST_RESAMPLES, Summary, ends, summarize
from tdcollect.files import replaced, write_atomically
from tdcollect.lab.pages.episode import (
    EPISODES,
    episode_page,
    filmed,
    neighbours,
    read_played,
    with_data,
)
from tdcollect.lab.pages.suite import suite_page
from tdcollect.lab.race import RaceResult, path_of, race_page
from tdcollect.lab.results import FINISHED, SuiteResults, is_suite, results_of
from tdcollect.pages import build, evaluation
from tdcollect.pages.build import REPORT, Cell, Column, DataTable, Page, Part
from tdcollect.pages.evaluation import (
    COMPARED,
    COMPARISON_REPORT,
    again_of,
    comparison_page,
    named_in,
    report_page,
)

INDEX = "index.html"
PAGES = "pages"
COMPARISON = "comparison"
WHERE = "the folder that was viewed"
SHOWN = "worst:5"  # of each evaluation, with pages of their own
LEFT_OUT = "left out, as what it compares is not below this folder"
T = TypeVar("T")
Where = str | os.PathLike[str]
_FOREIGN = ("is something else's", f"which has no {ledger.MANIFEST}")  # of no evaluation
_MARK = b'<meta name="generator" content="tdcollect">'
_KINDS = {
    name.split()[-1]: name for name in ("suite", "race", "evaluation", "learning curve", COMPARISON)
}
_FILMED = 100  # episodes of an evaluation that have a page as they have a film


@dataclass(frozen=True)
class Viewed:
    """An evaluation, a learning curve, a race, a suite or a comparison that was found.

    Its path is relative to the folder that was viewed, its page to the index. The status tells why
    one has no page, such as ``"unfinished, 3 of 10 episodes"``.
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
    suite: SuiteResults | None = None
    race: RaceResult | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what was found as plain dicts, lists, strings and numbers, for JSON."""
        names = ("path", "kind", "status", "page", "env", "policy")
        fields = {name: getattr(self, name) for name in names}
        if self.kind == "curve":
            fields["points"] = len(self.curve)
            fields["best"] = None if self.best is None else [self.best.step, self.best.value]
        for name in ("summary", "suite", "race"):
            if (result := getattr(self, name)) is not None:
                fields[name] = result.to_dict()
        return fields


def view(
    directory: Where, output_dir: Where, overwrite: bool = False, episodes: str = SHOWN
) -> tuple[Path, list[Viewed]]:
    """Write the pages of all evaluations, curves, races and suites below a folder, and an index.

    Nothing that the folder names is run, and links to folders in it are not followed. The same
    files give the same pages.

    Args:
        directory: the folder.
        output_dir: a folder for the pages: new, empty, or one that this function wrote. It is
            replaced as a whole.
        overwrite: replace pages that lie in ``directory`` too, where somebody else may have put
            them, and whatever is beside them.
        episodes: the episodes of each evaluation that have a page, if their data are there:
            ``"worst:5"``, ``"failed"``, or indices, ``"1,5"``; those with a film have one too.

    Returns:
        The index, and what was found, by path.
    """
    root, out = Path(directory), Path(os.path.abspath(output_dir))
    if not root.is_dir():
        raise FileNotFoundError(f"expected a folder with evaluations, got {root}")
    ledger.indices_of(episodes)
    _check(root, out, overwrite)
    with replaced(out) as new:
        viewed = [*_Pages(root, out, new, episodes).found()]
        if all(one.kind == COMPARISON for one in viewed):
            raise FileNotFoundError(
                f"expected evaluations below {root}, as tdcollect.evaluate writes them with an "
                "output_dir, found none"
            )
        write_atomically(new / INDEX, index_page(root.resolve().name or "/", viewed).html())
    return Path(output_dir, INDEX), viewed


def _check(root: Path, out: Path, overwrite: bool) -> None:
    """Refuse a folder that is not to be replaced, and one that a link leads to."""
    viewed, real, index = root.resolve(), out.resolve(), out / INDEX
    inside, typed = real.is_relative_to(viewed), out.is_relative_to(os.path.abspath(root))
    there = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    marked = not there or (index.is_file() and _MARK in index.read_bytes()[:2000])
    own = overwrite or not there or (there <= {INDEX, PAGES} and not inside)
    for right, why in [
        (not out.is_symlink() and inside >= typed, "is a link, or lies behind one;"),
        (out.is_dir() or not out.exists(), "is a file;"),
        (not viewed.is_relative_to(real), "holds the folder to view;"),
        (marked, "holds something else;"),
        (own, "lies in the folder to view, or holds more: replace all of it (--overwrite), or"),
    ]:
        if not right:
            raise ValueError(
                "expected output_dir to be empty, or to hold pages of `tdcollect view`, got "
                f"{out}, which {why} choose another"
            )


class _Pages:
    """Writes the pages of what lies below ``root``, but not in ``out``, to ``new``."""

    def __init__(self, root: Path, out: Path, new: Path, episodes: str):
        self.root, self.out, self.new, self.which = root, out, new, episodes
        self.finished: dict[str, Path] = {}  # evaluations by the digests of their ledgers

    def found(self) -> Iterator[Viewed]:
        """Write all pages; yield what they are of, without parts of curves, races and suites.

        Comparisons come last: they are made again from evaluations.
        """
        out, comparisons = self.out.resolve(), []
        for folder, folders, files in os.walk(self.root):
            here = Path(folder)
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".")
                and not (here / name).is_symlink()
                and (here / name).resolve() != out
            )
            if COMPARISON_REPORT in files:
                comparisons.append(here)
            if ledger.MANIFEST in files:
                folders.clear()
                one = self.evaluation(here)
                if not any(text in one.status for text in _FOREIGN):
                    yield one
            elif is_suite(here):
                folders.clear()
                yield self.suite(here)
            elif (here / ledger.RACE).is_file():
                folders.clear()
                yield self.race(here)
            elif (here / learning.CURVE).is_file():  # a pipe has no end
                parts = {*map(learning.step_name, learning.steps_of(here))}.intersection(folders)
                folders[:] = [name for name in folders if name not in parts]
                yield self.curve(here, sorted(parts))
        yield from map(self.comparison, comparisons)

    def comparison(self, here: Path) -> Viewed:
        """Compare again what was compared, if all of it was viewed, and write the page."""
        path = self._path(here)
        try:
            known = ledger.read_json(here / COMPARED, dict, "")
            runs = [ledger.read_directory(self.finished[one]) for one in known["ledgers"]]
            resamples = min(known["resamples"], MOST_RESAMPLES)
            settings = {name: known[name] for name in ("across_envs", "confidence", "seed")}
            names = [*map(str, known["names"])]
            comparison = compare(*runs, names=names, resamples=resamples, **settings)
        except (ValueError, TypeError, KeyError, OSError):
            return Viewed(path, COMPARISON, LEFT_OUT)
        page_path = f"{PAGES}/{path}/{COMPARISON_REPORT}"
        self._write(page_path, comparison_page(comparison, {}, _back(page_path)))
        baseline, *others = comparison.names
        policies = f"{', '.join(others)} minus {baseline}"
        return Viewed(path, COMPARISON, FINISHED, page_path, comparison.env, policies)

    def evaluation(self, here: Path, target: str = INDEX, text: str = "All evaluations") -> Viewed:
        """Write the page of an evaluation, if it is finished, with a link to another page."""
        path = self._path(here)
        try:
            files = ledger.read_directory(here)
            _, manifest, episodes, shard, last = files
            env, named = str(ledger.manifest_entry(manifest, "env.id")), named_in(here)
            policy = str(named.get("policy", ledger.policy_name(manifest)))  # as it was typed
            count = len(ledger.asked_indices(manifest))
            status = "" if shard is None else f"{shard}, not merged"
            if not status and (len(episodes) < count or last is None):
                status = f"unfinished, {len(episodes)} of {count_text(count, 'episode')}"
            if status:
                return Viewed(path, "evaluation", status, env=env, policy=policy)
        except (ValueError, OSError) as error:
            status = "refused" if (here / ledger.REFUSED).exists() else "unreadable"
            return Viewed(path, "evaluation", f"{status}: {self._within(error)}")
        self.finished[ledger.ledger_digest(episodes)] = here
        summary = summarize(episodes)
        cells = dict.fromkeys(ledger.kept_trajectories(here), Cell("kept"))
        again = again_of(manifest, here, self.root, WHERE)
        page_path = f"{PAGES}/{path}/{REPORT}"
        back = _back(page_path, target, text)
        cells |= self._episodes(files, policy, again, page_path)
        self._write(page_path, report_page(manifest, episodes, summary, again, cells, back))
        return Viewed(path, "evaluation", FINISHED, page_path, env, policy, summary)

    def _episodes(
        self, files: ledger.Files, policy: str, again: build.Commands, report: str
    ) -> dict[int, Cell]:
        """Write the pages of episodes with data or a film; return cells that lead to them."""
        films, there = filmed(files.root), filmed(files.root) | with_data(files.root)
        records = {record.index: record for record in files.episodes if record.index in there}
        env = str(ledger.manifest_entry(files.manifest, "env.id"))
        chosen = {*ledger.indices_of(self.which, [*records.values()]), *sorted(films)[:_FILMED]}
        cells, indices = {}, sorted(chosen & records.keys())
        for index in indices:
            name = f"{EPISODES}/{ledger.episode_name(index)}.html"
            cells[index] = Cell("page", name)
            page_path = f"{os.path.dirname(report)}/{name}"
            links = [*_back(page_path, report, "The evaluation"), *neighbours(indices, index)]
            played = read_played(policy, files.root, records[index], files.manifest, again)
            self._write(page_path, episode_page([played], env, links))
        return cells

    def curve(self, here: Path, parts: Sequence[str]) -> Viewed:
        """Write the page of a curve, and those of its evaluations."""
        path = self._path(here)
        try:
            curve, best, by = learning.read_folder(here)
        except (ValueError, OSError) as error:
            return Viewed(path, "curve", f"unreadable: {self._within(error)}")
        page_path = f"{PAGES}/{path}/{learning.PAGE}"
        viewed = {n: self.evaluation(here / n, page_path, "The learning curve") for n in parts}
        known = next(((o.env, o.policy) for o in viewed.values() if o.env != "-"), ("-", "-"))
        pages = {name: f"{name}/{REPORT}" for name, one in viewed.items() if one.page is not None}
        page_of, back = lambda step: pages.get(learning.step_name(step)), _back(page_path)
        page = curve_page(curve, best, known[0], by, page_of, back)
        self._write(page_path, page)
        return Viewed(path, "curve", FINISHED, page_path, *known, curve=curve, best=best)

    def suite(self, here: Path) -> Viewed:
        """Write the page of a suite, and those of its finished evaluations."""
        path = self._path(here)
        try:
            results = results_of(here)
        except (ValueError, OSError) as error:
            return Viewed(path, "suite", f"unreadable: {self._within(error)}")
        page_path = f"{PAGES}/{path}/{REPORT}"
        done = [cell for cell in results.cells if cell.status == FINISHED]
        for cell in done:
            self.evaluation(here / cell.path, page_path, "The suite")
        self._write(page_path, suite_page(results, _back(page_path)))
        left = f"unfinished, {len(done)} of {len(results.cells)} evaluations"
        status = FINISHED if len(done) == len(results.cells) else left
        return Viewed(path, "suite", status, page_path, suite=results)

    def race(self, here: Path) -> Viewed:
        """Write the page of a race that has ended, and those of its evaluations."""
        path = self._path(here)
        try:
            result = RaceResult.load(here)
        except (ValueError, OSError) as error:
            return Viewed(path, "race", f"unfinished or unreadable: {self._within(error)}")
        page_path = f"{PAGES}/{path}/{REPORT}"
        for name in result.results:
            self.evaluation(path_of(here, name), page_path, "The race")
        self._write(page_path, race_page(result, _back(page_path)))
        return Viewed(path, "race", FINISHED, page_path, result.env, race=result)

    def _write(self, page_path: str, page: Page) -> None:
        write_atomically(self.new / page_path, page.html())

    def _path(self, here: Path) -> str:
        return here.relative_to(self.root).as_posix()

    def _within(self, error: Exception) -> str:
        """Return an error with the paths in it relative to the folder."""
        return str(error).replace(f"{self.root}{os.sep}", "")


def _back(
    page_path: str, target: str = INDEX, text: str = "All evaluations"
) -> list[tuple[str, str]]:
    return [(text, os.path.relpath(target, os.path.dirname(page_path)))]


def index_page(name: str, viewed: Sequence[Viewed]) -> Page:
    """Return the index of what was found in a folder of a name."""
    groups = {kind: [one for one in viewed if one.kind == kind] for kind in _KINDS}
    suites, races, evaluations, curves, comparisons = groups.values()
    sections: list[tuple[str, Sequence[Part]]] = [
        ("Suites", [_suites(suites)] if suites else []),
        ("Races", [_races(races)] if races else []),
        ("Evaluations", [_evaluations(evaluations)] if evaluations else []),
        ("Learning curves", [_curves(curves)] if curves else []),
        ("Comparisons", [_comparisons(comparisons)] if comparisons else []),
    ]
    lead = [count_text(len(some), _KINDS[kind]) for kind, some in groups.items() if some]
    without = sum(one.page is None for one in viewed)
    lead += [f"{without} without a page"] if without else []
    return Page(name, " · ".join(lead), "Evaluations", sections)


def _evaluations(evaluations: Sequence[Viewed]) -> DataTable:
    known = [one.summary for one in evaluations]
    lost = " or lost" if any(s and s.lost for s in known) else ""
    columns = [
        Column("env", [one.env for one in evaluations]),
        Column("policy", [one.policy for one in evaluations]),
        Column("episodes", _each(known, lambda s: str(s.episodes)), "n"),
        Column("mean return", _each(known, lambda s: s.returns.mean), "n"),
        Column("95% interval", _each(known, lambda s: ends(s.returns.mean_interval)), "n"),
        Column("length", _each(known, lambda s: s.lengths.mean), "n"),
        Column(f"failed{lost}", _each(known, lambda s: str(s.failed + s.lost)), "n"),
    ]
    rates = [s.success.rate if s and s.success else None for s in known]
    if any(rate is not None for rate in rates):
        columns.insert(5, Column("success", evaluation.percents(rates), "n"))
    return _listing("evaluation", evaluations, columns, "words, or mean>100")


def _suites(suites: Sequence[Viewed]) -> DataTable:
    known = [one.suite for one in suites]
    boards = [s.aggregates if s is not None else None for s in known]
    columns = [
        Column("name", _each(known, lambda s: f"{s.name} {s.version}")),
        Column("policies", _each(known, lambda s: str(len(s.policies))), "n"),
        Column("tasks", _each(known, lambda s: str(len(s.tasks))), "n"),
        Column("evaluations", _each(known, lambda s: str(len(s.cells))), "n"),
        Column("best policy", _each(boards, lambda board: board.ranking()[0][1])),
    ]
    return _listing("suite", suites, columns)


def _races(races: Sequence[Viewed]) -> DataTable:
    known = [one.race for one in races]
    columns = [
        Column("env", [one.env for one in races]),
        Column("policies", _each(known, lambda r: ", ".join(r.results))),
        Column("episodes in all", _each(known, lambda r: str(r.episodes)), "n"),
        Column("best", _each(known, lambda r: r.winner or "-")),
    ]
    return _listing("race", races, columns)


def _curves(curves: Sequence[Viewed]) -> DataTable:
    best = [one.best for one in curves]
    columns = [
        Column("env", [one.env for one in curves]),
        Column("policy", [one.policy for one in curves]),
        Column("evaluations", [str(len(one.curve)) for one in curves], "n"),
        Column("best", _each(best, lambda one: one.value), "n"),
        Column("at step", _each(best, lambda one: f"{one.step:,}"), "n"),
        Column("last mean return", [o.curve[-1].mean if o.curve else None for o in curves], "n"),
    ]
    return _listing("learning curve", curves, columns)


def _comparisons(comparisons: Sequence[Viewed]) -> DataTable:
    columns = [
        Column("env", [one.env for one in comparisons]),
        Column("policies", [one.policy for one in comparisons], "t"),
    ]
    return _listing("comparison", comparisons, columns)


def _each(things: Sequence[T | None], value: Callable[[T], Any]) -> list[Any]:
    return [None if thing is None else value(thing) for thing in things]


def _listing(
    kind: str, viewed: Sequence[Viewed], columns: Sequence[Column], hint: str = "words"
) -> DataTable:
    links = [Cell(one.path, one.page) for one in viewed]
    statuses = [Cell(one.status, kind="" if one.status == FINISHED else "bad") for one in viewed]
    kind_of = "" if all(one.status == FINISHED for one in viewed) else "t"
    columns = [Column(kind, links), *columns, Column("status", statuses, kind_of)]
    return DataTable(columns, hint=hint, name=f"{kind.capitalize()}s")
