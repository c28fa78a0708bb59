"""Policies that keep something in plain Python are refused, and others are not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

from tdcollect import Evaluator, LocalWorkers, Suite, evaluate, merge, verify
from tdcollect.evaluation.ledger import REFUSED, RESULTS, SHARD
from tdcollect.randomness import NotReproducibleError

from .envs import Walk
from .ledger import digest, records
from .ledgers import contents
from .policies import deterministic

pytestmark = pytest.mark.usefixtures("small_reports")

quiet = partial(evaluate, progress=False)


def writing(act: Callable[[torch.Tensor], torch.Tensor]) -> TensorDictModule:
    return TensorDictModule(act, ["observation"], ["action"])


class Schedule(nn.Module):
    """One action for ``period`` calls, then the other, as macro actions are."""

    def __init__(self, period: int):
        super().__init__()
        self.period, self.t = period, 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.t += 1
        return functional.one_hot(torch.full((len(observation),), self.t // self.period % 2), 2)


ANOTHER = r"episode \d+ .*is another one when it runs (once more|again)"


@pytest.mark.parametrize("period", [1, 3, 8, 20])
def test_a_schedule_of_any_period_is_refused(period: int) -> None:
    """Calls of the probe see its actions change, or an episode that runs again shows it."""
    with pytest.raises(NotReproducibleError, match=f"gives .*other outputs|{ANOTHER}"):
        records(Walk, writing(Schedule(period)), 6, num_envs=3)


def test_an_agent_that_a_function_names_is_found_out() -> None:
    agent = Schedule(20)
    with pytest.raises(NotReproducibleError, match=ANOTHER):
        records(Walk, writing(lambda x: agent(x)))


# --- sound policies --------------------------------------------------------------------------


class Lazy(nn.Module):
    """Makes its layer at its first call, and remembers tables by size."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}
        self.layer: Any = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            self.layer = partial(torch.matmul, other=torch.linspace(-1, 1, 6).view(3, 2))
        self.tables.setdefault(len(observation), torch.arange(2.0))
        self.latest = self.layer(observation)  # for a plot, say
        self.drawn = torch.distributions.Categorical(logits=self.latest)
        return functional.one_hot((self.latest + self.tables[len(observation)]).argmax(-1), 2)


SOUND: dict[str, Callable[[], Any]] = {
    "made late": lambda: writing(Lazy()),
    "compiled": lambda: writing(torch.compile(deterministic().module, backend="eager")),
    "a count": lambda: writing(Schedule(10**9)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOUND)
def test_sound_policies_are_taken(name: str) -> None:
    assert len({digest(Walk, SOUND[name](), 6, num_envs=slots) for slots in (1, 3)}) == 1


# --- a short episode runs once more -----------------------------------------------------------


CALLS: Counter[str] = Counter()


class Sly:
    """Behaves until its sixtieth call."""

    def __init__(self) -> None:
        self.name = uuid4().hex

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        CALLS[self.name] += 1
        actions = torch.full((len(observation),), int(CALLS[self.name] > 60))
        return functional.one_hot(actions, 2)


def made_sly() -> Any:
    return writing(Sly())


def test_an_episode_that_is_another_one_ends_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(NotReproducibleError, match=ANOTHER):
        quiet(Walk, made_sly(), 12, num_envs=2)
    sly = made_sly()
    for error in (NotReproducibleError, ValueError):  # the same command does not pass silently
        with pytest.raises(error, match=ANOTHER):
            quiet(Walk, sly, 12, num_envs=2, output_dir=tmp_path / "out")
    assert (tmp_path / "out" / REFUSED).exists()
    assert not verify(tmp_path / "out").passed


def test_without_it_results_say_so(typed: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = "evaluate tests.evaluation.envs:Walk --episodes 12 --num-envs 2 --output-dir out "
    command += "--quiet --policy tests.evaluation.test_kept_state:made_sly"
    assert typed(f"{command} --no-recheck")[0] == 0
    assert json.loads((out / RESULTS).read_text())["recheck"] is False
    before = contents(out)
    assert typed(command)[0] == 0  # it is finished: the witness runs, and is as it was
    assert contents(out) == before
    assert verify(out).passed
    quiet(Walk, deterministic(), 2, output_dir=tmp_path / "with")
    assert "recheck" not in json.loads((tmp_path / "with" / RESULTS).read_text())


def test_a_shard_and_what_is_merged_of_it_say_so(tmp_path: Path) -> None:
    parts = [tmp_path / "0", tmp_path / "1"]
    for place, part in enumerate(parts):
        shard = (place, 2)
        quiet(Walk, deterministic(), 6, output_dir=part, shard=shard, recheck=bool(place))
    told = [json.loads((part / SHARD).read_text()).get("recheck") for part in parts]
    assert told == [False, None]
    merge(parts, tmp_path / "all")
    assert json.loads((tmp_path / "all" / RESULTS).read_text())["recheck"] is False
    assert all(verify(path).passed for path in (*parts, tmp_path / "all"))


def test_it_runs_a_short_episode_alone_at_the_end_and_leaves_no_trace(tmp_path: Path) -> None:
    class Watched(Walk):
        seeds: list[int] = []  # noqa: RUF012

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            Watched.seeds.append(seed)
            return super().reset(seed=seed)

    how = {"num_envs": 3, "output_dir": tmp_path / "out", "keep_trajectories": True}
    result = quiet(Watched, deterministic(), 9, **how)
    seeds = {episode.env_seed for episode in result.episodes}
    last = next(seed for seed in reversed(Watched.seeds) if seed in seeds)
    assert Watched.seeds.count(last) > 1
    assert sum(Watched.seeds.count(seed) > 1 for seed in seeds) <= 2  # and that of the trial
    assert len(result.episodes) == 9
    count, files = len(Watched.seeds), contents(tmp_path / "out")
    quiet(Watched, deterministic(), 9, **how)  # the witness alone
    assert {*Watched.seeds[count:]} & seeds == {result.episodes[0].env_seed}
    assert contents(tmp_path / "out") == files


def test_what_was_stopped_before_it_runs_it(tmp_path: Path) -> None:
    """All episodes have ended, and nothing has finished the evaluation."""
    out, sly = tmp_path / "out", made_sly()
    quiet(Walk, sly, 12, num_envs=2, output_dir=out, recheck=False)
    (out / RESULTS).unlink()
    with pytest.raises(ValueError, match="another policy or env: episode 0 is another one when"):
        quiet(Walk, sly, 12, num_envs=2, output_dir=out)


@pytest.mark.usefixtures("quick_children")
def test_workers_and_the_evaluator_run_it_too(tmp_path: Path) -> None:
    with LocalWorkers(1) as workers:
        with pytest.raises(NotReproducibleError, match=ANOTHER):
            quiet(Walk, made_sly(), 30, num_envs=2, workers=workers)
        quiet(Walk, deterministic(), 9, workers=workers, output_dir=tmp_path / "workers")
    quiet(Walk, deterministic(), 9, output_dir=tmp_path / "here")
    assert contents(tmp_path / "workers") == contents(tmp_path / "here")
    with (
        Evaluator(Walk, made_sly(), num_trajectories=30, num_envs=2) as evaluator,
        pytest.raises(NotReproducibleError, match=ANOTHER),
    ):
        evaluator.evaluate()


def test_a_suite_runs_it_for_each_evaluation(tmp_path: Path) -> None:
    here, score = "tests.evaluation", {"low": 0.0, "high": 20.0, "source": "made up"}
    tables = {
        "suite": {"name": "sly", "version": 1, "episodes": 12},
        "defaults": {"num_envs": 2},
        "tasks": [{"name": "walk", "env": f"{here}.envs:Walk", "score": score}],
        "policies": [{"name": "sly", "factory": f"{here}.test_kept_state:made_sly"}],
    }
    suite = Suite.of(tables)
    found = suite.run(tmp_path / "out", progress=False)
    assert re.search(ANOTHER, str(found.failures))
    found = suite.run(tmp_path / "all", progress=False, recheck=False)
    assert found.finished
    (results,) = (tmp_path / "all").glob("*/**/results.json")
    assert json.loads(results.read_text())["recheck"] is False
