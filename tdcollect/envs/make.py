"""``make_env``: from an id, a callable or a vector env to a TorchRL env."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Never

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tdcollect import check
from tdcollect.cleanup import ended_on_error
from tdcollect.envs.backends import EnvPoolBackend, SerialBackend, VectorBackend
from tdcollect.envs.process.agents import as_env
from tdcollect.envs.process.backend import START_METHODS, ProcessBackend
from tdcollect.envs.process.worker import make_by_id, spec_of
from tdcollect.envs.slots import RESUMABLE, Backend, Stepper
from tdcollect.envs.spaces import Bookkeeping
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.seeding import slot_seeds

OnEnvError = Literal["raise", "restart"]

_MAX_RESTARTS = 100

_EXPECTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "serial": (
        (str, gym.Env, Callable),
        "a gymnasium id, a callable that makes a gymnasium.Env, or a gymnasium.Env",
    ),
    "process": ((str, Callable), "a gymnasium id or a callable that makes a gymnasium.Env"),
    "gymnasium": ((VectorEnv,), "a gymnasium.vector.VectorEnv (gymnasium.make_vec makes one)"),
    "envpool": ((str,), "an EnvPool id"),
}
BACKENDS = tuple(_EXPECTED)


def make_env(
    env: str | Callable[..., gym.Env[Any, Any]] | gym.Env[Any, Any] | VectorEnv[Any, Any, Any],
    num_envs: int | None = None,
    *,
    backend: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    seed: int | Sequence[int] | None = None,
    device: torch.device | str | int | None = None,
    categorical_action_encoding: bool | None = None,
    info_keys: Sequence[str] | Mapping[str, Any] = (),
    step_count: bool = False,
    episode_reward: bool = False,
    is_init: bool = False,
    max_episode_steps: int | None = None,
    num_workers: int | None = None,
    timeout: float | None = None,
    start_method: str | None = None,
    wait_num: int | None = None,
    wait_timeout: float | None = None,
    check_finite: bool = False,
    on_env_error: OnEnvError = "raise",
    max_restarts: int | None = None,
    resumable: bool | str = False,
    **unknown: Never,
) -> GymnasiumEnv:
    """Make a TorchRL env of gymnasium slots.

    Args:
        env: a gymnasium id; a callable that makes a ``gymnasium.Env``; a ``gymnasium.Env`` (one
            slot); a ``gymnasium.vector.VectorEnv``; or, with ``backend="envpool"``, an EnvPool id.
            For many agents, the id of a parallel env of PettingZoo
            (``"pettingzoo/mpe2/simple_spread_v3"``), or a callable that makes one
            (``docs/many-agents.md``). A callable with a parameter ``slot`` is given the index of
            the slot that it makes.
        num_envs: the number of slots N, for ``batch_size=[N]``; None for one slot with
            ``batch_size=[]``, as ``GymEnv`` has it. A vector env brings its own.
        backend: ``"serial"`` (plain envs in this process, the default), ``"process"`` (plain envs
            in worker processes, several in each), ``"gymnasium"`` (a vector env, the default for
            one) or ``"envpool"``.
        env_kwargs: passed to ``gymnasium.make``, to the callable or to ``envpool.make_gymnasium``.
            With PettingZoo's ids, also ``group_map``, ``use_mask``, ``return_state`` and
            ``done_on_any``, as TorchRL's ``PettingZooEnv`` takes them.
        seed: for the first reset: an int, which gives slot i ``slot_seed(seed, i)``, or one int per
            slot.
        device: of the entries. None leaves them on the CPU and the TensorDicts without a device, as
            ``GymEnv`` does.
        categorical_action_encoding: encode discrete spaces as integers rather than one-hot. None
            for one-hot, as ``GymEnv`` has it, and for integers in PettingZoo's envs, as
            ``PettingZooEnv`` has it.
        info_keys: infos to store with the observations. Names, whose shapes and dtypes are read
            off one reset and one step; or a dict from names to example values. An info that the
            env leaves out reads zero.
        step_count: add ``"step_count"``, as TorchRL's ``StepCounter`` does.
        episode_reward: add ``"episode_reward"``, as ``RewardSum`` does.
        is_init: add ``"is_init"``, as ``InitTracker`` does.
        max_episode_steps: truncate an episode after so many steps; limits of the env itself stay.
        num_workers: of ``backend="process"``: how many processes share the slots; None for as many
            as there are cores to use, and no more than slots.
        timeout: of ``backend="process"``: seconds that an env may take for one call before it
            counts as hanging and its worker is killed; None to wait forever.
        start_method: of ``backend="process"``: ``"spawn"`` (the default), a fresh interpreter, to
            which the callable is sent with cloudpickle; or ``"fork"``, which takes any callable,
            but must not be used where this process has threads or a GPU at work.
        wait_num: of ``backend="process"``: a collector lets slots that are ready go on, in steps
            of at least so many; None for steps of all slots together. Those that share a worker
            are ready together (``docs/ready-slots.md``).
        wait_timeout: of ``wait_num``: seconds after which a step takes the slots that are ready,
            however few; None to wait for ``wait_num``.
        check_finite: take NaN or infinite observations and rewards for failures of the env.
        on_env_error: the response to a failure: ``"raise"`` an error that names slot, episode, step
            and seed, or ``"restart"``: the env is built again, and the step that failed is a
            truncated row that ``("next", "env_error")`` marks (``docs/robustness.md``).
        max_restarts: of ``"restart"``: how many envs may be built again, over all slots, before a
            failure raises after all; None for 100.
        resumable: let the collector's ``state_dict()`` bring the envs back in another process. Each
            env notes how its episode began, and the actions since. ``"history"`` keeps those of all
            episodes, for envs whose episodes depend on the ones before.

    Returns:
        An ``EnvBase``.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured, before any env is made; or if a
            TensorDict cannot hold the spaces, or they differ between slots.
        WorkerLost: if a worker process ends while it makes its envs.
        gymnasium.error.Error: for an unknown id.

    Examples:
        >>> env = make_env("CartPole-v1", num_envs=4, seed=0)
        >>> env.rollout(50, break_when_any_done=False).shape
        torch.Size([4, 50])
    """
    check.arguments(make_env, unknown)
    chosen = _check_backend(env, backend)
    check.device("cpu" if device is None else device)
    slots = _check_num_envs(env, num_envs)
    bookkeeping = _check_entries(info_keys, step_count, episode_reward, is_init, max_episode_steps)
    waiting = {"wait_num": wait_num, "wait_timeout": wait_timeout}
    options = {"num_workers": num_workers, "timeout": timeout, "start_method": start_method}
    workers = _check_process(chosen, slots, num_envs, {**options, **waiting})
    restarts = _check_restarts(env, chosen, on_env_error, max_restarts)
    _check_resumable(env, chosen, resumable)
    kwargs = _check_kwargs(env, env_kwargs)

    def slots_with(settings: Mapping[str, Any], seeds: Sequence[int] | None = None) -> Stepper:
        if chosen == "envpool":
            assert isinstance(env, str)
            base: Backend = EnvPoolBackend(env, slots, seeds, settings, categorical_action_encoding)
        elif isinstance(env, VectorEnv):
            base = VectorBackend(env, categorical_action_encoding)
        elif chosen == "process":
            factories = _factories(env, slots, settings, resumable, elsewhere=True)
            base = ProcessBackend(factories, categorical_action_encoding, **workers)
        else:
            factories = _factories(env, slots, settings, resumable)
            base = SerialBackend(factories, categorical_action_encoding)
        base.can = base.can._replace(resume=bool(resumable))
        with ended_on_error(base.close):
            if info_keys:
                base.read_info(info_keys)
            stepper = Stepper(
                base, bookkeeping, name=_name(env), check_finite=check_finite, max_restarts=restarts
            )
            stepper.makes = env, settings
        return stepper

    stepper = slots_with(kwargs, None if seed is None else slot_seeds(seed, range(slots)))
    with ended_on_error(stepper.close):
        built = GymnasiumEnv(
            stepper,
            batched=num_envs is not None or isinstance(env, VectorEnv),
            device=device,
            remake=None if isinstance(env, (gym.Env, VectorEnv)) else slots_with,
        )
        if seed is not None:
            stepper.set_seeds(built.seeds_of(seed, range(slots)))
        return built


def _check_backend(env: Any, backend: str | None) -> str:
    if backend is None:
        backend = "gymnasium" if isinstance(env, VectorEnv) else "serial"
    check.one_of(BACKENDS, backend=backend)
    types, wanted = _EXPECTED[backend]
    # Envs may be callable, too.
    is_vector, is_made = isinstance(env, VectorEnv), isinstance(env, (gym.Env, VectorEnv))
    misplaced = (is_vector and backend != "gymnasium") or (is_made and backend == "process")
    if isinstance(env, EnvBase) or not isinstance(env, types) or misplaced:
        text = "collect from it directly" if isinstance(env, EnvBase) else vec_env_advice(env)
        advice = f"; {text}" if text else ""
        raise TypeError(f"backend={backend!r} expects {wanted}, got {env!r}{advice}")
    return backend


def vec_env_advice(env: Any) -> str:
    """Return what to pass in the place of a VecEnv of Stable-Baselines3; empty for others."""
    modules = [kind.__module__ for kind in type(env).__mro__]
    is_one = "stable_baselines3.common.vec_env.base_vec_env" in modules
    advice = "in place of a VecEnv of Stable-Baselines3, pass the id or the function of its envs"
    return f"{advice}, and num_envs" if is_one else ""


def _check_num_envs(env: Any, num_envs: int | None) -> int:
    if isinstance(env, VectorEnv):
        if num_envs not in (None, env.num_envs):
            raise ValueError(
                f"expected num_envs={env.num_envs}, which the vector env has, got {num_envs}; "
                "leave num_envs out"
            )
        return env.num_envs
    check.positive_int_or_none(num_envs=num_envs)
    if num_envs is None:
        return 1
    if isinstance(env, gym.Env) and num_envs > 1:
        raise ValueError(
            f"expected a gymnasium id or a callable to make {num_envs} slots from, got the single "
            f"env {env}"
        )
    return int(num_envs)


def _check_kwargs(env: Any, env_kwargs: Any) -> dict[str, Any]:
    if not isinstance(env_kwargs, Mapping | None):
        raise TypeError(
            f"expected env_kwargs to be a dict, the same for every slot, got {env_kwargs!r}; "
            "pass one dict"
        )
    if env_kwargs and isinstance(env, (gym.Env, VectorEnv)):
        names = sorted(env_kwargs)
        raise TypeError(f"env_kwargs {names} cannot change an env that is made already")
    return dict(env_kwargs or {})


def _check_entries(
    info_keys: Any,
    step_count: bool,
    episode_reward: bool,
    is_init: bool,
    max_episode_steps: int | None,
) -> Bookkeeping:
    """Return what is counted beside the entries of the env and its infos."""
    names = not isinstance(info_keys, str) and isinstance(info_keys, (Sequence, Mapping))
    if not names or not all(isinstance(key, str) for key in info_keys):
        raise TypeError(
            "expected info_keys to be a sequence of names, or a dict from names to example values, "
            f"got {info_keys!r}"
        )
    check.positive_int_or_none(max_episode_steps=max_episode_steps)
    limit = None if max_episode_steps is None else int(max_episode_steps)
    return Bookkeeping(step_count, episode_reward, is_init, limit)


def _check_process(
    backend: str, slots: int, num_envs: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of ``backend="process"`` that were passed; other backends take none."""
    passed = {name: value for name, value in options.items() if value is not None}
    if passed and backend != "process":
        raise TypeError(f"backend={backend!r} takes no {', '.join(passed)}; use backend='process'")
    for name in ("num_workers", "wait_num"):
        if name in passed and not check.is_count(passed[name], 1, slots + 1):
            raise ValueError(
                f"expected {name} to be an int from 1 to {slots}, the number of slots, or None for "
                f"its default, got {passed[name]!r}"
            )
    check.seconds_or_none(timeout=options["timeout"], wait_timeout=options["wait_timeout"])
    check.one_of((*START_METHODS, None), start_method=options["start_method"])
    for name, needs in {"wait_timeout": "wait_num", "wait_num": "num_envs"}.items():
        if name in passed and {"num_envs": num_envs, **options}[needs] is None:
            raise TypeError(f"expected {needs} with {name}={passed[name]!r}, got none; pass both")
    return passed


def _check_restarts(
    env: Any, backend: str, on_env_error: str, max_restarts: int | None
) -> int | None:
    """The number of envs that may be built again; None if failures raise."""
    check.one_of(("raise", "restart"), on_env_error=on_env_error)
    if on_env_error == "raise":
        if max_restarts is not None:
            raise TypeError(
                f"max_restarts={max_restarts} is for on_env_error='restart'; pass both, or neither"
            )
        return None
    if backend not in ("serial", "process") or isinstance(env, gym.Env):
        what = "an env that is made already" if isinstance(env, gym.Env) else f"{backend!r}"
        raise ValueError(
            f"on_env_error='restart' builds single slots anew, which {what} does not allow; pass "
            "an id or a callable with backend='serial' or 'process', or on_env_error='raise'"
        )
    check.positive_int_or_none(max_restarts=max_restarts)
    return int(max_restarts or _MAX_RESTARTS)


def _check_resumable(env: Any, backend: str, resumable: bool | str) -> None:
    check.one_of((False, True, "history"), resumable=resumable)
    if resumable and backend not in RESUMABLE:
        raise ValueError(
            f"backend={backend!r} cannot bring its envs back: expected resumable=False, or a "
            f"backend of {', '.join(RESUMABLE)}"
        )
    if resumable == "history" and isinstance(env, gym.Env):
        raise ValueError(
            "resumable='history' is for envs that can be made anew: expected an id or a callable, "
            f"got the env {env}"
        )


def _factories(
    env: str | Callable[..., gym.Env[Any, Any]] | gym.Env[Any, Any],
    slots: int,
    kwargs: Mapping[str, Any],
    resumable: bool | str,
    elsewhere: bool = False,
) -> list[Callable[[], gym.Env[Any, Any]]]:
    """One callable per slot; ``elsewhere`` for a process that knows no ids of this one."""
    factory: Any
    if isinstance(env, str):
        # An unknown id raises before anything is made; gymnasium imports those of module:id.
        spec = None if ":" in env else spec_of(env)
        factory = partial(make_by_id, spec if elsewhere and spec else env, **kwargs)
    elif isinstance(env, gym.Env):
        one = env
        factory = lambda: one  # noqa: E731
    else:
        factory = partial(as_env, env, **kwargs)
    factories = [factory] * slots
    if takes_slot(env, kwargs):
        factories = [partial(factory, slot=slot) for slot in range(slots)]
    if isinstance(env, str):
        # gymnasium checks the first reset and step, and then costs time: one slot's check will do.
        unchecked = partial(factory, **{"disable_env_checker": True, **kwargs})
        factories[1:] = [unchecked] * (slots - 1)
    if resumable:
        from tdcollect.envs.process.resumable import make_resumable

        return [partial(make_resumable, make, resumable == "history") for make in factories]
    return factories


def takes_slot(make: Any, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether a function makes the env of a slot from its index, ``slot``.

    One that is given its ``slot``, by ``kwargs`` or by ``functools.partial``, does not.
    """
    passed = {**(kwargs or {}), **(make.keywords if isinstance(make, partial) else {})}
    try:
        one = inspect.signature(make).parameters.get("slot")
    except (TypeError, ValueError):  # no function, or one of some that are written in C
        return False
    by_name = one is not None and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    return by_name and "slot" not in passed


def alike(make: Any, kwargs: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the arguments with which a function makes all slots alike: its own default ``slot``.

    Raises:
        ValueError: if it has none.
    """
    if not takes_slot(make, kwargs):
        return None if kwargs is None else dict(kwargs)
    default = inspect.signature(make).parameters["slot"].default
    if default is inspect.Parameter.empty:
        refuse_slot(make, kwargs)
    return {**(kwargs or {}), "slot": default}


def refuse_slot(make: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError for a function that :func:`takes_slot`, where all slots must be alike."""
    if takes_slot(make, kwargs):
        name = _name(make.func if isinstance(make, partial) else make)
        raise ValueError(
            f"expected no parameter slot of {name}, as a test episode must not depend on its slot; "
            f"pass functools.partial({name}, slot=0)"
        )


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    # Of an env that is made; on a class of wrappers, ``spec`` is a property.
    spec = env.spec if isinstance(env, (gym.Env, VectorEnv)) else None
    if spec is not None:
        return str(spec.id)
    return getattr(env, "__name__", None) or type(env).__name__
