"""Reading the files of an evaluation, each checked against the others.

A directory may come from somebody else. Nothing in it is run, and files that contradict each other
are refused: a record's seeds follow from the manifest, the digests of ledger and manifest are in
``results.json``, and those of data that were kept are in the ledger.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType

from tdcollect.display import count_text, one_line
from tdcollect.evaluation.episodes.data import disagreements
from tdcollect.evaluation.ledger.manifest import MIXED, may_be_mixed
from tdcollect.evaluation.ledger.records import FORMAT, Episode, is_count, is_digest
from tdcollect.evaluation.ledger.shards import Shard
from tdcollect.evaluation.ledger.trajectory_files import read_trajectory, trajectory_digest
from tdcollect.seeding import env_seed, policy_seed

MANIFEST, EPISODES, RESULTS, RUN = "manifest.json", "episodes.jsonl", "results.json", "run.json"
REFUSED = "refused.json"
SHARD = "shard.json"
SUITE = "suite.json"
TRAJECTORIES = "trajectories"
RECHECK = "recheck"
"""The entry of the last file, false, of a run that ran no episode once more; else it is absent."""

_KEPT = re.compile("[0-9]{6}|[1-9][0-9]{6,17}")  # as trajectory_name() names a folder
_MOST_EPISODES = 10**9
_EXPLORATIONS = [name.lower() for name in ExplorationType.__members__]


class Problem(NamedTuple):
    """A problem in a file of an evaluation.

    Attributes:
        file: the file.
        text: the problem.
        line: the line, from 1; None if the problem is not in a single line.
    """

    file: Path
    text: str
    line: int | None = None

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        where = self.file if self.line is None else f"line {self.line} of {self.file}"
        return f"{where}: {self.text}"


def read_directory(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Episode]]:
    """Read the manifest and the records of an evaluation, which may be unfinished.

    Returns:
        The manifest, with the present names of entries; and the records, by index.

    Raises:
        FileNotFoundError: if the directory holds no evaluation.
        ValueError: for the first problem, with its file and line.
    """
    root = Path(path)
    manifest = read_manifest(root)
    return manifest, read_records(root, manifest)


def read_records(root: Path, manifest: Mapping[str, Any]) -> list[Episode]:
    """Read the records of an evaluation, by index.

    Raises:
        ValueError: for the first problem, with its file and line.
    """

    def refuse(problem: Problem) -> None:
        raise ValueError(str(problem))

    return sorted(read_ledger(root, manifest, refuse), key=lambda episode: episode.index)


def read_manifest(root: Path) -> dict[str, Any]:
    """Read the manifest of an evaluation.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: for another kind of file, an incomplete one, or one of another format.
    """
    file = root / MANIFEST
    if not file.is_file():
        what = f"has no {MANIFEST}" if root.is_dir() else "is no directory"
        raise FileNotFoundError(
            f"expected the directory of an evaluation, got {root}, which {what}; name the one that "
            "the evaluation was written to"
        )
    found = read_object(file)
    if not isinstance(found.get("protocol"), int) or "episodes" not in found:
        raise ValueError(
            f"expected the manifest of an evaluation, got {file}, which is something else's; name "
            "another directory"
        )
    if found.get("format") != FORMAT:
        raise ValueError(
            f"expected format {FORMAT}, got {found.get('format')!r} in {file}: another version of "
            "tdcollect wrote it; read it with that one"
        )
    for name, accepts in _MANIFEST.items():
        value: Any = found
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not accepts(value):
            raise ValueError(
                f"expected {file} as tdcollect writes it, got {name} {value!r}; ask for the file "
                "as it was, or evaluate again in another directory"
            )
    given = found["seeds"].get("env")
    if given is None:
        return found
    count = number_of_episodes(found)
    if len(given) != count or len({*given}) < count:
        raise ValueError(
            f"expected {file} to have a seed of its own for each of {count_text(count, 'episode')},"
            f" got {len(given)} seeds, {len({*given})} of them distinct; ask for the file as it "
            "was, or evaluate again in another directory"
        )
    return found


def is_finished(root: Path) -> bool:
    """Tell whether an evaluation is finished, so that its ledger has a digest."""
    return (root / RESULTS).exists()


def was_rechecked(root: Path) -> bool | None:
    """Tell whether a finished evaluation or shard ran an episode once more; None if unfinished."""
    found = _last_file(root)
    return found.get(RECHECK) is not False if found else None


def _last_file(root: Path) -> dict[str, Any]:
    """Read the file that finishes an evaluation or a shard; empty if it is unfinished."""
    file = root / (RESULTS if is_finished(root) else SHARD)
    found = read_object(file) if file.exists() else {}
    return found if found.keys() & _DIGESTED.keys() else {}


def refusal_of(root: Path) -> str | None:
    """Return why an evaluation was refused, and what to do; None if it was not."""
    file = root / REFUSED
    if not file.exists():
        return None
    try:
        why = read_object(file).get("reason")
    except ValueError as error:
        return str(error)
    return f"the evaluation was refused: {why}; remove the directory to start anew"


def number_of_episodes(manifest: Mapping[str, Any]) -> int:
    """Return the number of episodes that a manifest asks for."""
    return len(asked_indices(manifest))


def asked_indices(manifest: Mapping[str, Any]) -> Sequence[int]:
    """Return the indices of the episodes that a manifest asks for, in its order."""
    asked: int | list[int] = manifest["episodes"]
    return range(asked) if isinstance(asked, int) else asked


class ShardFile(NamedTuple):
    """The mark of a directory that holds a shard, and not the whole evaluation.

    Attributes:
        shard: the shard.
        digests: the digests of its files by their name in ``results.json``; None until it is
            finished.
    """

    shard: Shard
    digests: Mapping[str, str] | None


def read_shard(root: Path) -> ShardFile | None:
    """Read which shard of an evaluation a directory holds; None if it is no shard's.

    Raises:
        ValueError: for a file that holds something else.
    """
    file = root / SHARD
    if not file.exists():
        return None
    found = read_object(file)
    digests = {name: found[name] for name in _DIGESTED if name in found}
    given = found.get("shard")
    whole = digests.keys() == _DIGESTED.keys() and all(map(is_digest, digests.values()))
    shard = None
    with suppress(ValueError):
        shard = Shard.of(given)
    if shard is None or (digests and not whole):
        raise ValueError(
            f"expected {file} as tdcollect writes it, got shard {given!r} and digests {digests}; "
            "ask for the file as it was, or evaluate again in another directory"
        )
    return ShardFile(shard, digests or None)


def trajectory_path(root: Path, index: int) -> Path:
    """Return the path of the data of an episode."""
    return root / TRAJECTORIES / trajectory_name(index)


def trajectory_name(index: int) -> str:
    """Return the name of the folder with the data of an episode."""
    return f"{index:06d}"


def kept_trajectories(root: Path) -> frozenset[int]:
    """Return the indices of the episodes that have a folder of data; it may hold anything."""
    folder = root / TRAJECTORIES
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return frozenset(int(name) for name in names if _KEPT.fullmatch(name))


def kept_digests(root: Path) -> dict[str, str] | None:
    """Return the digests of the folders with data, by name, as a finished evaluation lists them.

    Returns:
        None if the evaluation, or its shard, is unfinished.

    Raises:
        ValueError: for a list that no evaluation has.
    """
    if not (last := _last_file(root)):
        return None
    found = last.get(TRAJECTORIES, {})
    if not isinstance(found, dict) or not all(
        _KEPT.fullmatch(name) and is_digest(value) for name, value in found.items()
    ):
        file = root / (RESULTS if is_finished(root) else SHARD)
        raise ValueError(
            f"expected {file} to have a digest for each folder in {TRAJECTORIES}, got something "
            "else; ask for the file as it was, or evaluate again in another directory"
        )
    return found


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: for anything else.
    """
    advice = "ask for the file as it was, or remove the directory and evaluate again"
    found: dict[str, Any] = read_json(file, dict, advice)
    return found


def read_json(file: Path, kind: type[dict[str, Any]] | type[list[Any]], advice: str) -> Any:
    """Read a file that holds one JSON value of a kind.

    Raises:
        ValueError: for anything else, with what to do.
    """
    expected = f"expected {file} to hold a JSON {'object' if kind is dict else 'list'}, got"
    if file.exists() and not file.is_file():  # a pipe has no end
        raise ValueError(f"{expected} a thing that is no file; {advice}")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected} something else ({error}); {advice}") from error
    if not isinstance(found, kind):
        raise ValueError(  # noqa: TRY004, the file's content is wrong and no argument's type
            f"{expected} {type(found).__name__}; {advice}"
        )
    return found


def complete_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a journal, except a last one that its writer did not end."""
    if file.exists():
        with file.open("rb") as opened:
            yield from (line for line in opened if line.endswith(b"\n"))


def read_ledger(
    root: Path, manifest: Mapping[str, Any], report: Callable[[Problem], None]
) -> list[Episode]:
    """Read the valid records, in the order of their lines; report all problems."""
    file = root / EPISODES
    for name in (EPISODES, RESULTS, REFUSED, SHARD):  # a pipe has no end, nor has /dev/zero
        if (root / name).exists() and not (root / name).is_file():
            report(Problem(root / name, "it is not a file; ask for the directory as it was"))
            return []
    if (why := refusal_of(root)) is not None:
        report(Problem(root / REFUSED, why))
    if is_finished(root) and (root / SHARD).exists():
        why = f"it marks a shard, and {RESULTS} the whole evaluation: one was added; remove it"
        report(Problem(root / SHARD, why))
    digests = _digests(root, report)
    advice = (
        "ask for the directory as it was, or evaluate again in another one"
        if digests is not None
        else "remove the line, and the same command runs the episode again"
    )
    episode_seeds = _seeds(manifest)
    episodes: dict[int, Episode] = {}
    valid = True
    for line_number, line in enumerate(complete_lines(file), 1):
        wrong = None
        try:
            record = Episode.from_json(line.decode())
        except ValueError as error:
            wrong = str(error)
        else:
            seeds = episode_seeds(record.index)
            if seeds is None:
                wrong = f"the manifest asks for no episode {record.index}"
            elif record.index in episodes:
                wrong = f"episode {record.index} has a record already"
            elif seeds != (record.env_seed, record.policy_seed):
                wrong = (
                    f"expected the seeds {seeds[0]} and {seeds[1]} of episode {record.index}, as "
                    f"the manifest says, got {record.env_seed} and {record.policy_seed}"
                )
        if wrong is None:
            episodes[record.index] = record
        else:
            valid = False
            report(Problem(file, f"{wrong}; {advice}", line_number))
    if valid and digests is not None:
        _check_digests(root, *digests, report)
    return list(episodes.values())


def _digests(root: Path, report: Callable[[Problem], None]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the file with the digests of a finished evaluation or shard, and its content."""
    name = RESULTS if is_finished(root) else SHARD
    try:
        if name == RESULTS:
            return name, read_object(root / name)
        shard = read_shard(root)
    except ValueError as error:
        report(Problem(root / name, str(error)))
        return None
    return None if shard is None or shard.digests is None else (name, shard.digests)


def _check_digests(
    root: Path,
    name: str,
    digests: Mapping[str, Any],
    report: Callable[[Problem], None],
) -> None:
    """Check the files of a finished evaluation or shard against their digests in a file."""
    for entry, of in _DIGESTED.items():
        now = sha256(root / of) if (root / of).exists() else "none, as it is missing"
        if digests.get(entry) != now:
            report(
                Problem(
                    root / of,
                    f"its digest is {now}, and {digests.get(entry)} in {name}: one of the two "
                    "files was altered; ask for the directory as it was, or evaluate again in "
                    "another one",
                )
            )


def read_data(
    root: Path, record: Episode, manifest: Mapping[str, Any], listed: Mapping[str, str] | None
) -> TensorDict:
    """Read the data ``[L]`` that were kept of an episode, and check them against its record.

    Args:
        root: the directory of the evaluation.
        record: the episode's line in the ledger.
        manifest: the manifest of the evaluation.
        listed: as :func:`kept_digests` returns it; None to check the record alone.

    Raises:
        ValueError: if the data are not those of the record, or cannot be read.
    """
    path = trajectory_path(root, record.index)
    data = read_trajectory(path)
    try:
        counted = (manifest.get("returns") or {}).get("rewards")
        found = disagreements(record, data, manifest["entries"], counted)
    except (TypeError, RuntimeError) as error:  # of a dtype or a shape that no episode has
        found = [str(error)]
    if listed is not None and (now := trajectory_digest(path)) != listed.get(path.name):
        then = listed.get(path.name, "none")
        found.append(f"the digest of their files is {now}, in {RESULTS} or {SHARD} {then}")
    if found:
        raise ValueError(
            f"the data kept of episode {record.index} are not those of its record: "
            f"{'; '.join(found)}. Run the episode again instead: replay({record.index})"
        )
    return data


def _seeds(manifest: Mapping[str, Any]) -> Callable[[int], tuple[int, int] | None]:
    """Return a function from index to seeds; None for episodes that are not asked for."""
    asked, root = manifest["episodes"], manifest["seeds"]["root"]
    given = manifest["seeds"].get("env")
    positions: Mapping[int, int] = {}
    if not isinstance(asked, int):
        positions = {index: position for position, index in enumerate(asked)}

    def seeds(index: int) -> tuple[int, int] | None:
        if (index >= asked) if isinstance(asked, int) else (index not in positions):
            return None
        own = env_seed(root, index) if given is None else given[positions.get(index, index)]
        return own, policy_seed(root, index)

    return seeds


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_asked(value: Any) -> bool:
    if isinstance(value, list):
        return _is_list_of_counts(value) and len({*value}) == len(value)
    return is_count(value) and value <= _MOST_EPISODES


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_mixed(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        may_be_mixed(path) and isinstance(values, list) and len(values) > 1
        for path, values in value.items()
    )


# The check of each entry of a manifest.
_MANIFEST: dict[str, Callable[[Any], bool]] = {
    "env": _is_object,
    "env.id": _is_text,
    "episodes": _is_asked,
    "seeds": _is_object,
    "seeds.root": is_count,
    "seeds.env": lambda value: value is None or _is_list_of_counts(value),
    "max_episode_steps": lambda value: value is None or is_count(value),
    "policy": _is_object,
    "policy.class": _is_text,
    "policy.digest": lambda value: value is None or is_digest(value),
    "policy.exploration": lambda value: value in _EXPLORATIONS,
    "policy.mode": lambda value: value in (None, "eval", "train", "mixed"),
    "inference_batch_size": _is_positive,
    "inference_threads": _is_positive,
    "device": _is_text,
    "versions": _is_object,
    "platform": _is_object,
    MIXED: lambda value: value is None or _is_mixed(value),
    "git": lambda value: value is None or _is_object(value),
    "entries.observation": _is_names,
    "entries.action": _is_names,
    "entries.reward": lambda value: value is None or _is_names(value),
    "returns": lambda value: value is None or _is_object(value),
    "returns.rewards": lambda value: value is None or _is_names(value),
}
_DIGESTED = {"ledger": EPISODES, "manifest": MANIFEST}
