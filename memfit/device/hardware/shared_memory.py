"""Shared memory and threads by compute capability, as the CUDA C++ Programming Guide lists them."""

from __future__ import annotations

_KIB = 1024
WITHOUT_OPT_IN = 48 * _KIB
"""What a block gets that does not ask for more."""
_OPT_IN = {
    (7, 0): 96 * _KIB, (7, 5): 64 * _KIB, (8, 0): 163 * _KIB, (8, 6): 99 * _KIB, (8, 7): 163 * _KIB, (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB, (10, 0): 227 * _KIB, (10, 3): 227 * _KIB, (12, 0): 99 * _KIB, (12, 1): 99 * _KIB,
}  # fmt: skip


_THREADS = {
    (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536,
}  # fmt: skip
"""The most threads of a multiprocessor, from this compute capability on."""


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """The most that a block may ask for; of an unlisted capability, that of the nearest one before it."""
    return _OPT_IN[max((known for known in _OPT_IN if known <= capability), default=min(_OPT_IN))]


def shared_memory_of_multiprocessor(capability: tuple[int, int]) -> int:
    """What the blocks of a multiprocessor share: from 8.0 on, each block takes 1 KiB beside what it asks for."""
    return shared_memory_bytes(capability) + (_KIB if capability >= (8, 0) else 0)


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """The most threads of a multiprocessor at once; of an unlisted capability, that of the nearest one before it."""
    return _THREADS[max((known for known in _THREADS if known <= capability), default=min(_THREADS))]
