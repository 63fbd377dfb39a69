"""How many workers read a run's data, how far ahead, and in how much memory: by what reading a sample costs here."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from memfit.device.hardware.process_limits import available_cores
from memfit.nested_tensors import tensors_in
from memfit.train.data.reader import BatchReader, Ids
from memfit.train.data.stream import StreamSamples
from memfit.train.data.transport import pack

LEAST_SECONDS = 2e-3
"""A micro-batch that is read in less is read in the process that trains: handing it over would take as long."""
READS, QUICK = 5, 0.1
"""Measured reads, and the seconds below which more than one is measured."""
MOST_WORKERS = 8
"""Workers that are taken without being asked for."""
WAITS = 0.5
"""Reading that uses a core for less of its time than this waits for a disk or a network."""
AHEAD = 2
"""Batches that each worker has ready, as in torch's DataLoader."""
DEFAULT_BYTES = 1 << 30
"""Host memory for batches of a rank, where the plan does not say."""
MARGIN = 1.25
"""Batches may be so much larger than the first sample tells."""


@dataclass(frozen=True, kw_only=True)
class ReadingCost:
    """What reading the first sample as a batch took."""

    seconds: float
    cpu_seconds: float
    nbytes: int
    """Of the batch; 0 where it cannot be sent from a worker."""
    reason: str = ""
    """Why no worker can read, where that is seen."""
    checksum: int = 0
    """Of the bytes of the batch's tensors."""
    repeats: bool = False
    """Whether the batch was read more than once, and came with the same bytes."""


@dataclass(frozen=True, kw_only=True)
class LoadingChoice:
    """How a rank's batches are read."""

    workers: int
    ahead: int = AHEAD
    kept: int = 2
    slot_bytes: int = 0
    line: str = ""
    """What is said; empty: nothing."""


def reading_cost(reader: BatchReader, ids: Ids, threads: Collection[int | None]) -> ReadingCost:
    """Reads these samples once with cold caches, and then measures: the fastest of a few, where they are quick.

    What a busy machine adds to one of them says nothing of the data.

    Args:
        threads: that this process had before the data set was made.
    """
    begin = time.perf_counter()
    batch = reader.read(0, ids)
    seconds, cpu = time.perf_counter() - begin, 0.0
    first_checksum, read_again = _checksum(batch), False
    for number in range(READS):
        if seconds < 1.0 if number == 0 else seconds < QUICK:
            begin, cpu_before = time.perf_counter(), time.thread_time()
            batch, read_again = reader.read(0, ids), True
            taken = time.perf_counter() - begin, time.thread_time() - cpu_before
            seconds, cpu = taken if number == 0 else min((seconds, cpu), taken)
    own = [
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in threads and not thread.name.startswith("memfit-")
    ]
    if own:
        reason = f"the data set has threads of its own ({', '.join(own[:3])}), which a worker has not"
        return ReadingCost(seconds=seconds, cpu_seconds=cpu, nbytes=0, reason=reason)
    if any(tensor.device.type != "cpu" for tensor in tensors_in(batch)):
        return ReadingCost(seconds=seconds, cpu_seconds=cpu, nbytes=0, reason="its batches are on a device")
    try:
        nbytes = pack(batch, None, None).nbytes
    except Exception:
        return ReadingCost(seconds=seconds, cpu_seconds=cpu, nbytes=0, reason="its batches cannot be pickled")
    checksum = _checksum(batch)
    repeats = read_again and checksum == first_checksum
    return ReadingCost(seconds=seconds, cpu_seconds=cpu, nbytes=nbytes, checksum=checksum, repeats=repeats)


def _checksum(batch: Any) -> int:
    """Of the bytes of a batch's tensors; 0 where they cannot be had."""
    if any(tensor.device.type != "cpu" for tensor in tensors_in(batch)):
        return 0
    try:
        return zlib.crc32(b"".join(pack([tensor.detach() for tensor in tensors_in(batch)], None, None).loose))
    except Exception:
        return 0


def choose_loading(
    asked: int | None,
    cost: ReadingCost,
    reader: BatchReader,
    *,
    batch_units: float,
    window_parts: int,
    turns: int,
    ranks_here: int,
    budget: int,
) -> LoadingChoice:
    """How many workers, and their memory.

    Args:
        asked: ``--workers``; None: by the cost.
        batch_units: how many times what was measured the largest micro-batch is.
        window_parts: micro-batches of a window.
        turns: how often a window reads each.
        ranks_here: processes of the run on this machine.
        budget: bytes for the batches of a rank.
    """
    workers = _default(cost, batch_units, ranks_here) if asked is None else asked
    if not workers:
        return LoadingChoice(workers=0)
    line = ""
    if isinstance(reader.samples, StreamSamples) and workers > 1:
        workers = 1
        line = "the data set can only be iterated: 1 worker reads it, in its order" if asked is not None else ""
    kept = min(window_parts, max(budget // max(_batch_bytes(cost, batch_units), 1) - workers, 2)) if turns > 1 else 2
    ahead = AHEAD
    if (workers * ahead + kept) * _batch_bytes(cost, batch_units) > budget:
        ahead = 1
    if asked is None:
        workers = max(min(workers, int(budget // _batch_bytes(cost, batch_units)) - kept), 1)
        milliseconds = cost.seconds * batch_units * 1e3
        count = f"{workers} worker{'' if workers == 1 else 's'}"
        line = f"{count} a rank read{'s' if workers == 1 else ''} the data: a micro-batch takes {milliseconds:.3g} ms"
    elif cost.reason:
        line = f"--workers {asked}, though {cost.reason}"
    return LoadingChoice(
        workers=workers,
        ahead=ahead,
        kept=kept,
        slot_bytes=int(min(_batch_bytes(cost, batch_units), budget // (workers * ahead + kept))),
        line=line,
    )


def _default(cost: ReadingCost, batch_units: float, ranks_here: int) -> int:
    """Workers that are taken without being asked for: none where reading is quick or cannot leave the process."""
    if cost.reason or cost.seconds * batch_units < LEAST_SECONDS or not hasattr(os, "fork"):
        return 0
    cores = available_cores() // max(ranks_here, 1)
    waits = cost.cpu_seconds < WAITS * cost.seconds
    return min(max(cores - 1, 1 if waits else 0), MOST_WORKERS)


def _batch_bytes(cost: ReadingCost, batch_units: float) -> int:
    """Shared memory for the largest batch, as the first sample tells it."""
    return int(cost.nbytes * batch_units * MARGIN) + (64 << 10)
