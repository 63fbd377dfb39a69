"""A real budget for this process on a CPU: RLIMIT_DATA, over which an allocation fails with an ordinary error.

Freed blocks go back to the system only under a fixed mmap threshold, which glibc reads at the start of a process:
``ENVIRONMENT`` must be set by whoever starts it. Not counted by the limit: shared mappings.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    "LRU_CACHE_CAPACITY": "16",
}
"""For the child that is limited. With glibc's moving threshold, freed blocks stay in the heap, whose gaps serve no
larger block and count in full: with one of 128 KiB a net of small tensors (latentsync/tiny) lost 60 MiB to them within
four windows, with this one 12 MiB. A second arena is a second heap with gaps. With oneDNN's cache of compiled kernels,
a net of many different convolutions holds memory that is no tensor (gpt_sovits/tiny: 140 MiB). ``LRU_CACHE_CAPACITY``
bounds the second cache of such kernels, torch's own (ideep), which otherwise keeps 1024 of each kind. A matrix product
in bf16 of a new shape adds 267 KiB to it, so a T5 of four layers with varied lengths grew by 90 MiB in 30 steps; with
16 entries it stays under 4.2 MiB, and repeated layers still find their kernels."""


def data_bytes() -> int:
    """This process's private writable memory (VmData), which RLIMIT_DATA limits."""
    return _status("VmData")[0]


def resident_bytes() -> int:
    """This process's own bytes in memory: without pages of files, such as the code of libraries."""
    resident, of_files = _status("VmRSS", "RssFile")
    return resident - of_files


def peak_resident_bytes() -> int:
    """The most of ``resident_bytes`` since the start or ``reset_peak``; pages of files counted as they are now."""
    peak, of_files = _status("VmHWM", "RssFile")
    return peak - of_files


def reset_peak() -> None:
    """Starts ``peak_resident_bytes`` anew."""
    Path("/proc/self/clear_refs").write_text("5")


class ProcessMemory:
    """What this process takes beyond what it held when this was made, as RLIMIT_DATA counts it.

    Resident bytes are another quantity: a library's reserved but untouched buffers are in the limit and not in memory,
    so that resident memory can grow by more than the limit allows.
    """

    def __init__(self) -> None:
        self.resident_before = resident_bytes()
        self._before = data_bytes()
        self._unused: mmap.mmap | None = None
        self.reset_peak()

    def held(self) -> int:
        """Bytes that are held now."""
        return data_bytes() - self._before

    def peak(self) -> int:
        """The most bytes that were held since the last ``reset_peak``; where files or memory of other processes were
        mapped and unmapped meanwhile, an upper bound. Never more than the limit."""
        most, size, data = _status("VmPeak", "VmSize", "VmData")
        others = max(size - data - self._others, 0)
        grown = max(self._data + most - self._size - others, data) - self._before
        allowed = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return grown if allowed == resource.RLIM_INFINITY else min(grown, allowed - self._before)

    def reset_peak(self) -> None:
        """Starts ``peak`` anew.

        The kernel keeps no peak of VmData, and never lowers that of all addresses (VmPeak). Addresses that cannot be
        accessed raise VmSize to VmPeak without adding to VmData: what is taken from then on raises VmPeak by as much.
        """
        if self._unused is not None:
            self._unused.close()
            self._unused = None
        most, size = _status("VmPeak", "VmSize")
        if most > size:
            with suppress(OSError, ValueError):  # under a limit on addresses; the peak is then an upper bound
                self._unused = mmap.mmap(-1, most - size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        self._size, self._data = _status("VmSize", "VmData")
        self._others = self._size - self._data


@contextmanager
def small_stacks() -> Iterator[None]:
    """Threads that are started inside have a stack of 512 KiB; the system's default of 8 MiB would count in full."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


STACK_BYTES, THREAD_BYTES = 512 << 10, 4 << 20
"""Of a thread's stack; and what a thread takes to begin: that, and an arena of Python's allocator, which has 1 MiB."""


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread with a small stack, where the limits on this process leave room for it.

    A thread that finds memory for its stack and none for its first call ends at once, and ``Thread.start`` then waits
    for it without end (Python 3.11). And a library's variables of a thread are made where that thread uses them first:
    where there is no memory for them, the dynamic linker ends the process. So torch's are made before this returns.

    Raises:
        RuntimeError: the system starts none, or there is too little room under RLIMIT_DATA or RLIMIT_AS.
    """
    for kind, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        allowed = resource.getrlimit(kind)[0]
        if allowed != resource.RLIM_INFINITY and allowed - _status(name)[0] < THREAD_BYTES:
            raise RuntimeError("no memory for a thread")
    run, prepared = thread.run, threading.Event()

    def prepare_and_run() -> None:
        try:
            _make_thread_variables()
        finally:
            prepared.set()
        run()

    thread.run = prepare_and_run  # type: ignore[method-assign]
    with lifted(), small_stacks():  # another thread may take what was free a moment ago
        thread.start()
        prepared.wait()


def _make_thread_variables() -> None:
    """Uses torch, and an exception of C++, in this thread for the first time."""
    if (torch := sys.modules.get("torch")) is not None:
        float(torch.ones(()))
        with suppress(RuntimeError):
            torch.empty(-1)


class _Limit:
    """The limit of this process, for all of its threads."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        """What holds outside of ``lifted``; None: no limit of memfit's."""
        self._lifts = 0
        self._lock = threading.Lock()

    def set(self, allowed: int | None) -> None:
        with self._lock:
            self.bytes = allowed
            self._apply()

    def lift_once(self, number: int) -> None:
        with self._lock:
            self._lifts += number
            if self.bytes is not None:
                self._apply()

    def _apply(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        allowed = hard if self.bytes is None or self._lifts else self.bytes
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


_limit = _Limit()


def limit(budget: int) -> int:
    """Lets this process grow by ``budget`` bytes and no more; gives what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = data_bytes()
    _limit.set(before + budget)
    return before


def lift() -> None:
    """Takes the limit away."""
    _limit.set(None)


@contextmanager
def lifted() -> Iterator[None]:
    """No limit inside, in any thread: what notes a memory failure, and puts back what was done, takes memory itself.
    Where there is none, Python raises whatever it comes to, such as a SystemError in place of a MemoryError."""
    _limit.lift_once(1)
    try:
        yield
    finally:
        _limit.lift_once(-1)


def is_memory_failure(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, here or on another rank."""
    from memfit.engine import collectives

    return collectives.is_memory_failure(error)


_STATUS_BYTES = 1 << 16
"""More than the status of a process has."""


def _status(*names: str) -> list[int]:
    """Bytes of these lines of the process's status. Three calls of the system: ``Path.read_text`` makes seven."""
    descriptor = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, _STATUS_BYTES).decode()
    finally:
        os.close(descriptor)
    try:
        return [int(text[text.index(f"\n{name}:") :].split(None, 2)[1]) * 1024 for name in names]
    except ValueError:
        raise OSError(f"/proc/self/status lacks one of {', '.join(names)}") from None
