"""Fixtures that catch collection bugs, and env checks, for users' projects too.

- :class:`CountingEnv` and :class:`TorchCountingEnv` observe their step, episode and slot;
  :class:`CountingPolicy` must predict them; :func:`check_counting_batch` checks a batch of both.
- :func:`check_env` checks any env, rule by rule.
- :func:`diagnose` checks whether an env is fit for collecting and testing, and reports the place
  and likely cause of each fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.envs.differences import Divergence as Divergence
    from tdcollect.testing.checks import Finding as Finding
    from tdcollect.testing.checks import Report as Report
    from tdcollect.testing.counting import CountingEnv as CountingEnv
    from tdcollect.testing.counting import CountingPolicy as CountingPolicy
    from tdcollect.testing.counting import CountingRules as CountingRules
    from tdcollect.testing.counting import StatelessCountingPolicy as StatelessCountingPolicy
    from tdcollect.testing.counting import TorchCountingEnv as TorchCountingEnv
    from tdcollect.testing.counting import check_counting_batch as check_counting_batch
    from tdcollect.testing.counting import counting_env as counting_env
    from tdcollect.testing.counting import make_counting_envs as make_counting_envs
    from tdcollect.testing.doctor import diagnose as diagnose
    from tdcollect.testing.rules import check_env as check_env

__getattr__, __dir__, __all__ = lazy(__name__)
