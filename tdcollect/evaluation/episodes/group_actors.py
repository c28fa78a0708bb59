"""Policies of groups of agents at work: each acts from what its own group observes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data import OneHot
from torchrl.envs import EnvBase

from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.step_dict import StepDict
from tdcollect.evaluation.episodes.actions import LegalActions
from tdcollect.evaluation.episodes.agents import BatchedFunction, actors_of, shown
from tdcollect.evaluation.episodes.data import SUCCESS
from tdcollect.evaluation.episodes.groups import Group, GroupPolicies, checked_groups, is_absolute
from tdcollect.evaluation.episodes.inference import Actor, Inference, Layout, stream
from tdcollect.keys import ACTION, Key, as_path, entry_path
from tdcollect.policies import SpacePolicy


class OnGroup:
    """Observations and actions of a group of agents, as arrays with the agents in front.

    A group with one entry of observations has its array; with several, a dict of them by name.
    """

    def __init__(self, env: EnvBase, group: Group):
        depth = len(group.path)
        paths = [as_path(key) for key in env.observation_spec.keys(True, True)]
        own = [path[depth:] for path in paths if path[:depth] == group.path]
        observed = [path for path in sorted(own) if path[0] != "info" and path[-1] not in SUCCESS]
        if not observed:
            raise ValueError(
                f"expected observations of group {group.name!r} for its function or agent, got an "
                "env without; pass None for random actions, or one module for all groups"
            )
        self.in_keys: list[Key] = [path[0] if len(path) == 1 else path for path in observed]
        self.out_keys: list[Key] = [ACTION]
        self.observation = self
        self._name, self._count = group.name, len(group.agents)
        self._spec = env.full_action_spec_unbatched[(*group.path, ACTION)]

    def observed(self, rows: Mapping[Key, torch.Tensor]) -> list[Any]:
        """The arrays ``[N, agents, ...]`` of observations."""
        return [rows[key].detach().cpu().numpy() for key in self.in_keys]

    def read(self, arrays: Sequence[Any]) -> Any:
        if len(arrays) == 1:
            return arrays[0]
        return dict(zip(map(entry_path, self.in_keys), arrays, strict=True))

    def read_slots(self, arrays: Sequence[Any]) -> list[Any]:
        return [self.read(parts) for parts in zip(*arrays, strict=True)]

    def encoded(self, actions: Any, count: int) -> StepDict:
        return self.encoded_singly([*actions])

    def encoded_singly(self, actions: Sequence[Any]) -> StepDict:
        return StepDict({ACTION: torch.stack([*map(self._fitted, actions)])})

    def _fitted(self, action: Any) -> torch.Tensor:
        spec = self._spec
        shapes = [spec.shape, *[spec.shape[:-1]] * isinstance(spec, OneHot)]
        value = torch.empty(0, *spec.shape)  # of no shape that fits
        with suppress(TypeError, ValueError):  # for what is no array of numbers
            tensor = isinstance(action, torch.Tensor)
            value = torch.as_tensor(action.detach().cpu() if tensor else np.asarray(action))
        for shape in shapes:
            if value.shape not in (shape, shape[1:] if self._count == 1 else shape):
                continue
            value = value.reshape(shape)
            if shape != spec.shape and not value.is_floating_point():
                value = torch.nn.functional.one_hot(value.long(), spec.shape[-1])
            fitted = value.to(spec.dtype)
            if spec.dtype.is_floating_point or torch.equal(fitted.to(value.dtype), value):
                return fitted
        wanted = " or ".join(f"{list(shape)}" for shape in reversed(shapes))
        raise ValueError(
            f"expected the actions of group {self._name!r} as an array of shape {wanted}, one for "
            f"each of {self._count} agents, got {shown(action)}"
        )


class RandomGroup(Actor):
    """Random legal actions of one group of agents."""

    def __init__(self, env: SteppedEnv, group: Group, slots: int):
        self._path = group.path
        self._legal = LegalActions(env, env.transformed.full_action_spec_unbatched)
        self._streams: list[torch.Generator | None] = [None] * slots

    def start(self, slot: int, seed: int) -> None:
        self._streams[slot] = stream(seed)

    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        drawn = StepDict(rows)
        self._legal.draw(drawn, active, self._streams)
        rows[(*self._path, ACTION)] = drawn[(*self._path, ACTION)]


class GroupActors(Actor):
    """Acts for each group by its own policy.

    Each group has a random stream of its own in each episode.
    """

    def __init__(self, policies: GroupPolicies, env: SteppedEnv, layout: Layout):
        self._parts: list[GroupPart] = []
        for group in checked_groups(policies, env.transformed):
            name = entry_path(group.path)
            policy = policies.policies[name]
            if policy is None:
                part = GroupPart((), True, RandomGroup(env, group, layout.slots))
            elif not isinstance(policy, SpacePolicy):
                part = GroupPart(group.path, is_absolute(name, policy), Inference(policy, layout))
            else:
                on = OnGroup(env.transformed, group)
                if policy.batched:
                    actor: Actor = Inference(BatchedFunction(policy.source, on), layout)
                else:
                    actor = actors_of(policy, on, layout)
                part = GroupPart(group.path, False, actor)
            self._parts.append(part)

    @property
    def left_out(self) -> list[Key]:  # type: ignore[override]
        return [key for p in self._parts for key in p.named(dict.fromkeys(p.actor.left_out))]

    def start(self, slot: int, seed: int) -> None:
        for place, part in enumerate(self._parts):
            of_group = np.random.SeedSequence(seed, spawn_key=(place,))
            part.actor.start(slot, int(of_group.generate_state(1, np.uint64)[0]))

    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        for part in self._parts:
            own = part.own(rows)
            part.actor.act(own, active)
            rows.update(part.named(own))

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        outputs, remembered = StepDict(), list[Key]()
        for part in self._parts:
            own = [*part.own(dict.fromkeys(carried))]
            its_outputs, its_remembered = part.actor.probe(part.own(rows), own)
            outputs.update(part.named(its_outputs))
            remembered += part.named(dict.fromkeys(its_remembered))
        return outputs, remembered

    def end(self) -> None:
        for part in self._parts:
            part.actor.end()


class GroupPart(NamedTuple):
    """A group's policy, and the entries that it sees: named from the root, or from ``path`` on."""

    path: tuple[str, ...]
    absolute: bool
    actor: Actor

    def own(self, rows: Mapping[Key, Any]) -> StepDict:
        """The entries of the group, as its policy names them."""
        depth = len(self.path)
        of = [(as_path(k), k, v) for k, v in rows.items() if as_path(k)[:depth] == self.path]
        if self.absolute:
            return StepDict((key, value) for _, key, value in of)
        return StepDict((p[depth] if len(p) == depth + 1 else p[depth:], v) for p, _, v in of)

    def named(self, rows: Mapping[Key, Any]) -> StepDict:
        """Entries of its policy, as the env names them."""
        if self.absolute:
            return StepDict(rows)
        return StepDict(((*self.path, *as_path(key)), value) for key, value in rows.items())
