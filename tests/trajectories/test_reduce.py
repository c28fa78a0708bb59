"""Reductions to one number or one row per trajectory."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from tdcollect.trajectories import (
    TrajectoryIndex,
    discounted_returns,
    first,
    last,
    lengths,
    returns,
    segment_sum,
    split_trajectories,
)

from .batches import REWARD, check_same, done_flags, given, make, naive

DONE = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)


@given(done_flags(), st.booleans(), st.just(0.0) | st.just(1.0) | st.floats(0, 1))
def test_agree_with_a_loop(done: torch.Tensor, ids: bool, gamma: float) -> None:
    batch = make(done, ids=ids, words=True)
    ones = naive(batch)
    assert lengths(batch).tolist() == [len(one) for one in ones]
    rewards = [one[REWARD].squeeze(-1).tolist() for one in ones]
    torch.testing.assert_close(
        returns(batch), torch.tensor([sum(one) for one in rewards]).unsqueeze(-1)
    )
    discounted = [sum(gamma**k * r for k, r in enumerate(one)) for one in rewards]
    torch.testing.assert_close(
        discounted_returns(batch, gamma), torch.tensor(discounted).unsqueeze(-1)
    )
    check_same(first(batch), torch.stack([one[0] for one in ones]), names=False)
    check_same(last(batch), torch.stack([one[-1] for one in ones]), names=False)
    padded = split_trajectories(batch)
    assert torch.equal(returns(padded), returns(batch))
    assert torch.equal(lengths(padded), lengths(batch))
    assert torch.equal(last(padded)["observation"], last(batch)["observation"])
    index = TrajectoryIndex.of(batch)
    assert torch.equal(returns(batch, index), returns(batch))
    if batch.ndim == 2:
        turned = batch.exclude("word").permute(1, 0).contiguous()
        turned.names = ["time", None]
        assert torch.equal(returns(turned), returns(batch))


def test_sums_are_rounded_once() -> None:
    """Ten million and 10,000 times 0.1: in float32 each of the steps would round."""
    batch = make(torch.zeros(10_001, dtype=torch.bool))
    batch[REWARD] = torch.full((10_001, 1), 0.1)
    batch[REWARD][0] = 1e7
    exact = 1e7 + 10_000 * float(torch.tensor(0.1))
    assert returns(batch).dtype is torch.float32
    assert returns(batch).item() == torch.tensor(exact).item()
    plain = np.add.accumulate(batch[REWARD].squeeze(-1).numpy())[-1]
    assert abs(plain - exact) > 100


def test_segment_sum_of_any_dtype_and_shape() -> None:
    index = TrajectoryIndex.of(make(DONE))
    big = torch.tensor([[2**60, 1, 1, 0], [3, 0, 0, 1]])
    assert segment_sum(big, index).tolist() == [2**60 + 2, 0, 3, 1]
    assert segment_sum(DONE, index).tolist() == [1, 0, 1, 0]
    assert segment_sum(DONE, index).dtype is torch.int64
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64
    for dtype, feature in itertools.product(floats, ((), (2, 2))):
        values = torch.randint(-5, 5, (2, 4, *feature)).to(dtype)
        sums = segment_sum(values, index)
        expected = [values[0, :3].sum(0), values[0, 3], values[1, 0], values[1, 1:].sum(0)]
        assert sums.dtype is dtype
        assert torch.equal(sums, torch.stack(expected))


def test_a_discount_of_zero_leaves_out_what_is_not_finite() -> None:
    batch = make(torch.zeros(1, 8000, dtype=torch.bool))
    batch[REWARD] = torch.ones(1, 8000, 1)
    batch[REWARD][0, -1] = torch.inf
    assert discounted_returns(batch, 0.0).item() == 1
    assert abs(discounted_returns(batch, 0.9).item() - 10) < 1e-5  # 0.9 ** 7999 is zero
    assert discounted_returns(batch, 1.0).item() == torch.inf


def test_gradients_pass_and_no_steps_give_no_rows() -> None:
    batch = make(DONE)
    reward = torch.rand(2, 4, 1, requires_grad=True)
    batch[REWARD] = reward
    (discounted_returns(batch, 0.5)).sum().backward()
    assert reward.grad is not None
    assert reward.grad.squeeze(-1).tolist() == [[1, 0.5, 0.25, 1], [1, 1, 0.5, 0.25]]
    empty = make(torch.zeros(3, 0, dtype=torch.bool))
    assert returns(empty).shape == discounted_returns(empty, 0.9).shape == (0, 1)
    assert first(empty).batch_size == (0,)
