"""ExactAllocator: a device without a cache, as the CPU is: what is asked for is what is held."""

from __future__ import annotations

from memfit.replay.errors import OutOfMemory


class CpuAllocator:
    """Allocated, reserved and requested bytes are the same number; a request past the capacity raises OutOfMemory."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.peak_allocated = self.retries = 0
        self._live: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        return self.allocated

    @property
    def requested(self) -> int:
        return self.allocated

    @property
    def peak_reserved(self) -> int:
        return self.peak_allocated

    @property
    def peak_requested(self) -> int:
        return self.peak_allocated

    def malloc(self, storage: int, nbytes: int, stream: int = 0) -> None:
        allocated = self.allocated + nbytes
        if self.capacity is not None and allocated > self.capacity:
            raise OutOfMemory(
                nbytes, segment=nbytes, allocated=self.allocated, reserved=self.allocated, limit=self.capacity
            )
        self._live[storage] = nbytes
        self.allocated = allocated
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated

    def free(self, storage: int) -> None:
        self.allocated -= self._live.pop(storage)

    def empty_cache(self) -> None:
        """Does nothing: a CPU's allocator keeps no cache."""

    def reset_peaks(self) -> None:
        self.peak_allocated = self.allocated
