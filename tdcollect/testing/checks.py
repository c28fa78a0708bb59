"""Checks of envs, by name and group: how they run, their findings, players of envs, differences."""

from __future__ import annotations

import abc
import re
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.cleanup import close_env
from tdcollect.display import html_table, one_line, visible
from tdcollect.envs.process.worker import old_api
from tdcollect.keys import Key, under_next

Env: TypeAlias = gym.Env[Any, Any]
E = TypeVar("E")

_EPISODES = 3
_MORE_STEPS = 2  # of TorchRL envs, after each slot has ended once
PASSED, WARNED, FAILED, SKIPPED = STATUSES = "passed", "warned", "failed", "skipped"

_WIDTH = 100
_NARROWEST = 60  # characters; long names make wider lines instead


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the check's name, ``"leaks"`` say.
        rule: the sentence that holds if the check passed.
        status: ``"passed"``; ``"warned"``: the env can be collected from, but mind the advice;
            ``"failed"``; or ``"skipped"``.
        evidence: what the check observed, or the reason that it was skipped.
        cause: the most likely cause; empty if there is nothing to explain.
        advice: what to do about it.
        data: the evidence in numbers.
    """

    name: str
    rule: str
    status: str
    evidence: str
    cause: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self, self.name, self.status, self.text)

    @property
    def text(self) -> str:
        """The evidence; the rule if there is none to show."""
        return self.evidence or ("" if self.rule == self.name else self.rule)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return asdict(self)

    def lines(self, width: int) -> list[str]:
        """Return the finding's lines of the table, with names ``width`` wide."""
        head = f"  {self.status:<7}  {self.name:<{width}}  "
        wrapped = textwrap.TextWrapper(max(_WIDTH - len(head), _NARROWEST))
        lines = wrapped.wrap(self.text) or [""]
        wrapped.subsequent_indent = "  "
        for label, text in (("cause", self.cause), ("do", self.advice)):
            if text:
                lines += wrapped.wrap(f"{label}: {text}")
        return [(" " * len(head) if i else head) + line for i, line in enumerate(lines)]


@dataclass(frozen=True)
class Report:
    """The findings about one env; print it for the table.

    Attributes:
        env: the env's name.
        findings: one per check.
    """

    env: str
    findings: tuple[Finding, ...]

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of the check of that name."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"expected one of {[f.name for f in self.findings]}, got {name!r}")

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that are ``"failed"``."""
        return tuple(finding for finding in self.findings if finding.status == FAILED)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise AssertionError with each failed check, if any failed."""
        if self.failures:
            raise AssertionError("\n".join([self._headline(), *_table(self.failures)]))

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON: ``env``, ``passed`` and the findings."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"env": self.env, "passed": self.passed, "findings": findings}

    def _headline(self) -> str:
        statuses = [finding.status for finding in self.findings]
        counts = [f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses]
        return f"{self.env}: {PASSED if self.passed else FAILED} ({', '.join(counts)})"

    def __repr__(self) -> str:
        return one_line(self, self._headline())

    def _repr_html_(self) -> str:
        rows = [[f.status, f.name, f.text, f.cause, f.advice] for f in self.findings]
        header = ["", "check", "evidence", "cause", "do"]
        return html_table(header, rows, before=[self._headline()])

    def __str__(self) -> str:
        lines = [self._headline(), "", *_table(self.findings)]
        return visible("\n".join(lines), lines=True)


def _table(findings: tuple[Finding, ...]) -> list[str]:
    width = max((len(finding.name) for finding in findings), default=0)
    return [line.rstrip() for finding in findings for line in finding.lines(width)]


@dataclass(eq=False)  # by identity, as exceptions are
class Verdict(Exception):
    """The verdict of a check; see :class:`Finding` for the fields."""

    evidence: str
    cause: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    status = FAILED

    def __str__(self) -> str:
        return self.evidence


class Passed(Verdict):
    """The rule holds; returned rather than raised."""

    status = PASSED


class Warned(Verdict):
    """The rule holds with a reservation: mind the advice."""

    status = WARNED


class Failed(Verdict):
    """The rule does not hold."""


class Chance(Failed):
    """Runs under one seed differ now and then: the check ``seed`` fails, whichever one saw it."""


class Skipped(Verdict):
    """The rule says nothing about this env, or could not be checked."""

    status = SKIPPED


Run: TypeAlias = Callable[[Any], str | Passed]
"""A check's function: returns its evidence, or raises ``Failed``, ``Warned`` or ``Skipped``."""
AnyRun = TypeVar("AnyRun", bound=Run)


class Check(NamedTuple):
    """A check of an env; ``needs`` are the checks whose failure would show in this one too."""

    group: str
    name: str
    rule: str
    needs: tuple[str, ...]
    advice: str
    run: Run


_CHECKS: list[Check] = []


def rule(
    group: str,
    name: str,
    sentence: str | None = None,
    *,
    needs: Sequence[str] = (),
    advice: str = "",
) -> Callable[[AnyRun], AnyRun]:
    """Register the decorated function as a check; without a sentence, the name is it.

    The first check of a selection makes and plays the env: if it fails, the others are skipped.
    """

    def register(run: AnyRun) -> AnyRun:
        _CHECKS.append(Check(group, name, sentence or name, tuple(needs), advice, run))
        return run

    return register


def select(*groups: str, skip: Collection[str] = ()) -> dict[str, Check]:
    """Return the checks of some groups by name, in their order; ValueError for others to skip."""
    checks = {c.name: c for group in groups for c in _CHECKS if c.group == group}
    unknown = [name for name in skip if name not in checks]
    if unknown:
        raise ValueError(f"expected the checks to skip to be of {list(checks)}, got {unknown}")
    return checks


def run_checks(
    checks: Iterable[Check], player: Player[Any], skip: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Run checks in turn, one finding each; a check that raises fails."""
    findings: list[Finding] = []
    for one in checks:
        if one.name in skip:
            verdict: Verdict = Skipped("skipped as asked")
        elif findings and findings[0].status == FAILED:
            verdict = Skipped(f"the env does not run (see {findings[0].name})")
        else:
            verdict = _verdict(one, player)
            for earlier in findings:  # one fault is told once
                if verdict.status == earlier.status == FAILED and str(verdict) == earlier.evidence:
                    verdict = Skipped(f"it meets the fault reported above (see {earlier.name})")
        if isinstance(verdict, Chance):
            at = [finding.name for finding in findings].index("seed")
            if "seed" not in skip:
                findings[at] = replace(findings[at], status=FAILED, **vars(verdict))
            player.failed.append("seed")
            verdict = Skipped("runs differ by chance (see seed)")
        if verdict.status == FAILED:
            player.failed.append(one.name)
            verdict.advice = verdict.advice or one.advice
        findings.append(Finding(one.name, one.rule, verdict.status, **vars(verdict)))
    return tuple(findings)


def _verdict(one: Check, player: Player[Any]) -> Verdict:
    try:
        player.require(*one.needs)
        result = one.run(player)
        return Passed(result) if isinstance(result, str) else result
    except Verdict as verdict:
        return verdict
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(last.filename).name}, line {last.lineno}, in {last.name}"
        text = " ".join(str(error).split())[:300]
        fault = f"{type(error).__name__}: {text} ({at})"
        return Failed(fault, advice=old_api(text) or "mend what raises")


@dataclass(eq=False)
class Player(abc.ABC, Generic[E]):
    """Plays one env, and others like it.

    Without a policy, actions are random and the same for every seed, so a seed shows in the env
    alone. ``failed`` holds the names of the checks that failed so far.
    """

    env: E
    make: Callable[[], E] | None
    policy: Callable[[Any], Any] | None
    max_episode_steps: int
    seed: int
    failed: list[str] = field(default_factory=list, init=False)
    is_closed: bool = field(default=False, init=False)

    @abc.abstractmethod
    def rows(self, env: E, seed: int) -> Iterator[Row]:
        """Reset an env with a seed and play it, row by row."""

    @abc.abstractmethod
    def close_env(self, env: E) -> None:
        """Close an env."""

    def play(self, env: E, seed: int) -> list[Row]:
        """Play an env to the end of its episode."""
        return list(self.rows(env, seed))

    @contextmanager
    def another(self) -> Iterator[E]:
        """A new env, closed in the end; the same one if nothing makes another."""
        env = self.env if self.make is None else self.make()
        try:
            yield env
        finally:
            if env is not self.env:
                self.close_env(env)

    def play_another(self, seed: int) -> list[Row]:
        """Play a new env, if one can be had."""
        with self.another() as env:
            return self.play(env, seed)

    def leave_unfinished(self, env: E, seed: int) -> None:
        """Reset an env with a seed, and make two steps."""
        list(islice(self.rows(env, seed), 3))

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
        actions = seeded(env.action_space, self.seed if action_seed is None else action_seed)
        returned: Any = env.reset(seed=seed)
        yield gymnasium_row(returned, "reset")
        for _ in range(self.max_episode_steps):
            action = actions.sample() if self.policy is None else self.policy(returned[0])
            returned = env.step(action)
            yield (row := gymnasium_row(returned, "step"))
            if row.ends:
                return

    def in_turn(self, half: int) -> list[Row]:
        """Play a new env in turn with another, which is closed and made again after some rows."""
        rows: list[Row] = []
        with self.another() as env:
            own = self.rows(env, self.seed)
            for part in (islice(own, half + 1), own):
                with self.another() as other:
                    beside = chain.from_iterable(self.rows(other, self.seed + 1) for _ in count())
                    rows += [row for row, _ in zip(part, beside, strict=False)]
        return rows

    @property
    def ended(self) -> list[tuple[int, list[Row]]]:
        """The episodes that ended, with their seeds; raises ``Skipped`` if none did."""
        ended = [(self.seed + i, e) for i, e in enumerate(self.episodes) if e[-1].ends]
        if not ended:
            raise Skipped(f"no episode ended in {self.max_episode_steps} steps")
        return ended

    def close_env(self, env: Env) -> None:
        close_env(env)


def seeded(space: gym.Space[Any], seed: int) -> gym.Space[Any]:
    """Return a copy of a space that draws from a seed, also where the env has replaced ``seed``."""
    drawn_from = deepcopy(space)
    type(drawn_from).seed(drawn_from, seed)
    return drawn_from


_RETURNED = {
    "reset": "(observation, info)",
    "step": "(observation, reward, terminated, truncated, info)",
}


def gymnasium_row(returned: Any, call: str) -> Row:
    """Record what ``reset`` or ``step`` returned."""
    advice, expected = "make it as gymnasium.Env has it", _RETURNED[call]
    if not isinstance(returned, tuple) or len(returned) != len(expected.split()):
        got = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        fault = f"{call} gave {got}, expected {expected}"
        raise Failed(fault, advice=old_api(fault) or advice)
    observation, *outcome, info = returned
    if not isinstance(info, dict):
        got = type(info).__name__
        raise Failed(f"{call} gave an info that is {got}, expected a dict", advice=advice)
    names = (keys.OBSERVATION, keys.REWARD, keys.TERMINATED, keys.TRUNCATED)
    values = deepcopy((observation, *(outcome or (None, False, False))))
    entries: dict[Key, Any] = dict(zip(names, values, strict=True))
    try:
        info = deepcopy(info)
    except Exception:  # infos may hold anything; values that cannot be copied are not compared
        info = copy(info)
    return Row(entries, any(map(bool, values[2:])), not outcome, info, returned)


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
            returned = env.step_and_maybe_reset(self.act(env, root, self.seed + i))
            step, after = (tensordict.clone() for tensordict in returned)
            ends = bool(ended_slots(env, step).any())
            yield Row(_tensors(step), ends, extra=_tensors(after), returned=returned)
            root = returned[1].clone()

    def play(self, env: EnvBase, seed: int) -> list[Row]:
        """Play until each slot has ended once, and two more steps."""
        rows: list[Row] = []
        ended = torch.zeros(env.batch_size, dtype=torch.bool)
        played = self.rows(env, seed)
        for row in played:
            rows.append(row)
            ended |= ended_slots(env, row)
            if ended.all():
                break
        return [*rows, *islice(played, _MORE_STEPS)]

    def close_env(self, env: EnvBase) -> None:
        if not env.is_closed:
            close_env(env)


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


@dataclass(frozen=True)
class Row:
    """One reset or step: copies of what two runs are compared by, and the returned objects.

    ``extra`` has a copy of the rest: gymnasium's info, or TorchRL's next root.
    """

    entries: Mapping[Key, Any]
    ends: bool = False
    is_reset: bool = False
    extra: Any = None
    returned: tuple[Any, ...] = ()

    def __getitem__(self, key: Key) -> Any:
        return self.entries[key]


Episodes: TypeAlias = Sequence[Sequence[Row]]
"""Episodes of one env, one after the other: the first after ``reset(seed)``."""

SUMS = "a difference of the size of rounding: sums in another order, as that of a set of objects"

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
        """True for a difference of the size of rounding."""
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


def first_divergence(seed: int, first: Episodes, second: Episodes) -> Divergence | None:
    """Return the first difference of two runs on one seed, or None."""
    for episode, (one, other) in enumerate(zip(first, second, strict=True)):
        for step, (a, b) in enumerate(zip(one, other, strict=False)):
            if different := row_mismatch(a, b):
                return Divergence(seed, episode, step, *different)
        if len(one) != len(other):
            lengths = len(one) - 1, len(other) - 1
            apart = float(abs(lengths[0] - lengths[1]))
            return Divergence(seed, episode, min(lengths), "length", *lengths, apart)
    return None


def row_mismatch(first: Row, second: Row) -> Mismatch | None:
    """Return the first entry in which two rows differ, or None."""
    for key, value in first.entries.items():
        name = key if isinstance(key, str) else repr(key)
        if key not in second.entries:
            return Mismatch(name, "there", "gone", None)
        if different := mismatch(name, value, second.entries[key]):
            return different
    return None


def mismatch(entry: str, first: Any, second: Any) -> Mismatch | None:
    """Return the first leaf in which two (nested) values differ, or None; NaNs are equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            a, b = (short(sorted(map(str, value))) for value in (first, second))
            return Mismatch(f"the keys of {entry}", a, b, None)
        parts = [(key, value, second[key]) for key, value in first.items()]
    elif isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        if len(first) != len(second):
            return Mismatch(f"the length of {entry}", len(first), len(second), None)
        parts = list(zip(range(len(first)), first, second, strict=True))
    else:
        return _leaf_mismatch(entry, _as_array(first), _as_array(second))
    return next(filter(None, (mismatch(f"{entry}[{key!r}]", a, b) for key, a, b in parts)), None)


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _leaf_mismatch(entry: str, a: Any, b: Any) -> Mismatch | None:
    if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        are_objects = object in (a.dtype, b.dtype)
        same = _are_same_objects(a, b) if are_objects else np.array_equal(a, b)
        return None if same else Mismatch(entry, short(a.tolist()), short(b.tolist()), None)
    if a.shape != b.shape:
        return Mismatch(f"the shape of {entry}", list(a.shape), list(b.shape), None)
    different = (a != b) & ~((a != a) & (b != b))
    if not different.any():
        return None
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(wide) - b.astype(wide))
    apart = np.where(different, np.where(np.isnan(apart), np.inf, apart), -1.0)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    place = "".join(f"[{i}]" for i in at)
    return Mismatch(f"{entry}{place}", a[at].item(), b[at].item(), float(apart[at]))


def _are_same_objects(a: Any, b: Any) -> bool:
    """Compare objects by equality, or by repr where there is none."""
    first, second = a.tolist(), b.tolist()
    with suppress(Exception):  # of arrays in it, say: their reprs can still be compared
        if first == second:
            return True
    if repr(first) == repr(second):
        return True
    has_value: bool = type(first).__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
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
