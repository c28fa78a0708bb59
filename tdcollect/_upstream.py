"""The private names of other packages that tdcollect leans on, all in one place.

Each has a test in ``tests/test_upstream.py`` that fails when upstream changes it.
"""

from __future__ import annotations

from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform as gym_space_to_spec

__all__ = ["gym_space_to_spec"]
