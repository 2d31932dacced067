"""Continuing a run so that it is the same run: what it was given, and what has changed."""
