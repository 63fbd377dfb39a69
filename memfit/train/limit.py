"""A real budget for this process on a CPU: RLIMIT_DATA, over which an allocation fails with an ordinary error.

Freed blocks go back to the system only under a fixed mmap threshold, which glibc reads at the start of a process:
``ENVIRONMENT`` must be set by whoever starts it. Not counted by the limit: shared mappings.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}
"""For the child that is limited. With glibc's moving threshold, freed blocks stay in the heap; with oneDNN's cache of
compiled kernels, a net of many different convolutions holds memory that is no tensor (gpt_sovits/tiny: 140 MiB)."""


def data_bytes() -> int:
    """This process's private writable memory (VmData), which RLIMIT_DATA limits."""
    return _status("VmData")


def resident_bytes() -> int:
    """This process's own bytes in memory: without pages of files, such as the code of libraries."""
    return _status("VmRSS") - _status("RssFile")


def peak_resident_bytes() -> int:
    """The most of ``resident_bytes`` since the start or ``reset_peak``; pages of files counted as they are now."""
    return _status("VmHWM") - _status("RssFile")


def mapped_bytes() -> int:
    """This process's addresses (VmSize): its private memory, touched or not, and what it maps of files."""
    return _status("VmSize")


def peak_mapped_bytes() -> int:
    """The most of ``mapped_bytes`` since the start. Its growth is that of ``data_bytes`` while no library is loaded and
    no thread starts: unlike the resident bytes it counts what RLIMIT_DATA counts, memory that was never touched too."""
    return _status("VmPeak")


def reset_peak() -> None:
    """Starts ``peak_resident_bytes`` anew."""
    Path("/proc/self/clear_refs").write_text("5")


def limit(budget: int) -> int:
    """Lets this process grow by ``budget`` bytes and no more; gives what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return before


def lift() -> None:
    """Takes the limit away."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_memory_failure(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, the CPU allocator's or CUDA's."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "could not create a memory" in str(error)
    )


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
