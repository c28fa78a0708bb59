"""The doctor: checks whether an env is fit for collecting, with likely causes and advice."""

from tdcollect.testing.doctor.diagnose import diagnose

__all__ = ["diagnose"]
