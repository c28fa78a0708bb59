"""Suites: many policies on many tasks, with several training runs of each policy."""
