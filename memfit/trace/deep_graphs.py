"""Room for autograd graphs of many thousand operators, one after the other, as of a recurrent net over long sequences.

Each operator of a backward is looked at from Python, and torch 2.13 frees what Python has seen of a graph by recursion:
8 MiB of stack, which most systems give a process, are enough for about 30,000 operators. Beyond them the process ended
with a segmentation fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

STACK_BYTES = 120 << 20
"""Linux leaves at least 128 MiB of addresses below the stack of a process, into which it may grow."""


@contextmanager
def room_for_deep_graphs() -> Iterator[None]:
    """Context in which the stack of the main thread may grow to ``STACK_BYTES``, where the system allows it. Processes
    that are started elsewhere have the limit that was there."""
    try:
        import resource
    except ImportError:  # Windows
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_STACK)
    asked = STACK_BYTES if most == resource.RLIM_INFINITY else min(STACK_BYTES, most)
    raised = before != resource.RLIM_INFINITY and before < asked
    if raised:
        with suppress(ValueError, OSError):  # macOS: the main thread's stack has its size from the start
            resource.setrlimit(resource.RLIMIT_STACK, (asked, most))
    try:
        yield
    finally:
        if raised:
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_STACK, (before, most))
