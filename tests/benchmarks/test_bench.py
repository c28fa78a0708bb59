"""benchmarks/bench.py: both collectors in turns, and a difference of their batches is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector as TorchRLCollector

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench as speed


def test_two_pipelines_are_timed_in_turns_and_their_batches_are_equal() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = speed.bench("CartPole-v1", num_envs=2, seconds=0.1)
    assert [row["differs"] for row in found["pipelines"]] == [None, None]
    for row in found["pipelines"]:
        ratio = row["ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert min(row["us_per_frame"].values()) > 0
    text = speed.bench_text(found)
    assert found["processor"] in text
    assert "make_env, 2 envs" in text
    assert text.count("same bits") == 2
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


class Shifted(TorchRLCollector):
    """A collector with one wrong number in its batches."""

    def iterator(self) -> Any:
        for batch in super().iterator():
            batch["next", "reward"][..., 1, :] += 1e-6
            yield batch


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "Collector", Shifted)
    monkeypatch.setattr(speed, "Effort", lambda: speed.QUICK)
    found = speed.bench("CartPole-v1", num_envs=2, seconds=0.1)
    assert all("reward" in row["differs"] for row in found["pipelines"])
    assert speed.bench_text(found).count("differ in") == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"env_id": "FrozenLake-v1"}, "expected an env with Box observations"),
        ({"num_envs": 0}, "expected num_envs and seconds to be positive, got 0"),
        ({"seconds": float("nan")}, "expected num_envs and seconds to be positive"),
    ],
)
def test_what_cannot_be_timed_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        speed.bench(**given)
