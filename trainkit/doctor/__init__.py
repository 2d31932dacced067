"""Is this machine fit to train: a table of checks, each with the command that fixes its fault."""

from trainkit.doctor.checks import CHECKS, Finding, diagnose

__all__ = ["CHECKS", "Finding", "diagnose"]
