"""Kept data of gymnasium envs as a data set of Minari, with all that it takes to use it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from tdcollect import check, keys
from tdcollect.envs.spaces import SpaceCodec, key_of
from tdcollect.envs.traits import innermost
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.ledger import Episode, differences, differences_text, options_by_index
from tdcollect.evaluation.manifest import described_env
from tdcollect.evaluation.requested import one_slot
from tdcollect.files import replaced
from tdcollect.packages import extra_module
from tdcollect.progress import warn

if TYPE_CHECKING:
    from tdcollect.evaluation.result import EvaluationResult

ABOUT = ("author", "author_email", "code_permalink", "algorithm_name", "description")
"""Entries of a data set that Minari asks for."""
MANIFEST, RECORD = "tdcollect_manifest", "tdcollect_record"
"""Entries of the data set, and of each episode, with what tdcollect has of them."""


def write_dataset(
    result: EvaluationResult,
    dataset_id: str,
    env: Any,
    env_kwargs: dict[str, Any] | None,
    overwrite: bool,
    about: Mapping[str, Any],
) -> Any:
    """Write a data set of Minari; see :meth:`tdcollect.EvaluationResult.to_minari`."""
    for name in ("minari", "h5py"):
        extra_module(name, "to_minari")
    import minari
    from minari.dataset.minari_storage import MinariStorage, is_image_space
    from minari.namespace import create_namespace, list_local_namespaces

    check.only_keys(about, ABOUT, "to_minari")
    namespace, folder = _place(dataset_id, overwrite)
    records = [episode for episode in result.episodes if episode.completed]
    for record in records[:1]:  # before an env is made: data are kept of all, or of none
        result.trajectory(record.index)
    observation, action, spec = _spaces(result.manifest, env, env_kwargs)
    how: dict[str, Any] = {"observation_space": observation.space, "action_space": action.space}
    if "jpeg_encoding" in inspect.signature(MinariStorage.new).parameters:
        how["jpeg_encoding"] = False
    elif any(is_image_space(leaf.space) for leaf in observation.leaves):
        raise ImportError(
            f"expected minari from 0.5.4 on, got {minari.__version__}, which changes pictures: it "
            "stores them as JPEG; do: pip install 'minari>=0.5.4'"
        )
    told = {name: value for name, value in about.items() if value}
    for name in {"author", "author_email"} & told.keys():  # sets in Minari
        told[name] = {told[name]} if isinstance(told[name], str) else {*told[name]}
    told = {"algorithm_name": result.manifest["policy"]["class"], **told}
    told |= {"dataset_id": dataset_id, "minari_version": minari.__version__}
    if namespace is not None and namespace not in list_local_namespaces():
        create_namespace(namespace)
    with replaced(folder) as new:
        made = MinariStorage.new(new / "data", env_spec=spec, **how)
        made.update_metadata({**told, MANIFEST: result.manifest})
        made.update_episodes(_buffer(result, one, observation, action) for one in records)
        made.update_episode_metadata([{RECORD: one.to_json()} for one in records])
    return minari.load_dataset(dataset_id)


def _place(dataset_id: str, overwrite: bool) -> Any:
    """Return the namespace of a data set, or None, and its folder; refuse one that is there."""
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    try:
        namespace, *_ = parse_dataset_id(dataset_id)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected an id as Minari has it, such as 'cartpole/lean-v0', got {dataset_id!r}"
        ) from error
    folder = get_dataset_path(dataset_id).absolute()  # a relative one is too much for its storage
    if folder.exists() and not overwrite:
        raise ValueError(
            f"expected the id of a new data set, got {dataset_id}, which is in {folder}; choose "
            "another version, or replace it with overwrite=True (--overwrite)"
        )
    return namespace, folder


def _spaces(
    manifest: Mapping[str, Any], env: Any, env_kwargs: dict[str, Any] | None
) -> tuple[SpaceCodec, SpaceCodec, EnvSpec | None]:
    """Return the codecs of an env's spaces, and its spec; it must be that of the manifest."""
    asked = manifest["env"]
    if asked.get("transforms"):
        raise ValueError(
            f"expected an env without transforms, got {', '.join(asked['transforms'])}: the data "
            "are those after them, and not of the env's spaces; evaluate without them"
        )
    if env is None and (asked["id"] not in gym.registry or asked.get("kwargs")):
        raise ValueError(
            f"expected env (--env) as the evaluation took it, for the spaces of {asked['id']}: "
            "without it, only a registered env without arguments is made"
        )
    with one_slot(asked["id"] if env is None else env, env_kwargs, None) as made:
        base = innermost(made)
        if not isinstance(base, GymnasiumEnv):
            raise TypeError(f"expected a gymnasium env, as Minari has its spaces, got {base!r}")
        found = described_env(made)
        backend, spec = base.stepper.backend, copy.deepcopy(base.env_spec)
    if unlike := differences({name: asked.get(name) for name in found}, found):
        text = differences_text(unlike, "in the manifest")
        raise ValueError(f"expected the env that was evaluated, got another one: {text}")
    try:
        if spec is not None:
            limits = (spec.max_episode_steps, manifest["max_episode_steps"])
            spec.max_episode_steps = min((n for n in limits if n is not None), default=None)
            spec.to_json()
    except (TypeError, ValueError) as error:
        warn(f"the data set has no env spec, so that it cannot make its env: {error}")
        spec = None
    return backend.observation, backend.action, spec


def _buffer(
    result: EvaluationResult, record: Episode, observation: SpaceCodec, action: SpaceCodec
) -> Any:
    """Return an episode as Minari takes it."""
    from minari.data_collector import EpisodeBuffer

    data = result.trajectory(record.index)
    there, following = {*data.keys(True, True)}, data[keys.NEXT]
    own = {*map(key_of, observation.paths), keys.REWARD, *keys.FLAGS}
    infos = [key for key in following.keys(True, True) if key not in own and key in there]
    flags = (keys.REWARD, keys.TERMINATED, keys.TRUNCATED)
    rewards, terminations, truncations = (np.asarray(following[key])[:, 0] for key in flags)
    return EpisodeBuffer(
        seed=record.env_seed,
        options=options_by_index(result.manifest).get(record.index),
        observations=_read(observation, partial(_with_last, data)),
        actions=_read(action, lambda key: np.asarray(data[key])),
        rewards=rewards,
        terminations=terminations,
        truncations=truncations,
        infos=keys.by_name((key, _with_last(data, key)) for key in infos) or None,
    )


def _with_last(data: Any, key: keys.Key) -> np.ndarray[Any, Any]:
    """Return an entry ``[T + 1]``: before each step, and after the last one."""
    return np.concatenate([np.asarray(data[key]), np.asarray(data[keys.under_next(key)])[-1:]])


def _read(codec: SpaceCodec, rows_of: Callable[[Any], np.ndarray[Any, Any]]) -> Any:
    """Return the entries of a space as gymnasium has its values, a row per step."""
    entries = [rows_of(key_of(path)) for path in codec.paths]
    if [rows.shape[1:] for rows in entries] != [leaf.shape for leaf in codec.leaves]:
        raise ValueError(
            f"expected entries {codec.paths} of the shapes that the env has, got others; pass env "
            "as the evaluation took it"
        )
    return codec.read(entries)
