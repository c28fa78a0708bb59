"""TorchRL's transforms: what is known of each, by its exact type; and our own, ``EnvAction``."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect.keys import Key, beside, name_of


class NotKnown(Exception):
    """Something of TorchRL's is not known to the letter, and its own code must run.

    Args:
        *reasons: all of them, each with the line to change.
    """

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class EnvAction(Transform):
    """Keep the action that the env was given, after transforms changed the policy's.

    A transform that scales, clips or decodes actions (``ActionScaling``, ``ClipTransform``) leaves
    the policy's own in the batch. This one, put before it, adds the env's action under
    ``("next", "env_action")``, of the env's shape and dtype; in the next row it stands at the root,
    zero where an episode begins. Another action's name is prefixed likewise: ``("arm", "turn")``
    becomes ``("arm", "env_turn")``.

    Examples:
        >>> env = TransformedEnv(make_env("Pendulum-v1", 8), EnvAction())
        >>> env = env.append_transform(ActionScaling())  # the policy acts in [-1, 1]
        >>> batch = next(iter(Collector(env, policy, frames_per_batch=1024)))
        >>> batch["action"], batch["next", "env_action"]  # in [-1, 1], in [-2, 2]
    """

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[Key, Key]] | None = None

    @property
    def pairs(self) -> list[tuple[Key, Key]]:
        """The key of each action of the env, and the key under which it is kept."""
        if self._pairs is None:
            if self.parent is None:
                raise RuntimeError("expected an env around this transform: put it in one first")
            keys: list[Key] = self.parent.action_keys
            self._pairs = [(key, beside(key, f"env_{name_of(key)}")) for key in keys]
        return self._pairs

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key, copy in self.pairs:
            next_tensordict.set(copy, tensordict.get(key))
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for key, copy in self.pairs:
            tensordict_reset.set(copy, self._spec(key).zero())
        return tensordict_reset

    def _spec(self, key: Key) -> Unbounded:
        # A zero, with which episodes begin, is no member of a one-hot spec.
        spec = self.parent.full_action_spec[key]
        return Unbounded(spec.shape, dtype=spec.dtype, device=spec.device)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for key, copy in self.pairs:
            if copy in observation_spec.keys(True, True):
                raise ValueError(f"expected no entry {copy!r} in the env: EnvAction writes it")
            observation_spec[copy] = self._spec(key)
        return observation_spec


class Trait(NamedTuple):
    """Facts about a transform's class."""

    elementwise: bool = False  # stateless, and treats every row by itself
    own_code: bool = False  # its own code runs on StepDicts
    by_row: bool = False  # its own code treats every row by itself
    own_pace: bool = False  # its own code gives the same for the same rows, whenever these come
    once: bool = False  # of single envs, it can run once for a batch of these; see runs_once
    draws: bool = False  # it may draw random numbers, or step the env itself
    leaves_reward: bool = False  # unless that is among its out_keys
    scalar: bool = False  # it computes one number from another, in any float dtype
    holds_episode: bool = False  # its buffers hold the latest steps, and nothing that was learned


_OWN_CODE = Trait(own_code=True, leaves_reward=True)
_ROWS_ALONE = _OWN_CODE._replace(by_row=True, own_pace=True)
_ELEMENTWISE = _ROWS_ALONE._replace(elementwise=True, once=True)
_SCALAR = _ELEMENTWISE._replace(scalar=True)
_BOOKKEEPING = Trait(once=True, leaves_reward=True)
_ENTRIES = Trait(once=True)
_LEAVES_REWARD = Trait(leaves_reward=True)

TRAITS: dict[type[T.Transform], Trait] = {
    EnvAction: _LEAVES_REWARD,
    PolicyVersion: _ROWS_ALONE,
    T.ActionDiscretizer: _ROWS_ALONE._replace(draws=True),
    T.ActionMask: _OWN_CODE,
    T.ActionScaling: _LEAVES_REWARD,
    T.BinarizeReward: _SCALAR,
    T.CatFrames: Trait(leaves_reward=True, holds_episode=True),
    T.CatTensors: _ELEMENTWISE,
    T.CenterCrop: _ELEMENTWISE,
    T.ClipTransform: _SCALAR,
    T.Crop: _ELEMENTWISE,
    T.DTypeCastTransform: _ELEMENTWISE,
    T.DeviceCastTransform: Trait(),
    T.DiscreteActionProjection: _ROWS_ALONE,
    T.DoubleToFloat: _ELEMENTWISE,
    T.EndOfLifeTransform: Trait(),
    T.ExcludeTransform: _ENTRIES,
    T.ExpandAs: _OWN_CODE,
    T.FiniteTensorDictCheck: _LEAVES_REWARD,
    T.FlattenAction: _ROWS_ALONE,
    T.FlattenObservation: _ELEMENTWISE,
    T.FrameSkipTransform: Trait(draws=True),
    T.GrayScale: _ELEMENTWISE,
    T.Hash: _OWN_CODE,
    T.InitTracker: _BOOKKEEPING,
    T.LineariseRewards: _ELEMENTWISE,
    T.NoopResetEnv: Trait(draws=True),
    T.ObservationNorm: _SCALAR,
    T.PermuteTransform: _ELEMENTWISE,
    T.RNDTransform: _OWN_CODE,
    T.RandomTruncationTransform: _OWN_CODE._replace(by_row=True, draws=True),
    T.RemoveEmptySpecs: _LEAVES_REWARD,
    T.RenameTransform: _ENTRIES,
    T.Resize: _ELEMENTWISE._replace(once=False),  # does torchvision round alike in a batch?
    T.Reward2GoTransform: Trait(),
    T.RewardClipping: _SCALAR,
    T.RewardScaling: _SCALAR,
    T.RewardSum: _BOOKKEEPING,
    T.SelectTransform: _ENTRIES,
    T.SignTransform: _SCALAR,
    T.SqueezeTransform: _ELEMENTWISE,
    T.Stack: Trait(own_code=True),
    T.StepCounter: _BOOKKEEPING,
    T.SuccessReward: _ELEMENTWISE,
    T.TargetReturn: _OWN_CODE,
    T.TensorDictPrimer: _BOOKKEEPING._replace(draws=True),
    T.TimeMaxPool: _OWN_CODE._replace(holds_episode=True),
    T.Timer: _OWN_CODE,
    T.ToTensorImage: _ELEMENTWISE,
    T.TrajCounter: _OWN_CODE,
    T.UnaryTransform: _OWN_CODE._replace(draws=True),
    T.UnsqueezeTransform: _ELEMENTWISE,
    T.VecNorm: Trait(leaves_reward=True),
    T.VecNormV2: Trait(leaves_reward=True),
    T.gSDENoise: Trait(own_code=True, draws=True),
}
"""The one table of what is known of transforms."""

SINCE_0_15 = {"DoneTransform": _ROWS_ALONE, "LastAction": _LEAVES_REWARD}
TRAITS |= {getattr(T, name): trait for name, trait in SINCE_0_15.items() if hasattr(T, name)}


def traits_of(transform: T.Transform) -> Trait | None:
    return TRAITS.get(type(transform))


def of_kind(name: str) -> tuple[type[T.Transform], ...]:
    return tuple(kind for kind, trait in TRAITS.items() if getattr(trait, name))


def runs_once(transform: T.Transform) -> bool:
    """Return whether a transform of single envs gives the same for a batch as for each row."""
    kind, trait = type(transform), traits_of(transform)
    if trait is None or not trait.once or _counts_axes_from_the_front(transform):
        return False
    if kind is T.CatTensors:
        return transform.dim < 0 and not transform.unsqueeze_if_oor
    if kind is T.ToTensorImage:
        return not transform.unsqueeze
    if kind is T.RewardSum:
        return not transform.reward_spec
    if kind is T.TensorDictPrimer:
        plain = not (transform.single_default_value or transform.call_before_env_reset)
        return plain and not draws_or_calls(transform)
    return True


def draws_or_calls(primer: T.TensorDictPrimer) -> bool:
    """Return whether a primer's values are drawn, or made by functions."""
    return primer.random or any(map(callable, dict(primer.default_value.items()).values()))


def _counts_axes_from_the_front(transform: T.Transform) -> bool:
    """Return whether an axis of one env would be another one of a batch."""
    axes = [getattr(transform, name, -1) for name in ("dim", "first_dim", "last_dim")]
    axes += getattr(transform, "dims", ())
    return any(axis >= 0 for axis in axes)


def leaves_random_numbers_alone(transform: T.Transform) -> bool:
    """Return whether a transform is known to draw no random numbers."""
    if type(transform) is T.TensorDictPrimer:
        return not transform.random
    trait: Any = traits_of(transform)
    return trait is not None and trait.leaves_reward and not trait.draws


def keeps_statistics(transform: T.Transform) -> bool:
    """Return whether a transform's statistics go on with each step, at any number of slots."""
    counts = isinstance(transform, (T.VecNorm, T.VecNormV2, T.RNDTransform))
    return counts and not getattr(transform, "frozen", False)


# ------------------------------------------------------------------------- the transforms of an env


def base_of(env: EnvBase) -> EnvBase:
    """The env itself, without its transforms."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def innermost(env: EnvBase) -> EnvBase:
    """The env itself, below any number of layers of transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def all_transforms_of(env: EnvBase) -> list[T.Transform]:
    """The transforms of all layers of an env, innermost first; subclasses count as layers."""
    transforms: list[T.Transform] = []
    while isinstance(env, TransformedEnv):
        transforms = [*flat_transforms(env.transform), *transforms]
        env = env.base_env
    return transforms


def transforms_of(env: EnvBase) -> list[T.Transform]:
    return flat_transforms(env.transform) if type(env) is TransformedEnv else []


def flat_transforms(transform: T.Transform) -> list[T.Transform]:
    """Transforms, innermost first; a ``Compose`` is taken apart."""
    if type(transform) is T.Compose:
        return [part for child in transform for part in flat_transforms(child)]
    return [transform]
