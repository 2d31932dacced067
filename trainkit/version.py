"""The version of trainkit, read by the package metadata."""

__version__ = "0.1.0"
