"""Started by ``sandbox.run_program``: sets limits, leaves network and files, becomes the program.

It runs with ``python -I`` and so knows the standard library alone.
"""

import ctypes
import os
import resource
import struct
import sys

_NEW_USER, _NEW_NETWORK, _NEW_PROCESSES, _NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_NEW_MOUNTS = 0x00020000
_DIE_WITH_PARENT = 1
_PRIVATE, _BIND, _RECURSIVELY = 1 << 18, 1 << 12, 1 << 14
_MOUNT_SETATTR, _HERE, _BELOW, _READ_ONLY = 442, -100, 0x8000, 1


def main(program: str, seconds: str, memory_gib: str, file_mib: str, processes: str) -> None:
    """Limit this process and run the program in its place."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Where the system forbids namespaces, the limits below are all there is.
    apart = libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_PROCESSES | _NEW_IPC | _NEW_MOUNTS) == 0
    if not apart:
        apart = libc.unshare(_NEW_NETWORK | _NEW_PROCESSES | _NEW_IPC | _NEW_MOUNTS) == 0
    processor = int(float(seconds)) + 1
    memory = int(float(memory_gib) * 2**30)
    limits = {
        resource.RLIMIT_CPU: processor,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: int(file_mib) * 2**20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    if apart:
        _protect_files(libc, program.rpartition("/")[0])
        # The first process of the new namespace: with it, all that it has started dies.
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        libc.prctl(_DIE_WITH_PARENT, 9)
        # Counted in the namespace of the user alone, so that others' processes do not count.
        resource.setrlimit(resource.RLIMIT_NPROC, (int(processes), int(processes)))
    os.execv(sys.executable, [sys.executable, "-I", "-B", program])


def _protect_files(libc: ctypes.CDLL, folder: str) -> None:
    """All of the file system is read-only for the program, except its own folder.

    It happens in a namespace of mounts of its own; where the system forbids it, nothing changes.
    """
    own = folder.encode()
    libc.mount(None, b"/", None, _PRIVATE | _RECURSIVELY, None)
    if libc.mount(own, own, None, _BIND, None) != 0:
        return
    closed, opened = (struct.pack("4Q", *each) for each in ((_READ_ONLY, 0, 0, 0), (0, 1, 0, 0)))
    libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _BELOW, closed, 32)
    libc.syscall(_MOUNT_SETATTR, _HERE, own, 0, opened, 32)
    os.chdir(folder)  # the place below the new mount


if __name__ == "__main__":
    main(*sys.argv[1:])
