"""The private names of Ray, held against its own code. tests/evaluation/test_ray.py runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tdcollect._upstream.ray import bounded, started_here

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tdcollect[ray]'")


def test_streams_can_be_bounded() -> None:
    @ray.method(**bounded(3))
    def stream() -> Iterator[int]:
        yield 1

    assert stream.__ray_generator_backpressure_num_objects__ == 3
    assert stream.__ray_num_returns__ == "streaming"


def test_a_process_without_ray_has_started_none() -> None:
    if not ray.is_initialized():
        assert not started_here()
