"""docs/protocol.md: its schemas and vectors are those of tdcollect, as its example follows them."""

from __future__ import annotations

import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

import tdcollect
from tdcollect.cli import main
from tdcollect.evaluation import Episode
from tdcollect.evaluation.episodes.data import disagreements, sketch
from tdcollect.evaluation.ledger import ledger_digest
from tdcollect.evaluation.step_files import member_name
from tdcollect.seeding import global_seeds

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "docs/protocol/vectors.json").read_text())
OBSERVED = {"episode": "observation", "episode_of_words": "mission"}
RECORDS = [*map(Episode.from_json, VECTORS["ledger"]["lines"])]
EXAMPLE = ROOT / "examples" / "other_producer.py"


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the example wrote, where importing torch or its kin fails."""
    folder = tmp_path_factory.mktemp("produced")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'torchrl', 'tensordict', "
        "'tdcollect'])); import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(EXAMPLE), str(folder / "other"), "--episodes=6"]
    run(command, check=True)
    return folder / "other"


def check(name: str, value: Any) -> None:
    jsonschema.validate(value, json.loads((ROOT / f"docs/protocol/{name}.schema.json").read_text()))


def check_files(path: Path) -> None:
    for name in ("manifest", "shard", "results"):
        if (file := path / f"{name}.json").exists():
            check(name, json.loads(file.read_text()))
    for line in (path / "episodes.jsonl").read_text().splitlines():
        check("record", json.loads(line))


def test_seeds_are_those_of_the_vectors() -> None:
    for vector in VECTORS["seeds"]:
        root, episode = vector["root"], vector["episode"]
        assert tdcollect.env_seed(root, episode) == vector["env_seed"]
        assert tdcollect.policy_seed(root, episode) == vector["policy_seed"]
        assert list(global_seeds(vector["env_seed"])) == vector["global_seeds"]


@pytest.mark.parametrize(("episode", "observed"), OBSERVED.items())
def test_digests_are_those_of_the_vectors(episode: str, observed: str) -> None:
    """By what is read of kept data, and by the example, which knows nothing of it."""
    data, told = {}, []
    for entry in VECTORS[episode]["entries"]:
        is_text = entry["dtype"] == "str"
        dtype = object if is_text else entry["dtype"]
        data[entry["name"]] = rows = np.array(entry["rows"], dtype)
        if (last := entry["after_the_last_step"]) is not None:
            data[f"next/{entry['name']}"] = np.array([*rows[1:], last], dtype)
            last = last if is_text else np.array(last, dtype)
        told.append((entry["name"], entry["rows"] if is_text else rows, last))
    entries = {"observation": [observed], "action": ["action"]}
    digest = VECTORS[episode]["digest"]
    total = math.fsum(data["next/reward"].ravel().tolist())
    record = replace(RECORDS[0], episode_return=total, digest=digest)
    assert disagreements(record, data, entries) == []
    assert runpy.run_path(str(EXAMPLE))["digest"](told) == digest
    if episode == "episode_of_words":
        data["mission"][1] += " "
        assert "digest" in "; ".join(disagreements(record, data, entries))


def test_records_are_those_of_the_vectors() -> None:
    assert [record.to_json() for record in RECORDS] == VECTORS["ledger"]["lines"]
    assert ledger_digest(RECORDS) == VECTORS["ledger"]["digest"]
    for line in VECTORS["ledger"]["lines"]:
        check("record", json.loads(line))


def test_sketches_are_those_of_the_vectors() -> None:
    vector = VECTORS["sketches"]
    for kind in (np.float64, np.float32):
        found = sketch(np.array([vector["rows"]], kind))
        assert found.tolist() == [vector["sketches"]]
    found = sketch(np.array([vector["texts"]], object))
    assert found.tolist() == [vector["sketches_of_texts"]]


def test_names_are_those_of_the_vectors() -> None:
    for names, member in VECTORS["names_in_files"]:
        assert member_name(tuple(names)) == member


def test_the_example_gives_our_episodes_and_passes(
    produced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_files(produced)
    assert main(["verify", str(produced)]) == 0
    assert main(["audit", str(produced), "--all"]) == 0
    assert "6 episodes of 6 ran again by their actions" in capsys.readouterr().out
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0])
    policy = TensorDictModule(
        lambda seen: torch.nn.functional.one_hot((seen @ weights > 0).long(), 2),
        in_keys=["observation"],
        out_keys=["action"],
    )
    ours = tdcollect.evaluate("CartPole-v1", policy, 6, output_dir=tmp_path / "ours")
    merged = tdcollect.merge([produced], tmp_path / "merged")
    assert merged.digest == ours.digest
    assert merged.manifest["env"] == ours.manifest["env"]
    assert tdcollect.verify(tmp_path / "merged").passed
    for path in (tmp_path / "ours", tmp_path / "merged"):
        check_files(path)


def test_replay_refuses_what_another_program_ran(produced: Path) -> None:
    with pytest.raises(ValueError, match="other, which another program wrote: that program"):
        tdcollect.EvaluationResult.load(produced, "CartPole-v1")
    assert main(["replay", str(produced), "0", "--env", "CartPole-v1", "--policy", "random"]) == 1


def test_verify_finds_what_is_wrong_in_it(produced: Path) -> None:
    file = produced / "episodes.jsonl"
    sound = file.read_text()
    file.write_text(sound.replace('"restarts": 0', '"restarts": 1', 1))
    assert "was altered" in str(tdcollect.verify(produced))
    file.write_text(sound)
