"""BatchLoader: worker processes of torch's DataLoader that read the batches of a rank ahead of its window.

Which batches are read is the loop's own order, so that it does not depend on the number of workers. Batches of the
window at hand are kept until it ends: a window that is repeated, or whose turns read it again, does not read the data
again. Where the loop asks for another batch than the next one (a micro-batch was cut), the order begins anew there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from memfit.torch_compat.data_workers import leave_unwatched, shut_down, workers_of
from memfit.train.data.kept_batches import KeptBatches
from memfit.train.data.reader import BatchReader, BatchRequest, Ids, ReadFailure, WorkerDataset
from memfit.train.data.stream import MOST_STATES, StreamState
from memfit.train.data.transport import SharedSlots
from memfit.train.data.worker_process import STACK_SIGNAL, WorkerStart
from memfit.train.launch.memory_limit import small_stacks

_STACK_WITHIN = 0.5
"""Seconds in which a worker writes its stack."""
_DIES_WITHIN = 1.0
"""Seconds in which a worker that broke its connection is gone."""

PartsOf = Callable[[int], Sequence[Ids]]
"""The samples of each micro-batch of a window, of this rank."""


class WorkerDiedError(RuntimeError):
    """A worker ended by itself or was killed. The state of the training is whole."""


class BatchLoader:
    """Reads in ``workers`` processes, which are forked here.

    Args:
        reader: reads a batch.
        workers: processes, 1 or more.
        ahead: batches that each of them may have ready.
        kept: batches of the window at hand that stay.
        slot_bytes: shared memory for one batch; a larger one goes through a pipe.
        pins: whether the shared memory is pinned, for copies to a card, which hold one batch more.
    """

    def __init__(
        self, reader: BatchReader, workers: int, *, ahead: int, kept: int, slot_bytes: int, pins: bool = False
    ) -> None:
        self.workers, self.ahead = workers, ahead
        self._states: list[StreamState] = []
        self._slots = SharedSlots(workers * ahead + kept + pins, slot_bytes)
        self._order = RequestOrder(self._slots)
        self._stacks = tuple(os.memfd_create(f"memfit-worker-{number}") for number in range(workers))
        self._kept = KeptBatches(kept)
        self._wanted: list[Ids] = []
        self._wanted_of = -1
        with small_stacks(), _no_warning_of_cores():
            self._loader = self._make_loader(reader)
            self._batches: Iterator[Any] = iter(self._loader)
        leave_unwatched(self._batches)
        if pins:
            self._slots.pin()

    def _make_loader(self, reader: BatchReader) -> DataLoader[Any]:
        return DataLoader(
            WorkerDataset(reader, self._slots),  # type: ignore[arg-type]
            sampler=self._order,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            prefetch_factor=self.ahead,
            persistent_workers=True,
            worker_init_fn=WorkerStart(stacks=self._stacks),
            generator=torch.Generator(),
            multiprocessing_context="fork",
        )

    def follow(self, first: int, last: int, parts_of: PartsOf, stream: StreamState | None = None) -> None:
        """From now on the batches of windows [first, last) are read ahead, in the order of their micro-batches.

        Args:
            stream: the state that a stream begins with.
        """
        self._order.follow(first, last, parts_of, stream)
        self._states = [] if stream is None else [stream]
        self._begin()

    def wants(self, window: int, ids: Ids) -> None:
        """Notes a micro-batch of the window at hand that will be read; those are read next where the order begins
        anew."""
        if window != self._wanted_of:
            self._wanted, self._wanted_of = [], window
        self._wanted.append(ids)

    def state_before(self, position: int) -> StreamState | None:
        """The newest state of a stream at or before this position."""
        return max((s for s in self._states if s.position <= position), key=lambda s: s.position, default=None)

    def read(self, window: int, ids: Ids) -> Any:
        """The batch of these samples, on the host.

        Raises:
            InputError: a mistake in the data set or ``collate``, with its line.
            MemoryError: memory ran out in a worker.
            WorkerDiedError: a worker has ended.
        """
        kept = self._kept.get(window, ids)
        if kept is not None:
            return kept.batch
        if not self._order.expects(window, ids):
            self._order.begin_anew(window, [ids, *self._wanted_after(window, ids)])
            self._begin()
        with self._workers_may_die():
            delivered = next(self._batches)
        self._order.received()
        if isinstance(delivered, ReadFailure):
            delivered.raise_here()
        if delivered.stream is not None and delivered.stream not in self._states[-1:]:
            self._states = [*self._states[-MOST_STATES:], delivered.stream]
        batch = delivered.packed.unpack(self._slots)
        self._kept.keep(window, ids, batch)
        return batch

    def _begin(self) -> None:
        """Starts to read in the present order. What was being read is read to its end, and dropped."""
        with self._workers_may_die(), small_stacks():
            self._batches = iter(self._loader)

    def _wanted_after(self, window: int, ids: Ids) -> list[Ids]:
        """Micro-batches of the window that were asked for after the newest one with these samples."""
        if window != self._wanted_of or ids not in self._wanted:
            return []
        after = len(self._wanted) - self._wanted[::-1].index(ids)
        return list(dict.fromkeys(self._wanted[after:]))

    def stacks(self) -> list[str]:
        """Where each worker is now, as ``faulthandler`` writes it, the innermost call first."""
        for worker, descriptor in zip(workers_of(self._batches), self._stacks, strict=False):
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):
                os.kill(worker.pid, STACK_SIGNAL)
        time.sleep(_STACK_WITHIN)
        return [os.pread(descriptor, 1 << 16, 0).lstrip(b"\0").decode(errors="replace") for descriptor in self._stacks]

    def close(self) -> None:
        """Ends the workers, whatever they are at: they hold nothing that could be lost."""
        for worker in workers_of(self._batches):
            worker.kill()
        with contextlib.suppress(Exception):
            shut_down(self._batches)
        for descriptor in self._stacks:
            os.close(descriptor)
        self._stacks = ()

    @contextlib.contextmanager
    def _workers_may_die(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            dead = self._dead()
            if not dead:
                raise
            raise WorkerDiedError(dead) from error

    def _dead(self) -> str:
        """How a worker ended, in words; empty where all live."""
        until = time.monotonic() + _DIES_WITHIN
        while time.monotonic() < until:
            for number, worker in enumerate(workers_of(self._batches)):
                if worker.exitcode is not None:
                    return f"worker {number} of {self.workers} that read the data {_how(worker.exitcode)}"
            time.sleep(0.02)
        return ""


class RequestOrder:
    """The requests of a rank in the order of its training; what the DataLoader iterates as its sampler."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots
        self._first, self._last = 0, 0
        self._parts_of: PartsOf = lambda window: ()
        self._begin: tuple[int, Sequence[Ids]] = (0, ())
        self._stream: StreamState | None = None
        self._sent: deque[BatchRequest] = deque()
        """Requests whose batches have not come yet."""

    def follow(self, first: int, last: int, parts_of: PartsOf, stream: StreamState | None) -> None:
        """The windows [first, last), from the first micro-batch on."""
        self._last, self._parts_of, self._stream = last, parts_of, stream
        self.begin_anew(first - 1, ())

    def begin_anew(self, window: int, parts: Sequence[Ids]) -> None:
        """These micro-batches of the window, then the windows after it. The DataLoader must iterate anew."""
        for request in self._sent:
            if request.slot is not None:
                self._slots.give_back(request.slot)
        self._sent.clear()
        self._begin = (window, parts)

    def expects(self, window: int, ids: Ids) -> bool:
        """Whether the next batch is this one."""
        return bool(self._sent) and (self._sent[0].window, self._sent[0].ids) == (window, ids)

    def received(self) -> None:
        """The next batch has come."""
        self._sent.popleft()

    def __iter__(self) -> Iterator[BatchRequest]:
        window, parts = self._begin
        while window < self._last:
            for ids in dict.fromkeys(parts):
                request = BatchRequest(window=window, ids=ids, slot=self._slots.take(), stream=self._stream)
                self._sent.append(request)
                yield request
            window += 1
            parts = self._parts_of(window) if window < self._last else ()


@contextlib.contextmanager
def _no_warning_of_cores() -> Iterator[None]:
    """Without torch's warning of more workers than cores: workers that wait need none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _as_it_is(value: Any) -> Any:
    return value


def _how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended by itself with exit code {code}: code of the data set ends the process (os._exit)"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
    hint = ": the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}){hint}"
