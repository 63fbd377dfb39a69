"""Batches from a worker to the process that trains: their bytes in memory that both share, and a pickle of the rest.

Pickle's protocol 5 hands out the buffers of tensors and arrays. A worker copies them into a slot of anonymous shared
memory, and the process that trains makes tensors of it in place. The memory has no name and no descriptor: nothing of
it is left when a process is killed, and a small /dev/shm does not matter. A batch that is larger than a slot, or finds
none free, goes through the pipe.
"""

from __future__ import annotations

import io
import mmap
import pickle
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: as torch aligns its own tensors."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


class SharedSlots:
    """Shared memory in ``count`` slots of ``nbytes`` each; made before the workers are forked.

    Pages that no batch has touched take no memory. A slot is free again when the last tensor in it is gone, so that a
    job may keep what it was given.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._bytes = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = np.frombuffer(mmap.mmap(-1, count * self._bytes, flags), dtype=np.uint8)
        self._free = deque(range(count))

    def pin(self) -> None:
        """Pins the memory, so that copies to a card need no other. Where the driver refuses, it stays as it is."""
        torch.cuda.cudart().cudaHostRegister(self._memory.ctypes.data, self._memory.nbytes, 0)

    def take(self) -> int | None:
        """A free slot, which is then in use; None where there is none."""
        return self._free.popleft() if self._free else None

    def give_back(self, slot: int) -> None:
        """A slot that nothing was read from is free again."""
        self._free.append(slot)

    def bytes_of(self, slot: int) -> np.ndarray:
        """A slot's bytes, uint8 (nbytes,)."""
        start = slot * self._bytes
        return self._memory[start : start + self._bytes]

    def lent(self, slot: int) -> np.ndarray:
        """A slot's bytes; it is free again when nothing refers to them."""
        lent = np.frombuffer(self.bytes_of(slot).data, dtype=np.uint8)
        weakref.finalize(lent, self._free.append, slot)
        return lent


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch on its way."""

    content: bytes
    """A pickle, without the buffers."""
    slot: int | None
    """Where the buffers are; None: all of them are in ``loose``."""
    spans: tuple[tuple[int, int], ...] = ()
    """Begin and end of each buffer in its slot."""
    loose: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(end - begin for begin, end in self.spans) + sum(map(len, self.loose))

    def unpack(self, slots: SharedSlots) -> Any:
        """The batch, its tensors in the slot."""
        buffers: list[Any] = [bytearray(content) for content in self.loose]
        if self.slot is not None:
            lent = slots.lent(self.slot)
            buffers = [lent[begin:end] for begin, end in self.spans]
        return pickle.loads(self.content, buffers=buffers)


def pack(batch: Any, slots: SharedSlots | None, slot: int | None) -> Packed:
    """A batch's bytes, in the slot where they fit.

    Raises:
        Exception: whatever pickle raises on what it cannot take.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(batch)
    raw = [buffer.raw() for buffer in buffers]
    ends = np.cumsum([0, *(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in raw)]).tolist()
    if slots is None or slot is None or ends[-1] > len(slots.bytes_of(slot)):
        return Packed(content=stream.getvalue(), slot=None, loose=tuple(map(bytes, raw)))
    target, spans = slots.bytes_of(slot), []
    for begin, part in zip(ends, raw, strict=False):
        target[begin : begin + part.nbytes] = np.frombuffer(part, dtype=np.uint8)
        spans.append((begin, begin + part.nbytes))
    return Packed(content=stream.getvalue(), slot=slot, spans=tuple(spans))


class _Pickler(pickle.Pickler):
    """Hands out the bytes of plain tensors as buffers; other kinds of tensors are pickled as torch does."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        size, offset = value.element_size(), value.storage_offset()
        nbytes = extent * size if value.numel() else 0
        raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage(), offset * size, (nbytes,), (1,))
        return _tensor, (pickle.PickleBuffer(raw.numpy().data), value.dtype, tuple(value.shape), value.stride())


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor with its strides, in the memory of the buffer."""
    if not len(memoryview(buffer)):
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)
