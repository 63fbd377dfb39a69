"""DeviceCopies: batches that workers have read into pinned memory, copied to a card beside its computation.

The copy of a micro-batch runs on a stream of its own while the card still computes the one before it. A worker writes
to a batch's pinned memory again once the batch is let go. So a batch is held here until the card has done with it, and
before a batch is copied the host waits for the one before the last. At most two batches are then on the card, in the
allocator's pool of that stream, and the host is at most one micro-batch ahead.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from memfit.apply.batches import on_device
from memfit.nested_tensors import tensors_in

ON_CARD = 2
"""Batches on the card: the one at hand and the one that is copied."""


class DeviceCopies:
    """Copies a rank's batches to a card.

    Args:
        beside: whether the copies have a stream of their own; a plan says whether its pool fits
            (``Plan.copy_ahead_bytes``). False: they wait for what was computed before.
        cuda: ``torch.cuda``.
    """

    def __init__(self, device: torch.device, *, beside: bool, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device) if beside else None
        self._computed: deque[tuple[Any, Any]] = deque()
        """Each earlier batch on the host, and an event after what was computed of it."""
        self._newest: list[Any] = []

    def copy(self, batch: Any) -> Any:
        """The batch on the card. What is launched afterwards on the current stream waits for the copy.

        Raises:
            InputError: a part of it cannot be moved.
        """
        compute = self._cuda.current_stream(self._device)
        while self._newest:
            self._computed.append((self._newest.pop(), compute.record_event()))
        while len(self._computed) >= ON_CARD:
            earlier = self._computed.popleft()
            earlier[1].synchronize()
        self._newest.append(batch)
        if self._stream is None:
            return on_device(batch, self._device)
        with self._cuda.stream(self._stream):
            copied = on_device(batch, self._device)
        compute.wait_stream(self._stream)
        for tensor in tensors_in(copied):
            if tensor.device.type == self._device.type:
                tensor.record_stream(compute)
        return copied
