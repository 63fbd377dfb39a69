"""Tensors in a file of the safetensors format, streamed from where they lie, with checksums of its blocks.

The format (github.com/huggingface/safetensors): eight bytes that give the header's length, a JSON header with each
tensor's dtype, shape and range, then the bytes of the tensors without gaps, row-major. No code is in it and none is run
to read it. Written here without the copies of the whole that ``safetensors.torch.save_file`` makes, and read as a
read-only mapping, which takes no memory of the process's own.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import queue
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from memfit.train.checkpoint.state_codec import DTYPES
from memfit.train.launch.memory_limit import start_thread

BLOCK = 4 << 20
"""Bytes that one checksum covers."""
PIECE = 1 << 20
"""Bytes that are copied at once on the way into the file, where a tensor cannot be written from its own memory."""
_WAITING = 4
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class TornError(Exception):
    """A file is not what was written; its message says how."""


def in_file_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The widest dtypes first: then every tensor begins at a multiple of its element's size."""
    return sorted(tensors.items(), key=lambda item: -item[1].element_size())


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of the file, padded with spaces to a multiple of 64."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in in_file_order(tensors):
        dtype = DTYPES.get(tensor.dtype)
        shape = list(tensor.shape) if dtype else [tensor.nbytes]
        entries[name] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    body: Tensor | None = None,
) -> list[int]:
    """Writes and syncs a file; returns the CRC-32 of each of its blocks.

    Args:
        body: all of the tensors' bytes as they are in the file, where they lie together in host memory.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    with open(path, "wb", buffering=0) as file:
        sums = stream_tensors(file, tensors, metadata, body)
        os.fsync(file.fileno())
    return sums


def stream_tensors(
    file: IO[bytes],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    body: Tensor | None = None,
) -> list[int]:
    """Writes the file's bytes into an open file, and syncs nothing; otherwise as ``write_tensors``."""
    with Checksums() as sums:
        head = header(tensors, metadata)
        for piece in pieces(tensors, head) if body is None else (memoryview(head), *_row_major(body)):
            sums.add(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
    return sums.sums


def pieces(tensors: Mapping[str, Tensor], head: bytes) -> Iterator[memoryview]:
    """The bytes of the file in order: large row-major tensors as they lie in host memory, others in copied pieces."""
    gathered = bytearray(head)
    for _, tensor in in_file_order(tensors):
        for part in _row_major(tensor):
            if len(part) < PIECE // 4:
                gathered += part
                if len(gathered) < PIECE:
                    continue
            if gathered:
                yield memoryview(gathered)
                gathered = bytearray()
            if len(part) >= PIECE // 4:
                yield part
    if gathered:
        yield memoryview(gathered)


def _row_major(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        flat = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        yield from (flat[i : i + 16 * PIECE] for i in range(0, len(flat), 16 * PIECE))
    elif tensor.nbytes <= PIECE or tensor.dim() == 0:
        yield from _row_major(tensor.cpu().contiguous())
    elif tensor.shape[0] == 1:
        yield from _row_major(tensor[0])
    else:
        rows = max(PIECE * tensor.shape[0] // tensor.nbytes, 1)
        for part in tensor.split(rows):
            yield from _row_major(part)


class Checksums:
    """CRC-32 of each block of a stream, computed in a thread while it is written (zlib releases the interpreter)."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self._room = BLOCK
        self._waiting: queue.Queue[memoryview | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Checksums:
        try:
            assert self._thread is not None
            start_thread(self._thread)
        except (RuntimeError, MemoryError):
            self._thread = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def add(self, piece: memoryview) -> None:
        """The stream's next bytes, which must not change before the end."""
        if self._thread is None:
            self._sum(piece)
        else:
            self._waiting.put(piece)

    def _run(self) -> None:
        while (piece := self._waiting.get()) is not None:
            self._sum(piece)

    def _sum(self, piece: memoryview) -> None:
        while len(piece):
            if self._room == BLOCK:
                self.sums.append(0)
            part = piece[: self._room]
            self.sums[-1] = zlib.crc32(part, self.sums[-1])
            self._room = self._room - len(part) or BLOCK
            piece = piece[len(part) :]


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """A file's tensors by name, in a read-only mapping; read with ``get``."""

    path: Path
    entries: Mapping[str, Any]
    data: memoryview

    def get(self, name: str, dtype: torch.dtype | None = None, shape: list[int] | None = None) -> Tensor:
        """A tensor that lies in the file: copy it before anything is written to it.

        Args:
            dtype, shape: where the file holds its plain bytes.
        """
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        dtype, shape = dtype or _BY_NAME[entry["dtype"]], entry["shape"] if shape is None else shape
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.data[begin:end], dtype=dtype).reshape(shape)


def open_tensors(path: Path, nbytes: int, sums: list[int]) -> TensorFile:
    """Opens a file that holds exactly what was written.

    Args:
        nbytes, sums: its size, and the checksums that ``write_tensors`` gave.

    Raises:
        TornError: it is missing, cut off, changed, or no such file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(4)
            if size != nbytes:
                raise TornError(f"{path.name} has {size} bytes, and {nbytes} were written{_pickle(start)}")
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise TornError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    wrong = next(
        (i for i, wanted in enumerate(sums) if zlib.crc32(content[i * BLOCK : (i + 1) * BLOCK]) != wanted), None
    )
    if wrong is not None or len(sums) != math.ceil(nbytes / BLOCK):
        begin = (wrong or 0) * BLOCK
        inside = f"the checksum of its bytes {begin} to {min(begin + BLOCK, nbytes)} is another"
        raise TornError(f"{path.name} was changed: {inside}{_pickle(start)}")
    return _read_header(path, content)


def open_tensor_file(path: Path) -> TensorFile:
    """Opens a file whose bytes were checked before, or are not.

    Raises:
        TornError: it is missing, or no file of tensors.
    """
    try:
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise TornError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _read_header(path, content)


def _read_header(path: Path, content: memoryview) -> TensorFile:
    """The tensors of a mapped file; every range of bytes lies in the file and is as long as its shape says."""
    length = int.from_bytes(content[:8], "little")
    try:
        if 8 + length > len(content):
            raise ValueError("its header ends behind its end")
        entries = json.loads(bytes(content[8 : 8 + length]))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            shape, element = entry["shape"], _BY_NAME[entry["dtype"]].itemsize
            if any(type(value) is not int or value < 0 for value in (begin, end, *shape)):
                raise ValueError(f"{name!r:.80} has no proper shape and range")
            if end > len(content) - 8 - length or end - begin != math.prod(shape) * element or begin % element:
                raise ValueError(f"{name!r:.80} is not as long as its shape says, or not in the file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TornError(f"{path.name} is no file of tensors: {type(error).__name__}: {error}") from error
    return TensorFile(path=path, entries=entries, data=content[8 + length :])


def _pickle(start: bytes) -> str:
    """What the first bytes give away."""
    return "; it is a pickle, which can hold code, and is never opened" if looks_like_pickle(start) else ""


def looks_like_pickle(start: bytes) -> bool:
    """Whether a file's first bytes are those of a pickle, or of the zip archive that ``torch.save`` puts one into."""
    return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))
