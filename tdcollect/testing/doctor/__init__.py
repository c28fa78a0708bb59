"""The doctor: verdicts on an env, with evidence, a likely cause and what to do."""

from tdcollect.testing.doctor.diagnose import diagnose
from tdcollect.testing.doctor.diagnosis import Diagnosis, Verdict
from tdcollect.testing.doctor.divergence import Divergence

__all__ = ["Diagnosis", "Divergence", "Verdict", "diagnose"]
