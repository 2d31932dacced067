"""``python -m trainkit`` is ``trainkit``."""

import sys

from trainkit.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
