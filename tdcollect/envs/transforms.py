"""The transforms of an env: taken apart, and those that treat every row by itself."""

from __future__ import annotations

from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T

ELEMENTWISE = (
    T.BinarizeReward,
    T.CatTensors,
    T.CenterCrop,
    T.ClipTransform,
    T.Crop,
    T.DTypeCastTransform,
    T.DoubleToFloat,
    T.FlattenObservation,
    T.GrayScale,
    T.LineariseRewards,
    T.ObservationNorm,
    T.PermuteTransform,
    T.Resize,
    T.RewardClipping,
    T.RewardScaling,
    T.SignTransform,
    T.SqueezeTransform,
    T.SuccessReward,
    T.ToTensorImage,
    T.UnsqueezeTransform,
)
"""Stateless transforms, which treat every row by itself."""


LIFTED = (
    *(kind for kind in ELEMENTWISE if kind is not T.Resize),
    T.ExcludeTransform,
    T.InitTracker,
    T.RenameTransform,
    T.RewardSum,
    T.SelectTransform,
    T.StepCounter,
    T.TensorDictPrimer,
)
"""Transforms inside of single envs that can run once for a batch of these.

``Resize`` is left out: whether it rounds alike in a batch is for torchvision to say.
"""


HOLD_EPISODES = (T.CatFrames, T.TimeMaxPool)
"""Transforms whose buffers hold the latest steps, and nothing that was learned."""


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
    found: list[T.Transform] = []
    while isinstance(env, TransformedEnv):
        found = [*flat_transforms(env.transform), *found]
        env = env.base_env
    return found


def transforms_of(env: EnvBase) -> list[T.Transform]:
    """The transforms of an env, innermost first; a ``Compose`` is taken apart."""
    return flat_transforms(env.transform) if type(env) is TransformedEnv else []


def flat_transforms(transform: T.Transform) -> list[T.Transform]:
    """Transforms, innermost first; a ``Compose`` is taken apart."""
    if type(transform) is T.Compose:
        return [part for child in transform for part in flat_transforms(child)]
    return [transform]


def is_lifted(transform: T.Transform) -> bool:
    """Tell whether a transform gives the same for a batch as for each row."""
    kind = type(transform)
    if kind not in LIFTED or _counts_axes_from_the_front(transform):
        return False
    if kind is T.CatTensors:
        return transform.dim < 0 and not transform.unsqueeze_if_oor
    if kind is T.ToTensorImage:
        return not transform.unsqueeze
    if kind is T.RewardSum:
        return not transform.reward_spec
    if kind is T.TensorDictPrimer:
        values = transform.default_value
        return not (
            transform.random
            or transform.single_default_value
            or transform.call_before_env_reset
            or any(callable(value) for value in dict(values.items()).values())
        )
    return True


def _counts_axes_from_the_front(transform: T.Transform) -> bool:
    """Tell whether an axis of one env would be another one of a batch."""
    axes = [getattr(transform, name, -1) for name in ("dim", "first_dim", "last_dim")]
    axes += getattr(transform, "dims", ())
    return any(axis >= 0 for axis in axes)
