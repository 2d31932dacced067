"""``python -m benchmarks NAME``: the one runner.

``ops``, ``loss``, ``packing``, ``curve`` and ``data`` print a JSON line a figure and append them to
``--output``. ``runs`` (whole runs next to other trainers) and ``parity`` (every way to spread a run
against one process) have options of their own. Steps of whole models, and of LoRA, are what
``trainkit bench`` measures.
"""

import importlib
import sys

if __name__ == "__main__":
    # `parity` sets the number of threads before torch is imported: its runs are forked.
    if sys.argv[1:2] in (["runs"], ["parity"]):
        importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
    else:
        importlib.import_module("benchmarks.figures").main(sys.argv[1:], __doc__)
