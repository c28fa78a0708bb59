"""Actions outside the env's action spec are refused, and no others."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.nn import functional
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiOneHot, OneHot, Unbounded
from torchrl.envs import EnvBase, TicTacToeEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.modules import RandomPolicy

from tdcollect import make_env
from tdcollect.collect.policy import RandomActions
from tdcollect.envs.spaces import DrawableBox
from tdcollect.evaluation.episodes.inference import DrawByRow, stream

from ..zoo import masked
from .envs import Walk
from .ledger import digest, episodes_of, records
from .torchrl_envs import Masked


def writing(make: Any, entry: str = "action") -> TensorDictModule:
    """A policy that writes a function of the ``[B, 3]`` observations."""
    return TensorDictModule(make, ["observation"], [entry])


def env(space: spaces.Space[Any], categorical: bool = False, slots: int | None = 2) -> EnvBase:
    return make_env(lambda: Walk(space), slots, categorical_action_encoding=categorical)


DISCRETE, CHOICES = spaces.Discrete(2), spaces.MultiDiscrete([2, 3])
BITS, BOX = spaces.MultiBinary(3), spaces.Box(-1, 1, (2,))


def rows(*row: Any, dtype: Any = None) -> Any:
    """A policy that repeats one action."""
    return lambda x: torch.tensor(row, dtype=dtype).expand(len(x), *np.shape(row))


WRONG: dict[str, tuple[spaces.Space[Any], bool, Any, str]] = {
    "logits": (
        DISCRETE,
        False,
        lambda x: x[:, :2],
        r"expected one-hot rows of shape \(2,\) and dtype int64 in the policy's entry 'action', as "
        r"the env's action spec says, got float32 of shape \(2,\): .*; draw from the logits with "
        "ProbabilisticActor",
    ),
    "a nearly one-hot row": (DISCRETE, False, rows(0.0, 1 - 1e-7), r"got float32 .*\[0.0, 0.99"),
    "none hot": (DISCRETE, False, rows(0, 0), r"expected one-hot rows.*\[0, 0\]"),
    "counts": (DISCRETE, False, rows(3, -2), r"expected one-hot rows.*\[3, -2\]"),
    "a block short": (CHOICES, False, rows(1, 0, 0, 0, 0), r"one-hot rows.*\[1, 0, 0, 0, 0\]"),
    "another shape": (DISCRETE, False, rows(0, 1, 0), r"of shape \(3,\): \[0, 1, 0\]"),
    "too large a choice": (
        DISCRETE,
        True,
        lambda x: torch.full((len(x),), 2),
        r"expected numbers of choices of shape \(\) and dtype int64.* int64 of shape \(\): 2; draw",
    ),
    "no such choice": (CHOICES, True, rows(1, 3), r"expected numbers of choices.*\[1, 3\]"),
    "probabilities for bits": (BITS, False, rows(0.2, 0.9, 1.0), r"expected bits.*got float32"),
    "no bits": (BITS, False, rows(0, 2, 1), r"expected bits.*\[0, 2, 1\]"),
    "complex": (BOX, False, rows(1j, 0j), r"expected actions .* got complex64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_actions_outside_the_spec_are_refused_before_a_step(name: str) -> None:
    space, categorical, make, text = WRONG[name]
    made = env(space, categorical, None if len(name) % 2 else 2)
    steps: list[int] = []  # of the env's probe

    def act(x: torch.Tensor) -> torch.Tensor:
        steps.append(stepped.call_count)
        return make(x)

    with (
        patch.object(Walk, "step", autospec=True, side_effect=Walk.step) as stepped,
        pytest.raises(ValueError, match=text),
    ):
        records(made, writing(act))
    assert stepped.call_count == steps[0]


RIGHT: dict[str, tuple[spaces.Space[Any], bool, Any]] = {
    "one-hot": (DISCRETE, False, rows(0, 1)),
    "exact one-hot floats": (DISCRETE, False, rows(0.0, 1.0)),
    "blocks of exact floats": (CHOICES, False, rows(1.0, 0.0, 0.0, 0.0, 1.0)),
    "one-hot small ints": (DISCRETE, False, rows(0, 1, dtype=torch.uint8)),
    "choices": (CHOICES, True, rows(1, 2)),
    "bits": (BITS, False, rows(0, 1, 1)),
    "double numbers": (BOX, False, rows(0.5, -0.5, dtype=torch.float64)),
    "ints for numbers": (BOX, False, rows(0, 1)),
    "beyond the bounds": (BOX, False, rows(7.0, -7.0)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_actions_of_the_spec_are_taken(name: str) -> None:
    space, categorical, make = RIGHT[name]
    ledgers = {digest(env(space, categorical, n), writing(make), 5) for n in (None, 3)}
    assert len(ledgers) == 1
    if "floats" in name:  # nothing is lost when they are cast
        whole = writing(lambda x: make(x).long())
        one, other = (records(env(space), policy, 5) for policy in (writing(make), whole))
        assert [r.episode_return for r in one] == [r.episode_return for r in other]


@pytest.mark.parametrize("slots", [None, 3])
def test_an_action_that_goes_wrong_later_is_refused(slots: int | None) -> None:
    """Each step of each episode is checked, once its block is whole."""

    def act(x: torch.Tensor) -> torch.Tensor:
        good = functional.one_hot((x[:, 0] > 0).long(), 2)
        return torch.where(x[:, :1].abs() > 2.2, torch.ones_like(good), good)

    with pytest.raises(ValueError, match=r"expected one-hot rows.*\[1, 1\]"):
        records(env(DISCRETE, slots=slots), writing(act), 200)


def test_the_spec_is_that_of_the_env_with_its_transforms() -> None:
    base = env(BOX)
    discretized = TransformedEnv(base, T.ActionDiscretizer(num_intervals=3))
    with pytest.raises(ValueError, match="expected numbers of choices"):
        records(discretized, writing(rows(0.5, 0.5)))


@pytest.mark.parametrize(
    ("keeps", "kind"), [(False, OneHot), (True, OneHot), (True, Categorical)], ids=str
)
def test_random_actions_are_legal(keeps: bool, kind: Any) -> None:
    """Also with RandomPolicy, and the same for any number of slots."""
    envs: list[Masked] = []

    def make() -> EnvBase:
        envs.append(Masked(keeps, kind))
        mask = T.ActionMask(mask_key=("masks", "legal"))
        return envs[-1] if keeps else TransformedEnv(envs[-1], mask)

    assert digest(make, None, 4, num_envs=1) == digest(make, RandomPolicy(), 4, num_envs=3)
    assert sum(env.taken for env in envs) > 100
    assert sum(env.illegal for env in envs) == 0


@pytest.mark.parametrize("told", [False, True], ids=["seen", "told"])
@pytest.mark.parametrize("actions", [spaces.Discrete(3, start=2), CHOICES], ids=str)
def test_random_actions_keep_to_the_masks_of_gymnasium_envs(actions: Any, told: bool) -> None:
    """The env raises for an illegal action."""
    make = partial(masked.Masked, actions, told)
    given = [make_env(make, n, info_keys=["action_mask"] * told) for n in (None, 3)]
    ledgers = {digest(env, None, 7) for env in (make, *given)}
    assert len(ledgers) == 1


def test_a_function_may_name_the_mask_that_an_info_tells() -> None:
    def first(observation: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        return functional.one_hot(action_mask.argmax(-1), 3)

    for episode in episodes_of(partial(masked.Masked, told=True), first, 4).values():
        assert torch.equal(episode["action"].argmax(-1), episode["action_mask"].argmax(-1))


def test_an_env_that_draws_its_own_actions_is_asked_for_them() -> None:
    """As tic-tac-toe is, which has its mask in an entry of no transform."""
    assert digest(TicTacToeEnv, None, 3, num_envs=1) == digest(TicTacToeEnv, None, 3, num_envs=2)
    for episode in episodes_of(TicTacToeEnv, None, 2).values():
        assert episode["mask"].gather(-1, episode["action"][:, None]).all()


SPECS = {
    "one-hot": OneHot(5),
    "categorical": Categorical(5),
    "several categorical": Categorical(5, shape=(3,)),
    "several one-hot": MultiOneHot([3, 4, 2]),
    "bits": Binary(6),
    "box": Bounded(-2, 1, (32,)),
    "a number": Bounded(-1, 1, ()),
    "integers": Bounded(0, 5, (3,), dtype=torch.int64),
    "unbounded": Unbounded((20,)),
    "half bounded": DrawableBox(torch.tensor([0.0, -9]), torch.tensor([np.inf, 9]), (2,)),
}


@pytest.mark.parametrize("name", SPECS)
def test_actions_drawn_slot_by_slot_are_those_drawn_as_a_batch(name: str) -> None:
    """So that an env may mask at some steps only."""
    spec = Composite(action=SPECS[name], other=Categorical(3))
    together, alone = DrawByRow(16), DrawByRow(1)
    together.streams = [stream(seed) for seed in range(16)]
    with together:
        batches = [RandomActions(spec.expand(16))(TensorDict(batch_size=16)) for _ in range(3)]
    alone.streams = [stream(5)]
    with alone:
        rows = [spec.rand() for _ in range(3)]
    for batch, row in zip(batches, rows, strict=True):
        for key in ("action", "other"):
            assert torch.equal(batch[key][5], row[key])


def test_random_choices_of_several_kinds_are_evaluated() -> None:
    envs = [env(CHOICES, categorical=True, slots=slots) for slots in (1, 3)]
    assert len({digest(one, None, 6) for one in envs}) == 1
