"""``python -m trainkit`` is ``trainkit``."""

import os
import sys

if __name__ == "__main__":
    # `python -m` looks in the current directory first, so a json.py of the user's would be run in
    # place of Python's.
    if sys.path[0] == "" or sys.path[0] == os.getcwd():  # noqa: PTH109 - pathlib may be the user's
        del sys.path[0]
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
        if root not in sys.path:  # trainkit itself may lie there
            sys.path.append(root)
    from trainkit.cli.app import main

    sys.exit(main())
