"""What a file says about memory, as plain data: failures, an allocator's state, processes, readings step by step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfit.sizes import format_size

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
SIZE = r"(\d{1,18}(?:\.\d{1,18})?)\s?([KMGT]i?B|bytes|[KMGT]|B)\b"
"""A number and its unit, as PyTorch's allocators, nvidia-smi and kernels write them."""


def parse_size(number: str, unit: str) -> int:
    """Bytes of a size in a message. PyTorch, NVML and the kernel count in powers of 1024, whatever unit they write."""
    letter = unit[0].lower()
    return round(float(number) * _BINARY["" if letter == "b" else letter])


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A line of a traceback."""

    file: str
    line: int
    function: str
    text: str = ""

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to Python or to an installed package."""
        path = self.file.replace("\\", "/")
        return bool(re.search(r"site-packages/|dist-packages/|/lib/python3|^<|^python3/|^\?\?$|/torch/csrc/", path))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True)
class MemoryFailure:
    """One allocation that failed, in the words of the allocator that refused it. None: it does not say."""

    allocator: str
    """cuda, hip, xpu, mps, cpu, library (cuBLAS, cuDNN, NCCL), shared_memory or host."""
    message: str
    requested: int | None = None
    device: int | None = None
    capacity: int | None = None
    free: int | None = None
    process: int | None = None
    """The process's bytes on the device, with what is not PyTorch's."""
    allocated: int | None = None
    unallocated: int | None = None
    """Reserved by PyTorch's allocator and not allocated."""
    private_pools: int | None = None
    """Allocated in the private pools of CUDA graphs."""
    allowed: int | None = None
    """A limit that the process set itself."""
    others: tuple[tuple[int, int], ...] = ()
    """(process id, bytes) of other processes on the device."""
    rank: int | None = None
    frames: tuple[Frame, ...] = ()
    """Of the traceback above the message, the outermost first."""
    step: int | None = None
    """The last step that the log names before the failure."""
    last_step: int | None = None
    """The last step that it names after the failure, where the run went on."""

    @property
    def reserved(self) -> int | None:
        """Bytes that PyTorch's allocator holds of the device."""
        if self.allocated is None or self.unallocated is None:
            return None
        return self.allocated + self.unallocated

    @property
    def outside(self) -> int | None:
        """The process's bytes that PyTorch's allocator does not hold: the context, libraries and NCCL."""
        if self.process is None or self.reserved is None:
            return None
        return max(self.process - self.reserved, 0)

    @property
    def foreign(self) -> int | None:
        """Bytes of the device that other processes hold."""
        if self.others:
            return sum(nbytes for _, nbytes in self.others)
        if self.capacity is None or self.free is None or self.process is None:
            return None
        return max(self.capacity - self.free - self.process, 0)

    @property
    def short(self) -> int | None:
        """Bytes that were missing. Of a limit below the card's size, what the limit leaves counts as free."""
        if self.requested is None:
            return None
        room = [self.free] if self.free is not None else []
        if self.allowed is not None and self.reserved is not None:
            room.append(max(self.allowed - self.reserved, 0))
        return max(self.requested - min(room), 0) if room else None

    @property
    def own_frame(self) -> Frame | None:
        """The innermost line of the person's own code."""
        return next((frame for frame in reversed(self.frames) if not frame.is_library), None)


@dataclass(frozen=True, kw_only=True)
class AllocatorState:
    """What PyTorch's caching allocator held at one moment."""

    device: int | None
    allocated: int
    reserved: int
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    requested: int | None = None
    """Bytes that were asked for; the rest of ``allocated`` is rounding."""
    largest_hole: int | None = None
    releasable: int | None = None
    """Bytes in segments without a live block, which empty_cache gives back."""
    ooms: int | None = None
    retries: int | None = None
    expandable: bool | None = None

    @property
    def unallocated(self) -> int:
        """Reserved and not allocated."""
        return max(self.reserved - self.allocated, 0)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What keeps bytes alive: a line of code or a module, with how much and in how many blocks."""

    where: str
    category: str
    bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class StepGrowth:
    """Bytes that grew over most of the readings.

    Attributes:
        of_host: whether they are the host's memory, and not the card's.
    """

    first: int
    last: int
    begin: int
    end: int
    unit: str = "step"
    holder: str | None = None
    of_host: bool = False

    @property
    def per_step(self) -> float:
        """Bytes a step."""
        return (self.end - self.begin) / max(self.last - self.first, 1)

    def __str__(self) -> str:
        held = f"; {self.holder} holds what was added" if self.holder else ""
        return (
            f"grew from {format_size(self.begin)} ({self.unit} {self.first}) to {format_size(self.end)} "
            f"({self.unit} {self.last}), {format_size(self.per_step)} a {self.unit}{held}"
        )


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """A card as nvidia-smi shows it."""

    index: int
    name: str
    used: int
    total: int
    processes: tuple[tuple[int, str, int | None], ...] = ()
    """(process id, name, bytes)"""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a file says."""

    kind: str
    """message, log, memory summary, memory snapshot, nvidia-smi or metrics"""
    failures: tuple[MemoryFailure, ...] = ()
    """Those that ended the run first, the earliest before the others."""
    state: AllocatorState | None = None
    alive: tuple[Holder, ...] = ()
    """The largest first."""
    categories: tuple[tuple[str, int], ...] = ()
    growth: StepGrowth | None = None
    readings: int = 0
    """Steps whose memory is known."""
    spike: str | None = None
    """A step that needed far more than the others, in words."""
    devices: tuple[DeviceUse, ...] = ()
    notes: tuple[str, ...] = ()
