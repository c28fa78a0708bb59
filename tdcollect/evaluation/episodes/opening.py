"""From the env argument of an evaluation to the slots that its episodes run in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.transforms import VecNormV2

from tdcollect.collect.env_parts import leaves_random_numbers_alone
from tdcollect.envs.make import make_env
from tdcollect.envs.transforms import all_transforms_of, innermost, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.global_streams import GlobalStream, Outside, WithStreams
from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.episodes.requested_env import RequestedEnv
from tdcollect.evaluation.episodes.slot_envs import SlotEnvs
from tdcollect.evaluation.settings import EvaluationSettings

_SLOTS = 16


class Opened(NamedTuple):
    """The slots of an evaluation.

    Attributes:
        env: the env with its transforms; that of slot 0 if slots are envs of their own.
        slots: the slots, if they are envs of their own; None for an env of ``make_env``.
        made: True if the envs were made here, and are closed at the end.
        with_streams: makes ``env`` anew from gymnasium envs whose draws from the global generators
            come from streams of their episodes; None if it cannot be made anew.
    """

    env: EnvBase
    slots: SlotEnvs | None = None
    made: bool = True
    with_streams: Callable[[], EnvBase] | None = None

    def close(self) -> None:
        """Close what was made here."""
        if not self.made:
            return
        if self.slots is not None:
            self.slots.close()
        elif not self.env.is_closed:
            self.env.close()


Finish = Callable[[EnvBase], EnvBase]


def open_env(
    env: Any, settings: EvaluationSettings, finish: Finish, most_slots: int | None = None
) -> Opened:
    """Open the env of an evaluation; one that is made here has at most one slot per episode.

    Args:
        env: as :class:`tdcollect.EvaluationCollector` takes it.
        settings: those of the evaluation.
        finish: adds to an env what the policy asks for, and checks it.
        most_slots: the most slots that are made here; None for any number.

    Raises:
        TypeError, ValueError: for what is no env, or one whose slots cannot be seeded one by one.
    """
    requested = env if isinstance(env, RequestedEnv) else None
    if requested is not None:
        env, finish = requested.bare, partial(_added, requested, finish)
    names = ("num_envs", "backend", "env_kwargs")
    given = [name for name in names if getattr(settings, name) is not None]
    episodes = max(len(settings.episode_indices), 1)
    if most_slots is not None:
        episodes = min(episodes, most_slots)
    if isinstance(env, EnvBase):
        if given:
            raise ValueError(f"the env {_text(env)} is made already: expected no {_and(given)}")
        return _open_made(env, episodes, finish, ours=False)
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)) or not (
        isinstance(env, str) or callable(env)
    ):
        raise TypeError(
            "expected a gymnasium id, a callable that makes an env, or a TorchRL env, got "
            f"{env!r}; a gymnasium env that is made already goes through tdcollect.make_env(env)"
        )
    env_kwargs = settings.env_kwargs
    slots = min(_SLOTS if settings.num_envs is None else settings.num_envs, episodes)
    if not isinstance(env, str):
        make = partial(_made, env, env_kwargs or {})
        made = make()
        if isinstance(made, EnvBase):
            try:
                return _open_callable(made, make, slots, given, episodes, finish)
            except BaseException:
                if not _is_unstarted(made):
                    made.close()
                raise
        if hasattr(made, "close"):
            made.close()  # made only to see its type
    if requested is not None and not requested.treats_rows_alone():
        if settings.backend not in (None, "serial"):
            raise ValueError(
                f"expected no backend {settings.backend!r}: each slot is an env of its own under "
                f"the transforms of {requested}, which may treat a batch otherwise than each row"
            )
        alone = partial(_made, partial(make_env, env, env_kwargs=env_kwargs), {})
        first = alone()
        try:
            return _slots(first, alone, slots, finish)
        except BaseException:
            first.close()
            raise
    how = {"num_envs": slots, "backend": settings.backend, "env_kwargs": env_kwargs}
    again = None if settings.backend == "envpool" else partial(_with_streams, env, how, finish)
    return Opened(_finished(make_env(env, **how), finish), with_streams=again)  # type: ignore[arg-type]


def open_one(env: Any, env_kwargs: dict[str, Any] | None, backend: str | None = None) -> EnvBase:
    """Make one env, for a function that makes a policy from it.

    Args:
        env: a gymnasium id, or a callable that makes an env.
        env_kwargs: for the env's constructor.
        backend: of :func:`tdcollect.make_env`, for an id.
    """
    kwargs = env_kwargs or {}
    if isinstance(env, RequestedEnv) and backend is not None:
        return _finished(open_one(env.bare, env_kwargs, backend), env.finished)
    if isinstance(env, str):
        return make_env(env, env_kwargs=kwargs, backend=backend)
    made = env(**kwargs)
    return made if isinstance(made, EnvBase) else make_env(made)


def _open_callable(
    made: EnvBase,
    make: Callable[[], EnvBase],
    count: int,
    given: list[str],
    episodes: int,
    finish: Finish,
) -> Opened:
    """Open the env that a callable has made, and with it those of further slots."""
    given = [name for name in given if name != "env_kwargs"]
    alone = _runs_alone(made)
    refused = [name for name in given if not alone or name != "num_envs"]
    if refused:
        what = "a TorchRL env" if alone else "an env whose slots are fixed"
        raise ValueError(f"the callable makes {what}, {_text(made)}: expected no {_and(refused)}")
    if not alone:
        return _open_made(made, episodes, finish, ours=True)
    return _slots(made, make, count, finish)


def _open_made(env: EnvBase, episodes: int, finish: Finish, ours: bool) -> Opened:
    """Open an env that was given, or that a callable has made."""
    base = innermost(env)
    if isinstance(base, (SerialEnv, ParallelEnv)):
        make = _maker(env, base)
        first = make()
        try:
            opened = _slots(first, make, min(base.num_workers, episodes), finish)
        except BaseException:
            first.close()
            raise
        if ours and not _is_unstarted(env):
            env.close()
        return opened
    if _runs_alone(env):
        return Opened(env, SlotEnvs([finish(env)]), made=False)
    if not isinstance(base, GymnasiumEnv):
        raise TypeError(_batched(env, base))
    _check_transforms(env)
    return Opened(finish(env), made=ours)


def _slots(first: EnvBase, make: Callable[[], EnvBase], count: int, finish: Finish) -> Opened:
    """Open ``count`` slots that are envs of their own."""

    def another() -> EnvBase:
        env = make()
        if env is first:
            raise ValueError(
                "expected a callable that makes a new env at each call, one per slot, got the "
                f"same {_text(env)} twice; make it in the callable, or pass the env itself"
            )
        return _still(finish(env))

    envs = [first]
    try:
        envs[0] = _still(finish(first))
        while len(envs) < count:
            envs.append(another())
        return Opened(envs[0], SlotEnvs(envs, another))
    except BaseException:
        for env in envs[1:]:
            env.close()  # the caller closes the first one
        raise


def _made(make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Make an env, whose constructor may draw: the same for every slot, and nothing outside."""
    with Outside(), GlobalStream(0):
        return make(**kwargs)


def _still(env: EnvBase) -> EnvBase:
    """Put the transforms of an env that was made here into eval mode, with statistics frozen."""
    for transform in all_transforms_of(env):
        transform.eval()
        if getattr(transform, "frozen", None) is False:
            transform.freeze()
    return env


def _added(requested: RequestedEnv, finish: Finish, env: EnvBase) -> EnvBase:
    """Add the transforms that were asked for, then what the policy asks for."""
    made = requested.finished(env)
    if made.batch_size and isinstance(innermost(made), GymnasiumEnv):
        _check_transforms(made)
    return finish(made)


def _finished(env: EnvBase, finish: Finish) -> EnvBase:
    try:
        return finish(env)
    except BaseException:
        env.close()
        raise


def _with_streams(env: Any, how: dict[str, Any], finish: Finish) -> EnvBase:
    """Make gymnasium envs whose draws from the global generators come from streams."""
    name = env if isinstance(env, str) else getattr(env, "__name__", None) or type(env).__name__
    make = WithStreams(partial(gym.make, env) if isinstance(env, str) else env, name)
    return _finished(make_env(make, **how), finish)


def _runs_alone(env: EnvBase) -> bool:
    """Tell whether an env is one slot, to be stepped through its own methods.

    An env of ``make_env`` is stepped below them, unless it is under a transform that may draw.
    """
    base = innermost(env)
    if isinstance(base, (SerialEnv, ParallelEnv)) or env.batch_size.numel() != 1:
        return False
    plain = type(env) is TransformedEnv or env is base
    known = plain and all(map(leaves_random_numbers_alone, transforms_of(env)))
    return not (isinstance(base, GymnasiumEnv) and (env.batch_size or known))


def _is_unstarted(env: EnvBase) -> bool:
    """Tell whether an env is a batched one whose envs are not made yet; closing it would raise."""
    base = innermost(env)
    return isinstance(base, (SerialEnv, ParallelEnv)) and base.is_closed


def _maker(env: EnvBase, base: Any) -> Callable[[], EnvBase]:
    """Return a function that makes one env of a ``SerialEnv`` or ``ParallelEnv``, as it is there.

    Raises:
        ValueError: if its envs are not alike.
    """
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
        made = _made(make_one, kwargs)
        if state:
            made.load_state_dict(state)
        if outer:
            made = TransformedEnv(made, T.Compose(*[transform.clone() for transform in outer]))
        return made

    return make


def _check_transforms(env: EnvBase) -> None:
    """Refuse transforms that make an episode's data depend on its slot or its neighbours."""
    for transform in transforms_of(env):
        by_slot = isinstance(transform, VecNormV2) and not transform.reduce_batch_dims
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


def _batched(env: EnvBase, base: EnvBase) -> str:
    """Return the message for an env whose slots cannot be seeded one by one."""
    advice = (
        "pass a function that makes one with batch size [] or [1] (num_envs=1, say), which is "
        "called once per slot: evaluate(make_one, policy)"
    )
    if isinstance(base, GymWrapper):
        advice = "pass the gymnasium id, or a function that makes one GymEnv without num_envs"
    return (
        f"expected an env whose slots can be seeded one by one, got {_text(base)} of batch size "
        f"{list(env.batch_size)}, which seeds all of them together; {advice}"
    )


def _and(names: list[str]) -> str:
    return ", ".join(names)


def _text(env: EnvBase) -> str:
    return " ".join(str(env).split())
