"""EvaluationCollector: test episodes, the same to the bit however they are run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import RandomPolicy, set_exploration_type

from tdcollect import check
from tdcollect._upstream.torchrl import append_policy_transforms
from tdcollect.cleanup import ended_on_error
from tdcollect.collect.arguments import explain_unfit_observations, missing_entries, no_options
from tdcollect.collect.arrays import SteppedEnv, by_episodes, plan_for
from tdcollect.collect.episodes import Episodes, Start
from tdcollect.collect.lowering import exact_reward_of
from tdcollect.collect.policy import RandomActions, needs_state
from tdcollect.collect.step_dict import StepDict
from tdcollect.collect.store import placement
from tdcollect.display import one_line
from tdcollect.envs.make import refuse_slot
from tdcollect.envs.slots import Stepper
from tdcollect.envs.spaces import TextLeaf, sample_of
from tdcollect.envs.traits import base_of, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes import agents
from tdcollect.evaluation.episodes.actions import ActionCheck, RandomActor
from tdcollect.evaluation.episodes.batched import BatchEnv, BatchStarts, open_batched
from tdcollect.evaluation.episodes.data import Assembly, Finished, Metrics, Returns
from tdcollect.evaluation.episodes.groups import GroupPolicies, checked_groups, with_measures
from tdcollect.evaluation.episodes.inference import (
    Actor,
    Inference,
    Layout,
    as_policy,
    at_batch_size,
    device_of,
    draws_at_starts,
    modules_of,
    reads_masks,
    two_readings,
)
from tdcollect.evaluation.episodes.opening import (
    OpenEnv,
    SlotEnvs,
    made_alike,
    open_env,
    warn_of_statistics,
)
from tdcollect.evaluation.episodes.trial import Feed, RunStarts, Trial
from tdcollect.evaluation.ledger import Batches, Episode
from tdcollect.evaluation.requested import RequestedEnv, recognized
from tdcollect.evaluation.settings import ENDLESS, EvaluationSettings, takes_settings
from tdcollect.keys import Key
from tdcollect.policies import SpacePolicy
from tdcollect.randomness import GlobalRandomness, NotReproducibleError, check_alone
from tdcollect.threads import evaluating, turn, with_threads

# Envs that are given, and were found to carry nothing from one episode into the next.
_SOUND: WeakSet[Stepper] = WeakSet()
# Steps between two checks: this often, finished episodes are yielded and reach the journal.
_STEPS = 128
_BLOCK_BYTES = 2**25  # or about this much memory, with large observations
_UNFIT = (RuntimeError, ValueError, AttributeError, TypeError)  # of a policy on unfit entries


@dataclass
class EpisodeRun:
    """One run of a collector's episodes, whose env is stepped as ``slots``."""

    of: EvaluationCollector
    slots: SteppedEnv
    actor: Actor
    assembly: Assembly
    starts: RunStarts

    def blocks(self, feed: Feed) -> Generator[list[Finished], None, None]:
        """Run the episodes of a feed; yields those that have ended, after each block of steps."""
        starts, assembly, settings = self.starts, self.assembly, self.of.settings
        # A single slot of a batch cannot start again.
        restarts = settings.on_env_error == "restart" and self.of.batches is None
        self._feed, self._failed = feed, list[tuple[Finished, int]]()
        self._actions = ActionCheck(self.of.env)
        self._remembered: list[Key] | None = None
        loop = Episodes(
            self.slots,
            self._act,
            starts,
            placement(self.slots, self.of.device, torch.device("cpu")),
            steps=max(_STEPS // 8, min(_STEPS, _BLOCK_BYTES // max(1, self.slots.step_bytes))),
            seconds=feed.seconds,
            max_episode_steps=settings.step_limit,
            resets=starts.resets,
            own_options=settings.episode_options is not None,
            left_out=assembly.left_out,
            on_start=self._started,
            on_step=self._stepped if assembly.metrics and assembly.metrics.infos else None,
            on_error=self._raised if restarts else None,
        )
        starts.begin(feed, self.of.start_of, self.of.base)
        while True:
            for block in loop:
                try:
                    self.actor.end()
                    self._actions.check_block(block)
                except _UNFIT as error:
                    self._explain(block.entries, error)
                    raise
                yield self._counted(assembly.feed(block))
                for key in assembly.texts.keys() & loop.turns.present.keys():
                    assembly.texts[key].keep([loop.turns.present[key]])
            failed = bool(self._failed)
            yield self._counted(())
            if not (failed or starts.goes_on() or feed.goes_on()):
                return

    def _act(self, rows: StepDict, active: list[int]) -> list[Key]:
        """Have the policy act; returns the entries that are zeroed where an episode begins.

        It is probed before it acts.
        """
        try:
            if self._remembered is None:
                randomness = GlobalRandomness()
                with two_readings(self.of.policy, self.of.env):
                    outputs, self._remembered = self.actor.probe(rows, self.slots.carried)
                randomness.check("the policy")
                self._take_first(rows, outputs, self._remembered)
            self.actor.act(rows, active)
        except _UNFIT as error:
            self._explain(rows, error)
            raise
        if self._feed.stepped is not None:
            self._feed.stepped()
        return self._remembered

    def _take_first(self, rows: StepDict, outputs: StepDict, remembered: Sequence[Key]) -> None:
        """Check the policy's first outputs; add the entries that it carries on to the rows."""
        self._actions.check_first_call(outputs)
        for key in remembered:
            if key not in rows:
                like = outputs[key]
                shape = (*self.slots.batch_size, *like.shape[1:])
                rows[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if self.assembly.keeps_data and self.actor.left_out:
            warnings.warn(
                f"the policy's entries {self.actor.left_out} are no dense tensors, and are not "
                "kept with the data of episodes; encode them as numbers to keep them",
                stacklevel=2,
            )

    def _explain(self, entries: Mapping[Key, torch.Tensor], error: Exception) -> None:
        if isinstance(error, (AttributeError, TypeError)):
            missing = missing_entries(getattr(self.actor, "policy", None), entries)
            if missing is not None:
                raise missing from error
        explain_unfit_observations(entries, self.of.env, error)

    def _started(self, slot: int, start: Start) -> None:
        self.starts.started(slot, start)
        self.actor.start(slot, self.assembly.seeds(start.index)[1])
        if self.assembly.metrics is not None:
            self.assembly.metrics.begin(start.traj_id)

    def _stepped(self, running: Mapping[int, Start]) -> None:
        metrics = self.assembly.metrics
        assert metrics is not None
        infos = self.slots.latest_infos([*running], metrics.infos)
        for slot, start in running.items():
            metrics.note(start, infos[slot])

    def _raised(self, start: Start, error: Exception) -> Start | None:
        """Return the episode to start again after an error of its env; None if it has failed."""
        self.of.error = error
        restarts = self.assembly.restarts
        tries = restarts.get(start.traj_id, 0)
        again = start.traj_id in self.starts.runs_again
        if tries < self.of.settings.max_restarts and not again:
            restarts[start.traj_id] = tries + 1
            return start
        if not again:
            self.of.errors[start.index] = f"{type(error).__name__}: {error}"
        self._failed.append((self.assembly.failed(start), start.traj_id))
        return None

    def _counted(self, ended: Iterable[tuple[Finished, int]]) -> list[Finished]:
        """Return the episodes that have ended, but for those that ran for the trial alone."""
        every, counted = [*ended, *self._failed], []
        self._failed.clear()
        for run, start in self.starts.runs_again.items():
            if (cut := self.assembly.cut(start)) is not None:
                self.starts.left_out.add(run)
                every.append((cut, run))
        for finished, run in every:
            if (taken := self.starts.take(finished, run)) is not None:
                counted.append(taken)
        return counted


class EvaluationCollector(AbstractContextManager["EvaluationCollector"]):
    """Runs test episodes by index; iterate to get each as a TensorDict ``[L]``.

    Episode i resets its env with ``env_seed(seed, i)``, and the policy draws all its random
    numbers from a stream that starts from ``policy_seed(seed, i)``. Its data are the same to the
    bit for any number of slots, any backend that seeds, and whatever other episodes run. Slots
    take the next episode as they become free; all episodes run to their end.

    Nothing outside changes: global random states, exploration type, train or eval mode, and
    running statistics of transforms are as before, also between two episodes.

    Args:
        env: a gymnasium id; a callable that makes a ``gymnasium.Env`` or an ``EnvBase``; or an
            ``EnvBase``, bare or under TorchRL transforms. One slot at a time is stepped, unless
            the env is one of :func:`tdcollect.make_env`: a callable whose env has batch size
            ``[]`` or ``[1]`` is called once per slot. ``SerialEnv`` and ``ParallelEnv`` are taken
            apart: their functions make the slots, in this process. An env that is given is reset
            and used, and left unseeded; one that is made here is closed at the end.
        policy: any policy that a collector takes; None for random actions; or one for each group of
            agents, ``{"red": a, "blue": b}``.
        episodes: the number of episodes, or their indices.
        seed: the root seed.
        settings: see :class:`tdcollect.evaluation.EvaluationSettings`.

    Attributes:
        settings: the settings, checked.
        episodes: the records of the episodes that have ended, in the order of their ending.
        error: the last exception that the env raised in the latest run, if any.
        errors: the last error of each failed episode of the latest run, by index, as text.
        episode_indices: the indices of the episodes to run.
        episode_seeds: returns the seeds of env and policy in an episode, given its index.
        base: the env under its transforms; the slots where these are envs of their own.
        batches: of a batched simulator, which episodes run where; None if they are numbered.
        has_streams: True if draws of the env from the global generators come from a stream of
            each episode.
        wrappers: the wrappers that were asked for by name, innermost first.
        returns: from the rewards of an episode to its return.
        metrics: the metrics that are asked for, by name, those of groups as functions.
        policy_mode: ``"eval"``, ``"train"`` or ``"mixed"``, the mode that the policy's modules run
            in; None for a policy that is not a module.

    Raises:
        TypeError, ValueError: if an argument cannot be honoured, before an env is made; while
            iterating, if an action does not fit the env's action spec.
        RuntimeError: if another thread collects or draws random numbers meanwhile.
        NotReproducibleError: while iterating, if the env or the policy does not give the same
            episode for the same seeds.

    Examples:
        >>> for episode in EvaluationCollector("CartPole-v1", policy, episodes=10, seed=0):
        ...     print(episode["next", "reward"].sum())
    """

    @takes_settings
    def __init__(
        self,
        env: str | Callable[..., Any] | EnvBase,
        policy: Any = None,
        episodes: int | Sequence[int] = 100,
        seed: int = 0,
        **settings: Any,
    ):
        check.arguments(EvaluationCollector.__init__, settings)
        self._open(env, policy, EvaluationSettings(episodes, seed, **settings))

    @classmethod
    def from_settings(
        cls,
        env: str | Callable[..., Any] | EnvBase,
        policy: Any,
        settings: EvaluationSettings,
        most_slots: int | None = None,
    ) -> EvaluationCollector:
        """Return a collector of the episodes that the settings ask for.

        At most ``most_slots`` slots are made here, where others run episodes too.
        """
        collector = cls.__new__(cls)
        collector._open(env, policy, settings, most_slots)
        return collector

    def _open(
        self, env: Any, policy: Any, settings: EvaluationSettings, most_slots: int | None = None
    ) -> None:
        self.settings = settings
        self.episode_indices = settings.episode_indices
        self.episode_seeds = settings.seed_schedule()
        self.wrappers = env.wrappers if isinstance(env, RequestedEnv) else ()
        self.policy = policy = recognized(policy, env, settings)
        self.device = device_of(policy, settings.device)
        self._masked = reads_masks(policy) and not isinstance(env, EnvBase)
        parts = policy.policies.values() if isinstance(policy, GroupPolicies) else [policy]
        for part in parts:
            if isinstance(part, SpacePolicy):
                part.check()
        per_slot = settings.episodes_per_slot
        with evaluating():  # no env is made beside a collection, or while another thread draws
            check_alone()
            if per_slot is None:
                singly = draws_at_starts(policy)
                self._opened = open_env(env, settings, self._finish, most_slots, singly)
            else:
                self._opened = open_batched(env, settings, self._finish)
        with ended_on_error(self.close):
            self.base: GymnasiumEnv | SlotEnvs = self._opened.slots or base_of(self.env)
            self.has_streams = self._opened.slots is not None
            self.batches = None if per_slot is None else Batches(self.slots, per_slot)
            if self.batches is not None:
                self.episode_seeds = partial(self.batches.seeds, settings.seed)
            self._check_open()
            warn_of_statistics(self.env)
            self.returns = Returns(self.env, settings.reward_keys)
            metrics = settings.metrics
            self.metrics = with_measures(metrics, self.env) if metrics else None
            with self._apart():
                self._policy = self._callable(policy)
                modes = {"train" if part.training else "eval" for part in modules_of(policy)}
                self.policy_mode = "mixed" if len(modes) == 2 else next(iter(modes), None)
            self._check_settings()
            self._starts = self._new_starts()
        self.episodes: list[Episode] = []
        self.error: Exception | None = None
        self.errors: dict[int, str] = {}

    def _callable(self, policy: Any) -> Any:
        random = policy is None or isinstance(policy, RandomPolicy)
        if (
            random
            and isinstance(self.base, GymnasiumEnv)
            and self.base.stepper.backend.action.texts
        ):
            space = deepcopy(self.base.action_space)
            return SpacePolicy(lambda observation: sample_of(space))
        if isinstance(policy, SpacePolicy):
            if not policy.batched:
                return policy
            if self._texts:
                raise ValueError(
                    "expected a function of one observation where entries are texts, got one with "
                    "batched=True; pass from_function(f), or from_agent(make, together=...)"
                )
            policy = agents.BatchedFunction(policy.source, agents.OnSpaces(self.env))
        if isinstance(policy, GroupPolicies):
            checked_groups(policy, self.env)
            if self._texts:
                raise ValueError("expected one policy where entries are texts, got one by group")
            return policy
        with two_readings(policy, self.env):
            return as_policy(policy, self.env, self.settings.inference_batch_size)

    def _finish(self, env: EnvBase) -> EnvBase:
        if self._masked and isinstance(env, GymnasiumEnv):
            made_alike(env.read_masks, {})
            if env.can.rebuild:  # no episode begins in an env that has been looked at
                made_alike(env.rebuild_slots, {"slots": [0]})
        if draws_at_starts(self.policy) and env.batch_size:
            raise ValueError(
                "expected a gymnasium id, or a function that makes one env, for consistent "
                "dropout, whose mask is drawn where an episode starts, in its slot alone; got "
                f"{base_of(env).name} of batch size {[*env.batch_size]}"
            )
        if needs_state(self.policy):
            # Transforms are appended in place: to an env of ours, not to the one given.
            own = TransformedEnv(env, auto_unwrap=True)
            env = append_policy_transforms(own, self.policy)
        for module in modules_of(self.policy):
            if (finish := getattr(module, "finish_env", None)) is not None:
                env = finish(env)
        return env

    @property
    def env(self) -> EnvBase:
        """The env with its transforms; that of slot 0 where slots are envs of their own."""
        slots = self._opened.slots
        return self._opened.env if slots is None else slots.transformed

    def _check_settings(self) -> None:
        if self.settings.fresh_envs and not self.base.can.rebuild:
            what, how = f"the env {self.base.name} that is given", "pass a function that makes it"
            if isinstance(self.base, GymnasiumEnv):
                what, how = f"the backend {self.base.backend_name!r}", "use backend='serial'"
            raise ValueError(
                f"expected fresh_envs=None or False: {what} cannot build single slots again; {how}"
            )
        if isinstance(self.base, GymnasiumEnv) and self.slots > 1:
            refuse_slot(*self.base.stepper.makes)
        if self.settings.episode_options and not self.base.can.each_options:
            own = isinstance(self.base, GymnasiumEnv)
            raise no_options("episode_options", self.base if own else base_of(self.env))

    def _check_open(self) -> None:
        if self.base.is_closed:
            raise RuntimeError(f"the env {self.base.name} is closed; make a new one to evaluate")

    @property
    def _texts(self) -> Mapping[Key, TextLeaf]:
        """The entries of text, of env and policy."""
        if isinstance(self.base, GymnasiumEnv):
            backend = self.base.stepper.backend
            return {**backend.observation.texts, **backend.action.texts}
        return {} if self._opened.slots is None else self._opened.slots.texts

    @property
    def slots(self) -> int:
        return (self._opened.slots or self.env).batch_size.numel()

    def __len__(self) -> int:
        return len(self.episode_indices)

    def __iter__(self) -> Iterator[TensorDict]:
        for finished in self.run(keep_trajectories=True):
            if finished.data is not None:
                yield finished.data

    def run(
        self,
        keep_trajectories: bool = False,
        feed: Feed | None = None,
        *,
        keep_steps: bool = False,
    ) -> Generator[Finished, None, None]:
        """Run all episodes; yields the record of each, its steps, and its data if they are kept.

        ``feed`` gives the indices while episodes run; None for ``episode_indices``. Without
        ``keep_steps``, episodes have their first 1,000 steps.
        """
        self._check_open()
        episodes: list[Episode] = []
        self.episodes = episodes
        with evaluating():
            check_alone()
        feed = feed or Feed(self.episode_indices)
        self._starts.abandon()
        steps = self._blocks(keep_trajectories, keep_steps, feed)
        try:
            while True:
                fault = None
                with self._apart() as randomness:
                    elsewhere = self._generators_elsewhere()
                    ended = next(steps, None)
                    now = self._generators_elsewhere()  # those of new workers are not known yet
                    drawn = any(now[pid] != elsewhere[pid] for pid in now.keys() & elsewhere.keys())
                    try:
                        randomness.check(f"the env {self.base.name} or the policy, at some step,")
                    except NotReproducibleError as error:
                        fault, drawn = error, randomness.settle()
                if fault is not None or drawn:
                    if not (drawn and self._take_streams()):
                        raise fault or NotReproducibleError(
                            f"the env {self.base.name} drew from the global random numbers of its "
                            "process, which no seed of an episode reaches; draw from env.np_random"
                        )
                    steps.close()
                    steps = self._blocks(keep_trajectories, keep_steps, feed)
                    continue
                if ended is None:
                    return
                is_sound = self._starts.fresh_envs is False and not self._opened.made
                if is_sound and isinstance(self.base, GymnasiumEnv):
                    _SOUND.add(self.base.stepper)
                for finished in ended:
                    self._starts.settle(finished)
                    self.episodes.append(finished.record)
                    yield finished
                    if self.episodes is not episodes:
                        raise RuntimeError(
                            "another run of this collector has begun since, on the same env; make "
                            "a collector with an env of its own for each"
                        )
        finally:
            with turn():
                steps.close()
                if not (self._opened.made or self.base.is_closed):
                    # The next episodes of an env that is given start from fresh entropy.
                    drawn_seeds = np.random.SeedSequence().generate_state(self.slots, np.uint32)
                    fresh = (drawn_seeds >> 1).tolist()
                    if isinstance(self.base, SlotEnvs):
                        self.base.unseed(fresh)
                    else:
                        self.base.stepper.set_seeds(fresh)

    @contextmanager
    def _apart(self) -> Iterator[GlobalRandomness]:
        """Run as the settings say, without gradients, and with transforms frozen, in eval mode.

        Yields the global random states as they were. They are set back, unless another thread may
        have drawn from them, whose random numbers would repeat.
        """
        settings, slots = self.settings, self._opened.slots
        joint = None if isinstance(self.policy, GroupPolicies) else self.policy
        transforms = transforms_of(self.env) if slots is None else slots.transforms
        with (
            evaluating(),
            with_threads(settings.inference_threads),
            in_eval_mode([*transforms, self.policy if settings.eval_mode else None]),
            ExitStack() as stack,
            torch.no_grad(),
            set_exploration_type(settings.exploration_type),
            at_batch_size(joint, self.env, settings.inference_batch_size),
        ):
            before = GlobalRandomness()
            stack.callback(before.settle)
            for transform in transforms:
                if getattr(transform, "frozen", None) is False:
                    stack.callback(transform.unfreeze)
                    transform.freeze()
            yield before

    def prepare_envs(self, prepare: Callable[[EnvBase], None]) -> None:
        """Call a function on each env of ours, and again on each that is built later."""
        slots = self._opened.slots
        if slots is None:
            prepare(self.env)
            return
        for env in slots.envs:
            prepare(env)
        slots.prepare = prepare

    def _new_starts(self) -> RunStarts:
        fresh_envs = self.settings.fresh_envs
        if self.batches is not None:
            assert isinstance(self.base, BatchEnv)
            return BatchStarts(self.base, self.batches, fresh_envs)
        own = self._opened.made and self.base.can.rebuild
        if fresh_envs is None and isinstance(self.base, SlotEnvs) and self.base.loads_data:
            fresh_envs = False  # new ones would all begin with the first row of their data
        trial = Trial(self.slots, own, fresh_envs)
        if fresh_envs and not own:
            trial.fresh_envs = True
        elif isinstance(self.base, GymnasiumEnv) and self.base.stepper in _SOUND:
            trial.fresh_envs = False
        return trial

    def tell(self, fresh_envs: bool | None, asks: bool = True) -> None:
        """Say whether episodes run on new envs, as it was found elsewhere; None if it was not.

        ``asks``: find it out here then; else all run on new envs until it is told.
        """
        if self._starts.fresh_envs is None:
            self._starts.asks, self._starts.fresh_envs = asks, fresh_envs

    @property
    def fresh_envs(self) -> bool | None:
        """Whether episodes run on new envs; None while it is not known if they must."""
        return self._starts.fresh_envs

    def _generators_elsewhere(self) -> dict[int, bytes]:
        """The states of the global generators in processes of the env, until it has been tried."""
        if self._starts.fresh_envs is not None or not isinstance(self.base, GymnasiumEnv):
            return {}
        return self.base.stepper.backend.generators()

    def _take_streams(self) -> bool:
        """Go on with envs whose global draws come from streams of their episodes, if there are."""
        make = self._opened.with_streams
        if make is None or self.has_streams or self.episodes:  # which ran without
            return False
        env = make()
        self._opened.close()
        self._opened, self.base, self.has_streams = OpenEnv(env), base_of(env), True
        self._starts.start_over()
        return True

    def _blocks(
        self, keep_trajectories: bool, keep_steps: bool, feed: Feed
    ) -> Generator[list[Finished], None, None]:
        slots: SteppedEnv | None = self._opened.slots
        if slots is None:
            with self._apart():
                exact = exact_reward_of(self.env)
                plan = plan_for(self.env, exact, acted=self._texts.keys())
                slots = by_episodes(plan, self.env, exact)
        settings = self.settings
        assembly = Assembly(
            self.env,
            self.returns,
            self.episode_seeds,
            keep_trajectories,
            None if self.metrics is None else Metrics(self.metrics),
            ENDLESS if settings.max_episode_steps is None else math.inf,
            keep_steps,
            self._texts,
        )
        size, count = settings.inference_batch_size, slots.batch_size.numel()
        layout = Layout(size, count, bool(slots.batch_size), self.device)
        actor = self._actor(slots, layout, assembly)
        self.error, self.errors = None, {}
        return EpisodeRun(self, slots, actor, assembly, self._starts).blocks(feed)

    def _actor(self, slots: SteppedEnv, layout: Layout, assembly: Assembly) -> Actor:
        policy = self._policy
        if isinstance(policy, agents.KeptActions):
            return agents.KeptActor(policy, policy, layout)
        if isinstance(policy, SpacePolicy):
            return agents.actors_of(policy, agents.OnSpaces(self.env, assembly.texts), layout)
        if isinstance(policy, GroupPolicies):
            return agents.GroupActors(policy, slots, layout)
        if isinstance(policy, RandomActions):
            return RandomActor(policy, slots, layout)

        if assembly.texts:
            return agents.SlotActor(policy, slots, assembly.texts, layout)

        def is_unread(key: Key) -> bool:
            only_sketched = assembly.read is not None and key not in assembly.read
            return only_sketched and slots.hands_through(key)

        return Inference(policy, layout, is_unread)

    def start_of(self, index: int) -> Start:
        # The episode of an index, to be started; for this package alone.
        by_index: Any = self.settings.episode_options
        options = None if by_index is None else by_index[index]
        return Start(index, self.episode_seeds(index)[0], index, options)

    def close(self) -> None:
        """Close the env if it was made here; a second call does nothing."""
        self._opened.close()

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (f"seed={self.settings.seed}", f"ended={len(self.episodes)}")
        episodes = f"{len(self.episode_indices)} episodes of {self.base.name}"
        return one_line(self, episodes, *state, f"{self.slots} slots")


@contextmanager
def in_eval_mode(of: Sequence[Any]) -> Iterator[None]:
    """Run with all parts of modules in eval mode; each returns to its own mode afterwards."""
    before = {part: part.training for module in of for part in modules_of(module)}
    if not any(before.values()):
        yield
        return
    try:
        for module in of:
            if isinstance(module, nn.Module):
                module.eval()
        yield
    finally:
        # Modules may do more than set the flag; parents come before their children.
        for part, training in before.items():
            if part.training is not training:
                part.train(training)
        for part, training in before.items():
            part.training = training
