"""A collector's state dict, and how another goes on from it; first states of transforms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs import transforms as T
from torchrl.envs.batched_envs import BatchedEnvBase

from tdcollect import keys
from tdcollect._upstream.collectors import CollectorState
from tdcollect._upstream.torchrl import serial_envs
from tdcollect.collect.arguments import whole_trajectories
from tdcollect.collect.step_dict import flat
from tdcollect.collect.turns import Arrivals
from tdcollect.envs.spaces import nested
from tdcollect.envs.traits import all_transforms_of, base_of, innermost
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.randomness import global_states, set_global_states
from tdcollect.states import equal, pack, unpack

POLICY, TRANSFORMS, COUNTERS = "policy", "transforms", "counters"
STATISTICS, RANDOM, ENVS = "statistics", "random", "envs"
COMPONENTS = (POLICY, TRANSFORMS, COUNTERS, STATISTICS, RANDOM, ENVS)

_POLICY_STATE, _TRANSFORMS_STATE = "policy_state_dict", "env_state_dict"
_FRAMES, _ITER, _POOL, _VERSION = "frames", "iter", "traj_pool", "policy_version"
_PROGRESS = "collector_progress"  # since TorchRL 0.15
_ENTRIES = {
    POLICY: (_POLICY_STATE, _VERSION),
    TRANSFORMS: (_TRANSFORMS_STATE,),
    COUNTERS: (_FRAMES, _ITER, _POOL, _PROGRESS),
    STATISTICS: (STATISTICS,),
    RANDOM: (RANDOM,),
    ENVS: (ENVS,),
}
"""The entries of a state dict by component, the one that it always has first."""


def add_state(state: dict[str, Any], collector: Any, components: Sequence[str] | None) -> None:
    """Make the parent's state dict ours, in place; see :meth:`Collector.state_dict`."""
    chosen = _checked(components)
    for component, names in _ENTRIES.items():
        for name in names if component not in chosen else ():
            state.pop(name, None)
    if STATISTICS in chosen and collector._monitor.stats.on:
        state[STATISTICS] = pack(collector._monitor.save_state())
    if RANDOM in chosen:
        state[RANDOM] = pack(global_states())
    if ENVS in chosen:
        state[ENVS] = pack(_save_slots(collector))


def keep_state(collector: Any) -> Any:
    """Save the env before it is closed with the last batch; the state dict of a batched one."""
    base = base_of(collector.env)
    if type(base) is GymnasiumEnv and base.can.resume:
        collector._runner.settle()
        base.keep_slots()
    return collector.env.state_dict() if isinstance(collector.env, BatchedEnvBase) else None


def load_state(
    collector: Any,
    state: Mapping[str, Any],
    components: Sequence[str] | None,
    if_newer: bool,
    options: dict[str, Any],
) -> None:
    """Have a collector go on from a state dict; see :meth:`Collector.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise TypeError(
            "expected a state dict, as state_dict() gives it, got "
            f"{type(state).__name__}; read one from a file with torch.load(path)"
        )
    chosen = _to_load(collector, state, components, options.get("strict", True))
    weights = POLICY in chosen and (not if_newer or _is_newer(collector, state))
    for name in {STATISTICS, RANDOM, ENVS} & set(chosen):
        if not isinstance(state[name], Mapping):
            raise TypeError(
                f"expected the entry {name!r} of the state dict to be a dict, as state_dict() "
                f"gives it, got {type(state[name]).__name__}; leave it out: components=..."
            )
    slots = unpack(state[ENVS]) if ENVS in chosen else {}
    base, parent = base_of(collector.env), CollectorState(collector)
    if "slots" in slots and type(base) is GymnasiumEnv:
        base.check_slots(slots["slots"])  # before anything is loaded
    if ENVS in chosen:
        collector._runner.arrivals = Arrivals()
    else:
        collector._runner.settle()
    if TRANSFORMS in chosen:
        collector.env.load_state_dict(state[_TRANSFORMS_STATE], **options)
    if weights:
        _load_weights(collector, state, options)
    if COUNTERS in chosen:
        parent.frames, parent.iteration = int(state[_FRAMES]), int(state[_ITER])
        parent.load_progress(state.get(_PROGRESS))
        if collector.track_traj_ids and _POOL in state:
            parent.trajectory_ids.load_state_dict(state[_POOL])
    if STATISTICS in chosen:
        collector._monitor.load_state(unpack(state[STATISTICS]))
    if ENVS in chosen:
        if STATISTICS not in chosen:
            collector._monitor.miss()
        _load_slots(collector, slots, COUNTERS in chosen)
    else:
        if STATISTICS in chosen:
            collector._monitor.lose()
        if COUNTERS in chosen:
            parent.start_new_trajectories()
    if RANDOM in chosen:  # last: nothing is drawn from here on
        set_global_states(unpack(state[RANDOM]))


def _to_load(
    collector: Any, state: Mapping[str, Any], components: Sequence[str] | None, strict: bool
) -> Sequence[str]:
    chosen = _checked(components)
    here = [name for name in COMPONENTS if _ENTRIES[name][0] in state]
    if components is None:
        needed = [TRANSFORMS, COUNTERS] if strict else [COUNTERS]
        if strict and (CollectorState(collector).stateful_policy is not None or POLICY in here):
            needed.append(POLICY)
        chosen = [name for name in COMPONENTS if name in here or name in needed]
    missing = [_ENTRIES[name][0] for name in chosen if name not in here]
    if missing:
        raise KeyError(
            f"expected the entries {missing} in the state dict, which has {list(state)}; to "
            f"load a part, name it: components={here}"
        )
    return chosen


def _is_newer(collector: Any, state: Mapping[str, Any]) -> bool:
    versions = state.get(_VERSION), collector.policy_version
    if not all(isinstance(version, int) for version in versions):
        raise ValueError(
            "expected weights with a version that is an int, there and here, got "
            f"{versions[0]!r} and {versions[1]!r}; make both collectors with "
            "track_policy_version=True, or leave if_newer out"
        )
    return bool(versions[0] > versions[1])


def _load_weights(collector: Any, state: Mapping[str, Any], options: dict[str, Any]) -> None:
    policy = CollectorState(collector).stateful_policy
    if policy is None:
        raise ValueError(
            "expected a policy with a state_dict to load the policy's weights into, got "
            f"{type(collector.policy).__name__}; leave them out: components=..."
        )
    policy.load_state_dict(state[_POLICY_STATE], **options)
    version = state.get(_VERSION)
    if version is not None and collector.policy_version_tracker is not None:
        collector.policy_version_tracker.version = version


# ------------------------------------------------------------------------------------------ slots


def _save_slots(collector: Any) -> dict[str, Any]:
    """The slots as far as they can be saved: each env, and the step to go on with."""
    base, carrier = base_of(collector.env), CollectorState(collector).carrier
    if type(base) is not GymnasiumEnv:
        return {"why": f"the env is a {type(base).__name__}, not one of tdcollect.make_env"}
    if whole_trajectories(vars(collector)):
        return {"why": "of whole trajectories, the rows of unfinished episodes are not saved"}
    if collector._runner.stacked_lazily:
        return {"why": "some entries are stacked lazily"}
    leaves = {key: carrier.get(key) for key in carrier.keys(True)}
    odd = [key for key, v in leaves.items() if not isinstance(v, (torch.Tensor, TensorDict))]
    if odd:
        return {"why": f"the entries {odd} are no tensors"}
    runner, row = collector._runner, list(flat(carrier).items())
    state = {"slots": base.save_slots(), "row": row, "stale": runner.is_lost}
    arrivals = runner.arrivals
    if arrivals.surplus_slots:
        rows = list(arrivals.surplus.items())
        state |= {"surplus": rows, "surplus_slots": arrivals.surplus_slots}
    return state


def _load_slots(collector: Any, state: dict[str, Any], known_ids: bool) -> None:
    base = base_of(collector.env)
    slots = range(collector.env.batch_size.numel())
    failed = dict.fromkeys(slots, state.get("why", ""))
    tried = False
    if "slots" in state:
        if type(base) is not GymnasiumEnv:
            failed = dict.fromkeys(slots, f"the env here is a {type(base).__name__}")
        else:
            tried = base.can.resume
            failed = base.load_slots(state["slots"])
    back = [slot for slot in slots if slot not in failed]
    if back:
        step = _merged(collector, dict(state["row"]), back)
        collector._runner.set_position(step, state["stale"])
        collector._monitor.collected = True
        if not known_ids:
            CollectorState(collector).start_new_trajectories()
    if failed:
        _start_afresh(collector, sorted(failed), tried)
        warnings.warn(_not_resumed(failed), stacklevel=4)
    if "surplus" in state and collector.by_arrival:  # rows beyond the latest batch
        held = Arrivals(dict(state["surplus"]), state["surplus_slots"])
        collector._runner.arrivals = held
    elif "surplus" in state:
        warnings.warn(
            f"{len(state['surplus_slots'])} rows that had arrived are left out: they are for a "
            "collector with by_arrival=True",
            stacklevel=4,
        )


def _start_afresh(collector: Any, slots: list[int], disturbed: bool) -> None:
    """Have slots begin an episode, where they are not at the first step of one."""
    runner = collector._runner
    if len(slots) < collector.env.batch_size.numel():
        collector.reset(slots)
    elif disturbed or runner.stale or collector._monitor.collected:
        collector.reset()
    else:
        collector._monitor.lose()
        CollectorState(collector).start_new_trajectories()


def _merged(collector: Any, step: dict[Any, torch.Tensor], slots: list[int]) -> TensorDict:
    carrier = CollectorState(collector).carrier
    present = flat(carrier)
    if not collector.track_traj_ids:
        step.pop(keys.TRAJ_IDS, None)
    elif keys.TRAJ_IDS not in step:
        step[keys.TRAJ_IDS] = present[keys.TRAJ_IDS]
    batch = carrier.batch_size
    merged = {}
    for key, saved in step.items():
        now = present.get(key)
        merged[key] = saved if now is None else saved.to(now.device)
        if len(slots) < batch.numel():
            others = torch.ones(batch, dtype=torch.bool)
            others[slots] = False
            merged[key][others] = 0 if now is None else now[others].to(saved.dtype)
    return nested(merged.items(), batch, carrier.device)


def _checked(components: Sequence[str] | None) -> Sequence[str]:
    if components is None:
        return COMPONENTS
    several = isinstance(components, Iterable) and not isinstance(components, str)
    if not several or any(name not in COMPONENTS for name in components):
        raise ValueError(
            f"expected components to be some of {', '.join(COMPONENTS)}, got {components!r}"
        )
    return components


def _not_resumed(failed: Mapping[int, str]) -> str:
    slots: dict[str, list[int]] = {}
    for slot, why in failed.items():
        slots.setdefault(why, []).append(slot)
    reasons = "; ".join(f"slots {those}: {why}" for why, those in slots.items())
    return (
        "the episodes of some slots could not be resumed, and new ones begin there, with new "
        f"trajectory ids ({reasons})"
    )


# -------------------------------------------------------------------------------- first states


class FirstStates:
    """The states that transforms had when a collector was made.

    A state is a ``state_dict()`` without parameters. A transform whose state somebody else has
    moved since (loaded it, or stepped the env) keeps it. Transforms in the processes of a
    ``ParallelEnv`` are not reached.
    """

    def __init__(self, env: EnvBase):
        base, members = innermost(env), []
        if type(base) is SerialEnv:
            if base.is_closed:
                base.start()  # as its first reset would
            members = serial_envs(base) or []
        self._transforms = [t for part in (env, *members) for t in all_transforms_of(part)]
        self._first = [copy.deepcopy(_state(transform)) for transform in self._transforms]
        self._latest = list(self._first)

    def _untouched(self) -> list[int]:
        there = [i for i, first in enumerate(self._first) if first is not None]
        return [i for i in there if equal(_state(self._transforms[i]), self._latest[i])]

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Run what moves states in the name of the collector."""
        untouched = self._untouched()
        yield
        for i in untouched:
            self._latest[i] = copy.deepcopy(_state(self._transforms[i]))

    def restore(self) -> None:
        """Give transforms their first states, but for those that somebody else has moved."""
        with self.moving(), torch.no_grad():
            for i in self._untouched():
                transform, first = self._transforms[i], self._first[i]
                live = _state(transform)
                if isinstance(transform, (T.VecNorm, T.VecNormV2)):
                    _fill(live, first)
                else:
                    transform.load_state_dict({**live, **first})


def _state(transform: T.Transform) -> Any:
    """The live state of a transform; None where it gives none yet."""
    with warnings.catch_warnings(action="ignore"):  # VecNorm warns that it has none yet
        try:
            state = transform.state_dict()
        except Exception:  # whatever a user's own may raise; CatFrames does before its first frame
            return None
    learned = {name for name, _ in transform.named_parameters()}
    return {name: value for name, value in state.items() if name not in learned}


def _fill(live: Any, first: Any) -> None:
    """Set running statistics in place, since others may share their memory.

    Those that had not begun become zero.
    """
    for key, value in live.items():
        if isinstance(value, dict):
            _fill(value, first.get(key) or {})
        elif isinstance(value, torch.Tensor):
            value.copy_(first.get(key, torch.zeros(())))
