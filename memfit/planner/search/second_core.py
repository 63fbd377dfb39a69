"""A second core for the search: a copy of the traced job in a process of its own, which traces what will be needed.

The copy is forked before the first backward, since autograd's threads do not survive a fork, and opens a session of its
own. A trace of the copy counts where it was made in the same state as that in which the session would make it now;
else, and wherever the copy fails, the session traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from memfit.device.hardware.process_limits import available_bytes, available_cores
from memfit.forked_process import ForkedCall, ForkedProcess, NoResultError
from memfit.job import Shape
from memfit.trace.session import CopiedTrace, MicroTrace, Session
from memfit.trace.session_state import random_numbers

if TYPE_CHECKING:
    from memfit.planner.search.candidate_search import Candidate
    from memfit.planner.search.full_step import FullStep
    from memfit.planner.search.traced_job import TracedJob

MEMORY = 2
"""The copy is made where so many times the memory is available that this process takes: it shares what it does not
change."""
TraceKey = tuple[Shape, frozenset[tuple[str, str]], bool, str | None]
"""Shape, modes, whether gradients are accumulated, and precision of a micro-batch."""

_allowed = [False]


@dataclass(frozen=True, kw_only=True, eq=False)
class CopiedStep:
    """A full step that the copy has traced, and the state of random numbers, before and after it."""

    full_step: FullStep
    numbers: bytes


@dataclass(frozen=True, kw_only=True)
class CopiedJob:
    """What the copy does."""

    traced_job: TracedJob
    trace_full_step: Callable[[Candidate, Shape | None], FullStep]

    def open(self) -> None:
        """Opens the session, in one thread: OpenMP's threads do not survive a fork."""
        torch.set_num_threads(1)
        _ = self.traced_job.session

    def trace(
        self, shape: Shape, modes: Mapping[str, str], accumulated: bool, precision: str | None
    ) -> CopiedTrace | None:
        """As ``Session.copied_trace``."""
        return self.traced_job.session.copied_trace(shape, modes, accumulated, precision)

    def full_step(self, best: Candidate, resized: Shape | None) -> CopiedStep | None:
        """The full step of a candidate; None where it draws random numbers."""
        self.traced_job.pause()
        numbers = random_numbers()
        full_step = self.trace_full_step(best, resized)
        return CopiedStep(full_step=full_step, numbers=numbers) if random_numbers() == numbers else None


class SecondCore:
    """The copy's traces, for whoever asked for them."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self._traces: dict[TraceKey, ForkedCall] = {}
        self._full_steps: list[tuple[Candidate, ForkedCall]] = []
        self._is_busy = False
        """Whether a full step was begun that nobody has asked for yet: a trace behind it would have to wait."""

    def begin_trace(self, key: TraceKey) -> None:
        """Asks for a micro-batch's trace, unless it was asked for or would wait for a full step."""
        shape, modes, accumulated, precision = key
        if key not in self._traces and not self._is_busy:
            self._traces[key] = self._process.call("trace", shape, dict(modes), accumulated, precision)

    def begin_full_step(self, best: Candidate, resized: Shape | None) -> None:
        """Asks for a candidate's full step."""
        self._is_busy = True
        self._full_steps.append((best, self._process.call("full_step", best, resized)))

    def trace(self, key: TraceKey, session: Session) -> MicroTrace | None:
        """The trace that was asked for; None where the session must make it."""
        call = self._traces.pop(key, None)
        if call is None:
            return None
        with suppress(NoResultError):
            copied: CopiedTrace | None = call.result()
            if copied is not None and session.accept(copied):
                return copied.micro_trace
        return None

    def full_step(self, best: Candidate) -> FullStep | None:
        """The full step that was asked for; None where it must be traced here."""
        self._is_busy = False
        for candidate, call in self._full_steps:
            if candidate is best:
                with suppress(NoResultError):
                    copied: CopiedStep | None = call.result()
                    if copied is not None and copied.numbers == random_numbers():
                        return copied.full_step
        return None


@contextmanager
def second_core_allowed() -> Iterator[None]:
    """Inside, the first search may use a second core: this process is one that may be forked."""
    _allowed.append(True)
    try:
        yield
    finally:
        _allowed.pop()


@contextmanager
def open_second_core(copy: CopiedJob) -> Iterator[SecondCore | None]:
    """Context with the copy; None where that is not allowed, or this machine has no core or memory for it."""
    process = forked_with_room(copy) if _allowed[-1] else None
    if process is None:
        yield None
        return
    process.call("open")
    _allowed[-1] = False  # the next search would come after a backward
    try:
        yield SecondCore(process)
    finally:
        process.close()


def forked_with_room(target: object) -> ForkedProcess | None:
    """A copy of this process that runs methods of ``target``; None where this machine has no core or memory for it."""
    if available_cores() < 2 or available_bytes() < MEMORY * psutil.Process().memory_info().rss:
        return None
    try:
        return ForkedProcess(target)
    except OSError:
        return None
