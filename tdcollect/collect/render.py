"""Render while collecting."""

from __future__ import annotations

import time
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tdcollect._upstream.torchrl import wrapped_env
from tdcollect.collect.hooks import Hooks
from tdcollect.collect.statistics import Ints
from tdcollect.display import one_line


class Render(Hooks):
    """Render the env after each step, at a frame rate.

    The env must be made to be rendered: ``make_env(id, env_kwargs={"render_mode": "human"})``, or
    ``"rgb_array"``. A step that ends an episode is followed by the reset at once: its frame shows
    the start of the next episode.

    Args:
        fps: the most steps per second: collection waits after each. None to go on at once.
        keep_frames: keep what the env renders in :attr:`frames`; needs ``"rgb_array"`` or its like.

    Attributes:
        frames: what ``env.render()`` gave after each step, oldest first; yours to clear.

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
        # From one frame to the next; time lost to a slow policy is not made up for.
        self._due = max(now, self._due) + self._interval


def _render_mode(env: Any) -> Any:
    """How the env renders; ``"unknown"`` where it does not say."""
    base = getattr(env, "base_env", env)
    backend = getattr(getattr(base, "stepper", None), "backend", None)
    singles = getattr(backend, "envs", None)  # one gymnasium env a slot
    if singles:
        return singles[0].render_mode
    wrapped = getattr(backend, "env", None) or wrapped_env(base)
    return getattr(wrapped, "render_mode", "unknown")
