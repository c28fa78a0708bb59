"""Uses of TorchRL's collector in pipelines: ours does the same, bit for bit.

Each test is a script: what is done to a collector, and what is seen of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import EnvCreator, ExplorationType, RewardScaling, SerialEnv, TransformedEnv

from tdcollect import Collector, make_env

from . import policies, transforms
from .envs import ENVS, make_toy
from .loops import array_loop, on_arrays
from .oracle import (
    UPSTREAM,
    assert_same,
    batches,
    check_same,
    difference,
    parents_state,
    seed_everything,
)

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]

PAIRS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "toy": (ENVS["toy"], policies.actor),
    "toy-unbatched": (ENVS["toy-unbatched"], policies.actor),
    "books": (partial(transforms.make, "books"), policies.actor),
    "function": (ENVS["toy"], policies.ones),
    "torchrl": (ENVS["torchrl-serial"], policies.actor),
}
FEW = ("toy", "toy-unbatched")


def on(first: str, *names: str) -> Any:
    """Parametrize ``pair``: all on arrays, the first on TorchRL's loop too."""
    return on_arrays("pair", (first, *names), parent=[first])


def one_by_one(choices: Iterable[str], first: str, *others: str, parent: Iterable[str]) -> Any:
    """Parametrize ``case``: each choice on one of the pairs, in turns.

    Those in ``parent`` meet our own code around TorchRL's loop, and run on it too.
    """
    cases = list(zip(itertools.cycle((first, *others)), choices, strict=False))
    return on_arrays("case", cases, parent=[(first, choice) for choice in parent])


# ----------------------------------------------------------------------------- options, one by one

OPTIONS: dict[str, dict[str, Any]] = {
    "split-trajectories": {"split_trajs": True},
    "padded-trajectories": {"trajs_per_batch": 3, "traj_format": "padded"},
    "cat-trajectories": {"trajs_per_batch": 3, "traj_format": "cat"},
    "default-trajectories": {"trajs_per_batch": 2},
    "set-truncated": {"set_truncated": True},
    "reset-at-each-iter": {"reset_at_each_iter": True},
    "reset-and-truncate": {"reset_at_each_iter": True, "set_truncated": True},
    "reset-truncate-trajectories": {
        "reset_at_each_iter": True,
        "set_truncated": True,
        "trajs_per_batch": 3,
        "traj_format": "cat",
    },
    "init-random-frames": {"init_random_frames": 35},
    "same-td": {"return_same_td": True},
    "compact-obs": {"compact_obs": True},
    "compact-obs-no-buffers": {"compact_obs": True, "use_buffers": False},
    "compact-obs-trajectories": {"compact_obs": True, "trajs_per_batch": 3, "traj_format": "cat"},
    "no-trajectory-ids": {"track_traj_ids": False},
    "buffers": {"use_buffers": True},
    "no-buffers": {"use_buffers": False},
    "no-buffers-split": {"use_buffers": False, "split_trajs": True, "set_truncated": True},
    "odd-frames-per-batch": {"frames_per_batch": 13},
    "one-step-batches": {"frames_per_batch": 1},
    "trusted-policy": {"trust_policy": True},
    "register-transforms": {"auto_register_policy_transforms": True},
    "no-register-transforms": {"auto_register_policy_transforms": False},
    "no-cuda-sync": {"no_cuda_sync": True},
    "postproc-function": {"postproc": lambda td: td.set("ones", torch.ones(td.shape))},
    "postproc-multi-step": {"postproc": MultiStep(gamma=0.9, n_steps=3)},
    "postproc-transform": {"postproc": RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])},
    "postproc-flat": {"postproc": lambda td: td.reshape(-1)},
    "postproc-split": {"postproc": lambda td: td.exclude("action"), "split_trajs": True},
    "worker-index": {"worker_idx": 1},
    "device": {"device": "cpu"},
    "storing-device": {"storing_device": "cpu"},
    "policy-device": {"policy_device": "cpu"},
    "env-device": {"env_device": "cpu"},
    "policy-and-storing-device": {"policy_device": "cpu", "storing_device": "cpu"},
    "policy-and-env-device": {"policy_device": "cpu", "env_device": "cpu"},
    "device-no-buffers": {"device": "cpu", "use_buffers": False},
    "device-compact-split": {"storing_device": "cpu", "compact_obs": True, "split_trajs": True},
}


AROUND = [
    *("split-trajectories", "cat-trajectories", "set-truncated", "reset-and-truncate"),
    *("init-random-frames", "same-td", "compact-obs", "no-trajectory-ids", "no-buffers"),
    *("register-transforms", "postproc-function", "postproc-split", "storing-device", "device"),
]


@one_by_one(OPTIONS, *PAIRS, parent=AROUND)
def test_option(case: tuple[str, str]) -> None:
    pair, option = case
    check_same(*PAIRS[pair], make_options=lambda: OPTIONS[option])


@on_arrays(
    "case",
    [("toy", {}, 1), ("torchrl", {}, 4), ("toy-unbatched", {"split_trajs": True}, 3)],
    parent=[("toy", {"split_trajs": True, "compact_obs": True}, 3)],
)
def test_max_frames_per_trajectory(case: tuple[str, dict[str, Any], int]) -> None:
    pair, options, most = case
    check_same(*PAIRS[pair], make_options=lambda: {"max_frames_per_traj": most, **options})


@array_loop
@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *itertools.product(["tanh-normal", "one-hot"], ExplorationType),
        *zip(["epsilon-greedy", "delta"] * 4, [*ExplorationType][:4] * 2, strict=True),
        *zip(["context"] * 2, ExplorationType, strict=False),
    ],
)
def test_exploration_type(policy: str, kind: ExplorationType) -> None:
    """If a distribution lacks a mode, mean or median, the error is the same too."""
    check_same(*policies.case(policy), make_options=lambda: {"exploration_type": kind}, catch=True)


@array_loop
@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("cartpole-device", ["device", "no-buffers"]),
        ("mock-many-keys", ["storing-device", "device"]),
        ("torchrl-gym", ["policy-device", "storing-device"]),
        ("toy-nested", ["no-buffers", "split-trajectories"]),
        ("toy-infos", ["compact-obs", "device"]),
        ("cartpole-books", ["split-trajectories", "no-buffers"]),
        ("frozen-lake", ["device", "compact-obs"]),
    ],
)
def test_options_on_other_envs(env: str, options: list[str]) -> None:
    for option in options:
        check_same(ENVS[env], policies.actor, make_options=partial(dict, OPTIONS[option]))


@array_loop
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("hidden-outputs", ["no-buffers", "compact-obs"]),
        ("actor-value", ["storing-device", "no-buffers"]),
        ("reads-everything", ["compact-obs", "set-truncated"]),
    ],
)
def test_options_with_other_policies(policy: str, options: list[str]) -> None:
    for option in options:
        check_same(*policies.case(policy), make_options=partial(dict, OPTIONS[option]))


# ------------------------------------------------------------------------------ recurrent policies


@on_arrays(
    "case",
    [
        *(("cartpole", "lstm"), ("cartpole-unbatched", "gru"), ("cartpole-init", "gru")),
        *(("torchrl-gym", "lstm"),),
    ],
    parent=[("cartpole", "gru")],
)
def test_recurrent_policy_with_registered_transforms(case: tuple[str, str]) -> None:
    env, kind = case
    options = {"auto_register_policy_transforms": True, "frames_per_batch": 60}
    check_same(ENVS[env], partial(policies.recurrent, kind), make_options=lambda: options)


@array_loop
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_policy_with_explicit_primers(kind: str) -> None:
    def make() -> Any:
        env = TransformedEnv(ENVS["cartpole"](), transforms.E.InitTracker())
        primer = policies.recurrent(kind, env)[1].make_tensordict_primer()
        primer.expand_specs = True
        return env.append_transform(primer)

    check_same(
        make, partial(policies.recurrent, kind), make_options=lambda: {"frames_per_batch": 60}
    )


# --------------------------------------------------------------------------------- policy versions


@pytest.mark.behaviour(15)
@on("toy", "toy-unbatched", "books")
def test_policy_version_is_recorded_and_counted(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        for batch in collector:
            yield batch
            yield collector.policy_version
            collector.update_policy_weights_()
            if collector.policy_version == 3:
                return

    check_same(*PAIRS[pair], script, lambda: {"track_policy_version": True})


# ---------------------------------------------------------------------------------- replay buffers


def with_buffer(
    dims: int = 1, **options: Any
) -> tuple[Callable[[], dict[str, Any]], Callable[[Any], Iterator[Any]]]:
    """Options with a new replay buffer, and a script that observes its content."""

    def make_options() -> dict[str, Any]:
        buffer = ReplayBuffer(storage=LazyTensorStorage(500, ndim=dims), batch_size=4)
        return {"replay_buffer": buffer, **options}

    def script(collector: Any) -> Iterator[Any]:
        for i, batch in enumerate(collector):
            yield batch
            if collector.replay_buffer.write_count:
                yield collector.replay_buffer[:]
            yield collector.replay_buffer.write_count
            if i == 3:
                return

    return make_options, script


BUFFERS: dict[str, dict[str, Any]] = {
    "extend": {},
    "extend-compact": {"compact_obs": True},
    "extend-postproc": {"postproc": lambda td: td.exclude(("next", "observation")).reshape(-1)},
    "extend-split": {"split_trajs": True, "postproc": lambda td: td[td["collector", "mask"]]},
    "extend-truncated": {"set_truncated": True},
    "extend-random": {"init_random_frames": 40},
    "extend-storing-device": {"storing_device": "cpu"},
    "add": {"extend_buffer": False},
    "add-random": {"extend_buffer": False, "init_random_frames": 40},
    "trajectories": {"trajs_per_batch": 2},
    "trajectories-per-write": {"trajs_per_batch": 2, "trajs_per_write": 3},
}


@one_by_one(
    BUFFERS,
    *("toy", "toy-unbatched", "books"),
    parent=["extend", "extend-postproc", "extend-random", "add", "trajectories"],
)
def test_replay_buffer(case: tuple[str, str]) -> None:
    pair, kind = case
    make_options, script = with_buffer(**BUFFERS[kind])
    check_same(*PAIRS[pair], script, make_options)


@on("toy", "books", "function")
def test_replay_buffer_of_two_dimensions(pair: str) -> None:
    make_options, script = with_buffer(dims=2)
    check_same(*PAIRS[pair], script, make_options)


@on(*FEW)
def test_start_fills_the_replay_buffer_from_a_thread(pair: str) -> None:
    make_options, _ = with_buffer(total_frames=90)

    def script(collector: Any) -> Iterator[Any]:
        collector.start()
        collector._thread.join(60)
        yield collector.is_running()
        yield collector.replay_buffer[:]
        collector.async_shutdown()

    check_same(*PAIRS[pair], script, make_options)


def test_async_shutdown_stops_an_endless_start() -> None:
    make_options, _ = with_buffer()

    def script(collector: Any) -> Iterator[Any]:
        buffer = collector.replay_buffer
        collector.start()
        while buffer.write_count < 60:
            time.sleep(0.01)
        collector.async_shutdown(timeout=60)
        yield collector.is_running()
        yield collector.closed

    def steady_script(collector: Any) -> Iterator[Any]:
        seen = list(script(collector))
        seed_everything(2)  # how far the thread got is a matter of time
        yield seen

    check_same(*PAIRS["toy"], steady_script, make_options)


# --------------------------------------------------------------------------------------- iteration


@on_arrays(
    "case",
    [("toy", 60), ("toy", 70), ("toy", 1), ("toy-unbatched", 70), ("torchrl", 70)],
    parent=[("toy", 70)],
)
def test_total_frames(case: tuple[str, int]) -> None:
    pair, total = case

    def script(collector: Any) -> Iterator[Any]:
        yield len(collector)
        yield from collector
        yield collector.stats()
        yield [collector._frames, collector._iter, collector.env.is_closed]

    options = {"total_frames": total, "frames_per_batch": 30}
    check_same(*PAIRS[pair], script, lambda: options)


@on(*FEW)
def test_next_yields_batches_and_none_at_the_end(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        yield [collector.next() for _ in range(4)]

    options = {"total_frames": 90, "frames_per_batch": 30}
    check_same(*PAIRS[pair], script, lambda: options)


@on(*FEW)
def test_breaking_out_and_iterating_again_goes_on(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        for _ in range(3):
            for batch in collector:
                yield batch
                break

    check_same(*PAIRS[pair], script)


@on_arrays("case", [("toy", True), ("toy-unbatched", False)], parent=[("toy", True)])
def test_rollout_called_directly(case: tuple[str, bool]) -> None:
    pair, buffers = case

    def script(collector: Any) -> Iterator[Any]:
        yield collector.rollout()
        yield collector.rollout()
        yield from batches(1)(collector)

    check_same(*PAIRS[pair], script, lambda: {"use_buffers": buffers})


CONSTRUCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "callable": (ENVS["toy"], {}),
    "callable-with-arguments": (partial(make_env, make_toy), {"num_envs": 3}),
    "creator": (EnvCreator(ENVS["toy"]), {}),
}


@pytest.mark.parametrize("kind", CONSTRUCTIONS)
def test_env_from_a_callable_and_policy_from_a_factory(kind: str) -> None:
    make, kwargs = CONSTRUCTIONS[kind]

    def first_batch(collector_class: Any) -> Any:
        seed_everything(0)
        factory = partial(policies.actor, ENVS["toy"]())
        collector = collector_class(
            make, policy_factory=factory, frames_per_batch=30, create_env_kwargs=kwargs or None
        )
        collector.env.set_seed(5)
        collector.reset()
        return next(iter(collector))

    assert_same(first_batch(Collector), first_batch(ParentCollector))


# ------------------------------------------------------------------------- what is done in between


def between(change: Callable[[Any], Any], count: int = 3) -> Callable[[Any], Iterator[Any]]:
    """A script that calls ``change`` after each batch."""

    def script(collector: Any) -> Iterator[Any]:
        for i, batch in enumerate(collector):
            yield batch
            if i == count:
                return
            yield change(collector)

    return script


def perturb(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3)


def other_weights(collector: Any) -> TensorDict:
    return TensorDict.from_module(collector.policy).data.apply(lambda x: x * 1.5 + 0.1)


def train(collector: Any) -> None:
    optimizer = torch.optim.Adam(collector.policy.parameters(), lr=0.1)
    sum(parameter.square().sum() for parameter in collector.policy.parameters()).backward()
    optimizer.step()


def first(collector: Any, kind: type) -> Any:
    return next(module for module in collector.policy.modules() if isinstance(module, kind))


def replace_parameter(collector: Any) -> None:
    linear = first(collector, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach() + 0.5)


def double(module: nn.Module, args: Any, out: Any) -> Any:
    return out.set("logits", out["logits"] * 2)


def seed_and_reset_the_env(collector: Any) -> None:
    collector.env.set_seed(3)
    collector.env.reset()


def quiet(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change whose result is not compared."""

    def run(collector: Any) -> None:
        change(collector)

    return run


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights-in-place": lambda c: perturb(c.policy),
    "optimizer-step": train,
    "weights-from-policy": lambda c: c.update_policy_weights_(),
    "weights-from-tensordict": lambda c: c.update_policy_weights_(other_weights(c)),
    "parameter-replaced": replace_parameter,
    "submodule-replaced": lambda c: first(c, nn.Sequential).__setitem__(1, nn.ReLU()),
    "hook-added": quiet(
        lambda c: first(c, nn.Linear).register_forward_hook(lambda module, args, out: out + 0.25)
    ),
    "actor-hook-added": quiet(lambda c: c.policy.register_forward_hook(double)),
    "eval": quiet(lambda c: c.policy.eval()),
    "reset": lambda c: c.reset(),
    "reset-seed": lambda c: c.reset(seed=4),
    "env-stepped": quiet(lambda c: c.env.rollout(3, break_when_any_done=False)),
    "env-reset": quiet(lambda c: c.env.reset()),
    "env-seeded-and-reset": seed_and_reset_the_env,
    "exploration-type": lambda c: setattr(c, "exploration_type", ExplorationType.DETERMINISTIC),
    "hook-set": lambda c: setattr(
        c, "post_collect_hook", lambda td: td.set("hooked", td["action"] + 1)
    ),
    "postproc-set": lambda c: setattr(c, "postproc", lambda td: td.exclude("action")),
    "policy-called": quiet(lambda c: c.policy(c.env.fake_tensordict())),
    "fake-tensordict": lambda c: c.fake_tensordict(),
    "state-dict": lambda c: c.load_state_dict(parents_state(c)),
    "torch-seed": quiet(lambda c: torch.manual_seed(3)),
    "another-iterator": lambda c: next(c.iterator()),
}


CHANGES_AROUND = [
    *("weights-in-place", "weights-from-policy", "weights-from-tensordict", "submodule-replaced"),
    *("reset", "reset-seed", "env-stepped", "env-reset", "exploration-type", "hook-set"),
    *("postproc-set", "fake-tensordict", "state-dict", "another-iterator"),
]


@one_by_one(CHANGES, "toy", "books", "toy-unbatched", parent=CHANGES_AROUND)
def test_what_happens_between_batches(case: tuple[str, str]) -> None:
    pair, change = case
    check_same(*PAIRS[pair], between(CHANGES[change]))


@array_loop
@pytest.mark.parametrize("change", ["weights-in-place", "reset", "env-stepped", "eval"])
def test_what_happens_between_batches_of_torchrls_env(change: str) -> None:
    check_same(*PAIRS["torchrl"], between(CHANGES[change]))


@array_loop
@pytest.mark.parametrize(
    ("pair", "index"),
    [("toy", 2), ("books", 0), ("toy", torch.tensor([True, False, True])), ("books", [0, 2])],
)
def test_reset_of_some_slots(pair: str, index: Any) -> None:
    check_same(*PAIRS[pair], between(lambda collector: collector.reset(index)))


@pytest.mark.parametrize("index", [None, 1])
def test_reset_drops_trajectories_in_flight(index: Any) -> None:
    options = {"trajs_per_batch": 3, "traj_format": "cat"}
    check_same(*PAIRS["toy"], between(lambda c: c.reset(index)), lambda: options)


@pytest.mark.parametrize("policy", ["epsilon-greedy", "additive-gaussian", "ornstein-uhlenbeck"])
def test_annealed_exploration_is_followed(policy: str) -> None:
    check_same(*policies.case(policy), between(lambda collector: collector.policy[1].step(20)))


@pytest.mark.parametrize("policy", ["dropout", "batch-norm", "noisy"])
def test_modes_switched_between_batches(policy: str) -> None:
    def toggle(collector: Any) -> None:
        collector.policy.train(not collector.policy.training)

    check_same(*policies.case(policy), between(toggle))


def test_transform_changed_between_batches() -> None:
    def change(collector: Any) -> None:
        norm = collector.env.transform[0]
        norm.loc.add_(1.0)
        norm.scale = norm.scale * 2

    check_same(*PAIRS["books"], between(change))


def test_transform_switched_to_eval_between_batches() -> None:
    check_same(
        partial(transforms.make, "vec-norm"),
        policies.actor,
        between(lambda collector: collector.env.transform.eval() and None),
    )


@on(*FEW)
def test_a_batch_changed_by_its_user_changes_nothing_else(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        for i, batch in enumerate(collector):
            yield batch
            batch.zero_()
            if i == 2:
                return

    check_same(*PAIRS[pair], script)


@one_by_one(
    ["no-buffers", "buffers", "compact-obs", "device"],
    *("toy", "toy-unbatched", "books", "function"),
    parent=["buffers"],
)
def test_a_batch_given_out_never_changes(case: tuple[str, str]) -> None:
    pair, option = case

    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        given = [next(stream) for _ in range(2)]
        copies = [batch.clone() for batch in given]
        next(stream)
        collector.reset()
        next(stream)
        yield [difference(a, b) for a, b in zip(given, copies, strict=True)]

    check_same(*PAIRS[pair], script, lambda: OPTIONS[option])


@on(*FEW)
def test_the_same_tensordict_is_given_out_if_asked(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        first = next(stream)
        yield first
        second = next(stream)
        yield [first is second, first["action"] is second["action"]]
        yield first

    check_same(*PAIRS[pair], script, lambda: {"return_same_td": True})


# ---------------------------------------------------------------------------- hooks, interruptions


def values(td: Any) -> dict[Any, torch.Tensor]:
    return {key: td[key].clone() for key in td.keys(True, True)}


@on_arrays(
    "case", [("toy", False), ("toy-unbatched", True), ("books", False)], parent=[("toy", True)]
)
def test_hooks_are_called_around_each_batch(case: tuple[str, bool]) -> None:
    pair, replay = case

    def make_options() -> dict[str, Any]:
        log: list[Any] = []

        def post(td: Any) -> None:
            log.append(values(td))
            td["hooked"] = td["action"] + 1

        options = {"pre_collect_hook": lambda: log.append("pre"), "post_collect_hook": post}
        return {**options, **(with_buffer()[0]() if replay else {})}

    def script(collector: Any) -> Iterator[Any]:
        for i, batch in enumerate(collector):
            yield batch
            yield collector.post_collect_hook.__closure__[0].cell_contents
            if i == 2:
                return

    check_same(*PAIRS[pair], script, make_options)


def test_a_hook_before_the_batch_may_change_the_policy() -> None:
    def script(collector: Any) -> Iterator[Any]:
        collector.pre_collect_hook = lambda: perturb(collector.policy)
        yield from batches()(collector)

    check_same(*PAIRS["toy"], script)


class StopsAfter:
    """An interruptor that stops each rollout at its fourth step."""

    def __init__(self, steps: int = 4):
        self.steps = steps
        self.calls = 0

    def collection_stopped(self) -> bool:
        self.calls += 1
        return self.calls % self.steps == 0


@on("toy", "toy-unbatched", "books")
def test_interruptor(pair: str) -> None:
    check_same(*PAIRS[pair], make_options=lambda: {"interruptor": StopsAfter()})


def test_interruptor_while_adding_to_a_replay_buffer() -> None:
    make_options, script = with_buffer(extend_buffer=False)
    check_same(*PAIRS["toy"], script, lambda: {"interruptor": StopsAfter(), **make_options()})


# ------------------------------------------------------------------------------------------- state


@on("toy", "books", "torchrl")
def test_state_dict_goes_over_to_a_new_collector(pair: str) -> None:
    make, policy = PAIRS[pair]

    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        yield next(stream)
        state = parents_state(collector)
        yield state
        env = make()
        env.set_seed(11)
        other = type(collector)(env, policy(env), frames_per_batch=30)
        other.load_state_dict(state)
        yield from batches(2)(other)
        yield [other._frames, other._iter]
        other.shutdown()

    check_same(make, policy, script)


@one_by_one(
    ["buffers", "no-buffers", "compact-obs", "set-truncated"],
    *("toy", "toy-unbatched", "books", "torchrl"),
    parent=["buffers"],
)
def test_fake_tensordict(case: tuple[str, str]) -> None:
    pair, option = case

    def script(collector: Any) -> Iterator[Any]:
        yield collector.fake_tensordict()
        yield from batches(1)(collector)
        yield collector.fake_tensordict()
        yield from batches(1)(collector)

    check_same(*PAIRS[pair], script, lambda: OPTIONS[option])


def test_attributes_read_by_name() -> None:
    def script(collector: Any) -> Iterator[Any]:
        yield collector.getattr_policy("training")
        yield list(collector.getattr_env("batch_size"))
        yield collector.get_model("policy") is collector.policy
        yield [collector.frames_per_batch, collector.requested_frames_per_batch, collector.n_env]
        yield [collector.closed, collector.split_trajs, collector.total_frames]
        yield repr(collector).split("(")[0]

    check_same(*PAIRS["toy"], script)


@on("toy", "torchrl")
def test_shutdown_twice_and_keeping_the_env(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        env = collector.env
        yield from batches(1)(collector)
        collector.shutdown(close_env=False)
        yield [collector.closed, env.is_closed]
        collector.shutdown()
        yield env.rollout(3)
        env.close()

    check_same(*PAIRS[pair], script)


def test_deleting_the_collector_closes_its_env() -> None:
    env = ENVS["toy"]()
    collector = Collector(env, frames_per_batch=30)
    next(iter(collector))
    del collector
    assert env.is_closed


@pytest.mark.parametrize("policy", ["dropout", "hooks", "actor-value", "tanh-normal"])
def test_training_flags_and_gradients_are_left_alone(policy: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        module = collector.policy
        next(module.children()).eval()
        loss = sum(parameter.sum() for parameter in module.parameters())
        loss.backward()
        for batch in collector:
            yield batch
            yield [m.training for m in module.modules()]
            yield [p.grad.sum() for p in module.parameters()]
            yield [p.requires_grad for p in module.parameters()]
            yield torch.is_grad_enabled()
            if collector._frames > 60:
                return

    check_same(*policies.case(policy), script)


# ---------------------------------------------------------- what policies and transforms are given


class Recorder(nn.Module):
    """A policy that keeps a copy of all it is given."""

    def __init__(self, env: Any):
        super().__init__()
        self.inner = policies.ones(env)
        self.log: list[Any] = []

    def forward(self, tensordict: Any) -> Any:
        self.log.append(tensordict.clone())
        return self.inner(tensordict)


class RecordingTransform(transforms.E.Transform):
    """A transform that keeps a copy of all it is given."""

    log: list[Any]

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        self.log += [tensordict.clone(), next_tensordict.clone()]
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        if tensordict is not None:
            self.log.append(tensordict.clone())
        self.log.append(tensordict_reset.clone())
        return tensordict_reset

    def _inv_call(self, tensordict: Any) -> Any:
        self.log.append(tensordict.clone())
        return tensordict


@on("toy", "toy-unbatched", "torchrl")
def test_an_opaque_policy_is_given_the_same_at_each_step(pair: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        yield from batches(2)(collector)
        yield collector.policy.log

    check_same(PAIRS[pair][0], Recorder, script)


@array_loop
@pytest.mark.parametrize(("env", "over"), [("toy", True), ("toy-unbatched", False)])
def test_an_unknown_transform_is_given_the_same_at_each_step(env: str, over: bool) -> None:
    logs: list[list[Any]] = []

    def make() -> Any:
        recorder = RecordingTransform()
        recorder.log = []
        logs.append(recorder.log)
        parts = [transforms.books(), recorder] if over else [recorder, transforms.books()]
        return TransformedEnv(ENVS[env](), transforms.E.Compose(*parts))

    def script(collector: Any) -> Iterator[Any]:
        yield from batches(2)(collector)
        yield logs[-1]

    check_same(make, policies.actor, script)


@array_loop
def test_serial_env_of_ours_takes_its_arguments() -> None:
    def make() -> Any:
        return SerialEnv(2, partial(make_env, make_toy), create_env_kwargs=[{}, {"is_init": False}])

    check_same(make, policies.actor)
