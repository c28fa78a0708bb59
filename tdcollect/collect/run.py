"""The runner of a collector: the position of its slots, one batch, and how it runs."""

from __future__ import annotations

import math
import timeit
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import composite_lp_aggregate, skip_existing
from tensordict.nn.probabilistic import interaction_type
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, GymWrapper
from torchrl.envs.utils import exploration_type, set_exploration_type
from torchrl.modules import RandomPolicy

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect._upstream.collectors import CollectorState, new_ids_of
from tdcollect.collect import arrays
from tdcollect.collect.arguments import by_arrival_needs, check_arrival_buffer
from tdcollect.collect.arrays import (
    ArrayEnv,
    ArrayPlan,
    Facts,
    by_episodes,
    facts_of_env,
    plan_for,
)
from tdcollect.collect.episodes import Block, Episodes, FirstToStart, Start, join_episodes
from tdcollect.collect.monitor import CollectionLog, changed, torchrl_rollout, warn_of_lost
from tdcollect.collect.policy import (
    ON_TENSORDICT,
    LoweredPolicy,
    RandomActions,
    draws_from_spec,
    is_masked,
    label,
    not_of,
    own_code_of,
    warning_of_draws,
)
from tdcollect.collect.resume import FirstStates
from tdcollect.collect.step_dict import (
    NotTensors,
    StepDict,
    flat,
    is_plain,
    nested_shapes,
    shaped_like,
    stacked_lazily,
)
from tdcollect.collect.store import Captured, Placement, placement
from tdcollect.collect.transforms import Norm
from tdcollect.collect.turns import Acting, Arrivals, Frames
from tdcollect.display import html_table, one_line
from tdcollect.envs.adopted import early_seeds, lost_ends, reset_arguments
from tdcollect.envs.beside import HonouredStarts
from tdcollect.envs.process.values import Array
from tdcollect.envs.spaces import nested, told
from tdcollect.envs.traits import (
    all_transforms_of,
    base_of,
    innermost,
    keeps_statistics,
    transforms_of,
)
from tdcollect.envs.wrapper import GymnasiumEnv, shares_masks
from tdcollect.keys import Key, as_path
from tdcollect.progress import warn

_BLOCK_STEPS = 64
"""The most steps of a block of a collection by episodes."""

_LITTLE = 1_000_000  # products per step, with as few of which a CPU was quicker than an H100
_CALLS = 30  # that a policy is timed with

_NO_PLACES: Array = np.empty((5, 0), np.int64)
"""Those of an env that is not one of tdcollect's: see :meth:`Stepper.places`."""


class Part(NamedTuple):
    """One part of the loop.

    Attributes:
        name: its kind.
        what: its name.
        how: the way in which it runs; off the arrays, why, and what to change.
        cost: about what it costs off the arrays; empty on them.
    """

    name: str
    what: str
    how: str
    cost: str = ""


class Explanation(tuple[Part, ...]):
    """The parts of a collection; prints as a table."""

    @property
    def obstacles(self) -> list[Part]:
        """The parts that run slower than they could; none where all is on arrays."""
        return [part for part in self if part.cost]

    def __repr__(self) -> str:
        return one_line(self, *(f"{part.name}: {part.how}" for part in self))

    def _repr_html_(self) -> str:
        return html_table(["part", "what", "how", "about"], self)

    def __str__(self) -> str:
        name_width = max(len(part.name) for part in self)
        what_width = max(len(part.what) for part in self)
        return "\n".join(
            f"{part.name:<{name_width}}  {part.what:<{what_width}}  {part.how}"
            + (f" (about {part.cost})" if part.cost else "")
            for part in self
        )


class Runner:
    """Steps the env of a collector, and keeps the position of its slots.

    The position is the step that the collector carries, which TorchRL's loop moves too, and
    whether the envs are where that step says. Everything that a loop needs beside is read off the
    collector when a batch begins: its user may have changed it since the last.

    Args:
        collector: is not kept alive.

    Attributes:
        parent: the private state of the collector's parent.
        stale: whether the carried step does not say where the envs are: they must be reset before
            anything else is collected.
        arrivals: what stays of a collection by arrival from one batch to the next.
        owns_batch: whether the latest batch of iteration has memory of its own; TorchRL's loop
            stacks into memory that its next batch reuses.
        first_states: those of the transforms, until something is collected.
        env_state: the state dict of a batched env that was closed with the last batch; else None.
        explained: the explanation of the last batch, with which the env was closed; else None.
    """

    def __init__(self, collector: Any):
        self._collector: Any = weakref.proxy(collector)
        self.parent = CollectorState(self._collector)
        self._not_tensors: Sequence[Key] = ()  # policy outputs that are no dense tensors
        self._shrunk = False  # the parent's preallocated batch has the memory of one step
        self._has_acted = False  # the carried step has the policy's outputs already
        self._arrives_randomly = False  # whether slots in flight act randomly
        self.arrivals = Arrivals()
        self.stale = False
        self.owns_batch = False
        self.first_states: FirstStates | None = None  # set before the first reset
        self.env_state: Any = None
        self.explained: Explanation | None = None
        self._places = _NO_PLACES  # of the slots, where the collector has left them
        self._plan = ArrayPlan(None)
        self._planned_for: Facts | None = None
        self._lowered: LoweredPolicy | None = None
        self._lowered_for: Facts | None = None
        self._entries: dict[Key, Any] = {}  # of the step that it was lowered for
        self._warned: set[str] = set()

    def check_open(self, to_go_on: bool = False) -> None:
        """Raise RuntimeError for a collector that is shut down, or has yielded all its frames."""
        collector = self._collector
        if collector.closed:
            raise RuntimeError(
                "the collector is shut down, as an exception while iterating also does; make a new "
                "one to collect"
            )
        if to_go_on and self.parent.frames >= collector.total_frames:
            raise RuntimeError(
                f"the collector has yielded its total_frames={collector.total_frames} and closed "
                "its env; make a new one, without total_frames, to collect"
            )

    # ------------------------------------------------------------------------------- the position

    @property
    def is_lost(self) -> bool:
        """True if envs must be reset: they have gone on from where they are known to be."""
        return self.stale or bool(self._moved())

    def _moved(self) -> list[int]:
        """The slots that somebody else has stepped or reset, if the env is one of make_env's."""
        known, now = self._places, self._places_now
        if known.tobytes() == now.tobytes():  # the quickest way
            return []
        both = min(known.shape[1], now.shape[1])  # none, where the env has no places
        moved: list[int] = np.flatnonzero((known[:, :both] != now[:, :both]).any(0)).tolist()
        return moved

    @property
    def _places_now(self) -> Array:
        base = innermost(self._collector.env)
        return base.stepper.places() if isinstance(base, GymnasiumEnv) else _NO_PLACES

    def note_places(self, slots: Iterable[int] | None = None) -> None:
        """Take the places of ``slots`` (None for all) for those that the collector knows."""
        now = self._places_now
        if slots is None or not now.size:
            self._places = now
        else:
            self._places[:, list(slots)] = now[:, list(slots)]

    def _find_envs(self) -> None:
        """Reset the slots that are not where the carried step says."""
        collector = self._collector
        moved = [] if collector.reset_at_each_iter else self._moved()
        if moved and not self.stale:
            self._warn_once(
                f"somebody else has stepped or reset the collector's env: slots {moved} begin new "
                "trajectories, as after set_seed; evaluate and roll out an env of its own"
            )
        if self.stale or len(moved) == collector.n_env or (moved and collector.by_arrival):
            collector.reset()
        elif moved:
            collector.reset(moved)

    def _own_loops(self) -> list[Part]:
        """The methods of a user's subclass in which batches are collected."""
        methods = [getattr(self._collector, name) for name in ("iterator", "rollout")]
        how = "runs as it is written; what follows holds for what it hands to super()"
        return [
            Part("loop", f"{method.__qualname__}()", how, "what it takes")
            for method in methods
            if not method.__module__.startswith("tdcollect.")
        ]

    def _moved_by_others(self) -> list[Part]:
        """What becomes of slots that somebody else moves between two batches."""
        if moved := self._moved():
            how = f"slots {moved} begin new trajectories"
        elif self._places_now.size:
            return []
        else:
            how = "not noticed between batches, as in TorchRL"
        return [Part("slots", "moved by others", how)]

    def _warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)

    def set_position(self, carrier: TensorDictBase | None = None, stale: bool = False) -> None:
        """The envs are at a step: this one, or the carried one (None)."""
        self.note_places()
        if carrier is not None:
            # Agents and the like keep the batch sizes that TorchRL gave them.
            for path, size in nested_shapes(self.parent.carrier).items():
                part = carrier.get(path, None)
                if part is not None and part.batch_size != size:
                    part.batch_size = size
            self.parent.carrier = carrier
        else:
            self.arrivals = Arrivals()
        self.stale = stale

    def gather_position(self) -> None:
        """Have all entries of the carried step where the env is: TorchRL resets it in part there.

        The policy's outputs may lie elsewhere.
        """
        home = self._collector.env.device or torch.device("cpu")
        carrier = self.parent.carrier
        for key, value in carrier.items(True, True):
            if isinstance(value, torch.Tensor) and value.device != home:
                carrier.set(key, value.to(home))

    def restart(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        static_seed: bool = False,
    ) -> Any:
        """Reset every slot; the seed for the next env."""
        collector = self._collector
        following, seeds = (None, None) if seed is None else self._seed(seed, static_seed)
        collector.reset(**reset_arguments(base_of(collector.env), seeds, options))
        return following

    def _seed(self, seed: int, static_seed: bool = False) -> tuple[Any, list[int] | None]:
        """Seed the env and its transforms; the seed for the next env, and those of resets."""
        collector = self._collector
        if self.first_states is not None:
            self.first_states.restore()
        following = TorchRLCollector.set_seed(collector, seed, static_seed=static_seed)
        return following, early_seeds(base_of(collector.env), seed, static_seed)

    # -------------------------------------------------------------------------------- the fork

    def plan(self, iterating: bool = False) -> ArrayPlan:
        """Decide how the env is stepped; in iteration, TorchRL may have to end or store batches."""
        collector, reasons = self._collector, []
        if iterating and collector.interruptor is not None:
            reasons.append("an interruptor may end a batch early")
        if iterating and collector.replay_buffer is not None and not collector.extend_buffer:
            reasons.append(
                "every step goes to the replay buffer by itself; leave extend_buffer=False out"
            )
        if self._not_tensors:
            entries = self._not_tensors
            reasons.append(f"the policy writes entries that are no dense tensors, {entries}")
        values = reasons, arrays.RUN_ON_ARRAYS
        if self._planned_for is None or not self._planned_for.hold(collector.env, *values):
            self._plan = plan_for(collector.env, reasons=reasons)
            self._planned_for = facts_of_env(collector.env, *values)
        return self._plan

    def explain(self, measure: bool = False) -> Explanation:
        """The parts of iteration, and how they run, or ran to the last batch."""
        if self.explained is not None:
            return self.explained
        collector, plan = self._collector, self.plan(iterating=True)
        parts = [*self._own_loops(), *_parts_of(collector.env, plan), *self._moved_by_others()]
        if plan.env is None:
            parts.append(Part("policy", label(collector.policy), _AS_TORCHRL))
            parts.append(Part("batch", "stacked from TensorDicts, then copied", _AS_TORCHRL))
            return Explanation(parts)
        with set_exploration_type(collector.exploration_type):
            step = flat(self.parent.carrier)
            policy = self._lower_again(step, checked=False)
            if self._ignores_masks:
                ((what, how),) = policy.described
                policy.described = [(what, f"{how}; action masks are ignored, as in TorchRL")]
            if self.parent.acts_randomly():
                ((what, how),) = self._lower_again(step, False, self._random).described
                policy.described.insert(0, (f"{what}, until init_random_frames", how))
        parts += [
            Part("policy", what, called, "30 to 250 us a call" * called.startswith(ON_TENSORDICT))
            for what, called in policy.described
        ]
        place = self._place(plan.env)
        if place.moves:
            parts.append(Part("devices", repr(place), "each tensor crosses once"))
            module = self.parent.wrapped_policy
            if place.policy.type == "cuda" and isinstance(module, nn.Module):
                weights = [*module.parameters()]
                work = collector.env.batch_size.numel() * sum(map(torch.numel, weights))
                if work <= _LITTLE and all(weight.ndim <= 2 for weight in weights):
                    small = f"{work:,} products a step: may take less time on the CPU"
                    parts.append(Part("policy", "size", small))
                if measure:
                    parts.append(Part("policy", "time of a call", self._measured(plan.env, place)))
        if place.moves or collector.graphs:
            how = self._graph_explained(self._why_no_graph(plan.env, place))
            parts.append(Part("policy", "all calls", how))
        if collector.by_arrival:
            stored = "rows in the order of their arrival", "no slot waits at its end"
        elif collector.return_same_td:
            stored = "copied into one TensorDict", "return_same_td=True"
        else:
            stored = "stacked once", "no copy"
        return Explanation([*parts, Part("batch", *stored)])

    # ------------------------------------------------------------------------------- the loops

    def iterate(self, log: CollectionLog) -> TensorDictBase | None:
        """Collect one batch ``[N, T]`` of iteration; None where steps go to the replay buffer."""
        collector = self._collector
        if collector.pre_collect_hook is not None:
            collector.pre_collect_hook()
        self.first_states = None
        self._find_envs()
        if collector.reset_at_each_iter:
            collector._monitor.drop()
        plan = self.plan(iterating=True)
        random = self.parent.acts_randomly()
        self.owns_batch = plan.env is not None and not (random and self._holds_odd_entries)
        if not (self.owns_batch or collector.by_arrival):
            return self._as_torchrl(log)
        self._allot_buffer(shrunk=not collector.return_same_td)
        if collector.reset_at_each_iter:
            self.parent.carrier.update(collector.env.reset())
            self.parent.start_new_trajectories()
        frames = collector.frames_asked if collector.by_arrival else collector.frames_per_batch
        with set_exploration_type(collector.exploration_type):
            batch = self._on_arrays(plan, int(frames), log, random)
        if batch is None:
            self.owns_batch = False
            warn_of_lost(self.parent, self._not_tensors)
            return self._as_torchrl(log, reset_at_each_iter=False)
        if collector.return_same_td and self.parent.preallocates:
            same = self.parent.preallocated.update_(batch)  # which leaves text as it is
            for key in getattr(plan.env, "texts", ()):
                if (text := batch.get(key, None)) is not None:
                    upstream.set_unchecked(same, as_path(key), text)
            return same
        return batch

    def frames(self, steps: int, log: CollectionLog, random: bool) -> TensorDictBase:
        """Go on for ``steps`` steps of every slot: ``[N, steps]``; as many rows by arrival."""
        self.first_states = None
        self._find_envs()
        batch = self._on_arrays(self.plan(), steps, log, random)
        if batch is None:
            with changed(self.parent, preallocates=False):
                batch = self._as_torchrl(
                    log,
                    frames_per_batch=steps,
                    exploration_type=exploration_type(),
                    init_random_frames=math.inf if random else 0,
                    reset_at_each_iter=False,
                    interruptor=None,
                )
            assert batch is not None
            if self.parent.preallocates:
                shaped_like(self.parent.preallocated, batch, cast=True)
        if torch.is_grad_enabled():
            self.parent.carrier = self.parent.carrier.detach()
        return batch

    def episodes(
        self,
        count: int,
        log: CollectionLog,
        seed: int | None,
        options: dict[str, Any] | None,
        random: bool,
        max_episode_steps: int | None,
    ) -> TensorDictBase:
        """Collect whole episodes from a fresh start: ``[sum of lengths]``."""
        collector = self._collector
        env = by_episodes(self.plan(), collector.env)
        self._planned_for = None  # its transforms will leave out the rows of slots that wait
        self._warn_of_statistics(env)
        env, lower = log.timed_parts(env, partial(self.lower, random=random))
        first_seeds = None if seed is None else self._seed(seed)[1]
        self.first_states = None
        collector._monitor.drop()
        self.stale = True  # the envs go on from the carried step
        if collector.by_arrival and env.base is not None and seed is None:
            env.base.stepper.derive_seeds()  # timing has left the envs' generators anywhere
        place, new_ids = self._place(env), new_ids_of(self.parent.trajectory_ids)
        acting = Acting(env, lower, place)
        order = FirstToStart(count) if env.can.asynchronous else None
        restarts = env.base is not None and env.base.restarts is not None

        def start(index: int) -> Start:
            return Start(index, None, int(new_ids(1)[0]) if order is None else order.new_id())

        loop = Episodes(
            env,
            acting,
            order or map(start, range(count)),
            place,
            steps=_BLOCK_STEPS,
            max_episode_steps=max_episode_steps,
            left_out=self._left_out,
            in_one_piece=torch.is_grad_enabled(),
            first_seeds=first_seeds,
            options=options,
            on_error=(lambda lost, error: start(lost.index)) if restarts else None,
            watch=log.watch,
        )

        def checked() -> Iterator[Block]:
            for block in loop:
                acting.check()
                yield block

        blocks: Iterable[Block] = checked()
        if order is not None:
            blocks = order.only_kept(list(blocks), torch.from_numpy(new_ids(count)))
            env.stepper.derive_seeds()
        entries = join_episodes(log.note_blocks(blocks))
        log.note_entries(entries, collector.env.reward_keys)
        return self.assemble(entries, (len(entries[keys.NEXT_DONE]),))

    def _warn_of_statistics(self, env: ArrayEnv) -> None:
        """Warn of statistics that slots take part in while they wait for the last episodes."""
        right = {part.label for part in env.parts if isinstance(part, Norm)}
        keeping = [
            type(t).__name__ for t in all_transforms_of(env.transformed) if keeps_statistics(t)
        ]
        if (odd := sorted(set(keeping) - right)) and env.batch_size.numel() > 1:
            self._warn_once(
                f"{', '.join(odd)} also count the rows of slots that wait for the last episodes, "
                "which are in no batch: freeze statistics before collect(episodes=...)"
            )

    def _on_arrays(
        self, plan: ArrayPlan, steps: int, log: CollectionLog, random: bool
    ) -> TensorDictBase | None:
        """Go on for ``steps`` steps of every slot: ``[N, steps]``; as many rows by arrival.

        None where the env is not on arrays, or the policy turns out to write something else than
        tensors: it has then been called for the first step, and its outputs are in the carried
        step, with which TorchRL's loop is to begin.
        """
        if self._collector.by_arrival:
            return self._arriving(plan.env, steps, log, random)
        if plan.env is None:
            return None
        collector, parent = self._collector, self.parent
        loop = self._frames(plan.env, random, log, steps)
        try:
            entries = (loop.asynchronous if plan.env.can.asynchronous else loop.synchronous)(steps)
        except NotTensors as found:
            self._not_tensors, self._has_acted = found.entries, True
            return None
        log.note_entries(entries, collector.env.reward_keys)
        return parent.truncate_last_step(self.assemble(entries, (*collector.env.batch_size, steps)))

    def _frames(self, env: ArrayEnv, random: bool, log: CollectionLog, steps: int = 0) -> Frames:
        collector, parent, place = self._collector, self.parent, self._place(env)
        if place.moves and not torch.is_grad_enabled():
            place.graphs = not self._why_no_graph(env, place)
        at_each_step = log.watch is not None or env.can.asynchronous or place.graphs
        late = None if at_each_step or steps == 1 else env
        tracked = isinstance(collector.policy_version, int)
        env.start(parent.preallocates)
        env, lower = log.timed_parts(env, partial(self.lower, random=random, late=late))
        return Frames(
            env,
            lower,
            parent.carrier,
            new_ids_of(parent.trajectory_ids) if collector.track_traj_ids else None,
            self._left_out | (self.policys_own if random and collector.by_arrival else set()),
            place,
            self.set_position,
            torch.is_grad_enabled(),
            log.watch,
            (lambda: collector.policy_version) if collector.by_arrival and tracked else None,
        )

    # ---------------------------------------------------------------------------- rows by arrival

    def check_by_arrival(self) -> ArrayEnv:
        """The env on arrays; ValueError if rows cannot be collected by arrival, or not stored."""
        collector, plan = self._collector, plan_for(self._collector.env)
        if plan.env is None:
            raise by_arrival_needs("; ".join(plan.reasons))
        if not plan.env.can.asynchronous:
            raise by_arrival_needs(plan.env.why.get("asynchronous", ""))
        if collector.replay_buffer is not None:
            check_arrival_buffer(collector.replay_buffer, collector.n_env)
        return plan.env

    def _arriving(
        self, env: ArrayEnv | None, count: int, log: CollectionLog, random: bool
    ) -> TensorDictBase:
        """Collect ``count`` rows in the order of their arrival: ``[count]``."""
        if env is None or not env.can.asynchronous:  # the env has changed since
            env = self.check_by_arrival()
        if random != self._arrives_randomly:  # the entries of the rows in flight are others
            self.settle(log)
            self._arrives_randomly = random
        loop = self._frames(env, random, log)
        entries, slots = loop.arriving(count, self.arrivals)
        if torch.is_grad_enabled():  # the graph ends with the batch
            self.settle(log)
            rows = self.arrivals.surplus
            self.arrivals.surplus = {key: value.detach() for key, value in rows.items()}
        entries[keys.SLOT] = torch.tensor(slots)
        log.note_entries(entries, self._collector.env.reward_keys, slots)
        batch: TensorDictBase = self.assemble(entries, (count,))
        batch.names = None  # rows of one slot do not lie beside each other
        return batch

    def settle(self, log: CollectionLog | None = None) -> None:
        """Have slots in flight wait where they come to; their rows join the next batch."""
        if self.arrivals.turns is None or self.is_lost:
            return
        if (env := self.plan().env) is not None:
            log = log or self._collector._monitor.unnoted_log()
            self._frames(env, self._arrives_randomly, log).settle(self.arrivals)

    # ------------------------------------------------------------------------------ TorchRL's loop

    def _as_torchrl(self, log: CollectionLog, **settings: Any) -> TensorDictBase | None:
        """Collect a batch in TorchRL's loop, with other settings of the collector for it."""
        collector = self._collector
        self._allot_buffer(shrunk=False)
        has_acted, self._has_acted = self._has_acted, False
        self._warn_of_policy(collector.policy)
        try:
            with HonouredStarts(collector.env):
                return torchrl_rollout(collector, log, has_acted, pre_collect_hook=None, **settings)
        finally:
            self.note_places()

    def _allot_buffer(self, shrunk: bool) -> None:
        """Give the parent's preallocated batch memory of its own, or the memory of one step."""
        parent = self.parent
        if not parent.preallocates:
            return
        buffer = parent.preallocated
        # One with lazy stacks or other data than tensors is never contiguous, and stays as it is.
        if shrunk and not self._shrunk and buffer.is_contiguous():
            one = buffer[..., :1].clone()
            parent.preallocated = one.expand(buffer.shape).refine_names(..., keys.TIME)
            self._shrunk = True
        elif self._shrunk and not shrunk:
            parent.preallocated = buffer.clone()
            self._shrunk = False

    # ------------------------------------------------------------------------------- its parts

    def _why_no_graph(self, env: ArrayEnv, place: Placement) -> str:
        """Why the policy does not run as one CUDA graph; empty where it may."""
        asked, policy = self._collector.graphs, self.parent.wrapped_policy
        if place.policy.type != "cuda":
            return "the policy is not on a GPU"
        if asked is False:
            return "cudagraph_policy=False"
        if env.can.asynchronous:
            return "slots step when they are ready"
        if env.texts:
            return "entries are texts"
        if self._collector._monitor.timers:
            return "timers=True"
        if self._collector._monitor.unnoted_log().watch is not None:
            return "hooks are told of steps"
        if not isinstance(policy, nn.Module):
            return "the policy is no module"
        if any(upstream.has_hooks(m) and not upstream.only_projects(m) for m in policy.modules()):
            return "the policy has hooks"
        if asked is None and (own := own_code_of(policy)):
            return f"{own} may keep a state in Python; if not, pass cudagraph_policy=True"
        return ""

    def _measured(self, env: ArrayEnv, place: Placement) -> str:
        """The times of a call on the policy's device and on the CPU, with what crosses for it."""
        times, present = [], flat(self.parent.carrier)
        place.enter(present, present)
        for device in (place.policy, torch.device("cpu")):
            there = placement(env, device, None)
            there.graphs, there.ring = not self._why_no_graph(env, place), _CALLS
            policy = deepcopy(self.parent.wrapped_policy).to(device)
            lowered = LoweredPolicy(policy, present, env.batch_size, device)

            def call(there: Placement = there, lowered: LoweredPolicy = lowered) -> None:
                step = StepDict(present)
                there.run(lowered, step)
                there.for_env(step)

            with torch.no_grad(), torch.random.fork_rng([place.policy], device_type="cuda"):
                fastest = min(timeit.repeat(call, number=1, repeat=_CALLS))
            times.append(f"{fastest * 1e6:.0f} us on {device}")
        return ", ".join(times)

    def _graph_explained(self, reason: str) -> str:
        kept, module = self._lowered, self.parent.wrapped_policy
        graphs = kept.graphs if kept is not None and kept.module is module else {}
        turn, calls = graphs.get("turn"), graphs.get("policy")
        if isinstance(turn, Captured):
            return f"with env and resets: {turn}"
        if isinstance(calls, Captured):
            return f"{calls}; not the env: {turn}" if turn else str(calls)
        reason = reason or calls or ""
        return f"no CUDA graph: {reason}" if reason else "one CUDA graph, after the first step"

    def _place(self, env: ArrayEnv) -> Placement:
        collector = self._collector
        return placement(env, collector.policy_device, collector.storing_device)

    @property
    def _left_out(self) -> frozenset[Key]:
        left_out = frozenset(self.parent.left_out_of_next)
        return left_out if self._collector.track_traj_ids else left_out | {keys.TRAJ_IDS}

    @property
    def policys_own(self) -> set[Key]:
        """The entries that the policy alone writes."""
        return not_of(self._collector.env, self.parent.policy_output_keys)

    @property
    def stacked_lazily(self) -> bool:
        """True if entries of the carried step may not be one tensor each."""
        carrier = self.parent.carrier
        return type(carrier) is not TensorDict or stacked_lazily(carrier)

    @property
    def _holds_odd_entries(self) -> bool:
        """True if the parent's buffers hold entries that are no dense tensors."""
        parent = self.parent
        return parent.preallocates and not all(
            is_plain(value) for value in parent.preallocated.values(True, True)
        )

    @property
    def _random(self) -> Any:
        env = self._collector.env
        if draws_from_spec(env):
            return RandomActions(env.input_spec[keys.FULL_ACTION_SPEC])
        return env.rand_action

    @property
    def _ignores_masks(self) -> bool:
        """True if iteration draws from a copy of the action spec, and the env's has masks."""
        env, policy = self._collector.env, self._collector.policy
        if type(policy) is not RandomPolicy or shares_masks(policy.action_spec):
            return False
        return is_masked(env.full_action_spec)

    def _warn_of_policy(self, policy: Any) -> None:
        if text := warning_of_draws(policy):
            self._warn_once(text)
        if policy is self._collector.policy and self._ignores_masks:
            self._warn_once(_IGNORES_MASKS)

    def lower(self, step: StepDict, random: bool, late: ArrayEnv | None = None) -> LoweredPolicy:
        """The policy, or random actions in its place, on StepDicts.

        The collector's own, if it is a module, is kept from batch to batch while its facts are the
        same. Where there is ``late``, scores that this env hands through may be late.
        """
        checked = torch.is_grad_enabled()  # gradients are those of the distributions' own classes
        if random or not isinstance(self.parent.wrapped_policy, nn.Module):
            return self._lower_again(step, checked, self._random if random else None, late)
        collector, parent, kept = self._collector, self.parent, self._lowered
        entries = {key: (value.shape, value.dtype, value.device) for key, value in step.items()}
        values = (
            (checked, late, collector.policy_device, parent.carrier.device),
            (interaction_type(), skip_existing(), composite_lp_aggregate()),
            (upstream.validates_arguments(), upstream.all_modules_have_hooks()),
        )
        module, facts = parent.wrapped_policy, self._lowered_for
        # Its own outputs are there from the second batch on.
        others = dict(entries.items() ^ self._entries.items()).keys()
        own = set() if kept is None else kept.own
        if kept is None or not (others <= own and facts and facts.hold(module, *values)):
            kept = self._lowered = self._lower_again(step, checked, late=late)
            self._lowered_for, self._entries = Facts(module.modules(), *values), entries
            if not (kept.straight or collector.graphs):
                kept.graphs = dict.fromkeys(("policy", "turn"), "modules are called on TensorDicts")
        kept.restart()
        return kept

    def _lower_again(
        self,
        step: StepDict,
        checked: bool,
        policy: Callable[..., Any] | None = None,
        late: ArrayEnv | None = None,
    ) -> LoweredPolicy:
        collector, parent = self._collector, self.parent
        self._warn_of_policy(policy or collector.policy)
        compiled = collector.compiled_policy
        cast = parent.casts_to_policy_device and collector.policy_device is not None
        step.shapes = nested_shapes(parent.carrier)
        lowered = LoweredPolicy(
            policy or parent.wrapped_policy,
            step,
            collector.env.batch_size,
            collector.policy_device if cast else parent.carrier.device,
            select=parent.policy_output_keys if compiled and policy is None else None,
            checked=checked,
            late=None if late is None else late.hands_through,
        )
        if policy is not None and policy is not parent.wrapped_policy:
            # The policy that acts after random actions may read them: they are zeroed as TorchRL's.
            lowered.reads_first.update(lowered.writes)
        return lowered

    def assemble(self, entries: dict[Key, torch.Tensor], shape: tuple[int, ...]) -> TensorDictBase:
        """The entries of a batch as the TensorDict that the parent makes of them."""
        collector, parent = self._collector, self.parent
        buffered = parent.preallocates
        # Has the devices and empty entries of the parent's batch, and the dtypes of its buffers.
        template = parent.preallocated if buffered else parent.carrier
        device, stacks = collector.storing_device or template.device, {}
        if texts := getattr(self._plan.env, "texts", None):
            numbers = {key: entries.pop(key) for key in texts if key in entries}
            stacks, held = told(texts, numbers, device), self.arrivals
            present = {} if held.turns is None else held.turns.present
            base_of(collector.env).keep_texts(*present.values(), *held.surplus.values())
        batch = nested(entries.items(), shape, device)
        shaped_like(template, batch, cast=buffered, fill=buffered)
        if left_out := parent.left_out_of_next:  # the nested TensorDicts that held them stay
            before = parent.carrier.select(*(key[1:] for key in left_out), strict=False)
            shaped_like(before, batch.get(keys.NEXT), cast=False)
        if buffered or collector.replay_buffer is None or parent.ignores_replay_buffer:
            batch.refine_names(..., keys.TIME)
        for key, text in stacks.items():
            upstream.set_unchecked(batch, as_path(key), text)
        parent.count_stepped(batch.numel())
        return batch


_AS_TORCHRL = "as TorchRL does"
_IGNORES_MASKS = (
    "random actions ignore the env's action masks, as in TorchRL's collector; pass env.rand_action "
    "as the policy for legal ones"
)


def _parts_of(env: EnvBase, plan: ArrayPlan) -> list[Part]:
    base = base_of(env)
    name, stepped = short(base), plan.env
    if stepped is None:
        cost = "3 to 5 times the time of a step on arrays"
        refused = [Part("env", name, f"{_AS_TORCHRL}: {why}", cost) for why in plan.reasons]
        transforms = [Part("transform", short(each), _AS_TORCHRL) for each in transforms_of(env)]
        return refused + _notes_on(base) + transforms
    parts = [Part("env", name, stepped.inner.how, stepped.inner.cost), *_notes_on(base)]
    if stepped.can.only_by_arrival:
        parts.append(Part("slots", "NEXT_STEP", "begin again in a step of the others"))
    elif stepped.can.asynchronous:
        parts.append(Part("slots", f"wait_num={stepped.can.wait_num}", "go on when they are ready"))
    elif reason := stepped.why.get("asynchronous"):
        parts.append(Part("slots", "wait_num", f"in step: {reason}", "the slowest slot"))
    if stepped.resets_by_mask:
        parts.append(Part("resets", "by mask", "at every step; no flag is read"))
    elif stepped.home.type != "cpu" and stepped.base is None:
        parts.append(Part("resets", "where flags say so", f"one wait per step for {stepped.home}"))
    return parts + [Part("transform", t.label, t.how, t.cost) for t in stepped.parts]


def _notes_on(base: EnvBase) -> list[Part]:
    """What the user of an env without its transforms should know."""
    notes = []
    if lost := lost_ends(base):
        notes.append(Part("episodes", "their ends", lost))
    one_seed = isinstance(base, GymWrapper) and bool(base.batch_size)
    if one_seed or (isinstance(base, GymnasiumEnv) and not base.can.each_seed):
        how = "for all slots: roots in a row may share some of them"
        notes.append(Part("seeds", "one int", how))
    return notes


def short(thing: Any) -> str:
    """The name of a part."""
    if isinstance(thing, GymnasiumEnv):
        return f"{type(thing).__name__}({thing.name}, {thing.backend_name})"
    return getattr(thing, "__name__", type(thing).__name__)
