"""Meanings of private names of other packages, where no test of batches would tell."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl import _utils
from torchrl import envs as E
from torchrl.collectors import _multi_async, _multi_base, _multi_sync
from torchrl.data import Bounded
from torchrl.modules import SafeModule
from torchrl.weight_update import SharedMemWeightSyncScheme

from tdcollect._upstream import others, torchrl
from tdcollect._upstream.collectors import CollectorState, RayState, WorkersState

from ..zoo.torchrl_envs import Lives, atari_like

pytestmark = pytest.mark.filterwarnings("ignore:::(torchrl|tensordict|torch|gymnasium)")

cartpole = partial(E.GymEnv, "CartPole-v1")


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


def test_lives_are_those_of_the_env_inside_however_often_that_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    game = atari_like()
    end = next(part for part in game.transform if isinstance(part, E.EndOfLifeTransform))
    vector = gym.vector.SyncVectorEnv([Lives] * 2, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    slots = E.GymWrapper(vector)
    several = E.TransformedEnv(slots, E.EndOfLifeTransform(eol_attribute="envs.ale.lives"))
    read = torchrl.lives_reader(end, game.base_env)
    read_several = torchrl.lives_reader(several.transform, slots)
    for left in (3, 2):
        game.base_env._env = Lives()
        for env in (game.base_env._env, vector.envs[1]):
            env.unwrapped.ale.left = left
        assert read() == end._get_lives() == left
        assert read_several().tolist() == several.transform._get_lives().tolist() == [3, left]
    monkeypatch.setattr(nn.Module, "__dir__", None)  # all names: 50 us
    assert read() == 2


def test_states_before_the_constructor_has_set_them() -> None:
    assert RayState(SimpleNamespace()).actors is None
    assert not RayState(SimpleNamespace()).learner_sends
    assert CollectorState(SimpleNamespace()).stateful_policy is None


def test_spaces_have_no_dtype_that_torch_lacks() -> None:
    with pytest.raises((KeyError, TypeError)):
        torchrl.gym_space_to_spec(spaces.Box(0, 1, (2,), np.uint16))


def test_settings_of_a_parallel_env() -> None:
    env, other = E.ParallelEnv(2, cartpole), E.ParallelEnv(2, cartpole, use_buffers=False)
    assert torchrl.start_method(E.ParallelEnv(2, cartpole, mp_start_method="fork")) == "fork"
    assert (torchrl.uses_buffers(env), torchrl.uses_buffers(other)) == (True, False)
    assert torchrl.owns_workers(env)
    assert not torchrl.has_metadata_from_workers(env)
    assert torchrl.shares_memory(env)
    assert not torchrl.shares_memory(E.ParallelEnv(2, cartpole, shared_memory=False))


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


def test_options_of_modules() -> None:
    options = {"as_padded_tensor": True}
    assert torchrl.get_options(module_of(get_kwargs=options)) == options
    assert not torchrl.get_options(module_of())
    assert not torchrl.has_generator(distribution_of())
    assert torchrl.has_generator(distribution_of(generator=torch.Generator()))
    assert torchrl.has_generator(distribution_of(generator="generator"))
    parameters = TensorDictModule(lambda a: (a, a.exp()), ["a"], ["loc", "scale"])
    assert not torchrl.draws_sample(ProbabilisticTensorDictSequential(parameters))
    assert torchrl.draws_sample(ProbabilisticTensorDictSequential(parameters, distribution_of()))


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
