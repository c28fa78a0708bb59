"""Checks of evaluations: of their files, and of episodes that run again by their actions.

Readers stop at the first problem; here all are listed, and the statistics are computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tdcollect import check, registry
from tdcollect.display import count_text, listed_text, one_line, visible
from tdcollect.evaluation import ledger, statistics, step_files
from tdcollect.evaluation.curve import check_curve, steps_of
from tdcollect.evaluation.directory import check_data
from tdcollect.evaluation.ledger import Files, Problem

if TYPE_CHECKING:
    from tdcollect.evaluation.replay import Audit


@dataclass(frozen=True)
class Verification:
    """The checks of a directory; print it to see the problems.

    Attributes:
        directory: the directory of the evaluation, learning curve, race or suite.
        episodes: the number of records that could be read.
        kept: the number of episodes whose data were kept, and checked.
        problems: the problems, in the order of the files.
        shard: ``(i, n)`` if the directory holds shard i of n, and None for a whole evaluation.
    """

    directory: Path
    episodes: int
    kept: int
    problems: tuple[Problem, ...]
    shard: tuple[int, int] | None = None

    @property
    def passed(self) -> bool:
        """True if there is no problem."""
        return not self.problems

    def __str__(self) -> str:
        checked = f"{count_text(self.episodes, 'record')} and the data of {self.kept} checked"
        verdict = "passed"
        if self.problems:
            verdict = f"failed, {count_text(len(self.problems), 'problem')}"
        of = "" if self.shard is None else f"{ledger.Shard(*self.shard)}, "
        lines = [*map(str, self.problems), f"{self.directory}: {of}{checked}: {verdict}"]
        return "\n".join(map(visible, lines))

    def to_dict(self) -> dict[str, Any]:
        """Return the checks as plain dicts, lists, strings and numbers, for JSON."""
        return {
            "directory": str(self.directory),
            "shard": None if self.shard is None else list(self.shard),
            "episodes": self.episodes,
            "kept": self.kept,
            "problems": [{**one._asdict(), "file": str(one.file)} for one in self.problems],
        }

    def __repr__(self) -> str:
        return one_line(self, str(self.directory), count_text(len(self.problems), "problem"))


class Kind(NamedTuple):
    """A kind of directory that holds several evaluations, told by whoever writes it.

    Attributes:
        holds: whether a directory is of this kind.
        evaluations: returns the directories of its evaluations.
        problems: checks what follows from the evaluations, which were checked.
    """

    holds: Callable[[Path], bool]
    evaluations: Callable[[Path], Sequence[Path]]
    problems: Callable[[Path], Iterable[Problem]]


_CURVE = Kind(
    lambda root: bool(steps_of(root)) and not (root / ledger.MANIFEST).exists(),
    lambda root: [*steps_of(root).values()],
    check_curve,
)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check an evaluation, a learning curve, a race or a suite, without running it.

    An evaluation or a shard that is unfinished or was refused has that as a problem. A shard that
    is finished has none: see :func:`tdcollect.merge`. All evaluations of a learning curve, a race
    and a suite are checked, and then the files that follow from them. Pages and figures are not
    checked: what they say is in the other files.

    Args:
        path: the directory.

    Raises:
        FileNotFoundError: if the directory holds none of these.
    """
    root = Path(path)
    kind = kind_of(root)
    return _of_evaluation(root) if kind is None else _of_parts(root, kind)


def audit(
    path: str | os.PathLike[str],
    env: Any = None,
    *,
    sample: int | None = 20,
    seed: int | None = None,
) -> list[Audit]:
    """Run episodes again by the actions that were kept of them, and compare them with the ledger.

    This takes no policy, and runs no code of the directory; ``docs/audit.md`` says what it proves.

    Args:
        path: the directory of an evaluation; or of a race, a suite or a learning curve, each of
            whose evaluations is audited.
        env: as :func:`tdcollect.evaluate` took it, under its transforms or without any; None for
            the env that the manifest names, if it is gymnasium's own.
        sample: the number of episodes to draw of each; of batched simulators, as many whole
            batches as have them. None for all.
        seed: of the draw; None for a new one, which the audit tells.

    Returns:
        The audit of each evaluation.

    Raises:
        ValueError: for an evaluation that is unfinished, altered or has no steps, and for an env
            that must be named. Of several evaluations, the audit of that one says so.
    """
    from tdcollect.evaluation.replay import Audit, audited

    check.positive_int_or_none(sample=sample)
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    check.count(seed=seed)
    root, audits = Path(path), []
    kind = kind_of(root)
    roots = [root] if kind is None else kind.evaluations(root)
    named = [] if env is None else [ledger.read_manifest(one)["env"]["id"] for one in roots]
    if len({*named}) > 1:
        raise ValueError(
            f"expected evaluations of one env, got {', '.join(named)}; name one of them"
        )
    for one in roots:
        try:
            audits.append(audited(one, env, sample, seed))
        except (ValueError, OSError) as error:
            if kind is None:
                raise
            audits.append(Audit(one, (f"not audited: {error}",)))
    return audits


def kind_of(root: Path) -> Kind | None:
    """Return what a directory is that holds several evaluations; None for any other."""
    several = [kind for part in registry.load(registry.KINDS) for kind in part.KINDS]
    return next((kind for kind in (*several, _CURVE) if kind.holds(root)), None)


def _of_parts(root: Path, kind: Kind) -> Verification:
    """Check the evaluations of a directory, and if they are sound all that follows from them."""
    checked: list[Verification] = []
    problems: list[Problem] = []
    try:
        for part in kind.evaluations(root):
            checked.append(_of_evaluation(part))
            problems += checked[-1].problems
        problems += [] if problems else kind.problems(root)
    except (ValueError, OSError) as error:
        problems.append(Problem(root, str(error)))
    episodes, data = (sum(getattr(one, name) for one in checked) for name in ("episodes", "kept"))
    return Verification(root, episodes, data, tuple(problems))


def _of_evaluation(root: Path) -> Verification:
    problems: list[Problem] = []
    try:
        files = ledger.read_directory(root, problems.append)
    except ValueError as error:
        return Verification(root, 0, 0, (Problem(root / ledger.MANIFEST, str(error)),))
    problems += _unfinished(files, bool(problems))
    if not problems and files.shard is None:
        problems += _derived(files)
    data, more = _kept(files)
    more += step_files.problems(files)
    return Verification(root, len(files.episodes), data, (*problems, *more), files.shard)


def _unfinished(files: Files, altered: bool) -> Iterator[Problem]:
    """Tell what an evaluation or a shard lacks, and the episodes that are of other shards."""
    name = "the evaluation" if files.shard is None else str(files.shard)
    there = {episode.index for episode in files.episodes}
    if others := sorted(there.difference(files.own)):
        text = f"episodes {listed_text(others)} are not of {name}"
        yield Problem(files.root / ledger.EPISODES, text)
    if missing := len(files.own) - len(there) + len(others):
        text = f"{name} is unfinished: it lacks {count_text(missing, 'episode')}"
        yield Problem(files.root / ledger.EPISODES, text)
    elif files.last is None and not altered:
        file, lacks = ledger.RESULTS, "without this file nothing tells of an altered record"
        if files.shard is not None:
            file, lacks = ledger.SHARD, "this file has no digest that tells of altered records"
        yield Problem(files.root / file, f"{name} is unfinished: {lacks}")


def _derived(files: Files) -> Iterator[Problem]:
    """Check the statistics of a finished evaluation against its records."""
    file, results = files.root / ledger.RESULTS, files.last or {}
    try:
        settings = {name: results[name] for name in ("confidence", "resamples", "seed")}
        if settings["resamples"] > statistics.MOST_RESAMPLES:  # would take any time and memory
            most = statistics.MOST_RESAMPLES
            raise ValueError(f"resamples is {settings['resamples']}, above {most}")
        expected = statistics.summarize(files.episodes, **settings).to_dict()
    except (KeyError, TypeError, ValueError) as error:
        yield Problem(file, f"its statistics cannot be computed again ({error})")
        return
    for name, value in expected.items():
        if not statistics.alike(value, results.get(name)):
            yield Problem(file, f"{name} is {results.get(name)!r}, and by the ledger {value!r}")


def _kept(files: Files) -> tuple[int, list[Problem]]:
    """Check data that were kept; return their number, and the problems."""
    records = {ledger.trajectory_name(e.index): e for e in files.episodes if e.completed}
    folder, checked, problems = files.root / ledger.TRAJECTORIES, 0, list[Problem]()
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    for name in sorted(there | (files.kept or {}).keys()):
        if name in records:
            checked += 1
            try:
                check_data(files.root, records[name], files.manifest, files.kept)
            except ValueError as error:
                problems.append(Problem(folder / name, str(error)))
        elif not name.endswith(".part") and not name.startswith("."):
            why = "the ledger has no completed episode of this index"
            problems.append(Problem(folder / name, why))
    return checked, problems
