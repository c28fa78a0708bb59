"""The collector: TorchRL's, with the same constructor, methods and batches."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import (
    EnvBase,
    InitTracker,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcollect import keys
from tdcollect._upstream.collectors import (
    CollectorMeta,
    backend_of_alias,
    normalize_env_functions,
    service_backend,
)
from tdcollect._upstream.torchrl import held_env
from tdcollect.cleanup import close_may_fail, exits_refused
from tdcollect.collect.arguments import (
    check_arguments,
    check_by_arrival,
    check_count,
    check_known,
    check_made,
    check_one,
    check_options,
    check_replay_buffer,
    explain_first_call,
    explain_weights_error,
    explain_wrapping_error,
    round_up,
    whole_trajectories,
)
from tdcollect.collect.monitor import Monitor, StatsAttribute, changed, slots_of
from tdcollect.collect.policy import needs_state, unknown_class
from tdcollect.collect.resume import FirstStates, add_state, keep_state, load_state
from tdcollect.collect.run import Explanation, Runner, short
from tdcollect.display import one_line
from tdcollect.envs.adopted import lost_ends, take_over
from tdcollect.envs.traits import EnvAction, base_of, transforms_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key, as_path
from tdcollect.randomness import OwnLibraryStates
from tdcollect.threads import collecting

if TYPE_CHECKING:
    from tdcollect.collect.hooks import AnyHooks
    from tdcollect.trajectories.split import Layout

Function = TypeVar("Function", bound=Callable[..., Any])


class Dispatch(CollectorMeta):
    """Send ``backend=`` and ``num_collectors=`` to ``tdcollect.collectors``.

    TorchRL dispatches for its own class only, and to its own classes.
    """

    def __call__(
        cls,
        *args: Any,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if len(args) > 2:
            raise TypeError(
                f"expected create_env_fn and policy as the only positional arguments, got "
                f"{len(args)}; pass the others by name"
            )
        check_arguments(args, kwargs)
        chosen = service_backend() if backend is None else backend_of_alias(backend)
        if chosen is None:
            chosen = "direct" if num_collectors is None else "process"
        if chosen != "direct":
            if isinstance(cls.__base__, Dispatch):
                raise TypeError(
                    f"backend, num_collectors and sync are for Collector itself, not for its "
                    f"subclass {cls.__name__}; pass collector_class={cls.__name__} in the "
                    "backend_options of Collector(..., backend=...)"
                )
            if kwargs.pop("reward_shaping", None) is not None:
                raise ValueError(
                    "reward_shaping is for backend='direct': workers are not given it; name a "
                    "subclass that passes it on as collector_class in the backend_options"
                )
            refuse_elsewhere(kwargs, chosen)
            options = dict(backend_options or {})
            if options.get("collector_class") in (None, "single"):
                options["collector_class"] = cls
            # A later stage, imported where it is asked for.
            later = import_module("tdcollect.collectors.asking")
            return later.collector_of_workers(
                args,
                kwargs,
                backend=chosen,
                options=options,
                num_collectors=num_collectors,
                sync=sync,
            )
        if num_collectors not in (None, 1) or sync is not None or backend_options:
            raise ValueError(
                "backend='direct' is one collector in this process: expected num_collectors=1 and "
                f"no sync and no backend_options, got num_collectors={num_collectors}, "
                f"sync={sync}, backend_options={backend_options}; choose backend='process'"
            )
        check_known(cls, kwargs)
        check_one(args, kwargs)
        args, kwargs = normalize_env_functions(args, kwargs)
        return super().__call__(*args, **kwargs)


def extends(parent: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a function that hands ``*args, **kwargs`` on to ``parent`` the signature of that one."""

    def with_signature(function: Function) -> Function:
        own = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        signature = inspect.signature(parent)
        names = {parameter.name for parameter in own}
        theirs = [p for p in signature.parameters.values() if p.name not in names]
        # Before **kwargs, where the parent's ends with one.
        last = len(theirs) - (theirs[-1].kind is inspect.Parameter.VAR_KEYWORD)
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*theirs[:last], *own, *theirs[last:]]
        )
        return function

    return with_signature


class Collector(TorchRLCollector, metaclass=Dispatch):
    """TorchRL's ``Collector``, correct and fast on gymnasium envs.

    Takes the arguments of :class:`torchrl.collectors.Collector`, has its methods, and yields its
    batches: ``[N, T]`` TensorDicts, the last dimension named ``"time"``, with the next step's
    entries under ``"next"``.

    It differs from its parent in two things that the parent gets wrong: :meth:`set_seed` restarts,
    and a policy with a hidden state gets the transforms that carry it, unless
    ``auto_register_policy_transforms=False``.

    Args:
        *args: as the parent has them.
        reward_shaping: a function ``(observation, action, reward, done) -> reward``, called on
            whole batches, whose result learners see in place of the env's reward; that one stays
            under ``("next", "raw_reward")``. See :class:`tdcollect.collect.RewardShaping`.
        statistics: keep :class:`tdcollect.collect.Statistics` in :attr:`stats`.
        stats_window: K, how many of the latest episodes ``stats.window`` holds.
        timers: also time the env's steps and the policy's calls, which costs a little at each step.
        hooks: one :class:`tdcollect.Hooks`, or several, called with steps, episodes, collections.
        by_arrival: for an env with ``wait_num``, or a vector env that resets only by itself, one
            step late, and off-policy learners: batches are ``[frames_per_batch]`` rows in the order
            of their arrival, and no slot waits at the end of one. The entry
            ``("collector", "slot")`` is the slot of each row (int64); where
            ``track_policy_version`` is on, ``"policy_version"`` is that of the weights that acted.
            A ``replay_buffer`` that is a ``ReplayBufferEnsemble`` of N, with ``routing_key=
            ("collector", "slot")``, keeps the slots apart.
        **kwargs: as the parent has them.

    Attributes:
        stats: statistics; a call, ``collector.stats()``, gives the parent's dict of counters.

    Examples:
        >>> env = make_env("CartPole-v1", num_envs=8)
        >>> collector = Collector(env, frames_per_batch=1024, total_frames=10_240)
        >>> collector.set_seed(0)
        >>> for batch in collector:
        ...     print(batch.shape)  # [8, 128]
    """

    @extends(TorchRLCollector.__init__)
    def __init__(
        self,
        *args: Any,
        reward_shaping: RewardShaping | None = None,
        statistics: bool = True,
        stats_window: int = 100,
        timers: bool = False,
        hooks: AnyHooks = None,
        by_arrival: bool = False,
        **kwargs: Any,
    ):
        self.by_arrival = by_arrival
        if by_arrival:
            check_by_arrival(kwargs)
        # None: where all modules are known. TorchRL's own graph is not made.
        graphs = kwargs.pop("cudagraph_policy", None)
        self.graphs = graphs if graphs in (None, False) else True
        self._reward_shaping = reward_shaping
        self._shaper: Shaper | None = None
        self._splits = bool(kwargs.get("split_trajs"))
        watch = None
        if hooks is not None:
            from tdcollect.collect.hooks import watch_of

            watch = watch_of(hooks)
        self._monitor = Monitor(statistics, stats_window, timers, watch)
        self._runner = Runner(self)
        self._parent = self._runner.parent
        self._made_env = False
        try:
            super().__init__(*args, **kwargs)
            self._monitor.attach(self)
        except BaseException:
            self.closed = True  # a user's own env stays open when this object is deleted
            if self._made_env:
                self.env.close()
            raise

    stats = StatsAttribute()

    def _init_env(self, create_env_fn: Any, create_env_kwargs: Any) -> EnvBase:
        env = super()._init_env(create_env_fn, create_env_kwargs)
        check_made(env)
        self._made_env = not isinstance(create_env_fn, EnvBase)
        take_over(env)
        OwnLibraryStates().give_to(held_env(base_of(env)))
        if lost := lost_ends(base_of(env)):
            warnings.warn(f"{short(base_of(env))}: {lost}", stacklevel=2)
        return env

    def _maybe_setup_policy_env_transforms(self, env: EnvBase, policy: Any) -> EnvBase:
        # Left to itself, the parent warns and adds nothing, and a recurrent policy then forgets at
        # each step. Here what it needs is added, as the parent announces for its next version.
        if self._parent.registers_transforms is None:
            self._parent.registers_transforms = needs_state(policy)
        return super()._maybe_setup_policy_env_transforms(env, policy)

    def _setup_policy_and_weights(self, policy: Any) -> None:
        with explaining(partial(explain_wrapping_error, policy, self.env)):
            super()._setup_policy_and_weights(policy)
            check_writes_action(self.policy, self.env)

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        # Here TorchRL calls the policy for the first time, with some exceptions.
        with explaining(partial(explain_first_call, self)):
            super()._maybe_make_final_rollout(make_rollout)
        if make_rollout and (left_out := self._parent.left_out_of_next):  # zeros, of a hidden state
            self._parent.preallocated = self._parent.preallocated.exclude(*left_out)

    def _setup_frames_per_batch(self, frames_per_batch: int) -> None:
        # The last of the parent's preparations before the env is reset.
        self.frames_asked = frames_per_batch
        with warnings.catch_warnings():
            if self.by_arrival:  # a batch has as many rows, not a multiple of the slots
                warnings.filterwarnings("ignore", "frames_per_batch .* is not exactly divisible")
            super()._setup_frames_per_batch(frames_per_batch)
        if self._reward_shaping is not None:
            self._shaper = Shaper(
                self._reward_shaping, self.env, self.compact_obs, self.extend_buffer
            )
        base = base_of(self.env)
        if self.by_arrival:
            self._runner.check_by_arrival()
        elif isinstance(base, GymnasiumEnv) and base.can.only_by_arrival:
            raise ValueError(base.can.only_by_arrival)
        # A postproc changes the batch in ways that are not known yet.
        elif self.replay_buffer is not None and self.postproc is None and not self._splits:
            check_replay_buffer(
                self.replay_buffer,
                self.env.batch_size,
                self.frames_per_batch,
                extends=self.extend_buffer,
                trajectories=whole_trajectories(vars(self)),
            )

    def _make_carrier(self) -> None:
        self._runner.first_states = first = FirstStates(self.env)
        with first.moving():
            super()._make_carrier()
        self._runner.note_places()

    @extends(TorchRLCollector.shutdown)
    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Close the env; see the parent's method. An env that ends the program raises."""
        with exits_refused("close() of the env"):
            super().shutdown(*args, **kwargs)

    def __bool__(self) -> bool:
        return True  # Ray asks; a length, Python's second choice, is not there without an end

    def __repr__(self) -> str:
        if getattr(self, "closed", True):
            return one_line(self, "shut down")
        parts = (short(base_of(self.env)), type(self.policy).__name__)
        count = self.frames_asked if self.by_arrival else self.requested_frames_per_batch
        frames = f"frames_per_batch={count}"
        total = f"total_frames={self.total_frames}"
        return one_line(self, *parts, frames, total, f"exploration={self.exploration_type}")

    def _postproc(self, tensordict_out: TensorDictBase) -> TensorDictBase:
        # Called with each batch before its user, or the replay buffer, gets it.
        if self._shaper is not None:
            tensordict_out = self._shaper(tensordict_out)
            self._monitor.shaped(tensordict_out[keys.NEXT, keys.REWARD])
        try:
            return super()._postproc(tensordict_out)
        except AttributeError as error:
            if error.obj is None and error.name == "keys":
                raise TypeError(
                    "expected postproc to return a TensorDict, got None; return the batch"
                ) from error
            raise

    def explain(self, measure: bool = False) -> Explanation:
        """The parts of a collection: whether each runs on arrays, and if not, why.

        Prints as a table. Nothing is run, unless it is to ``measure``: a policy on a GPU is then
        copied, and timed there and on the CPU, with the copies that its calls need.
        """
        if self.closed:
            raise RuntimeError("the collector is shut down; explain() asks for a live one")
        return self._runner.explain(measure)

    @torch.no_grad()
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch ``[N, T]``; see the parent's method.

        An error of an env or the policy leaves the collector usable; raised while iterating, it
        also shuts the collector down, as the parent's does.

        Raises:
            RuntimeError: where the collector is shut down.
        """
        self._runner.check_open()
        with collecting(), self._monitor.collection() as log:
            log.batch = self._runner.iterate(log)
        return log.batch

    def iterator(self) -> Iterator[TensorDictBase]:
        """Iterate over batches; see the parent's method."""
        if self._runner.explained is not None:  # it ended here; one that was loaded so is no error
            self._runner.check_open(to_go_on=True)
        with collecting(pauses=True):
            if self.return_same_td or self.replay_buffer is not None:
                yield from super().iterator()
                return
            while self._parent.frames < self.total_frames:
                self._parent.iteration += 1
                batch = self.rollout()
                assert batch is not None
                self._parent.count_frames(batch.numel())
                batch = self._postproc(batch)
                if not self._runner.owns_batch:
                    batch = batch.clone()
                if self.post_collect_hook is not None:
                    self.post_collect_hook(batch)
                yield batch
                del batch  # or it would take memory beside the next one

    def _increment_frames(self, numel: int) -> Any:
        if self._parent.frames + numel < self.total_frames:
            return super()._increment_frames(numel)
        self._runner.env_state = keep_state(self)  # the env is closed now
        self._runner.explained = self._runner.explain()
        with exits_refused("close() of the env"), close_may_fail():
            super()._increment_frames(numel)
        return True

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, **kwargs: Any
    ) -> None:
        """Copy weights into the policy; see the parent's method."""
        weights = kwargs.get("policy_weights", policy_or_weights)
        try:
            super().update_policy_weights_(policy_or_weights, worker_ids=worker_ids, **kwargs)
        except (AttributeError, TypeError) as error:
            explain_weights_error(weights, error)
            raise

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the envs; see the parent's method.

        Episodes in flight are dropped: statistics do not count them.
        """
        slots = None
        if index is None:
            self._runner.set_position()
        else:
            self._runner.settle()
            slots = slots_of(index, self.env.batch_size).nonzero()[0].tolist()
            self._runner.arrivals.leave_out(slots)
            self._runner.gather_position()
        first = self._runner.first_states
        with nullcontext() if first is None else first.moving():
            super().reset(index, **kwargs)
        self._runner.note_places(slots)
        self._monitor.drop(index)

    def collect(
        self,
        frames: int | None = None,
        episodes: int | None = None,
        *,
        reset: bool = False,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        random: bool = False,
        exploration_type: ExplorationType | None = None,
        gradients: bool = False,
        max_episode_steps: int | None = None,
        layout: Layout = "flat",
    ) -> Any:
        """Collect a number of frames, or of whole episodes.

        By frames, collection goes on where the last batch ended, in the middle of episodes, as
        iterating does. By episodes, every slot starts afresh, and so does the next collection:
        episodes in flight are dropped, before and after. The first ``episodes`` to start are
        collected; a slot whose episode ends takes the next one, and waits once all have started.
        With fewer episodes than slots, only so many slots are used.

        The result is not counted towards ``total_frames``, and not put into a replay buffer.
        Trajectory ids go on.

        Args:
            frames: how many frames over all slots; rounded up to a multiple of the slots, with a
                warning, unless they come by arrival.
            episodes: how many whole episodes over all slots.
            reset: start afresh in every slot before collecting frames.
            seed: of the first reset, as :meth:`set_seed` has it. Implies ``reset``.
            options: gymnasium's options, for the first reset; by episodes, for each. Implies
                ``reset``.
            random: take actions from the action spec; the policy is not called, and its other
                entries are absent.
            exploration_type: instead of the collector's own.
            gradients: keep the graph through the policy, within this batch.
            max_episode_steps: by episodes, truncate each at this length.
            layout: by episodes, ``"flat"`` or another of :func:`tdcollect.split_trajectories`.

        Returns:
            By frames, a batch ``[N, T]``, or ``[frames]`` by arrival. By episodes, a TensorDict
            ``[sum of lengths]``, each episode contiguous, in the order of starting; or another
            layout. ``postproc`` is applied as in iteration.

        Raises:
            ValueError: for both counts or none, and for those that are not positive.
            RuntimeError: where the collector is shut down.
        """
        count = check_count(frames, episodes, max_episode_steps, layout)
        check_options(options)
        self._runner.check_open(to_go_on=True)
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        with (
            collecting(),
            changed(self, replay_buffer=None),
            torch.set_grad_enabled(gradients),
            set_exploration_type(exploration_type or self.exploration_type),
            self._monitor.collection() as log,
        ):
            if episodes is None:
                if reset or seed is not None or options is not None or self.reset_at_each_iter:
                    self._runner.restart(seed, options)
                steps = count if self.by_arrival else round_up(count, self.n_env)
                batch = self._runner.frames(steps, log, random)
            else:
                batch = self._runner.episodes(count, log, seed, options, random, max_episode_steps)
            if random and not self.by_arrival:  # else late rows of the policy may be among them
                batch = batch.exclude(*self._runner.policys_own)
            log.batch = batch
        batch = self._postproc(batch)
        if layout != "flat":
            from tdcollect.trajectories.split import split_trajectories

            batch = split_trajectories(batch, layout=layout)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the envs and restart them.

        The next row collected of slot i is a reset with :func:`tdcollect.slot_seed` of ``seed`` and
        i, for the envs that :func:`tdcollect.make_env` makes; with ``seed + i`` for TorchRL's gym
        wrappers. (TorchRL's own collector goes on from the unseeded reset of its construction.)
        Other envs are seeded as their own ``set_seed`` does and then reset. Trajectories in flight
        are dropped; ids go on.

        Before anything is collected, transforms such as ``VecNormV2`` also begin again with the
        state that they had when the collector was made: the unseeded reset of its construction
        does not count. Later, and in the processes of a ``ParallelEnv``, their statistics go on.

        Args:
            seed: the root seed, which is that of slot 0.
            static_seed: return the seed as it is.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        return self._runner.restart(seed, static_seed=static_seed)

    def rebuild_env(self, **env_kwargs: Any) -> None:
        """Make the envs again, with other settings if given, and restart.

        Policy, transforms, statistics and counters stay; trajectories in flight are dropped, and
        ids go on. See :meth:`tdcollect.GymnasiumEnv.rebuild`.

        Args:
            **env_kwargs: put over the ``env_kwargs`` of :func:`tdcollect.make_env`.

        Raises:
            TypeError: for envs that :func:`tdcollect.make_env` cannot make again.
            ValueError: where the new envs have other spaces; the old ones go on.
            RuntimeError: where the collector is shut down.
        """
        self._runner.check_open(to_go_on=True)
        base = base_of(self.env)
        if not isinstance(base, GymnasiumEnv):
            raise TypeError(
                f"expected an env of tdcollect.make_env, got a {type(base).__name__}; make a new "
                "collector over a new env"
            )
        base.rebuild(**env_kwargs)
        self.reset()

    def state_dict(self, components: Sequence[str] | None = None) -> Any:
        """The collector's state, for :meth:`load_state_dict` in this or another process.

        Beside the parent's entries, it holds statistics, random states, and the slots: their rows,
        hidden states and trajectory ids, and their envs, which takes
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
        self._runner.settle()
        env_state = self._runner.env_state
        if env_state is None:
            state = super().state_dict()
        else:
            with changed(self, env=None):  # TorchRL would start a closed env to ask it
                state = {**super().state_dict(), "env_state_dict": env_state}
        add_state(state, self, components)
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        components: Sequence[str] | None = None,
        if_newer: bool = False,
        **kwargs: Any,
    ) -> None:
        """Go on from the state of a collector.

        Slots whose envs cannot be brought back start a new episode, with a new trajectory id; the
        one that they were in is never completed, and no statistics count it. A warning names them
        and says why. The state of TorchRL's own collector is loaded as that one loads it.

        Args:
            state_dict: the result of :meth:`state_dict`.
            components: which to load; None for all that were saved.
            if_newer: load the policy's weights only if their version is above the present one's;
                needs ``track_policy_version=True``, there and here.
            **kwargs: as the parent has them.

        Raises:
            TypeError: if ``state_dict`` is not a state dict.
            ValueError: for names of no component, for the state of other slots or entries, and
                for versions that cannot be compared.
            KeyError: where a component is missing.
            RuntimeError: for the slots of an env that is closed; nothing is loaded then.
        """
        load_state(self, state_dict, components, if_newer, kwargs)


SyncDataCollector = Collector
"""The collector under the name that TorchRL gave it up to version 0.10."""


@contextmanager
def explaining(explain: Callable[[Exception], None]) -> Iterator[None]:
    """Let a function raise a better error than the one on its way."""
    try:
        yield
    except Exception as error:
        explain(error)
        raise


def check_writes_action(policy: Any, env: EnvBase) -> None:
    """Raise ValueError for a policy whose ``out_keys`` have no action of the env."""
    if unknown_class(policy) is not None:
        return  # its out_keys may not be all that it writes
    out_keys = [unravel_key(key) for key in policy.out_keys]
    # An entry that holds the action, nested, counts too.
    actions = map(as_path, env.action_keys)
    written = {key[:n] for key in actions for n in range(1, len(key) + 1)}
    if written and not written & set(map(as_path, out_keys)):
        raise ValueError(
            f"expected the policy to write an action entry of the env, one of {env.action_keys}, "
            f"got a policy with out_keys={out_keys}; name its output accordingly"
        )


def refuse_elsewhere(options: dict[str, Any], backend: str) -> None:
    """Take options of this process alone out; raise ValueError for any but their defaults."""
    for name, default in (Collector.__init__.__kwdefaults__ or {}).items():
        value = options.pop(name, default)
        if value is not default and value != default:
            raise ValueError(
                f"expected no {name} with backend={backend!r}, whose collectors run in other "
                f"processes, got {name}={value!r}; leave it out, or choose backend='direct'"
            )


# ----------------------------------------------------------------------------------- reward shaping


_BOOKKEEPING = (keys.STEP_COUNT, keys.EPISODE_REWARD, keys.IS_INIT)


class RewardShaping(Protocol):
    """A function ``f(observation, action, reward, done)`` that gives the rewards to learn from.

    It is called once per batch, without gradients, on all its steps: all have the batch's size
    in front, ``[N, T]``.
    """

    def __call__(self, observation: Any, action: Any, reward: Any, done: Any, /) -> Any:
        """The rewards that learners see.

        Args:
            observation: what the step led to, at an episode's end its true last observation:
                ``[N, T, *obs]``, or a TensorDict ``[N, T]`` where the env shows several entries.
            action: the policy's action ``[N, T, *action]``, or a TensorDict of several.
            reward: the env's reward, ``[N, T, 1]``; a copy.
            done: whether the episode ended with the step, bool ``[N, T, 1]``.

        Returns:
            A tensor of the shape of ``reward``.
        """


class Shaper:
    """Puts shaped rewards in the place of the env's, which stay under ``("next", "raw_reward")``.

    Raises:
        TypeError: if the function cannot be called.
        ValueError: for an env with several rewards, or whose batches use the name already; where
            there is no batch with the following observations to be shaped.
    """

    def __init__(
        self,
        function: RewardShaping,
        env: EnvBase,
        compact_obs: bool = False,
        in_batches: bool = True,
    ):
        if not callable(function):
            raise TypeError(
                "expected reward_shaping to be a function (observation, action, reward, done) -> "
                f"reward, got {type(function).__name__}"
            )
        if env.reward_keys != [keys.REWARD] or keys.DONE not in env.done_keys:
            raise ValueError(
                "expected an env with one reward and one done flag at its root, got rewards "
                f"{env.reward_keys} and flags {env.done_keys}; shape them in a postproc instead"
            )
        if keys.RAW_REWARD in env.observation_spec.keys(True, True):
            raise ValueError(
                f"expected no entry {keys.RAW_REWARD!r} in the env, which reward_shaping keeps the "
                "env's reward in; rename it (torchrl.envs.RenameTransform)"
            )
        self._function = function
        if compact_obs:
            raise ValueError(
                "reward_shaping is given the observation that a step led to, which "
                "compact_obs=True leaves out: expected one of the two"
            )
        if not in_batches:
            raise ValueError(
                "reward_shaping is given whole batches, and extend_buffer=False writes steps one "
                "by one: expected extend_buffer=True, the default"
            )
        counted = {*_BOOKKEEPING, *(key for t in transforms_of(env) for key in _counted(t))}
        self._observations = [key for key in env.observation_keys if key not in counted]
        self._actions = env.action_keys

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """A copy of a batch, which shares all other entries with it."""
        following = batch.get(keys.NEXT)
        reward = following.get(keys.REWARD)
        shaped = self._function(
            _only(following, self._observations),
            _only(batch, self._actions),
            reward.clone(),
            following.get(keys.DONE),
        )
        if not isinstance(shaped, torch.Tensor) or shaped.shape != reward.shape:
            got = list(shaped.shape) if isinstance(shaped, torch.Tensor) else type(shaped).__name__
            raise ValueError(
                f"expected reward_shaping to return a tensor of the reward's shape "
                f"{list(reward.shape)}, got {got}"
            )
        shaped = shaped.to(reward.device)
        if not _goes_into(shaped, reward.dtype):
            raise ValueError(
                "expected reward_shaping to return numbers that go into the reward's "
                f"{reward.dtype} without loss, got {shaped.dtype}; cast what it returns, or the "
                "env's reward (torchrl.envs.DTypeCastTransform)"
            )
        batch = batch.copy()
        batch.set((keys.NEXT, keys.RAW_REWARD), reward)
        batch.set((keys.NEXT, keys.REWARD), shaped.to(reward.dtype))
        return batch


def _goes_into(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether values go into a dtype without loss; floats may lose digits."""
    if values.is_complex() or dtype.is_floating_point:
        return not values.is_complex()
    return torch.equal(values.to(dtype).to(values.dtype), values)


def _counted(transform: Transform) -> list[Key]:
    if isinstance(transform, EnvAction):
        return [key for _, key in transform.pairs]
    if isinstance(transform, PolicyVersion):
        return [keys.POLICY_VERSION]
    if isinstance(transform, TensorDictPrimer):
        return list(transform.primers.keys(True, True))
    if isinstance(transform, InitTracker):
        return [transform.init_key]
    if isinstance(transform, StepCounter):
        return [transform.step_count_key]
    return list(transform.out_keys) if isinstance(transform, RewardSum) else []


def _only(entries: TensorDictBase, wanted: list[Key]) -> Any:
    return entries.get(wanted[0]) if len(wanted) == 1 else entries.select(*wanted)
