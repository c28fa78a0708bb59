"""Workers that die, hang or differ: the episodes that are not to blame are those of one process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from tdcollect import LocalWorkers, evaluate, merge
from tdcollect.display import without_process_ids
from tdcollect.evaluation.directory import Directory
from tdcollect.evaluation.ledger import LOST, Episode
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.workers import dispatcher, local
from tdcollect.evaluation.workers.worker import Job
from tdcollect.processes import child
from tdcollect.processes.child import Spawned

from ..forkserver import start
from ..workers.test_process_exit import gone, runs
from .crews import seven, some, started
from .envs import Walk
from .ledgers import contents
from .policies import deterministic
from .test_workers import Slow

__all__ = ["seven"]  # a fixture

pytestmark = pytest.mark.usefixtures("small_reports")

SEEDS = range(10, 50)  # the probe's are others
quiet = partial(evaluate, progress=False)


class Deadly(Walk):
    """Does something at the second step of episodes with some seeds: a method, or a signal.

    With a marker, a file, it is done once.
    """

    def __init__(self, deeds: dict[int, str], marker: Path | None = None):
        super().__init__()
        self.deeds, self.marker = deeds, marker

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        self.left += 2
        self.steps, self.deed = 0, self.deeds.get(seed, "") if seed is not None else ""
        if self.deed == "sleep_at_reset":
            time.sleep(60)
        return result

    def step(self, action: Any) -> Any:
        self.steps += 1
        result = super().step(action)
        if self.steps == 2 and self.deed:
            observation = self.act()
            return result if observation is None else (observation, *result[1:])
        return result

    def act(self) -> Any:
        if self.marker is not None:
            if self.marker.exists():
                return None
            self.marker.touch()
        if self.deed.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.deed))
        if self.deed in OUT_OF_MEMORY:  # which the policy raises
            return np.full(3, 1e6 * (1 + [*OUT_OF_MEMORY].index(self.deed)), np.float32)
        return getattr(self, self.deed)()

    def leave(self) -> None:
        os._exit(7)

    def exit(self) -> None:
        raise SystemExit("no more")

    def close_all(self) -> None:
        """Close what others have opened, and go on."""
        os.closerange(3, 64)
        time.sleep(60)

    def hold_the_lock(self) -> None:
        ctypes.PyDLL(None).sleep(60)

    def fork_and_die(self) -> None:
        """Leave a process that holds the sockets open."""
        if not os.fork():
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


OUT_OF_MEMORY = {
    "python": MemoryError("no more"),
    "cuda": torch.cuda.OutOfMemoryError("CUDA out of memory"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
}


def hungry() -> TensorDictModule:
    """A policy that lacks memory for large observations."""
    policy = deterministic()

    def lack(_: Any, given: Any) -> None:
        if (given[0] > 1e5).any():
            raise [*OUT_OF_MEMORY.values()][int(given[0].max() / 1e6) - 1]

    policy.module.register_forward_pre_hook(lack)
    return policy


@pytest.fixture
def set_up(seven: LocalWorkers) -> Iterator[Callable[..., LocalWorkers]]:
    """Gives the workers other settings."""

    def change(count: int, timeout: float | None = None, max_lost: int = 3) -> LocalWorkers:
        seven.timeout, seven.max_lost = timeout, max_lost
        return some(seven, count)

    yield change
    change(7).in_use = False


@pytest.fixture(scope="module")
def tame() -> EvaluationResult:
    """The evaluation in which nothing happens."""
    return quiet(partial(Deadly, {}), hungry(), 20, env_seeds=SEEDS)


def told(workers: LocalWorkers, *arguments: Any, **options: Any) -> EvaluationResult:
    """Evaluate, with losses told in lines; those as envs are made are warnings."""
    options = {"env_seeds": SEEDS, "episodes": 20, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"worker \d \(process")
        return evaluate(*arguments, workers=workers, progress=True, **options)


def expected(tame: EvaluationResult, *lost: int) -> list[Episode]:
    return [
        Episode(e.index, e.env_seed, e.policy_seed, LOST) if e.index in lost else e
        for e in tame.episodes
    ]


# --- deaths ------------------------------------------------------------------------------------


ENDS = {
    "leave": "ended with exit code 7",
    "exit": "ended with exit code 1",
    "SIGSEGV": "was killed by SIGSEGV",
    "fork_and_die": "was killed by SIGKILL",
    **dict.fromkeys(OUT_OF_MEMORY, "ended with exit code 1"),
}


def test_an_episode_that_ends_its_process_alone_is_lost(
    set_up: Any, tame: EvaluationResult, capsys: pytest.CaptureFixture[str]
) -> None:
    deeds = dict(zip(range(11, 30, 2), ENDS, strict=False))
    result = told(set_up(2, max_lost=2), partial(Deadly, deeds), hungry())
    lost = {seed - 10: ENDS[deed] for seed, deed in deeds.items()}
    assert len(lost) == len(ENDS)
    assert result.episodes == expected(tame, *lost)
    assert result.errors == {
        index: f"its worker {how}, the last of 2 that it cost" for index, how in lost.items()
    }
    lines = [line for line in capsys.readouterr().err.splitlines() if "process" in line]
    for index in lost:
        (line,) = (line for line in lines if f"episode {index}, its only one" in line)
        assert line.endswith(" is given up as lost")


def test_a_worker_that_closes_its_connection_is_ended(
    set_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.evaluation.workers.local.EXIT_SECONDS", 0.1)
    env = partial(Deadly, {17: "close_all"})
    result = told(set_up(1, max_lost=1), env, hungry(), episodes=[7])
    how = "closed its connection, and was ended"
    assert result.errors == {7: f"its worker {how}, the last of 1 that it cost"}


def test_a_worker_that_dies_once_costs_no_episode(
    set_up: Any, tame: EvaluationResult, tmp_path: Path
) -> None:
    env = partial(Deadly, {17: "SIGSEGV"}, tmp_path / "once")
    result = told(set_up(2), env, hungry())
    assert (result.episodes, result.errors) == (tame.episodes, {})
    assert (tmp_path / "once").exists()


def test_any_number_of_workers_writes_the_same_files(
    set_up: Any, tame: EvaluationResult, tmp_path: Path
) -> None:
    env = partial(Deadly, {12: "SIGKILL", 29: "SIGKILL"})
    for count in (1, 7):
        result = told(set_up(count), env, hungry(), output_dir=tmp_path / str(count))
        assert result.episodes == expected(tame, 2, 19)
        assert contents(tmp_path / str(count)) == contents(tmp_path / "1")


class Preempted(Deadly):
    """Ends its process at episodes with some seeds, while there is a file."""

    def __init__(self, seeds: tuple[int, ...], file: Path):
        super().__init__(dict.fromkeys(seeds, "leave"))
        self.file = file
        file.touch()

    def act(self) -> None:
        if self.file.exists():
            super().act()


def test_lost_episodes_of_shards_run_again_and_nothing_else_does(
    set_up: Any, tmp_path: Path
) -> None:
    """The files are then those of a run in which no worker was lost, merged ones too."""
    env = partial(Preempted, (12, 19), tmp_path / "lethal")
    workers = set_up(2, max_lost=1)

    def run(to: str, **more: Any) -> EvaluationResult:
        paths = [tmp_path / f"{to}-{shard}" for shard in range(2)]
        for shard, path in enumerate(paths):
            given = {"shard": (shard, 2), "output_dir": path, "env_seeds": SEEDS, **more}
            quiet(env, hungry(), 10, keep_trajectories=True, **given)
        return merge(paths, tmp_path / f"{to}-all")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = run("one", workers=workers).summary()
    assert (lost.lost, lost.failed, lost.to_dict()["lost"]) == (2, 0, 2)
    assert "8 completed, 0 failed, 2 lost, 0 restarted" in str(lost)
    env = partial(Deadly, {})
    assert "lost" not in run("one").summary().to_dict()
    run("whole")
    for path in tmp_path.glob("one-*"):
        assert contents(path) == contents(tmp_path / path.name.replace("one", "whole"))
        runs = json.loads((path / "run.json").read_text())
        assert path.name == "one-all" or [run["episodes"] for run in runs] == [5, 1]


def test_a_retry_that_is_interrupted_goes_on(set_up: Any, tmp_path: Path) -> None:
    """Nothing had ended by then: all episodes were lost."""
    env = partial(Preempted, (12,), tmp_path / "lethal")
    run = partial(quiet, env, hungry(), [2], env_seeds=SEEDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = run(workers=set_up(1, max_lost=1), output_dir=tmp_path / "one")
    assert ended.episodes[0].lost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preempted, "act", lambda self: None)
        with pytest.MonkeyPatch.context() as stopping:
            stopping.setattr(Directory, "add", interrupted)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt) as stop:
                    run(output_dir=tmp_path / "one")
        (note,) = stop.value.__notes__
        assert note == f"the same call goes on with the episodes that {tmp_path / 'one'} lacks"
        run(output_dir=tmp_path / "one")
        run(output_dir=tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def interrupted(*given: Any) -> None:
    raise KeyboardInterrupt


def test_losses_are_told_at_the_users_call(set_up: Any) -> None:
    env, workers = partial(Deadly, {17: "leave"}), set_up(1, max_lost=1)
    with pytest.warns(UserWarning, match="given up as lost") as said:
        quiet(env, hungry(), [7], env_seeds=SEEDS, workers=workers)
    assert {one.filename for one in said} == {__file__}


def test_many_that_are_hit_at_once(set_up: Any) -> None:
    """The template, then a worker that is stopped, then all of them."""
    workers, records = set_up(2, timeout=1.0), []
    job = Job(partial(Slow, 0.003), deterministic(), EvaluationSettings(40, env_seeds=SEEDS), 2)
    one, run = started(workers, job)
    for record in run:
        records.append(record)
        template = [one.child.pid for one in workers._templates]
        own = [workers.crew[rank].pid for rank in range(2) if rank in workers.crew]
        hit = {3: template, 10: own[:1], 20: [*own, *template]}.get(len(records), [])
        for pid in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if len(records) == 10 else signal.SIGKILL)
    expected = quiet(Walk, deterministic(), 40, env_seeds=SEEDS).digest
    assert EvaluationResult(one.manifest, records).digest == expected
    workers.timeout = None
    again = quiet(Walk, deterministic(), 40, env_seeds=SEEDS, workers=workers)
    assert again.digest == expected


@pytest.mark.parametrize("when", ["stopped", "dies as it starts"])
def test_a_template_that_does_not_answer_is_replaced(
    quick_children: None, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_SECONDS", 2.0)
    with LocalWorkers(2) as workers:
        workers.start(0)
        (own,) = workers._templates
        if when == "stopped":
            os.kill(own.child.pid, signal.SIGSTOP)
        else:
            own.child.end()
            quick, deaths = Spawned._begin, iter("12")

            def dying(spawned: Any, *files: Any) -> None:
                if next(deaths, None) is None:
                    quick(spawned, *files)
                else:  # it takes no files, so that nobody keeps them
                    spawned._process = start(os._exit, 9)
                    spawned.pid = spawned._process.pid

            monkeypatch.setattr(Spawned, "_begin", dying)
        again = quiet(Walk, deterministic(), 9, workers=workers)
        assert again.digest == quiet(Walk, deterministic(), 9).digest
        assert workers._templates != [own]
    assert gone([own.child.pid])


# --- trajectories on their way -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_worker_that_ends_or_stops_amid_a_trajectory(
    set_up: Any, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_MOST_READ", 4096)
    answers = local.LocalWorker.answers
    hit: list[int] = []

    def reading(self: Any, ready: set[int]) -> Any:
        amid = len(self._channel._incoming) > 10_000
        if amid and len(hit) < 3 and self.pid not in hit:
            hit.append(self.pid)
            os.kill(self.pid, kind)
            while runs(self.pid) and kind == signal.SIGKILL:
                time.sleep(0.001)
        yield from answers(self, ready)

    monkeypatch.setattr(local.LocalWorker, "answers", reading)
    env, how = partial(Walk, size=10_000), {"keep_trajectories": True, "episodes": 9}
    workers = set_up(2, timeout=1.0, max_lost=10)
    there = told(workers, env, **how, env_seeds=None)
    assert len(hit) == 3
    here = quiet(env, **how)
    assert there.digest == here.digest
    for index in range(9):
        assert torch.equal(
            there.trajectory(index)["observation"], here.trajectory(index)["observation"]
        )


@pytest.mark.slow
def test_a_driver_that_takes_its_time_blames_no_worker(set_up: Any) -> None:
    """It does not read meanwhile, so that workers wait for it."""
    env = partial(Walk, size=10_000)
    quiet(env, None, 40, workers=set_up(2))
    job = Job(env, None, EvaluationSettings(40), 2)
    one, run = started(set_up(2, timeout=0.5), job, keep=True)
    ended = 0
    for ended, _ in enumerate(run, 1):
        if ended in (1, 2, 20):
            time.sleep(1)
    assert one.dispatcher is not None
    assert (ended, one.dispatcher.lost) == (40, [])


# --- hanging -----------------------------------------------------------------------------------


def test_an_episode_that_hangs_is_lost(set_up: Any, tame: EvaluationResult) -> None:
    """Also where the interpreter's lock is held."""
    env = partial(Deadly, {21: "sleep_at_reset", 24: "hold_the_lock"})
    result = told(set_up(2, timeout=0.7, max_lost=2), env, hungry())
    assert result.episodes == expected(tame, 11, 14)
    how = "its worker was ended, as it finished no step in 0.7 s, the last of 2 that it cost"
    assert result.errors == {11: how, 14: how}


# --- as the env is made ------------------------------------------------------------------------


class Unmade(Walk):
    """Does not get through its constructor."""

    def __init__(self, what: str):
        super().__init__()
        os._exit(7) if what == "leave" else time.sleep(60)


@pytest.mark.parametrize("what", ["leave", "sleep"])
def test_an_env_that_is_never_made_ends_the_evaluation(
    set_up: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_START_SECONDS", 2.0 if what == "sleep" else 60.0)
    workers = set_up(2, timeout=0.3, max_lost=2)
    how = "ended with exit code 7" if what == "leave" else "was ended, as it finished no step in"
    with pytest.warns(UserWarning, match=how) as lost, pytest.raises(RuntimeError) as error:
        quiet(partial(Unmade, what), None, 5, workers=workers)
    assert re.search(
        rf"worker [01] \(process \d+\) {how}.* as it made the env and the policy, and so did 1 "
        "before it; try the evaluation without workers",
        str(error.value),
    )
    assert len(lost) in (1, 2)
    assert not workers.in_use
    named = {int(pid) for line in lost for pid in re.findall(r"process (\d+)", str(line.message))}
    assert gone([*named])
    assert not {rank for rank in (0, 1) if rank in workers.crew}
    workers.timeout = None
    assert quiet(Walk, None, 5, workers=workers).digest == quiet(Walk, None, 5).digest


def test_reports_hold_no_process_ids() -> None:
    text = "worker 1 (process 12) differs from worker 2 (process 34 on here), pid 5"
    assert without_process_ids(text) == "worker 1 differs from worker 2 (on here), pid 5"


# --- unlike workers ----------------------------------------------------------------------------


class Wider(Walk):
    """Has other spaces in each process."""

    def __init__(self) -> None:
        super().__init__(size=3 + os.getpid() % 1000)


def test_a_worker_that_differs_is_refused(set_up: Any) -> None:
    """From the start, or as it takes the place of one that was lost."""
    workers = set_up(2)
    told = (
        r"^expected workers that are alike, got worker {} \(process \d+\) that differs from the "
        r"evaluation's manifest: its env\.observation_space is 'Box.*' and not 'Box.*'"
    )
    with pytest.raises(ValueError, match=told.format(1)):
        quiet(Wider, None, 40, workers=workers)
    _, run = started(some(workers, 1), Job(Wider, None, EvaluationSettings(40), 1))
    with contextlib.closing(run):
        next(run)
        os.kill(workers.crew[0].pid, signal.SIGKILL)
        while runs(workers.crew[0].pid):
            time.sleep(0.001)
        with pytest.raises(ValueError, match=told.format(0)):
            list(run)
    assert not workers.in_use
