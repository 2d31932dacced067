"""A merge that is killed, in a process of its own."""

import os
import signal


def merge_and_die(cwd, argv):
    """When base and merged weights are written, and nothing is proved."""
    from trainkit.checkpoint.merge import merge
    from trainkit.cli.app import main

    os.chdir(cwd)
    merge.compare_with_adapter = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    main(argv)
