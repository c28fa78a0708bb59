"""The files of an evaluation: a journal while it runs, the ledger and its report at the end.

``manifest.json`` is written first. ``episodes.jsonl`` takes a line an episode as they end, and is
sorted by index at the end. Whatever moment a process dies at, the same command goes on from the
lines that are whole, and the files are byte for byte those of a run that was never interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from tdcollect.evaluation.comparable import differences
from tdcollect.evaluation.records import Episode, ledger_digest
from tdcollect.files import write_atomically

MANIFEST, EPISODES, RESULTS, RUN = "manifest.json", "episodes.jsonl", "results.json", "run.json"
TRAJECTORIES = "trajectories"


class Directory:
    """The directory of one evaluation, open for writing by one process.

    Args:
        path: where; made where it is missing.
        manifest: the evaluation's.

    Attributes:
        episodes: the records that are there already.

    Raises:
        ValueError: for a directory of another evaluation, naming the differences, and for one
            that holds something else.
        RuntimeError: where another process writes to it.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Mapping[str, Any]):
        self.path = Path(path)
        check_directory(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            self._claim(opened)
            # The first file there is: by it check_directory knows an evaluation.
            self._journal = opened.enter_context((self.path / EPISODES).open("a+b"))
            self._sweep()
            self._check_manifest(manifest)
            self.episodes = self._read_journal()
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

    def _sweep(self) -> None:
        """Remove what a process left half written."""
        for part in (*self.path.glob("**/.*.part"), *self.path.glob(f"{TRAJECTORIES}/*.part")):
            shutil.rmtree(part) if part.is_dir() else part.unlink()

    def _check_manifest(self, manifest: Mapping[str, Any]) -> None:
        file = self.path / MANIFEST
        if not file.exists():
            write_atomically(file, _json(manifest))
            return
        found = differences(json.loads(file.read_text()), json.loads(_json(manifest)))
        if found:
            told = "; ".join(f"{where} is {a!r} there and {b!r} here" for where, a, b in found)
            raise ValueError(
                f"{self.path} holds another evaluation: {told}. Choose another directory, or "
                "remove this one to start anew"
            )

    def _read_journal(self) -> list[Episode]:
        """The records of the lines that are whole; what a dying process left behind goes."""
        self._journal.seek(0)
        whole, lines = 0, []
        for line in self._journal:
            if not line.endswith(b"\n"):
                self._journal.truncate(whole)
                break
            lines.append(line)
            whole += len(line)
        return _records(lines, self.path / EPISODES)

    def add(self, episode: Episode, data: TensorDict | None = None) -> None:
        """Keep an episode: its data first, then its line."""
        if data is not None:
            target = trajectory_path(self.path, episode.index)
            part = target.with_name(target.name + ".part")
            if target.exists():  # its line was never written
                shutil.rmtree(target)
            data.memmap(part)
            part.rename(target)
        self._journal.write(episode.to_json().encode() + b"\n")
        self._journal.flush()

    def finish(self, episodes: Sequence[Episode], results: Mapping[str, Any]) -> None:
        """Write the ledger in order, and the results."""
        ordered = sorted(episodes, key=lambda episode: episode.index)
        lines = (f"{episode.to_json()}\n".encode() for episode in ordered)
        write_atomically(self.path / EPISODES, lambda file: file.writelines(lines))
        write_atomically(self.path / RESULTS, _json({"ledger": ledger_digest(ordered), **results}))

    def note_run(self, started: float, ran: int, how: Mapping[str, Any]) -> None:
        """Add how this run went, in the one file that holds times."""
        file = self.path / RUN
        runs = json.loads(file.read_text()) if file.exists() else []
        seconds = round(time.time() - started, 3)
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
        runs.append({"began": began, "seconds": seconds, "episodes": ran, **how})
        write_atomically(file, _json(runs))

    def close(self) -> None:
        """Let go of the directory."""
        self._opened.close()


def check_directory(path: Path) -> None:
    """Refuse a path that is no directory of an evaluation, and cannot become one."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected out to be a directory, got the file {path}")
    if path.is_dir() and any(path.iterdir()) and not (path / EPISODES).exists():
        raise ValueError(
            f"expected out to be empty, or the directory of an evaluation, got {path}, which holds "
            f"other files; choose another"
        )


def read_directory(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Episode]]:
    """The manifest and the records of an evaluation's directory.

    Raises:
        FileNotFoundError: where there is none.
    """
    root = Path(path)
    if not (root / MANIFEST).exists():
        raise FileNotFoundError(f"expected the directory of an evaluation, got {root}")
    manifest = json.loads((root / MANIFEST).read_text())
    lines = (root / EPISODES).read_bytes().splitlines(keepends=True)
    episodes = _records([line for line in lines if line.endswith(b"\n")], root / EPISODES)
    return manifest, sorted(episodes, key=lambda episode: episode.index)


def _records(lines: Sequence[bytes], file: Path) -> list[Episode]:
    episodes = []
    for number, line in enumerate(lines, 1):
        try:
            episodes.append(Episode.from_json(line.decode()))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"expected a record of an episode, got something else in line {number} of {file}: "
                "remove the line, and the episode is run again"
            ) from error
    return episodes


def trajectory_path(root: Path, index: int) -> Path:
    """Where the data of an episode are kept."""
    return root / TRAJECTORIES / f"{index:06d}"


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
