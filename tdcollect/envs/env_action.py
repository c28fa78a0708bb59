"""A transform that keeps the env's action beside the policy's."""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

Key = str | tuple[str, ...]


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
            self._pairs = [(key, _kept_as(key)) for key in self.parent.action_keys]
        return self._pairs

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key, kept in self.pairs:
            next_tensordict.set(kept, tensordict.get(key))
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for key, kept in self.pairs:
            tensordict_reset.set(kept, self._spec(key).zero())
        return tensordict_reset

    def _spec(self, key: Key) -> Unbounded:
        # A zero, with which episodes begin, is no member of a one-hot spec.
        spec = self.parent.full_action_spec[key]
        return Unbounded(spec.shape, dtype=spec.dtype, device=spec.device)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for key, kept in self.pairs:
            if kept in observation_spec.keys(True, True):
                raise ValueError(f"expected no entry {kept!r} in the env: EnvAction writes it")
            observation_spec[kept] = self._spec(key)
        return observation_spec


def _kept_as(key: Key) -> Key:
    return f"env_{key}" if isinstance(key, str) else (*key[:-1], f"env_{key[-1]}")
