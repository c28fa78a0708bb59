"""Following what runs in another process, by its files alone.

Nothing is written, and no lock is taken: the run cannot notice.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

from tdcollect.cli.program import print_json, say
from tdcollect.display import number_text, visible
from tdcollect.evaluation import ledger, race
from tdcollect.evaluation.ledger import Files
from tdcollect.evaluation.statistics import exact_mean
from tdcollect.files import LOCK, check_output
from tdcollect.progress import SECONDS_BETWEEN_LINES, seconds_text
from tdcollect.suites.results import error_beside, read_folder
from tdcollect.suites.suite import EVALUATIONS

WAITING, RUNNING, STOPPED, FINISHED = "waiting", "running", "stopped", "finished"
# Seconds without a writer: a race has none as it draws its page, and a suite has none as it makes
# the env and the policy of its next evaluation.
_PATIENCE = {"race": 10.0, "suite": 60.0}
_REST = 20  # times as long as a look took: the run has better use for the processors
_LOCKS = Path("/proc/locks")


class Watched:
    """An evaluation, a race or a suite, as its files tell of it at each look."""

    def __init__(self, root: Path):
        self.root = root
        self._parts: dict[Path, Files] = {}  # evaluations that have begun
        self._looks: race.Looks | None = None
        self._since: tuple[float, int] | None = None

    def look(self) -> dict[str, Any]:
        """Return what is known now, as plain values for JSON."""
        kinds = {ledger.RACE: self._race, ledger.SUITE: self._suite, ledger.MANIFEST: self._whole}
        kind = next((kinds[name] for name in kinds if (self.root / name).exists()), None)
        if kind is None:
            check_output(self.root, "an evaluation, a race or a suite", kinds)
            return {"kind": "run", "state": WAITING}
        found = kind()
        found["episodes"] = sum(len(files.episodes) for files in self._parts.values())
        ledgers = [_stat(root / ledger.EPISODES) for root in self._parts]
        changed = max((one.st_mtime for one in ledgers if one), default=time.time())
        found["quiet"] = max(0.0, time.time() - changed)
        found["writers"] = writers = _writers(self._parts)
        gone = writers == [] and found["quiet"] > _PATIENCE.get(found["kind"], 0.0)
        found["state"] = FINISHED if found.pop("ended") else STOPPED if gone else RUNNING
        return found | self._pace(found)

    def _read(self, roots: Sequence[Path]) -> list[Files | None]:
        """Return the files of evaluations, of which those that have ended are read once."""
        before, self._parts = self._parts, {}
        for root in roots:
            if root in before and before[root].last is not None:
                self._parts[root] = before[root]
            elif (root / ledger.MANIFEST).exists():
                self._parts[root] = ledger.read_directory(root)
        return [self._parts.get(root) for root in roots]

    def _whole(self) -> dict[str, Any]:
        (files,) = self._read([self.root])
        assert files is not None
        kind = "evaluation" if files.shard is None else str(files.shard)
        of, ended = len(files.own), files.last is not None
        return {"kind": kind, "of": of, "ended": ended, "mean_return": _mean(files)}

    def _race(self) -> dict[str, Any]:
        plan, written = race.read(self.root)
        parts = self._read(race.evaluations_of(self.root))
        ledgers = [[] if files is None else files.episodes for files in parts]
        by_name = dict(zip(plan.rule.names, ledgers, strict=True))
        looks = self._looks or race.Looks(plan)
        if any(len(looks.records[name]) > len(by_name[name]) for name in by_name):
            looks = race.Looks(plan)  # what was begun beyond the last look is discarded
        self._looks = looks
        for name, records in by_name.items():
            for record in records:
                if record.index not in looks.records[name]:
                    looks.take(name, record)
        of = sum(looks.played.get(name, plan.max_episodes) for name in by_name)
        pairs = looks.standing.outcome["pairs"]
        return {"kind": "race", "of": of, "ended": "outcome" in written, "pairs": pairs}

    def _suite(self) -> dict[str, Any]:
        suite, means = read_folder(self.root), dict[str, dict[str, list[float]]]()
        every = [self.root / EVALUATIONS / name for name in suite["files"]]
        roots = [one for one in every if not (error_beside(one).exists() or ledger.refusal_of(one))]
        parts = self._read(roots)
        for root, files in zip(roots, parts, strict=True):
            if files is not None and (mean := _mean(files)) is not None:
                task, policy = root.parts[-3:-1]
                means.setdefault(task, {}).setdefault(policy, []).append(mean)
        left = sum(files is None or files.last is None for files in parts)
        found = {"kind": "suite", "of": suite["episodes"] * len(roots), "ended": not left}
        count, failed = len(every), len(every) - len(roots)
        found["evaluations"] = {"ended": count - left, "could_not_run": failed, "of": count}
        of_task = {
            t: {p: exact_mean(np.array(runs)) for p, runs in of.items()} for t, of in means.items()
        }
        return found | {"mean_returns": of_task}

    def _pace(self, found: Mapping[str, Any]) -> dict[str, float]:
        """Return the pace since the first look at the run, and the time that is left by it."""
        now, count = time.monotonic(), found["episodes"]
        if self._since is None or count < self._since[1] or found["state"] != RUNNING:
            self._since = now, count
        then, before = self._since
        if count == before:
            return {}
        pace = 60 * (count - before) / (now - then)
        return {"per_minute": pace, "seconds_left": 60 * max(0, found["of"] - count) / pace}


def _stat(file: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return file.stat()
    return None


def _mean(files: Files) -> float | None:
    returns = [e.episode_return for e in files.episodes if e.episode_return is not None]
    return exact_mean(np.array(returns)) if returns else None


def _writers(roots: Iterable[Path]) -> list[dict[str, int]] | None:
    """Return the processes of this machine that have locked a directory; None if none can tell."""
    if not _LOCKS.exists():
        return None
    inodes = {str(found.st_ino) for root in roots if (found := _stat(root / LOCK)) is not None}
    held = [line.split() for line in _LOCKS.read_text().splitlines() if " POSIX " in line]
    # number, POSIX, ADVISORY, WRITE, process, device:inode; one that waits has an arrow before
    pids = {int(words[4]) for words in held if words[5].rpartition(":")[2] in inodes}
    return [{"process": pid, "below": _count_below(pid)} for pid in sorted(pids)]


def _count_below(pid: int) -> int:
    """Count the processes that a process has started, and those that they have."""
    children: list[str] = []
    for file in Path("/proc", str(pid), "task").glob("*/children"):
        with suppress(OSError):  # it has ended
            children += file.read_text().split()
    return sum(1 + _count_below(int(child)) for child in children)


def _facts(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a look has found, a phrase each."""
    if found["state"] == WAITING:
        yield "nothing is there yet"
        return
    most = "at most " * (found["kind"] == "race" and found["state"] != FINISHED)
    yield f"{found['episodes']} of {most}{found['of']} episodes"
    if "evaluations" in found:
        told = "{ended} of {of} evaluations have ended, {could_not_run} could not run"
        yield told.format(**found["evaluations"])
    if "per_minute" in found:
        left = seconds_text(round(found["seconds_left"]))
        yield f"{found['per_minute']:.3g} per minute, {most or 'about '}{left} left"
    for writer in found["writers"] or ():
        yield f"process {writer['process']} writes, processes below it: {writer['below']}"
    if found["state"] != FINISHED:
        yield f"last change {seconds_text(round(found['quiet']))} ago"
    if found["state"] == STOPPED:
        yield "no process of this machine writes there: the same command resumes it"
    if found.get("mean_return") is not None:
        yield f"mean return {number_text(found['mean_return'])}"
    for pair in found.get("pairs", ()):
        names, episodes, difference, interval, decision = race.pair_texts(pair)
        yield f"{names}: {difference} ({interval}) after {episodes}, {decision}"
    for task, of in found.get("mean_returns", {}).items():
        yield f"{task}: {', '.join(f'{name} {number_text(mean)}' for name, mean in of.items())}"


def follow(root: Path, interval: float | None, as_json: bool) -> None:
    """Show one look after another until the run has ended."""
    watched, rows = Watched(root), 0
    drawn = sys.stdout.isatty() and not as_json
    while True:
        began, found = time.monotonic(), watched.look()
        head, facts = f"{root}: {found['kind']} {found['state']}", [*_facts(found)]
        if as_json:
            print_json(None, directory=root, **found)
        elif drawn:
            rows = _redraw([head, *(f"  {fact}" for fact in facts)], rows)
        else:
            say(f"{time.strftime('%H:%M:%S')} {head}: {'; '.join(facts)}")
        if found["state"] == FINISHED:
            return
        rest = _REST * (time.monotonic() - began)
        time.sleep(max(rest, interval or (2.0 if drawn else SECONDS_BETWEEN_LINES)))


def _redraw(lines: Sequence[str], rows: int) -> int:
    """Draw lines over the rows that were drawn before; return how many there are now."""
    size = shutil.get_terminal_size()
    shown = [visible(line)[: size.columns - 1] for line in lines[: size.lines - 1]]
    click.echo(f"\x1b[{rows}F\x1b[J" * (rows > 0) + "\n".join(shown))
    return len(shown)
