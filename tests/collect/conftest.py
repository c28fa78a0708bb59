"""Both ways to run the loop, for every test that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(params=["arrays", "parent"])
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the collector may run its loop on arrays: once as it decides, once never."""
    if request.param == "parent":
        monkeypatch.setattr("tdcollect.collect.path.RUN_ON_ARRAYS", False)
    return request.param == "arrays"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo writes a log file into the working directory."""
    monkeypatch.chdir(tmp_path)
