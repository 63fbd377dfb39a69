"""What a CPU really allocated: the profiler's allocator events of the code inside, phase by phase.

The profiler sees every allocation of its own thread (a CPU backward runs in the caller's thread) and of the threads
that collectives run in. Blocks from before the start are not counted: pass their bytes as ``base``. What the transport
of a process group takes for itself, in its own threads or inside of a collective's call, is kept apart.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
"""Kineto, below the profiler, else tells of its stages on standard error. Read when the first profile begins."""

Record = tuple[int, int, int, int]
"""Time, bytes (freed: negative), address, number of the operator call it lies in (0: none; TRANSPORT: a collective)."""
TRANSPORT = -1
Phase = tuple[int, int, str]
"""Start, end, name."""

_PHASE = "memfit::phase::"
_COLLECTIVES = ("c10d::", "gloo:")
"""Calls of a process group, and what its own threads run."""
_SUBCLASS = "PythonSubclass"
"""What the profiler calls the handling of an operator by a kind of tensor, such as a DTensor, which runs others."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """Peaks of one phase in bytes, with and without blocks that live only inside one operator call."""

    allocated_bytes: int
    without_scratch_bytes: int
    transport_bytes: int = 0
    """The most that collectives held for themselves, which the other two are without."""


class AllocatorEvents:
    """Use as a context around real work on the CPU; ``phase(name)`` inside; then ``peaks()``.

    Args:
        base: bytes of tensors that were there before.
    """

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self._cached: tuple[Collection[str], list[Record], list[Phase]] | None = None
        # Without acc_events, some versions of torch warn that a second cycle clears the first; there is one alone.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    def __enter__(self) -> AllocatorEvents:
        self._profile.__enter__()
        assert self._profile.profiler is not None
        # With it, torch makes a Python object of every event at the end, which takes as long as a small step.
        self._profile.profiler.acc_events = False
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose allocations belong to this phase; one name may be used several times."""
        with record_function(_PHASE + name):
            yield

    def scratch(self) -> dict[str, int]:
        """By phase, the bytes at its peak beyond what was alive before it or is alive after it."""
        records, phases = self._read(())
        live, times = _live(records, set(), self.base), [record[0] for record in records]
        extra_bytes = {}
        for start, end, name in phases:
            inside = live[bisect_left(times, start) : bisect_right(times, end) + 1]
            extra_bytes[name] = max(inside) - max(inside[-1], inside[0])
        return extra_bytes

    def peaks(self, operators: Collection[str] = ()) -> dict[str, MeasuredPeak]:
        """Peaks by phase.

        Args:
            operators: names (``aten::addmm``) of the calls whose inner blocks are scratch; the outermost one counts.
        """
        records, phases = self._read(operators)
        return _peaks(records, phases, self.base)

    def _read(self, operators: Collection[str]) -> tuple[list[Record], list[Phase]]:
        if self._cached and self._cached[0] == operators:
            return self._cached[1], self._cached[2]
        profiler = self._profile.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        records: list[Record] = []
        phases: list[Phase] = []
        stack = [(event, 0) for event in profiler.kineto_results.experimental_event_tree()]
        calls = 0
        while stack:
            event, call = stack.pop()
            if event.name.startswith(_PHASE):
                phases.append((event.start_time_ns, event.end_time_ns, event.name.removeprefix(_PHASE)))
            elif event.name == "[memory]":
                fields: Any = event.extra_fields
                if fields.device.type == "cpu":
                    records.append((event.start_time_ns, fields.alloc_size, fields.ptr, call))
            elif event.name.startswith(_COLLECTIVES):
                call = TRANSPORT
            elif not call and event.name in operators and all(child.name != _SUBCLASS for child in event.children):
                calls += 1
                call = calls
            stack.extend((child, call) for child in event.children)
        records.sort()
        phases.sort()
        self._cached = (operators, records, phases)
        return records, phases


def _peaks(records: list[Record], phases: list[Phase], base: int) -> dict[str, MeasuredPeak]:
    times = [record[0] for record in records]
    transport = _of_the_transport(records)
    with_scratch = _live(records, transport, base)
    without = _live(records, _scratch(records) | transport, base)
    apart = _live(records, set(range(len(records))) - transport, 0)
    peaks: dict[str, MeasuredPeak] = {}
    for start, end, name in phases:
        first, last = bisect_left(times, start), bisect_right(times, end)
        before = peaks.get(name, MeasuredPeak(allocated_bytes=0, without_scratch_bytes=0))
        peaks[name] = MeasuredPeak(
            allocated_bytes=max(before.allocated_bytes, *with_scratch[first : last + 1]),
            without_scratch_bytes=max(before.without_scratch_bytes, *without[first : last + 1]),
            transport_bytes=max(before.transport_bytes, *apart[first : last + 1]),
        )
    return peaks


def _live(records: list[Record], left_out: set[int], base: int) -> list[int]:
    """Live bytes before the first record and after each; frees of earlier blocks count only with a base.

    A block whose address is given out again was freed by a thread that was not watched then.
    """
    live = [base]
    known: dict[int, int] = {}
    for position, (_, nbytes, ptr, _) in enumerate(records):
        change = 0
        if nbytes > 0:
            change -= known.pop(ptr, 0)
        if position not in left_out and (nbytes > 0 or ptr in known or base):
            change += nbytes
        if nbytes > 0:
            known[ptr] = 0 if position in left_out else nbytes
        else:
            known.pop(ptr, None)
        live.append(live[-1] + change)
    return live


def _of_the_transport(records: list[Record]) -> set[int]:
    """Positions of blocks that a collective allocated, wherever they are freed."""
    held: dict[int, int] = {}
    positions: set[int] = set()
    for position, (_, nbytes, ptr, call) in enumerate(records):
        if nbytes > 0:
            held.pop(ptr, None)
            if call == TRANSPORT:
                held[ptr] = position
                positions.add(position)
        elif held.pop(ptr, None) is not None:
            positions.add(position)
    return positions


def _scratch(records: list[Record]) -> set[int]:
    """Positions of blocks allocated and freed inside the same operator call."""
    opened: dict[int, tuple[int, int]] = {}
    inside: set[int] = set()
    for position, (_, nbytes, ptr, call) in enumerate(records):
        if nbytes > 0:
            opened[ptr] = (position, call)
        elif ptr in opened:
            start, opener = opened.pop(ptr)
            if call > 0 and opener == call:
                inside |= {start, position}
    return inside
