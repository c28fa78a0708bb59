"""The directory of an evaluation as it is written: a journal first, the ledger and its report last.

``manifest.json`` is the first file there: by it a directory is known as an evaluation's, and
nothing in one without it is touched. ``episodes.jsonl`` takes a line an episode as they end, and is
sorted by index at the end. ``results.json`` is the last, and marks the evaluation as finished.
Whatever moment a process dies at, the same command goes on from the lines that are whole, and the
files are byte for byte those of a run that was never interrupted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.ledger.manifest import differences
from tdcollect.evaluation.ledger.reading import (
    EPISODES,
    MANIFEST,
    REFUSED,
    RESULTS,
    RUN,
    TRAJECTORIES,
    read_json,
    read_manifest,
    read_records,
    sha256,
    trajectory_path,
    whole_lines,
)
from tdcollect.evaluation.ledger.records import FORMAT, Episode
from tdcollect.evaluation.ledger.trajectory_files import write_trajectory
from tdcollect.files import write_atomically

_HALF_WRITTEN = re.compile(r"\.(?P<file>.+)\.\d+\.part")  # as write_atomically names it


class Directory:
    """The directory of one evaluation, open for writing by one process.

    Args:
        path: where; made where it is missing.
        manifest: the evaluation's.

    Attributes:
        episodes: the records that are there already.

    Raises:
        ValueError: for a directory of another evaluation, naming the differences, and for one
            that holds something else, of which nothing is changed.
        RuntimeError: where another process writes to it.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Mapping[str, Any]):
        self.path = Path(path)
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            self._claim(opened)
            there = check_directory(self.path)
            if there is None:
                write_atomically(self.path / MANIFEST, _json(manifest))
                there = json.loads(_json(manifest))
            else:
                self._check_manifest(there, manifest)
            self.episodes = read_records(self.path, there)
            # From here on it is known to be this evaluation's.
            self._sweep()
            self._journal = opened.enter_context((self.path / EPISODES).open("a+b"))
            whole = sum(map(len, whole_lines(self.path / EPISODES)))
            if self._journal.tell() > whole:  # a process died as it wrote a line
                self._journal.truncate(whole)
                self._journal.seek(whole)
            self._opened = opened.pop_all()

    def _claim(self, opened: ExitStack) -> None:
        """Lock the directory itself: the files in it are replaced while it is in use."""
        import fcntl  # not on Windows, where nothing but this needs it

        handle = os.open(self.path, os.O_RDONLY)
        opened.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"another process is writing to {self.path}; wait for it") from error

    def _check_manifest(self, there: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Refuse to go on from the manifest found there if it is of another evaluation."""
        if there["format"] != FORMAT:
            raise ValueError(
                f"{self.path} holds an evaluation of format {there['format']}, which an older "
                "tdcollect wrote: it can be read and not continued; choose another directory"
            )
        found = differences(there, json.loads(_json(manifest)))
        if found:
            told = "; ".join(f"{where} is {a!r} there and {b!r} here" for where, a, b in found)
            raise ValueError(
                f"{self.path} holds another evaluation: {told}. Choose another directory, or "
                "remove this one to start anew"
            )

    def _sweep(self, data: bool = False) -> None:
        """Remove what a process left half written; and data of episodes, which have no line."""
        for part in (self.path / TRAJECTORIES).glob("*" if data else "*.part"):
            if part.name.removesuffix(".part").isdecimal():
                shutil.rmtree(part)

    def check_kept(self, episodes: Iterable[Episode]) -> None:
        """Refuse to keep data where episodes have ended without.

        Raises:
            ValueError: naming the first of them.
        """
        lacking = [
            episode.index
            for episode in episodes
            if episode.completed and not trajectory_path(self.path, episode.index).exists()
        ]
        if lacking:
            raise ValueError(
                f"expected the data of the episodes that {self.path} holds, got {len(lacking)} "
                f"without (episode {lacking[0]} first): data are kept as an episode runs. Evaluate "
                "into another directory, or replay single episodes"
            )

    def add(self, episode: Episode, data: TensorDict | None = None) -> None:
        """Keep an episode: its data first, then its line."""
        if data is not None:
            target = trajectory_path(self.path, episode.index)
            part = target.with_name(target.name + ".part")
            if target.exists():  # its line was never written
                shutil.rmtree(target)
            write_trajectory(part, data)
            part.rename(target)
        self._journal.write(episode.to_json().encode() + b"\n")
        self._journal.flush()

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Put the ledger in order."""
        ordered = sorted(episodes, key=lambda episode: episode.index)
        lines = (episode.to_json().encode() + b"\n" for episode in ordered)
        write_atomically(self.path / EPISODES, lambda file: file.writelines(lines))

    def write_results(self, results: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Write the statistics, with the digests of the other files: the evaluation is finished.

        Args:
            results: the statistics.
            files: those that show them.
        """
        digests = {
            "ledger": sha256(self.path / EPISODES),
            "manifest": sha256(self.path / MANIFEST),
            "files": {str(file.relative_to(self.path)): sha256(file) for file in files},
        }
        write_atomically(self.path / RESULTS, _json({**digests, **results}))

    def note_run(self, started: float, ran: int, how: Mapping[str, Any]) -> None:
        """Add how this run went, in the one file that holds times."""
        file = self.path / RUN
        advice = "remove the file: all others are written"
        runs = read_json(file, list, advice) if file.exists() else []
        seconds = round(time.time() - started, 3)
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
        runs.append({"began": began, "seconds": seconds, "episodes": ran, **how})
        write_atomically(file, _json(runs))

    def give_up(self, error: BaseException) -> None:
        """Leave nothing behind where no episode has ended; mark what was refused later as such.

        Nobody shall take a refused evaluation for an unfinished one, nor be kept from the
        directory once env or policy are corrected.
        """
        if not self._journal.tell():
            self._sweep(data=True)
            for name in (EPISODES, MANIFEST):
                (self.path / name).unlink()
            with suppress(OSError):  # it was there before, and may hold what is not ours
                (self.path / TRAJECTORIES).rmdir()
            with suppress(OSError):
                if self._made:
                    self.path.rmdir()
        elif isinstance(error, NotReproducibleError):
            write_atomically(self.path / REFUSED, _json({"reason": str(error)}))

    def close(self) -> None:
        """Let go of the directory."""
        self._opened.close()


def check_directory(path: Path) -> dict[str, Any] | None:
    """Refuse a path that is no directory of an evaluation, and cannot become one.

    Returns:
        The manifest found there, or None.

    Raises:
        ValueError: for a file, and for a directory that holds something else.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected output_dir to be a directory, got the file {path}")
    if not path.is_dir():
        return None
    if (path / MANIFEST).exists():
        return read_manifest(path)
    for entry in path.iterdir():
        part = _HALF_WRITTEN.fullmatch(entry.name)
        if part is None or part["file"] != MANIFEST:  # a process died as it wrote the first file
            raise ValueError(
                f"expected output_dir to be empty, or the directory of an evaluation, got {path}, "
                "which holds other files; choose another"
            )
    return None


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
