"""Test episodes on slots that go on as they are ready: the ledger of in step, to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import GRUModule, LSTMModule

from tdcollect.evaluation.ledger import FAILED, Episode

from ..zoo.uneven import Gated, Naps, Pace, ready_env
from .envs import Failing, Walk
from .ledger import RANDOM, digest, episodes_of, records
from .policies import categorical, deterministic, epsilon_greedy, recurrent

EPISODES = 10
PACES = [Pace(1, 1, 1, None), Pace(3, 3, 1, None), Pace(5, 3, 2, 0.0005), Pace(4, 2, 4, None)]
POLICIES: dict[str, Callable[[], Any]] = {
    "deterministic": deterministic,
    "drawn": categorical,
    "noisy": epsilon_greedy,
    "lstm": partial(recurrent, LSTMModule),
    "gru": partial(recurrent, GRUModule),
    "random": lambda: None,
}
SEEDS = range(1000, 1000 + EPISODES)


@pytest.fixture(scope="module")
def envs() -> Iterator[list[EnvBase]]:
    """An env for each pace; started once."""
    made = [pace.ready(Walk) for pace in PACES]
    yield made
    for env in made:
        env.close()


@pytest.mark.behaviour(13)
@pytest.mark.parametrize(("name", "pace"), [*zip(POLICIES, (0, 1, 2, 3, 2, 1), strict=True)])
def test_any_pace_gives_the_ledger_of_in_step(name: str, envs: list[EnvBase], pace: int) -> None:
    expected, found = (digest(e, POLICIES[name](), EPISODES, **RANDOM) for e in (Walk, envs[pace]))
    assert found == expected


def test_the_data_of_episodes_are_those_of_in_step(envs: list[EnvBase]) -> None:
    """Under transforms that end episodes and stack observations, and with a policy's memory."""
    policy = recurrent(LSTMModule, 9)

    def data(env: EnvBase) -> dict[int, Any]:
        parts = (
            T.ObservationNorm(0.3, 1.7, in_keys=["observation"]),
            T.CatFrames(3, dim=-1, in_keys=["observation"]),
            T.StepCounter(max_steps=5),
            T.RewardSum(),
        )
        return episodes_of(TransformedEnv(env, T.Compose(*parts)), policy, EPISODES, **RANDOM)

    expected, found = data(PACES[1].in_step(Walk)), data(envs[1])
    assert sorted(found) == sorted(expected)
    for index, episode in expected.items():
        assert (found[index] == episode).all()


def test_new_envs_give_the_ledger_of_in_step(envs: list[EnvBase]) -> None:
    run = partial(digest, policy=categorical(), episodes=EPISODES, fresh_envs=True, **RANDOM)
    assert run(envs[1]) == run(Walk)


@pytest.mark.behaviour(13)
def test_episodes_go_on_beside_one_that_takes_its_time(tmp_path: Path) -> None:
    """The episode waits at its first step, until the policy has seen three others begin."""
    gate = tmp_path / "gate"

    def act(observation: torch.Tensor) -> torch.Tensor:
        begun.append(int((observation[:2, 0] == 1).sum()))
        if sum(begun) >= 3:
            gate.touch()
        return torch.nn.functional.one_hot(torch.zeros(len(observation)).long(), 2)

    begun: list[int] = []
    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    env = ready_env(partial(Gated, gate, SEEDS[0]), 2)
    lengths = [record.length for record in records(env, policy, 6, env_seeds=SEEDS)]
    assert lengths == [3] * 6
    env.close()


# ------------------------------------------------------------------------------------- failing envs

BROKEN = (1003, 1004, 1009)


@pytest.mark.parametrize("at_reset", [False, True])
def test_episodes_that_fail_are_those_of_in_step(at_reset: bool) -> None:
    """Each retry runs in any worker; an env that always fails counts the same ones."""
    make = partial(Failing, BROKEN, at_reset=at_reset)
    given = {"env_seeds": SEEDS, **RANDOM}
    expected = records(make, categorical(), EPISODES, num_envs=3, **given)
    env = Pace(3, 3, 1, None).ready(make)
    found = records(env, categorical(), EPISODES, **given)
    env.close()
    assert sorted(found, key=index) == sorted(expected, key=index)
    assert {SEEDS[record.index] for record in found if not record.completed} == {*BROKEN}


def index(record: Episode) -> int:
    return record.index


class Stubborn(Failing):
    """Hangs, or kills its process, at the third step of episodes with one seed.

    With ``marker``, a file that is made then, this happens once.
    """

    def __init__(self, what: str = "", marker: Path | None = None):
        super().__init__((SEEDS[4],) if what else ())
        self.what, self.marker = what, marker

    def _fail(self) -> None:
        if self.seed not in self.seeds or (self.marker is not None and self.marker.exists()):
            return
        if self.marker is not None:
            self.marker.touch()
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


@pytest.mark.parametrize(("what", "once"), [("hang", True), ("die", True), ("die", False)])
def test_a_worker_that_is_lost_leaves_the_ledger_of_in_step(
    what: str, once: bool, tmp_path: Path
) -> None:
    """An episode that kills its worker each time has failed, alone."""
    given = {"env_seeds": SEEDS, **RANDOM}
    expected = {r.index: r.digest for r in records(Stubborn, categorical(), EPISODES, **given)}
    make = partial(Stubborn, what, tmp_path / "marker" if once else None)
    env = ready_env(lambda: Naps(make()), 3, timeout=0.5)
    found = {r.index: r for r in records(env, categorical(), EPISODES, **given)}
    env.close()
    assert {**expected, 4: found[4].digest} == {i: r.digest for i, r in found.items()}
    assert found[4].digest == (expected[4] if once else None)
    assert found[4].restarts == (1 if once else 2)
    assert (found[4].status == FAILED) == (not once)


def test_an_interrupt_amid_flight_leaves_an_env_to_go_on_with(envs: list[EnvBase]) -> None:
    """The env is the user's: it steps and evaluates as before."""
    calls = iter(range(1000))
    right = categorical()

    def interrupted(*_: Any) -> None:
        if next(calls) == 20:
            raise KeyboardInterrupt

    handle = right.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        digest(envs[1], right, EPISODES, **RANDOM)
    handle.remove()
    assert digest(envs[1], right, EPISODES, **RANDOM) == digest(Walk, right, EPISODES, **RANDOM)
    envs[1].set_seed(3)
    assert envs[1].rollout(4, break_when_any_done=False).shape == (3, 4)
