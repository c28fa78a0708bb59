"""Running an episode again, and filming it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RenderCollection
from tensordict import TensorDict
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tdcollect.envs.process.worker import make_by_id
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.steps import Steps
from tdcollect.evaluation.ledger import BATCHES, METRICS, Episode, manifest_entry, options_by_index
from tdcollect.evaluation.manifest import describe, known_of
from tdcollect.evaluation.requested import RequestedEnv
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.files import check_no_links
from tdcollect.packages import extra_module


def settings_of(manifest: Mapping[str, Any], episode: Episode, **how: Any) -> EvaluationSettings:
    """Return the settings that run one episode of an evaluation again.

    Of metrics, those of infos: a function is not in the manifest.
    """
    named = (manifest.get(METRICS) or {}).items()
    metrics = {name: text for name, text in named if isinstance(text, str)}
    options = options_by_index(manifest)
    return EvaluationSettings(
        [episode.index],
        manifest["seeds"]["root"],
        env_seeds=None if BATCHES in manifest else {episode.index: episode.env_seed},
        exploration_type=ExplorationType[manifest["policy"]["exploration"].upper()],
        max_episode_steps=manifest["max_episode_steps"] or math.inf,  # as it did end
        reward_keys=manifest_entry(manifest, "returns.rewards"),
        episodes_per_slot=manifest_entry(manifest, f"{BATCHES}.episodes_per_slot"),
        metrics=metrics or None,
        episode_options={episode.index: options[episode.index]} if options else None,
        inference_batch_size=manifest["inference_batch_size"],
        inference_threads=manifest["inference_threads"],
        eval_mode=manifest["policy"].get("mode") == "eval",
        **how,
    )


class Replayed(NamedTuple):
    """An episode that ran again: its record, data ``[L]``, steps, and manifest."""

    record: Episode
    data: TensorDict
    steps: Steps | None
    manifest: dict[str, Any]


class RaisedAgainError(RuntimeError):
    """The env raised at every try, in an episode that ran again."""


Replay = Callable[[int, "str | os.PathLike[str] | None"], Replayed]


def replayer(
    env: str | Callable[..., Any] | EnvBase,
    policy: Any,
    settings_of: Callable[[int], EvaluationSettings],
    set_up: Callable[[EvaluationCollector], None] = lambda again: None,
) -> Replay:
    """Return a function that runs an episode again, given its index and where its video goes."""

    def replay(index: int, video: str | os.PathLike[str] | None) -> Replayed:
        settings = settings_of(index)
        with (
            filmed(env, settings.env_kwargs, video) as filmed_env,
            EvaluationCollector.from_settings(filmed_env, policy, settings) as again,
        ):
            set_up(again)
            again.tell(False)  # what runs first on a new env is compared with its record
            (finished,) = again.run(keep_trajectories=True)
            manifest = {**describe(again), **known_of(again)}
        if finished.data is None:
            raise RaisedAgainError(
                f"the env raised in episode {index} again, at every try: "
                f"{type(again.error).__name__}: {again.error}"
            ) from again.error
        return Replayed(finished.record, finished.data, finished.steps, manifest)

    return replay


_VIDEOS = (".mp4", ".mkv", ".mov")


class _Film(RenderCollection[Any, Any]):
    """Takes the pictures of one episode, up to the step or the reset that raises."""

    def reset(self, **how: Any) -> Any:
        self.frame_list = []
        return super().reset(**how)


def _rendered(env: str | Callable[..., Any], **kwargs: Any) -> Any:
    """Make an env, which renders to arrays if it is one of an id."""
    if isinstance(env, str):
        return make_by_id(env, **{"render_mode": "rgb_array", **kwargs})
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
    films: list[_Film] = []

    def film(inner: Any) -> gym.Env[Any, Any]:
        if not isinstance(inner, gym.Env) or inner.render_mode != "rgb_array":
            inner.close()
            raise ValueError(
                f"expected an env with render_mode='rgb_array' to film, got {inner}; have it made "
                "so (env_kwargs)"
            )
        films.append(_Film(inner))
        return films[-1]

    if isinstance(env, RequestedEnv):
        yield replace(env, env=partial(_rendered, env.env), outermost=film)
    else:
        yield lambda **kwargs: film(_rendered(env, **kwargs))
    # An env that raised was made again, and may have no picture.
    last = next((one for one in reversed(films) if one.frame_list), None)
    if last is None:
        return
    pictures = [np.ascontiguousarray(picture, dtype=np.uint8) for picture in last.frame_list]
    height, width = pictures[0].shape[:2]
    rate = float(last.metadata.get("render_fps", 30))
    # Video players need even heights and widths.
    writer = writing.write_frames(
        str(path), (width, height), fps=rate, macro_block_size=2, ffmpeg_log_level="error"
    )
    for picture in (None, *pictures):
        writer.send(picture)
    writer.close()
