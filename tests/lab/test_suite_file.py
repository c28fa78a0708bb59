"""The file of a suite: what it says, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tdcollect.lab import Policy, Score, Suite, Task

from .parts import HERE, changed, small, tables

FILE = """
[suite]
name = "small"
episodes = 20

[defaults]
num_envs = 4
exploration = "random"

[[tasks]]
name = "walk"
env = "envs.py:Walk"
env_kwargs = { longest = 7 }
wrappers = ["envs.py:Scaled", { call = "envs.py:Scaled", kwargs = { factor = 2.0 } }]
transforms = ["torchrl.envs:RewardSum"]
group = "long"
max_episode_steps = 50
score = { low = "random", high = 20, source = "made up" }

[[tasks]]
name = "other"
env = "CartPole-v1"

[[policies]]
name = "net"
factory = "policies.py:{task}_net"
checkpoints = "runs/{policy}/{task}/{run}.pt"
env_state = "runs/{policy}/{task}/{run}.norm.pt"
transforms = [{ call = "torchrl.envs:VecNormV2", kwargs = { in_keys = ["observation"] } }]
runs = [0, 7]
exploration = "deterministic"

[report]
metrics = ["median", "iqm"]
groups = false
confidence = 0.9
drawn_runs = "n-1"
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(FILE)
    suite = Suite.read(file)
    assert Suite.of(tomllib.loads(FILE), tmp_path) == suite
    assert (suite.name, suite.version, suite.episodes, suite.seed) == ("small", 1, 20, 0)
    assert (suite.metrics, suite.groups, suite.confidence) == (("median", "iqm"), False, 0.9)
    assert suite.drawn_runs == "n-1"
    defaults = {"num_envs": 4, "exploration": "random"}
    assert suite.tasks[0] == Task(
        "walk",
        "envs.py:Walk",
        {"longest": 7},
        ("envs.py:Scaled", {"call": "envs.py:Scaled", "kwargs": {"factor": 2.0}}),
        ("torchrl.envs:RewardSum",),
        "long",
        Score("random", 20.0, "made up"),
        {},
        {**defaults, "max_episode_steps": 50},
    )
    assert suite.tasks[1] == Task("other", "CartPole-v1", settings=defaults)
    assert suite.policies[1] == Policy("random", "random")  # which the score asks for
    cell = suite.cells()[1]
    assert cell.name == "walk/net/7"
    assert cell.path == Path("evaluations/walk/net/7")
    assert cell.files["env_state"] == tmp_path / "runs/net/walk/7.norm.pt"
    request = cell.request()
    assert request.policy == "policies.py:walk_net"
    assert request.checkpoint == "runs/net/walk/7.pt"
    assert [*request.transforms] == ["torchrl.envs:RewardSum", *suite.policies[0].transforms]
    assert request.directory == str(tmp_path)
    settings = cell.evaluation_settings()
    assert (settings.num_envs, settings.max_episode_steps) == (4, 50)
    assert settings.exploration_type.name == "DETERMINISTIC"
    assert suite.cells()[2].evaluation_settings().exploration_type.name == "RANDOM"


def test_to_read_a_suite_takes_no_torch(tmp_path: Path) -> None:
    (file := tmp_path / "suite.toml").write_text(FILE)
    code = "import sys, tdcollect; tdcollect.Suite.read(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], check=True, text=True, capture_output=True
    )
    assert done.stdout == "False\n"


REFUSED = [
    ("suit", {}, "expected in a suite only suite, defaults, .*; did you mean suite"),
    ("suite.episode", 5, "only name, version, .*, got 'episode'; did you mean episodes"),
    ("suite", 5, "expected .suite. to be a table, got 5"),
    ("report", [1], "expected .report. to be a table"),
    ("suite.name", 5, "expected a text as name of .suite., got 5"),
    ("suite.presets", "minigrid", "expected presets to be a list, of .suite., as"),
    ("suite.presets", [["minigrid"]], "a text as an entry of presets"),
    ("suite.episodes", 0, "episodes in .suite. to be a positive int, got 0"),
    ("suite.seed", -1, "seed in .suite. to be an int and not negative"),
    ("tasks", [], "at least one task and one policy, got 0 tasks and 2"),
    ("policies", [], "at least one task and one policy, got 2 tasks and 0"),
    ("tasks", {"name": "walk"}, "expected tasks to be a list, as ..tasks.., got"),
    ("tasks.0", "CartPole-v1", "to be a table, got 'CartPole-v1'"),
    ("tasks.0.name", None, "expected a text as name of ..tasks.. without a name, got none"),
    ("tasks.0.name", "a/b", "letters, digits, .*, as it names a folder, got 'a/b'"),
    ("tasks.0.name", "..", "as it names a folder"),
    ("tasks.1.name", "Walk", "tasks with names of their own, got walk and Walk"),
    ("tasks.0.env", 3, "expected a text as env of .*'walk', got 3"),
    ("tasks.0.env_kwargs", {"day": date(2020, 1, 1)}, "values of JSON, .* a date as a text"),
    ("tasks.0.nums_env", 3, "got 'nums_env'; did you mean num_envs"),
    ("tasks.0.name", "n" * 101, "100 at most, as it names a folder"),
    ("tasks.0.wrappers", ["Noisy"], "wrappers of ..tasks.. 'walk': expected module:name or path"),
    ("tasks.0.wrappers", "a:b", "to be a list of module:callable, got 'a:b'"),
    ("tasks.0.wrappers", [{"cal": "a:b"}], "got 'cal'; did you mean call"),
    ("tasks.0.score", {}, "score of ..tasks.. 'walk' to have a range, with low a number or .*None"),
    ("tasks.0.score", {"low": 0}, "to have a range, with high a number, got None"),
    ("tasks.0.score", {"low": 0, "high": "random"}, "with high a number, got 'random'"),
    ("tasks.0.score", {"low": 1, "high": 1}, "to have a range, got 1.0 as both ends"),
    ("tasks.0.score", {"low": 0, "high": 10**400}, "with high a number, got 1000"),
    ("tasks.0.score", "human", "to be 'human-normalized', or a range such as"),
    ("policies.1.runs", None, "the runs that {run} in 'runs/.*a pattern cannot know"),
    ("policies.1.runs", [], "to be a list such as"),
    ("policies.1.runs", [0, 0], "with names of their own, got 0 and 0"),
    ("policies.1.runs", [10**10], "at most 1000000000, got 10000000000"),
    ("policies.1.factory", "net", "the factory of .* to be module:callable, .* got 'net'"),
    ("policies.0.checkpoints", "{task}.pt", "expected no checkpoint with random actions"),
    ("policies.0.factory", "sb3", "'random': expected a checkpoint with the policy 'sb3'"),
    ("policies.0.vecnormalize", "norm.pkl", "vecnormalize with the policy 'sb3' alone, got it"),
    ("policies.1.runs", [-1], "numbers that are not negative, .* got -1"),
    ("policies.1.checkpoints", "net.pt", "expected {run} in the checkpoints of .* 2 runs"),
    ("policies.1.checkpoints", "{seed}.pt", "expected {task}, {policy} and {run} in checkpoints"),
    ("policies.1.num_envs", 3, "got 'num_envs'"),
    ("policies.1.name", "Random", "policies with names of their own, got random and Random"),
    ("defaults.wrappers", [], "expected in .defaults. only"),
    ("report.metrics", ["best"], "expected metrics in .report. of iqm, mean, median"),
    ("report.groups", 1, "groups in .report. to be a bool, got 1"),
    ("report.metrics", "iqm", "expected metrics in .report. of iqm, mean, median"),
    ("report.confidence", 95, "confidence in .report. to be between 0 and 1, got 95"),
    ("report.drawn_runs", "n-2", "to be 'n' or 'n-1', got 'n-2'"),
]


@pytest.mark.parametrize(("where", "value", "match"), REFUSED)
def test_tables_that_are_no_suite_are_refused(where: str, value: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        Suite.of(changed(where, value))


def test_files_that_are_no_suite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the TOML file of a suite"):
        Suite.read(tmp_path)
    file = tmp_path / "suite.toml"
    for text, match in [
        ("[suite\n", r"suite\.toml to be TOML: "),
        ("deep = " + "[" * 5000 + "]" * 5000, r"suite\.toml to be TOML: maximum recursion"),
        (FILE.replace("num_envs", "nums_env"), r"suite\.toml: expected in \[defaults\]"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            Suite.read(file)


def test_a_policy_called_random_that_is_none_is_refused_where_a_score_needs_one() -> None:
    found = tables()
    found["policies"] = [{"name": "random", "factory": f"{HERE}:net"}]
    with pytest.raises(ValueError, match="names of their own, got random and random"):
        Suite.of(found)


def test_nothing_that_is_named_is_imported(tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").write_text("raise SystemExit")
    suite = small(tmp_path, tasks=[{"name": "t", "env": "never_imported.py:Env"}])
    assert len(suite.cells()) == 3
    assert "never_imported" not in sys.modules
