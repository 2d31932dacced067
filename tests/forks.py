"""Processes that are forked behind the imports and train."""

import os


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
