"""Play envs row by row, and find the first place where two runs differ."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.checks.registry import Failed, Skipped
from tdcollect.display import one_line
from tdcollect.envs.process.values import Array
from tdcollect.envs.process.worker import old_api
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key, under_next

Env: TypeAlias = gym.Env[Any, Any]
E = TypeVar("E")

_EPISODES = 3
_MORE_STEPS = 2  # of TorchRL envs, after each slot has ended once


@dataclass(frozen=True)
class Row:
    """One reset or step: copies of what two runs are compared by, and the returned objects.

    ``extra`` has a copy of the rest: gymnasium's info, or the entries of TorchRL's next root, in
    which ended slots are reset.
    """

    entries: Mapping[Key, Any]
    ends: bool = False
    is_reset: bool = False
    extra: Any = None
    given: tuple[Any, ...] = ()

    def __getitem__(self, key: Key) -> Any:
        """Return the entry of that name."""
        return self.entries[key]


class Player(abc.ABC, Generic[E]):
    """Plays one env, and others like it.

    Without a policy, actions are random and the same for every seed, so a seed shows in the env
    alone. ``failed`` holds the names of the checks that failed so far.
    """

    env: E

    def __init__(
        self,
        env: E | None,
        make: Callable[[], E] | None,
        policy: Callable[[Any], Any] | None,
        max_episode_steps: int,
        seed: int,
    ):
        if env is not None:
            self.env = env
        self.make = make
        self.policy = policy
        self.max_episode_steps = max_episode_steps
        self.seed = seed
        self.failed: list[str] = []
        self.is_closed = False

    @abc.abstractmethod
    def rows(self, env: E, seed: int) -> Iterator[Row]:
        """Reset an env with a seed and play it, row by row."""

    @abc.abstractmethod
    def close_env(self, env: E) -> None:
        """Close an env."""

    def play(self, env: E, seed: int) -> list[Row]:
        """Play an env to the end of its episode."""
        return list(self.rows(env, seed))

    def another(self) -> E:
        """Return a new env; the same one if nothing makes another."""
        return self.env if self.make is None else self.make()

    def done_with(self, env: E) -> None:
        """Close an env of :meth:`another`, if it was a new one."""
        if env is not self.env:
            self.close_env(env)

    def play_another(self, seed: int) -> list[Row]:
        """Play a new env, if one can be had."""
        env = self.another()
        try:
            return self.play(env, seed)
        finally:
            self.done_with(env)

    def leave_unfinished(self, env: E, seed: int) -> None:
        """Reset an env with a seed, and make two steps."""
        unfinished = self.rows(env, seed)
        for _ in range(3):
            next(unfinished, None)

    @cached_property
    def episodes(self) -> list[list[Row]]:
        """The env played on three seeds."""
        return [self.play(self.env, self.seed + i) for i in range(_EPISODES)]

    def all_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows of these episodes, each with its seed and step for messages."""
        for i, episode in enumerate(self.episodes):
            for step, row in enumerate(episode):
                yield f"seed {self.seed + i}, step {step}", row

    def require(self, *checks: str) -> None:
        """Raise ``Skipped`` if one of these checks found a fault that would show again."""
        for name in checks:
            if name in self.failed:
                raise Skipped(f"a fault reported above would show here too (see {name})")

    def close(self) -> None:
        """Close the env, once."""
        if not self.is_closed:
            self.is_closed = True
            self.close_env(self.env)


class GymnasiumPlayer(Player[Env]):
    """Plays episodes of gymnasium envs."""

    def rows(self, env: Env, seed: int | None, action_seed: int | None = None) -> Iterator[Row]:
        """Yield the rows of one episode, first its reset; ``action_seed`` draws other actions."""
        actions = deepcopy(env.action_space)
        actions.seed(self.seed if action_seed is None else action_seed)
        given: Any = env.reset(seed=seed)
        _check_tuple(given, 2, "reset")
        observation = given[0]
        yield gymnasium_row(given)
        for _ in range(self.max_episode_steps):
            action = actions.sample() if self.policy is None else self.policy(observation)
            given = env.step(action)
            _check_tuple(given, 5, "step")
            observation = given[0]
            row = gymnasium_row(given)
            yield row
            if row.ends:
                return

    def forever(self, env: Env, seed: int, later_seed: int | None = None) -> Iterator[Row]:
        """Yield the rows of one episode after the other, on a seed and then on another or none."""
        for start in chain([seed], repeat(later_seed)):
            yield from self.rows(env, start)

    @property
    def ended(self) -> list[tuple[int, list[Row]]]:
        """The episodes that ended, with their seeds; raises ``Skipped`` if none did."""
        ended = [(self.seed + i, e) for i, e in enumerate(self.episodes) if e[-1].ends]
        if not ended:
            raise Skipped(f"no episode ended in {self.max_episode_steps} steps")
        return ended

    def close_env(self, env: Env) -> None:
        env.close()


def gymnasium_row(given: tuple[Any, ...]) -> Row:
    """Record what ``reset`` (two values) or ``step`` (five values) returned."""
    reward, terminated, truncated = given[1:-1] or (None, False, False)
    entries: dict[Key, Any] = {
        keys.OBSERVATION: deepcopy(given[0]),
        keys.REWARD: deepcopy(reward),
        keys.TERMINATED: deepcopy(terminated),
        keys.TRUNCATED: deepcopy(truncated),
    }
    ends = bool(terminated) or bool(truncated)
    return Row(entries, ends, len(given) == 2, _copy_info(given[-1]), given)


def _copy_info(info: Any) -> Any:
    try:
        return deepcopy(info)
    except Exception:  # infos may hold anything; values that cannot be copied are not compared
        return copy(info)


def _check_tuple(given: Any, count: int, call: str) -> None:
    expected = {
        2: "(observation, info)",
        5: "(observation, reward, terminated, truncated, info)",
    }[count]
    advice = "make it as gymnasium.Env has it"
    if not isinstance(given, tuple) or len(given) != count:
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        found = f"{call} gave {got}, expected {expected}"
        raise Failed(found, advice=old_api(found) or advice)
    if not isinstance(given[-1], dict):
        got = type(given[-1]).__name__
        raise Failed(f"{call} gave an info that is {got}, expected a dict", advice=advice)


class TorchRLPlayer(Player[EnvBase]):
    """Plays TorchRL envs: rows of all slots, through the resets of slots that end."""

    def act(self, env: EnvBase, root: TensorDictBase, seed: int) -> TensorDictBase:
        """Return the root with an action, which depends on nothing but ``seed`` and the root."""
        if self.policy is not None:
            return self.policy(root)
        # The action's draw must neither disturb nor follow an env that uses torch's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return env.rand_action(root)

    def start(self, env: EnvBase, seed: int) -> TensorDictBase:
        """Seed and reset an env; return its root."""
        env.set_seed(seed)
        return env.reset()

    def rows(self, env: EnvBase, seed: int) -> Iterator[Row]:
        """Yield the rows from a seeded reset on; entries are those of ``step``, by their keys."""
        root = self.start(env, seed)
        for i in range(self.max_episode_steps):
            given = env.step_and_maybe_reset(self.act(env, root, self.seed + i))
            step, after = (tensordict.clone() for tensordict in given)
            ends = bool(ended_slots(env, step).any())
            yield Row(_tensors(step), ends, extra=_tensors(after), given=given)
            root = given[1].clone()

    def play(self, env: EnvBase, seed: int) -> list[Row]:
        """Play until each slot has ended once, and two more steps."""
        rows: list[Row] = []
        ended = torch.zeros(env.batch_size, dtype=torch.bool)
        more = _MORE_STEPS
        for row in self.rows(env, seed):
            rows.append(row)
            if ended.all():
                more -= 1
                if not more:
                    break
            ended |= ended_slots(env, row)
        return rows

    def close_env(self, env: EnvBase) -> None:
        if not env.is_closed:
            env.close()


def ended_slots(env: EnvBase, step: Row | TensorDictBase) -> torch.Tensor:
    """Return the slots that ended in a step: bool ``[N]``, on the CPU."""
    ended = torch.zeros(env.batch_size, dtype=torch.bool)
    for key in env.done_keys:
        ended |= step[under_next(key)].cpu().reshape(*env.batch_size, -1).any(-1)
    return ended


def _tensors(values: TensorDictBase) -> dict[Key, torch.Tensor]:
    """Return the leaves that are tensors, by their keys; text and other data is left out."""
    leaves = {key: values[key] for key in values.keys(True, True)}
    return {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


class SlotPlayer(Player[GymnasiumEnv]):
    """Plays slot 0 of an env of ``make_env``, below TorchRL; ``act`` gives the actions of a
    step.
    """

    def __init__(
        self,
        env: GymnasiumEnv,
        act: Callable[[int, int, Sequence[int]], list[Array]],
        max_episode_steps: int,
    ):
        super().__init__(env, None, None, max_episode_steps, 0)
        self.act = act

    def rows(self, env: GymnasiumEnv, seed: int, slots: int = 1) -> Iterator[Row]:
        """Yield the rows of slot 0; slot i is reset with ``seed + i``.

        All slots run if they cannot be stepped singly. Raises ``SlotError`` where an env raises.
        """
        stepper = env.stepper
        alone = env.can.pause and env.can.seed_singly
        running = list(range(min(slots, env.num_envs) if alone else env.num_envs))
        (buffers,) = env.allocate(1)
        raw = buffers.raw
        views = {"/".join(e.path): b for e, b in zip(stepper.entries, buffers.entries, strict=True)}
        views |= {
            keys.REWARD: raw.reward,
            keys.TERMINATED: raw.terminated,
            keys.TRUNCATED: raw.truncated,
        }
        stepper.reset(running, buffers, seeds=[seed + slot for slot in running])
        for step in range(self.max_episode_steps):
            ends = bool(buffers.done[0])
            yield Row({name: view[0].copy() for name, view in views.items()}, ends)
            if ends:
                return
            others = [slot for slot in running if buffers.done[slot]]
            if others:
                stepper.reset(others, buffers)
            given = self.act(step, seed, running)
            stepper.step(given, running if alone else None, buffers, restart=False)

    def close_env(self, env: GymnasiumEnv) -> None:
        """Leave the env open: it is the caller's."""


Episodes: TypeAlias = Sequence[Sequence[Row]]
"""Episodes of one env, one after the other: the first after ``reset(seed)``."""

_MANY = 1000  # items of a container that is compared as an attribute
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


class Mismatch(NamedTuple):
    """One value that differs: its entry, both values, and their distance if they are numbers."""

    entry: str
    first: Any
    second: Any
    size: float | None

    def __str__(self) -> str:
        size = "" if self.size is None else f" ({self.size:.2g} apart)"
        return f"{self.entry} is {shown(self.first)} and {shown(self.second)}{size}"


@dataclass(frozen=True)
class Divergence:
    """The first place where two runs differ.

    Attributes:
        seed: the seed that both were reset with.
        episode: 0 for the episode after ``reset(seed)``, 1 for the one after that.
        step: 0 for the reset, 1 for the first step.
        entry: ``"observation"``, ``"reward"``, ``"terminated"``, ``"truncated"``, with the place in
            it that differs most; or ``"length"``.
        first: the value in the first run.
        second: the value in the second run.
        size: how far apart they are; None if they are not numbers.
    """

    seed: int
    episode: int
    step: int
    entry: str
    first: Any
    second: Any
    size: float | None

    @property
    def is_small(self) -> bool:
        """True if the difference is of the size of rounding."""
        if self.size is None or self.entry == "length":
            return False
        return self.size <= 1e-4 * max(1.0, abs(self.first), abs(self.second))

    @property
    def mismatch(self) -> Mismatch:
        """The value that differs."""
        return Mismatch(self.entry, self.first, self.second, self.size)

    def to_dict(self) -> dict[str, Any]:
        """Return the divergence for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        at = "the reset" if self.step == 0 else f"step {self.step}"
        return f"seed {self.seed}, episode {self.episode}, {at}: {self.mismatch}"


def first_divergence(
    seed: int, first: Episodes, second: Episodes, exact: bool = False
) -> Divergence | None:
    """Return the first difference of two runs on one seed, or None.

    ``exact`` tells 0.0 from -0.0, and NaNs by their bits; otherwise these are equal.
    """
    for episode, (one, other) in enumerate(zip(first, second, strict=True)):
        for step, (a, b) in enumerate(zip(one, other, strict=False)):
            found = row_mismatch(a, b, exact)
            if found is not None:
                return Divergence(seed, episode, step, *found)
        if len(one) != len(other):
            lengths = len(one) - 1, len(other) - 1
            apart = float(abs(lengths[0] - lengths[1]))
            return Divergence(seed, episode, min(lengths), "length", *lengths, apart)
    return None


def row_mismatch(first: Row, second: Row, exact: bool = False) -> Mismatch | None:
    """Return the first entry in which two rows differ, or None."""
    for key, value in first.entries.items():
        name = key if isinstance(key, str) else repr(key)
        if key not in second.entries:
            return Mismatch(name, "there", "gone", None)
        found = mismatch(name, value, second.entries[key], exact)
        if found is not None:
            return found
    return None


def mismatch(entry: str, first: Any, second: Any, exact: bool = False) -> Mismatch | None:
    """Return the first leaf in which two (nested) values differ, or None."""
    return next(_mismatches(entry, first, second, exact), None)


def _mismatches(entry: str, first: Any, second: Any, exact: bool) -> Iterator[Mismatch]:
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            a, b = (short(sorted(map(str, value))) for value in (first, second))
            yield Mismatch(f"the keys of {entry}", a, b, None)
            return
        for key in first:
            yield from _mismatches(f"{entry}[{key!r}]", first[key], second[key], exact)
    elif isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        if len(first) != len(second):
            yield Mismatch(f"the length of {entry}", len(first), len(second), None)
            return
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _mismatches(f"{entry}[{i}]", a, b, exact)
    else:
        found = _leaf_mismatch(entry, _as_array(first), _as_array(second), exact)
        if found is not None:
            yield found


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _leaf_mismatch(entry: str, a: Any, b: Any, exact: bool) -> Mismatch | None:
    if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        if a.dtype == object or b.dtype == object:
            same = _are_same_objects(a, b)
        else:
            same = a.shape == b.shape and bool((a == b).all())
        return None if same else Mismatch(entry, short(a.tolist()), short(b.tolist()), None)
    if a.shape != b.shape:
        return Mismatch(f"the shape of {entry}", list(a.shape), list(b.shape), None)
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return None
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(wide) - b.astype(wide))
    different = (a != b) & ~((a != a) & (b != b))
    if exact:
        bits = [x.tobytes() != y.tobytes() for x, y in zip(a.flat, b.flat, strict=True)]
        different = np.array(bits, bool).reshape(a.shape)
    if not different.any():
        return None
    apart = np.where(different, apart, -1.0)
    apart = np.where(np.isnan(apart), np.inf, apart)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    place = "".join(f"[{i}]" for i in at)
    return Mismatch(f"{entry}{place}", a[at].item(), b[at].item(), float(apart[at]))


def _are_same_objects(a: Any, b: Any) -> bool:
    """Compare what is not numbers or text: by equality, or by repr where there is none."""
    first, second = a.tolist(), b.tolist()
    if first is second:
        return True
    has_value: bool = type(first).__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
    if has_value:
        try:
            if first == second:
                return True
        except Exception:  # of arrays in it, say: their reprs can still be compared
            pass
    if repr(first) == repr(second):
        return True
    # A repr with an address says nothing about the object.
    return not has_value and type(first) is type(second) and bool(_ADDRESS.search(repr(first)))


def leaves(entry: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value, each with its place in the entry."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{entry}[{key!r}]", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(f"{entry}[{i}]", item)
    else:
        yield entry, value


def shown(value: Any) -> str:
    """Format a value for a message: floats to eight digits."""
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def short(value: Any) -> str:
    """Format any value for a message, in at most 80 characters."""
    text = " ".join(repr(value.tolist() if isinstance(value, torch.Tensor) else value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def unlike_attributes(first: Any, second: Any) -> list[str]:
    """Return the plain attributes in which two envs, or their wrappers, differ, with both values.

    Numbers, strings, arrays, random generators, and lists, tuples and dicts of these are compared.
    Other attributes (a simulator, say) are left out.
    """
    unlike = []
    for one, other in zip(_layers(first), _layers(second), strict=True):
        # An attribute that one of them has not set yet may stand in its class.
        for name in vars(one) | vars(other):
            mine, its = getattr(one, name, None), getattr(other, name, None)
            if not (_is_plain(mine) and _is_plain(its)):
                continue
            found = mismatch(name, _settled(mine), _settled(its))
            if found is not None:
                values = f" ({shown(found.first)} and {shown(found.second)})"
                drawn = isinstance(mine, np.random.Generator)
                unlike.append(f"{type(one).__name__}.{found.entry}{'' if drawn else values}")
    return unlike


def _layers(env: Any) -> Iterator[Any]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < _MANY and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) < _MANY and all(map(_is_plain, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (int, float, str, np.generic, np.random.Generator))


def _settled(value: Any) -> Any:
    return repr(value.bit_generator.state) if isinstance(value, np.random.Generator) else value
