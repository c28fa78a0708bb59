"""Finished episodes out of blocks of steps: their returns, records, digests and data."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tdcollect import keys
from tdcollect.display import listed_text
from tdcollect.envs.process.values import Array, info_at
from tdcollect.evaluation.ledger import CUT, FAILED, Episode, record_differences
from tdcollect.keys import Key, as_path, entry_path, key_of, name_of, under_next

if TYPE_CHECKING:  # what is kept is read and checked without them
    import torch
    from tensordict import TensorDict
    from torchrl.envs import EnvBase

    from tdcollect.collect.episodes import Block, Piece, Start
    from tdcollect.envs.spaces import TextLeaf

# --- the steps of an episode, small enough to keep: actions, rewards, and one number of all else
#
# They tell two runs of one episode apart, step by step. Each is a structured array ``[L]`` whose
# fields are named for what they hold, in the order in which one thing of a step leads to the next:
#
# - ``observation/NAME`` and ``output/NAME``: float64, the *sketch* of what the policy saw, and of
#   what else it gave (logits, a value, a hidden state). A sketch is the product of the entry with a
#   fixed vector, so that entries that differ have sketches that differ;
# - ``action/NAME``: the action as the policy gave it; ``env_action/NAME``: as the env got it, where
#   it is under transforms that are known;
# - ``reward/NAME``: float64, after transforms; ``[agents]`` where there are several.

Steps: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
"""A structured array ``[L]``, one row per step."""

MOST = 1000
"""The steps of an episode that runs again, and that a witness has, at most."""

OBSERVATION, OUTPUT, ACTION, ENV_ACTION, REWARD = (
    "observation",
    "output",
    "action",
    "env_action",
    "reward",
)
_SKETCH_KEY = 7  # of the seeds from root 0 that no episode has
_AT_ONCE = 2**18  # numbers that are widened to float64 at a time
_UNNAMED = re.compile(r"mask_\d{9,}")  # TorchRL names a dropout's mask by a place in memory


@lru_cache(maxsize=64)
def _weights(size: int) -> Array:
    """The fixed vector ``[size]`` of float64 numbers in [-1, 1)."""
    words = np.random.SeedSequence(0, spawn_key=(_SKETCH_KEY,)).generate_state(size, np.uint32)
    return words * 2.0**-31 - 1


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def sketch(rows: Array) -> Array:
    """Return the sketch of each row of an entry ``[n, t, ...]``, float64 ``[n, t]``.

    The sum over a row does not depend on the other rows, as a matrix product's would. That of a
    text is the first 53 bits of its SHA-256, as a number.
    """
    lead = rows.shape[:2]
    if rows.dtype == object:
        digests = (hashlib.sha256(utf8(text)).digest() for text in rows.reshape(-1))
        numbers = [int.from_bytes(digest[:7]) >> 3 for digest in digests]
        return np.array(numbers, np.float64).reshape(lead)
    if rows.dtype.kind == "c":
        rows = rows.view(rows.real.dtype)
    flat = rows.reshape(lead[0] * lead[1], -1)
    weights = _weights(flat.shape[1])
    sums = np.empty(len(flat))
    at_once = max(1, _AT_ONCE // max(1, flat.shape[1]))
    with np.errstate(all="ignore"):  # infinite entries have the sketches that they have
        for at in range(0, len(flat), at_once):
            (flat[at : at + at_once] * weights).sum(-1, out=sums[at : at + at_once])
    return sums.reshape(lead)


def is_sketched(key: Key) -> bool:
    """Return whether an entry of a step has a sketch: all but flags, ids and unstable names."""
    bookkeeping = key == keys.TRAJ_IDS or name_of(key) in keys.FLAGS or keys.is_next(key)
    return not (bookkeeping or _UNNAMED.fullmatch(name_of(key)))


@lru_cache(maxsize=64)
def _dtype(kinds: tuple[Any, ...]) -> np.dtype[np.void]:
    """The dtype of these fields; one for all episodes, as it takes more memory than a step."""
    return np.dtype([*kinds])


def from_columns(columns: Mapping[str, Array]) -> Steps:
    """Return steps whose fields are these arrays ``[L, ...]``."""
    kinds = [(name, array.dtype, array.shape[1:]) for name, array in columns.items()]
    steps = np.empty(len(next(iter(columns.values()))), _dtype(tuple(kinds)))
    for name, array in columns.items():
        steps[name] = array
    return steps


class StepDifference(NamedTuple):
    """The first step, from 0, and the field in which two runs of an episode differ.

    ``length`` is a field, too: one of the two ended at the step before.
    """

    step: int
    field: str
    first: Any
    second: Any

    @property
    def of_policy(self) -> bool:
        """True if the policy saw the same at the step, and did another thing."""
        return self.field.startswith((OUTPUT, ACTION))

    @property
    def size(self) -> float:
        """Its size, as a share of the larger value; infinite of lengths, and of unlike shapes."""
        one, other = np.asarray(self.first, float), np.asarray(self.second, float)
        if self.field == "length" or one.shape != other.shape:
            return np.inf
        with np.errstate(all="ignore"):
            size = np.abs(one - other).max() / max(np.abs(one).max(), np.abs(other).max())
        return float(np.nan_to_num(size, nan=np.inf))

    def __str__(self) -> str:
        name = self.field.removeprefix(f"{OUTPUT}/")
        a, b = (_shown(value) for value in (self.first, self.second))
        return f"at step {self.step}, {name} is {a} and {b}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def first_difference(first: Steps, second: Steps, cut: bool = False) -> StepDifference | None:
    """Return the first difference of two runs of an episode in the fields that both have.

    ``cut``: they may end at unlike steps, as one or both were cut there.
    """
    common = min(len(first), len(second))
    differences: list[tuple[int, int, str]] = []
    names = [name for name in first.dtype.names or () if name in (second.dtype.names or ())]
    for place, name in enumerate(names):
        one, other = first[name][:common], second[name][:common]
        if one.dtype != other.dtype or one.shape != other.shape:
            differences.append((0, place, name))
        elif (rows := np.flatnonzero(_unlike_rows(one, other))).size:
            differences.append((int(rows[0]), place, name))
    if differences:
        step, _, name = min(differences)
        values = [steps[name][step].tolist() if common else None for steps in (first, second)]
        return StepDifference(step, name, *values)
    if len(first) != len(second) and not cut:
        return StepDifference(common, "length", len(first), len(second))
    return None


def policy_difference(first: Steps, second: Steps) -> tuple[int, StepDifference | None]:
    """Compare what policies did in two envs, as long as they saw the same.

    Returns:
        The number of steps from the first one on in which all observations are equal; and the first
        of these in which something else that the policies gave is not, if there is one.
    """
    names = [*(first.dtype.names or ())]
    observed = [name for name in names if name.startswith(f"{OBSERVATION}/")]
    acted = [name for name in names if name.startswith((f"{OUTPUT}/", f"{ACTION}/"))]
    if not observed or any(name not in (second.dtype.names or ()) for name in observed):
        return 0, None
    unlike = first_difference(first[observed], second[observed], cut=True)
    alike = min(len(first), len(second)) if unlike is None else unlike.step
    if not alike:
        return 0, None
    return alike, first_difference(first[acted][:alike], second[acted][:alike], cut=True)


def _unlike_rows(one: Array, other: Array) -> Array:
    """Mark the rows ``[L]`` that differ in a bit."""
    size = one.dtype.itemsize * int(np.prod(one.shape[1:], dtype=np.int64))
    if not size or not len(one):
        return np.zeros(len(one), bool)
    a, b = (np.ascontiguousarray(rows).view(np.uint8).reshape(-1, size) for rows in (one, other))
    return (a != b).any(-1)


def fields_under(steps: Steps, kind: str) -> Iterator[str]:
    return (name for name in steps.dtype.names or () if name.startswith(f"{kind}/"))


def field_of(kind: str, key: Key | str) -> str:
    return f"{kind}/{entry_path(key)}"


# --- what is recorded of an episode: its return, metrics and digest

COMBINED = "mean over the agents of a group, then over groups"
"""The rule by which several rewards of a step make one return, as the manifest says it."""


class Returns:
    """The reward entries of an env, and how they make a return.

    The only entry ``"reward"`` with one value per step is summed. Elsewhere the return of an entry
    (of a group of agents, say) is the mean over its values (the agents) of their sums over the
    episode, and the return of the episode is the mean over entries.
    """

    def __init__(self, env: EnvBase, chosen: Sequence[str] | None = None):
        self.entries: list[Key] = sorted(env.reward_keys, key=entry_path)
        paths = [*map(entry_path, self.entries)]
        if not paths:
            raise ValueError(
                f"expected an env with a reward, of which returns are made, got a "
                f"{type(env).__name__} without; append a transform that writes one"
            )
        if unknown := sorted({*(chosen or ())} - {*paths}):
            raise ValueError(
                f"expected reward_keys among the env's, {', '.join(paths)}, got "
                f"{', '.join(unknown)}"
            )
        self.counted: list[Key] = self.entries
        if chosen is not None:
            self.counted = [key for key in self.entries if entry_path(key) in chosen]
        shape = env.full_reward_spec_unbatched[self.entries[0]].shape
        self.is_plain = self.entries == [keys.REWARD] and shape.numel() == 1

    def described(self) -> dict[str, Any]:
        """Return the entry of the manifest, which has none for a plain return."""
        return {"rewards": [entry_path(key) for key in self.counted], "combined": COMBINED}


def combined(rewards: Mapping[str, np.ndarray[Any, Any]]) -> tuple[float, dict[str, float]]:
    """Return an episode's return, and that of each reward entry."""
    returns = {path: exact_sum(values) / values.shape[1] for path, values in rewards.items()}
    return exact_sum(np.array([*returns.values()])) / len(returns), returns


def exact_sum(rewards: np.ndarray[Any, Any]) -> float:
    """Return the sum of float64 values, rounded once; infinite or NaN if it has no other."""
    rewards = rewards.reshape(-1)
    odd = rewards[~np.isfinite(rewards)]
    if odd.size:
        return sum(odd.tolist())
    try:
        return math.fsum(rewards.tolist())
    except OverflowError:  # maybe of a partial sum only
        return math.fsum((rewards * 2.0**-64).tolist()) * 2.0**64


_FLAGS = ((keys.NEXT, keys.TERMINATED), (keys.NEXT, keys.TRUNCATED))
_EXACT = (keys.NEXT, keys.EXACT_REWARD)
_SENT = (keys.NEXT, keys.SENT)  # the parent of actions as the env got them
SUCCESS = ("is_success", "success")
_FLAG_PATHS = [entry_path(key) for key in _FLAGS]


INFO = "info:"
_RULES: dict[str, Callable[[np.ndarray[Any, Any]], float]] = {
    "sum": exact_sum,
    "last": lambda values: float(values[-1]),
    "max": lambda values: float(values.max()),
}


def info_and_rule(text: Any) -> tuple[str, str]:
    """Return the info that a metric is made of, and how: ``("cost", "sum")`` for ``info:cost``."""
    name, _, rule = str(text).removeprefix(INFO).partition(":")
    if not str(text).startswith(INFO) or not name or (rule or "sum") not in _RULES:
        raise ValueError(
            "expected a metric to be 'info:NAME' for the sum over an episode's steps, "
            "'info:NAME:last', 'info:NAME:max', 'return/GROUP' or 'return/GROUP/AGENT' (length, "
            f"success), or a function of the episode's data, got {text!r}"
        )
    return name, rule or "sum"


class Metrics:
    """The user's numbers of episodes: of the infos of their steps, and of their data.

    Attributes:
        infos: the names of the infos that are read at each step.
        functions: those of an episode's data, by name.
    """

    def __init__(self, wanted: Mapping[str, Any]):
        self._wanted, items = wanted, wanted.items()
        self.functions = {name: metric for name, metric in items if callable(metric)}
        # The entries that the functions read, as measures say it; None for all.
        reads: list[Any] = [getattr(f, "reads", None) for f in self.functions.values()]
        self.reads: set[Key] | None = None if None in reads else set().union(*reads)
        self._rules = {name: info_and_rule(text) for name, text in items if not callable(text)}
        self.infos = sorted({info for info, _ in self._rules.values()})
        self._names = set[str]()  # of all infos that there were
        # Of running episodes, by trajectory id and info.
        self._values: dict[int, dict[str, list[float]]] = {}

    def begin(self, run: int) -> None:
        if self.infos:
            self._values[run] = {info: [] for info in self.infos}

    def note(self, start: Start, info: Mapping[str, Any]) -> None:
        """Take the infos of a step; one that the env leaves out has no value there."""
        self._names.update(info)
        for name, values in self._values[start.traj_id].items():
            if (value := info_at(info, name)) is not None:
                self._names.add(name)
                values.append(_one_number(value, f"the info {name!r} of episode {start.index}"))

    def drop(self, run: int) -> None:
        self._values.pop(run, None)

    def of(self, index: int, run: int, data: TensorDict | None) -> dict[str, float | None]:
        """Return the metrics of an episode that has ended."""
        infos = self._values.pop(run, {})
        numbers: dict[str, float | None] = {}
        for name in self._wanted:
            if name in self._rules:
                info, rule = self._rules[name]
                values = np.array(infos[info], np.float64)
                if info not in self._names:
                    there = listed_text(sorted(map(repr, self._names)), 20) or "none of this name"
                    self._names.add(info)  # told once
                    warnings.warn(
                        f"expected an info {info!r} for the metric {name!r} in episode {index}, "
                        f"got {there}; correct a misspelt one",
                        stacklevel=2,
                    )
                numbers[name] = _RULES[rule](values) if values.size else None
                continue
            assert data is not None  # as there are functions
            try:
                number = self.functions[name](data.copy())
            except Exception as error:
                error.add_note(f"in the metric {name!r}, of episode {index}")
                raise
            what = f"the metric {name!r} of episode {index}"
            numbers[name] = None if number is None else _one_number(number, what)
        return numbers


def _one_number(value: Any, what: str) -> float:
    with suppress(ValueError, RuntimeError, TypeError, OverflowError):
        plain = value.item() if hasattr(value, "item") else np.asarray(value).item()
        if isinstance(plain, Real):
            return float(plain)
    raise ValueError(f"expected {what} to be one number, got {type(value).__name__} {value!r}")


class Finished(NamedTuple):
    """An episode that has ended."""

    record: Episode  # of one that ran again and was cut, with the status "cut"
    data: TensorDict | None = None  # ``[L]``, if they are kept
    steps: Steps | None = None  # None if it did not complete
    nth: int = 1  # 1 for the first episode of an env that was made for it, 2 for the next...
    again: bool = False  # it ran before, and is to be compared with that


@dataclass
class _Unfinished:
    """An episode that is running: its digests so far, rewards, steps and data."""

    hashes: dict[Key, Any]
    rewards: list[Sequence[np.ndarray[Any, Any]]] = field(default_factory=list)
    columns: dict[str, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    parts: list[dict[Key, Any]] = field(default_factory=list)
    steps: int = 0


def rows_of(piece: Piece, slots: Any) -> Any:
    """Return the rows of a piece, out of an entry ``[N, t, ...]``."""
    return slots[piece.slot, piece.begin : piece.stop]


class _Unread(frozenset[Any]):
    """All entries but these, and those that have a sketch."""

    def __contains__(self, key: Any) -> bool:
        return not (super().__contains__(key) or is_sketched(key) or key[:2] == _SENT)


class Assembly:
    """Joins the pieces of episodes; one that takes more than ``bound`` steps is an error.

    Of each, all steps are kept with ``keep_steps``, else the first ones that a witness has.
    """

    def __init__(
        self,
        env: EnvBase,
        returns: Returns,
        seeds: Callable[[int], tuple[int, int]],
        keep: bool,
        metrics: Metrics | None,
        bound: float,
        keep_steps: bool,
        texts: Mapping[Key, TextLeaf],
    ):
        self.texts = texts
        self._most = math.inf if keep_steps else MOST
        self._returns = returns
        self.seeds = seeds
        self.keeps_data = keep
        self.metrics = metrics
        self._joins = keep or (metrics is not None and bool(metrics.functions))
        self._joined: set[Key] | None = None  # the entries that are joined; all
        if not keep:
            self._joined = set() if metrics is None else metrics.reads
        self._bound = bound
        self._acted = sorted(entries_of(env.full_action_spec), key=entry_path)
        self._observed = _observed(env)
        self._digested = _digested(self._observed, self._acted, returns.entries)
        self.left_out: frozenset[Key] = frozenset()  # what nothing here reads
        self.read: frozenset[Key] | None = None  # what is read for more than its sketch; all
        if self._joined is not None:
            last = map(under_next, self._observed)
            self.read = frozenset((*self._digested, *last, *self._joined, _EXACT))
            self.left_out = _Unread(self.read)
        # Of each run of an episode, by its trajectory id.
        self._held: dict[int, _Unfinished] = {}
        self.restarts: dict[int, int] = {}

    def feed(self, block: Block) -> Iterator[tuple[Finished, int]]:
        """Add a block; yields the episodes that end in it, in the order of their ending.

        Each comes with the trajectory id of its run.
        """
        # If the env raised at once, the block has no entries, only pieces without steps.
        digested = self._digested if block.entries else []
        entries, sent, exact = dict[Key, Any](), dict[tuple[str, ...], Any](), None
        for key, entry in block.entries.items():
            if key == _EXACT:
                exact = entry
            elif key[:2] == _SENT:
                sent[as_path(key)[2:]] = entry
            else:
                entries[key] = self.texts[key].read(entry) if key in self.texts else entry
        arrays = {key: _array(entries[key]) for key in digested}
        counted = [under_next(key) for key in self._returns.counted] if digested else []
        rewards = [arrays[key] if exact is None else _array(exact) for key in counted]
        columns = self._columns(entries, arrays, sent) if digested else {}
        names = [field_of(REWARD, key) for key in self._returns.counted]
        for piece in block.pieces:
            if piece.error is not None:
                self._held.pop(piece.start.traj_id, None)
                continue
            held = self._held.get(piece.start.traj_id)
            if held is None:
                held = self._held[piece.start.traj_id] = _Unfinished(
                    {key: _hash(key, rows_of(piece, array)) for key, array in arrays.items()}
                )
            own = [_by_step(rows_of(piece, array)) for array in rewards]
            if held.steps < self._most:
                for name, array in columns.items():
                    held.columns.setdefault(name, []).append(rows_of(piece, array).copy())
                for name, array in zip(names, own, strict=True):
                    held.columns.setdefault(name, []).append(array)
            held.steps += piece.stop - piece.begin
            endless = held.steps + (not piece.ended) > self._bound  # whatever steps a block has
            if endless and piece.start.traj_id >= 0:  # else it runs again, and is cut
                raise RuntimeError(
                    f"expected episodes that end, but episode {piece.start.index} (seed "
                    f"{self.seeds(piece.start.index)[0]}) has taken {self._bound:,} steps: pass "
                    "max_episode_steps=1000, say, to truncate episodes at a length, or "
                    "max_episode_steps=math.inf (--max-episode-steps inf) for episodes of any "
                    "length"
                )
            for key, array in arrays.items():
                held.hashes[key].update(_bytes(rows_of(piece, array)))
            held.rewards.append(own)
            if self._joins:
                wanted = self._joined or entries
                rows = {key: rows_of(piece, entries[key]) for key in wanted}
                held.parts.append(
                    {k: v.clone() if hasattr(v, "clone") else v for k, v in rows.items()}
                )
            if piece.ended:
                for key in self._observed:
                    last = rows_of(piece, entries[under_next(key)])[-1:]
                    held.hashes[key].update(_bytes(_array(last)))
                yield self._finish(piece, arrays), piece.start.traj_id

    def _columns(
        self,
        entries: Mapping[Key, torch.Tensor],
        arrays: Mapping[Key, Any],
        sent: Mapping[tuple[str, ...], Any],
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the fields of a block's steps, ``[N, t, ...]``, but for the rewards."""
        columns = {}
        for key in filter(is_sketched, entries.keys() - {*self._acted}):
            kind = OBSERVATION if key in self._observed else OUTPUT
            array = arrays[key] if key in arrays else _array(_plain(entries[key]))
            columns[field_of(kind, key)] = sketch(array)
        columns = dict(sorted(columns.items()))
        for key in self._acted:
            array = arrays[key] if arrays[key].dtype != object else sketch(arrays[key])
            columns[field_of(ACTION, key)] = array
        for path, entry in sent.items():
            columns[field_of(ENV_ACTION, path)] = _array(entry)
        return columns

    def _finish(self, piece: Piece, arrays: Mapping[Key, Any]) -> Finished:
        index, run = piece.start.index, piece.start.traj_id
        held = self._held.pop(run)
        terminated, truncated = (bool(rows_of(piece, arrays[flag])[-1, 0]) for flag in _FLAGS)
        seeds = self.seeds(index)
        names = map(entry_path, self._returns.counted)
        by_entry = map(np.concatenate, zip(*held.rewards, strict=True))
        total, groups = combined(dict(zip(names, by_entry, strict=True)))
        data = self._data(held.parts) if self._joins else None
        record = Episode(
            index,
            *seeds,
            restarts=self.restarts.get(run, 0),
            episode_return=total,
            group_returns=None if self._returns.is_plain else groups,
            length=held.steps,
            terminated=terminated,
            truncated=truncated,
            success=_success(piece.info, index, seeds[0]),
            digest=_joined(held.hashes.values()),
            metrics=None if self.metrics is None else self.metrics.of(index, run, data),
        )
        return Finished(record, data if self.keeps_data else None, self._steps(held))

    def _steps(self, held: _Unfinished) -> Steps:
        steps = from_columns({name: np.concatenate(held.columns[name]) for name in held.columns})
        return steps if len(steps) <= self._most else steps[:MOST].copy()

    def cut(self, start: Start) -> Finished | None:
        """Cut a run that has not ended; None if it has too few steps for that."""
        held = self._held.get(start.traj_id)
        if held is None or held.steps < MOST:
            return None
        self._drop(start.traj_id)
        record = Episode(start.index, *self.seeds(start.index), CUT, length=held.steps)
        return Finished(record, None, self._steps(held))

    def failed(self, start: Start) -> Finished:
        self._drop(start.traj_id)
        restarts = self.restarts.get(start.traj_id, 0)
        return Finished(Episode(start.index, *self.seeds(start.index), FAILED, restarts))

    def _drop(self, run: int) -> None:
        self._held.pop(run, None)
        if self.metrics is not None:
            self.metrics.drop(run)

    def _data(self, parts: Sequence[Mapping[Key, Any]]) -> TensorDict:
        import torch
        from tensordict import NonTensorStack

        from tdcollect.envs.spaces import nested

        joined = {key: [part[key] for part in parts] for key in parts[0]}
        entries = {
            key: torch.cat(rows)
            if isinstance(rows[0], torch.Tensor)
            else NonTensorStack(*np.concatenate(rows))
            for key, rows in joined.items()
        }
        data = nested(entries.items(), [len(entries[keys.NEXT_DONE])])
        data.refine_names(keys.TIME)
        return data


def _observed(env: EnvBase) -> list[Key]:
    """The observations, without the actions that an env gives back, for a history of them.

    Also without the masks that TorchRL names by the place in memory of a dropout's module.
    """
    seen = entries_of(env.observation_spec).keys() - entries_of(env.full_action_spec).keys()
    return sorted((k for k in seen if not _UNNAMED.fullmatch(name_of(k))), key=entry_path)


def digested_entries(env: EnvBase, returns: Returns, policy: Any = None) -> dict[str, list[str]]:
    """Return the names of a digest's entries besides the flags, for the manifest.

    Observations that the policy writes over, as a decision transformer masks its history, are
    named again.
    Rewards are left out if they are the only entry ``"reward"`` with one value per step.
    """
    entries = {
        "observation": [*map(entry_path, _observed(env))],
        "action": sorted(map(entry_path, entries_of(env.full_action_spec))),
    }
    written = {*map(entry_path, getattr(policy, "out_keys", None) or ())}
    if over := sorted(written.intersection(entries["observation"])):
        entries["overwritten"] = over
    if not returns.is_plain:
        entries["reward"] = [entry_path(key) for key in returns.entries]
    return entries


def disagreements(
    record: Episode,
    data: Mapping[str, np.ndarray[Any, Any]],
    entries: Mapping[str, Sequence[str]],
    counted: Sequence[str] | None = None,
) -> list[str]:
    """Compare the data ``[L]`` of an episode with its record.

    The return is compared up to rounding: the data hold rewards in float32.

    Args:
        record: the episode's line in the ledger.
        data: its entries ``[L, ...]`` by path, such as ``"next/observation"``.
        entries: as :func:`digested_entries` named them.
        counted: the reward entries that the return is made of; None for all.

    Returns:
        The differences, one phrase each; empty if the data are those of the record.
    """
    observed, acted = entries["observation"], entries["action"]
    rewarded = entries.get("reward", [keys.REWARD])
    following = [f"{keys.NEXT}/{name}" for name in (*observed, *rewarded)]
    wanted = [*observed, *following, *acted, *_FLAG_PATHS]
    missing = [name for name in wanted if name not in data]
    if missing or not len(data[_FLAG_PATHS[0]]):
        return [f"the data lack {', '.join(missing) or 'steps'}"]
    rewards = {name: _by_step(data[f"{keys.NEXT}/{name}"]) for name in counted or rewarded}
    hashes = []  # as Assembly computes them from pieces
    for key in _digested(observed, acted, rewarded):
        rows = data[entry_path(key)]
        hashes.append(_hash(key, rows))
        hashes[-1].update(_bytes(rows))
        if key in observed:
            hashes[-1].update(_bytes(data[entry_path(under_next(key))][-1:]))
    terminated, truncated = (bool(data[flag][-1]) for flag in _FLAG_PATHS)
    total, groups = combined(rewards)
    rounding = 1e-6 * sum(float(np.abs(values).sum()) for values in rewards.values())
    recorded = record.episode_return
    compared: list[tuple[str, Any, Any]] = [
        ("length", record.length, len(data[_FLAG_PATHS[0]])),
        ("terminated", record.terminated, terminated),
        ("truncated", record.truncated, truncated),
        ("digest", record.digest, _joined(hashes)),
    ]
    if recorded is not None and abs(recorded - total) > rounding:
        compared.append(("return", recorded, total))
    for name, value in (record.group_returns or {}).items():
        if name not in groups or abs(value - groups[name]) > rounding:
            compared.append((f"return of {name}", value, groups.get(name)))
    texts = [f"{name} {b!r}, in the ledger {a!r}" for name, a, b in compared if a != b]
    for name in sorted({*observed} - {*entries.get("overwritten", ())}):
        # Each row leads to the one after it.
        if bytes(_bytes(data[name][1:])) != bytes(_bytes(data[f"{keys.NEXT}/{name}"][:-1])):
            texts.append(f"{name} is not the one that the row before led to")
    return texts


def _digested(observed: Iterable[Key], acted: Iterable[Key], rewarded: Iterable[Key]) -> list[Key]:
    """Return the entries of a digest; to observations belongs the value after the last step."""
    return [*observed, *acted, *map(under_next, rewarded), *_FLAGS]


def _joined(hashes: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(h.digest() for h in hashes)).hexdigest()


def _success(info: Mapping[str, Any], index: int, seed: int) -> bool | None:
    for name in SUCCESS:
        if info.get(name) is not None:
            told = info[name]
            value = np.asarray(told.cpu() if hasattr(told, "cpu") else told)
            if value.size and value.dtype.kind in "biuf" and np.isin(value, (0, 1)).all():
                return bool(value.all())
            raise ValueError(
                f"expected the info {name!r} at the end of episode {index} (seed {seed}) to be "
                f"True or False, got {type(told).__name__} {told!r}; correct the env"
            )
    return None


def _plain(entry: torch.Tensor) -> torch.Tensor:
    return entry.float() if entry.is_floating_point() and entry.element_size() < 4 else entry


def _array(entry: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = entry if isinstance(entry, np.ndarray) else entry.cpu().numpy()
    return array


def _by_step(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy of rewards in float64, ``[t, agents]``."""
    return np.array(rewards, np.float64).reshape(len(rewards), math.prod(rewards.shape[1:]))


def _hash(key: Key, rows: np.ndarray[Any, Any]) -> Any:
    """Return a hash that starts from an entry's name, dtype and shape."""
    dtype = "str" if rows.dtype == object else rows.dtype.str
    return hashlib.sha256(f"{entry_path(key)} {dtype} {rows.shape[1:]}\n".encode())


def _bytes(rows: np.ndarray[Any, Any]) -> Any:
    """The bytes of rows in a digest; of a text, its length in UTF-8 as 8 bytes goes before."""
    if rows.dtype != object:
        return np.ascontiguousarray(rows)
    return b"".join(len(text).to_bytes(8, "little") + text for text in map(utf8, rows))


def entries_of(spec: Any) -> dict[Key, bool]:
    """The entries of a spec, and whether each is words.

    Texts of which there are more or fewer, as in a ``History``, are one entry together.
    """
    found: dict[Key, bool] = {}
    for key, leaf in spec.items(True, True):
        several = leaf.dtype is None and -1 in leaf.shape
        found[key_of(as_path(key)[: -1 if several else None])] = leaf.dtype is None
    return found


def unlike(first: Finished, again: Finished) -> StepDifference | str | None:
    """Return how an episode differs that ran again; None if it is as it was, as far as it ran."""
    cut = CUT in (first.record.status, again.record.status)
    if first.steps is not None and again.steps is not None:
        difference = first_difference(first.steps, again.steps, cut)
        if difference is not None:
            return difference
    differing = [] if cut else record_differences(first.record, again.record)
    return "; ".join(f"its {name} is {a!r} and {b!r}" for name, a, b in differing) or None


POLICY_ADVICE = (
    "the policy keeps something from one episode to the next, or draws random numbers that no seed "
    "reaches. Keep what it remembers in entries of the TensorDict, or in an agent for each "
    "episode, tdcollect.policies.from_agent(make)"
)
