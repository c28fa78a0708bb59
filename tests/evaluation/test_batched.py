"""Batched simulators: the first episodes of each slot, in whole batches; a kind of its own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import GRUModule

import tdcollect
from tdcollect import EvaluationResult
from tdcollect.cli import main
from tdcollect.evaluation.statistics import summarize
from tdcollect.lab import Suite
from tdcollect.pages.build import Commands
from tdcollect.pages.evaluation import report_page
from tdcollect.seeding import batch_seed, policy_seed

from ..simulated_cuda import simulated
from .ledger import RANDOM
from .ledgers import alter, contents, unfinished
from .policies import categorical, recurrent
from .test_protocol import check_files
from .torchrl_envs import Drift

pytestmark = pytest.mark.usefixtures("small_reports")


class Ladder(EnvBase):
    """Slots of one generator: a coin of each reset gives an episode its length, one of two.

    It returns 1 if it is the long one. Observations are noise.

    Attributes:
        started: by seed, the slot and the length of each episode, in the order of their start.
        acted: the actions of all steps.
    """

    lengths = (10, 200)

    def __init__(self, slots: int = 4, together: bool = False, fickle: bool = False):
        super().__init__(batch_size=[slots])
        self.together, self.fickle = together, fickle
        self.observation_spec = Composite(observation=Unbounded((slots, 2)), shape=(slots,))
        self.action_spec = OneHot(2, shape=(slots, 2))
        self.reward_spec = Unbounded((slots, 1))
        self.started: dict[int | None, list[tuple[int, int]]] = {}
        self.taken, self.length = torch.zeros(2, slots, dtype=torch.int64)
        self.acted: list[torch.Tensor] = []

    def _set_seed(self, seed: int | None) -> None:
        self.seeded, self.generator = seed, torch.Generator().manual_seed(seed or 0)
        self.started[seed] = []

    def _seen(self) -> torch.Tensor:
        seen = torch.randn(*self.batch_size, 2, generator=self.generator)
        return seen + torch.rand(1).item() * self.fickle + self._extra()

    def _extra(self) -> float:
        return 0.0

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        asked = None if tensordict is None else tensordict.get("_reset", None)
        chosen = range(len(self.taken))
        if asked is not None and not self.together:
            chosen = asked.reshape(-1).nonzero().reshape(-1).tolist()
        for slot in chosen:
            long = int(torch.randint(2, (), generator=self.generator))
            self.taken[slot], self.length[slot] = 0, self.lengths[long]
            self.started[self.seeded].append((slot, self.lengths[long]))
        return TensorDict({"observation": self._seen()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.taken += 1
        self.acted.append(tensordict["action"].clone())
        ended = (self.taken == self.length)[:, None]
        won = ended & (self.length == self.lengths[1])[:, None]
        entries = {"observation": self._seen(), "reward": won.float(), "done": ended}
        return TensorDict(entries, batch_size=self.batch_size)


class Short(Ladder):
    lengths = (3, 6)


class Outer(Short):
    """It draws from a generator that no seed reaches."""

    def _extra(self) -> float:
        return float(torch.rand((), generator=UNREACHED))


UNREACHED = torch.Generator().manual_seed(0)


def run(env: Any = Short, policy: Any = None, episodes: int = 16, **how: Any) -> EvaluationResult:
    how = {"episodes_per_slot": 2, "progress": False, **how}
    return tdcollect.evaluate(env, policy, episodes, **how)


def first_to_end(env: Ladder, count: int) -> float:
    """The mean return of the episodes that end first, as collectors count them."""
    env.set_seed(0)
    data = env.rollout(50, break_when_any_done=False)
    ends = data["next", "done"][..., 0].T.nonzero()[:count]  # in the order of time
    return float(data["next", "reward"][ends[:, 1], ends[:, 0]].mean())


def test_each_slot_gives_its_first_episodes_however_long() -> None:
    env = Ladder(16)
    result = run(env, episodes=64)
    for batch in range(2):
        started = env.started[batch_seed(0, batch)]
        assert len(started) == 32  # a slot that has given its own starts no other
        for slot in range(16):
            lengths = [length for at, length in started if at == slot]
            records = [result.record(32 * batch + 16 * nth + slot) for nth in range(2)]
            assert [record.length for record in records] == lengths
            assert [record.place for record in records] == [
                {"batch": batch, "slot": slot, "nth": nth} for nth in range(2)
            ]
    assert result.returns.mean() == pytest.approx(0.5, abs=3 * 0.5 / 8)
    assert first_to_end(Ladder(64), 32) < 0.2
    seeds = {(e.index, e.env_seed, e.policy_seed) for e in result.episodes}
    assert seeds == {(i, batch_seed(0, i // 32), policy_seed(0, i)) for i in range(64)}


def test_a_slot_that_waits_repeats_its_last_action() -> None:
    env = Short()
    found = run(env, episodes=4, episodes_per_slot=1, recheck=False)
    acted = torch.stack(env.acted)
    assert {e.length for e in found.episodes} == {3, len(acted)}
    for slot, episode in enumerate(found.episodes):
        assert (acted[(episode.length or 0) - 1 :, slot] == acted[-1, slot]).all()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batched") / "run"
    run(output_dir=path, keep_trajectories=True)
    return path


def test_the_files_are_those_of_the_schemas_and_pass(short: Path) -> None:
    check_files(short)
    assert tdcollect.verify(short).passed
    manifest = json.loads((short / "manifest.json").read_text())
    assert manifest["protocol"] == "batched-1"
    assert manifest["batches"] == {"slots": 4, "episodes_per_slot": 2, "device": "cpu"}
    assert manifest["repeated"]["differing"] == 0
    page = repr(report_page(manifest, [], summarize([]), Commands("", "", "")))
    assert "Batch 0 ran twice, and was the same to the bit: repeatable for 4 slots on cpu." in page
    assert "Paragraph" not in page


@pytest.mark.parametrize("lines", [0, 5, 8, 11, 16])
def test_interrupted_it_goes_on_with_the_batches_that_are_not_whole(
    short: Path, tmp_path: Path, lines: int
) -> None:
    path = tmp_path / "run"
    run(output_dir=path, keep_trajectories=True)
    unfinished(path, lines)
    ran = []
    result = run(lambda: ran.append(1) or Short(), output_dir=path, keep_trajectories=True)
    assert contents(path) == contents(short)
    assert len(ran) == 4 - lines // 8  # for the batches that it lacks, one once more, and the probe
    assert result.digest == EvaluationResult.load(short).digest


def test_another_number_of_slots_is_another_evaluation(short: Path) -> None:
    with pytest.raises(ValueError, match=r"batches.slots is 4 there and 8 here"):
        run(partial(Short, 8), output_dir=short)
    with pytest.raises(ValueError, match=r"batches.episodes_per_slot is 2 there and 1 here"):
        run(output_dir=short, episodes_per_slot=1)
    assert run(output_dir=short).manifest["repeated"]["episodes"] == 8  # it finds it done


def test_an_episode_runs_again_with_its_batch(short: Path) -> None:
    result = EvaluationResult.load(short, Short)
    assert result.replay(13)["next", "reward"].sum() == result.record(13).episode_return
    with pytest.raises(RuntimeError, match=r"What has changed: batches.slots was 4 and is 8"):
        EvaluationResult.load(short, partial(Short, 8)).replay(13)


class Counted(Short):
    """It shows the steps of the episode, so that slots have nothing to do with each other."""

    def __init__(self, slots: int, lengths: tuple[int, ...], device: Any = None):
        super().__init__(slots)
        self.lengths = lengths  # type: ignore[assignment]
        self.observation_spec = Composite(observation=Unbounded((slots, 3)), shape=(slots,))
        self.to(device or "cpu")
        self.taken, self.length = self.taken.to(self.device), self.length.to(self.device)

    def _seen(self) -> torch.Tensor:
        return self.taken[:, None] * torch.tensor([0.1, 0.2, 0.3], device=self.device)


def digests(result: EvaluationResult) -> list[str | None]:
    return [episode.digest for episode in result.episodes]


def counted(slots: int, *lengths: int, device: Any = None) -> EnvBase:
    env = Counted(slots, lengths, device)
    return TransformedEnv(env, T.Compose(T.StepCounter(5), T.RewardSum()))


def test_where_slots_are_alone_their_episodes_are_the_numbered_ones() -> None:
    policy = recurrent(GRUModule)
    for lengths, how in (((3, 9), {}), ((4, 4), RANDOM)):
        make = partial(counted, 1, *lengths)
        alone = digests(tdcollect.evaluate(make, policy, 6, num_envs=2, progress=False, **how))
        for per_slot in (1, 3):
            make = partial(counted, 2, *lengths)
            found = digests(run(make, policy, 6, episodes_per_slot=per_slot, **how))
            assert {*found} == {*alone}
            assert found == alone or lengths == (3, 9)  # coins fall otherwise there
        assert len({*found}) > 1


def test_a_simulator_may_be_on_any_device(cuda: torch.device) -> None:
    policy = categorical()
    how: dict[str, Any] = {"episodes": 4, "recheck": False, **RANDOM}
    on_cpu = digests(run(partial(counted, 2, 3, 9), policy, **how))
    for env_device, policy_device in (("cpu", cuda), (cuda, "cpu"), (cuda, cuda)):
        env = partial(counted, 2, 3, 9, device=env_device)
        found = run(env, policy.to(policy_device), **how)
        assert digests(found) == on_cpu or not simulated()
        assert (found.manifest["batches"]["device"] == "cpu") == (env_device == "cpu")


def test_what_cannot_be_repeated_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"\d of 8 episodes differed: not repeatable for 4 slots"):
        found = run(Outer, output_dir=tmp_path / "out")
    assert found.manifest["repeated"]["differing"] > 0
    page = repr(report_page(found.manifest, [], found.summary(), Commands("", "", "")))
    assert "Paragraph(part='warn', text='Batch" in page
    assert tdcollect.verify(tmp_path / "out").passed
    # A batch that was interrupted is none of another run's.
    before = digests(found)
    unfinished(tmp_path / "out", 5)
    with pytest.warns(UserWarning, match="not repeatable"):
        found = run(Outer, output_dir=tmp_path / "out")
    assert not {*before} & {*digests(found)}
    assert "repeated" not in run(Outer, recheck=False).manifest
    made = []
    run(lambda: made.append(1) or Short(), fresh_envs=False)
    assert len(made) == 1
    # Draws from the global generators come from the batch's stream.
    assert run(partial(Short, fickle=True)).manifest["repeated"]["differing"] == 0


def acting(choice: int) -> TensorDictModule:
    def act(observation: torch.Tensor) -> torch.Tensor:
        chosen = torch.full(observation.shape[:-1], choice)
        return torch.nn.functional.one_hot(chosen, 2)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def test_they_are_compared_among_themselves_alone(short: Path, tmp_path: Path) -> None:
    one, other = (run(policy=acting(choice)) for choice in (0, 1))
    found = tdcollect.compare(one, other)
    assert len(found.differences[0].values) == 16
    with pytest.raises(ValueError, match=r"batches.slots is 4 in .* and 8 in .*per_slot is 2 in"):
        tdcollect.compare(one, run(partial(Short, 8), episodes_per_slot=1))
    assert any("Only the first episode of each slot begins alike" in r for r in found.remarks)
    assert not any(
        "begins alike" in r for r in tdcollect.compare(*[run(episodes_per_slot=1)] * 2).remarks
    )

    def alone() -> Any:
        return Numbered()

    tdcollect.evaluate(alone, None, 16, progress=False, output_dir=tmp_path / "numbered")
    numbered = EvaluationResult.load(tmp_path / "numbered")
    with pytest.raises(ValueError, match=r"protocol is 2 in .* and 'batched-1' in"):
        tdcollect.compare(numbered, one)
    with pytest.raises(ValueError, match=r"protocol is .*batched-1"):
        tdcollect.merge([short, tmp_path / "numbered"], tmp_path / "merged")
    assert tdcollect.merge([short], tmp_path / "alone").digest == run().digest
    with pytest.raises(ValueError, match="episodes_per_slot in a race"):
        tdcollect.race(Short, {"a": None, "b": acting(1)}, 16, episodes_per_slot=1)


class Numbered(Short):
    def __init__(self) -> None:
        super().__init__(1)


@pytest.mark.parametrize(
    ("env", "how", "message"),
    [
        (Short, {"episodes": 12}, r"whole batches, of 8 each \(4 slots, 2 of each\), got 12"),
        (Short, {"env_seeds": range(16)}, "no env_seeds with episodes_per_slot"),
        (Short, {"episode_options": [None] * 16}, "no episode_options with episodes_per_slot"),
        (Short, {"workers": 2}, "no workers and no shard with episodes_per_slot"),
        (Short, {"shard": (0, 2)}, "no workers and no shard with episodes_per_slot"),
        (Short, {"num_envs": 4}, "no num_envs with episodes_per_slot"),
        (Short, {"episodes_per_slot": 0}, "episodes_per_slot to be a positive int or None, got 0"),
        ("CartPole-v1", {}, "got CartPole-v1; leave it out: its episodes are numbered"),
        (lambda: SerialEnv(2, Numbered), {}, r"got SerialEnv\(.* leave it out"),
        (Numbered, {}, r"got Numbered\(.* of batch size \[1\]; leave it out"),
        (Short(), {"fresh_envs": True}, "cannot build single slots again; pass a function"),
        (partial(Short, together=True), {}, "episodes_per_slot=1 for Short, which starts all"),
        (partial(Drift, (4,)), {}, "episodes_per_slot=1 for Drift, which starts all"),
    ],
)
def test_refusals(env: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(env, **how)


def test_an_env_that_resets_all_at_once_gives_the_first_episode_of_each_slot() -> None:
    found = run(partial(Short, together=True), episodes_per_slot=1)
    assert found.digest == run(episodes_per_slot=1).digest
    assert found.manifest["repeated"] == {"batch": 0, "episodes": 4, "differing": 0}


def test_episodes_are_cut_at_a_limit() -> None:
    found = run(max_episode_steps=4)
    assert {(e.length, e.truncated) for e in found.episodes} == {(3, False), (4, True)}


@pytest.mark.parametrize(
    ("file", "how", "told"),
    [
        (
            "episodes.jsonl",
            {"place": {"batch": 0, "slot": 2, "nth": 0}},
            "expected place .*'slot': 1",
        ),
        ("episodes.jsonl", {"place": 3}, "expected place to be three counts"),
        ("episodes.jsonl", {"env_seed": 3}, "expected the seeds"),
        ("manifest.json", {"protocol": 2}, "expected .* and whole batches, or another one"),
        ("manifest.json", {"episodes": 15}, "and 15 episodes"),
        ("manifest.json", {"batches": {"slots": 0}}, "got batches"),
        ("manifest.json", {"repeated": {"batch": -1}}, "got repeated"),
    ],
)
def test_altered_files_are_found(
    short: Path, tmp_path: Path, file: str, how: Any, told: str
) -> None:
    path = tdcollect.merge([short], tmp_path / "copy").directory
    assert path is not None
    alter(path / file, how)
    with pytest.raises(ValueError, match=told):
        EvaluationResult.load(path)


def test_vmas_in_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchrl.envs import VmasEnv

    make = partial(VmasEnv, "balance", num_envs=64, n_agents=3)
    with pytest.raises(TypeError, match=r"another kind: evaluate\(.*64, episodes_per_slot=1\)"):
        tdcollect.evaluate(make, None, 64)
    how: dict[str, Any] = {"episodes": 64, "episodes_per_slot": 1, "max_episode_steps": 8}
    found = run(make, **how, output_dir=tmp_path / "one")
    check_files(tmp_path / "one")
    assert found.manifest["repeated"] == {"batch": 0, "episodes": 64, "differing": 0}
    assert found.summary().distinct == 64
    assert found.digest == run(make, **how).digest != run(make, **how, seed=1).digest
    found.replay(50)
    # An env that is given goes on from where it was: VMAS's infos do.
    with pytest.warns(UserWarning, match="64 of 64 episodes differed: not repeatable for 64"):
        run(make(), **how)


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ladder.py").write_text(f"from {__name__} import Short as make\n")
    command = "evaluate ladder.py:make --policy random --episodes 8 --output-dir out"
    assert main(command.split()) == 1
    assert "--episodes-per-slot 1" in capsys.readouterr().err
    assert main([*command.split(), "--episodes-per-slot", "2"]) == 0
    replay = "replay out 5 --env ladder.py:make --policy random"
    assert main(replay.split()) == 0


@pytest.mark.usefixtures("quick_children")
def test_an_evaluator_takes_them_as_well() -> None:
    """The env is made each time: weights that were given hold, as for other envs."""
    kept = categorical(ins=2)
    with tdcollect.Evaluator(
        Short, policy_factory=partial(categorical, ins=2), num_trajectories=8, episodes_per_slot=2
    ) as evaluator:
        for weights in (kept, None):
            found = evaluator.submit(weights).result()
            assert found.digest == run(policy=kept, episodes=8).digest
            assert found.manifest["repeated"] == {"batch": 0, "episodes": 8, "differing": 0}
    with pytest.raises(ValueError, match="no workers and no shard with episodes_per_slot"):
        tdcollect.Evaluator(Short, kept, num_trajectories=8, episodes_per_slot=2, workers=2)


def test_suites_take_them_as_well(tmp_path: Path) -> None:
    task = {"name": "short", "env": f"{__name__}:Short", "episodes_per_slot": 2}
    policies = [{"name": "random", "factory": "random"}]
    head = {"name": "small", "episodes": 8}
    suite = Suite.of({"suite": head, "tasks": [task], "policies": policies})
    results = suite.run(tmp_path / "suite", progress=False)
    assert not results.failures
    found = EvaluationResult.load(tmp_path / "suite/evaluations/short/random/0")
    assert found.digest == run(episodes=8, **RANDOM).digest
    with pytest.raises(ValueError, match="no workers and no shard with episodes_per_slot"):
        suite.run(tmp_path / "other", workers=2)
