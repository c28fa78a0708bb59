"""The core of all env checks: registry, report, players, and the difference of two runs.

It knows of envs only. :mod:`tdcollect.testing` and the probe of an evaluation are built on it.
"""
