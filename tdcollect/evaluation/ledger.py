"""The files of an evaluation as data: its records and its manifest, read and checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tdcollect.check import is_count
from tdcollect.display import count_text, one_line, visible
from tdcollect.seeding import BATCHED_PROTOCOL, batch_seed, env_seed, policy_seed

COMPLETED = "completed"
FAILED = "failed"
LOST = "lost"
CUT = "cut"
"""The status of an episode that ran again, and was cut before its end; in no file."""
GROUPS = "group_returns"
"""The key of the returns of reward entries, in records that have several."""
METRICS = "metrics"
"""The key of the user's own numbers of an episode, in records of an evaluation that has some."""
OBJECT = "object"
"""The key of an argument of the env that JSON does not have; its value is text."""
OPTIONS = "episode_options"
"""The entry of a manifest with the reset options of episodes, if they have some."""
PLACE = "place"
"""The key of an episode's batch and slot, in records of a batched simulator."""
BATCHES = "batches"
"""The entry of a manifest with the slots of a batched simulator, and what runs in each."""
REPEATED = "repeated"
"""The entry of a manifest with what came of the batch that ran twice, once it has."""
PROCESS = "process"
"""The entry of a manifest with the settings of the process; other producers may lack it."""
FRESH_ENVS = "fresh_envs"
"""The entry of a manifest that says whether each episode ran on a new env, once it is known."""
GLOBAL_STREAMS = "global_random_numbers"
"""The entry of a manifest with the origin of draws from the global generators, once some are seen.

Without it, there are none."""
LATER = (REPEATED, FRESH_ENVS, GLOBAL_STREAMS)
"""The entries of a manifest that are only known once episodes run."""
FORMAT = 3
"""Version of the files of an evaluation."""


@dataclass(frozen=True, slots=True)  # there may be millions of them
class Episode:
    """The record of one test episode in the ledger.

    Attributes:
        index: its index in the evaluation, from 0.
        env_seed: the seed that its env was reset with.
        policy_seed: the seed of the policy's random numbers.
        status: ``"completed"``; ``"failed"`` if the env raised at every try; ``"lost"`` if it was
            given up because its workers ended again and again.
        restarts: the number of times that it was started again because the env raised.
        episode_return: the sum of its rewards after transforms, carried in float64 and rounded
            once; None if it did not complete, and so for all that follow.
        length: its number of steps.
        terminated: True if its last step is terminal.
        truncated: True if it was cut off at its last step, by a time limit for example.
        success: ``is_success`` or ``success`` of its last info; None if it has neither.
        digest: SHA-256 of its observations, actions, rewards and flags as they are stored (rewards
            in float32).
        group_returns: the return of each reward entry (``"agents/reward"``), of which
            ``episode_return`` is the mean; None if the only one is ``"reward"``.
        metrics: the metrics that were asked for, by name; None for one that this episode has no
            value of. None if there are none.
        place: of a batched simulator, the ``"batch"``, the ``"slot"`` in it, and ``"nth"``, the
            number of episodes that the slot had in the batch before; None for any other env.
    """

    index: int
    env_seed: int
    policy_seed: int
    status: str = COMPLETED
    restarts: int = 0
    episode_return: float | None = None
    length: int | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    success: bool | None = None
    digest: str | None = None
    group_returns: dict[str, float] | None = field(default=None, hash=False)
    metrics: dict[str, float | None] | None = field(default=None, hash=False)
    place: dict[str, int] | None = field(default=None, hash=False)

    @property
    def completed(self) -> bool:
        """True if the episode ran to its end."""
        return self.status == COMPLETED

    @property
    def numbers(self) -> dict[str, float | None]:
        """Its metrics, and the return of each group of agents under the name of one."""
        groups = (self.group_returns or {}).items()
        return {**{return_name(path): value for path, value in groups}, **(self.metrics or {})}

    @property
    def lost(self) -> bool:
        """True if it was given up because its workers ended."""
        return self.status == LOST

    def __repr__(self) -> str:
        outcome = f"return {self.episode_return}, {self.length} steps"
        if not self.completed:
            outcome = f"{self.restarts} restarts"
        return one_line(
            self,
            str(self.index),
            f"{self.status}, {outcome}",
            f"digest {(self.digest or 'none')[:16]}",
        )

    def to_json(self) -> str:
        """Return the record as one line, keys in a fixed order; floats keep their bits."""
        values = {key: getattr(self, name) for name, key in KEYS.items()}
        more = {name: getattr(self, name) for name in _MORE}
        return json.dumps(values | {key: more[key] for key in _MORE if more[key] is not None})

    @classmethod
    def from_json(cls, line: str) -> Episode:
        """Read a line that :meth:`to_json` wrote; raise ValueError otherwise, with the key."""
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected the record of an episode, got no JSON ({error})") from error
        if not isinstance(told, dict) or told.keys() - {*_MORE} != {*KEYS.values()}:
            raise ValueError(
                f"expected the record of an episode, with the keys {', '.join(KEYS.values())}, "
                f"got {_shortened(line)}"
            )
        ended = told["status"] not in (FAILED, LOST)
        values: dict[str, Any] = {}
        for name, (accepts, expected) in _CHECKS.items():
            key = KEYS.get(name, name)
            values[name] = value = told.get(key)
            if not ended and name not in _ALWAYS:
                accepts, expected = _NONE
            if not accepts(value):
                raise ValueError(f"expected {key} to be {expected}, got {_shortened(value)}")
        return cls(**values)


def ledger_digest(episodes: Iterable[Episode]) -> str:
    """Return the SHA-256 of the records in the order of their index."""
    digest = hashlib.sha256()
    for episode in sorted(episodes, key=lambda episode: episode.index):
        digest.update(episode.to_json().encode() + b"\n")
    return digest.hexdigest()


_CHOICE = re.compile("worst:([1-9][0-9]{0,8})|failed|[0-9]{1,18}(,[0-9]{1,18})*")


def indices_of(which: str, episodes: Sequence[Episode] = ()) -> list[int]:
    """Return the indices of the episodes that a text names, the worst first.

    ``"worst:3"`` is the lowest returns of episodes that completed; ``"failed"`` those whose env
    raised, or said that they were no success; ``"1,5"`` is indices, with or without a record.
    """
    if (choice := _CHOICE.fullmatch(which)) is None:
        raise ValueError(
            f"expected episodes as worst:3, failed, or indices such as 1,5, got {which!r}"
        )
    if which == "failed":
        named = [e for e in episodes if e.status == FAILED or e.success is False]
        return [e.index for e in sorted(named, key=_badness)]
    if choice[1]:
        completed = sorted((e for e in episodes if e.completed), key=_badness)
        return [e.index for e in completed[: int(choice[1])]]
    return sorted({int(index) for index in which.split(",")})


def _badness(episode: Episode) -> tuple[bool, float, int]:
    """Return a key for sorting: no return is the worst, then NaN, then the lowest ones."""
    value = episode.episode_return
    number = -math.inf if value is None or math.isnan(value) else value
    return value is not None, number, episode.index


_MORE = (GROUPS, METRICS, PLACE)  # keys that records of some evaluations have, and attributes
KEYS = {entry.name: entry.name for entry in fields(Episode) if entry.name not in _MORE}
KEYS["episode_return"] = "return"  # a keyword of Python's
"""The key of each attribute of an :class:`Episode` in a ledger's lines."""


_METRIC = re.compile("(?=.{1,100}$)[A-Za-z_][A-Za-z0-9_-]*(/[A-Za-z0-9_-]+)*")


def is_metric_name(name: Any) -> bool:
    """Return whether a metric may have a name, in tables and logs and beside a record's keys."""
    fits = isinstance(name, str) and _METRIC.fullmatch(name) is not None
    return fits and name not in KEYS.values()


def return_name(path: str) -> str:
    """Return the metric that has the return of a reward entry: ``return/red`` of ``red/reward``."""
    return f"return/{path.removesuffix('/reward')}"


def is_digest(value: Any) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


Accepts = Callable[[Any], bool]


def _a(kind: Any) -> Accepts:
    return lambda value: isinstance(value, kind)


def _or_none(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


def _list_of(accepts: Accepts) -> Accepts:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _are_floats(held: Any, *others: type) -> bool:
    return isinstance(held, dict) and bool(held) and {*map(type, held.values())} <= {float, *others}


def _are_metrics(values: Any) -> bool:
    return _are_floats(values, type(None)) and all(map(is_metric_name, values))


def _are_counts(*names: str) -> Accepts:
    """Accept counts of these names, and None."""
    return _or_none(
        lambda value: (
            isinstance(value, dict)
            and value.keys() == {*names}
            and all(map(_COUNT[0], value.values()))
        )
    )


_SEED = (is_count, "an int, and not negative")
_COUNT = (partial(is_count, below=2**63), "an int from 0 to below 2**63")
_BOOL = (_a(bool), "true or false")
_NONE = (lambda value: value is None, "null in an episode that did not complete")
_ALWAYS = {
    "index": _COUNT,
    "env_seed": _SEED,
    "policy_seed": _SEED,
    "status": (
        lambda value: value in (COMPLETED, FAILED, LOST),
        f"{COMPLETED!r}, {FAILED!r} or {LOST!r}",
    ),
    "restarts": _COUNT,
}
_MEASURED = {
    "episode_return": (_a(float), "a float"),
    "length": (partial(is_count, least=1, below=2**63), "a positive int below 2**63"),
    "terminated": _BOOL,
    "truncated": _BOOL,
    "success": (_a(bool | None), "true, false or null"),
    "digest": (is_digest, "a SHA-256 in hexadecimal"),
    GROUPS: (_or_none(_are_floats), "one float per reward entry"),
    METRICS: (_or_none(_are_metrics), "a float or null by name"),
    PLACE: (_are_counts("batch", "slot", "nth"), "three counts, batch, slot and nth"),
}
_CHECKS: dict[str, Any] = {**_ALWAYS, **_MEASURED}


class Batches(NamedTuple):
    """The batches of a simulator whose slots are seeded together: which episode runs where.

    Indices count slot by slot, then the episodes of a slot, then the batches.
    """

    slots: int
    episodes_per_slot: int

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Batches | None:
        """Return those of an evaluation; None if its episodes are numbered."""
        told = manifest.get(BATCHES)
        return None if told is None else cls(told["slots"], told["episodes_per_slot"])

    @property
    def size(self) -> int:
        """The number of episodes in a batch."""
        return self.slots * self.episodes_per_slot

    def place(self, index: int) -> dict[str, int]:
        """Return the place of an episode, as its record has it."""
        batch, at = divmod(index, self.size)
        return {"batch": batch, "slot": at % self.slots, "nth": at // self.slots}

    def indices(self, batch: int) -> range:
        """Return the indices of the episodes of a batch."""
        return range(batch * self.size, (batch + 1) * self.size)

    def seeds(self, root: int, index: int) -> tuple[int, int]:
        """Return the seeds of an episode: that of its batch, and that of its policy."""
        return batch_seed(root, index // self.size), policy_seed(root, index)

    def fit(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether an evaluation asks for whole batches, from the first one on."""
        episodes = manifest["episodes"]
        return isinstance(episodes, int) and episodes % self.size == 0

    def partial(self, indices: Iterable[int]) -> set[int]:
        """Return those of the indices whose batch is not there whole."""
        by_batch: dict[int, set[int]] = {}
        for index in indices:
            by_batch.setdefault(index // self.size, set()).add(index)
        return {i for there in by_batch.values() if len(there) < self.size for i in there}


def repeatability(manifest: Mapping[str, Any]) -> str:
    """Say whether a batched simulator gave the same batch twice."""
    twice, batches = manifest.get(REPEATED), manifest[BATCHES]
    where = f"for {batches['slots']} slots on {batches.get('device')}"
    if twice is None:
        return f"No batch ran twice: it is not known whether episodes are repeatable {where}."
    ran = f"Batch {twice['batch']} ran twice"
    if not twice["differing"]:
        return f"{ran}, and was the same to the bit: repeatable {where}."
    of = f"{twice['differing']} of {count_text(twice['episodes'], 'episode')}"
    return f"{ran}, and {of} differed: not repeatable {where}."


class Shard(NamedTuple):
    """The episodes at every ``shards``-th position of an evaluation, from ``position`` on."""

    position: int
    shards: int

    @classmethod
    def of(cls, value: Any) -> Shard:
        """Return the shard that a pair ``(i, n)`` stands for, checked."""
        if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_count, value)):
            position, shards = map(int, value)
            if position < shards:
                return cls(position, shards)
        raise ValueError(
            "expected shard to be (i, n) with two ints, i from 0 to n - 1, got "
            f"{value!r}; pass (0, 4), (1, 4), (2, 4) and (3, 4) for four shards"
        )

    def select(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the indices of its episodes, out of those of the evaluation."""
        return indices[self.position :: self.shards]

    def __str__(self) -> str:
        return f"shard {self.position}/{self.shards}"


RANDOM = "random actions"
"""The ``policy.class`` of an evaluation without a policy."""


def manifest_entry(manifest: Mapping[str, Any], path: str) -> Any:
    """Return the entry at a path like ``policy.class``, or None."""
    value: Any = manifest
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def policy_name(manifest: Mapping[str, Any]) -> str:
    """Return the name of a policy for tables and titles: of its algorithm, function or class."""
    return str(manifest_entry(manifest, "policy.class") or "policy").rpartition(".")[2]


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the differences of two manifests: the path of each entry, and its two values.

    What is only known once all has run is no difference, nor are settings of the process that one
    of them does not tell.
    """
    untold = {*LATER, PROCESS} - ({PROCESS} & first.keys() & second.keys())
    return [
        difference
        for key in sorted({*first, *second} - untold)
        for difference in leaf_differences(str(key), first.get(key), second.get(key))
    ]


def differences_text(
    unlike: Iterable[tuple[str, Any, Any]], first: str = "there", second: str = "here"
) -> str:
    """Return differences as text, with the places of the first and second values."""
    return "; ".join(f"{path} is {a!r} {first} and {b!r} {second}" for path, a, b in unlike)


def record_differences(first: Episode, second: Episode) -> list[tuple[str, Any, Any]]:
    """Return the differences of two records of one episode; restarts belong to a run."""
    if first == replace(second, restarts=first.restarts):
        return []
    one, other = (json.loads(episode.to_json()) | {"restarts": 0} for episode in (first, second))
    return differences(one, other)


def leaf_differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths at which two JSON values differ, with both values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            yield from leaf_differences(f"{path}.{key}", a.get(key), b.get(key))
    elif a != b and repr(a) != repr(b):  # nan is not equal to itself
        yield visible(path), a, b


MANIFEST, EPISODES, RESULTS, RUN = "manifest.json", "episodes.jsonl", "results.json", "run.json"
REQUEST = "request"  # in the entry of a run: env and policy by name
REFUSED = "refused.json"
SHARD = "shard.json"
SUITE = "suite.json"
RACE = "race.json"
TRAJECTORIES = "trajectories"
KEPT = ".npz"
"""The ending of a file with the data of an episode."""
FILMS = "films"
"""Films of episodes that ran again, and their data if none are kept; no part of an evaluation."""
_ASK = "ask for the file as it was, or evaluate again in another directory"
RECHECK = "recheck"
"""The entry of the last file, false, of a run that ran no episode once more; else it is absent."""
_NUMBER = re.compile("[0-9]{6}|[1-9][0-9]{6,17}")  # as episode_name() has it
_MOST_EPISODES = 10**9
_EXPLORATIONS = ("mode", "median", "mean", "random", "deterministic")  # TorchRL's


class Problem(NamedTuple):
    """A problem in a file of an evaluation; ``line`` is from 1, or None without a single one."""

    file: Path
    text: str
    line: int | None = None

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        where = self.file if self.line is None else f"line {self.line} of {self.file}"
        return f"{where}: {self.text}"


def _altered(file: Path, wanted: str, got: str) -> ValueError:
    """The error for a file of an evaluation that is not as it was written."""
    return ValueError(f"expected {file} {wanted}, got {got}; {_ASK}")


def read_manifest(root: Path) -> dict[str, Any]:
    """Read the manifest of an evaluation."""
    file = root / MANIFEST
    if not file.is_file():
        what = f"has no {MANIFEST}" if root.is_dir() else "is no directory"
        raise FileNotFoundError(
            f"expected the directory of an evaluation, got {root}, which {what}; name the one that "
            "the evaluation was written to"
        )
    manifest = read_object(file)
    batched = manifest.get("protocol") == BATCHED_PROTOCOL
    if not (batched or isinstance(manifest.get("protocol"), int)) or "episodes" not in manifest:
        raise ValueError(
            f"expected the manifest of an evaluation, got {file}, which is something else's; name "
            "another directory"
        )
    check_format(file, manifest, FORMAT)
    for name, accepts in _MANIFEST.items():
        if not accepts(value := manifest_entry(manifest, name)):
            raise _altered(file, "as tdcollect writes it", f"{name} {value!r}")
    seeds, count = manifest["seeds"].get("env"), len(asked_indices(manifest))
    batches = Batches.of(manifest)
    if batched != (batches is not None) or (batches and (seeds or not batches.fit(manifest))):
        wanted = f"the protocol {BATCHED_PROTOCOL!r} and whole {BATCHES}, or another one and none"
        raise _altered(file, f"to have {wanted}", f"{manifest['protocol']!r} and {count} episodes")
    options = manifest_entry(manifest, f"{OPTIONS}.options")
    if options is not None and len(options) != count:
        wanted = f"to have the options of {count_text(count, 'episode')}"
        raise _altered(file, wanted, f"those of {len(options)}")
    if seeds is not None and not len(seeds) == len({*seeds}) == count:
        wanted = f"to have a seed of its own for each of {count_text(count, 'episode')}"
        raise _altered(file, wanted, f"{len(seeds)} seeds, {len({*seeds})} of them distinct")
    return manifest


def check_format(file: Path, content: Mapping[str, Any], known: int) -> None:
    """Refuse what another version of the package wrote."""
    if content.get("format") != known:
        raise ValueError(
            f"expected format {known}, got {content.get('format')!r} in {file}: another version of "
            "tdcollect wrote it; read it with that one"
        )


def is_finished(root: Path) -> bool:
    """Return whether an evaluation is finished, so that its ledger has a digest."""
    return (root / RESULTS).exists()


def refusal_of(root: Path) -> str | None:
    """Return why an evaluation was refused, and what to do; None if it was not."""
    if not (root / REFUSED).exists():
        return None
    try:
        why = read_object(root / REFUSED).get("reason")
    except ValueError as error:
        return str(error)
    return f"the evaluation was refused: {why}; remove the directory to start again"


def asked_indices(manifest: Mapping[str, Any]) -> Sequence[int]:
    """Return the indices of the episodes that a manifest asks for, in its order."""
    episodes: int | list[int] = manifest["episodes"]
    return range(episodes) if isinstance(episodes, int) else episodes


def options_by_index(manifest: Mapping[str, Any]) -> dict[int, Any]:
    """Return the reset options of episodes by index; empty if they have none."""
    listed = manifest_entry(manifest, f"{OPTIONS}.options")
    return {} if listed is None else dict(zip(asked_indices(manifest), listed, strict=True))


def trajectory_path(root: Path, index: int, folder: str = TRAJECTORIES) -> Path:
    """Return the path of the data of an episode."""
    return root / folder / trajectory_name(index)


def film_path(root: Path, index: int) -> Path:
    """Return the path of the film of an episode."""
    return root / FILMS / f"{episode_name(index)}.mp4"


def trajectory_name(index: int) -> str:
    """Return the name of the file with the data of an episode."""
    return episode_name(index) + KEPT


def episode_name(index: int) -> str:
    """Return the name of an episode, as files of it have it before their ending."""
    return f"{index:06d}"


def kept_trajectories(root: Path, folder: str = TRAJECTORIES, ending: str = KEPT) -> frozenset[int]:
    """Return the indices of the episodes that have a file of data; it may hold anything."""
    paths = (root / folder).iterdir() if (root / folder).is_dir() else ()
    names = (path.name for path in paths)
    return frozenset(int(name.split(".")[0]) for name in names if _is_of_episode(name, ending))


def _is_of_episode(name: str, ending: str) -> bool:
    number, dot, rest = name.partition(".")
    return dot + rest == ending and _NUMBER.fullmatch(number) is not None


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    advice = "ask for the file as it was, or remove the directory and evaluate again"
    content: dict[str, Any] = read_json(file, dict, advice)
    return content


def read_json(file: Path, kind: type[dict[str, Any]] | type[list[Any]], advice: str) -> Any:
    """Read a file that holds one JSON value of a kind."""
    expected = f"expected {file} to hold a JSON {'object' if kind is dict else 'list'}, got"
    if file.exists() and not file.is_file():  # a pipe has no end
        raise ValueError(f"{expected} a thing that is no file; {advice}")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected} something else ({error}); {advice}") from error
    if not isinstance(content, kind):
        raise ValueError(  # noqa: TRY004, the file's content is wrong and no argument's type
            f"{expected} {type(content).__name__}; {advice}"
        )
    return content


def complete_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a journal, except a last one that its writer did not end."""
    if file.exists():
        with file.open("rb") as opened:
            yield from (line for line in opened if line.endswith(b"\n"))


class Files(NamedTuple):
    """The files of an evaluation, which may be unfinished, or of a shard of it.

    The manifest is that of the whole evaluation. ``last`` is the content of the file that finishes
    it, with the digests of others; None if it is unfinished.
    """

    root: Path
    manifest: dict[str, Any]
    episodes: list[Episode]
    shard: Shard | None = None
    last: Mapping[str, Any] | None = None

    @property
    def own(self) -> Sequence[int]:
        """The indices of the episodes that it should have."""
        indices = asked_indices(self.manifest)
        return indices if self.shard is None else self.shard.select(indices)

    @property
    def kept(self) -> dict[str, str] | None:
        """The digests of the files with data, by name; None if it is unfinished."""
        return None if self.last is None else self.last.get(TRAJECTORIES, {})

    @property
    def rechecked(self) -> bool | None:
        """True if it ran an episode once more; None if it is unfinished."""
        return None if self.last is None else self.last.get(RECHECK) is not False


def _refuse(problem: Problem) -> None:
    raise ValueError(str(problem))


def read_directory(
    path: str | os.PathLike[str], report: Callable[[Problem], None] = _refuse
) -> Files:
    """Read the files of an evaluation or a shard, with the records that are valid.

    ``report`` is told of each problem but the manifest's, which is raised.
    """
    root = Path(path)
    manifest = read_manifest(root)
    if (root / EPISODES).exists() and not (root / EPISODES).is_file():  # a pipe has no end
        report(Problem(root / EPISODES, "it is not a file; ask for the directory as it was"))
        return Files(root, manifest, [])
    if (why := refusal_of(root)) is not None:
        report(Problem(root / REFUSED, why))
    ending = _last_file(root)
    if ending.name == RESULTS and (root / SHARD).exists():
        why = f"it marks a shard, and {RESULTS} the whole evaluation: one was added; remove it"
        report(Problem(root / SHARD, why))
    shard, last = None, None
    try:
        shard, last = read_last(root)
    except ValueError as error:
        report(Problem(ending, str(error)))
    whole = "ask for the directory as it was, or evaluate again in another one"
    line_advice = "remove the line, and the same command runs the episode again"
    episodes: dict[int, Episode] = {}
    check = _record_check(manifest, episodes)
    valid = True
    for line_number, line in enumerate(complete_lines(root / EPISODES), 1):
        try:
            record = Episode.from_json(line.decode())
            check(record)
            episodes[record.index] = record
        except ValueError as error:
            valid = False
            text = f"{error}; {line_advice if last is None else whole}"
            report(Problem(root / EPISODES, text, line_number))
    if valid and last is not None:
        for entry, name in DIGESTED.items():
            now = sha256(root / name) if (root / name).exists() else "none, as it is missing"
            if (then := last.get(entry)) != now:
                why = f"its digest is {now}, and {then} in {ending.name}: one of the two files was"
                report(Problem(root / name, f"{why} altered; {whole}"))
    return Files(root, manifest, [episodes[index] for index in sorted(episodes)], shard, last)


def _last_file(root: Path) -> Path:
    """Return the file that finishes an evaluation, or that marks a shard."""
    return root / (RESULTS if is_finished(root) else SHARD)


def read_last(root: Path) -> tuple[Shard | None, Mapping[str, Any] | None]:
    """Read the last file of an evaluation, or the mark of a shard, as :class:`Files` has them."""
    file = _last_file(root)
    if not file.exists():
        return None, None
    content, shard = read_object(file), None
    digests = {name: content[name] for name in DIGESTED if name in content}
    if file.name == SHARD:
        with suppress(ValueError):
            shard = Shard.of(content.get("shard"))
        whole = digests.keys() == DIGESTED.keys() and all(map(is_digest, digests.values()))
        if shard is None or (digests and not whole):
            got = f"shard {content.get('shard')!r} and digests {digests}"
            raise _altered(file, "as tdcollect writes it", got)
    data = content.get(TRAJECTORIES, {})
    if not isinstance(data, dict) or not all(
        _is_of_episode(name, KEPT) and is_digest(value) for name, value in data.items()
    ):
        wanted = f"to have a digest for each file in {TRAJECTORIES}"
        raise _altered(file, wanted, "something else")
    return shard, None if shard is not None and not digests else content


def _record_check(
    manifest: Mapping[str, Any], episodes: Container[int]
) -> Callable[[Episode], None]:
    """Return a function that refuses records not asked for, there already, or of other seeds."""
    indices, root = asked_indices(manifest), manifest["seeds"]["root"]
    there = indices if isinstance(indices, range) else frozenset(indices)
    env_seeds = manifest["seeds"].get("env")
    own = {} if env_seeds is None else dict(zip(indices, env_seeds, strict=True))
    named = (manifest.get(METRICS) or {}).keys()
    batches = Batches.of(manifest)

    def check(record: Episode) -> None:
        index = record.index
        if index not in there:
            raise ValueError(f"the manifest asks for no episode {index}")
        if index in episodes:
            raise ValueError(f"episode {index} has a record already")
        if record.completed and (record.metrics or {}).keys() != named:
            raise ValueError(
                f"expected the metrics {sorted(named)} of episode {index}, as the manifest says, "
                f"got {sorted(record.metrics or {})}"
            )
        place = None if batches is None else batches.place(index)
        if record.place != place:
            raise ValueError(f"expected {PLACE} {place} of episode {index}, got {record.place}")
        seeds = env_seed(root, index) if env_seeds is None else own[index], policy_seed(root, index)
        if batches is not None:
            seeds = batches.seeds(root, index)
        if seeds != (record.env_seed, record.policy_seed):
            raise ValueError(
                f"expected the seeds {seeds[0]} and {seeds[1]} of episode {index}, as the "
                f"manifest says, got {record.env_seed} and {record.policy_seed}"
            )

    return check


def _are_options(value: Any) -> bool:
    return isinstance(value, Mapping) and _list_of(_or_none(_is_object))(value.get("options"))


def _are_batches(value: Any) -> bool:
    counted = isinstance(value, Mapping) and all(is_count(value.get(n), 1) for n in Batches._fields)
    return counted and str(value.get("device")).isprintable()


def _is_asked(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_count, value)) and len({*value}) == len(value)
    return is_count(value) and value <= _MOST_EPISODES


_is_object, _is_text, _is_names = _a(Mapping), _a(str), _list_of(_a(str))
_is_positive = partial(is_count, least=1)
# The check of each entry of a manifest.
_MANIFEST: dict[str, Accepts] = {
    "env.id": _is_text,
    "env.kwargs": _or_none(_is_object),
    "env.transforms": _or_none(_is_names),
    "episodes": _is_asked,
    "seeds.root": is_count,
    "seeds.env": _or_none(_list_of(is_count)),
    "max_episode_steps": _or_none(is_count),
    "policy.class": _is_text,
    "policy.digest": _or_none(is_digest),
    "policy.exploration": lambda value: value in _EXPLORATIONS,
    "policy.mode": lambda value: value in (None, "eval", "train", "mixed"),
    "inference_batch_size": _is_positive,
    "inference_threads": _is_positive,
    "device": _is_text,
    "versions": _is_object,
    "platform": _is_object,
    PROCESS: _or_none(_is_object),
    "git": _or_none(_is_object),
    "entries.observation": _is_names,
    "entries.action": _is_names,
    "entries.overwritten": _or_none(_is_names),
    "entries.reward": _or_none(_is_names),
    "returns": _or_none(_is_object),
    "returns.rewards": _or_none(_is_names),
    OPTIONS: _or_none(_are_options),
    METRICS: _or_none(lambda value: _is_object(value) and all(map(is_metric_name, value))),
    BATCHES: _or_none(_are_batches),
    REPEATED: _are_counts("batch", "episodes", "differing"),
    FRESH_ENVS: _a(bool | None),
    GLOBAL_STREAMS: _or_none(_is_text),
}
DIGESTED = {"ledger": EPISODES, "manifest": MANIFEST}
