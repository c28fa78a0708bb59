"""Test episodes on a real Ray of this machine: the same as in one process, whatever is lost."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.modules import LSTMModule

import tdcollect
from tdcollect import RayWorkers, evaluate, ray_cluster
from tdcollect._upstream.others import bounded, started_here
from tdcollect.cli import main
from tdcollect.evaluation.directory import Directory
from tdcollect.evaluation.workers import ray as ray_workers

from .. import forkserver
from ..docs.test_docs import blocks_of
from ..workers.test_process_exit import gone
from . import envs, policies
from .ledgers import contents
from .test_workers import Slow, interrupted_after

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")


@pytest.fixture(scope="module")
def workers(cluster: str) -> Iterator[RayWorkers]:
    """Two workers that all tests share."""
    with RayWorkers(2) as workers:
        yield workers


quiet = partial(evaluate, progress=False)
drawn = policies.categorical
run = partial(quiet, envs.Walk, episodes=20)


@pytest.mark.usefixtures("small_reports")
def test_interrupted_and_resumed_the_files_are_those_of_one_process(
    workers: RayWorkers, tmp_path: Path
) -> None:
    """With the data of episodes; those that are kept in memory are the same, too."""
    policy = policies.recurrent(LSTMModule)
    go_on = partial(run, policy, keep_trajectories=True)
    go_on(output_dir=tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(10, patch)
        with pytest.raises(KeyboardInterrupt):
            go_on(output_dir=tmp_path / "ray", workers=workers)
    assert (tmp_path / "ray" / "episodes.jsonl").read_bytes().count(b"\n") == 10
    go_on(output_dir=tmp_path / "ray", workers=workers)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert '"kind": "ray"' in (tmp_path / "ray" / "run.json").read_text()
    here, there = (go_on(episodes=[0, 7], workers=crew).trajectory(7) for crew in (None, workers))
    for key, value in here.items(True, True):
        assert torch.equal(value, there[key]), key


def test_workers_run_beside_no_thread_of_ray(workers: RayWorkers) -> None:
    """An env that draws from global generators would be refused there."""
    found, again = (quiet(envs.GlobalNumpy, None, 20, workers=workers) for _ in range(2))
    assert found.digest == again.digest
    assert "from a stream of each episode" in found.manifest["global_random_numbers"]


def test_large_messages_are_stored_once(
    workers: RayWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(len(value)) or put(value))
    policy = drawn()
    policy.register_buffer("ballast", torch.arange(2**18, dtype=torch.float64))
    one, other = (run(policy, workers=crew) for crew in (None, workers))
    assert other.digest == one.digest
    assert len(stored) == 1
    assert stored[0] > 2**21


# ------------------------------------------------------------------------------------------ losses


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Dangerous(envs.Walk):
    """As it is reset with some seeds, exits its process, hangs in it, or kills its actor, once.

    ``marks`` is a folder for a mark of each deed that has been done.
    """

    def __init__(self, deeds: dict[int, str], marks: Path):
        super().__init__()
        self.deeds, self.marks = deeds, marks

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        mark = self.marks / str(seed)
        if seed in self.deeds and not mark.exists():
            mark.touch()
            if self.deeds[seed] == "exit":
                os._exit(7)
            if self.deeds[seed] == "actor":
                os.kill(parent(parent(os.getpid())), signal.SIGKILL)
            time.sleep(600)
        return super().reset(seed=seed)


@pytest.mark.slow
def test_workers_and_actors_that_are_lost_are_replaced(workers: RayWorkers, tmp_path: Path) -> None:
    indices = {7: "exit", 11: "actor", 23: "hang"}
    deeds = {tdcollect.env_seed(0, index): deed for index, deed in indices.items()}
    env = partial(Dangerous, deeds, tmp_path)
    workers.timeout, workers.max_lost = 2.0, 9
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = quiet(env, drawn(), 40, workers=workers)
    workers.timeout, workers.max_lost = None, 3
    assert found.digest == quiet(env, drawn(), 40).digest
    texts = [str(warning.message) for warning in said]
    assert all(re.match(r"worker [01] \(process \d+ on .*\) (ended|was)", text) for text in texts)
    for how in (
        "ended with exit code 7; ",
        "was lost with its Ray actor, whose process ended; ",
        "was ended, as it finished no step in 2 s; ",
    ):
        assert any(how in text for text in texts)
    assert len(workers.crew) == 2


def on_a_machine_that_dies(out: str) -> None:
    """Evaluate on a machine of its own, as far as Ray knows, which dies after some episodes."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    little = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, **little})
    machine = cluster.add_node(num_cpus=1, **little)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    add = Directory.add

    def adds(self: Directory, *given: Any) -> None:
        add(self, *given)
        if len(cluster.list_all_nodes()) == 2:
            cluster.remove_node(machine, allow_graceful=False)
            died.append(time.monotonic())

    died: list[float] = []
    with RayWorkers(1) as workers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Directory, "add", adds)
        patch.setattr(ray_workers, "_ALONE", 5.0)
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as error:
            slow(output_dir=out, workers=workers)
    print(error.value)
    assert time.monotonic() - died[0] < 60
    ray.shutdown()
    cluster.shutdown()


def slow(**more: Any) -> tdcollect.EvaluationResult:
    return quiet(partial(Slow, 0.01), policies.deterministic(), 40, num_envs=1, **more)


@pytest.mark.slow
def test_a_cluster_without_machines_ends_the_evaluation_and_it_goes_on(tmp_path: Path) -> None:
    done = forkserver.run(on_a_machine_that_dies, str(tmp_path / "cut"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "expected a machine of the Ray cluster that can take a worker of 1 CPU, got none for 5 s: "
        "those that ran workers have gone. Once there are others, the same call goes on with the "
        "episodes that have not ended"
    )
    assert 0 < len((tmp_path / "cut/episodes.jsonl").read_text().splitlines()) < 40
    for name in ("cut", "whole"):
        slow(output_dir=tmp_path / name)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def on_a_ray_that_dies() -> None:
    """Evaluate on a Ray of its own, whose raylet dies before an actor has its place."""
    begin = ray_workers._Actors.begin

    def begins(*given: Any) -> Any:
        begun = begin(*given)
        ray._private.worker._global_node.kill_raylet()
        return begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_workers._Actors, "begin", begins)
        patch.setattr(ray_workers, "_ALONE", 5.0)
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="got none for 5 s"), RayWorkers(1) as workers:
            slow(workers=workers)
    print(ray.is_initialized())


@pytest.mark.slow
def test_a_raylet_that_dies_early_ends_the_evaluation(monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = forkserver.run(on_a_ray_that_dies)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr


# ------------------------------------------------------------------------------------ start and end


def pids(workers: RayWorkers) -> list[int]:
    """The processes of the workers, their templates and their actors."""
    found = [int(re.findall(r"process (\d+)", worker.name)[0]) for worker in workers.crew.values()]
    above = [parent(pid) for pid in found]
    return [*found, *above, *map(parent, above)]


@pytest.mark.slow
def test_no_process_is_left(cluster: str) -> None:
    workers = RayWorkers(1)
    left = []
    for _ in range(2):
        workers.close()
        assert repr(workers) == "RayWorkers(1 worker, not started)"
        assert run(drawn(), workers=workers).digest == run(drawn()).digest  # it starts anew
        left += pids(workers)
        assert not gone(left[-3:], 0)
    assert gone(left[:3])
    del workers
    gc.collect()
    assert gone(left)
    assert ray.is_initialized()


def test_a_fork_leaves_the_workers_alone(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ray_cluster.connect(None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        patch.setattr(ray_cluster, "_users", {name: 1})  # as if it had been made here
        assert ray_cluster.current() != name
        ray_cluster.disconnect(name)
    assert ray_cluster.current() == name


@pytest.mark.slow
def test_the_snippet_of_the_page_runs(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = blocks_of("docs/evaluating-on-workers.md")
    (snippet,) = (block for block in others if "RayWorkers" in block)
    space: dict[str, Any] = {}
    exec(first, space)
    alone = space["result"]
    exec(snippet, space)
    assert space["result"].digest == alone.digest


@pytest.mark.slow
def test_an_evaluator_uses_the_cluster(cluster: str) -> None:
    policy = drawn()
    with tdcollect.Evaluator(
        envs.Walk, policy, num_trajectories=9, backend="ray", num_gpus=0, ray_kwargs={"timeout": 60}
    ) as evaluator:
        result = evaluator.submit(step=3).result(120)
    assert result.digest == evaluate(envs.Walk, policy, 9, progress=False).digest
    assert ray.is_initialized()


TYPED = ["evaluate", "CartPole-v1", "--policy", "random", "--episodes", "20", "--quiet", "--json"]


def typed_elsewhere(*more: str) -> None:
    """Run the command, in a process that is no driver of a Ray."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    status = main([*TYPED, *more])
    assert (status, ray.is_initialized()) == (0, False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_a_command_uses_a_running_ray_and_leaves_it_running(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = forkserver.run(typed_elsewhere, "--ray-workers", "1", "--ray-address", cluster)
    assert (done.returncode, done.stderr) == (0, "")
    assert main(TYPED) == 0
    assert done.stdout == capsys.readouterr().out
    assert ray.get(ray.put(1)) == 1
    assert [node["Alive"] for node in ray.nodes()] == [True]


def test_options_that_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TYPED, "--ray-workers", "1", "--workers", "1"]) == 2
    assert main([*TYPED, "--ray-address", "head:6379"]) == 2
    err = capsys.readouterr().err
    assert "--workers and --ray-workers exclude each other" in err
    assert "--ray-address goes with --ray-workers N" in err


def on_its_own_ray(end: str) -> None:
    """Start a Ray, use it, and end in some way."""
    workers = RayWorkers(1)
    print(run(drawn(), workers=workers).digest, *pids(workers), flush=True)
    if end == "shutdown":
        ray.shutdown()  # by somebody else
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(run(drawn(), workers=workers).digest, *pids(workers))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "kill", "shutdown"])
def test_a_ray_of_our_own_ends_with_the_program(end: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = forkserver.run(on_its_own_ray, end)
    first = run(drawn()).digest
    for line in done.stdout.splitlines():
        digest, *left = line.split()
        assert digest == first
        assert gone([int(pid) for pid in left])
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0)
    assert not done.stderr


class Noted(envs.Walk):
    def __init__(self) -> None:
        super().__init__(size=int(os.environ.get("NOTED", "3")))


@pytest.mark.slow
def test_init_fn_comes_first(cluster: str) -> None:
    def note() -> None:  # local, as this module imports torch
        import os
        import sys

        assert "torch" not in sys.modules
        os.environ["NOTED"] = "1"

    with RayWorkers(1, init_fn=note) as workers:
        found = quiet(Noted, None, 2, workers=workers)
    assert "(1,)" in found.manifest["env"]["observation_space"]


# ----------------------------------------------------------------------------------------- refusals


def test_more_than_this_machine_has_is_refused(cluster: str) -> None:
    expected = (
        r"expected at most 4 workers of 1 CPU each, as the Ray of this process has no room for "
        r"more, got 9; take fewer, pass a smaller num_cpus or num_gpus, or the address of a cluster"
    )
    with RayWorkers(9) as workers, pytest.raises(ValueError, match=expected):
        run(drawn(), workers=workers)
    with (
        RayWorkers(1, num_gpus=2) as workers,
        pytest.raises(ValueError, match="at most 0 workers of 1 CPU and 2 GPUs each"),
    ):
        run(drawn(), workers=workers)


@pytest.mark.slow
def test_workers_that_wait_for_a_place_are_said(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may grow. The episodes run on the workers that have a place."""
    monkeypatch.setattr(ray_workers, "started_here", lambda: False)
    monkeypatch.setattr(ray_workers, "_PATIENCE", 1.0)
    with (
        RayWorkers(2, num_cpus=0, num_gpus=1) as workers,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        assert run(drawn(), workers=workers).digest == run(drawn()).digest
    first, second = (str(warning.message) for warning in said)
    assert first == (
        "the Ray cluster has room for 1 of 2 workers of 1 GPU each; 1 worker will wait until it "
        "grows"
    )
    assert re.fullmatch(
        r"no place in the Ray cluster yet for 1 of 2 workers: each takes 1 GPU; free are 0 GPUs",
        second,
    )


def test_arguments_are_checked(cluster: str) -> None:
    for given, said in (
        ({"num_workers": 0}, "expected num_workers to be a positive int, got 0"),
        ({"num_cpus": -1}, "expected num_cpus to be a number from 0, got -1"),
        ({"num_gpus": "1"}, "expected num_gpus to be a number from 0, got '1'"),
        ({"address": 6379}, "expected address to be 'host:port' or None, got 6379"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(said)}$"):
            RayWorkers(**{"num_workers": 1, **given})
    copy = pickle.loads(pickle.dumps(RayWorkers(2, num_cpus=0.5, timeout=3, max_lost=4)))
    assert (copy.num_workers, copy.num_cpus, copy.timeout, copy.max_lost) == (2, 0.5, 3, 4)
    assert copy.address == cluster


def test_an_address_is_of_the_cluster_that_is_connected(cluster: str) -> None:
    port = cluster.rpartition(":")[2]
    for same in (cluster, f"localhost:{port}", "auto", None):
        ray_cluster.disconnect(ray_cluster.connect(same))
    expected = "expected the address of the Ray cluster that this process is connected to, .*"
    for other in ("192.0.2.1:6379", "local"):
        with pytest.raises(ValueError, match=expected):
            ray_cluster.connect(other)


def test_an_address_where_there_is_no_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # as in a process of its own
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    expected = (
        f"^expected a Ray cluster at {address}, got .*refused; start one with `ray start --head`, "
        "or leave the address out$"
    )
    with pytest.raises(ConnectionError, match=expected):
        RayWorkers(1, address=address).start(0)
    expected = (
        "^expected a process of the Ray cluster, but got ray://head:10001, which cannot read "
        "streams; run it on a machine of the cluster, for example with `ray job submit`$"
    )
    with pytest.raises(ValueError, match=expected):
        RayWorkers(1, address="ray://head:10001").start(0)


def test_missing_ray_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"^RayWorkers needs the ray .*'\.\[ray\]' in a "):
        RayWorkers(2)


def test_reasons_are_plain_words() -> None:
    import ray.exceptions as told  # as the module may lack Ray

    def task(error: Exception) -> BaseException:
        return told.RayTaskError("answers", f"...\n{type(error).__name__}: {error}", error)

    for error, said in (
        (told.OutOfMemoryError("..."), "was ended by Ray, as its machine ran short of memory"),
        (task(ValueError("odd")), "ended with ValueError: odd"),
        (told.ActorDiedError(task(ImportError("odd"))), "ended with ImportError: odd"),
        (told.ActorUnavailableError("It is unavailable", b"0" * 16), "was out of reach"),
        (told.NodeDiedError("The node died"), "was lost with its machine"),
        (told.ActorDiedError(), "was lost with its Ray actor, whose process ended"),
    ):
        assert ray_workers._reason(error) == said


def test_streams_are_bounded(cluster: str, tmp_path: Path) -> None:
    def numbers() -> Iterator[int]:
        for number in range(1, 100):
            (tmp_path / str(number)).touch()
            yield number

    stream = ray.remote(num_cpus=0)(numbers).options(**bounded(5)).remote()
    assert ray.get(next(stream)) == 1
    before, made = 0, 1
    while before < made or made < 5:
        time.sleep(0.05)
        before, made = made, len([*tmp_path.iterdir()])
    assert made <= 7
    assert started_here()
    ray.cancel(stream)
