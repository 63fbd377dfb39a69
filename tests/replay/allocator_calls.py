"""Calls of the caching allocator in tests, and what it did."""

from dataclasses import replace

from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


def allocator(
    capacity: int | None = None, settings: str = "", youngest_first: bool = False, **more: object
) -> CachingAllocator:
    config = replace(AllocatorConfig.parse(settings), youngest_first=youngest_first)
    return CachingAllocator(capacity, config, history=[], **more)  # type: ignore[arg-type]


def malloc(a: CachingAllocator, *sizes: int, first: int = 0, stream: int = 0) -> None:
    for at, nbytes in enumerate(sizes, start=first):
        a.malloc(at, nbytes, stream)


def address(a: CachingAllocator, storage: int) -> int:
    assert a.history is not None
    return next(event[1] for event in reversed(a.history) if event[0] == "alloc" and event[4] == storage)


def actions(a: CachingAllocator) -> list[tuple[str, int]]:
    assert a.history is not None
    return [(event[0], event[2]) for event in a.history]
