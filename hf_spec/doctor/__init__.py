"""Find out why few guesses are accepted: measure, compare with teacher forcing, and try what may be set wrongly."""

from .diagnosis import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
