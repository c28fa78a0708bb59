"""Running episodes again: by their policy, and filmed; or by their actions, for an audit."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RenderCollection
from tensordict import TensorDict
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tdcollect.display import count_text, visible
from tdcollect.envs.process.worker import make_by_id
from tdcollect.envs.traits import of_kind
from tdcollect.evaluation import ledger, step_files
from tdcollect.evaluation.episodes import data as kept
from tdcollect.evaluation.episodes.agents import KeptActions
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.ledger import BATCHES, METRICS, Episode, manifest_entry, options_by_index
from tdcollect.evaluation.manifest import describe, known_of, subject
from tdcollect.evaluation.requested import RequestedEnv
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.files import check_no_links
from tdcollect.packages import extra_module


def settings_of(
    manifest: Mapping[str, Any], episodes: Sequence[Episode], most: float = math.inf, **how: Any
) -> EvaluationSettings:
    """Return the settings that run episodes of an evaluation again, ``most`` steps of each at most.

    Of metrics, those of infos: a function is not in the manifest.
    """
    named = (manifest.get(METRICS) or {}).items()
    metrics = {name: text for name, text in named if isinstance(text, str)}
    options = options_by_index(manifest)
    seeds = {episode.index: episode.env_seed for episode in episodes}
    return EvaluationSettings(
        [*seeds],
        manifest["seeds"]["root"],
        env_seeds=None if BATCHES in manifest else seeds,
        exploration_type=ExplorationType[manifest["policy"]["exploration"].upper()],
        max_episode_steps=min(manifest["max_episode_steps"] or math.inf, most),  # as it did end
        reward_keys=manifest_entry(manifest, "returns.rewards"),
        episodes_per_slot=manifest_entry(manifest, f"{BATCHES}.episodes_per_slot"),
        metrics=metrics or None,
        episode_options={index: options[index] for index in seeds} if options else None,
        inference_batch_size=manifest["inference_batch_size"],
        inference_threads=manifest["inference_threads"],
        eval_mode=manifest["policy"].get("mode") == "eval",
        **how,
    )


class Replayed(NamedTuple):
    """An episode that ran again: its record, data ``[L]`` if they are kept, steps, and manifest."""

    record: Episode
    data: TensorDict | None
    steps: kept.Steps | None
    manifest: dict[str, Any]

    def unlike(self, recorded: Episode) -> list[tuple[str, Any, Any]]:
        """Return the differences of a record, but for metrics whose functions were not there."""
        if recorded.metrics is not None:
            there = {name: recorded.metrics.get(name) for name in self.record.metrics or ()}
            recorded = replace(recorded, metrics=there or None)
        return ledger.record_differences(recorded, self.record)

    def told(
        self, recorded: Episode, first: kept.StepDifference | None, is_wrong: bool = True
    ) -> str:
        """Say how it differs from a record, given the first difference of its steps."""
        unlike = self.unlike(recorded)
        how = "; ".join(f"{name} is {now!r}, in the ledger {was!r}" for name, was, now in unlike)
        says = (
            "is not what the ledger says" if is_wrong else "ends as in the ledger, up to rounding"
        )
        differs = f"episode {recorded.index} {says}: {how}. "
        if first is not None:
            differs += f"The first difference, the ledger's value before today's: {first}. "
        if recorded.digest == self.record.digest:
            differs += "Its data are the same to the bit: the ledger was altered. "
        return differs

    def changed(self, manifest: Mapping[str, Any], entries: Sequence[str]) -> str:
        """Say what has changed since a manifest, in some entries."""
        then, now = ({n: of[n] for n in entries if n in of} for of in (manifest, self.manifest))
        changed = [f"{n} was {a!r} and is {b!r}" for n, a, b in ledger.differences(then, now)]
        return f"What has changed: {'; '.join(changed) or 'nothing that the manifest holds'}"


class RaisedAgainError(RuntimeError):
    """The env raised at every try, in an episode that ran again."""


Replay = Callable[..., list[Replayed]]
"""Runs episodes again, given their indices, and where a video goes."""


def run_again(
    env: str | Callable[..., Any] | EnvBase,
    policy: Any,
    settings_of: Callable[[Sequence[int]], EvaluationSettings],
    indices: Sequence[int],
    video: str | os.PathLike[str] | None = None,
    keep_data: bool = True,
    set_up: Callable[[EvaluationCollector], None] = lambda again: None,
) -> list[Replayed]:
    """Run episodes again, given their indices and where a video goes.

    With ``keep_data=False``, one whose env raises again is among them, without steps.
    """
    settings = settings_of(indices)
    with (
        filmed(env, settings.env_kwargs, video) as filmed_env,
        EvaluationCollector.from_settings(filmed_env, policy, settings) as again,
    ):
        set_up(again)
        # What runs first on a new env is compared with its record.
        again.tell(bool(settings.fresh_envs))
        ended = [*again.run(keep_trajectories=keep_data, keep_steps=True)]
        manifest = {**describe(again), **known_of(again)}
    if keep_data and ended[0].data is None:
        raise RaisedAgainError(
            f"the env raised in episode {ended[0].record.index} again, at every try: "
            f"{type(again.error).__name__}: {again.error}"
        ) from again.error
    return [Replayed(one.record, one.data, one.steps, manifest) for one in ended]


EQUAL, FALSE = "equal to the bit", "false"
CLOSE = "as by rounding, with the same outcome"
APART = "as by rounding at first, with another outcome: it cannot be told"
_ROUNDING = 1e-4  # of a value: a difference that rounding may begin with
_SAME = ("wrappers", "added_wrappers", "observation_space", "action_space")
_TOLD = ("env", BATCHES, "versions", "platform", ledger.PROCESS)


@dataclass(frozen=True)
class Audit:
    """The result of an audit of an evaluation; print it to see it.

    Attributes:
        directory: the directory of the evaluation.
        verdicts: what it says of each episode that ran again, by index.
        bound: at 95 %, the most that the share of episodes with another outcome can be.
        texts: it all in words; or why nothing was audited.
    """

    directory: Path
    texts: tuple[str, ...]
    verdicts: Mapping[int, str] = field(default_factory=dict)
    bound: float = 1.0

    @property
    def wrong(self) -> list[int]:
        """The episodes whose outcome is not that of the ledger."""
        return [index for index, verdict in self.verdicts.items() if verdict in (APART, FALSE)]

    def __str__(self) -> str:
        return "\n  ".join(map(visible, (f"{self.directory}: {self.texts[0]}", *self.texts[1:])))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain dicts, lists, strings and numbers, for JSON."""
        return asdict(self)


def audited(root: Path, env: Any, sample: int | None, seed: int) -> Audit:
    """Audit one evaluation; see :func:`tdcollect.audit`."""
    files = ledger.read_directory(root)
    for problem in step_files.altered(files):
        raise ValueError(str(problem))
    manifest, batches = files.manifest, ledger.Batches.of(files.manifest)
    size = 1 if batches is None else batches.size
    records = {record.index: record for record in files.episodes if record.completed}
    units = sorted({index // size for index in records})
    count = len(units) if sample is None else min(len(units), -(-sample // size))
    drawn = {*np.random.default_rng(seed).choice(units, count, replace=False).tolist()}
    indices = [index for index in records if index // size in drawn]
    steps = step_files.read_steps(root, indices)
    if files.last is None or len(steps) < len(indices) or not indices:
        raise ValueError(
            f"expected a finished evaluation with the steps of its episodes, got {root} without; "
            "only the policy can run them again: tdcollect replay"
        )
    policy = KeptActions({records[index].policy_seed: steps[index] for index in indices})
    terms, kwargs = _Terms(manifest, policy, env is None), manifest["env"].get("kwargs") or {}
    lacking = any(isinstance(value, dict) and ledger.OBJECT in value for value in kwargs.values())
    ended = run_again(
        _own_env(manifest["env"]["id"], lacking) if env is None else env,
        policy,
        lambda these: settings_of(
            manifest,
            [records[index] for index in these],
            max(map(len, steps.values())) + 1,  # one that has no more actions ends there
            env_kwargs=None if lacking or isinstance(env, EnvBase) else kwargs or None,
            fresh_envs=manifest.get(ledger.FRESH_ENVS),
        ),
        indices,
        keep_data=False,
        set_up=terms.set_up,
    )
    verdicts, texts = dict[int, str](), list[str]()
    for again in sorted(ended, key=lambda one: one.record.index):
        index = again.record.index
        verdicts[index], first = terms.verdict(records[index], steps[index], again)
        if verdicts[index] != EQUAL:
            told = again.told(records[index], first, verdicts[index] != CLOSE)
            texts.append(f"{verdicts[index]}: {told}")
    wrong = {index // size for index, verdict in verdicts.items() if verdict in (APART, FALSE)}
    bound = _bound(len(units), count, len(wrong))
    equal = sum(verdict == EQUAL for verdict in verdicts.values())
    head = (
        f"{count_text(len(verdicts), 'episode')} of {len(records)} ran again by their actions "
        f"(audit seed {seed}), {equal} equal to the bit; at most {bound:.1%} of all are not what "
        "the ledger says (exact, 95 %)"
    )
    texts += [ended[0].changed(manifest, _TOLD), *terms.left_out]
    return Audit(root, (head, *texts), verdicts, bound)


def _own_env(name: str, lacking: bool) -> str:
    """Return an env of gymnasium's own, which whoever audits need not name."""
    spec = gym.registry.get(name)
    if spec is None or lacking or not str(spec.entry_point).startswith("gymnasium.envs."):
        why = "has arguments that JSON lacks" if lacking else "is not gymnasium's own"
        raise ValueError(f"expected --env ENV (env=), as {name} {why}, got none")
    return name


def _bound(units: int, drawn: int, wrong: int) -> float:
    """Return the largest share of wrong units that gives so few among those drawn in 5 %."""
    cdf = extra_module("scipy.stats", "an audit").hypergeom.cdf
    counts = range(wrong, units - drawn + wrong + 1)
    is_more = bisect_left(counts, True, key=lambda n: bool(cdf(wrong, units, n, drawn) <= 0.05))
    return counts[is_more - 1] / units


def _are_near(then: Any, now: Any) -> bool:
    are_floats = isinstance(then, float) and isinstance(now, float)
    return are_floats and math.isclose(then, now, rel_tol=_ROUNDING)


class _Terms:
    """The terms of an audit: it compares what the env decides.

    Under the transforms that it had, that is all. Without, it gets the actions that it got below
    them, and decides how episodes end, and the rewards unless a transform may change them.
    """

    def __init__(self, manifest: Mapping[str, Any], policy: KeptActions, is_own: bool):
        self._manifest, self._policy, self._is_own = manifest, policy, is_own
        self.left_out: list[str] = []

    def set_up(self, again: EvaluationCollector) -> None:
        """Refuse another env, and choose the actions that it gets."""
        now, then = subject(again), self._manifest
        has, had = now["env"]["transforms"], then["env"].get("transforms") or []
        named = {text.partition("(")[0] for text in had}
        written = "TensorDictPrimer" in named or "overwritten" in then["entries"]  # by the policy
        self._whole = whole = has == had and not written
        names = _SAME if self._is_own else _SAME[-1:]  # a wrapper of its own may be named
        own = {name: now["env"].get(name) for name in names}
        unlike = [name for name, value in own.items() if then["env"].get(name, value) != value]
        if unlike or (has and not whole) or again.batches != ledger.Batches.of(then):
            raise ValueError(
                f"expected --env ENV (env=), the env of then under the transforms {had} or none, "
                f"got {again.base.name} under {has}, with other {unlike or 'transforms or slots'}"
            )
        kind = kept.ENV_ACTION if had and not whole else kept.ACTION
        self._policy.fields = {key: kept.field_of(kind, key) for key in again.env.action_keys}
        self._kinds, self._untold = (kept.OBSERVATION, kept.REWARD)[not whole :], set[str]()
        if not whole or now["entries"] != then["entries"]:
            self._untold.add("digest")
        if not whole and named & {one.__name__ for one in of_kind("scalar")}:
            self._kinds, self._untold = (), {"digest", "return", "group_returns"}
        if not whole:
            rewards = "" if self._kinds else " and rewards"
            self.left_out.append(f"Without the transforms, no observations{rewards} are compared.")

    def verdict(
        self, recorded: Episode, steps: kept.Steps, again: Replayed
    ) -> tuple[str, kept.StepDifference | None]:
        """Return what there is to say of an episode, and the first difference of its steps."""
        goes_on = (again.record.length or 0) > (recorded.length or 0)
        cut = not self._whole and recorded.truncated and goes_on  # a transform may have ended it
        unlike = [] if cut else again.unlike(recorded)
        unlike = [one for one in unlike if one[0].partition(".")[0] not in self._untold]
        first = None
        if again.steps is not None and (self._untold or recorded.digest != again.record.digest):
            common = {*(again.steps.dtype.names or ())}.intersection(steps.dtype.names or ())
            if names := sorted(name for name in common if name.startswith(self._kinds)):
                first = kept.first_difference(steps[names], again.steps[names], bool(cut))
        told = [one[1:] for one in unlike if one[0] != "digest"]
        if first is None:
            return FALSE if told else CLOSE if unlike else EQUAL, first
        if first.size > _ROUNDING:
            return FALSE, first
        return CLOSE if all(_are_near(*pair) for pair in told) else APART, first


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
