"""A fixture for both loops: on arrays, and TorchRL's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(params=["arrays", "parent"])
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the collector may run on arrays, False if it must run TorchRL's loop."""
    if request.param == "parent":
        monkeypatch.setattr("tdcollect.collect.arrays.RUN_ON_ARRAYS", False)
    return request.param == "arrays"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo writes a log file into the working directory."""
    monkeypatch.chdir(tmp_path)
