"""OutOfMemory: what an allocator raises when the device has no room, as torch.OutOfMemoryError would be."""

from memfit.sizes import format_size


class OutOfMemory(Exception):  # noqa: N818
    """A request that failed after everything that could be released was released.

    Args:
        nbytes: bytes that were asked for.
        segment: bytes that the allocator asked the device for, on behalf of them.
        allocated: bytes of live blocks at that moment.
        reserved: bytes held from the device at that moment.
        limit: bytes that may be held.
        retry_succeeds: whether the same request would succeed at once, from a block that only now returned to the pool.
    """

    def __init__(
        self, nbytes: int, *, segment: int, allocated: int, reserved: int, limit: int, retry_succeeds: bool = False
    ) -> None:
        self.retry_succeeds = retry_succeeds
        self.nbytes, self.segment, self.limit = nbytes, segment, limit
        self.allocated, self.reserved = allocated, reserved
        super().__init__(
            f"out of memory: {format_size(nbytes)} asked for, {format_size(reserved)} of {format_size(limit)} "
            f"reserved, {format_size(allocated)} of that allocated"
        )
