"""Fixtures that catch collection bugs, and env checks, for users' projects too.

- :class:`CountingEnv` and :class:`TorchCountingEnv` observe their step, episode and slot;
  :class:`CountingPolicy` must predict them; :func:`check_counting_batch` checks a batch of both.
- :func:`check_env` checks any env, rule by rule.
- :func:`diagnose` checks whether an env is fit for collecting and testing, and reports the place
  and likely cause of each fault.
"""

from tdcollect.envs.differences import Divergence
from tdcollect.testing.checks import Finding, Report
from tdcollect.testing.counting import (
    CountingEnv,
    CountingPolicy,
    CountingRules,
    StatelessCountingPolicy,
    TorchCountingEnv,
    check_counting_batch,
    counting_env,
    make_counting_envs,
)
from tdcollect.testing.doctor import diagnose
from tdcollect.testing.rules import check_env

__all__ = [
    "CountingEnv",
    "CountingPolicy",
    "CountingRules",
    "Divergence",
    "Finding",
    "Report",
    "StatelessCountingPolicy",
    "TorchCountingEnv",
    "check_counting_batch",
    "check_env",
    "counting_env",
    "diagnose",
    "make_counting_envs",
]
