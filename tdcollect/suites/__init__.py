"""Suites: many policies on many tasks."""
