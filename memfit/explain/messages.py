"""Reads the message of an allocator that refused a request, as PyTorch 1.10 to 2.14 write it.

Sources: c10/cuda/CUDACachingAllocator.cpp (1.10: "already allocated; ... free; ... reserved in total by PyTorch";
2.0: "has a total capacty of"; 2.1 on: "has a total capacity of ... of which ... is free", "Process 1234 has ... memory
in use"), aten/src/ATen/mps/MPSAllocator.mm, c10/core/impl/alloc_cpu.cpp, c10/xpu/XPUCachingAllocator.cpp, and the
kernel's mm/oom_kill.c. Each number is looked for alone, so that a version that adds or moves one is still read.
"""

from __future__ import annotations

import re

from memfit.explain.evidence import SIZE, MemoryFailure, parse_size

_TRIED = rf"[Tt]ried to allocate {SIZE}"
STARTS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("cuda", r"CUDA out of memory\b"),
        ("hip", r"HIP out of memory\b"),
        ("xpu", r"XPU out of memory\b"),
        ("mps", r"MPS backend out of memory"),
        ("cpu", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|not enough memory: you tried"),
        ("cpu", r"Unable to allocate \d[\d.]* [KMGT]?i?B(?:ytes)? for an array|std::bad_alloc"),
        ("cpu", r"^(?:\w+\.)*MemoryError\b|OSError: \[Errno 12\]|Cannot allocate memory"),
        ("library", r"CUDA(?: driver)? error: out of memory|HIP error: out of memory|cudaErrorMemoryAllocation"),
        ("library", r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"),
        ("library", r"Cuda failure(?: \d+)? '?out of memory|torch\.(?:cuda\.)?OutOfMemoryError"),
        (
            "shared_memory",
            r"insufficient shared memory|out of shared memory|unable to (?:open|mmap|allocate) shared memory",
        ),
        ("host", r"[Oo]ut of memory: Kill(?:ed)? process \d+|oom-kill:|oom_reaper: reaped process|OOMKilled"),
        ("host", r"ray\.exceptions\.OutOfMemoryError|[Nn]ode (?:was|running) low on (?:memory|resource: memory)"),
        ("host", r"Detected \d+ oom[-_]kill event|Exceeded (?:job|step) memory limit"),
        ("host", r"exit(?:ed with)? code:? 137|exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|by signal: Killed"),
        ("host", r"^Killed\s*$|^\s*.*: line \d+: +\d+ Killed\b"),
    )
)
"""How each kind of refusal begins; of a line that fits several, the first."""


_ANY = re.compile(r"memory|alloc|kill|oom|exit|errno", re.IGNORECASE)
"""A word that every refusal holds."""


def kind_of(line: str) -> str | None:
    """The allocator whose refusal this line states; None where it states none."""
    if _ANY.search(line) is None:
        return None
    return next((name for name, pattern in STARTS if pattern.search(line)), None)


def read_message(text: str, allocator: str) -> MemoryFailure:
    """The numbers of one refusal.

    Args:
        text: from the line where it begins on, at most to the next one.
    """
    if allocator in ("cuda", "hip", "xpu"):
        return _device_message(text, allocator)
    if allocator == "mps":
        return _mps_message(text)
    if allocator == "host":
        return _host_message(text)
    requested = _size(_TRIED, text) or _size(rf"Unable to allocate {SIZE}", text)
    return MemoryFailure(allocator=allocator, message=first_line(text), requested=requested)


def _device_message(text: str, allocator: str) -> MemoryFailure:
    allocated = _size(rf"{SIZE} already allocated", text) or _size(rf"allocated memory {SIZE} is allocated by", text)
    in_total = _size(rf"{SIZE} reserved in total", text)
    unallocated = _size(rf"{SIZE} is reserved by PyTorch but unallocated", text)
    if unallocated is None and in_total is not None and allocated is not None:
        unallocated = max(in_total - allocated, 0)
    device = re.search(r"GPU (\d{1,9})", text)
    others = re.findall(rf"[Pp]rocess (\d{{1,15}}) has {SIZE} memory in use", text)
    return MemoryFailure(
        allocator=allocator,
        message=first_line(text),
        requested=_size(_TRIED, text),
        device=int(device[1]) if device else None,
        capacity=_size(rf"{SIZE} total capacity", text) or _size(rf"total capaci?ty of {SIZE}", text),
        free=_first_size((rf"{SIZE} free", rf"of which {SIZE} is free"), text),
        process=_size(rf"this process has {SIZE} memory in use", text),
        allocated=allocated,
        unallocated=unallocated,
        private_pools=_size(rf"{SIZE} allocated in private pools", text),
        allowed=_size(rf"{SIZE} allowed", text),
        others=tuple((int(number), parse_size(value, unit)) for number, value, unit in others),
    )


def _mps_message(text: str) -> MemoryFailure:
    allocated, other = _size(rf"MPS allocated: {SIZE}", text), _size(rf"other allocations: {SIZE}", text)
    allowed = _size(rf"max allowed: {SIZE}", text)
    free = None if allowed is None or allocated is None else max(allowed - allocated - (other or 0), 0)
    return MemoryFailure(
        allocator="mps", message=first_line(text), requested=_size(_TRIED, text), allocated=allocated,
        unallocated=None, allowed=allowed, free=free,
    )  # fmt: skip


def _host_message(text: str) -> MemoryFailure:
    """A process that the kernel ended; ``anon-rss`` is what it held."""
    held = re.search(r"anon-rss:(\d{1,15})\s?kB", text)
    return MemoryFailure(
        allocator="host", message=first_line(text), allocated=int(held[1]) * 1024 if held else None
    )  # fmt: skip


def first_line(text: str) -> str:
    """The first line that says something, without the rest."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return parse_size(match[1], match[2]) if match else None


def _first_size(patterns: tuple[str, ...], text: str) -> int | None:
    return next((nbytes for pattern in patterns if (nbytes := _size(pattern, text)) is not None), None)
