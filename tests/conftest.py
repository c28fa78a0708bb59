"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from tqdm import tqdm

from tdcollect.processes.child import Spawned

from .forkserver import forkserver, quick_begin, quick_reap, starting
from .simulated_cuda import CUDA, simulated_cuda

# A busy machine takes longer than hypothesis allows an example by default.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Its thread wakes now and then, and an evaluation looks whether other threads do.
tqdm.monitor_interval = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put Ray's tests last: its threads stay in the process, and evaluations see them."""
    items.sort(key=lambda item: item.path.name.startswith("test_ray"))
    for item in items:
        if "cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU: a real one, or a simulated one for tests that do not need real kernels."""
    if torch.cuda.is_available():
        yield CUDA
        return
    if request.node.get_closest_marker("kernels"):
        pytest.skip("no CUDA device on this machine")
    with simulated_cuda():
        yield CUDA


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray that runs for these tests, and that this process is connected to."""
    ray: Any = pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # other processes have not its token
        patch.delenv("RAY_ADDRESS", raising=False)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=1,  # as far as Ray knows
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=80 * 2**20,  # of a container with little shared memory
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


def pytest_collection_finish() -> None:
    """Keep all that is imported and collected out of what the garbage collector walks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Let TorchRL start its worker processes from the fork server: spawned, each imports torch."""
    with starting(forkserver().get_start_method()):
        yield


@pytest.fixture(scope="module")
def quick_children() -> Iterator[None]:
    """Start workers and evaluators from the fork server: a fresh interpreter takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spawned, "_begin", quick_begin)
        patch.setattr(Spawned, "_reap", quick_reap)
        yield
