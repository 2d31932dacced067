"""Processes that are forked behind the imports and train."""

import os
import sys
import threading


def give_forks_their_own_threads():
    """Let every process that is forked from now on make torch's threads again, alone.

    torch marks its pool of threads as lost in a forked process and makes it again where it is next
    asked for. Two threads that ask at once (one trains, one saves) meet between the two: "Invalid
    thread pool".
    """
    import torch

    def make_again():
        torch.set_num_threads(torch.get_num_threads())

    os.register_at_fork(after_in_child=make_again)


def _first_use_in_threads(rows):
    """The number of threads in which torch raised."""
    begin, raised = threading.Event(), []

    def use():
        begin.wait()
        try:
            rows.clone()
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    begin.set()
    for thread in threads:
        thread.join()
    return len(raised)


def main():
    """Exits with how many of five forked processes could not use torch in eight threads at once."""
    import torch

    torch.set_num_threads(8)
    give_forks_their_own_threads()
    rows, bad = torch.ones(300_000), 0
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(_first_use_in_threads(rows))
        bad += os.waitpid(pid, 0)[1] != 0
    sys.exit(bad)


if __name__ == "__main__":
    main()
