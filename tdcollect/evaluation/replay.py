"""One episode of an evaluation, run again, and filmed if asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from tensordict import TensorDict
from torchrl.envs import EnvBase

from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.requested_env import RequestedEnv
from tdcollect.evaluation.ledger.manifest import describe
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.files import check_no_links
from tdcollect.versions import extra_module


class Replayed(NamedTuple):
    """An episode that ran again.

    Attributes:
        record: the record of this run.
        data: its steps ``[L]``.
        manifest: the manifest of this run.
    """

    record: Episode
    data: TensorDict
    manifest: dict[str, Any]


Replay = Callable[[int, "str | os.PathLike[str] | None"], Replayed]


def replayer(
    env: str | Callable[..., Any] | EnvBase,
    policy: Any,
    settings_of: Callable[[int], EvaluationSettings],
) -> Replay:
    """Return a function that runs an episode again, given its index and where its video goes."""

    def replay(index: int, video: str | os.PathLike[str] | None) -> Replayed:
        settings = settings_of(index)
        with (
            filmed(env, settings.env_kwargs, video) as filmed_env,
            EvaluationCollector.from_settings(filmed_env, policy, settings) as again,
        ):
            manifest = describe(again)
            (finished,) = again.run(keep_trajectories=True)
        if finished.data is None:
            raise RuntimeError(
                f"the env raised in episode {index} again, at every try: "
                f"{type(again.error).__name__}: {again.error}"
            ) from again.error
        return Replayed(finished.record, finished.data, manifest)

    return replay


def unequal(recorded: Episode, again: Replayed) -> list[str]:
    """Compare a record with that of the same episode run again, key by key.

    Restarts are not compared: they belong to the run, not to the episode.
    """
    record = replace(again.record, restarts=recorded.restarts)
    was, now = (json.loads(of.to_json()) for of in (recorded, record))
    return [
        f"{name} is {now.get(name)!r}, in the ledger {was[name]!r}"
        for name in was
        if repr(was[name]) != repr(now.get(name))  # NaN is NaN
    ]


_VIDEOS = (".mp4", ".mkv", ".mov")


class _Filming(gym.Wrapper[Any, Any, Any, Any]):
    """Renders at the start and after each step, and keeps the pictures of the last episode."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self.pictures: list[Any] = []

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        self.pictures = [self.env.render()]
        return result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.pictures.append(self.env.render())
        return result


def _rendered(env: str | Callable[..., Any], **kwargs: Any) -> Any:
    """Make an env, which renders to arrays if it is one of an id."""
    if isinstance(env, str):
        return gym.make(env, **{"render_mode": "rgb_array", **kwargs})
    return env(**kwargs)


@contextmanager
def filmed(
    env: Any, env_kwargs: dict[str, Any] | None, video: str | os.PathLike[str] | None
) -> Iterator[Any]:
    """Yield a callable that makes an env whose last episode is written as a video on exit."""
    if video is None:
        yield env
        return
    path = Path(video)
    if path.suffix.lower() not in _VIDEOS or path.is_dir():
        raise ValueError(f"expected a video file, {' or '.join(_VIDEOS)}, got {path}")
    path = path.absolute()
    check_no_links(path.parent, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = extra_module("imageio_ffmpeg", "a video")
    if not isinstance(env, str) and not callable(env):
        raise TypeError(
            f"expected a gymnasium id or a callable to make an env to film, got {env}; it is made "
            "already"
        )
    films: list[_Filming] = []

    def film(made: Any) -> _Filming:
        if not isinstance(made, gym.Env) or made.render_mode != "rgb_array":
            made.close()
            raise ValueError(
                f"expected an env with render_mode='rgb_array' to film, got {made}; have it made "
                "so (env_kwargs)"
            )
        films.append(_Filming(made))
        return films[-1]

    if isinstance(env, RequestedEnv):
        yield replace(env, env=partial(_rendered, env.env), outermost=film)
    else:
        yield lambda **kwargs: film(_rendered(env, **kwargs))
    last = films[-1]
    pictures = [np.ascontiguousarray(picture, dtype=np.uint8) for picture in last.pictures]
    height, width = pictures[0].shape[:2]
    rate = float(last.metadata.get("render_fps", 30))
    # Video players need even heights and widths.
    writer = writing.write_frames(
        str(path), (width, height), fps=rate, macro_block_size=2, ffmpeg_log_level="error"
    )
    writer.send(None)
    for picture in pictures:
        writer.send(picture)
    writer.close()
