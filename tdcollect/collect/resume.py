"""Where a collector is, as a state dict, and how another one goes on from there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from tdcollect import keys
from tdcollect.collect.base import RowsCollector
from tdcollect.collect.fast.transforms import base_of
from tdcollect.collect.monitor import Monitor
from tdcollect.collect.step_dict import flat
from tdcollect.envs.wrapper import GymnasiumEnv, nested
from tdcollect.plain import pack, unpack
from tdcollect.randomness import global_states, set_global_states

POLICY, TRANSFORMS, COUNTERS = "policy", "transforms", "counters"
STATISTICS, RANDOM, ENVS = "statistics", "random", "envs"
COMPONENTS = (POLICY, TRANSFORMS, COUNTERS, STATISTICS, RANDOM, ENVS)

_POLICY_STATE, _TRANSFORMS_STATE = "policy_state_dict", "env_state_dict"
_FRAMES, _ITER, _POOL, _VERSION = "frames", "iter", "traj_pool", "policy_version"
_ENTRIES = {
    POLICY: (_POLICY_STATE, _VERSION),
    TRANSFORMS: (_TRANSFORMS_STATE,),
    COUNTERS: (_FRAMES, _ITER, _POOL),
    STATISTICS: (STATISTICS,),
    RANDOM: (RANDOM,),
    ENVS: (ENVS,),
}
"""The entries of a state dict by component, the one that it always has first."""


class ResumableCollector(RowsCollector):
    """A collector that goes on where another one was, in another process too."""

    _monitor: Monitor

    def state_dict(self, components: Sequence[str] | None = None) -> Any:
        """Where the collector is, for :meth:`load_state_dict` in this or another process.

        Beside what the parent's holds, there are statistics, random states, and the slots: their
        rows, hidden states and trajectory ids, and their envs, which takes
        ``make_env(..., resumable=True)``. All are tensors, numbers and strings in dicts.

        Args:
            components: which to include; None for all. ``"policy"`` (weights, and their version
                if it is tracked), ``"transforms"`` (of the env), ``"counters"`` (frames, batches,
                trajectory ids), ``"statistics"``, ``"random"`` (the global generators of torch,
                NumPy and Python), ``"envs"`` (the slots).

        Raises:
            ValueError: for names of no component.
            TypeError: for an env whose actions, options or snapshots are no plain values.
        """
        chosen = _checked(components)
        state = super().state_dict()
        for component, names in _ENTRIES.items():
            for name in names if component not in chosen else ():
                state.pop(name, None)
        if STATISTICS in chosen and self._monitor.stats.on:
            state[STATISTICS] = pack(self._monitor.save_state())
        if RANDOM in chosen:
            state[RANDOM] = pack(global_states())
        if ENVS in chosen:
            state[ENVS] = pack(self._save_slots())
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        components: Sequence[str] | None = None,
        if_newer: bool = False,
        **kwargs: Any,
    ) -> None:
        """Go on from where a collector was.

        Slots whose envs cannot be brought back start a new episode, with a new trajectory id; the
        one that they were in is never completed, and no statistics count it. A warning names them
        and says why. The state of TorchRL's own collector is loaded as that one loads it.

        Args:
            state_dict: what :meth:`state_dict` gave.
            components: which to load; None for all that were saved.
            if_newer: load the policy's weights only if their version is above the present one's;
                needs ``track_policy_version=True``, there and here.
            **kwargs: as the parent has them.

        Raises:
            TypeError: for what is no state dict.
            ValueError: for names of no component, for the state of other slots or entries, and
                for versions that cannot be compared.
            KeyError: where a component is missing.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "expected a state dict, as state_dict() gives it, got "
                f"{type(state_dict).__name__}; read one from a file with torch.load(path)"
            )
        strict = kwargs.get("strict", True)
        chosen = self._to_load(state_dict, components, strict)
        weights = POLICY in chosen and (not if_newer or self._is_newer(state_dict))
        for name in {STATISTICS, RANDOM, ENVS} & set(chosen):
            if not isinstance(state_dict[name], Mapping):
                raise TypeError(
                    f"expected the entry {name!r} of the state dict to be a dict, as state_dict() "
                    f"gives it, got {type(state_dict[name]).__name__}; leave it out: components=..."
                )
        slots = unpack(state_dict[ENVS]) if ENVS in chosen else {}
        base = base_of(self.env)
        if "slots" in slots and type(base) is GymnasiumEnv:
            base.check_slots(slots["slots"])  # before anything is loaded
        if TRANSFORMS in chosen:
            self.env.load_state_dict(state_dict[_TRANSFORMS_STATE], **kwargs)
        if weights:
            self._load_weights(state_dict, kwargs)
        if COUNTERS in chosen:
            self._parent.frames, self._parent.iteration = (
                int(state_dict[_FRAMES]),
                int(state_dict[_ITER]),
            )
            if self.track_traj_ids and _POOL in state_dict:
                self._parent.trajectory_ids.load_state_dict(state_dict[_POOL])
        if STATISTICS in chosen:
            self._monitor.load_state(unpack(state_dict[STATISTICS]))
        if ENVS in chosen:
            if STATISTICS not in chosen:
                self._monitor.miss()
            self._load_slots(slots, COUNTERS in chosen)
        else:
            if STATISTICS in chosen:
                self._monitor.lose()
            if COUNTERS in chosen:
                self._parent.start_new_trajectories()
        if RANDOM in chosen:  # last: nothing is drawn from here on
            set_global_states(unpack(state_dict[RANDOM]))

    def _to_load(
        self, state: Mapping[str, Any], components: Sequence[str] | None, strict: bool
    ) -> Sequence[str]:
        chosen = _checked(components)
        here = [name for name in COMPONENTS if _ENTRIES[name][0] in state]
        if components is None:
            needed = [TRANSFORMS, COUNTERS] if strict else [COUNTERS]
            if strict and (self._parent.stateful_policy is not None or POLICY in here):
                needed.append(POLICY)
            chosen = [name for name in COMPONENTS if name in here or name in needed]
        missing = [_ENTRIES[name][0] for name in chosen if name not in here]
        if missing:
            raise KeyError(
                f"expected the entries {missing} in the state dict, which has {list(state)}; to "
                f"load a part, name it: components={here}"
            )
        return chosen

    def _is_newer(self, state: Mapping[str, Any]) -> bool:
        versions = state.get(_VERSION), self.policy_version
        if not all(isinstance(version, int) for version in versions):
            raise ValueError(
                "expected weights with a version that is an int, there and here, got "
                f"{versions[0]!r} and {versions[1]!r}; make both collectors with "
                "track_policy_version=True, or leave if_newer out"
            )
        return bool(versions[0] > versions[1])

    def _load_weights(self, state: Mapping[str, Any], kwargs: dict[str, Any]) -> None:
        policy = self._parent.stateful_policy
        if policy is None:
            raise ValueError(
                "expected a policy with a state_dict to load the policy's weights into, got "
                f"{type(self.policy).__name__}; leave them out: components=..."
            )
        policy.load_state_dict(state[_POLICY_STATE], **kwargs)
        version = state.get(_VERSION)
        if version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version

    # --- slots ---------------------------------------------------------------------------------

    def _save_slots(self) -> dict[str, Any]:
        """The slots as far as they can be saved: each env, and the row to go on with."""
        base = base_of(self.env)
        if type(base) is not GymnasiumEnv:
            return {"why": f"the env is a {type(base).__name__}, not one of tdcollect.make_env"}
        if self.trajs_per_batch is not None:
            return {"why": "with trajs_per_batch, the rows of unfinished episodes are not saved"}
        if self._stacked_lazily:
            return {"why": "some entries are stacked lazily"}
        leaves = {key: self._parent.carrier.get(key) for key in self._parent.carrier.keys(True)}
        odd = [key for key, v in leaves.items() if not isinstance(v, (torch.Tensor, TensorDict))]
        if odd:
            return {"why": f"the entries {odd} are no tensors"}
        row = list(flat(self._parent.carrier).items())
        return {"slots": base.save_slots(), "row": row, "stale": self._stale}

    def _load_slots(self, state: dict[str, Any], known_ids: bool) -> None:
        base = base_of(self.env)
        slots = range(self.env.batch_size.numel())
        failed = dict.fromkeys(slots, state.get("why", ""))
        tried = False
        if "slots" in state:
            if type(base) is not GymnasiumEnv:
                failed = dict.fromkeys(slots, f"the env here is a {type(base).__name__}")
            else:
                tried = base.resumable
                failed = base.load_slots(state["slots"])
        back = [slot for slot in slots if slot not in failed]
        if back:
            self._parent.carrier = self._merged(dict(state["row"]), back)
            self._stale = state["stale"]
            self._monitor.collected = True
            if not known_ids:
                self._parent.start_new_trajectories()
        if failed:
            self._start_afresh(sorted(failed), tried)
            warnings.warn(_told(failed), stacklevel=3)

    def _start_afresh(self, slots: list[int], disturbed: bool) -> None:
        """Have slots begin an episode, where they are not at the first step of one."""
        if len(slots) < self.env.batch_size.numel():
            self.reset(slots)
        elif disturbed or self._stale or self._monitor.collected:
            self.reset()
        else:
            self._monitor.lose()
            self._parent.start_new_trajectories()

    def _merged(self, row: dict[Any, torch.Tensor], slots: list[int]) -> TensorDict:
        """A saved row in some slots, the present one in the others."""
        present = flat(self._parent.carrier)
        if not self.track_traj_ids:
            row.pop(keys.TRAJ_IDS, None)
        elif keys.TRAJ_IDS not in row:
            row[keys.TRAJ_IDS] = present[keys.TRAJ_IDS]
        batch = self._parent.carrier.batch_size
        merged = {}
        for key, saved in row.items():
            now = present.get(key)
            merged[key] = saved if now is None else saved.to(now.device)
            if len(slots) < batch.numel():
                others = torch.ones(batch, dtype=torch.bool)
                others[slots] = False
                merged[key][others] = 0 if now is None else now[others].to(saved.dtype)
        return nested(merged.items(), batch, self._parent.carrier.device)


def _checked(components: Sequence[str] | None) -> Sequence[str]:
    if components is None:
        return COMPONENTS
    several = isinstance(components, Iterable) and not isinstance(components, str)
    if not several or any(name not in COMPONENTS for name in components):
        raise ValueError(
            f"expected components to be some of {', '.join(COMPONENTS)}, got {components!r}"
        )
    return components


def _told(failed: Mapping[int, str]) -> str:
    """Which slots start anew, and why."""
    slots: dict[str, list[int]] = {}
    for slot, why in failed.items():
        slots.setdefault(why, []).append(slot)
    reasons = "; ".join(f"slots {those}: {why}" for why, those in slots.items())
    return (
        "the episodes of some slots could not be resumed, and new ones begin there, with new "
        f"trajectory ids ({reasons})"
    )
