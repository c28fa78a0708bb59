"""Any TorchRL env is evaluated: one ledger, however its episodes are run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, PendulumEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import GRUModule, ProbabilisticActor, TanhNormal

import tdcollect
from tdcollect import EvaluationCollector, NotReproducibleError, make_env
from tdcollect.evaluation.ledger import Episode
from tdcollect.randomness import WithStreams, global_states
from tdcollect.seeding import env_seed, global_seeds

from .envs import GlobalNumpy, GlobalTorch, SeedsGlobal, Walk
from .ledger import RANDOM, digest, episodes_of, records
from .ledgers import unfinished
from .policies import categorical, deterministic, recurrent
from .torchrl_envs import Carrying, Drift, Seeded, Teams, Unreached, teams

pytestmark = pytest.mark.usefixtures("small_reports")

CARTPOLE = "CartPole-v1"


def noops(make: Callable[[], EnvBase] = partial(GymEnv, CARTPOLE)) -> TransformedEnv:
    return TransformedEnv(make(), T.Compose(T.NoopResetEnv(4), T.StepCounter(20), T.RewardSum()))


def on_teams(seed: int = 0) -> TensorDictSequential:
    """A stochastic policy for the groups of ``Teams``."""
    parts = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for group in Teams.groups:
            layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            split = TensorDictModule(
                lambda x, layer=layer: (layer(x)[..., :1], layer(x)[..., 1:].exp()),
                [(group, "observation")],
                [(group, "loc"), (group, "scale")],
            )
            keys = [(group, "loc"), (group, "scale")]
            parts.append(
                ProbabilisticActor(split, keys, [(group, "action")], distribution_class=TanhNormal)
            )
    return TensorDictSequential(*parts)


CASES: dict[str, tuple[Callable[[], EnvBase], Any]] = {
    "global-generators": (Drift, partial(recurrent, GRUModule)),
    "one-element": (partial(Drift, (1,)), deterministic),
    "own-generator": (Seeded, categorical),
    "transformed": (
        lambda: TransformedEnv(
            TransformedEnv(Seeded(), T.ObservationNorm(0.3, 1.7, ["observation"])),
            T.Compose(T.CatFrames(2, dim=-1, in_keys=["observation"]), T.StepCounter(9)),
        ),
        partial(categorical, 6),
    ),
    "noops": (noops, partial(categorical, 4)),
    "noops-over-make-env": (partial(noops, partial(make_env, CARTPOLE)), partial(categorical, 4)),
    "state-in-the-tensordict": (
        lambda: TransformedEnv(PendulumEnv(), T.StepCounter(8)),
        lambda: None,
    ),
    "groups": (Teams, on_teams),
    "flags-of-groups": (teams, on_teams),
}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_slots_in_any_order_gives_one_ledger(name: str) -> None:
    make, make_policy = CASES[name]
    policy = make_policy()
    whole = {record.index: record for record in records(make, policy, 4, num_envs=3, **RANDOM)}
    assert records(make(), policy, [2, 0], **RANDOM) == [whole[2], whole[0]]
    assert len({record.digest for record in whole.values()}) == 4


def test_a_gym_env_has_the_episodes_of_make_env() -> None:
    run = partial(digest, policy=categorical(4), episodes=3, max_episode_steps=9, **RANDOM)
    assert run(partial(GymEnv, CARTPOLE)) == run(GymEnv(CARTPOLE)) == run(CARTPOLE)


def test_an_episode_is_the_one_that_the_env_has_by_itself() -> None:
    """With the seeds that the documentation names, in a plain loop."""
    for index, data in episodes_of(Drift, None, 4).items():
        seed = env_seed(0, index)
        of_torch, of_numpy, of_python = global_seeds(seed)
        with torch.random.fork_rng():
            torch.manual_seed(of_torch)
            np.random.seed(of_numpy)  # noqa: NPY002
            random.seed(of_python)
            env = Drift()
            env.set_seed(seed)
            step = env.reset()
            for row in data:
                assert torch.equal(step["observation"], row["observation"])
                step = env.step(step.set("action", row["action"]))["next"].exclude("reward")
                assert torch.equal(step["observation"], row["next", "observation"])


def test_batched_envs_are_taken_apart() -> None:
    def normed() -> EnvBase:
        return TransformedEnv(Seeded(), T.VecNorm(in_keys=["observation"]))

    def limited() -> EnvBase:
        return TransformedEnv(Seeded(), T.StepCounter(5))

    run = partial(digest, policy=categorical(), episodes=4, **RANDOM)
    over = TransformedEnv(ParallelEnv(2, Seeded), T.StepCounter(5))
    assert run(limited) == run(lambda: SerialEnv(3, limited)) == run(over)

    # What its envs have learned goes along.
    env, alone = SerialEnv(2, normed), normed()
    env.set_seed(0)
    env.rollout(10, break_when_any_done=False)
    alone.load_state_dict(env.state_dict()["worker0"])
    assert run(env) == run(alone)


def test_nothing_outside_changes() -> None:
    np.random.normal()  # noqa: NPY002  which keeps a second number
    given = TransformedEnv(Drift(), T.VecNorm(in_keys=["observation"]))
    given.set_seed(0)
    given.rollout(10)
    learned = repr(given.transform.state_dict()), given.transform.training
    before = repr(global_states())
    for slots, collector in (
        (2, EvaluationCollector(Drift, None, 4, num_envs=2)),
        (1, EvaluationCollector(given, None, 4)),
    ):
        assert collector.slots == slots
        for _ in collector:
            assert repr(global_states()) == before
        collector.close()
        assert repr(global_states()) == before
    assert (repr(given.transform.state_dict()), given.transform.training) == learned
    assert not given.transform.frozen


@pytest.mark.parametrize("env", [GlobalNumpy, GlobalTorch, SeedsGlobal])
def test_gymnasium_envs_that_draw_globally_get_streams(env: Any) -> None:
    policy = categorical()
    expected = digest(env, policy, 5, num_envs=1, **RANDOM)
    assert digest(env, policy, 5, num_envs=3, **RANDOM) == expected
    if env is GlobalNumpy:
        made = make_env(WithStreams(env, "it"), 3, backend="process", start_method="fork")
        assert digest(made, policy, 5, **RANDOM) == expected
        made.close()


def test_the_manifest_says_where_draws_come_from() -> None:
    def manifest(env: Any) -> dict[str, Any]:
        return tdcollect.evaluate(env, None, 3, progress=False).manifest

    says = "from a stream of each episode, started from its env seed"
    assert "global_random_numbers" not in manifest(Walk)
    assert manifest(GlobalNumpy)["global_random_numbers"] == says
    assert manifest(Drift)["global_random_numbers"] == says
    assert manifest(GlobalNumpy)["env"]["id"] == "GlobalNumpy"
    one, other = manifest(Drift)["env"], manifest(partial(Drift, (1,)))["env"]
    assert one == other
    assert one["observation_space"] == "observation: UnboundedContinuous([3], float32)"


def test_buffers_of_the_latest_frames_are_not_in_the_manifest() -> None:
    env = TransformedEnv(make_env(Walk, 3), T.CatFrames(2, dim=-1, in_keys=["observation"]))
    run = partial(tdcollect.evaluate, env, categorical(6), 4, progress=False)
    first, again = run(), run()
    assert first.manifest["env"]["transforms"] == ["CatFrames"]
    assert (first.manifest, first.digest) == (again.manifest, again.digest)


def test_an_evaluation_is_resumed_replayed_and_verified(tmp_path: Path) -> None:
    policy = on_teams()
    kept = {"keep_trajectories": True, "progress": False, "output_dir": tmp_path, **RANDOM}
    whole = tdcollect.evaluate(Teams, policy, 4, **kept)
    names = ("episodes.jsonl", "manifest.json", "results.json", "report.html")
    files = [(tmp_path / name).read_bytes() for name in names]
    unfinished(tmp_path, 2)
    again = tdcollect.evaluate(Teams, policy, 4, num_envs=3, **kept)
    assert again.digest == whole.digest
    assert tdcollect.verify(tmp_path).passed
    assert [(tmp_path / name).read_bytes() for name in names] == files
    loaded = tdcollect.EvaluationResult.load(tmp_path, Teams, policy)
    assert torch.equal(loaded.replay(3)["red", "action"], whole.trajectory(3)["red", "action"])


# Several rewards


def test_returns_of_groups_are_means_over_agents() -> None:
    result = tdcollect.evaluate(
        Teams, on_teams(), 3, keep_trajectories=True, progress=False, **RANDOM
    )
    for record in result.episodes:
        data = result.trajectory(record.index)
        expected = {
            f"{group}/reward": float(data["next", group, "reward"].double().sum(0).mean())
            for group in Teams.groups
        }
        assert record.group_returns == pytest.approx(expected)
        assert record.episode_return == pytest.approx(np.mean([*expected.values()]))
        assert Episode.from_json(record.to_json()) == record
        assert json.loads(record.to_json())["group_returns"] == record.group_returns
    assert set(result.group_returns) == {"blue/reward", "red/reward"}
    assert result.manifest["returns"] == {
        "rewards": ["blue/reward", "red/reward"],
        "combined": "mean over the agents of a group, then over groups",
    }
    assert result.manifest["entries"]["reward"] == ["blue/reward", "red/reward"]


def test_reward_keys_choose_what_counts() -> None:
    both, red, other = (
        tdcollect.evaluate(Teams, on_teams(), 3, reward_keys=keys, progress=False, **RANDOM)
        for keys in (None, "red/reward", [("red", "reward")])
    )
    assert [e.digest for e in both.episodes] == [e.digest for e in red.episodes]
    assert red.returns.tolist() == both.group_returns["red/reward"].tolist()
    assert other.manifest == red.manifest
    red.replay(2)
    with pytest.raises(ValueError, match=r"same episodes, but .* returns\.rewards is"):
        tdcollect.compare(both, red, names=["both", "red"])


def test_flags_of_groups_end_an_episode_once_all_agents_are_done() -> None:
    one, other = (episodes_of(env, on_teams(), 2) for env in (Teams, teams))
    for index, data in one.items():
        assert len(data) == 4
        assert torch.equal(data["red", "action"], other[index]["red", "action"])
        assert torch.equal(data["next", "terminated"], other[index]["next", "terminated"])


def test_a_limit_of_steps_truncates_an_env_without_such_a_flag() -> None:
    found = records(Seeded, categorical(), 6, max_episode_steps=3)
    assert {(r.truncated, r.terminated) for r in found if r.length == 3} >= {(True, False)}
    assert all(record.length <= 3 for record in found)


# Errors


def ragged() -> EnvBase:
    env = Drift()
    env.observation_spec = Composite(observation=Unbounded((3,)), more=Unbounded((-1,)))
    return env


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batched": (
        lambda: Drift((4,)),
        {},
        r"slots can be seeded one by one, got Drift.* of batch size \[4\].* pass a function that",
    ),
    "gym-vector": (
        lambda: GymEnv(CARTPOLE, num_envs=2),
        {},
        r"one by one, got .*batch size \[2\].*one GymEnv without num_envs",
    ),
    "ragged": (ragged, {}, r"tensors of fixed shapes, got other ones in \['more'\]"),
    "backend": (Drift, {"backend": "serial"}, "makes a TorchRL env.*: expected no backend"),
    "unlike": (
        lambda: SerialEnv(2, [Drift, Seeded]),
        {},
        "expected an env whose slots are alike, got SerialEnv of unlike functions",
    ),
    "reward-key": (
        Teams,
        {"reward_keys": ["red/reward", "green/reward"]},
        "reward_keys among the env's, blue/reward, red/reward, got green/reward",
    ),
    "one env twice": (lambda env=Drift(): env, {}, r"a new env at each call.*same Drift.* twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_envs_are_told_before_an_episode_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings, text = BAD[name]
    monkeypatch.setattr(Drift, "_reset", lambda *_, **__: pytest.fail("reset"))
    monkeypatch.setattr(Teams, "_reset", lambda *_, **__: pytest.fail("reset"))
    for given in (make, make()) if name in ("batched", "unlike") else (make,):
        with pytest.raises((TypeError, ValueError), match=text):
            EvaluationCollector(given, None, 4, **settings)


def test_an_env_that_carries_something_on_is_made_anew() -> None:
    assert digest(Carrying, categorical(), 4, num_envs=2) == digest(Seeded, categorical(), 4)
    with pytest.raises(NotReproducibleError, match="Pass a function that makes it"):
        records(Carrying(), None, 4)
    with pytest.raises(ValueError, match=r"the env Seeded that is given .*pass a function"):
        EvaluationCollector(Seeded(), None, fresh_envs=True)
    with pytest.raises(NotReproducibleError, match=r"Unreached .* its seed does not reach"):
        records(Unreached, None, 4)


def test_an_env_that_raises_is_made_anew_and_its_episode_recorded() -> None:
    found = records(partial(Drift, fails_at=9), categorical(), 9, num_envs=4, max_restarts=1)
    sound = {record.index: record for record in records(Drift, categorical(), 9)}
    assert {record.completed for record in found} == {True, False}
    for record in found:
        assert record.completed == (sound[record.index].length < 9)
        assert not record.completed or record == sound[record.index]
        assert record.restarts == (not record.completed)
    for at, where in ((9, "step"), (0, "reset")):
        with pytest.raises(
            RuntimeError, match=rf"failed in {where}\(\) of slot 0: .*Error: broken"
        ):
            records(Drift(fails_at=at), categorical(), 9)


@pytest.mark.slow
def test_vmas_draws_from_streams() -> None:
    from torchrl.envs import VmasEnv

    make = partial(VmasEnv, "balance", num_envs=1, n_agents=3)
    ledgers = {digest(make, None, 3, num_envs=n, max_episode_steps=10) for n in (1, 2)}
    assert len(ledgers) == 1
    with pytest.raises(TypeError, match=r"one by one, got VmasEnv.*\(num_envs=1, say\)"):
        EvaluationCollector(partial(VmasEnv, "balance", num_envs=4), None)
