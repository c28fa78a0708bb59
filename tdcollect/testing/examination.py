"""An env under examination by the doctor: how it is made, and the runs that checks compare."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from functools import cached_property, partial
from itertools import count, islice
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from tdcollect import keys
from tdcollect._upstream.others import steps_of_time_limit
from tdcollect.envs.backends import EnvPoolBackend
from tdcollect.envs.process.resumable import make_resumable
from tdcollect.envs.process.values import Begun, Options, slot_of
from tdcollect.envs.process.worker import make_by_id, old_api
from tdcollect.envs.spaces import SpaceCodec
from tdcollect.randomness import GlobalRandomness, global_states_kept
from tdcollect.testing import checks
from tdcollect.testing.checks import (
    Chance,
    Divergence,
    Env,
    Episodes,
    Failed,
    GymnasiumPlayer,
    Row,
    Skipped,
    first_divergence,
    gymnasium_row,
    seeded,
    shown,
)

PLAY_SECONDS = 2.0  # for one episode; slower envs are played for fewer steps
PLAY_BYTES = 32 * 2**20  # for one episode's observations; larger ones mean fewer steps
SEEDS = 4  # the number of seeds that are tried

COMPARED_STEPS = 100
_COMPARED_SECONDS = 0.5
OWN_RANDOM = (
    "draw all random numbers from self.np_random, which gymnasium's Env.reset(seed=seed) seeds; "
    "call super().reset(seed=seed) first in reset"
)

_NOW_AND_THEN = "numbers that no seed reaches, now and then: random, of the clock, or addresses"

_MANY = 1000  # items of a container that is compared as an attribute

GLOBAL = {"numpy": "np.random", "random": "Python's random", "torch": "torch"}
_SEED: dict[str, Callable[[int], Any]] = {
    "numpy": np.random.seed,
    "random": random.seed,
    "torch": torch.manual_seed,
}


class Leak(NamedTuple):
    """A difference that earlier episodes make."""

    divergence: Divergence
    played: int  # episodes that ended before
    lifetime: int  # in steps
    late: bool  # it showed only after a long life of the env
    attributes: list[str]  # that differ after the same seeded reset, with both values


class Examination(GymnasiumPlayer):
    """An env that the doctor checks, new copies of it, and the runs that its checks compare.

    Attributes:
        step_seconds: set by :meth:`time`, which may lower ``max_episode_steps``.
        lifetime: the number of steps after which a used env is last compared with a new one.
        changed: the difference of a new env and the first ones; None if none was seen.
        unsteady: a difference of two runs that does not recur; None if none was seen.
    """

    make: Callable[[], Env]  # always there

    def __init__(
        self,
        source: str | Callable[..., Env],
        backend: str | None,
        kwargs: Mapping[str, Any],
        max_episode_steps: int,
        seed: int,
    ):
        self.source = source
        self.kwargs = kwargs
        self.pooled = backend == "envpool"
        make: Callable[..., Env]
        if not isinstance(source, str):
            make = partial(source, **kwargs)
        elif self.pooled:
            make = partial(PooledEnv, source, **kwargs)
        else:
            # gymnasium's own checks warn and raise at first steps; the doctor's go further.
            make = partial(make_by_id, source, disable_env_checker=True, **kwargs)
        super().__init__(None, make, None, max_episode_steps, seed)  # type: ignore[arg-type]
        self.is_closed = True  # until it is made
        self.step_seconds = 0.0
        self.lifetime = 2 * max_episode_steps
        self.changed: Divergence | None = None
        self.unsteady: Divergence | None = None

    def open(self) -> None:
        """Make the env, and one more, which must be another."""
        env = self.make()
        advice = "make it as gymnasium.Env has it"
        if not isinstance(env, gym.Env):
            advice = old_api(str(type(env).__mro__)) or advice
            raise Failed(f"expected a gymnasium.Env, got {type(env).__name__}", advice=advice)
        self.env, self.is_closed = env, False
        another = self.make()
        if another is env:
            raise Failed(
                "the callable gave the same env twice; a new one is needed at each call",
                advice=advice,
            )
        another.close()

    def require(self, *checks: str) -> None:
        """Raise ``Skipped`` if a fault that was found would show again."""
        super().require(*checks)
        if "seed" in checks and self.unrepeatable is not None:
            raise Skipped("new envs differ under one seed (see seed)")

    @cached_property
    def without_form(self) -> str:
        """The reason that no batch can hold the env's observations or actions; empty if none."""
        try:
            SpaceCodec(self.env.observation_space, keys.OBSERVATION)
            SpaceCodec(self.env.action_space, keys.ACTION)
        except TypeError as error:
            return str(error)
        return ""

    @property
    def seeds(self) -> range:
        """The seeds that are tried."""
        return range(self.seed, self.seed + SEEDS)

    @property
    def limit(self) -> int | None:
        """The time limit of the env's wrappers, in steps."""
        limits = (one for one in _layers(self.env) if isinstance(one, gym.wrappers.TimeLimit))
        return next(map(steps_of_time_limit, limits), None)

    def time(self) -> None:
        """Time steps in two episodes; lower ``max_episode_steps`` if they are slow."""
        steps: list[float] = []
        for seed in self.seeds[:2]:
            began = now = time.perf_counter()
            for row in self.rows(self.env, seed):
                before, now = now, time.perf_counter()
                if row.is_reset:
                    parts = checks.leaves("", row[keys.OBSERVATION])
                    size = sum(np.asarray(leaf).nbytes for _, leaf in parts)
                    self._lower(PLAY_BYTES // max(size, 1))
                    continue
                steps.append(now - before)
                if now - began > PLAY_SECONDS:
                    self._lower(len(steps))
                    break
        self.step_seconds = float(np.median(steps)) if steps else 0.0

    def _lower(self, most: int) -> None:
        self.max_episode_steps = max(16, min(self.max_episode_steps, most))

    def run_new(self, seed: int, episodes: int = 1) -> Episodes:
        """Play episodes of a new env: the first after ``reset(seed)``, others after ``reset()``."""
        with self.another() as env:
            return [list(self.rows(env, seed if i == 0 else None)) for i in range(episodes)]

    @cached_property
    def fresh(self) -> dict[int, Episodes]:
        """The episodes of a new env per seed: one on each seed, and two on the first."""
        return {seed: self.run_new(seed, 2 if seed == self.seed else 1) for seed in self.seeds}

    @cached_property
    def unrepeatable(self) -> Divergence | None:
        """The first difference of two new envs under one seed, or None."""
        runs = self.fresh.items()
        differences = (
            first_divergence(seed, run, self.run_new(seed, len(run))) for seed, run in runs
        )
        return next(filter(None, differences), None)

    @cached_property
    def leak(self) -> Leak | None:
        """The first difference of a used env and a new one under one seed, or None.

        None also if the difference is not of the env's own past: see ``changed`` and ``unsteady``.
        """
        leak = self._leak()
        if leak is None:
            return None
        runs = 20 if leak.divergence.is_small else 2  # new envs may round otherwise now and then
        if self.is_changed(leak.divergence.seed, runs) or self.unsteady is not None:
            return None
        again = self._leak() if leak.played else None  # a new env differed: that is no leak
        if again is None or str(again.divergence) != str(leak.divergence):
            self.unsteady = leak.divergence
            return None
        return leak

    def _leak(self) -> Leak | None:
        with self.another() as env:
            # Each seed after every other, after itself, and after episodes left unfinished.
            lifetime = 0
            for played, seed in enumerate([*self.seeds, *reversed(self.seeds)]):
                run = [self.play(env, seed)]
                difference = first_divergence(seed, self.fresh[seed][:1], run)
                if difference is not None:
                    return Leak(difference, played, lifetime, False, self._left_over(env, seed))
                lifetime += len(run[0]) + 1
                self.leave_unfinished(env, seed + 1)
            if self.pooled:  # its seeded reset makes a new pool
                return None
            more, lived = self._live(env, self.lifetime - lifetime)
            self.lifetime = lifetime + lived
            for played, seed in enumerate(self.seeds, 8 + more):
                difference = first_divergence(seed, self.fresh[seed][:1], [self.play(env, seed)])
                if difference is not None:
                    return Leak(difference, played, self.lifetime, True, self._left_over(env, seed))
            return None

    def _live(self, env: Env, steps: int) -> tuple[int, int]:
        """Play for some steps, or seconds; return the number of episodes and of steps."""
        began, lived = time.perf_counter(), 0
        for episodes in count():
            for row in self.rows(env, None, action_seed=self.seed + episodes):
                lived += not row.is_reset
                if lived >= steps or time.perf_counter() - began > PLAY_SECONDS:
                    return episodes, lived
        raise AssertionError

    def is_changed(self, seed: int, runs: int = 2) -> bool:
        """Compare new envs with the first ones; True, and ``changed`` is set, if two differ."""
        if self.changed is None:
            first = self.fresh[seed][:1]
            found = [first_divergence(seed, first, self.run_new(seed)) for _ in range(runs)]
            self.changed = found[0] if all(found) else None
            self.unsteady = self.unsteady or (
                None if all(found) else next(filter(None, found), None)
            )
        return self.changed is not None

    def check_unchanged(self) -> None:
        """Raise ``Failed`` if a new env no longer does what the first ones did."""
        if self.is_changed(self.seed):
            raise Failed(
                f"a new env, and another one made after some had been played: {self.changed}",
                cause="state that outlives the envs: class attributes, module globals, a file",
                advice="keep state in self, made in __init__ or reset",
                data=self.changed.to_dict() if self.changed else {},
            )
        if self.unsteady is not None:
            raise self.by_chance(f"two new envs: {self.unsteady}", self.unsteady)

    def _left_over(self, used: Env, seed: int) -> list[str]:
        with self.another() as new:
            new.reset(seed=seed)
            used.reset(seed=seed)
            return unlike_attributes(new, used)

    def repeats_with(self, generators: Iterable[str]) -> bool:
        """Return whether new envs draw from these global generators, and agree if seeded."""
        runs = []
        with global_states_kept():
            for _ in range(2):
                for name in generators:
                    _SEED[name](0)
                watch = GlobalRandomness()
                runs.append({s: self.run_new(s, len(self.fresh[s])) for s in self.seeds})
            if not {*generators} & {*watch.moved()}:
                return False  # runs that differ by chance may also agree by chance
        return all(first_divergence(s, runs[0][s], runs[1][s]) is None for s in self.seeds)

    @cached_property
    def varied(self) -> list[list[Row]]:
        """Episodes on several seeds, each with its own actions."""
        return [list(self.rows(self.env, seed, action_seed=seed + 1)) for seed in self.seeds]

    def by_chance(self, evidence: str, difference: Divergence | None = None) -> Chance:
        """Return the failure of runs that should agree, and differ otherwise when repeated."""
        return Chance(
            f"{evidence}; run again, these do not differ there",
            cause=checks.SUMS if difference and difference.is_small else _NOW_AND_THEN,
            advice=OWN_RANDOM,
            data={} if difference is None else difference.to_dict(),
        )

    def affordable_steps(self) -> int:
        """Return the number of steps that may be played once more, 10 at least."""
        return max(int(_COMPARED_SECONDS / max(self.step_seconds, 1e-6)), 10)

    def why_not_resumed(self, history: bool) -> str | None:
        """Return the reason that a new env cannot take over from a used one; None if it can."""
        make = partial(make_resumable, self.make, history)
        with closing(make()) as env, closing(make()) as other:
            steps = min(COMPARED_STEPS, self.affordable_steps())
            first = list(islice(self.rows(env, self.seed), steps))
            # The second one begins without a seed, as episodes in a batch do.
            second = list(islice(self.rows(env, None), max(2, len(first) // 2)))
            why: str | None = other.load_state(env.save_state())
            return why or self._difference(env, other, second[-1].ends, steps)

    def _difference(self, env: Env, other: Env, ended: bool, steps: int) -> str | None:
        """Return the first difference of two envs in one state, played with the same actions."""
        actions = seeded(env.action_space, self.seed)
        for step in range(steps):
            action = None if ended else actions.sample()
            one, two = (
                gymnasium_row(each.reset(), "reset")
                if ended
                else gymnasium_row(each.step(deepcopy(action)), "step")
                for each in (env, other)
            )
            difference = checks.row_mismatch(one, two)
            if difference is not None:
                return f"it comes back, but {step + 1} steps on {difference}"
            ended = one.ends
        return None


def unlike_attributes(first: Any, second: Any) -> list[str]:
    """Return the plain attributes in which two envs, or their wrappers, differ, with both values.

    Numbers, strings, arrays, random generators, and lists, tuples and dicts of these are compared,
    also those in an attribute, such as running statistics. Others (a simulator, say) are left out,
    and gymnasium's own checks, which note what they have checked.
    """
    layers = zip(_layers(first), _layers(second), strict=True)
    pairs = [pair for pair in layers if not isinstance(pair[0], gym.wrappers.PassiveEnvChecker)]
    return [text for one, other in pairs for text in _unlike(type(one).__name__, one, other)]


def _unlike(path: str, first: Any, second: Any, inside: bool = True) -> Iterator[str]:
    # An attribute that one of them has not set yet may stand in its class.
    for name in getattr(first, "__dict__", {}) | getattr(second, "__dict__", {}):
        mine, its = getattr(first, name, None), getattr(second, name, None)
        if _is_plain(mine) and _is_plain(its):
            difference = checks.mismatch(f"{path}.{name}", _settled(mine), _settled(its))
            if difference is not None:
                values = f" ({shown(difference.first)} and {shown(difference.second)})"
                drawn = isinstance(mine, np.random.Generator)
                yield f"{difference.entry}{'' if drawn else values}"
        elif inside and not isinstance(mine, gym.Env) and type(mine) is type(its):
            yield from _unlike(f"{path}.{name}", mine, its, inside=False)


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


class PooledEnv(gym.Env[Any, Any]):
    """An EnvPool of one slot. As EnvPool seeds at construction, a seeded reset makes a new pool."""

    def __init__(self, task_id: str, **options: Any):
        # The backend raises for a wrong id, with its reason.
        self._make = lambda seed: EnvPoolBackend(task_id, 1, [seed], options).vector_env
        self._pool = self._make(0)
        self.observation_space = self._pool.observation_space
        self.action_space = self._pool.action_space

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> Begun:
        if seed is not None:
            self._pool.close()
            self._pool = self._make(seed)
        return _first(self._pool.reset())

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = np.asarray(action, dtype=self.action_space.dtype)[None]
        observation, reward, terminated, truncated, info = _first(self._pool.step(actions))
        ended = bool(truncated)
        return observation, float(reward), bool(terminated) and not ended, ended, info

    def close(self) -> None:
        self._pool.close()


def _first(returned: tuple[Any, ...]) -> Any:
    """Return the values of slot 0, of what a call of a pool returned."""
    *values, info = slot_of(returned, 0)
    return *values, {name: item for name, item in info.items() if name != "players"}
