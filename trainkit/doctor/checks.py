"""THE TABLE of checks of a machine; to add one, add a function and a row."""

from collections.abc import Callable, Iterator, Mapping

from trainkit.doctor.gpus import check_all_reduce, check_driver, check_gpus, check_nccl
from trainkit.doctor.machine import (
    Finding,
    check_disk,
    check_hub,
    check_limits,
    check_shared_memory,
)
from trainkit.doctor.software import (
    check_bytecode,
    check_compiler,
    check_packages,
    check_python,
)

CHECKS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "python": check_python,
    "packages": check_packages,
    "bytecode": check_bytecode,
    "gpu": check_gpus,
    "driver": check_driver,
    "nccl": check_nccl,
    "compiler": check_compiler,
    "all-reduce": check_all_reduce,
    "disk": check_disk,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "hub": check_hub,
}


def diagnose() -> Iterator[Finding]:
    """Run every check, in order; one that fails itself is a finding, too."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:  # whatever a broken driver or package raises is the finding
            fix = f"python -c 'from trainkit.doctor import CHECKS; list(CHECKS[\"{name}\"]())'"
            if isinstance(error, ImportError):
                fix = "pip install --force-reinstall trainkit"
            yield Finding(name, "error", f"{type(error).__name__}: {error}", fix)
