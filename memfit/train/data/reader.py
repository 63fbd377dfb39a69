"""BatchReader: reads and collates the samples of a micro-batch, in any process, from random streams of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from memfit.apply.job_objects import JobCall
from memfit.errors import InputError, describe, how_it_left, line_of_job, message_of, mistake_in_job
from memfit.train.data.stream import StreamSamples, StreamState
from memfit.train.data.transport import Packed, SharedSlots, pack
from memfit.train.launch import memory_limit
from memfit.train.launch.forked_copy import ForkedCopyGuard
from memfit.train.loop.rng import COLLATE, seed_stream

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A micro-batch to read."""

    window: int
    ids: Ids
    slot: int | None = None
    """Of the shared memory, for its bytes."""
    stream: StreamState | None = None
    """The state that a stream begins with."""


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A batch that a worker read."""

    packed: Packed
    stream: StreamState | None = None
    """The newest state of a stream after it."""


@dataclass(kw_only=True)
class BatchReader:
    """Reads a job's samples. What it draws belongs to the window and the first sample, not to a process; what a stream
    draws, to the sample's position."""

    samples: Any
    """The data set, by index, or ``StreamSamples``."""
    collate: Callable[[Sequence[Any]], Any]
    seed: int

    def read(self, window: int, ids: Ids) -> Any:
        """The batch of these samples, on the host.

        Raises:
            InputError: the data set has no such sample, and the reason is not in the job's own code.
        """
        with ForkedCopyGuard():
            if not isinstance(self.samples, StreamSamples):
                seed_stream(self.seed, window, ids[0], COLLATE)
            samples = self._samples(ids)
            if isinstance(self.samples, StreamSamples):
                seed_stream(self.seed, window, ids[0], COLLATE)
            return self.collate(samples)

    def _samples(self, ids: Ids) -> list[Any]:
        position = ids[0]
        try:
            return [self.samples[position := i] for i in ids]
        except Exception:
            seen = f"dataset()[{position}]"
            write = "write dataset(self) -> samples by index, from 0 to one less than their number"
            if isinstance(self.samples, StreamSamples):
                seen, write = f"sample {position} of the stream", "write __iter__ to yield samples until it returns"
            with JobCall(seen, write):
                raise

    def load(self, state: StreamState | None) -> None:
        """Goes on in a stream from this state."""
        if state is not None and isinstance(self.samples, StreamSamples):
            self.samples.load(state)

    @property
    def stream(self) -> StreamState | None:
        """The newest state of a stream; None where the data set has none."""
        return self.samples.newest_state() if isinstance(self.samples, StreamSamples) else None


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """What went wrong in a worker, to be raised in the process that trains."""

    seen: str
    why: str
    write: str
    out_of_memory: bool = False

    def raise_here(self) -> NoReturn:
        """Raises what the failure would have been without a worker.

        Raises:
            InputError: a mistake in the job or its data.
            MemoryError: memory ran out in the worker.
        """
        if self.out_of_memory:
            raise MemoryError(self.why)
        raise InputError(self.seen, self.why, self.write)


class WorkerDataset:
    """What the DataLoader of torch indexes in its workers: a request gives a packed batch, or a failure."""

    def __init__(self, reader: BatchReader, slots: SharedSlots) -> None:
        self._reader, self._slots = reader, slots

    def __getitem__(self, request: BatchRequest) -> Delivered | ReadFailure:
        try:
            self._reader.load(request.stream)
            batch = self._reader.read(request.window, request.ids)
        except Exception as error:
            return read_failure(error)
        except BaseException as error:
            return ended_in_worker(error)
        try:
            return Delivered(packed=pack(batch, self._slots, request.slot), stream=self._reader.stream)
        except Exception as error:
            return cannot_be_sent(error)


def ended_in_worker(error: BaseException) -> ReadFailure:
    """Code of the job that would end the process, by what is no ``Exception``."""
    return ReadFailure(
        seen=line_of_job(traceback.walk_tb(error.__traceback__)) or "the job",
        why=f"it {how_it_left(error)}, which ends the training before its last window",
        write="raise another exception there, or return, and go on with --resume",
    )


def read_failure(error: Exception) -> ReadFailure:
    """An exception while samples are read or collated."""
    if memory_limit.is_memory_failure(error):
        return ReadFailure(seen="", why=message_of(error), write="", out_of_memory=True)
    mistake = error if isinstance(error, InputError) else mistake_in_job(error)
    if mistake is not None:
        return ReadFailure(seen=mistake.seen, why=mistake.why, write=mistake.write)
    return ReadFailure(
        seen="dataset() or collate()", why=describe(error), write="mend the data, or write --workers 0 for a traceback"
    )


def cannot_be_sent(error: Exception) -> ReadFailure:
    """A batch that holds what no other process can have."""
    return ReadFailure(
        seen="collate()",
        why=f"its batch cannot leave a worker: {describe(error)}",
        write="give tensors, arrays, numbers and texts, or write --workers 0",
    )
