"""Runs a module as ``python -m`` does, without the current directory: ``module.py NAME ARGUMENTS``.

``python -m`` looks there first, so a ``json.py`` in the user's folder would be run in place of
Python's. Of a script Python adds the folder that it lies in, and this one holds nothing else.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [each for each in sys.path if each and Path(each) != here]
    if str(here.parents[1]) not in sys.path:  # trainkit itself may lie in the current directory
        sys.path.append(str(here.parents[1]))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
