"""The most likely actions of categorical policies are TorchRL's, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule
from torch import distributions, nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

from tdcollect import Collector, make_env
from tdcollect.collect.samplers import Draw, GlobalNoise, sampler

from .oracle import UPSTREAM, batches, check_same

pytestmark = pytest.mark.filterwarnings(UPSTREAM)


SHARED = nn.Tanh()
NETS = {
    "MLP, given two entries": lambda: MLP(8, 2, num_cells=[16, 16]),
    "MLP of one layer": lambda: MLP(4, 2, depth=0),
    "MLP with norm": lambda: MLP(
        4, 2, num_cells=[16], norm_class=nn.LayerNorm, norm_kwargs=[{"normalized_shape": 16}]
    ),
    "a module that comes twice": lambda: nn.Sequential(
        nn.Linear(4, 8), SHARED, nn.Linear(8, 8), SHARED, nn.Linear(8, 2)
    ),
    "ties": lambda: nn.Linear(4, 2, bias=False).apply(lambda layer: nn.init.zeros_(layer.weight)),
}


KINDS = [ExplorationType.DETERMINISTIC, ExplorationType.MODE]


@pytest.mark.parametrize("scored", [True, False], ids=["scored", "not scored"])
@pytest.mark.parametrize("net", NETS)
def test_modes(net: str, scored: bool) -> None:
    kind = KINDS[list(NETS).index(net) % 2]
    entries = ["observation"] * (2 if "two" in net else 1)
    one_hot = scored == (list(NETS).index(net) % 3 == 0)

    def policy(env: Any) -> Any:
        return ProbabilisticActor(
            TensorDictModule(NETS[net](), in_keys=entries, out_keys=["logits"]),
            in_keys=["logits"],
            spec=env.action_spec,
            distribution_class=OneHotCategorical if one_hot else distributions.Categorical,
            return_log_prob=scored,
        )

    def env() -> Any:
        return make_env("CartPole-v1", num_envs=3, categorical_action_encoding=not one_hot)

    check_same(env, policy, batches(2), lambda: {"exploration_type": kind, **FRAMES})
    collector = Collector(env(), policy(env()), exploration_type=kind, **FRAMES)
    assert "computed straight" in str(collector.explain())


FRAMES = {"frames_per_batch": 30, "total_frames": 90}


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 6),
    st.sampled_from([1e-30, 1e-3, 1.0, 30.0, 1e4, 1e30]),
    st.integers(0, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_modes_of_logits_that_are_almost_alike(
    seed: int, actions: int, scale: float, ulps: int, dtype: torch.dtype, one_hot: bool
) -> None:
    rng = np.random.default_rng(seed)
    eps = torch.finfo(dtype).eps
    near = 1 + eps * rng.integers(-ulps, ulps + 1, (8, actions))
    logits = torch.from_numpy(scale * rng.normal(size=(8, 1)) * near).to(dtype)
    logits[0, 0], logits[1, 1], logits[2, 0] = torch.tensor([np.nan, np.inf, -np.inf])
    kind = OneHotCategorical if one_hot else distributions.Categorical
    module = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=kind)
    mode = Draw(kind, ("logits",), {}, InteractionType.MODE, False, False, GlobalNoise())
    draw = sampler(mode)
    assert draw is not None
    for rows in (logits, logits[3:]):  # one row that is not clear sends all to the normalizer
        expected = kind(logits=rows).mode
        assert torch.equal(draw(rows)[0], expected)
        assert torch.equal(module(TensorDict(logits=rows))["action"], expected)
