"""The pages of all evaluations, learning curves and suites below a folder, with an index.

The files may come from somebody else: they are read as data, and every page is made anew. Pages
that are found there are neither copied nor linked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tdcollect.display import count_text
from tdcollect.evaluation.beside.curve_page import curve_page
from tdcollect.evaluation.beside.folder import CURVE, read_folder, step_name
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
    read_shard,
)
from tdcollect.evaluation.reports.comparison_page import COMPARISON_REPORT
from tdcollect.evaluation.reports.report import REPORT, Again, calls_of, commands_of, report_page
from tdcollect.evaluation.reports.statistics import summarize
from tdcollect.evaluation.request import Request
from tdcollect.files import replaced, write_atomically
from tdcollect.pages.html import link
from tdcollect.suites.folder import is_suite
from tdcollect.suites.page import suite_page
from tdcollect.suites.reported import results_of
from tdcollect.suites.results import FINISHED as CELL_FINISHED
from tdcollect.view_index import COMPARISON, FINISHED, LEFT_OUT, Viewed, index_page

INDEX = "index.html"
PAGES = "pages"
_MARK = b'<meta name="generator" content="tdcollect">'
Where = str | os.PathLike[str]
_STEP = re.compile("step-[0-9]{9,}")


def view(directory: Where, output_dir: Where, overwrite: bool = False) -> tuple[Path, list[Viewed]]:
    """Write the pages of all evaluations, curves and suites below a folder, and an index of them.

    Nothing that the folder names is run, and nothing in it tells who wrote it: the pages are a new
    folder, which takes the place of an earlier one as a whole. The same files give the same pages.

    Args:
        directory: the folder; links to folders in it are not followed.
        output_dir: a folder for the pages: new, empty, or one that this function wrote.
        overwrite: replace pages that lie in ``directory`` too, where somebody else may have put
            them, and whatever is beside them.

    Returns:
        The index, and what was found, by path.

    Raises:
        FileNotFoundError: if there is no such folder, or if it holds no evaluation.
        ValueError: if ``output_dir`` is a link or holds something else, or lies in ``directory``
            and is there already.
    """
    root, out = Path(directory), Path(os.path.abspath(output_dir))
    if not root.is_dir():
        raise FileNotFoundError(f"expected a folder with evaluations, got {root}")
    _check(root, out, overwrite)
    with replaced(out) as new:
        found = [*_found(root, out, new)]
        if all(one.kind == COMPARISON for one in found):
            raise FileNotFoundError(
                f"expected evaluations below {root}, as tdcollect.evaluate writes them with an "
                "output_dir, found none"
            )
        write_atomically(new / INDEX, index_page(root.resolve().name or "/", found))
    return Path(output_dir, INDEX), found


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


def _found(root: Path, out: Path, new: Path) -> Iterator[Viewed]:
    """Write all pages; yield what they are of, without the parts of curves and suites."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and not (here / name).is_symlink()
            and (here / name).resolve() != out.resolve()
        )
        if COMPARISON_REPORT in files:
            yield Viewed(_relative(here, root), COMPARISON, LEFT_OUT)
        if MANIFEST in files:
            folders.clear()
            try:
                read_manifest(here)
            except FileNotFoundError:
                continue
            except ValueError as error:
                if "is something else's" in str(error):
                    continue
            yield _evaluation(root, here, new)
        elif is_suite(here):
            folders.clear()
            yield _suite(root, here, new)
        elif (here / CURVE).is_file():  # a pipe has no end
            steps = [name for name in folders if _STEP.fullmatch(name)]
            folders[:] = [name for name in folders if name not in steps]
            yield _curve(root, here, new, steps)


def _evaluation(root: Path, here: Path, new: Path, back: str = "") -> Viewed:
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
        return Viewed(path, "evaluation", f"{status}: {_within(root, error)}")
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
    write_atomically(new / page_path, html)
    return Viewed(path, "evaluation", FINISHED, page_path, env, policy, summary)


def _curve(root: Path, here: Path, new: Path, steps: Sequence[str]) -> Viewed:
    """Write the page of a curve, and those of its steps."""
    path = _relative(here, root)
    try:
        curve, best, by = read_folder(here)
    except (ValueError, OSError) as error:
        return Viewed(path, "curve", f"unreadable: {_within(root, error)}")
    page_path = f"{PAGES}/{path}/{CURVE_PAGE}"
    pages, known = {}, ("-", "-")
    for name in steps:
        back = _back(f"{PAGES}/{path}/{name}/{REPORT}", page_path, "The learning curve")
        one = _evaluation(root, here / name, new, back)
        known = (one.env, one.policy) if known[0] == "-" else known
        if one.page is not None:
            pages[name] = f"{name}/{REPORT}"
    back = _back(page_path, INDEX, "All evaluations")
    html, _ = curve_page(curve, best, known[0], by, lambda step: pages.get(step_name(step)), back)
    write_atomically(new / page_path, html)
    return Viewed(path, "curve", FINISHED, page_path, *known, curve=curve, best=best)


def _suite(root: Path, here: Path, new: Path) -> Viewed:
    """Write the page of a suite, and those of its finished evaluations."""
    path = _relative(here, root)
    try:
        results = results_of(here)
    except (ValueError, OSError) as error:
        return Viewed(path, "suite", f"unreadable: {_within(root, error)}")
    page_path = f"{PAGES}/{path}/{REPORT}"
    done = [cell for cell in results.cells if cell.status == CELL_FINISHED]
    for cell in done:
        back = _back(f"{PAGES}/{path}/{cell.path}/{REPORT}", page_path, "The suite")
        _evaluation(root, here / cell.path, new, back)
    html = suite_page(results, _back(page_path, INDEX, "All evaluations"))
    write_atomically(new / page_path, html)
    whole = len(done) == len(results.cells)
    status = FINISHED if whole else f"unfinished, {len(done)} of {len(results.cells)} evaluations"
    return Viewed(path, "suite", status, page_path, suite=results)


def _within(root: Path, error: Exception) -> str:
    """Return an error with the paths in it relative to the folder."""
    return str(error).replace(f"{root}{os.sep}", "")


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
