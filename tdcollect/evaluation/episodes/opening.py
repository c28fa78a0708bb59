"""The slots that an evaluation runs in: of one env, or any TorchRL envs, each stepped by itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect import keys
from tdcollect._upstream.torchrl import carried_entries, resets_with_seed, wrapped_env
from tdcollect.cleanup import close_env, close_may_fail
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.step_dict import StepDict, flat
from tdcollect.display import one_line
from tdcollect.envs.backends import failures, for_each_slot
from tdcollect.envs.beside import HonouredStarts
from tdcollect.envs.make import alike, make_env
from tdcollect.envs.process.values import options_of
from tdcollect.envs.slots import Can, SlotError
from tdcollect.envs.spaces import TextLeaf, lacks_action, nested
from tdcollect.envs.traits import (
    all_transforms_of,
    innermost,
    leaves_random_numbers_alone,
    transforms_of,
)
from tdcollect.envs.wrapper import GymnasiumEnv, texts_of
from tdcollect.evaluation.episodes.data import SUCCESS, entries_of
from tdcollect.evaluation.requested import RequestedEnv, closed_on_error, freeze, is_unstarted
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.keys import Key, entry_path, from_next, under_next
from tdcollect.randomness import GlobalStream, NotReproducibleError, Outside, WithStreams

SLOTS = 16


class OpenEnv(NamedTuple):
    """The env of an evaluation, with its transforms: that of slot 0 if slots have envs each."""

    env: EnvBase
    slots: SlotEnvs | None = None  # if they are envs of their own
    made: bool = True  # made here, and closed at the end
    # Makes it again from gymnasium envs whose global draws come from streams of their episodes.
    with_streams: Callable[[], EnvBase] | None = None

    def close(self) -> None:
        if not self.made:
            return
        if self.slots is not None:
            self.slots.close()
        elif not self.env.is_closed:
            with close_may_fail():
                close_env(self.env)


Finish = Callable[[EnvBase], EnvBase]


def open_env(
    env: Any,
    settings: EvaluationSettings,
    finish: Finish,
    most_slots: int | None = None,
    singly: bool = False,
) -> OpenEnv:
    """Open the env of an evaluation; one that is made here has at most one slot per episode.

    Each slot is an env of its own where ``finish`` adds what must not treat a batch: ``singly``.
    """
    requested = env if isinstance(env, RequestedEnv) else None
    if requested is not None:
        env, finish = requested.bare, partial(_added, requested, finish)
    names = ("num_envs", "backend", "env_kwargs")
    chosen = [name for name in names if getattr(settings, name) is not None]
    episodes = max(len(settings.episode_indices), 1)
    if most_slots is not None:
        episodes = min(episodes, most_slots)
    if isinstance(env, EnvBase):
        if chosen:
            raise ValueError(
                f"the env {_text(env)} is made already: expected no {', '.join(chosen)}"
            )
        return _open_made(env, episodes, finish, ours=False)
    env_kwargs = alike(env, settings.env_kwargs)
    slots = min(SLOTS if settings.num_envs is None else settings.num_envs, episodes)
    if not isinstance(env, str):
        make = partial(made_alike, env, env_kwargs or {})
        opened = make()
        if isinstance(opened, EnvBase):
            with closed_on_error(opened):
                alone = _runs_alone(opened)
                taken = ("env_kwargs", "num_envs") if alone else ("env_kwargs",)
                if refused := [name for name in chosen if name not in taken]:
                    what = "a TorchRL env" if alone else "an env whose slots are fixed"
                    raise ValueError(
                        f"the callable makes {what}, {_text(opened)}: expected no "
                        f"{', '.join(refused)}"
                    )
                if alone:
                    return _slots(opened, make, slots, finish)
                return _open_made(opened, episodes, finish, ours=True)
        if hasattr(opened, "close"):  # made only to see its type
            with close_may_fail():
                close_env(opened)
    if singly or (requested is not None and not requested.treats_rows_alone()):
        if settings.backend not in (None, "serial"):
            raise ValueError(
                f"expected no backend {settings.backend!r}: each slot is an env of its own under "
                f"the transforms of {requested or 'the policy'}, which may treat a batch otherwise "
                "than each row"
            )
        make = partial(made_alike, make_env, {"env": env, "env_kwargs": env_kwargs})
        with closed_on_error(make()) as first:
            return _slots(first, make, slots, finish)
    how = {"num_envs": slots, "backend": settings.backend, "env_kwargs": env_kwargs}
    again = None if settings.backend == "envpool" else partial(_with_streams, env, how, finish)
    with closed_on_error(make_env(env, **how)) as bare:  # type: ignore[arg-type]
        return OpenEnv(finish(bare), with_streams=again)


def _open_made(env: EnvBase, episodes: int, finish: Finish, ours: bool) -> OpenEnv:
    base = innermost(env)
    if isinstance(base, (SerialEnv, ParallelEnv)):
        make = _maker(env, base)
        with closed_on_error(make()) as first:
            opened = _slots(first, make, min(base.num_workers, episodes), finish)
        if ours and not is_unstarted(env):
            close_env(env)
        return opened
    if _runs_alone(env):
        return OpenEnv(env, SlotEnvs([finish(env)]), made=False)
    if not isinstance(base, GymnasiumEnv):
        advice = (
            "pass a function that makes one with batch size [] or [1] (num_envs=1, say), which is "
            "called once per slot: evaluate(make_one, policy)"
        )
        if isinstance(base, GymWrapper):
            advice = "pass the gymnasium id, or a function that makes one GymEnv without num_envs"
        raise TypeError(
            f"expected an env whose slots can be seeded one by one, got {_text(base)} of batch "
            f"size {list(env.batch_size)}, which seeds all of them together; {advice}. Or evaluate "
            "it in batches, with results of another kind: evaluate(env, policy, "
            f"episodes={env.batch_size.numel()}, episodes_per_slot=1) (--episodes-per-slot 1)"
        )
    _check_transforms(env)
    return OpenEnv(finish(env), made=ours)


def still(finish: Finish, env: EnvBase) -> EnvBase:
    """Return a slot that was made here, finished, with its transforms frozen."""
    env = finish(env)
    for transform in all_transforms_of(env):
        freeze(transform)
    return env


def warn_of_statistics(env: EnvBase) -> None:
    """Warn of gymnasium's normalizing wrappers, unless they are frozen."""
    base = innermost(env)
    try:
        if isinstance(base, GymnasiumEnv):
            reads = base.stepper.backend.attributes("get_wrapper_attr")
        else:
            reads = [wrapped_env(base).get_wrapper_attr]
        learns = [read("update_running_mean") for read in reads]
    except AttributeError:
        return
    if np.any(learns):
        warnings.warn(
            f"{env_name(env)} is under gymnasium's NormalizeObservation or NormalizeReward, whose "
            "running statistics are not those of the training: give the former its obs_rms and "
            "set update_running_mean = False; leave the latter out, so that returns are the env's",
            stacklevel=2,
        )


def _slots(first: EnvBase, make: Callable[[], EnvBase], count: int, finish: Finish) -> OpenEnv:

    def another() -> EnvBase:
        env = make()
        if env is first:
            raise ValueError(
                "expected a callable that makes a new env at each call, one per slot, got the "
                f"same {_text(env)} twice; make it in the callable, or pass the env itself"
            )
        return still(finish, env)

    envs = [first]
    try:
        envs[0] = still(finish, first)
        while len(envs) < count:
            envs.append(another())
        return OpenEnv(envs[0], SlotEnvs(envs, another))
    except BaseException:
        for env in envs[1:]:
            close_env(env)  # the caller closes the first one
        raise


def made_alike(make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Make an env, whose constructor draws the same for every slot, and nothing outside."""
    with Outside(), GlobalStream(0):
        return make(**kwargs)


def _added(requested: RequestedEnv, finish: Finish, env: EnvBase) -> EnvBase:
    transformed = requested.finished(env)
    if transformed.batch_size and isinstance(innermost(transformed), GymnasiumEnv):
        _check_transforms(transformed)
    return finish(transformed)


def _with_streams(env: Any, how: dict[str, Any], finish: Finish) -> EnvBase:
    name = env if isinstance(env, str) else getattr(env, "__name__", None) or type(env).__name__
    make = WithStreams(partial(gym.make, env) if isinstance(env, str) else env, name)
    with closed_on_error(make_env(make, **how)) as bare:
        return finish(bare)


def _runs_alone(env: EnvBase) -> bool:
    """Return whether an env is one slot, to be stepped through its own methods.

    One of ``make_env`` is stepped below them, unless it is under a transform that may draw, or that
    may read its texts.
    """
    base = innermost(env)
    if isinstance(base, (SerialEnv, ParallelEnv)) or env.batch_size.numel() != 1:
        return False
    plain = type(env) is TransformedEnv or env is base
    known = plain and all(map(leaves_random_numbers_alone, transforms_of(env)))
    known &= env is base or not texts_of(env)
    return not (isinstance(base, GymnasiumEnv) and (env.batch_size or known))


def _maker(env: EnvBase, base: Any) -> Callable[[], EnvBase]:
    pairs = list(zip(base.create_env_fn, base.create_env_kwargs, strict=True))
    make_one, kwargs = pairs[0]
    if any(make is not make_one or its != kwargs for make, its in pairs):
        raise ValueError(
            f"expected an env whose slots are alike, got {type(base).__name__} of unlike "
            "functions: an episode would depend on its slot; evaluate each function by itself"
        )
    # What its envs have learned, running statistics of transforms say, goes along.
    state = None if base.is_closed else base.state_dict()["worker0"]
    outer = all_transforms_of(env)

    def make() -> EnvBase:
        one = made_alike(make_one, kwargs)
        if state:
            one.load_state_dict(state)
        if outer:
            one = TransformedEnv(one, T.Compose(*[transform.clone() for transform in outer]))
        return one

    return make


def _check_transforms(env: EnvBase) -> None:
    """Refuse transforms that make an episode's data depend on its slot or its neighbours."""
    for transform in transforms_of(env):
        by_slot = isinstance(transform, T.VecNormV2) and not transform.reduce_batch_dims
        if by_slot and env.batch_size:
            raise NotReproducibleError(
                "the transform VecNormV2 keeps statistics of each slot apart, so that an episode "
                "would depend on where it runs; make it with reduce_batch_dims=True"
            )
        if next(transform.parameters(), None) is not None:
            raise NotReproducibleError(
                f"the transform {type(transform).__name__} runs a network, at a batch size that is "
                "the number of slots: another number would round differently. Move the network "
                "into the policy"
            )


def _text(env: EnvBase) -> str:
    return " ".join(str(env).split())


class SlotEnvs(SteppedEnv):
    """Env slots that are envs of their own, each with its transforms; stepped one after the other.

    Slots wait while others run. Each episode has streams of its own in the place of the global
    generators. Where an env has flags of groups of agents only, its episode ends when all agents
    are done.

    ``envs`` are alike, each of batch size ``[]`` or of one element, whose entries must be tensors
    of fixed shapes, or words; ``make`` makes another one.

    Attributes:
        now: with words, the TensorDict of each slot, as TorchRL's own loop would have it.
    """

    apart = True  # each slot is an env of its own
    base = None
    marks_truncation = True

    def __init__(self, envs: Sequence[EnvBase], make: Callable[[], EnvBase] | None = None):
        self.envs = list(envs)
        self._closed = False
        self._make = make
        takes = isinstance(innermost(self.envs[0]), (GymnasiumEnv, GymWrapper))
        self.can = Can(rebuild=make is not None, each_options=takes)
        self.prepare: Callable[[EnvBase], None] | None = None
        env = self.envs[0]
        leaves = {
            key: leaf
            for spec in (env.full_observation_spec, env.full_reward_spec, env.full_done_spec)
            for key, leaf in spec.items(True, True)
        }
        leaves = {key: leaf for key, leaf in leaves.items() if leaf.dtype is not None}
        odd = [key for key, leaf in leaves.items() if -1 in leaf.shape]
        if odd:
            raise ValueError(
                "expected an env whose entries are texts, or tensors of fixed shapes, got other "
                f"ones in {odd}; pad what varies, and put agents that differ into groups of their "
                "own (group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)"
            )
        self.acted = entries_of(env.full_action_spec)
        self.texts: dict[Key, TextLeaf] = {}
        for key, is_text in {**entries_of(env.full_observation_spec), **self.acted}.items():
            if is_text:
                self.texts[key] = self.texts[under_next(key)] = TextLeaf(gym.spaces.Text(1))
        self.now: dict[int, TensorDictBase] = {}
        self.name = env_name(env)
        self.transformed = env
        seen = entries_of(env.full_observation_spec)  # a History is one entry, not its group
        self.carried = [*dict.fromkeys([*carried_entries(env), *filter(seen.get, seen)])]
        self.batch_size = torch.Size([len(self.envs)])
        self.step_bytes = len(self.envs) * sum(
            leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves.values()
        )
        self._dims = len(env.batch_size)
        self.device = env.device
        self.home = env.device or self.home
        self._seeds_in_reset = resets_with_seed(innermost(env))
        self._streams: dict[int, GlobalStream] = {}  # of the episodes, by slot
        self._starts = [HonouredStarts(env) for env in self.envs]
        self._latest: list[StepDict] = [StepDict() for _ in self.envs]
        self._following: list[StepDict | None] = [None] * len(self.envs)

    @property
    def is_closed(self) -> bool:
        """True if the envs are closed, as far as they tell."""
        base = innermost(self.envs[0])
        tells = isinstance(base, GymnasiumEnv) or wrapped_env(base) is not base
        return self._closed or (tells and base.is_closed)

    @property
    def transforms(self) -> list[T.Transform]:
        return [transform for env in self.envs for transform in all_transforms_of(env)]

    @property
    def loads_data(self) -> bool:
        """True if episodes begin with rows of a data loader, as those of ``DatasetChatEnv`` do."""
        return any(type(one).__name__ == "DataLoadingPrimer" for one in self.transforms)

    def outside(self) -> Outside:
        """Keep the global generators as they are outside, while slots are reset and stepped."""
        return Outside(self.device)

    def close(self) -> None:
        """Close the envs; a second call does nothing."""
        if not self._closed:
            self._closed = True

            def close(slot: int) -> None:
                with close_may_fail():
                    close_env(self.envs[slot])

            failed = failures(range(len(self.envs)), close)
            if failed:  # once all are closed
                raise next(iter(failed.values()))

    def unseed(self, seeds: Sequence[int]) -> None:
        """Seed the envs, within :meth:`outside`."""
        for env, seed in zip(self.envs, seeds, strict=True):
            with self.outside(), GlobalStream(seed, self.device):
                env.set_seed(seed)

    def rebuild_slots(self, slots: list[int]) -> None:
        assert self._make is not None
        for slot in slots:
            with suppress(Exception):  # of an env that has failed
                close_env(self.envs[slot])
            self.envs[slot] = self._make()
            self._starts[slot] = HonouredStarts(self.envs[slot])
            if self.prepare is not None:
                self.prepare(self.envs[slot])
        self.transformed = self.envs[0]

    def latest_info(self, slot: int) -> dict[str, Any]:
        """The infos of a slot's latest step that tell of success, as gymnasium names them."""
        infos: dict[str, Any] = self.latest_infos([slot], SUCCESS)[slot]
        return infos

    def latest_infos(self, slots: Sequence[int], names: Sequence[str]) -> Mapping[int, Any]:
        """The infos, of these names at least; where env is not gymnasium's, its step's entries."""
        infos = {}
        for slot in slots:
            base = innermost(self.envs[slot])
            if isinstance(base, GymnasiumEnv):
                infos[slot] = base.stepper.backend.latest_infos([0], names)[0]
                continue
            row = (self._following[slot] or StepDict()).items()
            infos[slot] = {entry_path(k): value for k, value in row if k not in self.texts}
        return infos

    def reset_slot(self, slot: int, seed: int, options: Any = None) -> StepDict:
        """Start an episode in one slot, within :meth:`outside`; the row of its first step."""
        env = self.envs[slot]
        self._streams[slot] = GlobalStream(seed, self.device)
        how = {} if options is None else {"options": options}
        with self._streams[slot], self._starts[slot]:
            if self._seeds_in_reset:
                tensordict = env.reset(seed=seed, **how)
            else:
                env.set_seed(seed)
                tensordict = env.reset(**how)
        self.now[slot], self._latest[slot] = tensordict, self._row(tensordict)
        return self._latest[slot]

    def step_slot(self, slot: int, tensordict: TensorDictBase) -> StepDict:
        """Step one slot, within :meth:`outside`; the row of the following step."""
        with self._streams[slot], self._starts[slot]:
            stepped = self.envs[slot].step(tensordict)
        row = self._following[slot] = self._row(stepped.get(keys.NEXT))
        if self.texts:
            self.now[slot] = self.envs[slot].step_mdp(stepped)
        self._latest[slot] = StepDict({**self._latest[slot], **row})
        return row

    def given(self, row: StepDict) -> TensorDictBase:
        """The TensorDict of one slot's row, as its env takes it."""
        env = self.transformed
        lead = (1,) * self._dims
        entries = ((key, value.reshape(lead + value.shape)) for key, value in row.items())
        return nested(entries, env.batch_size, self.device)

    def _with_actions(self, slot: int, row: StepDict) -> TensorDictBase:
        """The TensorDict of one slot with the action of its row."""
        given, now = self.given(row), self.now[slot]
        if not self.texts:
            return given
        there = self.entries(now)
        for key, is_text in self.acted.items():
            if not is_text:
                now.set(key, given[key])
            elif key not in there or there[key] != row[key]:  # else it may be more than a text
                now.set(key, self.texts[key].read(row[key]).item())
        return now

    def reset_all(self, seeds: list[int] | None, options: dict[str, Any] | None) -> StepDict:
        rows = self._reset(list(range(len(self.envs))), seeds, options)
        return StepDict((key, torch.stack([row[key] for row in rows])) for key in rows[0])

    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> tuple[StepDict, SlotError | None]:
        self.check_acted(step)
        if self.device is not None:  # each entry crosses once, rather than once per slot
            step = StepDict((key, value.to(self.device)) for key, value in step.items())

        def step_one(slot: int) -> None:
            row = StepDict((key, value[slot]) for key, value in step.items())
            self.step_slot(slot, self._with_actions(slot, row))

        with self.outside():
            causes = failures(range(len(self.envs)) if slots is None else slots, step_one)
        some = next((row for row in self._following if row is not None), None)
        if some is None:
            raise SlotError("step", causes)
        rows = [row or some for row in self._following]
        following = StepDict((key, torch.stack([row[key] for row in rows])) for key in some)
        for key in next_keys:
            following.setdefault(from_next(key), step[key])
        return following, SlotError("step", causes) if causes else None

    def check_acted(self, step: StepDict) -> None:
        missing = [key for key in self.acted if key not in step]
        if missing:
            raise lacks_action(missing[0], step)

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        rows = self._reset(slots, seeds, options)
        begun = StepDict(following)
        for key in self.carried:
            if key in following:
                begun[key] = following[key].clone()
            elif key in rows[0]:
                begun[key] = torch.stack([row[key] for row in self._latest])
            else:
                continue
            for slot, row in zip(slots, rows, strict=True):
                # As nothing of an episode may reach the next one.
                begun[key][slot] = row.get(key, 0)
        return begun

    def _reset(
        self, slots: list[int], seeds: list[int] | None, options: Mapping[Any, Any] | None
    ) -> list[StepDict]:
        rows = []
        assert seeds is not None  # as episodes of an evaluation are seeded
        starts = dict(zip(slots, seeds, strict=True))

        def reset(slot: int) -> None:
            rows.append(self.reset_slot(slot, starts[slot], options_of(options, slot)))

        with self.outside():
            for_each_slot("reset", slots, reset)
        return rows

    def entries(self, tensordict: TensorDictBase) -> StepDict:
        dims, row = self._dims, flat(tensordict)
        if dims:
            row = StepDict((key, value.reshape(value.shape[dims:])) for key, value in row.items())
        for key, leaf in self.texts.items():
            if (value := tensordict.get(key, None)) is not None:
                row[key] = leaf.numbers(np.array(text_of(value, dims), object))
        return row

    def _row(self, tensordict: TensorDictBase) -> StepDict:
        row = self.entries(tensordict)
        if keys.DONE not in row:
            row[keys.DONE] = _all_groups(row, keys.DONE)
            row[keys.TERMINATED] = _all_groups(row, keys.TERMINATED) & row[keys.DONE]
        return with_truncated(row)

    def __repr__(self) -> str:
        return one_line(self, self.name, f"{len(self.envs)} slots")


def text_of(value: Any, dims: int) -> str:
    """An entry of a slot as text: itself, or anything else, such as a ``History``, as JSON."""
    plain = value.tolist()
    for _ in range(dims):
        plain = plain[0]
    return (
        plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, sort_keys=True)
    )


_NAMES = ("scenario_name", "env_name", "task_name")
"""Attributes of TorchRL's wrappers that tell which env of a library it is."""


def env_name(env: EnvBase) -> str:
    """Return the name of an env: gymnasium's id, or its class with what it was made from."""
    base = innermost(env)
    if isinstance(base, GymnasiumEnv):
        return base.name
    inner = wrapped_env(base)
    if isinstance(inner, gym.Env) and inner.spec is not None:
        return inner.spec.id
    told = [value for name in _NAMES if isinstance(value := vars(base).get(name), str)]
    metadata = getattr(inner, "metadata", None)
    if not told and isinstance(metadata, Mapping) and isinstance(metadata.get("name"), str):
        told = [metadata["name"]]  # as PettingZoo's envs have it
    return f"{type(base).__name__}({', '.join(told)})" if told else type(base).__name__


def with_truncated(row: StepDict) -> StepDict:
    """Add the flag that a time limit is marked with, unless it is there."""
    if keys.TRUNCATED not in row:
        row[keys.TRUNCATED] = row[keys.DONE] & ~row[keys.TERMINATED]
    return row


def _all_groups(row: StepDict, name: str) -> torch.Tensor:
    """The flag ``[1]`` of an episode, from those of its groups of agents."""
    flags = [v.all() for key, v in row.items() if not isinstance(key, str) and key[-1] == name]
    return torch.stack(flags).all().reshape(1)
