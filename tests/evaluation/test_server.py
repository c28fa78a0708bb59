"""Policies on a server: the oracle is the example's agent in this process."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import tdcollect
from tdcollect import EvaluationResult, cli
from tdcollect.policies import from_agent, from_function, from_server
from tdcollect.randomness import NotReproducibleError

from .envs import Walk

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy_server.py"
sys.path.insert(0, str(EXAMPLE.parent))
import policy_server  # noqa: E402

sys.path.pop(0)
ABOUT = policy_server.ABOUT


class Agent(policy_server.Agent):  # type: ignore[misc]
    """The example's, for the walk's observations of three numbers; counts its calls."""

    acted = 0

    def act(self, observation: Any) -> Any:
        type(self).acted += 1
        return super().act(np.append(observation, 0))


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[Any]:
    Agent.acted = 0
    with serving(policy_server.Server(("127.0.0.1", 0), Agent)) as made:
        made.url = f"http://127.0.0.1:{made.server_port}"
        yield made


@pytest.fixture(scope="module")
def local() -> EvaluationResult:
    """The same episodes with the agent in this process."""
    return tdcollect.evaluate(Walk, from_agent(Agent, act="act"), 9, progress=False)


def evaluated(policy: Any, **how: Any) -> EvaluationResult:
    return tdcollect.evaluate(Walk, policy, 9, progress=False, **how)


SLOW = pytest.param({"workers": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [{"num_envs": 1}, {"num_envs": 4}, SLOW])
def test_a_server_plays_the_episodes_that_its_agent_plays_here(
    server: Any, local: EvaluationResult, how: dict[str, int]
) -> None:
    result = evaluated(from_server(server.server_port), **how)
    assert result.digest == local.digest
    assert not server.sessions  # it has been told of the end of each


def test_the_manifest_says_what_the_server_says(server: Any, tmp_path: Path) -> None:
    policy = from_server(server.url)
    found = evaluated(policy, output_dir=tmp_path / "1").manifest["policy"]
    said = {name: ABOUT[name] for name in ("name", "version", "digest")}
    assert found.items() >= {"class": "lean", "kind": "server", **said}.items()
    server.about = {**ABOUT, "version": "2"}
    with pytest.raises(ValueError, match=r"another evaluation: policy.version is '1' there"):
        evaluated(server.url, output_dir=tmp_path / "1")
    assert evaluated(policy).manifest["policy"]["version"] == "2"


def test_a_server_that_changes_meanwhile_is_refused(server: Any) -> None:
    policy = from_server(server.server_port)
    make, server.make = server.make, lambda: changed() or make()

    def changed() -> None:
        if Agent.acted > 9:
            server.about = {**ABOUT, "digest": 64 * "0"}

    with pytest.raises(ValueError, match=r"to serve \{.*until the evaluation ends, got \{.*0000"):
        evaluated(policy, num_envs=2)


class Breaking(policy_server.Handler):  # type: ignore[misc]
    """Breaks the connection in place of the first answer to each seventh message."""

    seen: ClassVar[set[bytes]] = set()

    def do_POST(self) -> None:
        body, line = self.rfile.read(int(self.headers["Content-Length"])), self.rfile
        self.breaks = body not in self.seen and len(self.seen) % 7 == 6
        self.seen.add(body)
        self.rfile = io.BytesIO(body)
        super().do_POST()
        self.rfile = line

    def end_headers(self) -> None:
        if self.breaks:
            self.connection.shutdown(socket.SHUT_RDWR)
        super().end_headers()


def test_an_answer_that_is_lost_is_given_again_without_acting_twice(
    server: Any, local: EvaluationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcollect.served._PAUSE", 0)
    server.RequestHandlerClass = Breaking
    result = evaluated(from_server(server.server_port), recheck=False)
    assert result.digest == local.digest
    probes = 2
    assert Agent.acted == probes + sum(episode.length or 0 for episode in result.episodes)


def test_episodes_whose_session_is_lost_start_again(server: Any, local: EvaluationResult) -> None:
    lost = iter([False] * 30 + [True] + [False] * 1000)
    act = Agent.act

    class Losing(Agent):
        def act(self, observation: Any) -> Any:
            if next(lost):
                server.sessions.clear()
            return act(self, observation)

    server.make = Losing
    result = evaluated(from_server(server.server_port), num_envs=3)
    assert [episode.digest for episode in result.episodes] == [e.digest for e in local.episodes]
    assert sum(episode.restarts for episode in result.episodes) > 0
    lost = iter([False] * 2 + [True] * 1000)  # none of the probe's
    with pytest.raises(RuntimeError, match="lost the sessions of episodes"):
        evaluated(from_server(server.server_port), num_envs=3)


def test_draws_that_the_seed_does_not_reach_are_refused(server: Any) -> None:
    class Drawing(Agent):
        def reset(self, seed: int) -> None:
            super().reset(None)

        def act(self, observation: Any) -> Any:
            return self.random.random(3)

    server.make = Drawing
    box = spaces.Box(-1, 1, (3,))
    with pytest.raises(NotReproducibleError, match="gives other actions"):
        tdcollect.evaluate(lambda: Walk(box), from_server(server.server_port), 2, progress=False)


def test_connections_close_with_an_evaluation_that_fails(server: Any) -> None:
    connected = []

    class Counting(policy_server.Handler):  # type: ignore[misc]
        def setup(self) -> None:
            connected.append(self)
            super().setup()

        def finish(self) -> None:
            super().finish()
            connected.remove(self)

    class Failing(Agent):
        def act(self, observation: Any) -> Any:
            return super().act(observation) if self.acted < 20 else float("nan")

    server.RequestHandlerClass, server.make = Counting, Failing
    server.daemon_threads = True  # it need not wait for those that stay connected
    with pytest.raises(ValueError, match="or not finite") as failed:
        evaluated(from_server(server.server_port), num_envs=3)
    deadline = time.monotonic() + 10
    while connected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not connected, failed  # which holds what would let go of them at last


def answering(answer: Any) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """What answers requests for actions so, and the others as it should."""

    def answered(request: dict[str, Any]) -> tuple[int, Any]:
        if "about" in request:
            return 200, {"about": ABOUT}
        found = answer(request) if callable(answer) else answer
        return 200, {"about": ABOUT, "number": request["number"], "action": found}

    return answered


def array(value: Any) -> Any:
    return policy_server.encoded(np.asarray(value))


BAD: dict[str, tuple[Any, str]] = {
    "no number": (answering("left"), r"and 'action', .*it is no number, .*\), got left"),
    "another action": (answering(7), r"expected an action of the env's space, .*got 7 \(int\)"),
    "another shape": (answering(array([1, 0])), r"an action of the env's space, .*shape \(2,\)"),
    "nan": (answering(float("nan")), r"or not finite\), got nan"),
    "nan in an array": (answering(array([np.nan])), "or not finite"),
    "objects": (answering({"dtype": "O", "shape": [1], "data": "AAAA"}), "create an OBJECT array"),
    "cut off": (answering({"dtype": "<i8", "shape": [2], "data": "AAAA"}), "ValueError: buffer"),
    "other data": (answering({"dtype": "<i8", "shape": [], "data": 3}), "argument should be"),
    "another number": (lambda r: (200, {"about": ABOUT, "number": 5}), "it is of request 5"),
    "its own error": (
        lambda r: (500, {"error": "no\x1b model"}),
        r"status 200, got 500: .*no.* mod",
    ),
    "another server": (lambda r: (200, {"hello": 1}), r"to say what it is, .*got None"),
    "another protocol": (lambda r: (200, {"about": {**ABOUT, "protocol": 2}}), "to say what it is"),
    "a list": (lambda r: (200, {"about": {**ABOUT, "name": [1]}}), "to say what it is"),
    "no digest": (lambda r: (200, {"about": {**ABOUT, "digest": "x"}}), "SHA-256 in hexadecimal"),
    "no object": (lambda r: (200, [1]), r"with a JSON object and .*got 200: \[1\]"),
    "too much": (lambda r: (200, 3000 * "x"), "at most 2,000 bytes .*got 3002 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_is_none_is_told(server: Any, name: str) -> None:
    server.answer, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        evaluated(from_server(server.server_port, largest=2000), num_envs=1)


@contextmanager
def listening(serve: Callable[[socket.socket], Any]) -> Iterator[int]:
    """Serve connections one after the other, as sockets; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def drip(connection: socket.socket) -> None:
    """Send one byte at a time, without end."""
    try:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)
    except OSError:
        return


SILENT: dict[str, tuple[Callable[[socket.socket], Any], str]] = {
    "silence": (lambda connection: time.sleep(0.5), "TimeoutError: timed out"),
    "one byte at a time": (drip, "TimeoutError: timed out"),
    "a closed connection": (lambda connection: connection.recv(9999), "RemoteDisconnected"),
    "no http": (
        lambda connection: (connection.recv(9999), connection.sendall(b"hello\r\n")),
        r"BadStatusLine: hello\\r",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_server_that_does_not_answer_is_told_before_an_env_is_made(name: str) -> None:
    serve, said = SILENT[name]
    with listening(serve) as port:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=f"within 0.2 seconds, got {said}.*policy_server"):
            tdcollect.evaluate(lambda: 1 / 0, from_server(port, timeout=0.2), progress=False)  # type: ignore[arg-type,return-value]
        assert time.monotonic() - began < 25  # 30 by default
    with pytest.raises(ConnectionError, match="ConnectionRefusedError"):
        tdcollect.evaluate(lambda: 1 / 0, from_server(port), progress=False)  # type: ignore[arg-type,return-value]


def test_a_server_that_falls_silent_ends_the_evaluation(server: Any) -> None:
    hold = threading.Event()
    server.answer = answering(lambda request: 0 if request["number"] < 1 else hold.wait(5))
    with pytest.raises(ConnectionError, match=r"within 0.2 seconds, got TimeoutError"):
        evaluated(from_server(server.server_port, timeout=0.2), num_envs=2)
    hold.set()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://here", "http://me:secret@here", "http://here?x=1", "http://h:x"],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected the port of a policy server .*ssh -L"):
        from_server(url)
    for timeout in (0, "3"):
        with pytest.raises(ValueError, match=f"timeout to be seconds above 0, got {timeout!r}"):
            from_server(8000, timeout=timeout)
    with pytest.raises(TypeError, match="expected batched to be a bool, got 'yes'"):
        from_function(len, batched="yes")
    assert repr(from_server(8000)) == "ServerPolicy(http://127.0.0.1:8000)"


def test_dicts_of_arrays_and_any_action_travel(server: Any) -> None:
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,)))
    seen = []

    class Acting(Agent):
        def act(self, observation: Any) -> Any:
            seen.append(observation)
            return {"a": 1, "b": np.tanh(observation[:2])}

    server.make = Acting
    make = from_agent(Acting, act="act")
    there, here = (
        tdcollect.evaluate(lambda: Walk(space), policy, 3, progress=False).digest
        for policy in (from_server(server.server_port), make)
    )
    assert there == here
    assert seen[0].dtype == np.float32


def test_races_take_it(server: Any) -> None:
    policies = {"served": server.url, "here": from_agent(Agent, act="act")}
    race = tdcollect.race(Walk, policies, max_episodes=8, progress=False)
    served, here = race.results.values()
    assert served.digest == here.digest


@pytest.mark.slow
def test_suites_and_evaluators_take_it(server: Any, tmp_path: Path) -> None:
    tables = {
        "suite": {"name": "served", "episodes": 2},
        "tasks": [{"name": "pole", "env": "CartPole-v1"}],
        "policies": [{"name": "lean", "factory": server.url}],
    }
    server.make = policy_server.Agent
    suite = tdcollect.Suite.of(tables)
    assert [cell.status for cell in suite.run(tmp_path, progress=False).cells] == ["finished"]
    server.make = Agent
    with tdcollect.Evaluator(Walk, from_server(server.url), num_trajectories=3) as evaluator:
        here = tdcollect.evaluate(Walk, from_agent(Agent, act="act"), 3, progress=False)
        found = evaluator.evaluate()
    assert found["eval/reward"] == pytest.approx(here.returns.mean())


def test_the_example_serves_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            words = ["evaluate", "CartPole-v1", "--policy", url, "--episodes", "3"]
            assert cli.main([*words, "--output-dir", str(tmp_path / "run")]) == 0
        finally:
            process.kill()
    result = EvaluationResult.load(tmp_path / "run")
    agent = from_agent(policy_server.Agent, act="act")
    assert result.digest == tdcollect.evaluate("CartPole-v1", agent, 3, progress=False).digest
    assert json.loads((tmp_path / "run" / "request.json").read_text())["policy"] == url
