"""The collector of test episodes: numbered, seeded, the same to the bit however they are run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from tdcollect._upstream import append_policy_transforms
from tdcollect.collect.construction import needs_state
from tdcollect.collect.env_parts import base_of, exact_reward_of
from tdcollect.collect.episodes import EpisodeLoop, Start
from tdcollect.collect.path import stepped_env
from tdcollect.collect.step_dict import Key, StepDict
from tdcollect.collect.tensordict_env import SteppedEnv
from tdcollect.display import one_line
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.actions import ActionCheck
from tdcollect.evaluation.arguments import (
    Seeds,
    check_positive,
    check_seed,
    check_transforms,
    device_of,
    indices_of,
    is_count,
    made_env,
    seed_schedule,
)
from tdcollect.evaluation.data import Assembly, Finished
from tdcollect.evaluation.inference import Inference, as_policy, at_batch_size
from tdcollect.evaluation.isolation import (
    GlobalRandomness,
    check_alone,
    in_eval_mode,
    isolated,
    mode_of,
    with_threads,
)
from tdcollect.evaluation.masks import with_masks
from tdcollect.evaluation.probe import probe_env
from tdcollect.evaluation.records import Episode
from tdcollect.threads import evaluating

# Between checks; finished episodes come out so often, and reach the journal.
_STEPS = 128
_SECONDS = 1.0  # with slow envs
_BLOCK_BYTES = 2**25  # of observations, where steps are large


class EvaluationCollector:
    """Runs numbered test episodes; iterate to get each as a TensorDict ``[L]``.

    Episode i resets its env with ``env_seed(seed, i)``, and the policy draws all its random
    numbers in it from a stream of its own that starts from ``policy_seed(seed, i)``. Its data are
    the same to the bit for any number of slots, any backend that seeds, and whatever other
    episodes run. Slots take the next episode as they become free; all episodes run to their end.

    Nothing outside changes: global random states, exploration type, train or eval mode, and
    running statistics of transforms are as before, also between two episodes that are taken out.

    Args:
        env: a gymnasium id; a callable that makes a ``gymnasium.Env`` or an ``EnvBase``; or an env
            of :func:`tdcollect.make_env`, bare or under TorchRL transforms. An env that is given
            is reset and used, and is left unseeded; one that is made here is closed at the end.
        policy: whatever a collector takes; None for random actions.
        episodes: how many, numbered from 0; or the numbers to run.
        seed: the root seed.
        env_seeds: the envs' seeds, in place of those that follow from the root seed: one per
            episode, or a function of the episode's index.
        num_envs: how many slots are made, though no more than there are episodes; None for 16, or
            for those of the env that is given.
        backend: of :func:`make_env`, for an id or a callable.
        env_kwargs: for the env's constructor.
        exploration_type: of the policy; by default its most likely action.
        max_episode_steps: truncate episodes at this length.
        inference_batch_size: the batch size that the policy always runs at, whatever the number of
            slots. Another one rounds otherwise.
        inference_threads: the number of torch's threads that the policy always runs with, whatever
            it is outside. Another one may round otherwise.
        eval_mode: run the policy in eval mode, whatever it is in outside; False to keep the modes
            of its modules. A callable that is no module is run as it is.
        device: where the policy runs; None for where its parameters are.
        on_env_error: ``"restart"`` an episode whose env raises on a new env, or ``"raise"``.
        max_restarts: how often, before the episode is recorded as failed.
        fresh_envs: build a new env for each episode; None to do so where the env is found to carry
            something from one episode into the next.
        in_order: give episodes in the order of their numbers, rather than of their ending.

    Attributes:
        episodes: the records of those that have ended, in the order of their ending.
        episode_indices: of the episodes to run.
        episode_seeds: gives the seed of the env and that of the policy in an episode.
        env: the env, and ``base``, the one under its transforms.
        policy_mode: ``"eval"``, ``"train"`` or ``"mixed"``, the mode that the policy's modules run
            in; None for a policy that is no module.
        error: what the env raised last, where it did.

    Raises:
        TypeError, ValueError: for arguments that cannot be honoured, before an env is made; on
            iterating, for actions that are not those of the env's action spec.
        RuntimeError: where another thread collects or draws random numbers meanwhile.
        NotReproducibleError: on iterating, for an env or a policy that does not give the same
            episode for the same seeds.

    Examples:
        >>> for episode in EvaluationCollector("CartPole-v1", policy, episodes=10, seed=0):
        ...     print(episode["next", "reward"].sum())
    """

    def __init__(
        self,
        env: str | Callable[..., Any] | EnvBase,
        policy: Any = None,
        episodes: int | Sequence[int] = 100,
        seed: int = 0,
        *,
        env_seeds: Seeds | None = None,
        num_envs: int | None = None,
        backend: str | None = None,
        env_kwargs: dict[str, Any] | None = None,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        max_episode_steps: int | None = None,
        inference_batch_size: int = 16,
        inference_threads: int = 1,
        eval_mode: bool = True,
        device: torch.device | str | None = None,
        on_env_error: str = "restart",
        max_restarts: int = 2,
        fresh_envs: bool | None = None,
        in_order: bool = False,
    ):
        self.episode_indices = indices_of(episodes)
        check_seed(seed)
        for name, value in (("max_episode_steps", max_episode_steps), ("num_envs", num_envs)):
            if value is not None:
                check_positive(name, value)
        check_positive("inference_batch_size", inference_batch_size)
        check_positive("inference_threads", inference_threads)
        if not isinstance(eval_mode, bool):
            raise TypeError(f"expected eval_mode to be a bool, got {eval_mode!r}")
        if on_env_error not in ("restart", "raise"):
            raise ValueError(
                f"expected on_env_error to be 'restart' or 'raise', got {on_env_error!r}"
            )
        if not is_count(max_restarts):
            raise ValueError(
                f"expected max_restarts to be an int and not negative, got {max_restarts!r}"
            )
        if not isinstance(exploration_type, ExplorationType):
            raise TypeError(
                "expected exploration_type to be one of torchrl's ExplorationType, got "
                f"{exploration_type!r}"
            )
        self.seed = seed
        self.env_seeds_given = env_seeds is not None
        self.episode_seeds = seed_schedule(seed, env_seeds, self.episode_indices)
        self.exploration_type = exploration_type
        self.max_episode_steps = max_episode_steps
        self.inference_batch_size = inference_batch_size
        self.inference_threads = inference_threads
        self._eval_mode = eval_mode
        self._max_restarts = max_restarts if on_env_error == "restart" else None
        self._fresh_envs = fresh_envs
        self._in_order = in_order
        self._made = not isinstance(env, EnvBase)
        with evaluating():
            pass  # no env is made beside a collection
        self.env = made_env(env, num_envs, backend, env_kwargs, len(self.episode_indices))
        try:
            self.base = base_of(self.env)
            if not isinstance(self.base, GymnasiumEnv):
                raise TypeError(
                    f"expected an env of tdcollect.make_env, bare or under transforms, got one "
                    f"over {type(self.base).__name__}; its slots cannot be seeded one by one"
                )
            check_transforms(self.env)
            self._check_open()
            if needs_state(policy):
                # Transforms are appended in place: to an env of ours, not to the one given.
                own = TransformedEnv(self.env, auto_unwrap=True)
                self.env = append_policy_transforms(own, policy)
            self.env = with_masks(self.env, policy)
            self.policy = policy
            with self._apart():
                self._policy = as_policy(policy, self.env, inference_batch_size)
                self.policy_mode = mode_of(policy)
            self.device = device_of(policy, device)
            self._check_fresh_envs()
        except BaseException:
            self.close()
            raise
        self.episodes: list[Episode] = []
        self.error: Exception | None = None

    def _check_fresh_envs(self) -> None:
        backend = self.base.stepper.backend
        if self._fresh_envs and not backend.rebuilds:
            raise ValueError(
                f"expected fresh_envs=None or False: the backend {backend.name!r} cannot build "
                "single slots anew; use backend='serial'"
            )

    def _check_open(self) -> None:
        if self.base.is_closed:
            raise RuntimeError(f"the env {self.base.name} is closed; make a new one to evaluate")

    def __len__(self) -> int:
        return len(self.episode_indices)

    def __iter__(self) -> Iterator[TensorDict]:
        for finished in self.run(keep_trajectories=True):
            if finished.data is not None:
                yield finished.data

    def run(self, keep_trajectories: bool = False) -> Generator[Finished, None, None]:
        """Run all episodes; gives the record of each, and its data where they are kept.

        Args:
            keep_trajectories: keep the data of episodes until they are given out.
        """
        self._check_open()
        episodes: list[Episode] = []
        self.episodes = episodes
        with evaluating():
            check_alone()
        steps = self._run(keep_trajectories)
        waiting: dict[int, Finished] = {}
        due = iter(self.episode_indices)
        following = next(due, None)
        try:
            while True:
                if self.episodes is not episodes:
                    raise RuntimeError(
                        "another run of this collector has begun since, on the same env; make a "
                        "collector with an env of its own for each"
                    )
                with self._apart() as randomness:
                    ended = next(steps, None)
                    randomness.check(f"the env {self.base.name} or the policy, at some step,")
                if ended is None:
                    return
                for finished in ended:
                    self.episodes.append(finished.record)
                    if not self._in_order:
                        yield finished
                        continue
                    waiting[finished.record.index] = finished
                    while following in waiting:
                        yield waiting.pop(following)
                        following = next(due, None)
        finally:
            steps.close()
            self._unseed()

    @contextmanager
    def _apart(self) -> Iterator[GlobalRandomness]:
        size = self.inference_batch_size
        with (
            evaluating(),
            with_threads(self.inference_threads),
            in_eval_mode(self.policy if self._eval_mode else None),
            isolated(self.env, self.exploration_type) as randomness,
            at_batch_size(self.policy, self.env, size),
        ):
            yield randomness

    def _run(self, keep_trajectories: bool) -> Generator[list[Finished], None, None]:
        """Run all episodes; gives those that end, some at a time."""
        if not self.episode_indices:
            return
        fresh_envs = probe_env(self.base, self._fresh_envs)
        env = stepped_env(self.env, exact_reward_of(self.env))
        slots = env.batch_size.numel()
        inference = Inference(
            self._policy,
            self.inference_batch_size,
            slots,
            bool(env.batch_size),
            self.device,
        )
        assembly = Assembly(self.env, self.episode_seeds, keep_trajectories)
        actions = ActionCheck(self.env)
        given_up: list[Finished] = []
        remembered: list[Key] | None = None

        def act(rows: StepDict, active: list[int]) -> None:
            nonlocal remembered
            if remembered is None:
                remembered = self._first_call(inference, rows, env, actions)
                if keep_trajectories and inference.left_out:
                    warnings.warn(
                        f"the policy's entries {inference.left_out} are no dense tensors, and are "
                        "not kept with the data of episodes; encode them as numbers to keep them",
                        stacklevel=2,
                    )
            inference(rows, active)

        def start(slot: int, start: Start) -> None:
            inference.start(slot, self.episode_seeds(start.index)[1])

        def failed(start: Start, error: Exception) -> Start | None:
            self.error = error
            tries = assembly.restarts.get(start.index, 0)
            if self._max_restarts is not None and tries < self._max_restarts:
                assembly.restarts[start.index] = tries + 1
                return start
            given_up.append(assembly.failed(start.index))
            return None

        loop = EpisodeLoop(
            env,
            act,
            lambda rows: remembered or [],
            (
                Start(number, self.episode_seeds(number)[0], number)
                for number in self.episode_indices
            ),
            steps=max(_STEPS // 8, min(_STEPS, _BLOCK_BYTES // max(1, env.step_bytes))),
            seconds=_SECONDS,
            max_episode_steps=self.max_episode_steps,
            rebuild=fresh_envs,
            started=start,
            replace=None if self._max_restarts is None else failed,
        )
        for block in loop:
            inference.check()
            actions.block(block)
            yield [*assembly.feed(block), *given_up]
            given_up.clear()
        yield given_up

    def _first_call(
        self, inference: Inference, rows: StepDict, env: SteppedEnv, actions: ActionCheck
    ) -> list[Key]:
        """Look at the policy before it acts; the entries that it remembers are then there."""
        randomness = GlobalRandomness()
        outputs = inference.probe(rows)
        randomness.check("the policy")
        actions.first(outputs)
        seen = StepDict({**rows, **outputs})
        remembered = inference.remembered(seen, env.carried)
        for key in remembered:
            if key not in rows:
                like = outputs[key]
                shape = (*self.env.batch_size, *like.shape[1:])
                rows[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return remembered

    def _unseed(self) -> None:
        """Have the env's next episodes start from fresh entropy."""
        stepper = self.base.stepper
        if not self.base.is_closed:
            fresh = np.random.SeedSequence().generate_state(stepper.num_envs, np.uint32) >> 1
            stepper.set_seeds([int(seed) for seed in fresh])

    def close(self) -> None:
        """Close the env if it was made here; a second call does nothing."""
        if self._made and not self.env.is_closed:
            self.env.close()

    def __enter__(self) -> EvaluationCollector:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        told = (f"seed={self.seed}", f"ended={len(self.episodes)}")
        slots = f"{self.env.batch_size.numel()} slots"
        return one_line(
            self, f"{len(self.episode_indices)} episodes of {self.base.name}", *told, slots
        )
