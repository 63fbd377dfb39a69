"""Rank 0 of a gloo group whose rank 1 joins no collective, in a process of its own.

It ends without Python's finalisation: a thread of gloo may still hold a tensor, and would wait for Python's lock while
the group's destructor, which holds that lock, waits for the thread.

python -m tests.train.lonely_rank wait_in_vain|wait_in_vain_and_say_so    prints whether the error is of a lost rank
"""

import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from memfit.engine.lost_rank import is_lost_rank


def gloo_group(store, rank):
    return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, timedelta(seconds=0.5))


GROUPS = {}
"""The groups by rank; never dropped, so that no destructor runs."""


def wait_in_vain():
    """An all-reduce of rank 0, which rank 1 does not join."""
    store = dist.HashStore()
    threads = [
        threading.Thread(target=lambda rank: GROUPS.update({rank: gloo_group(store, rank)}), args=(rank,))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    GROUPS[0].allreduce([torch.ones(3)]).wait()


def wait_in_vain_and_say_so():
    try:
        wait_in_vain()
    except RuntimeError as error:
        raise ValueError("my step failed") from error


def main():
    wait = {function.__name__: function for function in (wait_in_vain, wait_in_vain_and_say_so)}[sys.argv[1]]
    try:
        wait()
    except Exception as error:
        print(type(error).__name__, is_lost_rank(error), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
