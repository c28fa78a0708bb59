"""Policies on the spaces of an env, for one slot at a time; and those of groups of agents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import OneHot
from torchrl.envs import EnvBase

from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.step_dict import StepDict, flat
from tdcollect.envs.process.values import Array
from tdcollect.envs.spaces import TextLeaf, aligned_zeros, nested, told
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.actions import LegalActions
from tdcollect.evaluation.episodes.data import SUCCESS, Steps
from tdcollect.evaluation.episodes.groups import Group, GroupPolicies, checked_groups, is_absolute
from tdcollect.evaluation.episodes.inference import (
    Actor,
    DrawByRow,
    Inference,
    Layout,
    check_same,
    stream,
    unlike,
)
from tdcollect.evaluation.episodes.opening import SlotEnvs
from tdcollect.keys import ACTION, Key, as_path, entry_path, key_of
from tdcollect.policies import AgentPolicy, SpacePolicy, parts_of
from tdcollect.randomness import GlobalStream, NotReproducibleError, Outside

_AS_AGENT = "Put what it must remember into an agent: tdcollect.policies.from_agent(make)"

_UNSEEDED = (
    "draws random numbers that no seed reaches, such as those of its own np.random.default_rng(). "
    "Draw from np.random, torch or random themselves; or from a generator that an agent makes of "
    "its seed at an episode's start: def reset(self, seed): self.generator = "
    "np.random.default_rng(seed)"
)
_STATES: dict[type, Callable[[Any], Any]] = {
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(),
    random.Random: lambda generator: generator.getstate(),
    torch.Generator: lambda generator: generator.get_state().tolist(),
}


class OnSpaces:
    """Observations and actions of an env of ``make_env``, as its gymnasium spaces have them."""

    def __init__(self, env: EnvBase, texts: Mapping[Key, TextLeaf] | None = None):
        base, self._texts = base_of(env), texts or {}
        if not isinstance(base, GymnasiumEnv):
            raise TypeError(
                f"expected an env of tdcollect.make_env, got {env}; pass tdcollect.make_env(env), "
                "of a gymnasium id or a function that makes one. Where agents have groups, each "
                "has a policy: {'GROUP': from_function(f)}"
            )
        backend = base.stepper.backend
        self.observation, self.action = backend.observation, backend.action
        # In the order of the space, which that of the env's specs need not be.
        self.in_keys: list[Key] = [key_of(path) for path in self.observation.paths]
        self.out_keys: list[Key] = [key_of(path) for path in self.action.paths]

    def observed(self, rows: Mapping[Key, torch.Tensor]) -> list[Any]:
        """The arrays ``[N, ...]`` of observations."""
        own, entries = self.observation.texts, [rows[key].detach().cpu() for key in self.in_keys]
        return [
            (own[key].numbers(self._texts[key].read(entry)) if key in own else entry).numpy()
            for key, entry in zip(self.in_keys, entries, strict=True)
        ]

    def encoded(self, actions: Any, count: int) -> StepDict:
        """The entries ``[N, ...]`` of the actions ``[N, ...]`` of a batch."""
        with self._taken(actions):
            got = _count_of(self.action.space, actions)
        if got != count:
            raise ValueError(
                f"expected {count} actions, one for each observation of the batch, got {got}; "
                "a function of one observation goes without batched=True"
            )
        entries = self.action.empty(count)
        with self._taken(actions):
            self.action.write(_fitted(self.action.space, actions, (count,)), entries)
        return self._named(entries)

    def encoded_singly(self, actions: Sequence[Any]) -> StepDict:
        entries = self.action.empty(len(actions))
        for slot, action in enumerate(actions):
            with self._taken(action):
                self.action.write_slot(_fitted(self.action.space, action), entries, slot)
        return self._named(entries)

    def _named(self, entries: Sequence[Any]) -> StepDict:
        own, named = self.action.texts, StepDict()
        for key, entry in zip(self.out_keys, map(torch.from_numpy, entries), strict=True):
            named[key] = self._texts[key].numbers(own[key].read(entry)) if key in own else entry
        return named

    @contextmanager
    def _taken(self, action: Any) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"expected an action of the env's space, {self.action.space}, got "
                f"{shown(action)}; return one that env.action_space.contains"
            ) from error


def aligned(rows: Array) -> Array:
    """Return a copy of rows ``[N, ...]``, each of which begins at a multiple of 64 bytes.

    A matrix product rounds by where its input lies: a function must not see its slot by that.
    """
    (copy,), _ = aligned_zeros(len(rows), [(rows.shape[1:], rows.dtype)])
    copy[:] = rows
    return copy


@contextmanager
def _called(how: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"it was called with {how}")
        raise


def _count_of(space: Any, actions: Any) -> int:
    """The number of actions in a batch of them, as its first part tells."""
    while isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts: Any = space.spaces
        name = next(iter(parts)) if isinstance(parts, dict) else 0
        space, actions = parts[name], actions[name]
    shape = np.shape(actions)
    return shape[0] if shape else 1


def _fitted(space: Any, action: Any, lead: tuple[int, ...] = ()) -> Any:
    """Actions ``[*lead, ...]`` as the space has them; axes of size 1 before these are dropped."""
    if isinstance(space, spaces.Dict):
        return {name: _fitted(part, action[name], lead) for name, part in space.spaces.items()}
    if space.dtype == np.str_:
        return action
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, action, strict=True)
        return tuple(_fitted(part, value, lead) for part, value in parts)
    value = np.asarray(action.detach().cpu() if isinstance(action, torch.Tensor) else action)
    while value.ndim > len(lead) + len(space.shape or ()) and len(value) == 1:
        value = value[0]
    if value.shape[: len(lead)] != lead:
        raise ValueError("a part has another number of rows")
    fitted = value.astype(space.dtype)
    if not isinstance(space, spaces.Box) and not (fitted == value).all():
        raise ValueError("it has no whole numbers")
    return fitted


def shown(action: Any) -> str:
    shape = f" of shape {tuple(action.shape)}" if hasattr(action, "shape") else ""
    text = repr(action)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(action).__name__}{shape})"


class BatchedFunction(TensorDictModuleBase):
    """A function of the observations of a batch, as a policy on TensorDicts."""

    def __init__(self, function: Callable[[Any], Any], on: Any):
        super().__init__()
        self._function, self._on = function, on
        self.in_keys, self.out_keys = self._on.in_keys, self._on.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        arrays = self._on.observed(tensordict)
        with _called("observations [N, ...]; a function of one goes without batched=True"):
            actions = self._function(self._on.observation.read(arrays))
        for key, value in self._on.encoded(actions, len(arrays[0])).items():
            tensordict.set(key, value)
        return tensordict


class Actors(Actor):
    """Acts in each slot by itself, by the function or the agent of its episode.

    What it draws from the global generators comes from the stream of its episode.
    """

    def __init__(self, policy: SpacePolicy, on: Any, layout: Layout):
        self._policy, self._on, self._layout = policy, on, layout
        self._acting = dict[int, EpisodeActor]()

    def start(self, slot: int, seed: int) -> None:
        self._acting[slot] = EpisodeActor(self._policy, seed)

    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        observations = self._observations(rows)
        encoded = self._on.encoded_singly(self._actions(observations, active))
        for key, value in encoded.items():
            if not self._layout.batched:
                rows[key] = value[0]
                continue
            rows[key] = value.new_zeros((self._layout.slots, *value.shape[1:]))
            rows[key][[*active]] = value

    def _actions(self, observations: Sequence[Any], active: Sequence[int]) -> Sequence[Any]:
        return [self._acting[slot].act(observations[slot]) for slot in active]

    def _observations(self, rows: StepDict) -> Sequence[Any]:
        arrays = self._on.observed(rows)
        batch = [aligned(value if self._layout.batched else value[None]) for value in arrays]
        return self._on.observation.read_slots(batch)

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        """Act twice at the first observation, and refuse a policy that does not act the same.

        No entries go from one step to the next, as agents remember by themselves.
        """
        observation = self._observations(rows)[0]
        actors = (EpisodeActor(self._policy, 0) for _ in range(2))
        first, again = (self._on.encoded_singly([one.act(observation)]) for one in actors)
        check_same(
            first,
            again,
            "gives other actions {} for the same observation and random stream at an episode's "
            f"start: it keeps something from one episode to the next, or {_UNSEEDED}. {_AS_AGENT}",
        )
        if before := _generators(self._policy.source):
            actor = EpisodeActor(self._policy, 0)
            agent = getattr(actor.agent, "__self__", None)
            of = self._policy.source if self._policy.kind == "function" else agent
            begun = _generators(of)
            actor.act(observation)
            after = _generators(of)
            if any(state == begun.get(name) != after.get(name) for name, state in before.items()):
                raise NotReproducibleError(f"the policy {_UNSEEDED}")
        return first, []


class KeptActions(SpacePolicy):
    """The actions that were kept of episodes, with their steps by policy seed, as a policy.

    Attributes:
        fields: the name of each of the env's actions in the steps.
    """

    kind = "kept actions"

    def __init__(self, steps: Mapping[int, Steps]):
        self.source, self.batched, self._key = steps, False, False
        self.fields: dict[Key, str] = {}

    def begin(self, seed: int) -> Any:
        """Return a function that gives the actions, and the last one again after the end."""
        steps = self.source[seed]
        following = chain(steps, repeat(steps[-1]))
        return lambda observation: next(following)

    def encoded_singly(self, steps: Sequence[Any]) -> StepDict:
        return StepDict(
            (key, torch.from_numpy(np.stack([step[name] for step in steps])))
            for key, name in self.fields.items()
        )


class KeptActor(Actors):
    """Acts as was kept of the episodes, whatever there is to see."""

    probe = Actor.probe

    def _observations(self, rows: StepDict) -> Sequence[Any]:
        return range(self._layout.slots)


def _generators(of: Any) -> dict[str, str]:
    """Return the states of the generators that a function or an object holds, by name."""
    return {
        name: repr(state(part))
        for name, part in parts_of(of).items()
        for kind, state in _STATES.items()
        if isinstance(part, kind)
    }


class SlotActor(Actor):
    """Runs a policy on the TensorDict of one slot after the other, where entries are words.

    Texts have unlike lengths: in a batch, what is made of one would round by what else runs.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        env: SteppedEnv,
        texts: Mapping[Key, TextLeaf],
        layout: Layout,
    ):
        self._policy, self._env, self._texts, self._layout = policy, env, texts, layout
        self._streams = dict[int, GlobalStream]()
        self._written = set[Key]()  # by the policy, which no episode leaves to the next
        self._starting = set[int]()

    def start(self, slot: int, seed: int) -> None:
        self._streams[slot] = GlobalStream(seed, self._layout.device)
        self._starting.add(slot)

    def _given(self, slot: int, rows: StepDict) -> TensorDictBase:
        if isinstance(self._env, SlotEnvs):
            return self._env.now[slot]
        left = self._written if slot in self._starting else ()
        own: Mapping[Any, Any] = {key: value for key, value in rows.items() if key not in left}
        if self._layout.batched:
            own = {key: value[slot : slot + 1] for key, value in own.items()}
        own = told(self._texts, own, self._env.transformed.device)
        return nested(own.items(), [1] * self._layout.batched, self._env.transformed.device)

    def _acted(self, now: TensorDictBase, stream: GlobalStream) -> tuple[TensorDictBase, StepDict]:
        """The TensorDict with what the policy writes, and its row."""
        with Outside(self._layout.device), stream:
            acted = self._policy(now)
        if isinstance(self._env, SlotEnvs):
            return acted, self._env.entries(acted)
        row = flat(acted, self._texts)
        return acted, StepDict((k, v[0] if self._layout.batched else v) for k, v in row.items())

    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        slots, written = self._layout.slots, StepDict()
        for slot in active:
            acted, row = self._acted(self._given(slot, rows), self._streams[slot])
            if isinstance(self._env, SlotEnvs):
                self._env.now[slot] = acted
            for key in self._written.intersection(row):
                if not self._layout.batched:
                    written[key] = row[key]
                    continue
                if key not in written:
                    written[key] = row[key].new_zeros((slots, *row[key].shape))
                written[key][slot] = row[key]
        self._starting.difference_update(active)
        rows.update(written)

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        device, given = self._layout.device, self._given(0, rows)
        first, again = (self._acted(given.clone(), GlobalStream(0, device))[1] for _ in range(2))
        check_same(first, again, f"gives other outputs {{}} for the same entries: it {_UNSEEDED}")
        self._written = {key for key in first if key not in rows}
        return StepDict((key, value.unsqueeze(0)) for key, value in first.items()), []


class EpisodeActor:
    """The function or agent of one episode, with the episode's random stream.

    An ``agent`` that acts together with others draws from ``generator`` then.
    """

    def __init__(self, policy: SpacePolicy, seed: int):
        self._stream, self.generator = GlobalStream(seed), stream(seed)
        more = "; one of a batch goes with batched=True" * (policy.kind == "function")
        self._how = f"one observation{more}"
        with Outside(), self._stream, _called("no argument, to begin an episode; or with its seed"):
            self._act = self.agent = policy.begin(seed)

    def act(self, observation: Any) -> Any:
        with Outside(), self._stream, _called(self._how):
            return self._act(observation)


def actors_of(policy: SpacePolicy, on: Any, layout: Layout) -> Actors:
    """Return what acts for a policy: slot by slot, or for several slots at once."""
    if isinstance(policy, AgentPolicy) and policy.together:
        return Together(policy, on, layout)
    return Actors(policy, on, layout)


class Together(Actors):
    """Agents that act for several episodes at once, always for as many: rounding depends on it.

    In the places of episodes that do not run, spare agents act.
    """

    def __init__(self, policy: AgentPolicy, on: Any, layout: Layout):
        super().__init__(policy, on, layout)
        self._size, self._spares = layout.size, list[EpisodeActor]()
        self._mode, self._name = DrawByRow(layout.size), policy.method

    def _actions(self, observations: Sequence[Any], active: Sequence[int]) -> Sequence[Any]:
        size, by_slot = self._size, dict[int, Any]()
        self._spares = self._spares or [EpisodeActor(self._policy, at) for at in range(size)]
        for first in range(0, self._layout.slots, size):
            slots = [slot for slot in active if first <= slot < first + size]
            actors, seen = [*self._spares], [observations[active[0]]] * size
            for slot in slots:
                actors[slot - first], seen[slot - first] = self._acting[slot], observations[slot]
            actions = self._acted_by(actors, seen) if slots else []
            by_slot |= {slot: actions[slot - first] for slot in slots}
        return [by_slot[slot] for slot in active]

    def _acted_by(self, actors: Sequence[Any], observations: Sequence[Any]) -> Sequence[Any]:
        agents = [actor.agent for actor in actors]
        self._mode.streams = [actor.generator for actor in actors]
        with self._mode:
            actions: Sequence[Any] = getattr(agents[0], self._name)(agents, [*observations])
        if len(actions) != len(agents):
            raise ValueError(
                f"expected an action of each of {len(agents)} agents from {self._name}(agents, "
                f"observations), got {len(actions)}; return a list of them"
            )
        return actions

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        one, size = self._observations(rows)[0], self._size
        changed = StepDict((key, unlike(key, value)) for key, value in rows.items())
        other = self._observations(changed)[0]

        def acted(place: int, beside: Any) -> StepDict:
            observations = [one if at == place else beside for at in range(size)]
            actors = [
                EpisodeActor(self._policy, 0 if at == place else 1 + at) for at in range(size)
            ]
            return self._on.encoded_singly([self._acted_by(actors, observations)[place]])

        first = acted(0, one)
        for again in (acted(0, one), acted(0, other), acted(size - 1, other)):
            check_same(
                first,
                again,
                "gives other actions {} for the same observation at an episode's start, beside "
                "other agents or at another place among them: agents share something, draw from "
                "another generator than torch's, or their network rounds by the place. Give each "
                "agent its own, or leave out together=",
            )
        return first, []


# --- groups of agents: each acts from what its own group observes


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
        self.in_keys: list[Key] = [key_of(path) for path in observed]
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
        return StepDict((key_of(path[depth:]), value) for path, _, value in of)

    def named(self, rows: Mapping[Key, Any]) -> StepDict:
        """Entries of its policy, as the env names them."""
        if self.absolute:
            return StepDict(rows)
        return StepDict(((*self.path, *as_path(key)), value) for key, value in rows.items())
