"""A command whose files may not grow beyond a size: the kernel refuses, as a full disk does."""

import resource

from commands import run_command


def run(cwd, argv, most):
    """`run_command` where no file may have more than ``most`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return run_command(cwd, argv)
