"""What private names of other packages mean, where no test of batches would tell."""

from __future__ import annotations

import gc
import inspect
import json
import multiprocessing
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torchrl.collectors as upstream
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl import _utils
from torchrl import envs as E
from torchrl.collectors import _multi_async, _multi_base, _multi_sync
from torchrl.data import Bounded, Categorical, Composite, OneHot
from torchrl.modules import LSTMModule, SafeModule
from torchrl.testing.mocking_classes import CountingEnv
from torchrl.weight_update import SharedMemWeightSyncScheme

from tdcollect._upstream import collectors as of_collectors
from tdcollect._upstream import others, torchrl
from tdcollect._upstream.collectors import CollectorState, DistributedState, RayState, WorkersState
from tdcollect.collect.step_dict import StepDict

UPSTREAM = "ignore:::(torchrl|tensordict|torch|gymnasium)"
pytestmark = pytest.mark.filterwarnings(UPSTREAM)

cartpole = partial(E.GymEnv, "CartPole-v1")


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def collector(**options: Any) -> upstream.Collector:
    env = E.TransformedEnv(cartpole(), E.StepCounter(max_steps=5))
    options = {"frames_per_batch": 8, "total_frames": 16, **options}
    return upstream.Collector(env, linear(), **options)


# ------------------------------------------------------------------------------------- collectors


def test_a_view_does_not_keep_the_collector_alive() -> None:
    made = collector()
    CollectorState(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_the_state_of_a_collector_is_read_and_written() -> None:
    made = collector(set_truncated=True, init_random_frames=8)
    state = CollectorState(made)
    assert (state.frames, state.iteration) == (0, -1)
    assert state.acts_randomly()
    first = state.carrier.clone()
    batch = made.rollout()
    for key in ("observation", "step_count", ("collector", "traj_ids")):
        assert torch.equal(batch[key][0], first[key])
    assert batch["next", "truncated"][-1]
    state.carrier = state.carrier.clone().set("observation", torch.full((4,), 0.5))
    assert made.rollout()["observation"][0].tolist() == [0.5] * 4
    state.count_frames(8)
    assert state.frames == 8
    assert not state.acts_randomly()
    state.count_frames(8)
    assert made.env.is_closed


def test_batches_are_preallocated_unless_they_are_not_to_be() -> None:
    made = collector(use_buffers=True)
    state = CollectorState(made)
    assert made.rollout() is state.preallocated
    other = state.preallocated = state.preallocated.clone()
    assert made.rollout() is other
    with state.without_preallocation():
        assert made.rollout() is not other
    assert state.preallocates


def test_the_loop_of_rollout_looks_its_policy_up() -> None:
    made = collector()
    state = CollectorState(made)
    policy, calls = state.wrapped_policy, []
    state.policy_call = lambda given: calls.append(1) or policy(given)  # type: ignore[func-returns-value]
    made.rollout()
    assert len(calls) == 8
    assert state.uncompiled_policy is policy


def test_a_rollout_with_gradients_keeps_the_graph_that_rollout_drops() -> None:
    made = collector(use_buffers=False)
    assert not made.rollout()["action"].requires_grad
    assert of_collectors.rollout_with_gradients(made)["action"].requires_grad


def test_one_env_for_each_collector() -> None:
    args, kwargs, count = of_collectors.one_env_each((str,), {}, 3)
    assert (args[0], kwargs, count) == ([str] * 3, {}, 3)
    assert of_collectors.normalize_env_functions((), {"create_env_fn": [print]}) == (
        (),
        {"create_env_fn": print},
    )
    with pytest.raises(ValueError, match="3 != 2"):
        of_collectors.one_env_each(([str, str],), {}, 3)


def test_defaults_that_a_class_has_others_for_are_dropped() -> None:
    parameters = inspect.signature(upstream.MultiCollector.__init__).parameters
    generic = inspect.signature(upstream.Collector.__init__).parameters
    kwargs = {
        name: generic[name].default
        for name in parameters
        if name in generic and generic[name].default != parameters[name].default
    }
    kwargs |= {"frames_per_batch": 8, "cat_results": 0}
    of_collectors.drop_generic_defaults(upstream.MultiCollector, kwargs)
    assert kwargs.items() >= {"frames_per_batch": 8, "cat_results": 0}.items()
    assert {*kwargs} <= {"frames_per_batch", "cat_results", "policy"}


def test_queues_can_be_waited_for() -> None:
    queue: Any = multiprocessing.Queue()
    ends = of_collectors.readers([queue])
    assert connection.wait(ends, 0) == []
    queue.put(1)
    assert connection.wait(ends, 10) == ends
    queue.get()
    queue.close()


def test_messages_to_workers_are_pairs_with_the_name_second() -> None:
    for module in (_multi_base, _multi_sync, _multi_async):
        sent = re.findall(r"\.send\(\s*\((.*?)\)\s*\)", inspect.getsource(module), re.S)
        assert sent
        for message in sent:
            assert re.search(r', (msg|"\w+")$', message.strip().rstrip(",")), message


def test_nobody_waits_for_the_word_of_a_worker_that_is_released() -> None:
    put: dict[int, list[str]] = {0: [], 1: []}
    scheme: Any = SharedMemWeightSyncScheme()
    scheme._ack_queues = {worker: SimpleNamespace(put=put[worker].append) for worker in put}
    state = WorkersState(SimpleNamespace(_weight_sync_schemes={"policy": scheme}))
    state.release_update(1)
    assert put == {0: [], 1: ["updated"]}
    scheme._ack_queues = {}
    state.end_weight_sync()
    assert scheme._is_shutdown


def test_states_before_the_constructor_has_set_them() -> None:
    assert RayState(SimpleNamespace()).actors is None
    assert not RayState(SimpleNamespace()).learner_sends
    assert not DistributedState(SimpleNamespace()).shut_down
    assert DistributedState(SimpleNamespace()).schemes is None
    assert CollectorState(SimpleNamespace()).stateful_policy is None


def test_each_distributed_worker_has_memory_of_its_own_and_is_asked_by_the_store() -> None:
    told: dict[str, bytes] = {}
    limits: list[Any] = []
    store = SimpleNamespace(set=told.__setitem__, set_timeout=limits.append)
    memory = TensorDict({"a": torch.zeros(3)}, [3]).expand(2, 3)
    of = SimpleNamespace(_tensordict_out=memory, _store=store)
    state = DistributedState(of)
    state.separate()
    of._single_tds[0]["a"].fill_(1)
    assert state.received["a"].tolist() == [[1, 1, 1], [0, 0, 0]]
    of._tensordict_out = [
        None,
        SimpleNamespace(irecv=lambda src, return_premature: (src, return_premature)),
    ]
    trackers: list[Any] = [None, None]
    state.ask_for_batch(1, trackers)
    state.wait_at_most(60)
    assert told == {"NODE_2_in": b"continue"}
    assert trackers == [None, (2, True)]
    assert [limit.total_seconds() for limit in limits] == [60]


# ------------------------------------------------------------------------------------------- envs


@pytest.mark.parametrize(
    ("space", "categorical", "spec"),
    [
        (spaces.Discrete(3), False, OneHot(3, dtype=torch.int64)),
        (spaces.Discrete(3), True, Categorical(3, dtype=torch.int64)),
        (spaces.Box(0, 1, ()), False, Bounded(0, 1, (1,), dtype=torch.float32)),
    ],
    ids=str,
)
def test_spaces_have_specs(space: Any, categorical: bool, spec: Any) -> None:
    converted = torchrl.gym_space_to_spec(space, categorical_action_encoding=categorical)
    assert converted == spec
    assert converted.dtype == spec.dtype


def test_spaces_have_no_dtype_that_torch_lacks() -> None:
    with pytest.raises((KeyError, TypeError)):
        torchrl.gym_space_to_spec(spaces.Box(0, 1, (2,), np.uint16))


def test_carried_entries_are_those_that_step_mdp_carries() -> None:
    env = E.TransformedEnv(cartpole(), E.Compose(E.StepCounter(), E.RewardSum()))
    carried = set(env.step_mdp(env.rand_step(env.reset())).keys(True, True))
    flags = {"done", "terminated", "truncated", "action"}
    assert set(torchrl.carried_entries(env)) == carried - flags


def test_what_is_replaced_on_an_env() -> None:
    class Looping(CountingEnv):
        def step_and_maybe_reset(self, tensordict: Any) -> Any:
            return super().step_and_maybe_reset(tensordict)

    assert torchrl.steps_alone(CountingEnv())
    assert not torchrl.steps_alone(Looping())
    assert not torchrl.steps_alone(E.ParallelEnv(2, cartpole))
    env = cartpole()
    assert torchrl.replaced_methods(env) == []
    env.fast_encoding()
    assert set(torchrl.replaced_methods(env)) == {"read_obs", "read_reward"}


def test_arguments_of_resets_and_the_flags_left_out() -> None:
    assert torchrl.arguments_of_resets(cartpole()) == {}
    assert torchrl.arguments_of_resets(E.PendulumEnv()) == {"set_state": False}
    entries = TensorDict({"terminated": torch.ones(1, dtype=torch.bool)})
    torchrl.complete_done(cartpole(), entries)
    assert bool(entries["done"])


def test_envs_whose_reset_takes_the_seed() -> None:
    class Own(E.GymWrapper):
        def _set_seed(self, seed: int | None) -> None:
            super()._set_seed(seed)

    assert torchrl.resets_with_seed(cartpole())
    assert not torchrl.resets_with_seed(Own(gym.make("CartPole-v1")))
    assert not torchrl.resets_with_seed(E.PendulumEnv())
    env = cartpole()
    first = env.reset(seed=3)["observation"]
    env.set_seed(3)
    assert not torch.equal(env.reset()["observation"], first)
    assert torch.equal(env.reset(seed=3)["observation"], first)


def test_envs_of_a_serial_env_and_what_its_resets_show() -> None:
    env = E.SerialEnv(2, cartpole)
    assert torchrl.serial_envs(env) is None
    begun = env.reset()
    assert len(torchrl.serial_envs(env) or ()) == 2
    shown = torchrl.shown_by_resets(env)
    assert shown is not None
    assert torch.equal(shown["observation"], begun["observation"])
    env.step(env.rand_action(begun))
    again = env._reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
    assert torch.equal(again["observation"][1], begun["observation"][1])
    assert torchrl.shown_by_resets(E.SerialEnv(2, cartpole, use_buffers=False)) is None


def test_next_seed_is_the_chain_of_batched_envs() -> None:
    env = E.SerialEnv(2, cartpole)
    env.set_seed(3)
    second = torchrl.next_seed(3)
    begun = env.reset(list_of_kwargs=[{"seed": 3}, {"seed": second}])["observation"]
    for slot, seed in enumerate((3, second)):
        assert begun[slot].tolist() == gym.make("CartPole-v1").reset(seed=seed)[0].tolist()
    assert env.set_seed(3) == torchrl.next_seed(second)


def test_settings_of_a_parallel_env() -> None:
    env, other = E.ParallelEnv(2, cartpole), E.ParallelEnv(2, cartpole, use_buffers=False)
    assert torchrl.start_method(E.ParallelEnv(2, cartpole, mp_start_method="fork")) == "fork"
    assert torchrl.start_method(env) in multiprocessing.get_all_start_methods()
    assert (torchrl.uses_buffers(env), torchrl.uses_buffers(other)) == (True, False)
    assert torchrl.owns_workers(env)
    assert not torchrl.has_metadata_from_workers(env)
    assert torchrl.shares_memory(env)
    assert not torchrl.shares_memory(E.ParallelEnv(2, cartpole, shared_memory=False))


def test_settings_of_a_gym_wrapper() -> None:
    env = cartpole(categorical_action_encoding=True, convert_actions_to_numpy=False)
    vector = gym.vector.SyncVectorEnv(
        [partial(gym.make, "CartPole-v1")], autoreset_mode=gym.vector.AutoresetMode.DISABLED
    )
    for told, other in (
        (torchrl.is_categorical, env),
        (torchrl.is_vectorised, E.GymWrapper(vector)),
    ):
        assert told(other)
        assert not told(cartpole())
    assert torchrl.converts_actions(cartpole())
    assert not torchrl.converts_actions(env)


def test_threads_are_limited_as_torchrl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for threads in (None, 2, 8):
        torchrl.limit_threads(E.ParallelEnv(3, cartpole, num_threads=threads))
    assert given == [5, 2]


def test_the_timeout_of_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrl.pipe_timeout() is None
    monkeypatch.setattr(_utils, "BATCHED_PIPE_TIMEOUT", 5.0)
    assert torchrl.pipe_timeout() == 5.0


def test_commands_go_over_the_channels_that_are_set() -> None:
    sent: list[str] = []

    def recv() -> Any:
        return ("seeded", 7) if sent[-1] == "seed" else (sent[-1], OrderedDict())

    def send(message: Any) -> None:
        sent.append(message[0])

    env = E.ParallelEnv(2, cartpole)
    torchrl.set_channels(env, [SimpleNamespace(send=send, recv=recv) for _ in range(2)])
    env.is_closed = False
    assert env.set_seed(3) == 7
    assert torchrl.chain_of_seeds(env) == [3, 7]
    assert list(env.state_dict()) == ["worker0", "worker1"]
    env.load_state_dict({})
    env.get_wrapper_attr("spec")
    assert list(dict.fromkeys(sent)) == [
        "seed",
        "state_dict",
        "load_state_dict",
        "get_wrapper_attr",
    ]
    torchrl.drop_channels(env)
    env.is_closed = True
    assert not {"parent_channels", "_workers", "_events"} & set(vars(env))


@pytest.mark.parametrize("shared", [True, False])
def test_creators_share_statistics(shared: bool) -> None:
    transform = partial(E.VecNormV2, ["observation"]) if shared else E.RewardSum
    creator = E.EnvCreator(lambda: E.TransformedEnv(cartpole(), transform()))
    assert torchrl.shared_values(creator) is shared


def test_locks_are_left_out_of_state_dicts() -> None:
    state = OrderedDict(a=1, inner=OrderedDict(lock=multiprocessing.Lock()))
    assert torchrl.without_locks(state) == OrderedDict(a=1, inner=OrderedDict(lock=None))


# ------------------------------------------------------------------------------------- transforms


class Own(E.Transform):
    """Has all methods of its own."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        return next_tensordict

    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict

    def _reset_env_preprocess(self, tensordict: Any) -> Any:
        return tensordict

    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        return tensordict, tensordict_


class Mapped(E.ObservationNorm):
    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return obs


class Called(E.ObservationNorm):
    def _call(self, next_tensordict: Any) -> Any:
        return next_tensordict


def test_own_methods_of_a_transform_are_found() -> None:
    plain, own, clip = E.Transform(), Own(), E.ClipTransform(in_keys_inv=["action"], low=0.0)
    for tell in (torchrl.inverts, torchrl.reads_step, torchrl.changes_loop):
        assert tell(own)
        assert not tell(plain)
    assert torchrl.inverts(clip)
    assert torchrl.inverts(E.ExcludeTransform("a", inverse=True))
    assert torchrl.preparation_of(own) is not None
    assert torchrl.preparation_of(plain) is None
    assert torchrl.does_nothing_in_steps(E.NoopResetEnv(3))
    assert not torchrl.does_nothing_in_steps(own)
    norm: Any = Mapped(0.0, 1.0, in_keys=["a"])
    assert torchrl.only_applies(norm, [E.ObservationNorm])
    assert not torchrl.only_applies(Called(0.0, 1.0, in_keys=["a"]), [E.ObservationNorm])
    assert not torchrl.only_applies(E.StepCounter(), [E.ObservationNorm])
    assert torchrl.replaced_calls(norm) == []
    norm._apply_transform = abs
    assert torchrl.replaced_calls(norm) == ["_apply_transform"]


def test_settings_of_a_transform_leave_its_env_out() -> None:
    counter = E.StepCounter(5)
    before = {name: vars(counter).get(name) for name in torchrl.TRANSIENT_ATTRIBUTES}
    env = E.TransformedEnv(cartpole(), counter)
    env.rollout(2)
    assert before != {name: vars(counter).get(name) for name in torchrl.TRANSIENT_ATTRIBUTES}
    settings = torchrl.settings_of(counter)
    assert settings["max_steps"] == 5
    assert not any(isinstance(value, E.EnvBase) for value in settings.values())


def test_transforms_run_on_dicts_of_tensors() -> None:
    """The rows of tdcollect are dicts with a little more; transforms take them for TensorDicts."""
    rows = StepDict({"reward": torch.tensor([2.0])})
    torchrl.call_of(E.RewardScaling(loc=1.0, scale=3.0))(rows)
    assert rows["reward"].item() == 7.0


@pytest.mark.parametrize("key", ["a", ("b", "c")])
def test_vec_norm_sums_are_those_that_a_step_updates(key: Any) -> None:
    norm = E.VecNorm([key], decay=0.5)
    sums = torchrl.VecNormSums(norm)
    assert sums.kept is None
    assert sums.of(key) is None
    sums.begin(key, TensorDict({key: torch.ones(3)}))
    found = sums.of(key)
    assert found is not None
    assert [value.tolist() for value in found] == [[0.0] * 3, [0.0] * 3, [0.0]]
    norm(TensorDict({key: torch.full((3,), 2.0)}))
    assert [value.flatten()[0].item() for value in found] == [2.0, 4.0, 1.0]


def test_vec_norm_v2_statistics_are_those_that_a_step_updates() -> None:
    norm = E.VecNormV2(["observation"], decay=1.0)
    statistics = torchrl.VecNormV2Statistics(norm)
    assert not statistics.on_cpu(["observation"])
    env = E.TransformedEnv(cartpole(), norm)
    assert statistics.on_cpu(["observation"])
    assert not statistics.on_cpu(["observation", "other"])
    loc, var, count = statistics.of("observation")
    env.reset()
    assert count.item() == 1
    assert torch.equal(norm.loc["observation"], loc)
    assert torch.equal(var, loc**2)
    assert not torchrl.casts_integers(norm)


@pytest.mark.parametrize("key", ["observation", ("inner", "part")])
def test_restart_stacks_fills_the_buffer_of_that_name(key: Any) -> None:
    frames = E.CatFrames(2, -1, [key])
    entries = StepDict({key: torch.arange(2.0)[:, None]})
    torchrl.restart_stacks(frames, entries, torch.tensor([True, True]))
    entries[key] = torch.ones(2, 1) * 5
    torchrl.restart_stacks(frames, entries, torch.tensor([False, True]))
    assert entries[key].tolist() == [[0.0, 0.0], [5.0, 5.0]]
    assert torch.equal(dict(frames.named_buffers())[torchrl.stack_buffer_name(key)], entries[key])


def test_policy_transforms_are_appended_once() -> None:
    lstm = LSTMModule(4, 2, in_key="observation", out_key="action")
    appended = torchrl.append_policy_transforms(cartpole(), lstm)
    assert set(lstm.in_keys) <= set(appended.reset().keys())
    assert torchrl.append_policy_transforms(appended, lstm) is appended
    assert len(appended.transform) == 2


# ---------------------------------------------------------------------------------------- modules


def safe_module() -> SafeModule:
    return SafeModule(nn.Identity(), ["a"], ["b"], spec=Bounded(-1, 1, (2,)), safe=True)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_are_found(kind: str, of_all: bool) -> None:
    plain, safe = nn.Identity(), safe_module()
    assert not torchrl.has_hooks(plain)
    assert torchrl.only_projects(safe)
    assert not torchrl.only_projects(plain)
    if of_all:
        handles = [getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)]
    else:
        both = (plain, safe)
        handles = [getattr(one, f"register_{kind}_hook")(lambda *_: None) for one in both]
    try:
        assert torchrl.has_hooks(plain)
        assert not torchrl.only_projects(safe)
        assert torchrl.has_forward_hooks(plain) is (kind.startswith("forward") and not of_all)
    finally:
        for handle in handles:
            handle.remove()


def test_the_hook_of_safe_modules_projects() -> None:
    step = TensorDict({"b": torch.tensor([3.0, 0.5])})
    torchrl.project_outputs(safe_module(), step, step)
    assert step["b"].tolist() == [1.0, 0.5]


def test_an_exploration_module_takes_another_spec() -> None:
    module = safe_module()
    assert torchrl.exploration_spec(module)["b"] == Bounded(-1, 1, (2,))
    torchrl.set_exploration_spec(module, Composite(b=Bounded(-3, 3, (2,))))
    assert module(TensorDict(a=torch.tensor([5.0, 2.0])))["b"].tolist() == [3, 2]


def test_compiled_modules_and_defaults_of_distributions_are_known() -> None:
    module = nn.Identity()
    assert not torchrl.is_compiled(module)
    module.compile(backend="eager")
    assert torchrl.is_compiled(module)
    distribution = torch.distributions.Distribution
    before = torchrl.validates_arguments()
    try:
        for default in (True, False):
            distribution.set_default_validate_args(default)
            assert torchrl.validates_arguments() is default
    finally:
        distribution.set_default_validate_args(before)


def test_torch_dispatch_mode_sees_operators_with_a_schema() -> None:
    seen = []

    class Watch(torchrl.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(torchrl.schema_of(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.empty(2).normal_(generator=torch.Generator())
    assert [schema.name for schema in seen] == ["aten::empty", "aten::normal_"]
    drawn = {argument.name: argument for argument in seen[1].arguments}
    assert drawn["self"].alias_info.is_write
    assert drawn["generator"].kwarg_only


def module_of(**options: Any) -> TensorDictModule:
    return TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"], **options)


def distribution_of(**options: Any) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=torch.distributions.Normal,
        **options,
    )


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (module_of(), torchrl.MODULE_METHODS),
        (distribution_of(), torchrl.PROBABILISTIC_METHODS),
        (TensorDictSequential(module_of()), ("_run_module", "_module_iter")),
    ],
)
def test_a_call_of_a_module_goes_through_the_methods_named(module: Any, names: Any) -> None:
    given = TensorDict({name: torch.ones(2) for name in ("a", "loc", "scale")})
    for name in names:
        if name.startswith("_") and not name.startswith("__"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(module), name, lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    module(given.clone())


def test_what_a_sequence_calls_and_returns() -> None:
    first, second = module_of(), TensorDictModule(nn.Linear(2, 2), ["b"], ["c"])
    sequence = TensorDictSequential(first, second, first)
    assert [*map(id, torchrl.modules_in_order(sequence))] == [*map(id, (first, second, first))]
    assert not torchrl.selects_output(sequence)
    sequence.select_out_keys("b")
    assert torchrl.selects_output(sequence)
    parameters = TensorDictModule(lambda a: (a, a.exp()), ["a"], ["loc", "scale"])
    drawing = ProbabilisticTensorDictSequential(parameters, distribution_of())
    assert torchrl.draws_sample(drawing)
    assert not torchrl.draws_sample(ProbabilisticTensorDictSequential(parameters))


def test_draws_of_a_module_are_those_of_its_call() -> None:
    assert not torchrl.has_generator(distribution_of())
    assert torchrl.has_generator(distribution_of(generator=torch.Generator()))
    assert torchrl.has_generator(distribution_of(generator="generator"))
    module = distribution_of(default_interaction_type="random")
    given = TensorDict({"loc": torch.zeros(5), "scale": torch.ones(5)})
    torch.manual_seed(0)
    called = module(given.clone())["action"]
    torch.manual_seed(0)
    drawn = torchrl.draw_of(module)(module.get_dist(given), interaction_type=InteractionType.RANDOM)
    assert torch.equal(called, drawn)


def test_inputs_of_a_module() -> None:
    assert not torchrl.get_options(module_of())
    options = {"as_padded_tensor": True}
    assert torchrl.get_options(module_of(get_kwargs=options)) == options
    assert torchrl.keyword_names(module_of()) is None
    named = TensorDictModule(lambda x, y: x - y, in_keys={"y": "a", "x": "b"}, out_keys=["c"])
    names = torchrl.keyword_names(named) or []
    assert dict(zip(names, named.in_keys, strict=True)) == {"y": "a", "x": "b"}


@pytest.mark.parametrize(
    ("key", "name"), [("a", "a"), ("a/b", "a%2Fb"), ("..", "%2E%2E"), ("", "%")]
)
def test_names_and_class_of_memory_maps(tmp_path: Path, key: str, name: str) -> None:
    assert torchrl.encode_key_for_filesystem(key) == name
    TensorDict({key: torch.zeros(1)}).memmap(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"meta.json", f"{name}.memmap"}
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta[torchrl.MEMMAP_TYPE] == str(TensorDict)


def test_an_unchecked_tensordict_is_the_one_that_is_checked() -> None:
    value, cpu = torch.zeros(2, 3), torch.device("cpu")
    made = torchrl.unchecked_tensordict({"a": value, "b": {"c": value}}, torch.Size([2]), cpu)
    assert made["a"] is value
    assert type(made["b"]) is TensorDict
    assert (made["b"].batch_size, made["b"].device) == (torch.Size([2]), cpu)
    made["b", "d"] = value
    assert ("b", "d") in made.keys(True)


def test_a_function_is_applied_for_a_batch_size_that_is_not_its_results() -> None:
    rows = TensorDict({"a": torch.arange(3.0), "b": {"c": torch.arange(6).view(3, 2)}}, [3])
    nest = lambda values: torch.nested.as_nested_tensor(list(values.split([1, 2])))  # noqa: E731
    found = torchrl.apply_unchecked(rows, nest, [2, -1])
    assert found.batch_size == torch.Size([2, -1])
    assert [len(part) for part in found["b", "c"].unbind()] == [1, 2]


# -------------------------------------------------------------------------- gymnasium, EnvPool, Ray


def test_wrapper_state_is_all_that_tells_two_wrapped_envs_apart() -> None:
    """Steps change these attributes of the wrappers of ``gymnasium.make``, and no others."""
    used, fresh = gym.make("CartPole-v1"), gym.make("CartPole-v1")
    used.reset(seed=0)
    used.step(0)
    kinds = set()
    while used is not used.unwrapped:
        kinds.add(type(used))
        changed = {
            name
            for name, value in vars(used).items()
            if isinstance(value, (bool, int, float, type(None))) and value != vars(fresh).get(name)
        }
        saved = set(others.WRAPPER_STATE[type(used)])
        # The checker notes that it has checked, which decides about nothing else.
        assert changed - saved <= {"checked_reset", "checked_step", "checked_render"}
        assert saved <= set(vars(used))
        used, fresh = used.env, fresh.env  # type: ignore[attr-defined]
    assert kinds == set(others.WRAPPER_STATE)


def test_wrapper_state_of_a_time_limit_decides_when_it_truncates() -> None:
    env = gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 7)
    assert others.steps_of_time_limit(env) == 7
    env.reset(seed=0)
    (elapsed,) = others.WRAPPER_STATE[gym.wrappers.TimeLimit]
    setattr(env, elapsed, 6)
    assert env.step(env.action_space.sample())[3]


def test_flat_pool_gives_and_nests_what_step_gives() -> None:
    """The backend reads the list of arrays that EnvPool's ``step`` nests."""
    envpool = pytest.importorskip("envpool", reason="envpool is not installed")
    nested, pool = (envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=0) for _ in range(2))
    flat = others.flat_pool(pool)
    first, _ = nested.reset()
    flat.reset(pool.all_env_ids)
    assert (flat.nest(flat.receive(), True, True)[0] == first).all()
    observation, reward, terminated, truncated, info = nested.step(np.array([0, 1, 0]))
    pool.send(np.array([0, 1, 0]))
    received = flat.receive()
    state = dict(zip(flat.names, received, strict=True))
    assert (state["obs"] == observation).all()
    assert (state["reward"] == reward).all()
    assert (state["done"] & ~state["trunc"] == terminated).all()
    assert (state["trunc"] == truncated).all()
    assert (state["info:env_id"] == info["env_id"]).all()
    assert (flat.nest(received, True, True)[0] == observation).all()


def test_names_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of lost workers reads the state of a real actor."""
    ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    from ray._private import state

    @ray.method(**others.bounded(3))
    def stream() -> Iterator[int]:
        yield 1

    assert stream.__ray_generator_backpressure_num_objects__ == 3
    assert stream.__ray_num_returns__ == "streaming"
    assert ray.is_initialized() or not others.started_here()
    context = SimpleNamespace(error_message="it was killed")
    cause = SimpleNamespace(actor_died_error_context=context)
    found = {"State": "DEAD", "Pid": 7, "Address": {"IPAddress": "here"}, "DeathCause": cause}
    monkeypatch.setattr(state, "actors", {"ab": found}.__getitem__)
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "ab"))
    assert others.state_of(actor) == ("DEAD", 7, "here", "it was killed")
