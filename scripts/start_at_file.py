#!/usr/bin/env python3
"""Start a run whose imports are done before its turn: import, wait for a file, then go on.

    python scripts/start_at_file.py GATE MODULE_OR_SCRIPT [ARGUMENT...]

On a host with many GPUs most of a short run is imports; a bench that has all its runs import at
once, and then takes turns, gets about twice as many of them into the same time. Beside the gate a
file ``GATE.PID`` says that the imports are done. No GPU is touched before the gate is there.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from pathlib import Path

HEAVY = ("torch", "transformers", "transformers.trainer", "deepspeed", "peft", "datasets")


def main() -> None:
    """Import, wait, run."""
    gate, target, *arguments = sys.argv[1:]
    script = target.endswith(".py")
    for name in HEAVY if script else (*HEAVY, "trainkit.train.build"):
        importlib.import_module(name)
    Path(f"{gate}.{os.getpid()}").touch()
    while not Path(gate).exists():
        time.sleep(0.05)
    sys.argv = [target, *arguments]
    if script:
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
