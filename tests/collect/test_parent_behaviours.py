"""Uses of TorchRL's collector in pipelines: ours does the same, bit for bit.

Each test is a script: what is done to a collector, and what is seen of it.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import Collector as ParentCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import EnvCreator, ExplorationType, RewardScaling, TransformedEnv

from tdcollect import Collector, make_env

from . import policies, transforms
from .envs import ENVS, make_toy
from .loops import array_loop, on_arrays
from .oracle import (
    UPSTREAM,
    Script,
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


def one_by_one(choices: Iterable[str], *pairs: str, parent: Iterable[str]) -> Any:
    """Parametrize ``case``: each choice on one of the pairs, in turns.

    Those in ``parent`` meet our own code around TorchRL's loop, and run on it too.
    """
    cases = list(zip(itertools.cycle(pairs), choices, strict=False))
    return on_arrays("case", cases, parent=[(pairs[0], choice) for choice in parent])


def scripted(
    *pairs: str, make_options: Callable[[], Mapping[str, Any]] | None = None, **options: Any
) -> Callable[[Script], Any]:
    """Make a script a test: on arrays with these pairs, and on TorchRL's loop with the first."""

    def test_of(script: Script) -> Any:
        @on_arrays("pair", pairs, parent=pairs[:1])
        def test(pair: str) -> None:
            check_same(*PAIRS[pair], script, make_options or (lambda: options))

        return test

    return test_of


# ----------------------------------------------------------------------------- options, one by one

OPTIONS: dict[str, dict[str, Any]] = {
    "split-trajectories": {"split_trajs": True},
    "padded-trajectories": {"trajs_per_batch": 3, "traj_format": "padded"},
    "default-trajectories": {"trajs_per_batch": 2},
    "set-truncated": {"set_truncated": True},
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
    "compact-no-buffers": {"compact_obs": True, "use_buffers": False},
    "compact-obs-trajectories": {"compact_obs": True, "trajs_per_batch": 3, "traj_format": "cat"},
    "no-trajectory-ids": {"track_traj_ids": False},
    "buffers": {"use_buffers": True},
    "no-buffers": {"use_buffers": False},
    "no-buffers-split": {"use_buffers": False, "split_trajs": True, "set_truncated": True},
    "odd-frames-per-batch": {"frames_per_batch": 13},
    "one-step-batches": {"frames_per_batch": 1},
    "register-transforms": {"auto_register_policy_transforms": True, "trust_policy": True},
    "no-register-transforms": {"auto_register_policy_transforms": False, "worker_idx": 1},
    "postproc-function": {"postproc": lambda td: td.set("ones", torch.ones(td.shape))},
    "postproc-multi-step": {"postproc": MultiStep(gamma=0.9, n_steps=3)},
    "postproc-transform": {"postproc": RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])},
    "postproc-flat": {"postproc": lambda td: td.reshape(-1)},
    "postproc-split": {"postproc": lambda td: td.exclude("action"), "split_trajs": True},
    "device": {"device": "cpu", "no_cuda_sync": True},
    "storing-device": {"storing_device": "cpu"},
    "policy-device": {"policy_device": "cpu"},
    "env-device": {"env_device": "cpu"},
    "policy-and-env-device": {"policy_device": "cpu", "env_device": "cpu"},
    "device-no-buffers": {"device": "cpu", "use_buffers": False},
    "device-compact-split": {"storing_device": "cpu", "compact_obs": True, "split_trajs": True},
}


AROUND = [
    *("reset-and-truncate", "init-random-frames", "same-td", "no-trajectory-ids"),
    *("register-transforms", "no-buffers-split", "postproc-function", "device-compact-split"),
]


@pytest.mark.behaviour(11)
@one_by_one(OPTIONS, *PAIRS, parent=AROUND)
def test_option(case: tuple[str, str]) -> None:
    pair, option = case
    check_same(*PAIRS[pair], make_options=lambda: OPTIONS[option])


@pytest.mark.behaviour(10)
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
        *zip(["epsilon-greedy", "delta"] * 2, [*ExplorationType][:4], strict=True),
        *zip(["context"] * 2, ExplorationType, strict=False),
    ],
)
def test_exploration_type(policy: str, kind: ExplorationType) -> None:
    """If a distribution lacks a mode, mean or median, the error is the same too."""
    check_same(*policies.case(policy), make_options=lambda: {"exploration_type": kind}, catch=True)


@array_loop
@pytest.mark.parametrize(
    ("env", "policy", "option"),
    [
        *(("cartpole-device", "actor", "no-buffers"), ("mock-many-keys", "actor", "device")),
        *(("torchrl-gym", "actor", "policy-device"), ("toy-infos", "actor", "compact-obs")),
        *(
            ("toy-nested", "actor", option)
            for option in ("split-trajectories", "compact-no-buffers")
        ),
        ("frozen-lake", "actor", "storing-device"),
        *(("cartpole", "hidden_outputs", option) for option in ("no-buffers", "compact-obs")),
        ("cartpole", "actor_value", "storing-device"),
        ("cartpole", "reads_everything", "set-truncated"),
    ],
)
def test_options_on_other_envs_and_with_other_policies(env: str, policy: str, option: str) -> None:
    check_same(ENVS[env], getattr(policies, policy), make_options=lambda: OPTIONS[option])


# ------------------------------------------------------------------------------ recurrent policies


def with_lstms_primer() -> Any:
    env = TransformedEnv(ENVS["cartpole"](), transforms.E.InitTracker())
    primer = policies.recurrent("lstm", env)[1].make_tensordict_primer()
    primer.expand_specs = True
    return env.append_transform(primer)


@on_arrays(
    "case",
    [
        *((ENVS["cartpole-unbatched"], "gru", True), (ENVS["cartpole-init"], "gru", True)),
        *((ENVS["torchrl-gym"], "lstm", True), (with_lstms_primer, "lstm", None)),
    ],
    parent=[(ENVS["cartpole"], "gru", True)],
)
def test_recurrent_policy_with_registered_and_with_explicit_transforms(
    case: tuple[Callable[[], Any], str, bool | None],
) -> None:
    env, kind, registers = case
    options = {"auto_register_policy_transforms": registers}
    check_same(env, partial(policies.recurrent, kind), make_options=lambda: options)


# --------------------------------------------------------------------------------- policy versions


@pytest.mark.behaviour(15)
@scripted("toy", "books", track_policy_version=True)
def test_policy_version_is_recorded_and_counted(collector: Any) -> Iterator[Any]:
    for batch in itertools.islice(collector, 3):
        yield batch
        yield collector.policy_version
        collector.update_policy_weights_()


# ---------------------------------------------------------------------------------- replay buffers


def with_buffer(dims: int = 1, **options: Any) -> dict[str, Any]:
    """Options with a new replay buffer."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(500, ndim=dims), batch_size=4)
    return {"replay_buffer": buffer, **options}


def filling(collector: Any) -> Iterator[Any]:
    """A script that observes the content of the replay buffer."""
    for batch in itertools.islice(collector, 3):
        yield batch
        if collector.replay_buffer.write_count:
            yield collector.replay_buffer[:]
        yield collector.replay_buffer.write_count


SINCE_0_15 = "replay_write_mode" in inspect.signature(ParentCollector.__init__).parameters

BUFFERS: dict[str, dict[str, Any]] = {
    "extend-compact": {"compact_obs": True},
    "extend-postproc": {"postproc": lambda td: td.exclude(("next", "observation")).reshape(-1)},
    "extend-split": {"split_trajs": True, "postproc": lambda td: td[td["collector", "mask"]]},
    "extend-truncated": {"set_truncated": True},
    "extend-random": {"init_random_frames": 40},
    "extend-storing-device": {"storing_device": "cpu"},
    "extend-two-dimensions": {"dims": 2},
    "add": {"extend_buffer": False},
    "add-random": {"extend_buffer": False, "init_random_frames": 40},
    "trajectories": {"trajs_per_batch": 2},
    "trajectories-per-write": {"trajs_per_batch": 2, "trajs_per_write": 3},
}
if SINCE_0_15:
    BUFFERS |= {
        "write-mode-rollout": {"replay_write_mode": "rollout"},
        "write-mode-trajectory": {"replay_write_mode": "trajectory", "trajs_per_write": 2},
    }


@one_by_one(
    BUFFERS,
    *("toy", "toy-unbatched", "books"),
    parent=["extend-postproc", "extend-random", "extend-two-dimensions", "add"],
)
def test_replay_buffer(case: tuple[str, str]) -> None:
    pair, kind = case
    check_same(*PAIRS[pair], filling, lambda: with_buffer(**BUFFERS[kind]))


@scripted("toy", "toy-unbatched", make_options=partial(with_buffer, total_frames=90))
def test_start_fills_the_replay_buffer_from_a_thread(collector: Any) -> Iterator[Any]:
    collector.start()
    collector._thread.join(60)
    yield collector.is_running()
    yield collector.replay_buffer[:]
    collector.async_shutdown()


@array_loop
def test_async_shutdown_stops_an_endless_start() -> None:
    def script(collector: Any) -> Iterator[Any]:
        buffer = collector.replay_buffer
        collector.start()
        while buffer.write_count < 60:
            time.sleep(0.001)
        collector.async_shutdown(timeout=60)
        seed_everything(2)  # how far the thread got is a matter of time
        yield [collector.is_running(), collector.closed]

    check_same(*PAIRS["toy"], script, with_buffer)


# --------------------------------------------------------------------------------------- iteration


@on_arrays("case", [("toy", 60), ("toy-unbatched", 1), ("torchrl", 70)], parent=[("toy", 70)])
def test_total_frames(case: tuple[str, int]) -> None:
    pair, total = case

    def script(collector: Any) -> Iterator[Any]:
        yield len(collector)
        yield from collector
        yield [collector.stats(), type(collector).stats(collector)]
        if SINCE_0_15:
            yield [collector.stats(workers=workers) for workers in ("aggregate", "both")]
        yield [collector._frames, collector._iter, collector.env.is_closed]

    check_same(*PAIRS[pair], script, lambda: {"total_frames": total, "frames_per_batch": 30})


@scripted("toy", "toy-unbatched", total_frames=90, frames_per_batch=30)
def test_next_yields_batches_and_none_at_the_end(collector: Any) -> Iterator[Any]:
    yield [collector.next() for _ in range(4)]


@scripted("toy", "toy-unbatched")
def test_breaking_out_and_iterating_again_goes_on(collector: Any) -> Iterator[Any]:
    for _ in range(2):
        for batch in collector:
            yield batch
            break
    yield collector.rollout()
    yield collector.rollout()
    yield from batches(1)(collector)


@array_loop
@pytest.mark.behaviour(11)
@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (ENVS["toy"], None),
        (partial(make_env, make_toy), {"num_envs": 3}),
        (EnvCreator(ENVS["toy"]), None),
    ],
    ids=["callable", "callable-with-arguments", "creator"],
)
def test_env_from_a_callable_and_policy_from_a_factory(make: Any, kwargs: Any) -> None:
    def first_batch(collector_class: Any) -> Any:
        seed_everything(0)
        factory = partial(policies.actor, ENVS["toy"]())
        collector = collector_class(
            make, policy_factory=factory, frames_per_batch=30, create_env_kwargs=kwargs
        )
        collector.env.set_seed(5)
        collector.reset()
        return next(iter(collector))

    assert_same(first_batch(Collector), first_batch(ParentCollector))


# ------------------------------------------------------------------------- what is done in between


def between(*changes: Callable[[Any], Any]) -> Script:
    """A script that makes these changes to the collector, each after a batch."""

    def script(collector: Any) -> Iterator[Any]:
        stream = iter(collector)
        for change in changes:
            yield next(stream)
            yield change(collector)
        yield next(stream)
        yield next(stream)

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


def change_transform(collector: Any) -> None:
    norm = collector.env.transform[0]
    norm.loc.add_(1.0)
    norm.scale = norm.scale * 2


def quiet(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change whose result is not compared."""
    return lambda collector: [change(collector)].clear()


CHANGES: dict[str, list[Callable[[Any], Any]]] = {
    "weights": [
        lambda c: perturb(c.policy),
        train,
        lambda c: c.update_policy_weights_(),
        lambda c: c.update_policy_weights_(other_weights(c)),
        replace_parameter,
    ],
    "policy": [
        lambda c: first(c, nn.Sequential).__setitem__(1, nn.ReLU()),
        quiet(
            lambda c: first(c, nn.Linear).register_forward_hook(
                lambda module, args, out: out + 0.25
            )
        ),
        quiet(lambda c: c.policy.register_forward_hook(double)),
        quiet(lambda c: c.policy.eval()),
        lambda c: setattr(c, "exploration_type", ExplorationType.DETERMINISTIC),
    ],
    "restarts": [
        lambda c: c.reset(),
        lambda c: c.reset(seed=4),
    ],
    "moves": [  # an env of make_env notices: see test_robustness.py
        quiet(lambda c: c.env.reset()),
        quiet(lambda c: c.env.rollout(3, break_when_any_done=False)),
        seed_and_reset_the_env,
    ],
    "settings": [
        lambda c: setattr(c, "post_collect_hook", lambda td: td.set("hooked", td["action"] + 1)),
        lambda c: setattr(c, "pre_collect_hook", lambda: perturb(c.policy)),
        lambda c: setattr(c, "post_collect_hook", None),
        lambda c: setattr(c, "postproc", lambda td: td.exclude("action")),
    ],
    "questions": [
        quiet(lambda c: c.policy(c.env.fake_tensordict())),
        lambda c: c.fake_tensordict(),
        lambda c: c.load_state_dict(parents_state(c)),
        quiet(lambda c: torch.manual_seed(3)),
        lambda c: next(c.iterator()),
    ],
}


@on_arrays(
    "case",
    [
        *itertools.product(["toy", "torchrl"], ["weights", "restarts"]),
        ("torchrl", "moves"),
        *(("toy-unbatched", change) for change in CHANGES if change != "moves"),
        *(("books", change) for change in ("restarts", "policy", "questions")),
    ],
    parent=[("toy", change) for change in CHANGES if change != "moves"],
)
def test_what_happens_between_batches(case: tuple[str, str]) -> None:
    pair, change = case
    check_same(*PAIRS[pair], between(*CHANGES[change]))


@array_loop
@pytest.mark.parametrize("pair", ["toy", "books"])
def test_reset_of_some_slots(pair: str) -> None:
    indices = (2, torch.tensor([True, False, True]), [0, 2])
    check_same(*PAIRS[pair], between(*(lambda c, i=i: c.reset(i) for i in indices)))


def test_reset_drops_trajectories_in_flight() -> None:
    options = {"trajs_per_batch": 3, "traj_format": "cat"}
    script = between(lambda c: c.reset(), lambda c: c.reset(1))
    check_same(*PAIRS["toy"], script, lambda: options)


@array_loop
@pytest.mark.parametrize("policy", ["epsilon-greedy", "additive-gaussian", "ornstein-uhlenbeck"])
def test_annealed_exploration_is_followed(policy: str) -> None:
    check_same(*policies.case(policy), between(lambda collector: collector.policy[1].step(20)))


@array_loop
@pytest.mark.parametrize("policy", ["dropout", "batch-norm", "noisy"])
def test_modes_switched_between_batches(policy: str) -> None:
    def toggle(collector: Any) -> None:
        collector.policy.train(not collector.policy.training)

    check_same(*policies.case(policy), between(toggle, toggle))


@array_loop
def test_transforms_changed_between_batches() -> None:
    check_same(*PAIRS["books"], between(change_transform))
    evaluating = between(quiet(lambda collector: collector.env.transform.eval()))
    check_same(partial(transforms.make, "vec-norm"), policies.actor, evaluating)


@scripted("toy", "toy-unbatched")
def test_a_batch_changed_by_its_user_changes_nothing_else(collector: Any) -> Iterator[Any]:
    for batch in itertools.islice(collector, 3):
        yield batch
        batch.zero_()


@one_by_one(
    ["buffers", "no-buffers", "compact-obs", "device"],
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
        yield collector.fake_tensordict()

    check_same(*PAIRS[pair], script, lambda: OPTIONS[option])


@scripted("toy", "toy-unbatched", return_same_td=True)
def test_the_same_tensordict_is_given_out_if_asked(collector: Any) -> Iterator[Any]:
    stream = iter(collector)
    first = next(stream)
    yield first
    second = next(stream)
    yield [first is second, first["action"] is second["action"]]
    yield first


# ---------------------------------------------------------------------------- hooks, interruptions


def values(td: Any) -> dict[Any, torch.Tensor]:
    return {key: td[key].clone() for key in td.keys(True, True)}


@on_arrays("case", [("toy", False), ("toy-unbatched", True)], parent=[("toy", True)])
def test_hooks_are_called_around_each_batch(case: tuple[str, bool]) -> None:
    pair, replay = case

    def make_options() -> dict[str, Any]:
        log: list[Any] = []

        def post(td: Any) -> None:
            log.append(values(td))
            td["hooked"] = td["action"] + 1

        options = {"pre_collect_hook": lambda: log.append("pre"), "post_collect_hook": post}
        return with_buffer(**options) if replay else options

    def script(collector: Any) -> Iterator[Any]:
        for batch in itertools.islice(collector, 3):
            yield batch
            yield collector.post_collect_hook.__closure__[0].cell_contents

    check_same(*PAIRS[pair], script, make_options)


class StopsAfter:
    """An interruptor that stops each rollout at its fourth step."""

    calls = 0

    def collection_stopped(self) -> bool:
        self.calls += 1
        return self.calls % 4 == 0


@array_loop
@pytest.mark.parametrize("pair", ["toy", "toy-unbatched", "books"])
def test_interruptor(pair: str) -> None:
    check_same(*PAIRS[pair], make_options=lambda: {"interruptor": StopsAfter()})


@array_loop
def test_interruptor_while_adding_to_a_replay_buffer() -> None:
    check_same(
        *PAIRS["toy"], filling, lambda: with_buffer(extend_buffer=False, interruptor=StopsAfter())
    )


# ------------------------------------------------------------------------------------------- state


@on_arrays("pair", ["books", "torchrl"], parent=["toy"])
def test_state_dict_goes_over_to_a_new_collector(pair: str) -> None:
    make, policy = PAIRS[pair]

    def script(collector: Any) -> Iterator[Any]:
        yield next(iter(collector))
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


@scripted("toy", "torchrl")
def test_attributes_read_by_name_and_shutdown_twice_that_keeps_the_env(
    collector: Any,
) -> Iterator[Any]:
    yield collector.getattr_policy("training")
    yield list(collector.getattr_env("batch_size"))
    yield collector.get_model("policy") is collector.policy
    yield [collector.frames_per_batch, collector.requested_frames_per_batch, collector.n_env]
    yield [collector.closed, collector.split_trajs, collector.total_frames]
    yield repr(collector).split("(")[0]
    env = collector.env
    yield from batches(1)(collector)
    collector.shutdown(close_env=False)
    yield [collector.closed, env.is_closed]
    collector.shutdown()
    yield env.rollout(3)
    env.close()


@array_loop
def test_deleting_the_collector_closes_its_env() -> None:
    env = ENVS["toy"]()
    collector = Collector(env, frames_per_batch=30)
    next(iter(collector))
    del collector
    assert env.is_closed


@on_arrays("policy", ["hooks", "actor-value", "tanh-normal"], parent=["dropout"])
def test_training_flags_and_gradients_are_left_alone(policy: str) -> None:
    def script(collector: Any) -> Iterator[Any]:
        module = collector.policy
        next(module.children()).eval()
        loss = sum(parameter.sum() for parameter in module.parameters())
        loss.backward()
        for batch in itertools.islice(collector, 2):
            yield batch
            yield [m.training for m in module.modules()]
            yield [p.grad.sum() for p in module.parameters()]
            yield [p.requires_grad for p in module.parameters()]
            yield torch.is_grad_enabled()

    check_same(*policies.case(policy), script)


# ---------------------------------------------------------- what policies and transforms are given


class Recorder(TensorDictModuleBase):
    """A policy that keeps a copy of all it is given."""

    in_keys: list[Any] = []  # noqa: RUF012
    out_keys: list[Any] = []  # noqa: RUF012

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


@array_loop
@pytest.mark.parametrize(
    ("env", "over", "options"),
    [
        *(("toy", True, {}), ("toy-unbatched", False, {}), ("torchrl-serial", None, {})),
        # On TorchRL's loop: nested batch sizes are those of the env.
        *(("mock-nested", None, {}), ("mock-many-keys", None, {})),
        ("cartpole", None, {"policy_device": "cpu", "trust_policy": True}),
        ("cartpole", None, {"env_device": "cpu", "trust_policy": True}),
    ],
)
def test_opaque_policies_and_unknown_transforms_are_given_the_same_at_each_step(
    env: str, over: bool | None, options: dict[str, Any]
) -> None:
    """The transform stands over others, or under them; or there is none."""
    logs: list[list[Any]] = []

    def make() -> Any:
        recorder = RecordingTransform()
        recorder.log = []
        logs.append(recorder.log)
        if over is None:
            return ENVS[env]()
        parts = [transforms.books(), recorder] if over else [recorder, transforms.books()]
        return TransformedEnv(ENVS[env](), transforms.E.Compose(*parts))

    def script(collector: Any) -> Iterator[Any]:
        yield from batches(2)(collector)
        yield [logs[-1], collector.policy.log]

    check_same(make, Recorder, script, lambda: options)
