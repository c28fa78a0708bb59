"""Numbers are stored exactly as the env returns them, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tensordict import TensorDict

from tdcollect import make_env
from tdcollect.envs.backends import SerialBackend
from tdcollect.envs.process.backend import ProcessBackend
from tdcollect.envs.slots import Backend, SlotError, Stepper
from tdcollect.envs.spaces import SpaceCodec

DTYPES = [np.bool_, np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64]


class Gives(gym.Env[Any, Any]):
    """Returns given values: the first observation at resets, the last at the second step."""

    def __init__(
        self,
        space: spaces.Space[Any],
        first: Any,
        last: Any = None,
        *,
        reward: Any = 1.0,
        flags: tuple[Any, Any] = (False, False),
        info: Any = (),
        action: spaces.Space[Any] | None = None,
    ):
        self.observation_space, self.first, self.last = space, first, last
        self.action_space = spaces.Discrete(2) if action is None else action
        self.reward, self.flags, self.info = reward, flags, dict(info)
        self.given: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.first, {}

    def step(self, action: Any) -> Any:
        self.given.append(action)
        self.steps += 1
        if self.steps < 2:
            return self.first, 1.0, False, False, {}
        last = self.first if self.last is None else self.last
        return last, self.reward, *self.flags, self.info


SPACE = spaces.Box(-1, 1, (2,))
plain = partial(Gives, SPACE, np.zeros(2, np.float32))


@pytest.fixture(params=["serial", "process"])
def backend(request: pytest.FixtureRequest) -> Iterator[Callable[..., Backend]]:
    """Makes a backend of slots."""
    made: list[Backend] = []

    def build(factories: Any) -> Backend:
        if request.param == "serial":
            made.append(SerialBackend(factories))
        else:
            made.append(ProcessBackend(factories, num_workers=1, start_method="fork"))
        return made[-1]

    yield build
    for each in made:
        each.close()


def two_steps(stepper: Stepper, action: Any = 0) -> Any:
    """Reset, and step twice; the last buffers."""
    all_buffers = stepper.allocate(3)
    leaf = stepper.backend.action.leaves[0]
    actions = [np.full((stepper.num_envs, *leaf.shape), action, leaf.dtype)]
    stepper.reset(None, all_buffers[0], seeds=range(20, 20 + stepper.num_envs))
    for buffers in all_buffers[1:]:
        stepper.step(actions, None, buffers)
    return all_buffers[-1]


def refused(backend: Backend, told: Sequence[str]) -> None:
    """Check that the error names each slot but the first, with what it is told of the value."""
    with pytest.raises(SlotError, match=r"the env failed in step\(\) of slot 1, ep") as info:
        two_steps(Stepper(backend))
    assert list(info.value.causes) == [*range(1, 1 + len(told))]
    for slot, text in enumerate(told, 1):
        where = rf"slot {slot}, episode 0, step 1, seed {20 + slot}: ValueError: {text}"
        assert re.search(where, str(info.value)), (where, str(info.value))


# --- observations ------------------------------------------------------------------------------

MISFITS: dict[str, tuple[spaces.Space[Any], Any, Any, str]] = {
    "uint8": (spaces.Box(0, 255, (2,), np.uint8), [1, 2], [300, 0], "int64 300 at [0]"),
    "uint64": (
        spaces.Box(0, 9, (2,), np.uint64),
        [1, 2],
        np.array([0, 2**63], np.uint64),
        "uint64 9223372036854775808 at [1]",
    ),
    "MultiBinary": (spaces.MultiBinary(2), [1, 0], [0, 256], "int64 256 at [1]"),
    "bits": (spaces.MultiBinary(2), [1, 0], np.int8([0, 2]), "int8 2 at [1]"),
    "scalar": (spaces.Box(0, 255, (), np.uint8), 1, 256, "int64 256 at []"),
    "fraction": (spaces.Box(0, 9, (), np.uint8), 2, 0.5, "float64"),
}


BYTES = spaces.Box(0, 255, (1,), np.uint8)
PAIR = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
COUNTED = "expected values in .*; correct the env or its space"
SHAPED = "expected an observation of shape"
OUTSIDE: list[tuple[spaces.Space[Any], Any, Any, str]] = [
    (spaces.Discrete(3), 2, -1, r"expected values in \[0, 3\), got -1; correct the env"),
    (spaces.Discrete(3, start=2), 2, 1, COUNTED),
    (spaces.Discrete(3), 0, np.zeros(7, int), SHAPED),
    (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), np.array([1, 3]), COUNTED),
    (spaces.MultiDiscrete([2, 3]), np.zeros(2, int), np.zeros(7, int), SHAPED),
    (spaces.MultiDiscrete([3, 3]), np.zeros(2, int), np.zeros(7, int), SHAPED),
    (spaces.Tuple([spaces.Discrete(2)] * 2), (0, 1), (0,), "expected a tuple of 2 parts"),
    (spaces.Tuple([spaces.Discrete(2), SPACE]), (0, np.zeros(2)), (0,), "expected a tuple of 2 "),
    (spaces.Tuple([BYTES] * 2), ([0], [7]), ([0], [300]), "expected .* dtype uint8, .* int64 300"),
    (PAIR, {"a": 0, "b": 1}, {"a": 0}, r"expected a dict with the entries \['a', 'b'\], got"),
    (PAIR, {"a": 0, "b": 1}, 3, r"expected a dict with the entries \['a', 'b'\], got"),
]


def test_a_value_that_a_space_does_not_hold_is_refused(backend: Any) -> None:
    """Each slot has one such value, in the entry of one space."""
    cases = {str(i): case for i, case in enumerate(OUTSIDE)}
    for name, (part, first, last, text) in MISFITS.items():
        told = (
            rf"expected an observation of dtype {part.dtype}, as the env's space says, got "
            rf"{re.escape(text)}, which does not go into {re.escape(str(part))} without loss"
        )
        cases[name] = part, np.asarray(first), np.asarray(last), told
    space = spaces.Dict({name: part for name, (part, *_) in cases.items()})
    fine = {name: first for name, (_, first, *_) in cases.items()}
    odd = [{**fine, name: last} for name, (_, _, last, _) in cases.items()]
    slots = [partial(Gives, space, fine, last) for last in (None, *odd)]
    refused(backend(slots), [told for *_, told in cases.values()])


@pytest.mark.parametrize(
    ("space", "wrap"),
    [
        (spaces.Box(0, 255, (2, 4096), np.uint8), lambda value: np.full((2, 4096), value)),
        (BYTES, lambda value: np.array([value])),
    ],
    ids=["large", "small"],
)
def test_wherever_it_stands_in_the_space_and_at_a_reset_too(
    backend: Any, space: Any, wrap: Any
) -> None:
    told = "expected an observation of dtype uint8, .* got int64 300"
    slots = [partial(Gives, space, wrap(7)), partial(Gives, space, wrap(7), wrap(300))]
    refused(backend(slots), [told])
    slots[1] = partial(Gives, space, wrap(300))
    with pytest.raises(SlotError, match=rf"reset\(\) of slot 1, .*, seed 21: .*{told}"):
        two_steps(Stepper(backend(slots)))


def test_what_is_no_element_of_the_space_is_refused(backend: Any) -> None:
    first = np.zeros(2, np.float32)
    cases: list[tuple[Any, str]] = [
        (
            np.zeros(1),
            r"expected an observation of shape \(2,\), as the env's space says, got \(1,\)",
        ),
        (1.0, r"expected an observation of shape \(2,\), as the env's space says, got \(\)"),
        (np.array(["a", "b"]), "expected an observation of dtype float32, .* says, got <U1"),
        ([[0.0], [0.0, 1.0]], ".*inhomogeneous shape"),
    ]
    odd = [partial(Gives, SPACE, first, last) for last, _ in cases]
    refused(backend([plain, *odd]), [told for _, told in cases])


def test_numbers_of_another_dtype_that_fit_are_taken(backend: Any) -> None:
    space = spaces.Box(0, 255, (2,), np.uint8)
    made = backend([partial(Gives, space, np.array([n, 255]), info={"x": 200}) for n in (0, 7)])
    made.read_info({"x": np.uint8(1)})
    buffers = two_steps(Stepper(made))
    assert buffers.raw.observation[0].tolist() == [[0, 255], [7, 255]]
    assert buffers.raw.info[0].tolist() == [200, 200]


integers = st.sampled_from([*DTYPES, np.uint64]).flatmap(
    lambda dtype: arrays(dtype, st.sampled_from([(), (3,), (2, 2)]))
)


@given(integers, st.sampled_from([*DTYPES, np.uint64]))
@settings(max_examples=150, deadline=None)
def test_what_is_stored_is_what_the_env_gave_or_it_is_refused(value: Any, dtype: Any) -> None:
    space = spaces.Box(0, 1, value.shape, dtype)
    codec = SpaceCodec(space, "observation")
    (entry,) = entries = codec.empty(1)
    fits = np.array_equal(value.astype(dtype), value) and (value <= np.iinfo(np.int64).max).all()
    if fits:
        codec.write_slot(value, entries, 0)
        assert np.array_equal(entry.reshape(value.shape), value)
    else:
        with pytest.raises(ValueError, match="without loss"):
            codec.write_slot(value, entries, 0)


def test_float64_goes_into_float32_as_torchrl_has_it() -> None:
    env = make_env(lambda: Gives(SPACE, np.array([0.1, 1e300])), 2)
    with np.errstate(over="ignore"):
        assert env.reset()["observation"].tolist() == [[float(np.float32(0.1)), float("inf")]] * 2


def test_numbers_that_are_none_pass_unless_checked() -> None:
    none = partial(Gives, SPACE, np.array([0, np.nan], np.float32), reward=np.nan)
    batch = make_env(none, 2).rollout(3)
    assert batch["next", "reward"][:, 1].isnan().all()
    assert ("next", "env_error") not in batch.keys(True)
    with pytest.raises(SlotError, match=r"slot 0, episode 0: .* nan at \[1\] of 'observation'"):
        make_env(none, 2, check_finite=True).reset()


class Vector(VectorEnv):
    """A vector env of two slots that returns given values at each step."""

    num_envs = 2
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, space: spaces.Space[Any], first: Any, *rest: Any):
        self.single_observation_space = space
        self.single_action_space = spaces.Discrete(2)
        self.first, self.rest = first, rest

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.first, {}

    def step(self, actions: Any) -> Any:
        return *self.rest, {}


ZEROS, NO = np.zeros(2), np.zeros(2, bool)
BYTE = spaces.Box(0, 255, (), np.uint8)
IN_VECTORS = {
    "observation": ((BYTE, NO, np.array([0, 300]), ZEROS, NO, NO), "got int64 300"),
    "reward": ((BYTE, NO, NO, np.array([1.0, None]), NO, NO), "got NoneType None"),
    "text": ((BYTE, NO, NO, np.array(["1", "b"]), NO, NO), "expected a reward that is one real"),
    "terminated": ((BYTE, NO, NO, ZEROS, np.array([0, 2]), NO), "expected terminated to be one"),
    "truncated": ((BYTE, NO, NO, ZEROS, NO, [False, None]), "expected truncated to be one bool"),
}


@pytest.mark.parametrize(("parts", "told"), IN_VECTORS.values(), ids=IN_VECTORS)
def test_a_vector_env_is_refused_by_slot(parts: Any, told: str) -> None:
    env = make_env(Vector(*parts))
    env.reset()
    with pytest.raises(SlotError, match=f"slot 1, episode 0, step 0: ValueError: .*{told}"):
        env.rand_step()


def test_a_first_observation_of_a_vector_env_is_refused_by_slot() -> None:
    with pytest.raises(SlotError, match=r"reset\(\) of slot 1, .* got int64 300"):
        make_env(Vector(BYTE, np.array([0, 300]))).reset()


# --- infos, rewards and flags ------------------------------------------------------------------


def test_an_info_that_does_not_fit_is_refused(backend: Any) -> None:
    cases: list[tuple[Any, Any, str]] = [
        (np.int8(1), 300, "int8 .* got int64 300"),
        (False, 2, "bool .* got int64 2"),
        (np.uint8(1), -1, "uint8 .* got int64 -1"),
        (1, 0.5, "int64 .* got float64 0.5"),
        (0.5, 1j, "float64 .* got complex128 1j"),
        (0.5, None, "float64 .* got object None"),
        (0.5, "1.5", "float64 .* got <U3 1.5"),
        (0, np.zeros(3), r"int64 of shape \(\)"),
    ]
    odd = [partial(plain, info={f"x{i}": later}) for i, (_, later, _) in enumerate(cases)]
    made = backend([plain, *odd])
    made.read_info({f"x{i}": example for i, (example, _, _) in enumerate(cases)})
    refused(made, [f"expected info 'x{i}' to be {told}" for i, (_, _, told) in enumerate(cases)])


NO_REWARDS = [
    None,
    "1.5",
    1j,
    np.ones(2),
    np.zeros(0),
    np.array(None),
    np.datetime64("2026-01-01"),
    np.timedelta64(3, "ns"),
    {"agent": 1.0},
]
REWARDS = [
    (True, 1.0),
    (np.bool_(True), 1.0),
    (3, 3.0),
    (np.int8(-3), -3.0),
    (2**70, float(2**70)),
    (2**54 + 2**30 + 1, float(2**54)),  # by way of float64, as a float is
    (Fraction(1, 2), 0.5),
    (np.float16(0.5), 0.5),
    (np.array([[2.0]]), 2.0),
    (np.array(1.5, object), 1.5),
    (torch.tensor(2.5), 2.5),
    ([4.0], 4.0),
]
NO_FLAGS = [
    *(("terminated", flag) for flag in (2, "no", None)),
    *(("truncated", flag) for flag in (np.nan, -1, np.array([True, False]))),
]


def test_a_reward_or_a_flag_of_another_kind_is_refused(backend: Any) -> None:
    odd = [partial(plain, reward=reward) for reward in NO_REWARDS]
    told = [
        f"expected a reward that is one real number, got {type(r).__name__} " for r in NO_REWARDS
    ]
    for name, flag in NO_FLAGS:
        odd.append(partial(plain, flags=(flag, False) if name == "terminated" else (False, flag)))
        told.append(f"expected {name} to be one bool, got {type(flag).__name__} ")
    refused(backend([plain, *odd]), told)


def test_one_real_number_is_a_reward(backend: Any) -> None:
    alike = [[partial(plain, reward=reward)] * 2 for reward, _ in REWARDS]
    nan = partial(plain, reward=np.array([np.nan], object))
    buffers = two_steps(Stepper(backend([plain, *(slots[0] for slots in alike), nan])))
    assert buffers.reward.dtype == np.float32
    assert buffers.reward[:-1].tolist() == [1.0, *(expected for _, expected in REWARDS)]
    assert np.isnan(buffers.reward[-1])
    for slots, (_, expected) in zip(alike, REWARDS, strict=True):
        assert two_steps(Stepper(SerialBackend(slots))).reward.tolist() == [expected] * 2


def test_what_says_true_or_false_is_a_flag(backend: Any) -> None:
    flags = [True, np.bool_(True), 1, 1.0, np.array([True]), np.uint8(1)]
    no = [np.array([False]) if isinstance(flag, np.ndarray) else type(flag)(0) for flag in flags]
    odd = [partial(plain, flags=pair) for pair in zip(flags, no, strict=True)]
    buffers = two_steps(Stepper(backend([plain, *odd])))
    assert buffers.raw.terminated.tolist() == [False] + [True] * len(flags)
    assert not buffers.raw.truncated.any()
    for slot in odd:
        assert two_steps(Stepper(SerialBackend([slot] * 2))).raw.terminated.all()


# --- actions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "action", "told"),
    [
        (spaces.Box(0, 9, (1,), np.uint16), torch.tensor([[1], [-1]]), "uint16, .* int64 -1 at"),
        (spaces.Box(0, 9, (1,), np.uint32), torch.tensor([[1], [2**32]]), "got int64 4294967296"),
        (spaces.Discrete(3), torch.tensor([1.0, 1.5]), "int64, .* float.* 1.5 at"),
        (spaces.MultiDiscrete([3], dtype=np.int8), torch.tensor([[1], [300]]), "int64 300 at"),
        (spaces.Discrete(3), torch.tensor([1.0, torch.nan]), "got float.* nan"),
    ],
    ids=str,
)
def test_an_action_that_its_space_does_not_hold_is_refused(
    space: spaces.Space[Any], action: torch.Tensor, told: str
) -> None:
    env = make_env(lambda: plain(action=space), 2, categorical_action_encoding=True)
    env.reset()
    with pytest.raises(ValueError, match=f"expected an action of dtype .*{told}"):
        env.step(TensorDict({"action": action}, [2]))


def test_an_action_of_another_dtype_that_fits_is_taken() -> None:
    for space in (spaces.Discrete(3), spaces.Discrete(3, start=4), spaces.MultiDiscrete([3])):
        made = [plain(action=space), plain(action=space)]
        env = make_env(iter(made).__next__, 2, categorical_action_encoding=True)
        env.reset()
        shape = env.action_spec.shape
        for dtype in (torch.float32, torch.int32, torch.uint8):
            env.step(TensorDict({"action": torch.ones(shape, dtype=dtype)}, [2]))
        assert all(action in space for env in made for action in env.given)
        assert {action.dtype for env in made for action in env.given} == {space.dtype}
