"""Named makers of envs under transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl import envs as E
from torchrl.data import Bounded, Unbounded
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect.envs import EnvAction

from .envs import ENVS


class RunningSum(E.Transform):
    """A user's transform: adds up the observations of each episode, under a new name."""

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_reset", None) if tensordict is not None else None
        observation = reset["observation"]
        previous = tensordict.get("sum", None) if tensordict is not None else None
        if mask is None or previous is None:
            return reset.set("sum", observation.clone())
        return reset.set("sum", torch.where(mask, observation, previous))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("sum", tensordict["sum"] + next_tensordict["observation"])

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        spec = observation_spec["observation"]
        observation_spec["sum"] = Unbounded(spec.shape, dtype=spec.dtype)
        return observation_spec


class Noise(E.ObservationTransform):
    """A user's transform: draws from torch's generator, and counts its calls."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return obs + torch.randn(obs.shape) * 0.01 + self.calls % 3

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._call(reset)


class ScaledNorm(E.ObservationNorm):
    """A subclass of a known transform that does something else."""

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return super()._apply_transform(obs) * 3


class NegatedAction(E.Transform):
    """Changes the env's action: its inverse flips the one-hot action."""

    def __init__(self) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

    def _inv_apply_transform(self, action: torch.Tensor) -> torch.Tensor:
        return action.flip(-1)


class EarlyEnd(E.Transform):
    """Ends an episode if the first observation entry is above a bound."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        stop = next_tensordict["observation"][..., :1] > 0.1
        next_tensordict["truncated"] = next_tensordict["truncated"] | stop
        next_tensordict["done"] = next_tensordict["done"] | stop
        return next_tensordict


def norm(kind: Any = E.ObservationNorm) -> E.Transform:
    return kind(loc=0.1, scale=2.0, in_keys=["observation"])


def books() -> E.Compose:
    """The usual four."""
    return E.Compose(norm(), E.RewardSum(), E.StepCounter(), E.InitTracker())


def dozen() -> E.Compose:
    return E.Compose(
        E.DoubleToFloat(),
        norm(),
        E.RewardScaling(loc=0.5, scale=2.0),
        E.RewardClipping(-1, 1.5),
        E.RewardSum(),
        E.StepCounter(max_steps=9),
        E.InitTracker(),
        E.CatFrames(3, dim=-1, in_keys=["observation"], out_keys=["stacked"]),
        E.UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["column"]),
        E.DTypeCastTransform(torch.float32, torch.float64, in_keys=["stacked"]),
        E.SignTransform(in_keys=["reward"]),
        RunningSum(),
    )


def pixels() -> E.Compose:
    return E.Compose(
        E.ToTensorImage(),
        E.GrayScale(in_keys=["pixels"]),
        E.CatFrames(2, dim=-3, in_keys=["pixels"]),
        E.FlattenObservation(-3, -1, in_keys=["pixels"], out_keys=["flat"]),
        E.ExcludeTransform("pixels"),
    )


def nested() -> E.Compose:
    numbers = [("inner", "flag"), "position"]
    return E.Compose(
        E.DTypeCastTransform(torch.int64, torch.float32, in_keys=[("inner", "flag")]),
        E.CatTensors(in_keys=numbers, out_key="vector", dim=-1, del_keys=False),
    )


def norm_nested() -> E.Transform:
    return E.ObservationNorm(0.5, 3.0, in_keys=["position"], out_keys=[("inner", "scaled")])


def primer(random: bool) -> E.TensorDictPrimer:
    default = {} if random else {"default_value": 0.5}
    spec = Bounded(0.0, 1.0, (2,))
    return E.TensorDictPrimer(memory=spec, random=random, expand_specs=True, **default)


TRANSFORMS: dict[str, tuple[str, Callable[[], E.Transform | None]]] = {
    "none": ("cartpole", lambda: None),
    "empty": ("cartpole", E.Compose),
    "books": ("cartpole", books),
    "books-unbatched": ("cartpole-unbatched", books),
    "books-one-step-episodes": ("toy-one-step-episodes", books),
    "books-toy": ("toy", books),
    "books-same-step": ("cartpole-same-step", books),
    "books-envpool": ("cartpole-envpool", books),
    "books-native": ("cartpole-books", norm),
    "books-serial-env": ("torchrl-serial", books),
    "books-gym": ("torchrl-gym", books),
    "dozen": ("cartpole", dozen),
    "dozen-toy": ("toy", dozen),
    "norm": ("cartpole", norm),
    "norm-standard": (
        "cartpole",
        lambda: E.ObservationNorm(
            loc=0.1, scale=2.0, in_keys=["observation"], standard_normal=True
        ),
    ),
    "norm-out-key": (
        "cartpole",
        lambda: E.ObservationNorm(0.1, 2.0, in_keys=["observation"], out_keys=["normed"]),
    ),
    "norm-vector": (
        "cartpole",
        lambda: E.ObservationNorm(torch.arange(4.0), torch.ones(4) * 3, in_keys=["observation"]),
    ),
    "norm-subclass": ("cartpole", partial(norm, ScaledNorm)),
    "norm-twice": ("cartpole", lambda: E.Compose(norm(), E.Compose(norm()))),
    "reward-sum": ("cartpole", E.RewardSum),
    "reward-sum-before-scaling": (
        "pendulum",
        lambda: E.Compose(E.RewardSum(), E.RewardScaling(1.0, 0.1), E.RewardClipping(-1, 1)),
    ),
    "reward-sum-after-scaling": (
        "pendulum",
        lambda: E.Compose(E.RewardScaling(1.0, 0.1), E.RewardClipping(-1, 1), E.RewardSum()),
    ),
    "reward-sum-named": ("toy", lambda: E.RewardSum(in_keys=["reward"], out_keys=["total"])),
    "step-counter": ("cartpole", E.StepCounter),
    "step-counter-limit": ("cartpole", lambda: E.StepCounter(max_steps=4)),
    "step-counter-limit-one": ("cartpole", lambda: E.StepCounter(max_steps=1)),
    "step-counter-no-done": ("toy", lambda: E.StepCounter(max_steps=4, update_done=False)),
    "step-counter-named": ("toy", lambda: E.StepCounter(step_count_key="steps")),
    "two-step-counters": (
        "toy",
        lambda: E.Compose(E.StepCounter(5), E.StepCounter(3, step_count_key="other")),
    ),
    "init-tracker": ("cartpole", E.InitTracker),
    "init-tracker-named": ("toy", lambda: E.InitTracker(init_key="first")),
    "trajectory-counter": ("toy", E.TrajCounter),
    "double-to-float": ("half-cheetah", E.DoubleToFloat),
    "double-to-float-named": (
        "half-cheetah",
        lambda: E.DoubleToFloat(in_keys=["observation"], out_keys=["single"]),
    ),
    "double-to-float-norm": ("half-cheetah", lambda: E.Compose(E.DoubleToFloat(), norm())),
    "cast": (
        "toy",
        lambda: E.DTypeCastTransform(torch.float32, torch.float16, in_keys=["observation"]),
    ),
    "cat-tensors": ("toy-nested", nested),
    "norm-nested": ("toy-nested", norm_nested),
    "cat-frames": ("cartpole", lambda: E.CatFrames(3, dim=-1, in_keys=["observation"])),
    "cat-frames-constant": (
        "toy-unbatched",
        lambda: E.CatFrames(3, dim=-1, in_keys=["observation"], padding="constant"),
    ),
    "pixels": ("toy-pixels", pixels),
    "to-tensor-image": ("toy-pixels", E.ToTensorImage),
    "permute": (
        "toy-pixels",
        lambda: E.PermuteTransform((-1, -3, -2), in_keys=["pixels"]),
    ),
    "max-pool": ("cartpole", lambda: E.TimeMaxPool(in_keys=["observation"], T=3)),
    "unsqueeze": ("cartpole", lambda: E.UnsqueezeTransform(-1, in_keys=["observation"])),
    "rename": (
        "cartpole",
        lambda: E.RenameTransform(in_keys=["observation"], out_keys=[("state", "vector")]),
    ),
    "rename-copy": (
        "cartpole",
        lambda: E.RenameTransform(["observation"], ["copy"], create_copy=True),
    ),
    "rename-reward": ("cartpole", lambda: E.RenameTransform(["reward"], [("money", "now")])),
    "rename-done": ("cartpole", lambda: E.RenameTransform(["done"], ["over"])),
    "exclude": ("toy-nested", lambda: E.ExcludeTransform(("inner", "grid"))),
    "select": ("toy-nested", lambda: E.SelectTransform("position")),
    "vec-norm": ("cartpole", lambda: E.VecNorm(in_keys=["observation", "reward"])),
    "vec-norm-2": ("cartpole", lambda: E.VecNormV2(in_keys=["observation", "reward"])),
    "reward-scaling": ("pendulum", lambda: E.RewardScaling(8.0, 0.1)),
    "reward-clipping": ("pendulum", lambda: E.RewardClipping(-3, 3)),
    "reward-sign": ("pendulum", lambda: E.SignTransform(in_keys=["reward"])),
    "binarize": ("toy", E.BinarizeReward),
    "target-return": ("cartpole", lambda: E.TargetReturn(10.0)),
    "clip": ("toy", lambda: E.ClipTransform(in_keys=["observation"], low=-0.5, high=0.5)),
    "action-scaling": ("pendulum", E.ActionScaling),
    "action-scaling-unbatched": ("pendulum-unbatched", E.ActionScaling),
    "action-clip": (
        "pendulum",
        lambda: E.ClipTransform(in_keys_inv=["action"], low=-0.5, high=0.5),
    ),
    "env-action": ("pendulum", lambda: E.Compose(EnvAction(), E.ActionScaling())),
    "env-action-unbatched": ("pendulum-unbatched", EnvAction),
    "env-action-one-hot": ("toy", lambda: E.Compose(EnvAction(), norm())),
    "env-actions": ("toy-dict-action", EnvAction),
    "policy-version": ("toy", PolicyVersion),
    "random-truncation": (
        "cartpole",
        lambda: E.Compose(E.StepCounter(), E.RandomTruncationTransform(2, 6)),
    ),
    "frame-skip": ("cartpole", lambda: E.FrameSkipTransform(2)),
    "noop-reset": ("torchrl-gym", lambda: E.NoopResetEnv(3)),
    "primer": ("cartpole", partial(primer, False)),
    "primer-random": ("cartpole", partial(primer, True)),
    "finite-check": ("cartpole", E.FiniteTensorDictCheck),
    "running-sum": ("toy", RunningSum),
    "running-sum-under-books": ("toy", lambda: E.Compose(RunningSum(), books())),
    "running-sum-over-books": ("toy", lambda: E.Compose(books(), RunningSum())),
    "noise": ("cartpole", Noise),
    "noise-over-norm": ("cartpole", lambda: E.Compose(norm(), Noise(), E.RewardSum())),
    "negated-action": ("cartpole", NegatedAction),
    "early-end": ("cartpole", EarlyEnd),
    "early-end-under-books": ("cartpole", lambda: E.Compose(EarlyEnd(), books())),
    "early-end-over-books": ("cartpole", lambda: E.Compose(books(), EarlyEnd())),
}


def make(name: str) -> E.EnvBase:
    """The env of a named transform."""
    env, transform = TRANSFORMS[name]
    return E.TransformedEnv(ENVS[env](), transform())
