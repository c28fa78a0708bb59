"""docs/policies.md: each kind of policy has a test; what it lists as tried is tried here."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchrl import envs

import tdcollect

from . import test_torchrl_policies

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "policies.md").read_text()
NAMES = re.compile(r"`([^`]+)`")


def table(head: str) -> list[list[str]]:
    """The cells of a table's rows, with the text of links alone."""
    assert PAGE.count(head) == 1
    text = re.sub(r"\[([^]`]+)\]\([^)]+\)", r"\1", PAGE.split(head)[1].split("\n\n")[0])
    lines = text.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


TESTED = {  # what the rows of the first table begin with, and a test of each
    "a TensorDict module": "evaluation/test_torchrl_policies.py::test_a_policy_of_torchrl_acts_as",
    "a torch module or function": "evaluation/test_invariance.py::test_any_number_of_slots_gives",
    "a function of one": "evaluation/test_policies.py::test_a_function_acts_as_in_gymnasiums_loop",
    "a function of a batch": "evaluation/test_policies.py::test_a_batched_function_gives_the_same",
    "an object that remembers": "evaluation/test_policies.py::test_agents_remember_their_own",
    "agents around one large": "evaluation/test_policies.py::test_agents_that_act_together_do_so",
    "a policy on a server": "evaluation/test_tried.py::test_the_agent_of_a_server",
    "a model of Stable-Baselines3": "evaluation/test_sb3.py::test_",
    "an agent of a CleanRL script": "evaluation/test_tried.py::test_from_a_model_to_a_report",
    "a model of LeRobot": "robots/test_lerobot.py::test_episodes_are_those_of_lerobots_rollout",
    "a policy for each group": "evaluation/test_group_policies.py::test_",
    "nothing: random actions": "evaluation/test_actions.py::test_random_actions_are_legal",
}


def test_each_kind_of_policy_has_a_test() -> None:
    rows = table("| you have | pass | how it is evaluated |")
    assert all(len(row) == 3 and all(row) for row in rows)
    begins = [[b for b in TESTED if row[0].startswith(b)] for row in rows]
    assert [len(found) for found in begins] == [1] * len(rows), begins
    assert len(rows) == len(TESTED)
    for place in TESTED.values():
        file, name = place.split("::")
        assert f"def {name}" in (TESTS / file).read_text(), place


def test_the_modules_of_torchrl_are_those_of_the_table_of_tests() -> None:
    named = {name for row in table("| module | |") for name in NAMES.findall(row[0])}
    tried = {name.split(",")[0] for name in test_torchrl_policies.CASES}
    assert named == tried


ENVS = [
    env
    for versions, names in table("| library | envs |")
    for env in NAMES.findall(names)
    if "lerobot" not in versions  # which has environments of its own, and tests/robots
]


def versions_in(text: str) -> dict[str, str]:
    return dict(part.split() for part in text.split(" with "))


def test_versions_are_those_of_the_constraints_and_policies_are_in_their_tests() -> None:
    files = [(TESTS.parent / name).read_text() for name in ("Makefile", "constraints.txt")]
    pinned = dict(re.findall(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)", "\n".join(files)))
    rows = table("| library | policies | tests |")
    for text in {row[0] for row in (*rows, *table("| library | envs |"))}:
        assert versions_in(text).items() <= pinned.items(), text
    for _, names, tests in rows:
        texts = [(TESTS / "evaluation" / name).read_text() for name in NAMES.findall(tests)]
        assert texts
        for name in NAMES.findall(names):
            assert any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts), name


QUICK = ("CartPole-v1", "Taxi-v4")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in ENVS]
)
def test_an_env_of_the_list_has_one_digest_for_any_slots(name: str) -> None:
    env: Any = name
    if name.endswith(")"):

        def env() -> Any:
            wrappers = vars(pytest.importorskip("minigrid.wrappers")) if "MiniGrid" in name else {}
            return eval(name, {**vars(envs), "gym": gym, **wrappers})

    digests = {
        tdcollect.evaluate(
            env, None, 4, num_envs=slots, max_episode_steps=8, progress=False, recheck=False
        ).digest
        for slots in (1, 3)
    }
    assert len(digests) == 1


class Agent(torch.nn.Module):
    """As in CleanRL's ppo.py."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = torch.nn.Linear(4, 2)

    def get_action_and_value(self, x: Any) -> Any:
        drawn = torch.distributions.Categorical(logits=self.actor(x))
        action = drawn.sample()
        return action, drawn.log_prob(action), drawn.entropy(), None


def paths() -> list[str]:
    """The snippets that lead from a model to a report."""
    (section,) = re.findall(r"^## From a model to a report\n(.*?)^## ", PAGE, re.S | re.M)
    return re.findall(r"^```py\n(.*?)^```", section, re.S | re.M)


def test_from_a_model_to_a_report_it_is_five_lines() -> None:
    assert [len([*filter(None, block.splitlines())]) for block in paths()] == [4, 5, 5]


@pytest.mark.slow
def test_from_a_model_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    stable_baselines3.PPO("MlpPolicy", "CartPole-v1", n_steps=8).save("model.zip")
    for block, folder in zip(paths(), ("sb3", "cleanrl"), strict=False):
        exec(block.replace(" 100,", " 2,"), {"agent": Agent()})
        assert Path(f"runs/{folder}/report.html").is_file()


class Lean:
    """Leans at random, and remembers: what plays behind a server, and the same agent here."""

    def reset(self, seed: int) -> None:
        self.generator, self.steps = np.random.default_rng(seed), 0

    def act(self, observation: Any) -> int:
        self.steps += 1
        return int(observation[2] + self.generator.normal(scale=0.1 / self.steps) > 0)


class Handler(BaseHTTPRequestHandler):
    agents: ClassVar[dict[str, Lean]] = {}  # by episode

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if sent["episode"] not in self.agents:
            self.agents[sent["episode"]] = Lean()
            self.agents[sent["episode"]].reset(sent["seed"])
        action = self.agents[sent["episode"]].act(np.float32(sent["observation"]))
        lost = self.path == "/lost"
        self.send_response(500 if lost else 200)
        self.end_headers()
        self.wfile.write(b"no model" if lost else json.dumps({"action": action}).encode())

    def log_message(self, *of: Any) -> None:
        """Print no line for each request."""


def test_the_agent_of_a_server_plays_the_episodes_that_the_servers_agent_plays_here() -> None:
    (code,) = re.findall(r"^```py\n(import http.client\n.*?)^```", PAGE, re.S | re.M)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            of_page, failing = {}, {}
            code = code.replace("8000", str(server.server_port))
            exec(code, of_page)
            exec(code.replace('"/"', '"/lost"'), failing)
            remote = of_page["Remote"]
            assert played(remote, 1) == played(remote, 3) == played(Lean, 2)
            with pytest.raises(ConnectionError, match="action of the server, got 500: b'no model'"):
                played(failing["Remote"], 1)
        finally:
            server.shutdown()
            thread.join()


def played(policy: Any, slots: int) -> str:
    return tdcollect.evaluate("CartPole-v1", policy, 4, num_envs=slots, progress=False).digest
