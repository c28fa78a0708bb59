"""Hooks: a user's object that a collector calls as it works; two ready to use; who calls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect import check, keys
from tdcollect._upstream.torchrl import wrapped_env
from tdcollect.collect.statistics import Bools, Floats, Ints, Spread, Statistics, Tally
from tdcollect.collect.step_dict import StepDict
from tdcollect.display import one_line
from tdcollect.envs.spaces import nested, told
from tdcollect.envs.wrapper import texts_of
from tdcollect.keys import under_next


class Hooks:
    """Override the methods of interest, and pass an instance as ``Collector(..., hooks=...)``.

    Each method is called once for all the slots that it concerns: ``slots`` is int64 ``[K]``,
    ascending, counted over all batch dims of the env. Methods that are not overridden cost nothing.
    Their TensorDicts share memory with the batch: do not write into them.

    Where a method raises, collection stops with a ``RuntimeError`` that names it.
    """

    def env_created(self, env: EnvBase) -> None:
        """The collector has its env, with all its transforms; nothing has been collected.

        Args:
            env: of the collector.
        """

    def episodes_started(self, slots: Ints, step: TensorDictBase) -> None:
        """The next step of these slots is the first of an episode.

        Args:
            slots: ``[K]``.
            step: that step before the policy acts, of the env's batch size.
        """

    def stepped(self, slots: Ints, step: TensorDictBase) -> None:
        """These slots have taken a step.

        Args:
            slots: ``[K]``; all of them, but for the last steps of ``collect(episodes=...)``.
            step: of the env's batch size, as a step of a batch; what followed is under ``"next"``.
                The rows of other slots mean nothing.
        """

    def episodes_ended(self, slots: Ints, returns: Floats, lengths: Ints) -> None:
        """Episodes have ended with the latest step; not those that an env's failure broke off.

        Args:
            slots: ``[K]``.
            returns: ``[K]`` float64, sums of the env's rewards as batches hold them (float32); of
                several rewards, the mean over agents, then over groups. Empty for an env without
                rewards.
            lengths: ``[K]`` int64, in steps.
        """

    def collection_ended(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """A batch has been collected, in iteration or by a call of ``collect``.

        Args:
            batch: before reward shaping and ``postproc``; None where each step went to the replay
                buffer by itself.
            stats: of the collector, with this collection in it.
        """


AnyHooks: TypeAlias = Hooks | Sequence[Hooks] | None

EVENTS = tuple(name for name in vars(Hooks) if not name.startswith("_"))


class Render(Hooks):
    """Render the env after each step, at a frame rate.

    The env must be made to be rendered: ``make_env(id, env_kwargs={"render_mode": "human"})``, or
    ``"rgb_array"``. A step that ends an episode is followed by the reset at once: its frame shows
    the start of the next episode.

    Args:
        fps: the most steps per second: collection waits after each. None to go on at once.
        keep_frames: keep the rendered images in :attr:`frames`; needs ``"rgb_array"`` or its like.

    Attributes:
        frames: the result of ``env.render()`` after each step, oldest first; yours to clear.

    Raises:
        ValueError: for an fps that is not positive; when the collector is made, for an env without
            a render mode, and with ``keep_frames`` for one in mode ``"human"``, which returns no
            frames.
    """

    def __init__(self, fps: float | None = None, keep_frames: bool = False):
        if fps is not None and not fps > 0:
            raise ValueError(f"expected fps to be positive, or None, got {fps}")
        self.frames: list[Any] = []
        self._interval = 0.0 if fps is None else 1 / fps
        self._keep = keep_frames
        self._due = -float("inf")

    def __repr__(self) -> str:
        frames = f"{len(self.frames)} frames kept"
        return one_line(self, f"{self._interval:.4g} s between frames", frames)

    def env_created(self, env: EnvBase) -> None:
        """Check that the env renders."""
        mode = _render_mode(env)
        if mode is None or (self._keep and mode == "human"):
            wanted = "'rgb_array'" if self._keep else "'human' or 'rgb_array'"
            raise ValueError(
                f"expected an env made with render_mode {wanted}, got render_mode={mode!r}: pass "
                "env_kwargs={'render_mode': ...} to make_env"
            )
        self._env = env

    def stepped(self, slots: Ints, step: TensorDictBase) -> None:
        """Render, and wait until a frame is due."""
        frame = self._env.render()
        if self._keep:
            self.frames.append(frame)
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
        # Time lost to a slow policy is not made up for.
        self._due = max(now, self._due) + self._interval


def _render_mode(env: Any) -> Any:
    """The env's render mode; ``"unknown"`` where it does not say."""
    base = getattr(env, "base_env", env)
    backend = getattr(getattr(base, "stepper", None), "backend", None)
    singles = getattr(backend, "envs", None)  # one gymnasium env per slot
    if singles:
        return singles[0].render_mode
    wrapped = getattr(backend, "env", None) or wrapped_env(base)
    return getattr(wrapped, "render_mode", "unknown")


class ScalarLogger(Protocol):
    """A logger of numbers, as TorchRL's are (CSV, TensorBoard, W&B and the others)."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Write a number."""


def _named(name: str, spread: Spread | None) -> dict[str, float]:
    if spread is None:
        return {}
    return {f"{name}_{figure}": value for figure, value in spread._asdict().items()}


class LogStatistics(Hooks):
    """Hooks that write the statistics of each collection to one of TorchRL's loggers.

    Episodes and steps over the collector's lifetime; steps per second; mean, std, min and max of
    returns and lengths of the latest collection, where episodes ended; the mean return over the
    window; times. Names are ``prefix/return_mean`` and so on. Rewards are shaped after hooks are
    called: shaped returns are written by a call of :meth:`write` alone.

    Args:
        logger: say ``CSVLogger``.
        every: write one of so many collections.
        prefix: of each name.

    Raises:
        ValueError: for an ``every`` that is not positive.
        TypeError: for a logger without ``log_scalar``.
    """

    def __init__(self, logger: ScalarLogger, every: int = 1, prefix: str = "collect"):
        check.positive_int(every=every)
        if not callable(getattr(logger, "log_scalar", None)):
            got = type(logger).__name__
            raise TypeError(f"expected a logger with log_scalar(name, value, step), got {got}")
        self._logger = logger
        self._every = every
        self._prefix = prefix

    def __repr__(self) -> str:
        return one_line(self, type(self._logger).__name__, f"every={self._every}", self._prefix)

    def collection_ended(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """Write the statistics of every so many collections."""
        if stats.lifetime.collections % self._every == 0:
            self.write(stats)

    def write(self, stats: Statistics, step: int | None = None) -> None:
        """Write the statistics of the latest collection now.

        Args:
            stats: ``collector.stats``.
            step: of the logger's axis; by default the steps collected so far, over all slots.

        Raises:
            RuntimeError: before anything has been collected.
        """
        latest, lifetime, over_window = stats.latest, stats.lifetime, stats.window.return_stats
        if latest is None:
            raise RuntimeError("expected a collector that has collected something, got a new one")
        values = {
            "episodes": lifetime.episodes,
            "steps": lifetime.steps,
            "steps_per_second": latest.steps_per_second,
            "seconds": latest.seconds,
            "seconds_between": latest.seconds_between,
            "env_seconds": latest.env_seconds,
            "policy_seconds": latest.policy_seconds,
            **_named("return", latest.return_stats),
            **_named("length", latest.length_stats),
            **_named("shaped_return", latest.shaped_return_stats),
            "window_return_mean": None if over_window is None else over_window.mean,
        }
        at = lifetime.steps if step is None else step
        for name, value in values.items():
            if value is not None:
                self._logger.log_scalar(f"{self._prefix}/{name}", value, step=at)


class Watch:
    """Calls hooks with a collection; ``steps`` tells whether one asks for steps or episodes."""

    def __init__(self, hooks: list[Hooks]):
        self._calls = {
            event: [
                getattr(hook, event)
                for hook in hooks
                if getattr(type(hook), event) is not getattr(Hooks, event)
            ]
            for event in EVENTS
        }
        self.steps = any(
            self._calls[event] for event in ("episodes_started", "stepped", "episodes_ended")
        )

    def attach(self, env: EnvBase) -> None:
        """Attach to the collector's env, once it is made."""
        self._batch_size, self._texts = env.batch_size, texts_of(env)
        self._reward_keys = list(env.reward_keys)
        self._every = np.arange(env.batch_size.numel())
        self._starting = np.ones(len(self._every), bool)  # slots about to start an episode
        self._tally = Tally(len(self._every))
        self.call("env_created", env)

    def drop(self, slots: Bools | None = None) -> None:
        """Drop the episodes in flight: of all slots (None), or of these."""
        self._starting[slice(None) if slots is None else slots] = True
        self._tally.drop(slots)

    def begin(self, step: TensorDictBase) -> None:
        """A loop begins with this step."""
        if self._starting.any():
            self.started(self._starting.nonzero()[0], lambda: step)

    def started(self, slots: Ints | list[int], step: Callable[[], TensorDictBase]) -> None:
        """Episodes begin in these slots, with the step given."""
        self._starting[slots] = False
        self._tally.drop(slots)  # of an episode that an env's failure broke off
        if self._calls["episodes_started"]:
            self.call("episodes_started", np.asarray(slots, np.int64), step())

    def stepped(
        self,
        slots: list[int] | None,
        ended: list[int],
        step: Callable[[], TensorDictBase],
        rewards: Iterable[torch.Tensor],
        failed: torch.Tensor | None,
    ) -> None:
        """Slots have taken a step.

        Args:
            slots: that took it; None for all.
            ended: slots whose episodes ended with it.
            step: gives it as a TensorDict.
            rewards: the env's reward entries.
            failed: marks slots in which the step failed: their episodes have no end.
        """
        taken = self._every if slots is None else np.asarray(slots, np.int64)
        broken = [] if failed is None else failed.reshape(-1).nonzero()[:, 0].tolist()
        which = np.array([slot for slot in ended if slot not in broken], np.int64)
        if self._calls["episodes_ended"]:  # before hooks that may raise
            self._tally.add(taken, [reward.detach().cpu().numpy() for reward in rewards])
        returns, lengths = self._tally.take(which)
        self._starting[which] = True
        self._starting[broken] = True
        if self._calls["stepped"]:
            self.call("stepped", taken, step())
        if len(which):
            returns = returns if self._reward_keys else returns[:0]
            self.call("episodes_ended", which, returns, lengths)

    def step_taken(
        self, step: StepDict, following: StepDict, ended: list[int], slots: list[int] | None = None
    ) -> None:
        """As :meth:`stepped`, on StepDicts: a step, and the entries that it led to."""

        def packed() -> TensorDictBase:
            entries = {**step, **{under_next(key): value for key, value in following.items()}}
            return nested(told(self._texts, entries).items(), self._batch_size)

        rewards = (following[key] for key in self._reward_keys)
        self.stepped(slots, ended, packed, rewards, following.get(keys.ENV_ERROR))

    def began(self, slots: Sequence[int], present: StepDict) -> None:
        """As :meth:`started`, on StepDicts, if there are such slots."""
        if slots:
            shown = lambda: told(self._texts, present).items()  # noqa: E731
            self.started(list(slots), lambda: nested(shown(), self._batch_size))

    def save_state(self) -> dict[str, Any]:
        """The sums of episodes in flight, and which slots are about to start one."""
        return {"starting": self._starting, "tally": vars(self._tally).copy()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`save_state`."""
        self._starting = state["starting"]
        vars(self._tally).update(state["tally"])

    def call(self, event: str, *arguments: Any) -> None:
        """Call the hooks of an event."""
        for call in self._calls[event]:
            try:
                call(*arguments)
            except Exception as error:
                name = type(call.__self__).__name__
                raise RuntimeError(
                    f"the hook {name}.{event} raised {type(error).__name__}: {error}"
                ) from error


def watch_of(hooks: AnyHooks) -> Watch | None:
    """The caller of the hooks that a user gave; None for none."""
    listed = [] if hooks is None else [hooks] if isinstance(hooks, Hooks) else hooks
    if not isinstance(listed, Sequence) or not all(isinstance(hook, Hooks) for hook in listed):
        raise TypeError(
            "expected hooks to be an instance of a subclass of tdcollect.Hooks, or a list of them, "
            f"got {hooks!r}"
        )
    return Watch(list(listed)) if listed else None
