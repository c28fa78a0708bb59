"""The settings of an evaluation: one object, checked before an env is made."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torchrl.envs.utils import ExplorationType

from tdcollect import check
from tdcollect.display import count_text, one_line
from tdcollect.envs.make import BACKENDS
from tdcollect.evaluation.episodes.data import info_and_rule
from tdcollect.evaluation.episodes.groups import AGENT, BY, GROUP, is_measure
from tdcollect.evaluation.ledger import is_metric_name
from tdcollect.files import existing
from tdcollect.seeding import env_seed, policy_seed

Seeds = Sequence[int] | Mapping[int, int] | Callable[[int], int]
Metrics = Mapping[str, str | Callable[[TensorDict], Any]]
Options = (
    Sequence[Mapping[str, Any] | None]
    | Mapping[int, Mapping[str, Any] | None]
    | Callable[[int], Mapping[str, Any] | None]
    | str
    | os.PathLike[str]
)
Function = TypeVar("Function", bound=Callable[..., Any])


ENDLESS = 1_000_000
"""The steps after which an episode without a limit is taken for one that never ends."""


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation, as :func:`tdcollect.evaluate` takes them.

    All but the last five decide the episodes' data, and are in the manifest.

    Args:
        episodes: the number of episodes, of indices from 0; or the indices to run.
        seed: the root seed.
        env_seeds: the envs' seeds, in place of those that follow from the root seed: one per
            episode, a mapping from its index, or a function of its index. Kept as a mapping.
        metrics: numbers of an episode for its record, by name. ``"info:cost"`` is the sum over its
            steps of an info of the env, ``"info:cost:max"`` the largest and ``"info:cost:last"``
            the last one. Or a function, given the episode's data ``[L]`` as this yields them: it
            returns a number, or None for an episode without one. With groups of agents,
            ``"return/red"``, ``"length/red"`` and ``"success/red"`` are numbers of a group,
            ``"return/red/agent_0"`` of an agent; ``{"by": "group"}`` and ``{"by": "agent"}`` stand
            for all of them. Kept in the order of names.
        episode_options: gymnasium's reset options: one dict per episode, a mapping from its index,
            a function of its index, or a JSON file with a list or an object by index. None in the
            place of a dict for no options. Values are those of JSON. Kept as a mapping.
        exploration_type: of the policy; by default its most likely action.
        max_episode_steps: truncate episodes at this length. None to leave their end to the env: one
            that takes a million steps without an end is an error, unless this is ``math.inf``.
        reward_keys: the reward entries that the return is made of, for an env with several or with
            several agents; None for all. A key is a name, a tuple of names for a nested entry, or
            its path (``"agents/reward"``); several are a list. Kept as a list of paths.
        episodes_per_slot: the number of episodes that each slot of a batched simulator, which seeds
            its slots together, gives to a batch. They are of another kind than numbered episodes,
            which other envs have, with None.
        inference_batch_size: the batch size that the policy always runs at, whatever the number of
            slots: another one rounds differently.
        inference_threads: the number of torch's threads that the policy always runs with: another
            one may round differently.
        eval_mode: run the policy in eval mode, whatever its mode outside; False to keep the modes
            of its modules. A callable that is not a module runs as it is.
        device: the device that the policy runs on; None for that of its parameters.
        env_kwargs: for the env's constructor.
        num_envs: the number of slots, at most one per episode; None for 16, or for those of the
            env that is given. A callable that makes a TorchRL env is called once per slot.
        backend: of :func:`tdcollect.make_env`, for an id or a callable of a gymnasium env.
        on_env_error: ``"restart"`` an episode whose env raises on a new env, or ``"raise"``.
        max_restarts: the number of restarts before an episode is recorded as failed.
        fresh_envs: build a new env for each episode; None to do so if the env is found to carry
            state from one episode into the next. Of a batched simulator, for each batch; None to do
            so if a function makes it.

    Attributes:
        episode_indices: the indices of the episodes to run.

    Raises:
        TypeError, ValueError: if a setting cannot be honoured.
    """

    episodes: int | Sequence[int] = 100
    seed: int = 0
    _: KW_ONLY
    env_seeds: Seeds | None = None
    metrics: Metrics | None = None
    episode_options: Options | None = None
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC
    max_episode_steps: float | None = None
    reward_keys: NestedKey | Sequence[NestedKey] | None = None
    episodes_per_slot: int | None = None
    inference_batch_size: int = 16
    inference_threads: int = 1
    eval_mode: bool = True
    device: torch.device | str | None = None
    env_kwargs: dict[str, Any] | None = None
    num_envs: int | None = None
    backend: str | None = None
    on_env_error: str = "restart"
    max_restarts: int = 2
    fresh_envs: bool | None = None
    episode_indices: Sequence[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        indices = _indices(self.episodes)
        object.__setattr__(self, "episode_indices", indices)
        check.count(seed=self.seed)
        check.positive_int_or_none(num_envs=self.num_envs, episodes_per_slot=self.episodes_per_slot)
        for name in ("env_seeds", "episode_options"):
            if self.episodes_per_slot is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"expected no {name} with episodes_per_slot: a batch has one seed, and its "
                    f"slots are reset together; leave {name} out"
                )
        if self.max_episode_steps != math.inf:
            check.positive_int_or_none(max_episode_steps=self.max_episode_steps)
        check.positive_int(
            inference_batch_size=self.inference_batch_size, inference_threads=self.inference_threads
        )
        check.bools(eval_mode=self.eval_mode)
        if not isinstance(self.fresh_envs, bool | None):
            raise TypeError(f"expected fresh_envs to be a bool or None, got {self.fresh_envs!r}")
        check.one_of(("restart", "raise"), on_env_error=self.on_env_error)
        check.count(max_restarts=self.max_restarts)
        if not isinstance(self.exploration_type, ExplorationType):
            raise TypeError(
                "expected exploration_type to be one of torchrl's ExplorationType, got "
                f"{self.exploration_type!r}"
            )
        if self.env_seeds is not None:
            object.__setattr__(self, "env_seeds", _seed_by_index(self.env_seeds, indices))
        if self.reward_keys is not None:
            object.__setattr__(self, "reward_keys", _paths(self.reward_keys))
        if self.episode_options is not None:
            options = EpisodeOptions.of(self.episode_options, indices)
            object.__setattr__(self, "episode_options", options)
        if self.metrics is not None:
            object.__setattr__(self, "metrics", _checked_metrics(self.metrics))
        check.one_of((*BACKENDS, None), backend=self.backend)
        if self.device is not None:
            object.__setattr__(self, "device", check.device(self.device, here=False))

    def check_whole(self, here: bool) -> None:
        """Raise ValueError if batches are asked for that do not run whole, in one process."""
        if self.episodes_per_slot is not None and not here:
            raise ValueError(
                "expected no workers and no shard with episodes_per_slot: a batch runs whole, in "
                "one process, and batches that ran elsewhere need not be the same; leave them out"
            )

    @property
    def step_limit(self) -> int | None:
        """The length at which episodes are truncated; None for no limit."""
        limit = self.max_episode_steps
        return None if limit is None or limit == math.inf else int(limit)

    def seed_schedule(self) -> Callable[[int], tuple[int, int]]:
        """Return a function from an episode's index to the seeds of its env and its policy."""
        seed_of: Any = partial(env_seed, self.seed)
        if self.env_seeds is not None:
            seed_of = cast("Mapping[int, int]", self.env_seeds).__getitem__
        return _recent(lambda index: (seed_of(index), policy_seed(self.seed, index)))

    def __repr__(self) -> str:
        others = [
            f"{entry.name} given"
            if entry.name in ("env_seeds", "metrics", "episode_options")
            else f"{entry.name}={value!r}"
            for entry in fields(self)
            if entry.init and (value := getattr(self, entry.name)) != entry.default
            if entry.name not in ("episodes", "seed")
        ]
        count = count_text(len(self.episode_indices), "episode")
        return one_line(self, count, f"seed={self.seed}", *others)


# An episode's seeds are asked for when it starts and when it ends; of a million, few run at once.
_recent = lru_cache(maxsize=2**14)


def takes_settings(function: Function) -> Function:
    """Show the settings in the signature of a function, in the place of its ``**settings``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    every = inspect.signature(EvaluationSettings).parameters
    # Functions with episodes of another kind have names of their own for these two.
    shown_already = {*signature.parameters, "episodes", "seed"}
    settings = [every[name] for name in every if name not in shown_already]
    leading = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    shown = [*leading, *settings, *own[len(leading) :]]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


class EpisodeOptions(dict[int, Any]):
    """Reset options by the index of an episode, and the name of where they come from, if any."""

    name: str | None = None

    @classmethod
    def of(cls, source: Any, indices: Sequence[int]) -> EpisodeOptions:
        """Return the options of each episode, checked, as JSON has them."""
        name = getattr(source, "name", None) if isinstance(source, EpisodeOptions) else None
        if isinstance(source, (str, os.PathLike)):
            name, source = Path(source).name, _read_options(Path(source))
        elif callable(source):
            name = getattr(source, "__qualname__", type(source).__qualname__)
            name = f"{getattr(source, '__module__', None)}.{name}"
        look = _by_index(source, indices, "episode_options", "a dict")
        by_index = cls()
        by_index.name = name
        for index in indices:
            options = look(index)
            if options is not None and not isinstance(options, Mapping):
                raise TypeError(
                    f"expected episode_options that are dicts or None, got {options!r} for episode "
                    f"{index}"
                )
            try:
                by_index[index] = json.loads(json.dumps(options, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    "expected episode_options of values that JSON has, as the manifest keeps them, "
                    f"got {options!r} for episode {index} ({error}); pass a number or a text that "
                    "the env finds the rest by"
                ) from error
        return by_index


def _read_options(file: Path) -> Any:
    """Read the options of episodes from a JSON file: a list, or an object by index."""
    try:
        content = json.loads(existing(file, "a JSON file for episode_options").read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {file} to be JSON: {error}") from error
    if isinstance(content, dict) and all(key.isdecimal() for key in content):
        return {int(key): options for key, options in content.items()}
    if not isinstance(content, list):
        raise ValueError(  # noqa: TRY004, the file's content is wrong and no argument's type
            f"expected {file} to hold a list of options, or an object with the indices of episodes "
            f"as keys, got {type(content).__name__}"
        )
    return content


def _checked_metrics(metrics: Any) -> Metrics | None:
    """Return the metrics in the order of their names; None for none."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "expected metrics to be a mapping from names, such as {'cost': 'info:cost'}, got "
            f"{metrics!r}"
        )
    for name, metric in metrics.items():
        if not is_metric_name(name):
            raise ValueError(
                "expected the name of a metric to be letters, digits, '_' and '-', with '/' "
                f"between parts, and no key of a record, got {name!r}"
            )
        of_groups = is_measure(metric) or (name == BY and metric in (GROUP, AGENT))
        if not (callable(metric) or of_groups):
            info_and_rule(metric)
    return {name: metrics[name] for name in sorted(metrics)} or None


def _paths(reward_keys: Any) -> list[str]:
    """Return the paths of one key or of several."""
    several = reward_keys if isinstance(reward_keys, list) else [reward_keys]
    paths = []
    for key in several:
        names = [key] if isinstance(key, str) else key
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and n for n in names):
            names = []
        paths.append("/".join(names))
    if not paths or "" in paths or len({*paths}) < len(paths):
        raise ValueError(
            "expected reward_keys to be the key of a reward entry, such as ('agents', 'reward'), "
            f"or a list of keys that do not recur, got {reward_keys!r}"
        )
    return sorted(paths)


def _indices(episodes: int | Sequence[int]) -> Sequence[int]:
    """Return the indices of the episodes to run, from their number or themselves."""
    if check.is_count(episodes) and int(episodes) <= sys.maxsize:  # type: ignore[arg-type]
        return range(int(episodes))  # type: ignore[arg-type]
    if isinstance(episodes, (Sequence, np.ndarray)) and all(map(check.is_count, episodes)):
        indices = [int(index) for index in episodes]
        if len(set(indices)) == len(indices) and max(indices, default=0) <= sys.maxsize:
            return indices
    raise ValueError(
        "expected episodes to be a count, or indices that are not negative, below 2**63 and do not "
        f"recur, got {episodes!r}"
    )


def _by_index(source: Any, indices: Sequence[int], name: str, what: str) -> Callable[[int], Any]:
    """Return a function from an episode's index to what is given for it."""
    if isinstance(source, Mapping):
        without = next((index for index in indices if index not in source), None)
        if without is not None:
            raise ValueError(f"expected {what} for each episode, got none for episode {without}")
    elif isinstance(source, (Sequence, np.ndarray)):
        if len(source) <= max(indices, default=-1):
            raise ValueError(
                f"expected {what} for each of the episodes up to index {max(indices)}, got "
                f"{len(source)} {what.removeprefix('a ')}s"
            )
    elif not callable(source):
        raise TypeError(
            f"expected {name} to be one {_KINDS[name]} per episode, or a function of the episode's "
            f"index, got {source!r}"
        )
    return source if callable(source) else source.__getitem__


_KINDS = {"env_seeds": "int", "episode_options": "dict"}


def _seed_by_index(env_seeds: Seeds, indices: Sequence[int]) -> dict[int, int]:
    """Return the given seed of each episode, checked."""
    seed_of = _by_index(env_seeds, indices, "env_seeds", "a seed")
    index_of: dict[int, int] = {}
    for index in indices:
        if not check.is_count(value := seed_of(index)):
            raise ValueError(
                f"expected env_seeds that are ints and not negative, got {value!r} for episode "
                f"{index}"
            )
        earlier = index_of.setdefault(int(value), index)
        if earlier != index:
            raise ValueError(
                f"expected a seed of its own for each episode, got {value} for episodes {earlier} "
                f"and {index}: one would count twice, and intervals would be too narrow; give "
                "seeds that do not recur"
            )
    return {index: value for value, index in index_of.items()}
