"""Hooks: a user's object that a collector calls as it works; and two that are ready to use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect._upstream.torchrl import wrapped_env
from tdcollect.collect.statistics import Floats, Ints, Spread, Statistics
from tdcollect.display import one_line


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
                several rewards, the mean over agents, then over groups.
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


def as_hooks(given: AnyHooks) -> list[Hooks]:
    """A list of hooks.

    Raises:
        TypeError: if an item is not a ``Hooks`` instance.
    """
    listed = [] if given is None else [given] if isinstance(given, Hooks) else given
    if not isinstance(listed, Sequence) or not all(isinstance(hook, Hooks) for hook in listed):
        raise TypeError(
            "expected hooks to be an instance of a subclass of tdcollect.Hooks, or a list of them, "
            f"got {given!r}"
        )
    return list(listed)


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
        kept = f"{len(self.frames)} frames kept"
        return one_line(self, f"{self._interval:.4g} s between frames", kept)

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


def log_stats(
    logger: ScalarLogger, stats: Statistics, step: int | None = None, prefix: str = "collect"
) -> None:
    """Write the statistics of the latest collection to a logger.

    Episodes and steps over the collector's lifetime; steps per second; mean, std, min and max of
    returns and lengths of the latest collection, where episodes ended, and of shaped returns, where
    there are any; the mean return over the window; times. Names are ``prefix/return_mean`` and so
    on.

    Args:
        logger: one of TorchRL's, say ``CSVLogger``.
        stats: ``collector.stats``.
        step: of the logger's axis; by default the steps collected so far, over all slots.
        prefix: of each name.

    Raises:
        RuntimeError: before anything has been collected.
    """
    latest, lifetime = stats.latest, stats.lifetime
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
    }
    over_window = stats.window.return_stats
    if over_window is not None:
        values["window_return_mean"] = over_window.mean
    for name, value in values.items():
        if value is not None:
            logger.log_scalar(
                f"{prefix}/{name}", value, step=lifetime.steps if step is None else step
            )


def _named(name: str, spread: Spread | None) -> dict[str, float]:
    if spread is None:
        return {}
    return {f"{name}_{figure}": value for figure, value in spread._asdict().items()}


class LogStatistics(Hooks):
    """Hooks that write the statistics of each collection to one of TorchRL's loggers.

    As :func:`log_stats` does, without shaped returns: rewards are shaped later.

    Args:
        logger: say ``CSVLogger``.
        every: write one of so many collections.
        prefix: of each name.

    Raises:
        ValueError: for an ``every`` that is not positive.
    """

    def __init__(self, logger: ScalarLogger, every: int = 1, prefix: str = "collect"):
        if every < 1:
            raise ValueError(f"expected every to be positive, got {every}")
        self._logger = logger
        self._every = every
        self._prefix = prefix

    def __repr__(self) -> str:
        return one_line(self, type(self._logger).__name__, f"every={self._every}", self._prefix)

    def collection_ended(self, batch: TensorDictBase | None, stats: Statistics) -> None:
        """Write the statistics of every so many collections."""
        if stats.lifetime.collections % self._every == 0:
            log_stats(self._logger, stats, prefix=self._prefix)
