"""Fills the memory of a process up to a limit: for the children that tests start."""

import resource
from collections.abc import Callable, Sequence

from memfit.train.launch import memory_limit


def fill(sizes: Sequence[int], after: Callable[[], None] = lambda: None) -> list[bytes | None]:
    """Lets this process grow by 2 MiB, and fills them with blocks of these sizes, one size after the other.

    Args:
        after: called where no further block of a size fits.
    """
    kept: list[bytes | None] = [None] * 400_000
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit.data_bytes() + (2 << 20), hard))
    count = 0
    for size in sizes:
        try:
            while True:
                kept[count] = bytes(size)
                count += 1
        except MemoryError:
            pass
        after()
    return kept
