"""Directories that appear whole or not at all, and are proved when they are read."""
