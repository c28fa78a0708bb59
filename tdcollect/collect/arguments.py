"""Bad arguments of a collector and of its replay buffer, and the errors that they lead to."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.data import (
    ImmutableDatasetWriter,
    OneHot,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
)
from torchrl.envs import EnvBase

from tdcollect import check
from tdcollect._upstream.collectors import CollectorState
from tdcollect.envs.make import vec_env_advice
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import SLOT, TIME
from tdcollect.policies import ACTING, SpacePolicy
from tdcollect.randomness import global_states_kept

_OPTIONAL_CALLABLES = ("postproc", "pre_collect_hook", "post_collect_hook", "policy_factory")


_DEVICES = ("device", "storing_device", "policy_device", "env_device")


def check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for arguments of the constructor that no backend can use."""
    named = dict(zip(("create_env_fn", "policy"), args, strict=False), **kwargs)
    if "create_env_fn" in named:
        envs = named["create_env_fn"]
        check_order(envs, named.get("policy"))
        for env in envs if isinstance(envs, (list, tuple)) else [envs]:
            _check_env(env)
    check_instance(named.get("policy"))
    for name in _OPTIONAL_CALLABLES:
        value = named.get(name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None and not callable(one):
                raise TypeError(
                    f"expected {name} to be a function, got {_described(one)}; pass one, or leave "
                    "it out"
                )
            if name == "policy_factory" and isinstance(one, nn.Module):
                raise TypeError(
                    "expected policy_factory to be a function without arguments that makes a "
                    f"policy, got a {type(one).__name__}; pass it as the policy"
                )
    frames = named.get("frames_per_batch", 1)
    for count in frames if isinstance(frames, (list, tuple)) else [frames]:
        check.positive_int(frames_per_batch=count.item() if torch.is_tensor(count) else count)
    check.positive_int_or_none(trajs_per_batch=named.get("trajs_per_batch"))
    if named.get("total_frames", -1) == 0:
        raise ValueError("expected total_frames to be positive, or -1 for no end, got 0")


def whole_trajectories(options: Mapping[str, Any]) -> bool:
    """Return whether a collector puts trajectories together; TorchRL 0.15 has the second option."""
    mode = options.get("replay_write_mode")
    return options.get("trajs_per_batch") is not None or mode == "trajectory"


def check_known(kind: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of unknown names; a subclass may take others."""
    if kind.__module__.startswith("tdcollect."):
        check.arguments(kind.__init__, kwargs, ["traj_pool"])


def check_one(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments that are for several collectors, and for devices that are not there."""
    env = args[0] if args else kwargs.get("create_env_fn")
    if isinstance(env, (list, tuple)) and len(env) != 1:
        raise ValueError(
            f"expected one env, or one function that makes it, got {len(env)}; pass one env of "
            "several slots (tdcollect.make_env(..., num_envs)), or choose backend='process', which "
            "runs a collector for each"
        )
    frames = kwargs.get("frames_per_batch")
    if isinstance(frames, (list, tuple)):
        raise TypeError(
            f"expected frames_per_batch to be an int, got {frames}; several are for the collectors "
            "of backend='process'"
        )
    for name in _DEVICES:
        check.device(kwargs.get(name) or "cpu", name)
    for name in _OPTIONAL_CALLABLES:
        if isinstance(kwargs.get(name), (list, tuple)) and kwargs.get("worker_idx") is None:
            raise TypeError(
                f"expected {name} to be a function, got a {type(kwargs[name]).__name__}; several "
                "are for the collectors of backend='process'"
            )


def check_order(env: Any, policy: Any) -> None:
    """Raise TypeError for an env and a policy in each other's place, as other libraries' are."""
    acts = isinstance(env, (nn.Module, SpacePolicy)) or hasattr(env, "predict")
    is_env = isinstance(policy, (EnvBase, gym.Env, gym.vector.VectorEnv))
    is_env = is_env or (isinstance(policy, str) and policy in gym.registry)
    if not isinstance(env, (str, EnvBase, gym.Env)) and (acts or is_env):
        got = f"{_described(env)}, then {_described(policy)}"
        raise TypeError(f"expected the env first, then the policy, got {got}; swap them")


def _check_env(env: Any) -> None:
    if isinstance(env, EnvBase) or callable(env):
        return
    example = repr(env) if isinstance(env, str) else "'CartPole-v1'"
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)):
        example = "env"
    raise TypeError(
        "expected an env of TorchRL, or a function that makes one, got "
        f"{_described(env)}; {vec_env_advice(env) or f'pass tdcollect.make_env({example})'}"
    )


def check_made(env: Any) -> None:
    """Raise TypeError if a function made something else than an env."""
    if not isinstance(env, EnvBase):
        if hasattr(env, "close"):
            env.close()
        raise TypeError(
            "expected the function to return an env of TorchRL, got one that returned "
            f"{_described(env)}; have it return tdcollect.make_env(...)"
        )


def check_instance(policy: Any) -> None:
    """Raise TypeError for a class in place of a policy."""
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        raise TypeError(
            f"expected a policy, got the class {policy.__name__}; pass an instance of it"
        )


def explain_weights_error(weights: Any, error: Exception) -> None:
    """Raise TypeError from ``error`` for weights that are not a TensorDict."""
    if weights is not None and not isinstance(weights, TensorDictBase):
        raise TypeError(
            "expected the policy's weights as a TensorDict, or None for those of the policy that "
            f"the collector was given, got {_described(weights)}; pass "
            "TensorDict.from_module(policy).data"
        ) from error


def check_options(options: Any) -> None:
    """Raise TypeError for reset options that are not a dict."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            f"expected options to be a dict, as gymnasium's reset() takes it, got {options!r}; "
            "leave it out for none"
        )


def no_options(option: str, base: Any) -> ValueError:
    """The error for an env, without its transforms, that takes no reset options of each slot."""
    what = f"{type(base).__name__}, an env of TorchRL's own,"
    if isinstance(base, GymnasiumEnv):
        what = f"the backend {base.backend_name!r} of {base.name}"
    return ValueError(
        f"expected no {option}: {what} takes no reset options of each slot; use make_env with "
        "gymnasium's own env, and backend='serial' or 'process'"
    )


# ------------------------------------------------------------------------------------ the policy


def explain_wrapping_error(policy: Any, env: EnvBase, error: Exception) -> None:
    """Raise from the cause of ``error`` for a policy that TorchRL could not wrap."""
    cause, wrapping = error.__cause__, str(error).startswith("Failed to wrap")
    if isinstance(error, TypeError) and cause is not None and wrapping:
        message = cannot_wrap(policy, env)
        if message is None:
            raise cause from None
        raise TypeError(message) from cause


def explain_first_call(collector: Any, error: Exception) -> None:
    """Raise from ``error`` for a collector's policy whose first call failed for a known reason."""
    parent = CollectorState(collector)
    known = failed_call(collector.policy, parent.uncompiled_policy, parent.carrier, collector.env)
    if known is not None:
        raise known from error
    explain_unfit_observations(dict(parent.carrier.items(True, True)), collector.env, error)


def explain_unfit_observations(entries: Mapping[Any, Any], env: EnvBase, error: Exception) -> None:
    """Raise from ``error`` for a policy that fails on NaN, or on the shapes of observations."""
    spec = env.full_observation_spec_unbatched
    seen = {key: entries[key] for key in spec.keys(True, True) if key in entries}
    odd = [key for key, v in seen.items() if isinstance(v, torch.Tensor) and v.isnan().any()]
    if odd and type(error) in (RuntimeError, ValueError):
        raise ValueError(
            f"expected observations that are numbers, got NaN from the env in {odd}, on which the "
            "policy fails; correct the env, or its transforms: make_env(..., check_finite=True) "
            "tells at which step they begin"
        ) from error
    text = str(error)
    unfit = "batch" not in text and ("shape" in text or "size" in text)
    if type(error) is RuntimeError and unfit:
        shapes = ", ".join(f"{key!r} {list(spec[key].shape)}" for key in seen)
        raise ValueError(
            f"expected a policy for observations {shapes}, as the env gives them, got one that "
            f"fails on them: {error}; make its network for them, or pass the env that it is for"
        ) from error


def cannot_wrap(policy: Any, env: EnvBase, evaluating: bool = False) -> str | None:
    """The message why TorchRL could not make a policy of TensorDicts.

    In an evaluation, it may name :mod:`tdcollect.policies`. None where TorchRL could, and has
    called the policy: the error is the policy's own.
    """
    observed = list(env.observation_keys)
    if not callable(policy):
        advice = "leave it out for random actions"
        acts = [name for name in ACTING if callable(getattr(policy, name, None))]
        if acts:  # evaluations take it as it is
            call = _row_by_row(f"policy.{acts[0]}", env)
            advice = f"wrap its {acts[0]}, for one NumPy observation: {call}"
        if isinstance(policy, SpacePolicy):
            call = _row_by_row("policy.source", env)
            advice = f"evaluations take it; collect with a function: {call}"
            advice = advice if policy.kind == "function" else "evaluations take it, no collector"
        if hasattr(policy, "predict"):
            advice = (
                "pass tdcollect.evaluation.sb3.load_policy(model, env) for a model of "
                "Stable-Baselines3"
            )
        return (
            f"expected a policy that can be called with a TensorDict, got {_described(policy)}; "
            f"{advice}"
        )
    names = _arguments(policy)
    if names is not None and set(names) <= set(observed):
        return None
    wrapping = f"in_keys={observed}, out_keys={list(env.action_keys)}"
    if isinstance(policy, nn.Module) and type(policy).forward is nn.Module.forward:
        methods = [name for name in vars(type(policy)) if name[0] != "_" and "act" in name]
        call = f"policy.{(methods or ['METHOD'])[0]}(x)" + "[0]" * ("value" in "".join(methods[:1]))
        spec = env.full_action_spec_unbatched[env.action_keys[0]]
        if type(spec) is OneHot:
            call = f"torch.nn.functional.one_hot({call}, {spec.space.n})"
        return (
            f"expected a policy with a forward(), got {_described(policy)} without; wrap the "
            f"method that acts: TensorDictModule(lambda x: {call}, {wrapping})"
        )
    takes = "what it takes is not known" if names is None else f"takes ({', '.join(names)})"
    alone = ""
    if not isinstance(policy, nn.Module) and len(observed) == 1:
        key = ", key=True" if names and names[1:] in (["key"], ["rng"]) else ""
        call = f"tdcollect.policies.from_function(policy{key})"
        call = call if evaluating else _row_by_row("policy", env)
        alone = f"; if it takes one NumPy observation: {call}"
    return (
        "expected a policy that takes a TensorDict, or whose arguments are named like the env's "
        f"entries {observed}, got {_described(policy)}, which {takes}; wrap it: "
        f"TensorDictModule(policy, {wrapping}){alone}"
    )


def _row_by_row(call: str, env: EnvBase) -> str:
    """A policy on TensorDicts, as code, that calls a function of one NumPy observation."""
    observed, action = env.observation_keys[0], env.action_keys[0]
    shape = list(env.full_observation_spec_unbatched[observed].shape)
    return (
        f"lambda td: td.set({action!r}, torch.stack([spec.encode({call}(x.numpy())) for x in "
        f"td[{observed!r}].reshape(-1, *{shape})]).reshape([*td.shape, *spec.shape])), with spec = "
        "env.action_spec_unbatched"
    )


def _arguments(function: Callable[..., Any]) -> list[str] | None:
    """The arguments that have no default; None where that is not known."""
    call = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return [name for name, parameter in parameters.items() if parameter.default is parameter.empty]


def missing_entries(policy: Any, entries: Iterable[Any]) -> KeyError | None:
    """The error for entries that a policy reads and does not find; None where it finds all."""
    there = list(entries)
    in_keys = getattr(policy, "in_keys", None)
    missing = [key for key in in_keys or () if key not in there]
    if not missing:
        return None
    return KeyError(
        f"expected in_keys of the policy among the entries that there are, {there}, got {missing}; "
        "name the policy's in_keys like the env's entries, or append the transforms that give them"
    )


def no_tensordict(out: Any) -> TypeError:
    """The error for a policy's output that is not a TensorDict."""
    return TypeError(
        "expected the policy to return the TensorDict that it was given, with the action written "
        f"to it, got {_described(out)}; write td['action'] = ..., and return td"
    )


def failed_call(policy: Any, wrapped: Any, step: TensorDictBase, env: EnvBase) -> Exception | None:
    """The error for a policy whose first call failed, with what to do; None if not known.

    ``policy`` is the user's, ``wrapped`` the same as TorchRL calls it.
    """
    missing = missing_entries(wrapped, step.keys(True, True))
    if missing is not None:
        return missing
    by_name = type(wrapped) is TensorDictModule and not isinstance(policy, TensorDictModuleBase)
    try:
        with global_states_kept():
            if by_name:  # TorchRL has wrapped a function of tensors
                out = policy(*[step.get(key) for key in wrapped.in_keys])
            else:
                out = wrapped(step.copy())
    except Exception:
        return None  # its own error, which is on its way
    if not by_name:
        if not isinstance(out, TensorDictBase):
            return no_tensordict(out)
        actions, written = list(env.action_keys), list(out.keys(True, True))
        if not actions or any(key in written for key in actions):
            return None
        return KeyError(
            f"expected the policy to write an action entry of the env, one of {actions}, got the "
            f"entries {written}; write td['action'] = ..., and return td"
        )
    if isinstance(out, (int, float, bool, str, type(None))):
        shapes = [f"{key!r} {list(env.full_action_spec[key].shape)}" for key in env.action_keys]
        return TypeError(
            f"expected the policy to return the action as a tensor, {', '.join(shapes)}, got "
            f"{_described(out)}; return a tensor with the env's batch size in front"
        )
    return None


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


def check_replay_buffer(
    buffer: Any,
    batch_size: torch.Size,
    steps: int,
    *,
    extends: bool = True,
    trajectories: bool = False,
) -> None:
    """Refuse a replay buffer of the wrong kind, of too many or too few dimensions, or too small.

    Args:
        buffer: the replay buffer. One with transforms passes: the shape that it stores is unknown.
        batch_size: the env's, ``[N]`` or ``[]``.
        steps: T of a batch.
        extends: batches ``[N, T]`` are written, rather than single steps ``[N]``.
        trajectories: trajectories ``[length]`` are written instead.
    """
    if not all(callable(getattr(buffer, name, None)) for name in ("add", "extend", "sample")):
        raise TypeError(
            "expected replay_buffer to be a replay buffer (torchrl.data.ReplayBuffer, say), got "
            f"{type(buffer).__name__}"
        )
    storage = getattr(buffer, "storage", None)
    ndim, capacity = getattr(storage, "ndim", None), getattr(storage, "max_size", None)
    if isinstance(getattr(buffer, "writer", None), ImmutableDatasetWriter):
        raise TypeError(
            "expected a replay buffer that can be written to, got one with an "
            "ImmutableDatasetWriter; choose a RoundRobinWriter"
        )
    if ndim is None or capacity is None or getattr(buffer, "transform", None):
        return
    shape = [steps] if trajectories else [*batch_size, steps]
    letters = ["length"] if trajectories else [*"N" * len(batch_size), "T"]
    written = f"{'trajectories' if trajectories else 'batches'} [{', '.join(letters)}]"
    asks = f"{type(storage).__name__}(max_size, ndim={len(shape)})"
    if ndim > len(shape):
        raise ValueError(
            f"expected a storage of at most {len(shape)} dimensions for {written}, whose last one "
            f"is {TIME!r}, got ndim={ndim}; make it {asks}"
        )
    if isinstance(getattr(buffer, "sampler", None), SliceSampler) and ndim < len(shape):
        raise ValueError(
            f"expected a storage of steps for a {type(buffer.sampler).__name__}, got ndim={ndim}, "
            f"whose items are whole slots of {written}; make it {asks}"
        )
    if trajectories or not extends or not isinstance(buffer.writer, RoundRobinWriter):
        return
    # A storage of several dimensions is a grid: room for all slots, as many times as is needed.
    need, room = (shape[0], capacity) if ndim == 1 else (steps, -(-capacity // batch_size.numel()))
    if room < need:
        least = math.prod(shape[:ndim])
        raise ValueError(
            f"expected a replay buffer that holds a batch, {least} items of {written} with "
            f"{shape}, got max_size={capacity}: a part of each batch would be overwritten as it is "
            f"written; make max_size at least {least}, or frames_per_batch smaller"
        )


def check_count(
    frames: int | None, episodes: int | None, max_episode_steps: int | None, layout: str
) -> int:
    """Check the counts of a collection; returns the one that is given."""
    check.either(frames=frames, episodes=episodes)
    check.positive_int_or_none(
        frames=frames, episodes=episodes, max_episode_steps=max_episode_steps
    )
    if frames is not None and (max_episode_steps is not None or layout != "flat"):
        raise ValueError(
            "max_episode_steps and layout are for collecting by episodes; by frames use make_env's "
            "max_episode_steps, and split_trajectories on the batch"
        )
    if layout != "flat":
        from tdcollect.trajectories.split import LAYOUTS

        check.one_of(LAYOUTS, layout=layout)
    return int(frames or episodes or 0)


def round_up(frames: int, slots: int) -> int:
    """The steps per slot for so many frames; warns where these are more."""
    steps = -(-frames // slots)
    if frames % slots:
        warnings.warn(
            f"{frames} frames are no multiple of the {slots} slots: collecting {steps * slots}, "
            f"{steps} per slot",
            stacklevel=3,
        )
    return steps


_REFUSED = {
    "split_trajs": "rows of several slots come in turn; split_trajectories is for batches [N, T]",
    "reset_at_each_iter": "no slot waits for the end of a batch",
    "interruptor": "a batch has as many rows as were asked for",
    "trajs_per_batch": "for whole episodes, use collect(episodes=...)",
    "compact_obs": "the row after a row is another slot's, as a rule",
    "set_truncated": "a batch has no last step of each slot",
    "return_same_td": "each batch has memory of its own",
}


def check_by_arrival(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a collector that have no meaning by arrival."""
    for name, why in _REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"expected no {name} with by_arrival=True, got {name}={value!r}: {why}; leave one "
                "of the two out"
            )
    if options.get("extend_buffer") is False:
        raise ValueError(
            "expected no extend_buffer=False with by_arrival=True: rows are written together; "
            "leave it out"
        )


def by_arrival_needs(reason: str | None) -> ValueError:
    """The error for an env whose slots step together, for a reason or without ``wait_num``."""
    return ValueError(
        "by_arrival=True is for slots that go on when they are ready: expected an env of "
        "tdcollect.make_env(..., backend='process', wait_num=...), got one whose slots step "
        f"together{f', since {reason}' if reason else ''}; "
        + ("do without it" if reason else "pass wait_num")
    )


def check_arrival_buffer(buffer: Any, slots: int) -> None:
    """Refuse a replay buffer that rows by arrival cannot go into.

    That is an ensemble that does not route rows by their slot, a storage of several dimensions,
    and a sampler of slices, which would join rows of different slots.
    """
    apart = f"a ReplayBufferEnsemble of {slots} replay buffers with routing_key={SLOT}"
    if isinstance(buffer, ReplayBufferEnsemble):
        if buffer.routing_key != SLOT:
            raise ValueError(
                f"expected {apart}, one per slot, got routing_key={buffer.routing_key}; pass "
                f"routing_key={SLOT}"
            )
        return
    ndim = getattr(getattr(buffer, "storage", None), "ndim", 1)
    if ndim != 1:
        raise ValueError(
            f"expected a storage of one dimension for rows by arrival, got ndim={ndim}; leave ndim "
            f"out, or pass {apart}, which keeps slots apart"
        )
    if isinstance(getattr(buffer, "sampler", None), SliceSampler):
        raise ValueError(  # noqa: TRY004
            f"expected no {type(buffer.sampler).__name__} for rows by arrival, where rows of "
            f"several slots lie side by side; pass {apart}, which keeps slots apart"
        )
