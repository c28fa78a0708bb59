"""Named makers of envs under transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import envs as E
from torchrl import modules as M
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs.llm.transforms import PolicyVersion

from tdcollect.envs import EnvAction

from .envs import ENVS

OBS, R = "observation", "reward"


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


class OneSided(E.Transform):
    """Adds an entry to steps alone, or to resets alone, with its spec."""

    def __init__(self, side: str):
        super().__init__()
        self.side = side

    def _add(self, side: str, entries: TensorDictBase) -> TensorDictBase:
        return entries.set("added", entries[OBS] + 5) if side == self.side else entries

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._add("step", next_tensordict)

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._add("reset", reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        spec = observation_spec[OBS]
        observation_spec["added"] = Unbounded(spec.shape, dtype=spec.dtype)
        return observation_spec


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
        E.RemoveEmptySpecs(),
        E.DTypeCastTransform(torch.int64, torch.float32, in_keys=[("inner", "flag")]),
        E.CatTensors(in_keys=numbers, out_key="vector", dim=-1, del_keys=False),
        E.ObservationNorm(0.5, 3.0, in_keys=["position"], out_keys=[("inner", "scaled")]),
    )


def tensors() -> E.Compose:
    """Maps of single tensors."""
    return E.Compose(
        E.ClipTransform([OBS], low=-0.5, high=0.5),
        E.DeviceCastTransform("cpu", in_keys=[OBS]),
        E.RenameTransform([OBS], ["twin"], create_copy=True),
        E.UnaryTransform(["twin"], ["twin"], fn=lambda value: value**3),
        E.DTypeCastTransform(torch.float32, torch.float16, in_keys=["twin"]),
        E.LineariseRewards([R], weights=[0.5]),
    )


def primer(random: bool) -> E.TensorDictPrimer:
    default = {} if random else {"default_value": 0.5}
    spec = Bounded(0.0, 1.0, (2,))
    return E.TensorDictPrimer(memory=spec, random=random, expand_specs=True, **default)


def renamed(*keys: Any, **options: Any) -> Callable[[], E.Transform]:
    return lambda: E.RenameTransform(*keys, **options)


def frames(count: int, *keys: Any, **options: Any) -> Callable[[], E.Transform]:
    return lambda: E.CatFrames(count, -1, *(keys or [[OBS]]), **options)


def normed(kind: Any, *keys: Any, **options: Any) -> Callable[[], E.Transform]:
    return lambda: kind(*(keys or [[OBS]]), **options)


def composed(*parts: Callable[[], E.Transform]) -> Callable[[], E.Transform]:
    return lambda: E.Compose(*(part() for part in parts))


def begun(kind: Any, **options: Any) -> Any:
    """A transform that has seen some steps of another env."""
    made = kind([OBS], **options)
    env = E.TransformedEnv(ENVS["cartpole"](), made)
    env.set_seed(3)
    torch.manual_seed(3)
    env.rollout(5)
    return made


def shared(kind: Any, **options: Any) -> Callable[[], E.Transform]:
    """Statistics that another transform has begun, in shared memory."""

    def make() -> E.Transform:
        first = begun(kind, **options)
        if kind is E.VecNorm:
            return E.VecNorm([OBS], shared_td=first._td.share_memory_(), lock=first.lock)
        data = TensorDict(loc=first._loc, var=first._var, count=first._count).share_memory_()
        return E.VecNormV2([OBS], shared_data=data, lock=first.lock, **options)

    return make


def rnd() -> E.Transform:
    torch.manual_seed(4)
    nets = {"target_network": nn.Linear(3, 2), "predictor_network": nn.Linear(3, 2)}
    return E.transforms.RNDTransform(**nets, in_keys=[OBS])


def images() -> E.Transform:
    return E.CatFrames(4, -3)


def stack() -> E.Transform:
    return E.Stack([OBS, "twin"], "pair", dim=-1)


def to_cpu() -> E.Transform:
    return E.DeviceCastTransform("cpu", "cpu")


def truncation(**options: float) -> E.Transform:
    return E.Compose(E.StepCounter(), E.RandomTruncationTransform(2, 6, **options), E.InitTracker())


def primed_by_function() -> E.Transform:
    draw = lambda: torch.rand(2)  # noqa: E731
    return E.TensorDictPrimer(memory=Unbounded((2,)), default_value={"memory": draw})


def closed_loop(*parts: Any) -> E.Transform:
    """A controller of these modules takes three steps for each command; the first is a function."""
    reads = TensorDictModule(parts[0], ["command", OBS], ["action" if len(parts) == 1 else "x"])
    command = Composite(command=Bounded(-1, 1, (1,)))
    controller = M.LowLevelController(TensorDictSequential(reads, *parts[1:]), command)
    make = E.ClosedLoopMultiAction.from_env
    return make(ENVS["pendulum"](), controller, steps=3).transform.clone()


def chooses(command: torch.Tensor, observation: torch.Tensor) -> torch.Tensor:
    return torch.cat([command > observation[..., :1], command <= observation[..., :1]], -1).long()


def remembers() -> E.Transform:
    return closed_loop(torch.mul, M.LSTMModule(3, 1, in_key="x", out_key="action"))


Case = tuple[str, Callable[[], Any]]

ISLANDS: dict[str, Case] = {
    "frame-skip-one": ("toy", lambda: E.FrameSkipTransform(1)),
    "frame-skip-unbatched": ("pendulum-unbatched", lambda: E.FrameSkipTransform(2)),
    "frame-skip-in-the-middle": (
        "pendulum",
        composed(E.ActionScaling, frames(2), lambda: E.FrameSkipTransform(2), E.RewardSum),
    ),
    "frame-skip-over-sum": (
        "pendulum",
        lambda: E.Compose(books(), E.FrameSkipTransform(3), E.FrameSkipTransform(2)),
    ),
    "frame-skip-gym": ("torchrl-gym-pendulum", lambda: E.FrameSkipTransform(2)),
    "dozen": ("cartpole", dozen),
    "rename-done": ("cartpole", renamed(["done"], ["over"])),
    "rename-nodes": ("toy-nested", renamed(["inner"], ["outer"])),
    "sum-in-reward-spec": ("toy", lambda: E.RewardSum(reward_spec=True)),
    "primer-under-select": (
        "cartpole",
        composed(partial(primer, False), lambda: E.SelectTransform(OBS)),
    ),
    "env-action-excluded": (
        "pendulum",
        composed(EnvAction, lambda: E.ExcludeTransform("env_action")),
    ),
    "noop-reset": ("torchrl-gym", lambda: E.NoopResetEnv(3)),
    "running-sum": ("toy", RunningSum),
    "running-sum-over-books": ("toy", composed(books, RunningSum)),
    "running-sum-under-frames": ("toy", composed(RunningSum, frames(2, ["sum"], ["stack"]))),
    "early-end-over-books": ("cartpole", composed(books, EarlyEnd)),
}
"""Some of their transforms run on TensorDicts."""

STATELESS: dict[str, Case] = {
    "empty": ("cartpole", E.Compose),
    "books": ("cartpole", books),
    "books-unbatched": ("cartpole-unbatched", books),
    "books-one-step-episodes": ("toy-one-step-episodes", books),
    "books-native": ("cartpole-books", norm),
    "books-serial-env": ("torchrl-serial", books),
    "books-gym": ("torchrl-gym", books),
    "norm": ("cartpole", norm),
    "norm-subclass": ("cartpole", partial(norm, ScaledNorm)),
    "norm-twice": ("cartpole", lambda: E.Compose(norm(), E.Compose(norm()))),
    "reward-sum-before-scaling": (
        "pendulum",
        lambda: E.Compose(E.RewardSum(), E.RewardScaling(1.0, 0.1), E.RewardClipping(-1, 1)),
    ),
    "double-to-float-norm": ("half-cheetah", lambda: E.Compose(E.DoubleToFloat(), norm())),
    "tensors": ("toy", tensors),
    "stack": ("toy", composed(renamed([OBS], ["twin"], create_copy=True), stack)),
    "checked": ("cartpole-device", composed(E.FiniteTensorDictCheck, to_cpu)),
    "nested": ("toy-nested", nested),
    "pixels": ("toy-pixels", pixels),
    "to-tensor-image": ("toy-pixels", E.ToTensorImage),
    "rename-two": ("cartpole", renamed([OBS, R], [("state", "vector"), ("money", "now")])),
    "rename-nested": (
        "toy-nested",
        renamed(["position", ("inner", "grid")], [("inner", "p"), "grid"]),
    ),
    "rename-action": ("toy", renamed([OBS], ["state"], ["action"], ["deed"])),
    "rename-sum": ("toy", composed(E.RewardSum, renamed(["episode_reward"], ["return"]))),
    "rename-sum-copy": (
        "toy",
        composed(
            E.RewardSum,
            renamed(["episode_reward"], ["copy"], create_copy=True),
            lambda: E.ObservationNorm(0.0, 2.0, in_keys=["copy"]),
            E.StepCounter,
        ),
    ),
    "select": ("toy-nested", lambda: E.SelectTransform("position", ("inner", "flag"))),
    "primer": ("cartpole", partial(primer, False)),
    "action-clip": ("pendulum", lambda: E.ClipTransform(in_keys_inv=["action"], low=-0.5)),
    "env-action": ("pendulum", composed(EnvAction, E.ActionScaling)),
    "env-actions": ("toy-dict-action", EnvAction),
    "negated-action": ("cartpole", NegatedAction),
    "policy-version": ("toy", PolicyVersion),
    "max-pool": ("toy-nested", lambda: E.TimeMaxPool(["position"], [("inner", "m")], T=2)),
    "random-truncation-seldom": ("pendulum", partial(truncation, prob=0.5, first_episode_prob=0.2)),
    "target-return": ("pendulum", lambda: E.TargetReturn(10.0)),
    "target-return-constant": ("toy-unbatched", lambda: E.TargetReturn(10.0, mode="constant")),
    "discretized-compose": (
        "pendulum",
        lambda: E.Compose(E.ActionDiscretizer(5, out_action_key="choice"), E.RewardSum()),
    ),
    "discretized-random": (
        "pendulum",
        lambda: E.ActionDiscretizer(5, sampling=E.ActionDiscretizer.SamplingStrategy.RANDOM),
    ),
    "discretized-one-hot": (
        "pendulum-unbatched",
        lambda: E.ActionDiscretizer(torch.tensor([5]), categorical=False),
    ),
    "rnd": ("toy", lambda: E.Compose(rnd(), E.RewardSum(in_keys=[R]))),
    "trajectories": ("toy-unbatched", lambda: E.TrajCounter(out_key="episode")),
    "state-noise": ("cartpole", lambda: E.gSDENoise(shape=(3, 2, 4), state_dim=4, action_dim=2)),
    "primer-random": ("cartpole", partial(primer, True)),
    "primer-function": ("toy-unbatched", primed_by_function),
    "flat-action": ("pendulum", lambda: E.FlattenAction(-1, -1)),
    "projected": ("toy", lambda: E.DiscreteActionProjection(2, 5)),
}

STATEFUL: dict[str, Case] = {
    "vec-norm": ("cartpole", normed(E.VecNorm, [OBS, R], ["normed", R], decay=0.9, eps=1e-2)),
    "vec-norm-nested": ("toy-nested", normed(E.VecNorm, ["position"], [("inner", "normed")])),
    "vec-norm-shapes": ("cartpole", normed(E.VecNorm, shapes=[torch.Size([3, 4])])),
    "vec-norm-unbatched": ("cartpole-unbatched", normed(E.VecNorm, [OBS, R])),
    "vec-norm-frozen": ("cartpole", lambda: begun(E.VecNorm).frozen_copy()),
    "vec-norm-shared": ("cartpole", shared(E.VecNorm)),
    "vec-norm-over-books": ("pendulum", composed(books, normed(E.VecNorm, [OBS, R]))),
    "vec-norm-2": ("cartpole", normed(E.VecNormV2, [OBS, R], decay=0.9, eps=1e-2)),
    "vec-norm-2-reduced": (
        "pendulum",
        composed(normed(E.VecNormV2, [OBS, R], reduce_batch_dims=True, decay=0.99), norm),
    ),
    "vec-norm-2-nested": (
        "toy-nested",
        normed(E.VecNormV2, ["position", ("inner", "flag")], ["p", ("inner", "f")]),
    ),
    "vec-norm-2-integers": ("toy-pixels", normed(E.VecNormV2, ["pixels"])),
    "vec-norm-2-doubles": ("half-cheetah", normed(E.VecNormV2, reduce_batch_dims=True)),
    "vec-norm-2-frozen": ("cartpole", lambda: begun(E.VecNormV2).frozen_copy()),
    "vec-norm-2-shared": ("cartpole", shared(E.VecNormV2, reduce_batch_dims=True)),
    "vec-norm-2-twice": (
        "pendulum",
        composed(normed(E.VecNormV2), books, normed(E.VecNormV2, [R], ["normed"], decay=0.9)),
    ),
    "vec-norm-2-serial-env": ("torchrl-serial", normed(E.VecNormV2, reduce_batch_dims=True)),
    "frames": ("cartpole-same-step", frames(4, reset_key="_reset")),
    "frames-constant": ("toy", frames(3, padding="constant", padding_value=0.5)),
    "frames-nested": (
        "toy-nested",
        frames(2, ["position", ("inner", "grid")], ["p", ("inner", "stack")]),
    ),
    "frames-unbatched": ("cartpole-unbatched", frames(3, padding="constant")),
    "frames-short-episodes": ("toy-one-step-episodes", frames(3)),
    "frames-of-images": ("toy-pixels", composed(E.ToTensorImage, E.GrayScale, images)),
    "frames-of-bytes": ("toy-pixels", frames(2, ["pixels"], ["stack"])),
    "frames-twice": ("toy", composed(frames(2), frames(2, padding="constant"), norm)),
    "frames-under-norm": ("toy", composed(frames(2), normed(E.VecNormV2, reduce_batch_dims=True))),
    "frames-serial-env": ("torchrl-serial", frames(3)),
}

SINCE_0_15: dict[str, Case] = {
    "last-action": ("pendulum", lambda: E.Compose(E.LastAction(), E.ActionScaling())),
    "last-action-nan": ("pendulum", lambda: E.LastAction(default="nan")),
    "last-one-hot-action": ("toy", lambda: E.LastAction(out_keys=[("inner", "before")])),
    "expanded-done": (
        "toy",
        lambda: E.DoneTransform(out_keys=[("agents", "done"), ("agents", "terminated")]),
    ),
}
ISLANDS["stateless"] = ("cartpole", normed(E.VecNormV2, stateful=False, decay=0.9))
if hasattr(E, "LastAction"):
    STATELESS |= SINCE_0_15
    ISLANDS["last-action-ones"] = ("pendulum", lambda: E.LastAction(default=1.0))
    ISLANDS["closed-loop"] = ("toy", lambda: closed_loop(chooses))
    ISLANDS["closed-loop-state"] = ("pendulum", remembers)

TRANSFORMS = STATELESS | STATEFUL | ISLANDS


def make(name: str) -> E.EnvBase:
    """The env of a named transform."""
    env, transform = TRANSFORMS[name]
    return E.TransformedEnv(ENVS[env](), transform())
