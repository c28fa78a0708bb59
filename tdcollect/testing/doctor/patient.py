"""The env under the doctor's eyes: what makes it, and what is played."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from tdcollect import keys
from tdcollect._upstream.gymnasium import steps_of_time_limit
from tdcollect.envs.spaces import SpaceCodec
from tdcollect.testing.doctor.attributes import unlike_attributes
from tdcollect.testing.doctor.divergence import Divergence, Run, first_divergence
from tdcollect.testing.doctor.pooled import PooledEnv
from tdcollect.testing.gymnasium_probe import Env, Probe, Row
from tdcollect.testing.report import Broken, NotChecked

PLAY_SECONDS = 2.0
"""How long one episode may take; slower envs are played for fewer steps."""
PLAY_BYTES = 32 * 2**20
"""How much the observations of one episode may take; larger ones are played for fewer steps."""
SEEDS = 4
"""How many seeds are tried."""

GLOBAL = {"numpy": "np.random", "random": "Python's random", "torch": "torch"}


class Leak(NamedTuple):
    """What shows of the episodes before.

    Attributes:
        divergence: where a used env differs from a new one.
        played: how many episodes the used one had ended.
        lifetime: how many steps it had made in all.
        late: whether it showed only late in the life of an env.
        attributes: what differs in it after the same seeded reset, with both values.
    """

    divergence: Divergence
    played: int
    lifetime: int
    late: bool
    attributes: list[str]


class Patient(Probe):
    """An env that the doctor looks at.

    Args:
        given: what the user gave: an id or a callable.
        backend: ``"envpool"`` for an EnvPool id, else None.
        kwargs: for what makes the env.
        steps: the most steps of an episode.
        seed: the first seed.

    Attributes:
        step_seconds, reset_seconds: how long these take; set by :meth:`time`.
        lifetime: how many steps a used env has made when it is last compared with a new one.
        broken: the questions that were found broken so far.
        changed: where a new env no longer does what the first ones did; None where that was not
            seen.
        unsteady: where runs differ that do not differ when they are run again; None likewise.
        has_chance: the place in ``broken`` of the question that saw this first; None likewise.
    """

    make: Callable[[], Env]  # always there

    def __init__(
        self,
        given: str | Callable[..., Env],
        backend: str | None,
        kwargs: Mapping[str, Any],
        steps: int,
        seed: int,
    ):
        self.given = given
        self.kwargs = kwargs
        self.pooled = backend == "envpool"
        make: Callable[..., Env]
        if not isinstance(given, str):
            make = partial(given, **kwargs)
        elif self.pooled:
            make = partial(PooledEnv, given, **kwargs)
        else:
            # gymnasium's own checks warn and raise at first steps; the questions here go further.
            make = partial(gym.make, given, disable_env_checker=True, **kwargs)
        env = make()
        if not isinstance(env, gym.Env):
            raise Broken(f"expected a gymnasium.Env, got {type(env).__name__}")
        super().__init__(env, make, None, steps, seed)
        another = make()
        if another is env:
            raise Broken("the callable gave the same env twice; a new one is needed at each call")
        another.close()
        self.step_seconds = self.reset_seconds = 0.0
        self.lifetime = 2 * steps
        self.broken: list[str] = []
        self.changed: Divergence | None = None
        self.unsteady: Divergence | None = None
        self.has_chance: int | None = None

    def needs(self, *names: str) -> None:
        """Raise unless all questions of these names may be sound.

        Raises:
            NotChecked: where the fault that one of them found would show in another as well.
        """
        found = [name for name in names if name in self.broken]
        if found:
            raise NotChecked(f"not asked: a fault told above would show here too (see {found[0]})")

    @cached_property
    def without_form(self) -> str:
        """The reason that no batch can hold the env's observations or actions; empty if one can."""
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
        layer: Any = self.env
        while isinstance(layer, gym.Wrapper):
            if isinstance(layer, gym.wrappers.TimeLimit):
                return steps_of_time_limit(layer)
            layer = layer.env
        return None

    def time(self) -> None:
        """Play two episodes, for how long a step takes and how many to play from here on."""
        resets: list[float] = []
        steps: list[float] = []
        for seed in self.seeds[:2]:
            began = now = time.perf_counter()
            for row in self.rows(self.env, seed):
                taken = time.perf_counter() - now
                (resets if row.is_reset else steps).append(taken)
                now = time.perf_counter()
                if row.is_reset:
                    size = _nbytes(row.observation)
                    self.steps = max(16, min(self.steps, PLAY_BYTES // max(size, 1)))
                elif now - began > PLAY_SECONDS:
                    self.steps = max(16, min(self.steps, len(steps)))
                    break
        for seed in self.seeds:
            began = time.perf_counter()
            self.env.reset(seed=seed)
            resets.append(time.perf_counter() - began)
        self.reset_seconds = float(np.median(resets))
        self.step_seconds = float(np.median(steps)) if steps else 0.0

    def run(self, env: Env, seed: int, episodes: int = 1) -> Run:
        """Episodes of one env: the first after ``reset(seed)``, the others after ``reset()``."""
        return [list(self.rows(env, seed if i == 0 else None)) for i in range(episodes)]

    def run_anew(self, seed: int, episodes: int = 1) -> Run:
        """The same of a new env."""
        env = self.make()
        try:
            return self.run(env, seed, episodes)
        finally:
            env.close()

    @cached_property
    def fresh(self) -> dict[int, Run]:
        """What a new env does on each seed: one episode, and two on the first seed."""
        return {seed: self.run_anew(seed, 2 if seed == self.seed else 1) for seed in self.seeds}

    @cached_property
    def unrepeatable(self) -> Divergence | None:
        """Where two new envs differ under one seed."""
        for seed, run in self.fresh.items():
            found = first_divergence(seed, run, self.run_anew(seed, len(run)))
            if found is not None:
                return found
        return None

    @cached_property
    def leak(self) -> Leak | None:
        """Find where a used env differs from a new one under one seed.

        None also where something else than the env's own past makes the difference: see ``changed``
        and ``unsteady``.
        """
        found = self._leak()
        if found is None or self.is_changed(found.divergence.seed):
            return None
        again = self._leak()
        if again is None or str(again.divergence) != str(found.divergence):
            self.unsteady = found.divergence
            return None
        return found

    def _leak(self) -> Leak | None:
        env = self.make()
        try:
            # Each seed after every other, after itself, and after episodes left unfinished.
            lifetime = 0
            for played, seed in enumerate([*self.seeds, *reversed(self.seeds)]):
                run = self.run(env, seed)
                found = first_divergence(seed, self.fresh[seed][:1], run)
                if found is not None:
                    return Leak(found, played, lifetime, False, self._left_over(env, seed))
                lifetime += len(run[0]) + 1
                self._leave_unfinished(env, seed + 1)
            if self.pooled:  # its seeded reset makes a new pool
                return None
            more, lived = self._live(env, self.lifetime - lifetime)
            self.lifetime = lifetime + lived
            for played, seed in enumerate(self.seeds, 8 + more):
                found = first_divergence(seed, self.fresh[seed][:1], self.run(env, seed))
                if found is not None:
                    return Leak(found, played, self.lifetime, True, self._left_over(env, seed))
            return None
        finally:
            env.close()

    def _live(self, env: Env, steps: int) -> tuple[int, int]:
        """Play for so many steps, or so long; returns how many episodes and steps it was."""
        began, lived = time.perf_counter(), 0
        for episodes in count():
            for row in self.rows(env, None, action_seed=self.seed + episodes):
                lived += not row.is_reset
                if lived >= steps or time.perf_counter() - began > PLAY_SECONDS:
                    return episodes, lived
        raise AssertionError

    def is_changed(self, seed: int) -> bool:
        """Compare a new env with the first ones; True, and ``changed`` is set, if they differ."""
        if self.changed is None:
            self.changed = first_divergence(seed, self.fresh[seed][:1], self.run_anew(seed))
        return self.changed is not None

    def _leave_unfinished(self, env: Env, seed: int) -> None:
        unfinished = self.rows(env, seed)
        for _ in range(3):
            next(unfinished, None)

    def _left_over(self, used: Env, seed: int) -> list[str]:
        new = self.make()
        try:
            new.reset(seed=seed)
            used.reset(seed=seed)
            return unlike_attributes(new, used)
        finally:
            new.close()

    def repeats_with(self, generators: Iterable[str]) -> bool:
        """Whether new envs agree once these global generators start from one and the same state."""
        runs = []
        for _ in range(2):
            with pinned(generators):
                runs.append({s: self.run_anew(s, len(self.fresh[s])) for s in self.seeds})
        return all(first_divergence(s, runs[0][s], runs[1][s]) is None for s in self.seeds)

    @cached_property
    def varied(self) -> list[list[Row]]:
        """Episodes on several seeds, each with actions of its own."""
        return [list(self.rows(self.env, seed, action_seed=seed + 1)) for seed in self.seeds]


def _nbytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(_nbytes, value))
    return int(np.asarray(value).nbytes)


@contextmanager
def pinned(generators: Iterable[str]) -> Any:
    """Start these global generators from seed 0, and put them back in the end."""
    import random

    generators = set(generators)
    numpy_state, random_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng() if "torch" in generators else nullcontext():
        try:
            if "numpy" in generators:
                np.random.seed(0)  # noqa: NPY002
            if "random" in generators:
                random.seed(0)
            if "torch" in generators:
                torch.manual_seed(0)
            yield
        finally:
            if "numpy" in generators:
                np.random.set_state(numpy_state)  # noqa: NPY002
            if "random" in generators:
                random.setstate(random_state)
