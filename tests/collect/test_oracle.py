"""Ours and the parent's collector give the same, to the bit, on every env, policy and transform."""

from __future__ import annotations

import pytest
from torchrl.envs import EnvBase, TransformedEnv

from . import policies, transforms
from .envs import ENVS
from .oracle import UPSTREAM, check_same

pytestmark = [pytest.mark.usefixtures("arrays"), pytest.mark.filterwarnings(UPSTREAM)]


@pytest.mark.parametrize("env", ENVS)
def test_random_policy_on_every_env(env: str) -> None:
    check_same(ENVS[env], policies.random_policy)


@pytest.mark.parametrize("env", ENVS)
def test_sampling_actor_on_every_env(env: str) -> None:
    check_same(ENVS[env], policies.actor)


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_every_policy(policy: str) -> None:
    check_same(*policies.case(policy))


@pytest.mark.parametrize("transform", transforms.TRANSFORMS)
def test_sampling_actor_under_every_transform(transform: str) -> None:
    check_same(lambda: transforms.make(transform), policies.actor)


def test_transforms_in_two_layers() -> None:
    def make() -> EnvBase:
        inner = TransformedEnv(ENVS["cartpole"](), transforms.norm())
        return TransformedEnv(inner, transforms.books(), auto_unwrap=False)

    check_same(make, policies.actor)
