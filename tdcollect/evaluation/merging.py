"""Merging the shards of an evaluation into the directory that one process would have written.

Shards may come from somebody else. They are read and checked as any evaluation is, nothing in them
is run, and nothing of them is changed. All is checked before the first file is written.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tdcollect.display import count_text, listed_text
from tdcollect.evaluation import ledger, step_files
from tdcollect.evaluation.directory import (
    Directory,
    check_data,
    check_directory,
    check_report_extras,
    read_runs,
)
from tdcollect.evaluation.episodes.data import POLICY_ADVICE, Finished, Steps, unlike
from tdcollect.evaluation.result import EvaluationResult, finish
from tdcollect.files import write_atomically, write_json


def merge(
    directories: Iterable[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
) -> EvaluationResult:
    """Merge the shards of an evaluation, as ``evaluate(..., shard=(i, n))`` writes them.

    The merged directory is byte for byte that of one process (but for ``run.json``, which has the
    times of all shards). Nothing of the shards is changed; data that were kept are copied.
    Interrupted, the same call ends with the same files; done already, it finds them done.

    Args:
        directories: the ``output_dir`` of each shard, in any order. Shards may overlap, and have
            been cut in several ways, if they are complete together.
        output_dir: the directory of the merged evaluation.

    Returns:
        The result of the whole evaluation.

    Raises:
        TypeError, ValueError: for shards of different evaluations, naming the difference; for
            missing, unfinished and altered ones; for an episode that is not the same in two of
            them; and for an ``output_dir`` that holds something else.

    Examples:
        >>> result = merge(["runs/shard-0", "runs/shard-1"], "runs/test")
        >>> print(result.summary())
    """
    paths, output = _checked_paths(directories, output_dir)
    check_report_extras("merge(...)")
    parts, absent = [], []
    for path in paths:
        try:
            parts.append(ledger.read_directory(path))
        except FileNotFoundError:  # a job never started
            absent.append(path)
    manifest = _merged_manifest(parts)
    _check_complete(parts, absent)
    for problem in (problem for part in parts for problem in step_files.problems(part)):
        raise ValueError(str(problem))
    episodes, data = _merged_episodes(parts), _kept_data(parts)
    witness = _merged_witness(parts, manifest)
    with closing(Directory(output, manifest)) as directory:
        for other in _unlike(directory, manifest, episodes, data):
            raise ValueError(
                f"expected {directory.path} to be empty, or to hold this merged evaluation, but "
                f"{other}; choose another directory"
            )
        directory.begin()
        there = {episode.index for episode in directory.episodes}
        for index, source in data.items():
            if index not in there:
                path = ledger.trajectory_path(directory.path, index)
                write_atomically(path, source.read_bytes())
        done = there if directory.was_finished else set()
        for index, steps in _kept_steps(parts, episodes):
            if index not in done:
                directory.steps.add(index, steps)
        before = directory.witness if directory.was_finished else None
        if witness is not None and (before is None or before.record != witness.record):
            directory.keep_witness(witness)
        result = EvaluationResult(directory.manifest, episodes, directory.path)
        if not read_runs(output):  # first, as the report shows what they name
            runs = [run for part in parts for run in read_runs(part.root)]
            runs.sort(key=lambda run: json.dumps(run, sort_keys=True))
            write_json(output / ledger.RUN, runs)
        finish(directory, result, all(part.rechecked for part in parts))
    return result


def _checked_paths(
    directories: Iterable[str | os.PathLike[str]], output_dir: str | os.PathLike[str]
) -> tuple[list[Path], Path]:
    if isinstance(directories, (str, os.PathLike)):
        raise TypeError(f"expected a list of directories to merge, got {directories!r} alone")
    paths, output = [Path(directory) for directory in directories], Path(output_dir)
    if not paths:
        raise ValueError("expected directories to merge, got none")
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise ValueError(f"expected directories that differ, got {path} twice")
        seen[path.resolve()] = path
        if output.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"expected an output_dir outside of the directories to merge, got {output}, which "
                f"lies in {path}; choose another"
            )
    check_directory(output)
    if (shard := ledger.read_last(output)[0]) is not None:
        raise ValueError(
            f"expected output_dir to be empty, or to hold the merged evaluation, got {output}, "
            f"which holds {shard}; choose another"
        )
    return paths, output


def _merged_manifest(parts: Sequence[ledger.Files]) -> dict[str, Any]:
    """Return the manifest of all parts, the same for any order of them."""
    if not parts:
        return {}
    by_text = {json.dumps(part.manifest, sort_keys=True): part for part in reversed(parts)}
    first, *others = (by_text[text] for text in sorted(by_text))
    merged = dict(first.manifest)
    for name in ledger.LATER:  # of which a shard that is short may know nothing
        known = [part.manifest[name] for part in parts if name in part.manifest]
        if known:
            merged[name] = known[0]
    for other in others:
        if unlike := ledger.differences(first.manifest, other.manifest):
            texts = ledger.differences_text(unlike, f"in {first.root}", f"in {other.root}")
            raise ValueError(
                f"expected shards of one evaluation, but {texts}; merge only shards of one "
                "evaluation, run under the same versions and on machines of one kind"
            )
    return merged


def _check_complete(parts: Sequence[ledger.Files], absent: Sequence[Path]) -> None:
    """Refuse parts that are unfinished, or lack episodes together; name all that is missing."""
    lacks = [f"{path} holds no evaluation" for path in absent]
    for part in parts:
        there = {episode.index for episode in part.episodes}
        lacking = sorted(index for index in part.own if index not in there)
        name = str(part.root) if part.shard is None else f"{part.shard} in {part.root}"
        if lacking:
            lacks.append(f"{name} is unfinished: it lacks {_named('episode', lacking)}")
        elif part.last is None:
            lacks.append(f"{name} is unfinished: it has all episodes, and no digest of them")
    if parts:
        own = {index for part in parts for index in part.own}
        missing = [index for index in ledger.asked_indices(parts[0].manifest) if index not in own]
        if missing:
            lacks.append(f"none has {_missing(missing, parts)}")
    if lacks:
        raise ValueError(
            f"expected shards that are finished, and complete together, but {'; '.join(lacks)}. "
            "Run the commands of these shards (again): each goes on where it was; then merge"
        )


def _missing(missing: Sequence[int], parts: Sequence[ledger.Files]) -> str:
    """Name missing episodes, and the shards that they are if all parts were cut alike."""
    there = {part.shard for part in parts if part.shard is not None}
    episodes, cuts = _named("episode", sorted(missing)), {shard.shards for shard in there}
    if len(cuts) != 1:
        return episodes
    (count,) = cuts
    most = min(count, len(ledger.asked_indices(parts[0].manifest)))
    lost = [f"{at}/{count}" for at in range(most) if ledger.Shard(at, count) not in there]
    return f"{_named('shard', lost)}: {episodes}"


def _named(noun: str, items: Sequence[Any]) -> str:
    return f"{noun}{'s' * (len(items) > 1)} {listed_text(items)}"


def _merged_episodes(parts: Sequence[ledger.Files]) -> list[ledger.Episode]:
    """Return the records of all parts by index; of several, that with the fewest restarts.

    One that is not lost comes before one that is.
    """
    best: dict[int, tuple[ledger.Episode, Path]] = {}
    for part in parts:
        for episode in part.episodes:
            other, holder = best.setdefault(episode.index, (episode, part.root))
            unlike = ledger.record_differences(other, episode)
            if unlike and not (other.lost or episode.lost):
                name, a, b = min(unlike, key=lambda one: one[0] != "digest")
                raise ValueError(
                    f"episode {episode.index} is not the same in {holder} and in {part.root}: its "
                    f"{name} is {a!r} and {b!r}. The env or the policy does not give the same "
                    "episode for the same seeds, or one of the two was altered: run tdcollect "
                    "doctor on the env, and this episode again with tdcollect replay"
                )
            if (episode.lost, episode.restarts) < (other.lost, other.restarts):
                best[episode.index] = episode, part.root
    return [best[index][0] for index in sorted(best)]


def _kept_data(parts: Sequence[ledger.Files]) -> dict[int, Path]:
    """Return the directory of each completed episode's data, checked; empty if none has data."""
    sources: dict[int, Path] = {}
    lacking: list[tuple[Path, int]] = []
    for part in parts:
        for episode in (episode for episode in part.episodes if episode.completed):
            data = ledger.trajectory_path(part.root, episode.index)
            if data.exists():
                check_data(part.root, episode, part.manifest, part.kept)
                sources.setdefault(episode.index, data)
            else:
                lacking.append((part.root, episode.index))
    if sources and lacking:
        path, index = lacking[0]
        having = next(iter(sources.values())).parents[1]
        raise ValueError(
            f"expected all shards to have the data of their episodes, or none, but {having} has "
            f"data, and {path} has none of {count_text(len(lacking), 'episode')} (episode {index} "
            "first); run its shard again in another directory with keep_trajectories=True "
            "(--keep-trajectories), or remove the folders `trajectories` from copies of the others"
        )
    return sources


def _kept_steps(
    parts: Sequence[ledger.Files], episodes: Sequence[ledger.Episode]
) -> Iterator[tuple[int, Steps]]:
    """Yield the steps that were kept of each episode, once; none if a part has none."""
    having = [part for part in parts if step_files.digests(part.root)]
    if len(having) < sum(any(e.completed for e in part.episodes) for part in parts):
        if having:
            warnings.warn(
                f"{having[0].root} has the steps of its episodes, and other shards have none: the "
                "merged evaluation has none; run all with keep_steps=True to keep them",
                stacklevel=3,
            )
        return
    left = {episode.index for episode in episodes if episode.completed}
    for part in parts:
        for path in step_files.paths(part.root):
            for index, steps in step_files.read_block(path).items():
                if index in left:
                    left.remove(index)
                    yield index, steps


def _merged_witness(parts: Sequence[ledger.Files], manifest: Mapping[str, Any]) -> Finished | None:
    """Return the witness of the whole: the first listed one; all parts must agree on it."""
    place = {index: at for at, index in enumerate(ledger.asked_indices(manifest))}
    by_index: dict[int, tuple[Finished, Path]] = {}
    for part in parts:
        witness = step_files.read_witness(part.root)
        if witness is None:
            continue
        index = witness.record.index
        before, root = by_index.setdefault(index, (witness, part.root))
        if (differs := unlike(before, witness)) is not None:
            raise ValueError(
                f"expected shards of one evaluation, but episode {index}, which each of them ran, "
                f"is not the same in {root} and in {part.root}: {differs}. Their envs or policies "
                f"differ: merge only shards of one evaluation. If they do not, {POLICY_ADVICE}"
            )
        if before.record.status == ledger.CUT:  # its own shard knows how it ended
            by_index[index] = witness, part.root
    return by_index[min(by_index, key=place.__getitem__)][0] if by_index else None


def _unlike(
    directory: Directory,
    manifest: dict[str, Any],
    episodes: Sequence[ledger.Episode],
    data: Mapping[int, Path],
) -> Iterator[str]:
    """Yield what an output directory holds but for the beginning or all of this merge."""
    by_index = {episode.index: episode for episode in episodes}
    if not data and (directory.path / ledger.TRAJECTORIES).exists():
        yield "it holds data of episodes, and the shards have none"
    if directory.manifest != manifest:
        yield "its manifest is another one"
    for episode in directory.episodes:
        if by_index[episode.index].to_json() != episode.to_json():
            yield f"episode {episode.index} is not the same there"
        elif episode.index in data:
            if not ledger.trajectory_path(directory.path, episode.index).exists():
                yield f"it lacks the data of episode {episode.index}"
            check_data(directory.path, episode, manifest, directory.kept)
