"""Ledgers written by hand, and directories of evaluations that are altered."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect import env_seed, policy_seed
from tdcollect.evaluation.ledger import FAILED, Episode
from tdcollect.evaluation.step_files import read_arrays, write_arrays
from tdcollect.files import write_json

ENV = {
    "id": "CartPole-v1",
    "wrappers": ["TimeLimit", "OrderEnforcing"],
    "transforms": [],
    "observation_space": "Box(-4.8, 4.8, (4,), float32)",
    "action_space": "Discrete(2)",
    "kwargs": {},
}


def ledger(
    returns: Iterable[float],
    *,
    failed: Collection[int] = (),
    success: Mapping[int, bool] | None = None,
    root: int = 0,
) -> list[Episode]:
    """One record per return, with the seeds of the protocol; the length is 10 plus the index."""
    records = []
    for index, value in enumerate(returns):
        seeds = {"env_seed": env_seed(root, index), "policy_seed": policy_seed(root, index)}
        if index in failed:
            records.append(Episode(index, **seeds, status=FAILED, restarts=3))
            continue
        records.append(
            Episode(
                index,
                **seeds,
                episode_return=float(value),
                length=10 + index,
                terminated=True,
                truncated=False,
                success=None if success is None else success.get(index),
                digest=f"{index:064x}",
            )
        )
    return records


GONE = object()


def alter(path: Path, how: Any, line: int = 1) -> None:
    """Alter a file or a folder.

    None removes it, a text takes its place, and a function is called with it. A dict changes
    entries of its JSON object, or of the record in a line, from 0; a key may be the path to an
    entry, and `GONE` removes one.
    """
    if callable(how):
        how(path)
    elif how is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif isinstance(how, str):
        path.write_text(how)
    else:
        lines = path.read_text().splitlines(keepends=True)
        found = json.loads(lines[line] if path.suffix == ".jsonl" else "".join(lines))
        for key, value in how.items():
            *into, last = key if isinstance(key, tuple) else (key,)
            entry = found
            for name in into:
                entry = entry[name]
            if value is GONE:
                del entry[last]
            else:
                entry[last] = value
        if path.suffix == ".jsonl":
            lines[line] = json.dumps(found) + "\n"
            path.write_text("".join(lines))
        else:
            write_json(path, found)


def change_data(file: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Write the file of an episode's arrays anew, changed; links to it stay as they are."""
    arrays = read_arrays(file)
    how(arrays)
    write_arrays(file, arrays)


def flip_in(file: Path, name: str) -> None:
    """Change one bit of an array of an episode."""

    def flip(arrays: dict[str, Any]) -> None:
        whole = arrays[name].reshape(-1).view(np.uint8)
        whole[np.random.default_rng(0).integers(len(whole))] ^= 1

    change_data(file, flip)


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return open, (self.mark, "w")


def pickled(file: Path, mark: Path | None = None) -> None:
    """Put a file with a pickle in the place of an episode's arrays."""
    payload = Payload(mark or file.parent / "mark")
    with file.open("wb") as opened:
        np.savez(opened, observation=np.array([payload], object))


def pipe(path: Path) -> None:
    """Put a pipe in the place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def contents(out: Path) -> dict[str, bytes]:
    """All files of a directory by name, except those of the times."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != "run.json"
    }


def unfinished(directory: Path, lines: int) -> None:
    """Cut a directory back to the state after a crash at the given number of episodes."""
    file, shard = directory / "episodes.jsonl", directory / "shard.json"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    if shard.exists():
        alter(shard, {"ledger": GONE, "manifest": GONE})
    else:
        (directory / "results.json").unlink()


@dataclass
class Run:
    """An evaluation in the form that comparisons accept."""

    episodes: list[Episode]
    manifest: dict[str, Any] = field(default_factory=dict)


def run(
    returns: Iterable[float], policy: str = "lab.policies.Actor", changed: Any = (), **options: Any
) -> Run:
    """An evaluation with these returns, and with what is changed in its manifest."""
    records = ledger(returns, **options)
    return Run(records, manifest(policy, episodes=len(records), **dict(changed)))


def manifest(policy: str = "lab.policies.Actor", **changed: Any) -> dict[str, Any]:
    """A manifest as an evaluation writes it."""
    return {
        "format": 3,
        "protocol": 2,
        "env": ENV,
        "entries": {"action": ["action"], "observation": ["observation"]},
        "episodes": 100,
        "seeds": {"root": 0},
        "max_episode_steps": None,
        "policy": {"class": policy, "digest": "ab" * 32, "exploration": "deterministic"},
        "inference_batch_size": 16,
        "inference_threads": 1,
        "versions": {"torch": "2.13.0", "torchrl": "0.14.1"},
        "platform": {"system": "Linux"},
        "device": "cpu",
        "git": None,
    } | changed
