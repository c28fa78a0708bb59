"""Fixtures that catch collection bugs, and conformance checks, for users' projects too.

- :class:`CountingEnv` and its kin show their step, episode and slot as the observation;
  :class:`CountingPolicy` must predict them; :func:`check_counting_batch` checks a batch of both.
- :func:`check_env` checks any env, rule by rule.
- :func:`diagnose` tells whether an env is fit for collecting and testing, and if not, where and
  why.
"""

from tdcollect.testing.batch import check_counting_batch
from tdcollect.testing.conformance import check_env
from tdcollect.testing.counting import (
    CountingEnv,
    CountingPolicy,
    CountingRules,
    StatelessCountingPolicy,
    counting_env,
    make_counting_envs,
)
from tdcollect.testing.doctor import Diagnosis, Divergence, Verdict, diagnose
from tdcollect.testing.report import Finding, Report
from tdcollect.testing.torch_counting import TorchCountingEnv

__all__ = [
    "CountingEnv",
    "CountingPolicy",
    "CountingRules",
    "Diagnosis",
    "Divergence",
    "Finding",
    "Report",
    "StatelessCountingPolicy",
    "TorchCountingEnv",
    "Verdict",
    "check_counting_batch",
    "check_env",
    "counting_env",
    "diagnose",
    "make_counting_envs",
]
