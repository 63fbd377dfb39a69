"""Shared memory of a block of threads, by compute capability, as the CUDA C++ Programming Guide lists it."""

from __future__ import annotations

_KIB = 1024
WITHOUT_OPT_IN = 48 * _KIB
"""What a block gets that does not ask for more."""
_OPT_IN = {
    (7, 0): 96 * _KIB, (7, 5): 64 * _KIB, (8, 0): 163 * _KIB, (8, 6): 99 * _KIB, (8, 7): 163 * _KIB, (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB, (10, 0): 227 * _KIB, (10, 3): 227 * _KIB, (12, 0): 99 * _KIB, (12, 1): 99 * _KIB,
}  # fmt: skip


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """The most that a block may ask for; of an unlisted capability, that of the nearest one before it."""
    return _OPT_IN[max((known for known in _OPT_IN if known <= capability), default=min(_OPT_IN))]
