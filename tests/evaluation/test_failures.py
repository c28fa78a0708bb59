"""Episodes whose env raises are retried and reported; short episodes are not favoured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from gymnasium.vector import SyncVectorEnv
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect import evaluate, make_env
from tdcollect.envs.slots import SlotError
from tdcollect.evaluation.ledger import Episode

from .envs import Failing
from .ledger import RANDOM, records
from .policies import categorical

SEEDS = range(1000, 1020)
BROKEN = (1003, 1004, 1017)


@pytest.fixture(autouse=True)
def _unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "failures", {})


def by_index(env: Any, slots: int | None, **settings: Any) -> dict[int, Episode]:
    given = {"env_seeds": SEEDS, "num_envs": slots, **RANDOM, **settings}
    return {record.index: record for record in records(env, categorical(), 20, **given)}


def not_on_rows(make: Any, slots: int) -> EnvBase:
    return TransformedEnv(make_env(make, slots), T.TimeMaxPool(["observation"], T=1))


@pytest.mark.parametrize(
    ("slots", "at_reset", "transformed"),
    [(1, False, False), (4, True, False), (20, False, True)],
)
def test_what_always_fails_is_in_the_ledger_and_the_rest_as_without(
    slots: int, at_reset: bool, transformed: bool
) -> None:
    whole = by_index(Failing, 5)
    make = partial(Failing, BROKEN, at_reset=at_reset)
    env, slots_given = (not_on_rows(make, slots), None) if transformed else (make, slots)
    found = by_index(env, slots_given)
    assert sorted(found) == list(range(20))
    for index, record in found.items():
        if SEEDS[index] in BROKEN:
            assert (record.status, record.restarts) == ("failed", 2)
            assert record.digest is record.episode_return is record.length is None
            assert record.env_seed == SEEDS[index]
        else:
            assert record == whole[index]


@pytest.mark.parametrize(("slots", "times"), [(4, 1), (1, 2), (20, 2)])
def test_what_fails_at_first_is_tried_again_and_counted(slots: int, times: int) -> None:
    whole = by_index(Failing, 5)
    found = by_index(partial(Failing, BROKEN, times), slots)
    for index, record in found.items():
        broken = SEEDS[index] in BROKEN
        assert record.status == "completed"
        assert record.restarts == (times if broken else 0)
        assert record.digest == whole[index].digest


def test_retries_are_bounded() -> None:
    found = by_index(partial(Failing, BROKEN), 4, max_restarts=0)
    assert [found[3].status, found[3].restarts] == ["failed", 0]
    assert Failing.failures == dict.fromkeys(BROKEN, 1)
    env = make_env(partial(Failing, BROKEN), 4, backend="process", start_method="fork")
    found = by_index(env, None)
    assert {SEEDS[i] for i, record in found.items() if not record.completed} == set(BROKEN)
    env.close()


def test_raise_names_the_slot_and_the_error() -> None:
    with pytest.raises(SlotError, match=r"failed in step\(\) of slot 3, .*broken by seed 1003"):
        by_index(partial(Failing, BROKEN), 4, on_env_error="raise")
    with pytest.raises(SlotError, match=r"failed in reset\(\) of slot 3, .*broken by seed 1003"):
        by_index(partial(Failing, BROKEN, at_reset=True), 4, on_env_error="raise")
    env = make_env(SyncVectorEnv([partial(Failing, BROKEN)] * 4))  # cannot be made anew
    with pytest.raises(RuntimeError, match="broken by seed 1003"):
        by_index(env, None)


def test_an_env_that_fails_in_the_first_steps_of_seeds_that_are_looked_at_is_evaluated() -> None:
    """The seeds 0 to 3 are those that every env is looked at with before."""
    found = by_index(partial(Failing, (0, 1, 2, 3)), 4, env_seeds=range(20))
    assert [i for i, record in sorted(found.items()) if not record.completed] == [0, 1, 2, 3]


def test_failures_are_in_the_result_and_its_statistics() -> None:
    env = partial(Failing, BROKEN)
    how: dict[str, Any] = {"env_seeds": SEEDS, "num_envs": 4, "progress": False}
    assert evaluate(partial(Failing, BROKEN, 1), categorical(), 20, **how).errors == {}
    Failing.failures.clear()
    result = evaluate(env, categorical(), 20, **how)
    assert len(result.episodes) == 20
    assert len(result.returns) == len(result.lengths) == 17
    assert "3 failed" in repr(result)
    told = {index: f"RuntimeError: broken by seed {SEEDS[index]}" for index in (3, 4, 17)}
    assert result.errors == told
    with pytest.raises(RuntimeError, match=r"episode 3 again, at every try: \w+: broken by seed"):
        result.replay(3)
