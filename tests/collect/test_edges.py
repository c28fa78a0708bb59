"""Edge cases that once went wrong: ours and the parent's collector agree on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium.spaces import Discrete
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torchrl.envs import Compose, RewardScaling, RewardSum, TransformedEnv, UnsqueezeTransform
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal

import tdcollect

from . import policies, transforms
from .envs import ENVS, Toy, box
from .oracle import batches, check_same

PLAIN = torch.tensor([1, 0])


def cartpole(**kwargs: Any) -> Any:
    return tdcollect.make_env("CartPole-v1", 3, **kwargs)


class Writes(nn.Module):
    """Outputs the action and what a function makes of the observation."""

    def __init__(self, function: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.function = function

    def forward(self, observation: torch.Tensor) -> Any:
        best = self.net(observation).argmax(-1)
        return nn.functional.one_hot(best, 2), self.function(observation)


def writes(key: Any, function: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    return lambda env: TensorDictModule(
        Writes(function), in_keys=["observation"], out_keys=["action", key]
    )


# ------------------------------------------------------------------------------ interrupted batches


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("call", [2, 14])
def test_an_interrupted_batch_loses_no_step(kind: type[BaseException], call: int) -> None:
    """The next collection continues from the last step taken."""
    calls = 0

    def policy(tensordict: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise kind
        return tensordict.set("action", PLAIN.expand(3, 2))

    collector = tdcollect.Collector(cartpole(seed=0), policy, frames_per_batch=60)
    with pytest.raises(kind):
        collector.rollout()
    batch = collector.rollout()
    position, velocity = batch["observation"][..., 0], batch["observation"][..., 1]
    assert torch.allclose(batch["next", "observation"][..., 0], position + 0.02 * velocity)


# ----------------------------------------------------------------------------------------- policies


def nothing_but(value: float) -> Callable[[Any], Any]:
    class Constant(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.full((*observation.shape[:-1], 2), value)

    net = TensorDictModule(Constant(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical)


@pytest.mark.parametrize("logit", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_raise(logit: float) -> None:
    collector = tdcollect.Collector(cartpole(), nothing_but(logit), frames_per_batch=30)
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        collector.rollout()


def test_distributions_are_used_themselves_where_validation_is_asked_for() -> None:
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        collector = tdcollect.Collector(cartpole(), nothing_but(0.0), frames_per_batch=30)
        assert "computed straight" not in str(collector.explain())
    finally:
        torch.distributions.Distribution.set_default_validate_args(False)


@pytest.mark.parametrize("make", [cartpole, ENVS["torchrl-gym"]])
def test_an_output_that_buffers_do_not_hold_is_named(make: Any) -> None:
    env = make()
    policy = writes("extra", lambda o: "text")(env)
    collector = tdcollect.Collector(env, policy, frames_per_batch=30)
    with pytest.warns(UserWarning, match=r"entries \['extra'\] are no dense .* use_buffers=False"):
        batch = collector.rollout()
    assert "extra" not in batch
    assert "extra" in collector.collect(frames=30)  # without a warning


class LocAndScale(nn.Module):
    """A scale wider than its loc."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(17, 7)

    def forward(self, observation: torch.Tensor) -> Any:
        out = self.net(observation.float())
        return out[..., :1], out[..., 1:].exp()


def wide_scale(env: Any) -> Any:
    net = TensorDictModule(LocAndScale(), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        net, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )


def patched_linear(env: Any) -> Any:
    policy = policies.actor(env)
    for module in policy.modules():
        if type(module) is nn.Linear:
            weight = module.weight
            module.forward = lambda value, weight=weight: value @ weight.t() * 3  # type: ignore[method-assign]
    return policy


def replaced_weights(env: Any) -> Any:
    class Replaces(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            for module in target.modules():
                if type(module) is nn.Linear:
                    module.weight = nn.Parameter(module.weight.detach() * 1.1)
            return observation

    target = policies.actor(env)
    first = TensorDictModule(Replaces(), in_keys=["observation"], out_keys=["seen"])
    return TensorDictSequential(first, target)


def own_parameters(env: Any) -> Any:
    class Sharper(ProbabilisticTensorDictSequential):
        def get_dist_params(self, tensordict: Any, *args: Any, **kwargs: Any) -> Any:
            out = super().get_dist_params(tensordict, *args, **kwargs)
            return out.set("logits", out["logits"] * 5)

    return Sharper(*policies.actor(env).module)


class NamesHolder(TensorDictModuleBase):
    """Names the entry that holds its action, as TensorDicts of several agents do."""

    in_keys = ("observation",)
    out_keys = ("something",)

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", PLAIN.expand(3, 2))


def replaced_step() -> Any:
    env = cartpole()
    step = env._step
    env._step = lambda td: step(td).set("reward", torch.full((3, 1), 7.0))
    return env


def under(*parts: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: TransformedEnv(cartpole(), Compose(*(part() for part in parts)))


ones = lambda o: torch.ones(3, 1, dtype=torch.bool)  # noqa: E731
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    # What the env says of the next step holds.
    "next reward": (cartpole, writes(("next", "reward"), lambda o: o[..., :1] * 9)),
    "next observation": (cartpole, writes(("next", "observation"), lambda o: o + 1)),
    "next done": (cartpole, writes(("next", "done"), ones)),
    "next terminated": (cartpole, writes(("next", "terminated"), ones)),
    # What the user overrides is used.
    "patched linear": (cartpole, patched_linear),
    "replaced weights": (cartpole, replaced_weights),
    "own parameters": (cartpole, own_parameters),
    "replaced step": (replaced_step, policies.actor),
    "action in another": (cartpole, lambda env: NamesHolder()),
    "wide scale": (lambda: tdcollect.make_env("HalfCheetah-v5", 2), wide_scale),
    "transform over another": (
        under(RewardSum, lambda: RewardScaling(0.0, 0.1, in_keys=["episode_reward"])),
        policies.actor,
    ),
    "reward with one dimension more": (
        under(lambda: UnsqueezeTransform(-1, in_keys=["reward"]), RewardSum),
        policies.actor,
    ),
    "no numbers": (
        lambda: tdcollect.make_env(lambda: Toy(box(0), Discrete(2)), 2),
        policies.random_policy,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_envs_and_policies(case: str) -> None:
    check_same(*CASES[case])


# -------------------------------------------------------------------- from arrays to TorchRL's loop


def stop_never(collector: Any) -> None:
    collector.interruptor = SimpleNamespace(collection_stopped=lambda: False)


def add_unknown_transform(collector: Any) -> None:
    collector.env.append_transform(transforms.Noise())


@pytest.mark.parametrize("change", [stop_never, add_unknown_transform])
@pytest.mark.parametrize("options", [{}, {"init_random_frames": 60}], ids=["", "random"])
def test_a_loop_or_env_changed_between_batches(change: Callable[[Any], None], options: Any) -> None:
    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        for _ in range(2):
            yield next(stream)
        change(collector)
        given = [next(stream) for _ in range(3)]
        yield from given  # all at the end: none may have changed another

    check_same(
        lambda: TransformedEnv(cartpole(), RewardSum()), policies.actor, script, lambda: options
    )


# --------------------------------------------------------------------------------- unknown modules


class WritesNow(TensorDictModuleBase):
    """Writes what a function gives, and leaves out None."""

    in_keys = ("observation",)
    out_keys = ("hidden",)

    def __init__(self, function: Callable[[int, torch.Tensor], Any]):
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, tensordict: Any) -> Any:
        self.calls += 1
        value = self.function(self.calls, tensordict["observation"])
        return tensordict if value is None else tensordict.set("hidden", value)


class Reads(nn.Module):
    """Takes a tensor, or a TensorDict of one."""

    def forward(self, hidden: Any) -> torch.Tensor:
        inner = hidden if isinstance(hidden, torch.Tensor) else hidden["x"]
        return nn.functional.one_hot((inner.sum(-1) > 0).long(), 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda call, x: x * 2,
        lambda call, x: x * call if call % 3 else None,
        lambda call, x: {"x": x},
    ],
    ids=["at each call", "at some calls", "nested"],
)
def test_a_module_after_one_that_is_not_known(function: Any) -> None:
    def policy(env: Any) -> TensorDictSequential:
        return TensorDictSequential(
            WritesNow(function), TensorDictModule(Reads(), ["hidden"], ["action"])
        )

    check_same(cartpole, policy, batches(2), lambda: {"frames_per_batch": 90})


# ------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_an_entry_that_comes_late_is_left_out(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.collect.step_dict._CHUNK_BYTES", chunk_bytes)
    calls = 0

    def policy(tensordict: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            tensordict.set("late", torch.ones(3, 1))
        return tensordict.set("action", PLAIN.expand(3, 2))

    batch = tdcollect.Collector(cartpole(), policy, frames_per_batch=60).rollout()
    assert "late" not in set(batch.keys())
