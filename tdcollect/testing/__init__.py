"""Checks of envs, for users' projects too.

- :func:`check_env` checks any env, rule by rule.
- :func:`diagnose` checks whether an env is fit for collecting and testing, and reports the place
  and likely cause of each fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdcollect.packages import lazy

if TYPE_CHECKING:
    from tdcollect.testing.checks import Divergence as Divergence
    from tdcollect.testing.checks import Finding as Finding
    from tdcollect.testing.checks import Report as Report
    from tdcollect.testing.doctor import diagnose as diagnose
    from tdcollect.testing.rules import check_env as check_env

__getattr__, __dir__, __all__ = lazy(__name__)
