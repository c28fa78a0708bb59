"""Ours and the parent's collector give the same, to the bit, on every env, policy and transform."""

from __future__ import annotations

import pytest

from . import cases
from .oracle import check_same

pytestmark = pytest.mark.usefixtures("arrays")


@pytest.mark.parametrize("env", cases.ENVS)
def test_random_policy_on_every_env(env: str) -> None:
    check_same(cases.ENVS[env], cases.random_policy)


@pytest.mark.parametrize("env", cases.ENVS)
def test_sampling_actor_on_every_env(env: str) -> None:
    check_same(cases.ENVS[env], cases.actor)
