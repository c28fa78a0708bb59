"""tdcollect.Evaluator has the methods and results of TorchRL's."""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl import collectors
from torchrl.checkpoint import Checkpoint
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.envs.utils import ExplorationType

import tdcollect
from tdcollect import Evaluator
from tdcollect._upstream.torchrl import seed_generator
from tdcollect.randomness import GlobalRandomness
from tdcollect.threads import other_threads

from .. import forkserver
from .envs import Strict, TenOrTwoHundred, Walk
from .evaluators import Gated, shape_of
from .policies import OneHotOfBest, categorical, deterministic
from .torchrl_envs import Seeded

pytestmark = pytest.mark.usefixtures("quick_children")

EPISODES = 6
NEWER = hasattr(collectors.Evaluator, "evaluate_episodes")
"""True from TorchRL 0.15 on."""


class Told(list[Any]):
    """The metrics that on_result was told; it raises when asked to."""

    raises = False

    def __call__(self, metrics: Any) -> None:
        self.append((threading.current_thread().name, metrics))
        if self.raises:
            raise ZeroDivisionError("in the callback")


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def policy() -> Any:
    return categorical()


@pytest.fixture(scope="module")
def shared(quick_children: None, policy: Any, told: Told) -> Iterator[Evaluator]:
    """An evaluator of the walk, whose process is warm."""
    with Evaluator(
        Walk, policy, num_trajectories=EPISODES, metrics_fn=shape_of, on_result=told
    ) as made:
        yield made


@pytest.fixture
def evaluator(shared: Evaluator, told: Told) -> Iterator[Evaluator]:
    told.clear()
    told.raises = False
    yield shared
    while shared.wait(60) is not None:
        pass
    assert not shared.pending


def offline(policy: Any, **settings: Any) -> tdcollect.EvaluationResult:
    return tdcollect.evaluate(Walk, policy, EPISODES, progress=False, **settings)


# --- the same as TorchRL's -----------------------------------------------------------------------


def test_each_parameter_and_each_method_of_torchrls_is_one_of_ours() -> None:
    theirs = dict(inspect.signature(collectors.Evaluator).parameters)
    ours = inspect.signature(Evaluator).parameters
    for name in ("collector_cls", "collector_kwargs", "done_keys", "frames_per_batch"):
        theirs.pop(name, None)  # of its collector
    theirs.pop("weight_sync_schemes", None)
    names = [name for name in ours if name != "episode_sampling" or NEWER]
    assert names[: len(theirs)] == [*theirs]
    differing = {
        name
        for name, parameter in theirs.items()
        if (ours[name].kind, ours[name].default) != (parameter.kind, parameter.default)
    }
    documented = {"busy_policy", "reward_keys", "episode_sampling"}
    assert differing == (documented if NEWER else documented - {"episode_sampling"})
    for name, theirs in vars(collectors.Evaluator).items():
        if name.startswith("_"):
            continue
        ours = inspect.getattr_static(Evaluator, name)
        assert type(ours) is type(theirs)
        if callable(theirs):
            have, wanted = (
                [(p.name, p.kind, p.default) for p in inspect.signature(one).parameters.values()]
                for one in (ours, theirs)
            )
            assert have == wanted


@pytest.mark.filterwarnings("ignore")
def test_torchrls_has_no_seed_and_favours_short_episodes() -> None:
    """The true mean length is 105."""
    # Of its 32 slots, half end an episode at step 10, and half of those that follow at step 20.
    slots = SerialEnv(32, lambda: GymWrapper(TenOrTwoHundred()))
    theirs = collectors.Evaluator(slots, deterministic(1), num_trajectories=16)
    assert theirs.evaluate()["eval/episode_length"] < 60
    theirs.shutdown()
    assert "seed" not in inspect.signature(collectors.Evaluator).parameters
    with Evaluator(TenOrTwoHundred, deterministic(1), num_trajectories=32) as ours:
        found = [ours.evaluate()["eval/episode_length"] for _ in range(2)]
    assert 80 < found[0] == found[1] < 130  # the same each time, whatever the load


def returns_of(kind: Any, **options: Any) -> list[float]:
    """The mean returns of policies whose actions, and so rewards, are 0, 1 and 0 in ten steps."""

    def make(env: Any = None) -> Any:
        return TensorDictModule(torch.nn.Linear(2, 1), ["observation"], ["action"])

    strict, trained = partial(Strict, spaces.Box(0, 1, (1,))), make()
    trained.module.weight.data.zero_()
    evaluator = kind(
        lambda: GymWrapper(strict()), policy_factory=make, num_trajectories=2, **options
    )
    found = []
    for push in (0, 1, 0):
        trained.module.bias.data.fill_(push)
        found.append(float(evaluator.evaluate(trained)["eval/reward"]))
    evaluator.shutdown()
    return found


def torchrls_process() -> None:
    print(*returns_of(collectors.Evaluator, frames_per_batch=7, backend="process"))


@pytest.mark.slow
def test_torchrls_process_counts_episodes_begun_under_old_weights() -> None:
    done = forkserver.run(torchrls_process)
    assert any(0 < float(one) < 10 for one in done.stdout.split()), done.stderr
    assert returns_of(Evaluator) == [0.0, 10.0, 0.0]


def test_metrics_are_torchrls_and_those_of_a_function_of_padded_episodes(
    evaluator: Evaluator, policy: Any
) -> None:
    metrics = evaluator.evaluate(step=42)
    result = offline(policy)
    returns = result.summary().returns
    expected = {
        "reward": returns.mean,
        "reward_std": torch.tensor(result.returns).std().item(),
        "reward_low": returns.mean_interval.low,
        "reward_high": returns.mean_interval.high,
        "episode_length": result.lengths.mean(),
        "num_episodes": EPISODES,
        "failed": 0,
        "step": 42,
        "episodes": EPISODES,
        "longest": result.lengths.max(),
        "steps": result.lengths.sum(),
        "in_order": True,
    }
    assert {name: metrics[f"eval/{name}"] for name in expected} == expected
    assert metrics["eval/rewards"].item() == pytest.approx(result.returns.sum(), rel=1e-5)
    assert metrics["eval/fps"] > 0
    assert metrics["eval/process"] != os.getpid()


def test_episodes_are_those_of_an_evaluation_and_leave_the_curve_alone(
    evaluator: Evaluator, policy: Any, told: Told
) -> None:
    evaluator.evaluate(step=1)
    told.clear()
    points = evaluator.curve
    found = evaluator.evaluate_episodes(seed=5, step=2)
    result = offline(policy, seed=5)
    assert found.batch_size == (EPISODES,)
    assert found["episode_reward"].tolist() == result.returns.tolist()
    assert found["episode_length"].tolist() == result.lengths.tolist()
    assert found["truncated"].tolist() == [e.truncated for e in result.episodes]
    assert found["env_index"].tolist() == [*range(EPISODES)]
    assert found["episode_length"].dtype == torch.int64
    assert evaluator.evaluate_episodes()["episode_reward"].tolist() == [
        *offline(policy).returns
    ]  # of its own seed
    assert (evaluator.curve, told) == (points, [])
    with pytest.raises(ValueError, match="seed"):
        evaluator.evaluate_episodes(seed=-1)
    with pytest.raises(ValueError, match="episode_sampling"):
        Evaluator(Walk, policy, episode_sampling="all")


def rewards_of(kind: Any, env: Any, policy: Any, **options: Any) -> torch.Tensor:
    """The rewards of four episodes whose most likely or sampled actions are taken."""
    made = kind(env, policy, num_trajectories=4, max_steps=20, **options)
    found = made.evaluate_episodes(seed=7)["episode_reward"].flatten().double()
    made.shutdown()
    return found


@pytest.mark.skipif(not NEWER, reason="evaluate_episodes() is new in TorchRL 0.15")
def test_most_likely_actions_are_torchrls_and_sampled_ones_do_not_depend_on_slots() -> None:
    seeds = [*accumulate([7, *[None] * 3], lambda seed, _: seed_generator(seed))]
    theirs = rewards_of(collectors.Evaluator, Seeded(), deterministic())
    ours = rewards_of(Evaluator, Seeded, deterministic(), env_seeds=seeds)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    drawn: dict[str, Any] = {"exploration_type": ExplorationType.RANDOM}
    one, two = (
        rewards_of(collectors.Evaluator, SerialEnv(slots, Seeded), categorical(), **drawn)
        for slots in (1, 2)
    )
    assert not torch.equal(one, two)
    one, two = (
        rewards_of(Evaluator, Seeded, categorical(), num_envs=slots, **drawn) for slots in (1, 2)
    )
    assert torch.equal(one, two)


# --- one at a time -------------------------------------------------------------------------------


def test_weights_are_taken_from_a_module_a_tensordict_or_a_dict_of_models(
    evaluator: Evaluator,
) -> None:
    trained = categorical()
    changed(trained)
    expected = offline(trained).summary().returns.mean
    weights = TensorDict.from_module(trained).data
    for given in (
        {"weights": trained},
        {"weights": weights},
        {"weights": Evaluator.extract_weights(trained)},
        {"weights_dict": {"policy": trained}},
        {"weights": categorical(), "weights_dict": {"policy": weights}},
        {"weights": trained, "weights_dict": {}},
    ):
        assert evaluator.evaluate(**given)["eval/reward"] == expected
    assert evaluator.evaluate()["eval/reward"] != expected  # those of its own policy


def changed(policy: Any) -> None:
    """Change its weights, in place."""
    with torch.no_grad():
        policy.module[0].module[-1].bias += torch.tensor([3.0, 0.0])


def test_weights_are_those_at_the_call_be_they_given_extracted_or_its_policys(
    evaluator: Evaluator,
) -> None:
    trained, policy = categorical(), categorical()
    with Evaluator(Walk, policy, num_trajectories=EPISODES) as other:
        first = offline(policy).digest
        extracted = Evaluator.extract_weights(policy)
        assert not any(value.requires_grad for value in extracted.values(True, True))
        futures = [other.submit(), evaluator.submit(trained)]
        changed(policy)
        changed(trained)
        second = offline(policy).digest
        futures += [evaluator.submit(extracted), other.submit()]
        digests = [future.result(60).digest for future in futures]
    assert digests == [first, first, first, second]
    assert first != second


def test_a_function_as_policy_is_taken_as_it_is_at_the_call() -> None:
    pushes = [0]

    def policy(tensordict: Any) -> Any:
        action = torch.nn.functional.one_hot(torch.full(tensordict.batch_size, pushes[0]), 2)
        return tensordict.set("action", action)

    with Evaluator(Walk, policy, num_trajectories=EPISODES) as evaluator:
        first = evaluator.evaluate()["eval/reward"]
        assert first == offline(policy).summary().returns.mean
        pushes[0] = 1
        second = evaluator.evaluate()["eval/reward"]
        assert second == offline(policy).summary().returns.mean != first
        with pytest.raises(TypeError, match="expected no weights for a policy that is not a mod"):
            evaluator.evaluate(categorical())


def test_a_factory_makes_the_policy_from_an_env_and_keeps_the_latest_weights(
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"

    def make_policy(env: Any, noted: str = str(made)) -> Any:
        with open(noted, "a") as file:
            file.write(f"{os.getpid()} {env.observation_spec['observation'].shape[-1]}\n")
        return TensorDictModule(OneHotOfBest(torch.nn.Linear(3, 2), 2), ["observation"], ["action"])

    with Evaluator(Walk, policy_factory=make_policy, num_trajectories=EPISODES) as evaluator:
        own = evaluator.submit().result(60).digest
        (line,) = made.read_text().splitlines()
        assert line.split()[0] != str(os.getpid())
        assert line.split()[1] == "3"
        torch.manual_seed(0)
        expected = make_policy(tdcollect.make_env(Walk))
        assert own == offline(expected).digest
        with torch.no_grad():
            expected.module.network.bias[0] += 9
        trained = evaluator.submit(expected).result(60)
        assert trained.digest == offline(expected).digest != own
        assert evaluator.submit().result(60).digest == trained.digest
        before = GlobalRandomness()
        assert trained.replay(3)["next", "done"][-1]
        assert before.moved() == []  # though the factory is called here


def test_weights_of_another_model_are_refused_and_change_nothing(
    evaluator: Evaluator, policy: Any
) -> None:
    with pytest.raises(ValueError, match=r"expected weights with the entries of the policy, .*got"):
        evaluator.evaluate(categorical(ins=4))
    partial = TensorDict.from_module(policy).data.exclude(("module", "0", "module", "0", "weight"))
    with pytest.raises(ValueError, match=r"got no module.0.module.0.weight; pass the model"):
        evaluator.evaluate(partial)
    with pytest.raises(ValueError, match=r"got 'env.transform\[0\]'; the env's transforms are: n"):
        evaluator.evaluate(weights_dict={"env.transform[0]": torch.nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"the keys of weights_dict to be 'policy' or .*'critic'"):
        evaluator.evaluate(weights_dict={"critic": policy})
    with pytest.raises(TypeError, match="expected the weights of 'policy' to be a module or a Ten"):
        evaluator.evaluate(policy.state_dict())
    assert evaluator.evaluate()["eval/reward"] == offline(policy).summary().returns.mean


# --- beside ---------------------------------------------------------------------------------------


def test_evaluations_come_back_in_their_order_and_a_callback_may_raise(
    evaluator: Evaluator, told: Told, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluator.poll() is None
    assert all(evaluator.trigger_eval(step=step) for step in (5, 3))
    told.raises = True
    assert evaluator.trigger_eval(step=9)
    assert evaluator.pending
    found = [evaluator.wait(60), evaluator.poll(60), evaluator.wait()]
    assert [metrics["eval/step"] for metrics in found if metrics] == [5, 3, 9]
    assert not evaluator.pending
    assert evaluator.wait() is None  # where TorchRL's waits for ever
    assert "on_result of the Evaluator failed" in caplog.text
    assert "ZeroDivisionError: in the callback" in caplog.text
    future = evaluator.submit(step=1)
    assert isinstance(future, Future)
    result, expected = future.result(60), offline(policy)
    assert (result.episodes, result.manifest) == (expected.episodes, expected.manifest)
    assert result.summary() == expected.summary()
    assert len(result.replay(2)) == result.record(2).length
    assert evaluator.poll() is None
    evaluator.evaluate(step=2)
    assert [metrics["eval/step"].item() for _, metrics in told] == [5, 3, 9, 1, 2]
    assert all(metrics.batch_size == () for _, metrics in told)
    assert [name for name, _ in told] == [*["tdcollect-evaluator"] * 4, "MainThread"]


def test_the_thread_waits_in_the_eyes_of_other_evaluations(
    evaluator: Evaluator, policy: Any
) -> None:
    assert "tdcollect-evaluator" in {thread.name for thread in threading.enumerate()}
    assert "tdcollect-evaluator" not in other_threads(busy=True)
    futures = [evaluator.submit() for _ in range(3)]
    assert {offline(policy).digest} == {future.result(60).digest for future in futures}


def test_the_curve_has_a_point_per_step_and_the_best_is_known(evaluator: Evaluator) -> None:
    better = categorical()
    with torch.no_grad():
        better.module[0].module[-1].bias += torch.tensor([0.0, 9.0])
    values = {}
    for step, weights in ((2000, categorical()), (1000, better), (3000, categorical())):
        values[step] = evaluator.evaluate(weights, step=step)["eval/reward"]
    points = {point.step: point for point in evaluator.curve}
    assert [*points] == sorted(points)
    assert {step: points[step].mean for step in values} == values
    assert values[1000] > values[2000] == values[3000]
    assert (evaluator.best.step, evaluator.best.value, evaluator.best.path) == (
        1000,
        values[1000],
        None,
    )


# --- busy -----------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def gated(gate: Path, **options: Any) -> Evaluator:
    return Evaluator(partial(Gated, str(gate)), categorical(), num_trajectories=1, **options)


def test_a_full_queue_makes_trigger_wait_and_warns_once(gate: Path) -> None:
    with gated(gate, queue_size=1) as evaluator:
        assert evaluator.trigger_eval(step=1)
        assert evaluator.trigger_eval(step=2)
        threading.Timer(0.3, gate.touch).start()
        with pytest.warns(UserWarning, match="trigger_eval.. waits until the queue has room"):
            assert evaluator.trigger_eval(step=3)
        assert gate.exists()
        for step in (4, 5, 6):  # no further warning, which would be an error here
            assert evaluator.trigger_eval(step=step)
        steps = [evaluator.wait(60)["eval/step"] for _ in range(6)]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_busy_skip_drops_and_busy_error_raises(gate: Path) -> None:
    with gated(gate, busy_policy="skip") as skips, gated(gate, busy_policy="error") as raises:
        assert skips.trigger_eval(step=1)
        assert raises.trigger_eval(step=1)
        assert not skips.trigger_eval(step=2)
        with pytest.raises(
            RuntimeError, match=r"no evaluation to be pending .*busy_policy='queue'"
        ):
            raises.trigger_eval(step=2)
        with pytest.raises(RuntimeError, match="expected no evaluation to be pending, queued"):
            skips.state_dict()
        gate.touch()
        for evaluator in (skips, raises):
            assert evaluator.wait(60)["eval/step"] == 1
            assert evaluator.trigger_eval(step=3)
            assert evaluator.wait(60)["eval/step"] == 3


def test_waits_time_out_futures_are_cancelled_and_on_result_may_trigger_but_not_wait(
    gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def follow(metrics: Any) -> None:
        calls.append(metrics["eval/step"].item())
        if calls == [1]:
            evaluator.trigger_eval(step=3)
            evaluator.evaluate()

    with gated(gate, on_result=follow) as evaluator:
        evaluator.trigger_eval(step=1)
        assert evaluator.poll(0.05) is None
        assert evaluator.wait(0.05) is None
        future = evaluator.submit(step=2)
        assert future.cancel()
        gate.touch()
        assert [evaluator.wait(60)["eval/step"] for _ in range(2)] == [1, 3]
    assert calls == [point.step for point in evaluator.curve] == [1, 3]
    assert "expected evaluate() in the training loop, not in on_result" in caplog.text


# --- checkpoints ----------------------------------------------------------------------------------


def test_steps_may_be_numpys_and_its_state_is_the_number_of_those_counted(
    policy: Any, tmp_path: Path
) -> None:
    with Evaluator(Walk, policy, num_trajectories=1) as evaluator:
        for step in (-1, 1.5, True, "3"):
            with pytest.raises(ValueError, match="expected step to be an int and not negative"):
                evaluator.evaluate(step=step)
        found = [evaluator.evaluate(step=step) for step in (None, np.int64(7), None)]
        assert [metrics["eval/step"] for metrics in found] == [0, 7, 1]
        assert found[0]["eval/reward_std"] == 0.0  # of one episode, as TorchRL says it
        assert math.isnan(found[0]["eval/reward_low"])
        assert evaluator.state_dict() == {"step_counter": 2}
        evaluator.load_state_dict({"step_counter": 12})
        Checkpoint(evaluator=evaluator).save(tmp_path / "evaluator")
        evaluator.load_state_dict({"step_counter": 0})
        Checkpoint(evaluator=evaluator).load(tmp_path / "evaluator")
        assert evaluator.evaluate()["eval/step"] == 12
        evaluator.trigger_eval()
        evaluator.submit(step=99).result(60)  # which runs after it
        with pytest.raises(RuntimeError, match="unread"):
            evaluator.state_dict()
        assert evaluator.wait()["eval/step"] == 13
        assert evaluator.state_dict() == {"step_counter": 14}
