"""`tdcollect verify` finds whatever was altered, but for a short list that it does not know of.

Every scalar, every entry and one byte of every file of each kind of directory is altered, one at
a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torchrl.envs.utils import ExplorationType

import tdcollect
from tdcollect.evaluation import verification
from tdcollect.evaluation.curve import Folder, point_of
from tdcollect.evaluation.request import Request
from tdcollect.evaluation.statistics import alike
from tdcollect.lab import results
from tdcollect.lab.pages import suite as report

from ..lab.parts import save_runs, small
from .envs import Walk
from .policies import categorical

KINDS = ("evaluation", "shard", "merged", "curve", "suite")
SAMPLE = 16  # alterations of each kind in a quick run

# What may change without a word, and why.
UNNOTICED = {
    "run.json": "times, what ran the episodes, and names of code, which pages show",
    **dict.fromkeys(["report.html", *report.FILES], "what it says is in the other files"),
}


def evaluate(out: Path, policy: Any = None, **how: Any) -> Any:
    request = Request("tests.evaluation.envs:Walk", "random")
    return tdcollect.evaluate(
        Walk,
        policy or categorical(),
        4,
        output_dir=out,
        exploration_type=ExplorationType.RANDOM,
        progress=False,
        request=request,
        **how,
    )


def curve(out: Path) -> None:
    """A learning curve, as the process of an Evaluator writes it."""
    folder = Folder(out, "mean")
    for step in (10, 20):
        torch.manual_seed(step)
        policy = categorical()
        with torch.no_grad():
            policy.module[0].module[-1].bias += torch.randn(2)
        result = evaluate(folder.step_path(step), policy)
        folder.note(point_of(step, result.summary(), result.digest), policy.state_dict)
    folder.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, small_reports) -> Iterator[dict[str, Path]]:
    """A directory of each kind; restore what you alter."""
    root = tmp_path_factory.mktemp("made")
    evaluate(root / "evaluation", keep_trajectories=True)
    for i in range(2):
        evaluate(root / f"shard-{i}", shard=(i, 2), keep_trajectories=True)
    tdcollect.merge([root / "shard-0", root / "shard-1"], root / "merged")
    curve(root / "curve")
    save_runs(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "aggregate", partial(results.aggregate, resamples=50))
        small(root).run(root / "suite", progress=False)
        yield {kind: root / kind for kind in KINDS} | {"shard": root / "shard-0"}


class Altered(NamedTuple):
    """A file with one alteration; no bytes if it is deleted."""

    file: str
    what: str
    data: bytes | None


def unlike(value: Any) -> Any:
    """Another value of the same type."""
    if value is None or isinstance(value, str):
        return 0 if value is None else f"{value}x"
    return not value if isinstance(value, bool) else type(value)(1.5 * value + 1)


def changes(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """A copy for each scalar that is altered, and for each entry that is deleted."""
    if isinstance(value, (dict, list)):
        # Long lists are curves, say: their first values stand for all.
        for key in value if isinstance(value, dict) else range(min(4, len(value))):
            for where, changed in changes(value[key], f"{at}.{key}"):
                copy = value.copy()
                copy[key] = changed
                yield where, copy
            copy = value.copy()
            del copy[key]
            yield f"without {at}.{key}".replace("without .", "without "), copy
    else:
        yield at, unlike(value)


def alterations(root: Path) -> Iterator[Altered]:
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name, data = path.relative_to(root).as_posix(), path.read_bytes()
        if root.name == "suite" and name.startswith("evaluations/") and "walk/net/0" not in name:
            continue  # one of them stands for all
        if root.name == "curve" and "/" in name and not name.startswith("step-000000010"):
            continue
        yield Altered(name, "deleted", None)
        at = len(data) // 2
        yield Altered(name, "a byte", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if path.name == "curve.csv":
            rows = [line.split(",") for line in data.decode().splitlines()]
            for i, j in ((i, j) for i in range(1, len(rows)) for j in range(len(rows[0]))):
                other = [list(row) for row in rows]
                other[i][j] = repr(float(rows[i][j]) * 1.5 + 1) if j < 9 else "ab" * 32
                yield Altered(name, f"{i}, {rows[0][j]}", csv(other))
            yield Altered(name, "a row more", csv([*rows, ["99", *rows[1][1:]]]))
            yield Altered(name, "a row less", csv(rows[:-1]))
        if path.suffix not in (".json", ".jsonl") or path.parent != root:
            continue
        lines = [json.loads(line) for line in data.splitlines()] if "jsonl" in name else None
        for what, changed in changes(json.loads(data) if lines is None else lines):
            text = json.dumps(changed, indent=1, sort_keys=True) + "\n"
            if lines is not None:
                text = "".join(json.dumps(line) + "\n" for line in changed)
            yield Altered(name, what, text.encode())


def csv(rows: list[list[str]]) -> bytes:
    return "".join(",".join(row) + "\n" for row in rows).encode()


def is_known(root: Path, altered: Altered) -> bool:
    """Tell whether an alteration may go unnoticed: by the list, or as the rounding of a number."""
    name = altered.file.rpartition("/")[2]
    if name in UNNOTICED or name.endswith(".svg"):
        return True
    if altered.data is not None and name.endswith(".json"):
        with suppress(ValueError):
            return alike(json.loads((root / altered.file).read_bytes()), json.loads(altered.data))
    return False


def passes(root: Path) -> bool:
    with suppress(FileNotFoundError):
        return tdcollect.verify(root).passed
    return False


def unnoticed(root: Path, chosen: list[Altered]) -> list[str]:
    """Verify with each alteration; return those that pass."""
    found = []
    for altered in chosen:
        path = root / altered.file
        before = path.read_bytes()
        path.unlink()
        if altered.data is not None:
            path.write_bytes(altered.data)
        if passes(root):
            found.append(f"{altered.file}: {altered.what}")
        path.write_bytes(before)
    assert passes(root)
    return found


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Verify evaluations within a curve or a suite once, but for those that are altered."""
    verify = verification._of_evaluation

    @lru_cache
    def once(root: Path, state: Any) -> Any:
        return verify(root)

    def state_of(root: Path) -> Any:
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files)

    monkeypatch.setattr(verification, "_of_evaluation", lambda root: once(root, state_of(root)))


@pytest.mark.parametrize("most", [SAMPLE, pytest.param(10**9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_altered_is_found(made: dict[str, Path], cached, kind: str, most: int) -> None:
    root = made[kind]
    every = [altered for altered in alterations(root) if not is_known(root, altered)]
    assert unnoticed(root, every[:: max(1, len(every) // most)]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_folders_that_are_missing_are_found(made: dict[str, Path], tmp_path, kind: str) -> None:
    paths = made[kind].rglob("*")
    folders = sorted(path for path in paths if path.is_dir() and path.name != "figures")
    for folder in folders[:: max(1, len(folders) // 6)]:
        root = Path(shutil.copytree(made[kind], tmp_path / "copy"))
        shutil.rmtree(root / folder.relative_to(made[kind]))
        assert not passes(root), folder
        shutil.rmtree(root)
