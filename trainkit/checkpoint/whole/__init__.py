"""Directories that appear complete or not at all, and are proved when they are read."""
