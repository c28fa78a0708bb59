"""Spaces: exactly TorchRL's specs, and values that survive the round trip."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import Bounded, Composite
from torchrl.envs import GymWrapper, SerialEnv, check_env_specs
from torchrl.modules import RandomPolicy

from tdcollect import make_env
from tdcollect.envs.spaces import DrawableBox, SpaceCodec

INTEGERS = [np.uint8, np.int8, np.int16, np.int32, np.int64]
FLOATS = [np.float16, np.float32, np.float64]
TORCHRL_DTYPES = [np.dtype(dtype) for dtype in [np.bool_, *INTEGERS, *FLOATS]]


class Sampler(gym.Env):
    """Emits random elements of its observation space."""

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Space[Any] | None = None
    ) -> None:
        self.observation_space = observation
        self.action_space = spaces.Discrete(2) if action is None else action

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


def box(dtype: Any, *shape: int) -> spaces.Box:
    return spaces.Box(0, 1, shape, dtype)


LIKE_TORCHRL = {
    **{f"Box {dtype}": box(dtype, 3) for dtype in TORCHRL_DTYPES},
    **{f"Box {dtype} scalar": box(dtype) for dtype in TORCHRL_DTYPES},
    "Box unbounded": spaces.Box(-np.inf, np.inf, (2, 3)),
    "Box half bounded": spaces.Box(0, np.inf, (2,)),
    "Box image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete even": spaces.MultiDiscrete([3, 3]),
    "MultiDiscrete uneven": spaces.MultiDiscrete([3, 5]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict(a=box(np.float32, 2), b=spaces.Dict(c=spaces.Discrete(3))),
    "Tuple of Box": spaces.Tuple([box(np.float32, 2), box(np.float32, 2)]),
    "Tuple of Discrete": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]),
    "Dict of Tuple": spaces.Dict(a=spaces.Tuple([box(np.float32), box(np.float32)])),
}
RENAMED = {
    "RGB image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "no RGB image": spaces.Box(0, 255, (4, 5, 4), np.uint8),
    "state": spaces.Dict(state=box(np.float32, 2), pixels=box(np.uint8, 4)),
    "state beside observation": spaces.Dict(
        state=box(np.float32, 2), observation=box(np.float32, 4)
    ),
    "nested state": spaces.Dict(a=spaces.Dict(state=box(np.float32, 2))),
}
like_torchrl = pytest.mark.parametrize("space", LIKE_TORCHRL.values(), ids=LIKE_TORCHRL)
encodings = pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])


@like_torchrl
@encodings
def test_specs_are_torchrls(space: spaces.Space[Any], categorical: bool) -> None:
    options = {"categorical_action_encoding": categorical}
    ours, theirs = make_env(Sampler(space), **options), GymWrapper(Sampler(space), **options)
    assert ours.observation_spec == theirs.observation_spec
    assert ours.full_reward_spec == theirs.full_reward_spec
    assert ours.full_done_spec == theirs.full_done_spec
    theirs = GymWrapper(Sampler(box(np.float32, 2), space), **options)
    ours = make_env(Sampler(box(np.float32, 2), space), **options)
    assert ours.full_action_spec == theirs.full_action_spec


@pytest.mark.parametrize("space", RENAMED.values(), ids=RENAMED)
def test_observations_that_torchrl_renames_are_renamed(space: spaces.Space[Any]) -> None:
    ours, theirs = make_env(Sampler(space)), GymWrapper(Sampler(space))
    assert ours.observation_spec == theirs.observation_spec
    assert set(ours.observation_spec.keys(True, True)) <= set(ours.reset().keys(True, True))


WIDER_THAN_TORCHRL = {
    "uint16": box(np.uint16, 2),
    "uint32": box(np.uint32),
    "uint64": box(np.uint64, 2),
    "Discrete start": spaces.Discrete(3, start=-1),
    "MultiDiscrete start": spaces.MultiDiscrete([2, 3], start=[5, -5]),
    "MultiDiscrete 2-d even": spaces.MultiDiscrete([[3, 3], [3, 3]]),
    "MultiDiscrete 2-d uneven": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "MultiBinary 2-d": spaces.MultiBinary((2, 3)),
    "Tuple unlike": spaces.Tuple([spaces.Discrete(3), box(np.float32, 2)]),
    "Tuple of Dict": spaces.Tuple([spaces.Dict(a=box(np.float32, 2)), spaces.Discrete(2)]),
}
EVERY = LIKE_TORCHRL | WIDER_THAN_TORCHRL


@pytest.mark.parametrize(
    ("space", "categorical"),
    [
        pytest.param(space, categorical, id=f"{name}-{categorical}")
        for name, space in EVERY.items()
        for categorical in [False, True][: 1 + ("Box" not in name)]
    ],
)
def test_an_env_of_the_space_passes_torchrls_check(
    space: spaces.Space[Any], categorical: bool
) -> None:
    # Nested, for a Dict of actions and the same Dict of observations share their names.
    observation = spaces.Dict(seen=space)
    one, many = (
        make_env(lambda: Sampler(observation, space), n, categorical_action_encoding=categorical)
        for n in (None, 2)
    )
    check_env_specs(many, seed=0)
    for name in ("observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec"):
        assert getattr(many, name) == getattr(one, name).expand(2)


def leaves() -> st.SearchStrategy[spaces.Space[Any]]:
    sizes = st.integers(1, 4)
    shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    dtypes = st.sampled_from([*TORCHRL_DTYPES, np.dtype(np.uint16), np.dtype(np.uint32)])
    bounded = st.builds(lambda dtype, shape: spaces.Box(0, 1, shape, dtype), dtypes, shapes)
    floats = st.sampled_from([np.float32, np.float64])
    unbounded = st.builds(
        lambda dtype, shape: spaces.Box(-np.inf, np.inf, shape, dtype), floats, shapes
    )
    discrete = st.builds(
        lambda n, start: spaces.Discrete(n, start=start), sizes, st.integers(-5, 5)
    )
    binary = shapes.filter(len).map(spaces.MultiBinary)
    return st.one_of(bounded, unbounded, discrete, multi_discrete(), binary)


@st.composite
def multi_discrete(draw: st.DrawFn) -> spaces.MultiDiscrete:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    count = int(np.prod(shape))
    sizes, starts = (
        np.array(draw(st.lists(numbers, min_size=count, max_size=count))).reshape(shape)
        for numbers in (st.integers(1, 4), st.integers(-3, 3))
    )
    return spaces.MultiDiscrete(sizes, start=starts)


def any_space() -> st.SearchStrategy[spaces.Space[Any]]:
    names = st.sampled_from(["a", "b", "observation", "pixels"])
    return st.recursive(
        leaves(),
        lambda parts: st.one_of(
            st.dictionaries(names, parts, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(parts, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=5,
    )


def same(a: Any, b: Any) -> bool:
    """Return whether two (nested) values of a space are equal; arrays also in dtype and shape."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.shape(a) == np.shape(b) and np.array_equal(a, b)


@given(any_space(), st.booleans(), st.integers(0, 2**31 - 1))
@settings(max_examples=120, deadline=None)
def test_values_survive_singly_and_as_a_batch_and_lie_in_the_spec(
    space: spaces.Space[Any], categorical: bool, seed: int
) -> None:
    codec = SpaceCodec(space, "observation", categorical=categorical)
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    batch = concatenate(space, values, create_empty_array(space, 3))
    singly, together = codec.empty(3), codec.empty(3)
    for slot, value in enumerate(values):
        codec.write_slot(value, singly, slot)
    codec.write(batch, together)
    assert all(np.array_equal(a, b) for a, b in zip(singly, together, strict=True))
    assert all(map(same, values, codec.read_slots(singly)))
    assert same(batch, codec.read(together))
    torch.manual_seed(seed)
    for leaf, entry in zip(codec.leaves, singly, strict=True):
        assert entry.dtype == leaf.dtype
        assert leaf.spec.is_in(torch.from_numpy(entry[0, ...]))
    drawn = [leaf.spec.rand((1,)).numpy() for leaf in codec.leaves]
    assert codec.read_slots(drawn)[0] in space


def test_a_value_read_is_a_copy() -> None:
    codec = SpaceCodec(box(np.float32, 2), "action")
    entries = [np.zeros((1, 2), np.float32)]
    codec.read(entries)[...] = 1
    assert not entries[0].any()


NO_ARRAYS = {
    "Sequence": spaces.Sequence(spaces.Discrete(2)),
    "Graph": spaces.Graph(box(np.float32), None),
    "OneOf": spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
}


def test_spaces_without_an_array_form_are_refused() -> None:
    for name, space in NO_ARRAYS.items():
        with pytest.raises(TypeError, match=f"the observation space is a {name} space"):
            make_env(Sampler(space))
        with pytest.raises(TypeError, match=f"the action space is a {name} space"):
            make_env(Sampler(box(np.float32), space))
    for space, told in [
        (
            spaces.Dict(a=spaces.Tuple([box(np.float32), NO_ARRAYS["Graph"]])),
            r"the observation space\['a'\]\[1\] is a Graph space",
        ),
        (spaces.Dict(), "the observation space.* is empty"),
        (spaces.Tuple([]), "the observation space.* is empty"),
        (spaces.Dict(a=spaces.Dict()), "the observation space.* is empty"),
        (spaces.Dict({0: spaces.Discrete(2)}), "names that are strings, got 0"),
    ]:
        with pytest.raises(TypeError, match=told):
            make_env(Sampler(space))


@pytest.mark.skipif(np.dtype(np.longdouble) == np.float64, reason="no long double here")
def test_a_dtype_that_torch_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="which torch has no type for"):
        make_env(Sampler(box(np.longdouble, 2)))


INF = np.inf
WIDE = {
    "one bound": spaces.Box(0, INF, (3,), np.float32),
    "upper bounds": spaces.Box(-INF, np.float64([0, -2, 5])),
    "mixed axes": spaces.Box(np.float32([-1, -INF, -INF, 3]), np.float32([1, INF, 2, INF])),
    "width overflows": spaces.Box(-3e38, 3e38, (2,), np.float32),
    "half precision": spaces.Box(np.float16([-6e4, 0]), np.float16([6e4, INF])),
}
DRAWS: dict[str, Callable[[Any], torch.Tensor]] = {
    "RandomPolicy": lambda make: RandomPolicy(make().action_spec)(TensorDict())["action"],
    "rollout": lambda make: make(2).rollout(40)["action"],
    "device": lambda make: make(device="cpu").full_action_spec.rand((9,))["action"],
    "SerialEnv": lambda make: SerialEnv(2, make).rollout(3)["action"],
}


@pytest.mark.parametrize("space", WIDE.values(), ids=WIDE)
def test_random_actions_of_boxes_without_two_bounds_are_drawn_as_gymnasium_draws_them(
    space: spaces.Box,
) -> None:
    make = partial(make_env, lambda: Sampler(box(np.float32, 2), space))
    for draw in DRAWS.values():
        assert all(map(space.contains, draw(make).reshape(-1, *space.shape).numpy()))
    torch.manual_seed(0)
    space.seed(0)
    ours = make().action_spec.rand((3000,)).double()
    theirs = torch.tensor(np.stack([space.sample() for _ in range(3000)])).double()
    for one, other in zip(ours.T, theirs.T, strict=True):  # Kolmogorov and Smirnov's distance
        places = torch.cat([one, other])
        ranks = [torch.searchsorted(x.sort()[0], places, right=True) for x in (one, other)]
        assert (ranks[0] - ranks[1]).abs().max() < 0.07 * 3000


def test_random_actions_of_sound_boxes_and_all_observations_keep_torchrls_specs() -> None:
    sound = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(0, INF, (2,), np.int64))
    env = make_env(lambda: Sampler(WIDE["one bound"], sound))
    leaves = [*env.full_action_spec.values(), env.observation_spec["observation"]]
    assert not any(type(leaf) is DrawableBox for leaf in leaves)


DERIVED: dict[str, Callable[[Any], Any]] = {
    "clone": lambda spec: spec.clone(),
    "copy": copy.deepcopy,
    "pickle": lambda spec: pickle.loads(pickle.dumps(spec)),
    "dtype": lambda spec: spec.to(torch.float64),
    "index": lambda spec: spec.expand(3, 4)[0],
    "unbind": lambda spec: spec.expand(3, 4).unbind(0)[1],
    "stack": lambda spec: torch.stack([spec, spec]),
    "reshape": lambda spec: (
        spec.unsqueeze(0).squeeze(0).expand(2, 4).reshape(8).unflatten(0, (4, 2))
    ),
    "composite": lambda spec: Composite(a=spec).expand(3).to("cpu")["a"],
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_such_a_spec_is_what_torchrl_expects(derive: Callable[[Any], Any]) -> None:
    """Whatever is made of it draws well, too, and equals what is made of TorchRL's own."""
    bounds = WIDE["mixed axes"]
    plain = Bounded(torch.tensor(bounds.low), torch.tensor(bounds.high), (4,))
    spec, theirs = derive(DrawableBox(*plain.space, plain.shape)), derive(plain)
    assert type(spec) is DrawableBox
    assert (spec == theirs, theirs == spec, spec != theirs) == (True, True, False)
    assert spec != Bounded(0, 1, theirs.shape, dtype=theirs.dtype)
    drawn = spec.rand((5,))
    assert drawn.isfinite().all()
    assert spec.is_in(drawn)
    assert torch.equal(spec.project(drawn - 9), theirs.project(drawn - 9))
    assert torch.equal(spec.zero(), theirs.zero())
    assert spec.to(torch.int64) == theirs.to(torch.int64)


def test_such_a_spec_is_stacked_with_others() -> None:
    specs = [DrawableBox(0, INF, (2,)), Bounded(0, 1, (2,))]
    for pair in (specs, specs[::-1]):
        assert all(one.rand().isfinite().all() for one in torch.stack(pair).unbind(0))
