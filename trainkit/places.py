"""Where trainkit keeps what outlives a run. No torch."""

import os
from pathlib import Path


def data_cache() -> Path:
    """Of tokenised data: ``$XDG_CACHE_HOME/trainkit/data``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainkit" / "data"
