"""The directory of an evaluation beside training: a folder per step, the curve, and the best."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tdcollect.evaluation.beside.curve import (
    Best,
    Point,
    point_of,
    read_csv,
    to_csv,
    value_of,
    with_point,
)
from tdcollect.evaluation.beside.curve_page import curve_page
from tdcollect.evaluation.ledger.manifest import differences, manifest_entry
from tdcollect.evaluation.ledger.reading import MANIFEST, RESULTS, read_manifest
from tdcollect.evaluation.reports.comparable import SAME
from tdcollect.evaluation.reports.report import REPORT
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.files import check_no_links, write_atomically

CURVE, PAGE, FIGURE = "curve.csv", "curve.html", "curve.svg"
BEST, WEIGHTS = "best.json", "best.pt"
_BEFORE = ("curve.png",)  # of directories that were written before
_STEP = re.compile(r"step-(\d{9,})")
_SECONDS, _LOOKS = 2.0, 40  # for a process that was killed to let go of its directory


class Folder:
    """The output directory of a :class:`tdcollect.Evaluator`, open for writing by one process.

    Args:
        path: the directory; made if it is missing.
        best_by: ``"mean"`` or ``"iqm"``.

    Attributes:
        curve: the points found there, and those noted since.
        best: the best of them.

    Raises:
        ValueError: as :func:`check_folder` does.
        RuntimeError: if another process writes to it.
    """

    def __init__(self, path: Path, best_by: str):
        self.path, self._by = path, best_by
        path.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDONLY)
        try:
            self._claim()
            self.curve, self.best = read_folder(path, best_by)
            noted = {point.step for point in self.curve}
            for step, directory in sorted(_steps(path).items()):
                if step not in noted and (directory / RESULTS).exists():
                    # Its process was killed before the curve was written.
                    result = EvaluationResult.load(directory)
                    point = point_of(step, result.summary(), result.digest)
                    self.curve = with_point(self.curve, point)
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        for look in range(_LOOKS + 1):
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if look == _LOOKS:
                    raise RuntimeError(
                        f"another process is writing to {self.path}; wait for it, or choose "
                        "another directory"
                    ) from error
                time.sleep(_SECONDS / _LOOKS)

    def step_path(self, step: int) -> Path:
        """The directory of the evaluation at a step; refused if it is a link."""
        check_no_links(self.path, step_name(step))
        return self.path / step_name(step)

    def check_same_episodes(self, manifest: Mapping[str, Any]) -> None:
        """Refuse an evaluation of other episodes than those of the curve.

        Raises:
            ValueError: naming the differences.
        """
        there = next((d for d in _steps(self.path).values() if (d / MANIFEST).exists()), None)
        if there is None:
            return
        pair = (_episodes_of(read_manifest(there)), _episodes_of(json.loads(json.dumps(manifest))))
        found = differences(*pair)
        if found:
            texts = "; ".join(f"{path} is {a!r} there and {b!r} here" for path, a, b in found)
            raise ValueError(
                f"{self.path} holds a curve of other episodes: {texts}. Choose another directory, "
                "or remove this one to start anew"
            )

    def note(self, point: Point, name: str, policy_state: Callable[[], Mapping[str, Any]]) -> None:
        """Add a point to the curve, and keep the policy's weights if it is the best.

        Args:
            point: the point.
            name: the env's, for the title of the page.
            policy_state: returns the ``state_dict`` of the policy that was evaluated.
        """
        self.curve = with_point(self.curve, point)
        value = value_of(point, self._by)
        before = None if self.best is None else (self.best.value, -self.best.step)
        if value > float("-inf") and (before is None or (value, -point.step) >= before):
            state = policy_state()
            path = None
            if state:
                file = io.BytesIO()
                torch.save(state, file)
                path = write_atomically(self.path / WEIGHTS, file.getvalue())
            else:
                (self.path / WEIGHTS).unlink(missing_ok=True)
            self.best = Best(point.step, value, path)
            entries = {
                "step": point.step,
                "by": self._by,
                "value": value,
                "weights": None if path is None else path.name,
            }
            text = json.dumps(entries, indent=1, sort_keys=True) + "\n"
            write_atomically(self.path / BEST, text.encode())
        write_atomically(self.path / CURVE, to_csv(self.curve))
        html, drawn = curve_page(
            self.curve, self.best, name, self._by, lambda step: f"{step_name(step)}/{REPORT}"
        )
        if drawn is not None:
            write_atomically(self.path / FIGURE, drawn.file())
        write_atomically(self.path / PAGE, html)

    def close(self) -> None:
        """Release the directory."""
        os.close(self._handle)


def step_name(step: int) -> str:
    """Return the name of the folder of the evaluation at a step."""
    return f"step-{step:09d}"


def read_folder(path: Path, best_by: str) -> tuple[list[Point], Best | None]:
    """Return the curve that a directory holds, and its best point.

    Raises:
        ValueError: for a directory that holds something else, and for one whose best evaluation
            was chosen by another value.
    """
    check_folder(path)
    curve = read_csv(path / CURVE) if (path / CURVE).exists() else []
    if not (path / BEST).exists():
        return curve, None
    try:
        kept = json.loads((path / BEST).read_bytes())
        step, by, value = int(kept["step"]), str(kept["by"]), float(kept["value"])
        weights = None if kept["weights"] is None else path / WEIGHTS
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"expected {path / BEST} to be as tdcollect.Evaluator writes it, got something else "
            f"({type(error).__name__}: {error}); remove the file"
        ) from error
    if by != best_by:
        raise ValueError(
            f"{path} keeps the best evaluation by {by!r}, got best={best_by!r}: the weights of "
            "others are gone; choose another directory"
        )
    return curve, Best(step, value, weights)


def check_folder(path: Path) -> None:
    """Refuse a path that neither is nor can become the directory of an evaluator.

    Raises:
        ValueError: for a file, and for a directory that holds something else.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected output_dir to be a directory, got the file {path}")
    ours = (CURVE, PAGE, FIGURE, BEST, WEIGHTS, *_BEFORE)
    for entry in path.iterdir() if path.is_dir() else ():
        part = entry.name.startswith(".") and entry.name.endswith(".part")
        if entry.name not in ours and not _STEP.fullmatch(entry.name) and not part:
            raise ValueError(
                "expected output_dir to be empty, or the directory of an Evaluator, got "
                f"{path}, which holds {entry.name}; choose another"
            )


def _steps(path: Path) -> dict[int, Path]:
    """Return the directories of evaluations, by step."""
    found = ((_STEP.fullmatch(entry.name), entry) for entry in path.iterdir())
    return {int(match[1]): entry for match, entry in found if match}


def _episodes_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest that decide which episodes are run."""
    entries = {key: manifest_entry(manifest, key) for key in (*SAME, "episodes", "seeds")}
    env = dict(entries["env"] or {})
    # Not the digests of running statistics, which training moves.
    env["transforms"] = [str(name).partition("(")[0] for name in env.get("transforms", [])]
    return {**entries, "env": env}
