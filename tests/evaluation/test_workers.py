"""Episodes on worker processes: the bits of one process, the life of the workers."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl.envs import ExplorationType, GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import LSTMModule

from tdcollect import Evaluator, LocalWorkers, evaluate, make_env
from tdcollect.envs.slots import SlotError
from tdcollect.evaluation.directory import Directory
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.workers.dispatcher import Dispatcher
from tdcollect.evaluation.workers.local import Found
from tdcollect.evaluation.workers.worker import Job, template
from tdcollect.randomness import NotReproducibleError

from ..forkserver import start
from ..workers.test_process_exit import gone, runs
from . import torchrl_envs
from .crews import descendants, open_files, pids, seven, some, started
from .envs import Failing, GlobalTorch, Leaking, Touching, Unseeded, Walk
from .ledgers import contents
from .policies import categorical, deterministic, recurrent
from .test_beside import beside, in_a_thread

__all__ = ["seven"]  # a fixture

pytestmark = pytest.mark.usefixtures("small_reports")

RANDOM = {"exploration_type": ExplorationType.RANDOM}
quiet = partial(evaluate, progress=False)


class OfThisModule(Walk):
    """Is sent by value, as classes of scripts and notebooks are."""


OfThisModule.__module__ = "__main__"
if "OfThisProcess-v0" not in gym.registry:  # workers may import this module too
    gym.register("OfThisProcess-v0", lambda **kwargs: OfThisModule(**kwargs))


def cartpole() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=20))


# --- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drawn", "recurrent"])
def test_all_files_are_those_of_one_process(seven: LocalWorkers, name: str, tmp_path: Path) -> None:
    """With the data of episodes, of the recurrent policy."""
    policy = categorical() if name == "drawn" else recurrent(LSTMModule)
    how = {"keep_trajectories": name == "recurrent", **RANDOM}
    for count in (0, 1 if name == "drawn" else 7):
        workers = some(seven, count) if count else 0
        out = tmp_path / str(count)
        quiet(Walk, policy, 16, workers=workers, output_dir=out, **how)
        (run,) = json.loads((out / "run.json").read_text())
        assert run.get("workers", {}).get("number", 0) == count
        assert contents(out) == contents(tmp_path / "0")


ENVS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "id": ("CartPole-v1", lambda: None, {}),
    "id of this process": ("OfThisProcess-v0", deterministic, {"env_kwargs": {"longest": 5}}),
    "class of a script": (lambda: OfThisModule(), deterministic, {}),
    "streams": (GlobalTorch, categorical, RANDOM),
    "new envs": (Leaking, categorical, {}),
    "function of a TorchRL env": (cartpole, lambda: None, {"episodes": 6, **RANDOM}),
    "groups": (torchrl_envs.Teams, lambda: None, {"reward_keys": [("red", "reward")], **RANDOM}),
    "env of make_env": (make_env(Walk, 3), categorical, RANDOM),
    "SerialEnv": (SerialEnv(3, torchrl_envs.Seeded), categorical, RANDOM),
    "processes": (Walk, deterministic, {"backend": "process", "num_envs": 2}),
    "given seeds": (Walk, deterministic, {"env_seeds": lambda index: 5 * index}),
    "indices": (Walk, deterministic, {"episodes": [5, 3, 11, 2, 50], "max_episode_steps": 4}),
    "no episode": (Walk, deterministic, {"episodes": 0}),
    "legal actions": (partial(torchrl_envs.Masked, keeps=True), lambda: None, {"episodes": 5}),
    "restarts": (partial(Failing, (3, 9)), deterministic, {"env_seeds": range(40)}),
    "reset raises": (
        partial(Failing, (12, 18), at_reset=True),
        deterministic,
        {"env_seeds": range(10, 50), "max_restarts": 1},
    ),
}


@pytest.mark.parametrize("name", ENVS)
def test_any_env_gives_the_episodes_of_one_process(seven: LocalWorkers, name: str) -> None:
    env, make_policy, settings = ENVS[name]
    how = {"episodes": 20, **settings}
    here = quiet(env, make_policy(), **how)
    there = quiet(env, make_policy(), workers=some(seven, 2), **how)
    assert there.episodes == here.episodes
    assert there.manifest == here.manifest
    assert there.errors == here.errors
    assert len(here.errors) == (2 if "env_seeds" in settings and env is not Walk else 0)


def fails() -> Any:
    raise ZeroDivisionError("as it is made")


@pytest.mark.parametrize(
    ("env", "settings", "kind"),
    [
        (partial(Failing, (14,)), {"on_env_error": "raise"}, SlotError),
        (Unseeded, {}, NotReproducibleError),
        (fails, {}, ZeroDivisionError),
        ("Nothing-v7", {}, gym.error.NameNotFound),
        (Walk, {"reward_keys": "none"}, ValueError),
    ],
    ids=["raises", "unseeded", "not made", "unknown", "setting"],
)
def test_an_error_is_that_of_one_process(
    seven: LocalWorkers, env: Any, settings: dict[str, Any], kind: type
) -> None:
    how = {"episodes": 12, "env_seeds": range(10, 22), **settings}
    raised = []
    for workers in (None, some(seven, 2), seven):  # the second time, workers have seen the job
        with pytest.raises(kind) as caught:
            quiet(env, deterministic(), workers=workers, **how)
        raised.append(caught.value)
    for error in raised:
        assert type(error) is kind
        # Which episode is found first to be another one, depends on who is ready first.
        assert kind is NotReproducibleError or str(error)[:40] == str(raised[0])[:40]
        assert error is raised[0] or "worker" in f"{error} {error.__cause__}"
    assert not seven.in_use


def test_what_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    generator = (number for number in range(3))
    workers = LocalWorkers(2)
    for env, policy, advice in (
        (lambda: next(generator), deterministic(), "a function that makes it"),
        (Walk, lambda td: next(generator), "make it without such parts"),
    ):
        with pytest.raises(TypeError, match=rf"to be picklable, as episodes run in .* {advice}"):
            quiet(env, policy, 5, workers=workers)
    assert repr(workers) == "LocalWorkers(2 workers, not started)"
    assert not workers.in_use


def test_arguments_are_checked() -> None:
    for arguments, match in (
        ({"num_workers": 0}, "expected num_workers to be a positive int, got 0"),
        ({"num_workers": True}, "expected num_workers"),
        ({"num_workers": 2, "max_lost": 0}, "expected max_lost to be a positive int, got 0"),
        ({"num_workers": 2, "timeout": 0}, "expected timeout to be positive seconds"),
        ({"num_workers": 2, "timeout": float("nan")}, "expected timeout to be positive seconds"),
        ({"num_workers": 2, "init_fn": 3}, "expected init_fn to be callable or None, got 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            LocalWorkers(**arguments)
    for workers in (-1, 2.0, "2", True):
        with pytest.raises(TypeError, match="expected workers to be the number of processes"):
            quiet("CartPole-v1", None, 2, workers=workers)


# --- surroundings ------------------------------------------------------------------------------


class FromFile(Walk):
    """Reads its longest episode from a file of the working directory."""

    def __init__(self) -> None:
        super().__init__(longest=int(Path("longest.txt").read_text()))


def draws_by_default_dtype(td: Any) -> Any:
    noise = torch.rand(*td.batch_size, 2)
    return td.set("action", torch.nn.functional.one_hot(noise.argmax(-1), 2))


def test_workers_have_the_directory_and_torchs_defaults_of_the_evaluation(
    seven: LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    try:
        for longest, dtype in ((4, "float32"), (9, "float32"), (4, "float64"), (4, "float32")):
            (tmp_path / str(longest)).mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / str(longest))
            Path("longest.txt").write_text(str(longest))
            torch.set_default_dtype(getattr(torch, dtype))
            here, there = (
                quiet(FromFile, draws_by_default_dtype, 10, workers=workers, **RANDOM).digest
                for workers in (None, some(seven, 2))
            )
            assert there == here
            digests.append(there)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({*digests}) == 3
    assert digests[0] == digests[3]


class Told(Warning):
    """Is of this module."""


def stopped(call: Any, *arguments: Any) -> bool:
    try:
        call(*arguments)
    except (Told, FloatingPointError):
        return True
    return False


class Shown(Walk):
    """Shows settings of its process, by what they do."""

    def __init__(self) -> None:
        super().__init__(size=5)

    def noise(self) -> Any:
        return super().noise() + [
            stopped(warnings.warn, "told", Told),
            stopped(np.divide, 0.0, 0.0),
            sys.float_info.min / 2 == 0.0,
            torch.backends.mkldnn.enabled,
            len(torch.get_float32_matmul_precision()),
        ]


SETTINGS: dict[str, tuple[Any, Any]] = {  # by the entry of the manifest: how to set them, and back
    "warnings_as_errors": (partial(warnings.simplefilter, "error", Told), int),
    "numpy_errors": (partial(np.seterr, all="raise"), partial(np.seterr, **np.geterr())),
    "flushed_denormals": tuple(partial(torch.set_flush_denormal, on) for on in (True, False)),
    "onednn": tuple(partial(setattr, torch.backends.mkldnn, "enabled", on) for on in (False, True)),
    "matmul_precision": tuple(
        partial(torch.set_float32_matmul_precision, to) for to in ("high", "highest")
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_reach_all_that_run_its_episodes(
    seven: LocalWorkers, name: str, tmp_path: Path
) -> None:
    run = partial(quiet, Shown, draws_by_default_dtype, 4, **RANDOM)
    plain = run(output_dir=tmp_path)
    change, back = SETTINGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change()
        try:
            with pytest.raises(ValueError, match=f"process.{name}"):
                run(output_dir=tmp_path)
            ways = {}, {"workers": some(seven, 2)}, {"backend": "process", "num_envs": 2}
            results = [run(**how) for how in ways]
            evaluator = Evaluator(Shown, draws_by_default_dtype, num_trajectories=4, **RANDOM)
            with evaluator:
                evaluator.evaluate()
        finally:
            back()
    assert {result.digest for result in results} == {evaluator.curve[0].digest} != {plain.digest}
    there = [result.manifest["process"] for result in results]
    assert there[0] == there[1] == there[2]
    assert there[0][name] != plain.manifest["process"][name]


def test_an_id_may_be_registered_anew_also_one_that_a_module_registers(
    seven: LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_one.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Anew-v0', 'gymnasium.envs.classic_control:CartPoleEnv')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("registers_one")
    digests = set()
    for name, longest in (("Anew-v0", 3), ("Anew-v0", 30), ("registers_one:Anew-v0", 7)):
        gym.registry.pop("Anew-v0", None)
        gym.register("Anew-v0", partial(OfThisModule, longest=longest))
        there = quiet(name, None, 9, workers=some(seven, 2))
        assert there.digest == quiet(name, None, 9).digest
        digests.add(there.digest)
    assert len(digests) == 3


def test_the_verdict_on_one_slot_is_not_taken_for_two(seven: LocalWorkers) -> None:
    """Steps of one slot show in the other."""
    assert quiet(Touching, None, 6, num_envs=1, workers=some(seven, 2)).digest
    with pytest.raises(NotReproducibleError):
        quiet(Touching, None, 6, num_envs=2, workers=some(seven, 2))


# --- interruptions -----------------------------------------------------------------------------


def interrupted_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Have directories interrupt the evaluation after so many episodes."""
    add = Directory.add

    def adding(self: Directory, *arguments: Any) -> None:
        nonlocal count
        if not count:
            raise KeyboardInterrupt
        count -= 1
        add(self, *arguments)

    patch.setattr(Directory, "add", adding)


def test_another_number_of_workers_goes_on(seven: LocalWorkers, tmp_path: Path) -> None:
    how = {"episodes": 24, "keep_trajectories": True, **RANDOM}
    quiet(Walk, categorical(), output_dir=tmp_path / "whole", **how)
    before = pids(seven)
    for count, after in ((0, 5), (2, 7), (7, 0)):
        workers = some(seven, count) if count else None
        with pytest.MonkeyPatch.context() as patch:
            interrupted_after(after, patch)
            with pytest.raises(KeyboardInterrupt):
                quiet(Walk, categorical(), output_dir=tmp_path / "out", workers=workers, **how)
        assert not seven.in_use
    quiet(Walk, categorical(), output_dir=tmp_path / "out", workers=some(seven, 7), **how)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    ran = json.loads((tmp_path / "out" / "run.json").read_text())[-1]
    assert ran["episodes"] == 24 - 5 - 7
    now = pids(seven)
    assert gone([pid for pid in before if pid not in now])  # those that had episodes


def test_a_run_refuses_another_beside_it_and_ends_those_at_work_where_it_is_broken_off(
    seven: LocalWorkers,
) -> None:
    settings = EvaluationSettings(500)
    _, run = started(some(seven, 2), Job(Walk, deterministic(), settings, 2))
    next(run)
    with pytest.raises(RuntimeError, match="expected workers that are free, got LocalWorkers"):
        quiet(Walk, None, 5, workers=seven)
    before = pids(seven)
    run.close()
    assert gone(before[:2])
    assert quiet(Walk, deterministic(), 20, workers=seven).digest == (
        quiet(Walk, deterministic(), 20).digest
    )


class Slow(Walk):
    """Sleeps at each step."""

    def __init__(self, seconds: float = 0.01, **options: Any):
        super().__init__(**options)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


def evaluate_slowly(out: Path) -> None:
    """Run 60 episodes on two workers, in a process that has one thread."""
    with LocalWorkers(2) as workers:
        workers.template = template
        quiet(partial(Slow, 0.01), None, 60, workers=workers, output_dir=out)


def test_a_driver_that_is_killed_leaves_a_ledger_and_no_process(
    seven: LocalWorkers, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(evaluate_slowly, out)
    ledger = out / "episodes.jsonl"
    while process.is_alive() and not (ledger.exists() and ledger.stat().st_size):
        time.sleep(0.01)
    assert process.pid is not None
    children = descendants(process.pid)
    assert len(children) == 3  # the template and two workers
    process.kill()
    process.join()
    assert gone(children)
    assert 0 < ledger.read_bytes().count(b"\n") < 60
    there = quiet(partial(Slow, 0.0), None, 60, output_dir=out, workers=some(seven, 7))
    assert there.digest == quiet(Walk, None, 60).digest


# --- warm workers ------------------------------------------------------------------------------


def test_workers_stay_for_evaluations_of_any_kind(seven: LocalWorkers) -> None:
    workers = some(seven, 2)
    quiet(Walk, None, 2, workers=workers)
    before = pids(seven)
    jobs = [
        (env, policy, seed)
        for seed in (0, 1)
        for env, policy in ((Walk, deterministic()), (Walk, categorical()), (Leaking, None))
    ]
    expected = [quiet(env, policy, 9, seed).digest for env, policy, seed in jobs]
    for order in (range(6), range(5, -1, -1), (0, 4, 0, 1)):  # they hold four
        for job in order:
            env, policy, seed = jobs[job]
            assert quiet(env, policy, 9, seed, workers=workers).digest == expected[job]
    assert pids(seven) == before


def test_a_worker_that_ended_while_idle_is_replaced(seven: LocalWorkers) -> None:
    workers = some(seven, 2)
    expected = quiet(Walk, None, 9, workers=workers).digest
    for rank in (0, 1):
        os.kill(pids(seven)[rank], signal.SIGKILL)
        assert gone([pids(seven)[rank]])
        assert quiet(Walk, None, 9, workers=workers).digest == expected  # and nothing is told


def test_workers_end_as_they_are_closed_and_with_the_last_reference(quick_children: None) -> None:
    """They start again after they were closed."""
    quiet(Walk, None, 1, workers=1)  # what stays has started, whatever ran before
    files = open_files()
    workers = LocalWorkers(2)
    workers.close()
    with workers:
        digest = quiet(Walk, None, 9, workers=workers).digest
        started = pids(workers)
        assert repr(workers) == "LocalWorkers(2 workers, 2 running)"
    assert repr(workers) == "LocalWorkers(2 workers, not started)"
    assert gone(started)
    assert quiet(Walk, None, 9, workers=workers).digest == digest == quiet(Walk, None, 9).digest
    started = pids(workers)
    assert all(map(runs, started))
    del workers
    gc.collect()
    assert gone(started)
    assert open_files() <= files  # what other tests left may have been closed since


def test_an_evaluation_ends_the_workers_of_its_own(quick_children: None) -> None:
    quiet(Walk, None, 1, workers=1)
    files, before = open_files(), descendants(os.getpid())
    assert quiet(Walk, None, 9, workers=2).digest == quiet(Walk, None, 9).digest
    assert not {*descendants(os.getpid())} - {*before}
    with pytest.raises(ZeroDivisionError):
        quiet(fails, None, 9, workers=2)
    assert not {*descendants(os.getpid())} - {*before}
    gc.collect()  # the error's frames, on Python 3.13
    assert open_files() <= files  # what other tests left may have been closed since


def test_a_fork_leaves_the_workers_alone(quick_children: None) -> None:
    """It neither keeps them alive nor ends them, and may start its own."""
    workers = LocalWorkers(2)
    expected = quiet(Walk, None, 9, workers=workers).digest
    started = pids(workers)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, repr(workers).encode())
            workers.close()
            gc.collect()
            os.write(theirs, b"; closed")
            os.close(theirs)
            time.sleep(600)
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        with os.fdopen(ours) as told:
            assert told.read() == "LocalWorkers(2 workers, not started); closed"
        assert all(map(runs, started))
        assert quiet(Walk, None, 9, workers=workers).digest == expected
        assert pids(workers) == started
        del workers
        gc.collect()
        assert gone(started)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_evaluation_runs_in_any_thread(seven: LocalWorkers) -> None:
    """Beside one that draws, where an evaluation in this process would be refused."""
    with beside(lambda: torch.rand(10)):
        there = in_a_thread(lambda: quiet(Walk, None, 9, workers=some(seven, 2)))
    assert there.digest == quiet(Walk, None, 9).digest


# --- said --------------------------------------------------------------------------------------


def test_progress_tells_episodes_workers_time_left_and_losses(
    seven: LocalWorkers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tdcollect.progress.SECONDS_BETWEEN_LINES", 0.0)
    workers = some(seven, 2)
    taken_in, hit = Dispatcher._ended, []

    def killing(self: Dispatcher, *answer: Any) -> Any:
        yield from taken_in(self, *answer)
        if not hit:  # the busiest, as the other one may not be up yet
            seats = self._schedule.seats
            hit.append(pids(workers)[max(seats, key=lambda rank: len(seats[rank].held))])
            os.kill(hit[0], signal.SIGKILL)

    monkeypatch.setattr(Dispatcher, "_ended", killing)
    evaluate(partial(Slow, 0.002), None, 40, workers=workers, progress=True)
    lines = capsys.readouterr().err.splitlines()
    lost = [line for line in lines if "SIGKILL" in line]
    assert len(lost) == 1
    assert re.match(r"tdcollect: worker [01] \(process ", lost[0])
    assert lost[0].endswith("run again")
    rest = [line for line in lines if line not in lost]
    assert len(rest) == 40
    assert rest[-1].startswith("tdcollect: 40 of 40 test episodes, ")
    assert all(line.endswith("left, workers 2") for line in rest)


def test_the_command_takes_workers(typed: Any, here: Path, quick_children: None) -> None:
    for name, more in (("one", ""), ("many", "--workers 2")):
        command = f"evaluate CartPole-v1 --policy @:net --episodes 9 --quiet --output-dir {name}"
        assert typed(f"{command} {more}")[0] == 0
    assert contents(here / "many") == contents(here / "one")
    (run,) = json.loads((here / "many" / "run.json").read_text())
    assert run["workers"] == {"kind": "local", "number": 2, "lost": []}
    status, _, error = typed("evaluate CartPole-v1 --policy random --workers -1")
    assert status == 2
    assert "--workers" in error


def test_an_evaluation_goes_on_though_nobody_tells_it_that_its_episodes_have_ended(
    seven: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where another evaluation in the same env has found out what its last worker still tries.
    answers, idle = Dispatcher.answers, 0

    def untold(dispatcher: Dispatcher, wait: bool = True) -> Iterator[Any]:
        nonlocal idle
        left = [dispatcher.left(work) for work in dispatcher._schedule.queues]
        idle = 0 if any(left) or not dispatcher.workers.crew else idle + 1
        assert idle < 10, "all episodes have ended, and nothing goes on"
        yield from (event for event in answers(dispatcher, wait) if type(event[1]) is not Found)

    monkeypatch.setattr(Dispatcher, "answers", untold)
    monkeypatch.setattr(seven, "fresh_envs", {})
    job = Job("CartPole-v1", None, EvaluationSettings(4, num_envs=2))
    _, records = started(some(seven, 1), job)
    assert len([*records]) == 4
