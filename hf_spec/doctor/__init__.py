"""Diagnosis of low acceptance: measure, compare with teacher forcing, and try other settings of the draft."""

from .diagnosis import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
