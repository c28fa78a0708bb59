"""Collection goes on in another process where it was in the first, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .oracle import UPSTREAM, assert_same
from .resume_programs import (
    CASES,
    first_half,
)

pytestmark = [pytest.mark.filterwarnings(UPSTREAM), pytest.mark.behaviour(29)]

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What each collection gave without an interruption, and in a process that came after it."""
    folder = tmp_path_factory.mktemp("halves")
    expected = {case: first_half(case, folder) for case in CASES}
    path = os.pathsep.join([str(TESTS), *sys.path])
    program = [sys.executable, "-m", "collect.resume_programs", str(folder)]
    done = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=folder
    )
    assert not done.returncode, done.stderr[-3000:]
    return {case: (expected[case], torch.load(folder / f"{case}.after.pt")) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_another_process_goes_on_with_the_same_batches(
    halves: dict[str, tuple[Any, Any]], case: str
) -> None:
    expected, found = halves[case]
    assert found["lost"] == []
    assert_same(found["batches"], expected["batches"])


@pytest.mark.parametrize("case", CASES)
def test_another_process_goes_on_with_counters_statistics_and_random_states(
    halves: dict[str, tuple[Any, Any]], case: str
) -> None:
    expected, found = halves[case]
    assert_same(found["said"], expected["said"])


@pytest.mark.parametrize("case", CASES)
def test_a_replay_buffer_beside_gives_the_same_samples(
    halves: dict[str, tuple[Any, Any]], case: str
) -> None:
    expected, found = halves[case]
    assert_same(found["samples"], expected["samples"])
