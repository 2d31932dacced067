"""Commands whose files may not grow beyond a size: the kernel refuses, as a full disk does."""

import resource

from commands import run_each


def run(cwds, argvs, most):
    """`run_each` where no file may have more than ``most`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return run_each(cwds, argvs)
