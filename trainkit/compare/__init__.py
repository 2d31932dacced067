"""Runs side by side: what was set differently, and whether that made more than noise."""
