"""Images in one pass: grey ones have the bits of TorchRL's two transforms, whatever comes in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl import envs as E

from tdcollect import Collector
from tdcollect.collect import transforms as images
from tdcollect.collect.lowering import joined, lower_transforms
from tdcollect.collect.step_dict import StepDict

from ..zoo.torchrl_envs import Lives
from . import policies
from .oracle import UPSTREAM, assert_same, batches, check_same

pytestmark = pytest.mark.filterwarnings(UPSTREAM)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    images.compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    yield
    images.compiled.cache_clear()


def game(*transforms: E.Transform) -> E.TransformedEnv:
    env = E.GymWrapper(Lives(), categorical_action_encoding=True)
    return E.TransformedEnv(env, E.Compose(*transforms))


def both(**options: Any) -> E.TransformedEnv:
    return game(E.ToTensorImage(**options), E.GrayScale())


def parts_of(env: E.TransformedEnv) -> list[Any]:
    return joined(lower_transforms(list(env.transform), env))


@pytest.mark.parametrize("from_int", [None, False])
def test_all_colours_have_the_bits_of_torchrl(from_int: bool | None) -> None:
    pytest.importorskip("numba")
    env = both(from_int=from_int)
    (part,) = parts_of(env)
    levels = torch.arange(256, dtype=torch.uint8)
    for red in levels:
        colours = torch.stack(torch.meshgrid(red, levels, levels, indexing="ij"), -1)
        found = StepDict(pixels=colours)
        part.step(StepDict(), found)
        expected = env.transform[1]._apply_transform(env.transform[0]._apply_transform(colours))
        assert torch.equal(found["pixels"], expected)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    colours=st.sampled_from([3, 3, 3, 1]),
    strided=st.booleans(),
    from_int=st.sampled_from([None, True, False]),
    kind=st.sampled_from([torch.uint8, torch.uint8, torch.float32, torch.int64]),
)
def test_images_of_any_shape_and_kind_become_what_torchrl_makes_of_them(
    sizes: list[int], colours: int, strided: bool, from_int: bool | None, kind: torch.dtype
) -> None:
    env = both(from_int=from_int)
    shape = (*sizes, colours)
    image = torch.randint(0, 256, shape[::-1] if strided else shape).to(kind)
    given = image.permute(*reversed(range(len(shape)))) if strided else image
    outcomes: list[Any] = []
    lowered = lower_transforms(list(env.transform), env)
    for parts in (joined(lowered), lowered):
        entries = StepDict(pixels=given)
        try:
            for part in parts:
                part.reset(entries, StepDict(), StepDict())
            outcomes.append(dict(entries))
        except TypeError as error:  # of one colour
            outcomes.append({"error": str(error)})
    assert_same(*outcomes)


@pytest.mark.parametrize("serial", [False, True])
def test_batches_are_torchrls_with_numba(serial: bool) -> None:
    pytest.importorskip("numba")
    check_batches(serial, "in one pass, compiled by numba")


def test_batches_are_torchrls_without_numba(without_numba: None) -> None:
    check_batches(True, "the extra 'images' (numba) joins it with ToTensorImage")


def check_batches(serial: bool, how: str) -> None:
    def make() -> Any:
        return E.SerialEnv(2, lambda: both()) if serial else both()

    def script(collector: Any) -> Iterator[Any]:
        if isinstance(collector, Collector):
            assert how in str(collector.explain())
            assert not collector.explain().obstacles
        yield from batches()(collector)

    check_same(make, policies.random_policy, script)


APART = {
    "float64": [E.ToTensorImage(dtype=torch.float64), E.GrayScale()],
    "unsqueezed": [E.ToTensorImage(unsqueeze=True), E.GrayScale()],
    "kept": [E.ToTensorImage(), E.GrayScale(in_keys=["pixels"], out_keys=["grey"])],
    "apart": [E.ToTensorImage(), E.StepCounter(), E.GrayScale()],
    "turned": [E.GrayScale(), E.ToTensorImage()],
}


@pytest.mark.parametrize("name", APART)
def test_other_transforms_run_one_by_one(name: str) -> None:
    pytest.importorskip("numba")
    labels = [part.label for part in parts_of(game(*APART[name]))]
    assert labels == [type(transform).__name__ for transform in APART[name]]
