"""One run of episodes: slots act and step, and blocks of their steps become finished episodes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrl.envs import EnvBase

from tdcollect.collect.arguments import explain_unfit_observations, missing_entries
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.episodes import Episodes, Start
from tdcollect.collect.step_dict import StepDict
from tdcollect.collect.store import placement
from tdcollect.evaluation.episodes.actions import ActionCheck
from tdcollect.evaluation.episodes.data import Assembly, Finished
from tdcollect.evaluation.episodes.policy import Actor, two_readings
from tdcollect.evaluation.episodes.steps import MOST
from tdcollect.evaluation.episodes.trial import Feed, RunStarts
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.keys import Key
from tdcollect.randomness import GlobalRandomness

# Steps between two checks: this often, finished episodes are yielded and reach the journal.
_STEPS = 128
_BLOCK_BYTES = 2**25  # or about this much memory, with large observations
_UNFIT = (RuntimeError, ValueError, AttributeError, TypeError)  # of a policy on unfit entries


@dataclass
class EpisodeRun:
    """One run of episodes of an env, which is stepped as ``slots``.

    An episode whose env raises starts again, ``max_restarts`` times at most; with None, the error
    is raised. ``error`` is the last one, and ``errors`` has those of failed episodes, by index.
    """

    env: EnvBase
    slots: SteppedEnv
    policy: Any
    actor: Actor
    device: torch.device
    assembly: Assembly
    starts: RunStarts
    settings: EvaluationSettings
    max_restarts: int | None
    error: Exception | None = None
    errors: dict[int, str] = field(default_factory=dict)

    def blocks(
        self, feed: Feed, start_of: Callable[[int], Start], base: Any
    ) -> Generator[list[Finished], None, None]:
        """Run the episodes of a feed; yields those that have ended, after each block of steps."""
        starts, assembly, settings = self.starts, self.assembly, self.settings
        self._feed, self._failed = feed, list[tuple[Finished, int]]()
        self._actions = ActionCheck(self.env, len(self.slots.batch_size))
        self._remembered: list[Key] | None = None
        loop = Episodes(
            self.slots,
            self._act,
            starts,
            placement(self.slots, self.device, torch.device("cpu")),
            steps=max(_STEPS // 8, min(_STEPS, _BLOCK_BYTES // max(1, self.slots.step_bytes))),
            seconds=feed.seconds,
            max_episode_steps=settings.step_limit,
            resets=starts.resets,
            own_options=settings.options_by_index is not None,
            left_out=assembly.left_out,
            on_start=self._started,
            on_step=self._stepped if assembly.metrics.infos else None,
            on_error=None if self.max_restarts is None else self._raised,
        )
        starts.begin(feed, start_of, base)
        while True:
            for block in loop:
                try:
                    self.actor.end()
                    self._actions.check_block(block)
                except _UNFIT as error:
                    self._explain(block.entries, error)
                    raise
                yield self._counted(assembly.feed(block))
            failed = bool(self._failed)
            yield self._counted(())
            if not (failed or starts.has_more() or feed.goes_on()):
                return

    def _act(self, rows: StepDict, active: list[int]) -> list[Key]:
        """Have the policy act; returns the entries that are zeroed where an episode begins."""
        try:
            if self._remembered is None:
                self._remembered = self._probe(rows)
            self.actor.act(rows, active)
        except _UNFIT as error:
            self._explain(rows, error)
            raise
        self._feed.stepped()
        return self._remembered

    def _probe(self, rows: StepDict) -> list[Key]:
        """Probe the policy before it acts; add the entries that it carries on."""
        randomness = GlobalRandomness()
        with two_readings(self.policy, self.env):
            outputs, remembered = self.actor.probe(rows, self.slots.carried)
        randomness.check("the policy")
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
        return remembered

    def _explain(self, entries: Mapping[Key, torch.Tensor], error: Exception) -> None:
        if isinstance(error, (AttributeError, TypeError)):
            missing = missing_entries(getattr(self.actor, "policy", None), entries)
            if missing is not None:
                raise missing from error
        explain_unfit_observations(entries, self.env, error)

    def _started(self, slot: int, start: Start) -> None:
        self.starts.started(slot, start)
        self.actor.start(slot, self.assembly.seeds(start.index)[1])
        self.assembly.metrics.begin(start.traj_id)

    def _stepped(self, running: Mapping[int, Start]) -> None:
        metrics = self.assembly.metrics
        infos = self.slots.latest_infos([*running], metrics.infos)
        for slot, start in running.items():
            metrics.note(start, infos[slot])

    def _raised(self, start: Start, error: Exception) -> Start | None:
        """Return the episode to start again after an error of its env; None if it has failed."""
        self.error = error
        assert self.max_restarts is not None
        restarts = self.assembly.restarts
        tries = restarts.get(start.traj_id, 0)
        again = start.traj_id in self.starts.runs_again
        if tries < self.max_restarts and not again:
            restarts[start.traj_id] = tries + 1
            return start
        if not again:
            self.errors[start.index] = f"{type(error).__name__}: {error}"
        self._failed.append((self.assembly.failed(start), start.traj_id))
        return None

    def _counted(self, ended: Iterable[tuple[Finished, int]]) -> list[Finished]:
        """Return the episodes that have ended, but for those that ran for the trial alone."""
        every = [*ended, *self._failed]
        self._failed.clear()
        for run, start in self.starts.runs_again.items():
            if self.assembly.is_over(run, MOST):
                self.starts.left_out.add(run)
                every.append((self.assembly.cut(start), run))
        taken = [self.starts.take(finished, run) for finished, run in every]
        return [finished for finished in taken if finished is not None]
