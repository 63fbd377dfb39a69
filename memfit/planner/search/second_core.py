"""A second core for the search: copies of the traced job in processes of their own, which trace what will be needed.

One copy traces micro-batches, in a session of its own; the other sets the job up while there is a core for it, and
traces the best candidate's full step. Autograd's threads do not survive a fork: the first copy is forked before the
first backward, and the second one again behind it where backwards leave no threads: it takes less time to trace what
this process has traced once. A trace of a copy counts where it was made in the same state as that in
which this process would make it now; else, and wherever a copy fails, this process traces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from memfit.device.hardware.process_limits import available_cores
from memfit.forked_process import ForkedCall, ForkedProcess, NoResultError, has_core_for_copy
from memfit.job import Shape
from memfit.torch_compat.backward_threads import backward_without_threads
from memfit.trace.event_record import are_storages_left
from memfit.trace.session import CopiedTrace, MicroTrace, Session
from memfit.trace.session_state import random_numbers

if TYPE_CHECKING:
    from memfit.planner.search.candidate_search import Candidate
    from memfit.planner.search.full_step import FullStep
    from memfit.planner.search.traced_job import TracedJob
    from memfit.trace.validation_traces import PolicyTraces

TraceKey = tuple[Shape, frozenset[tuple[str, str]], bool, str | None]
"""Shape, modes, whether gradients are accumulated, and precision of a micro-batch."""

_OWN = ("torch", "memfit")
_allowed = [False]
_is_forkable_later = False
"""Whether this process may be forked after a backward, too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CopiedStep:
    """A full step that the copy has traced, and the state of random numbers, before and after it."""

    full_step: FullStep
    numbers: bytes


@dataclass(frozen=True, kw_only=True)
class CopiedJob:
    """What the copy that traces micro-batches does."""

    traced_job: TracedJob

    def open(self) -> None:
        """Opens the session, in one thread: OpenMP's threads do not survive a fork."""
        torch.set_num_threads(1)
        _ = self.traced_job.session

    def trace(
        self, shape: Shape, modes: Mapping[str, str], accumulated: bool, precision: str | None
    ) -> CopiedTrace | None:
        """As ``Session.copied_trace``."""
        return self.traced_job.session.copied_trace(shape, modes, accumulated, precision)


class CopiedFullStep:
    """What the copy that traces full steps does.

    Args:
        leave: leaves the virtual device that the copied process is on.
        set_up: context with the job on the virtual device.
        trace: a candidate's full step behind that, and a micro-batch as ``trace_full_step`` has it.
    """

    def __init__(
        self,
        leave: Callable[[], None],
        set_up: Callable[[], AbstractContextManager[PolicyTraces]],
        trace: Callable[[PolicyTraces, Candidate, Shape | None], FullStep],
    ) -> None:
        self._leave, self._set_up, self._trace, self._open = leave, set_up, trace, ExitStack()
        self._numbers = b""
        self._traces: PolicyTraces | None = None

    def open(self) -> None:
        """Sets the job up, in one thread: OpenMP's threads do not survive a fork.

        Raises:
            NoResultError: something keeps storages of what this process has traced: a trace would lack them.
        """
        torch.set_num_threads(1)
        self._numbers = random_numbers()
        self._leave()
        if are_storages_left():
            raise NoResultError
        self._traces = self._open.enter_context(self._set_up())

    def full_step(self, best: Candidate, resized: Shape | None) -> CopiedStep | None:
        """The full step of a candidate; None where it draws random numbers.

        Raises:
            NoResultError: something keeps storages of what this process has traced.
        """
        if self._traces is None:
            self.open()
        traces, self._traces = self._traces, None
        assert traces is not None
        with self._open.pop_all():
            full_step = self._trace(traces, best, resized)
        return CopiedStep(full_step=full_step, numbers=self._numbers) if random_numbers() == self._numbers else None


class SecondCore:
    """The copies' traces, for whoever asked for them.

    Args:
        tracing: the copy that traces micro-batches.
        stepping: the copy that traces full steps.
        later: makes one that takes its place, once a step was traced here; None where it would not run a backward.
    """

    def __init__(
        self, tracing: ForkedProcess, stepping: ForkedProcess, later: Callable[[], ForkedProcess | None] | None = None
    ) -> None:
        self._tracing, self._stepping, self._later = tracing, stepping, later
        self._tracing.call("open")
        self._modules = frozenset(sys.modules)
        self._set_up: ForkedCall | None = None
        self._before: ForkedProcess | None = None
        """The copy whose place another one has taken."""
        self._traces: dict[TraceKey, ForkedCall] = {}
        self._full_steps: list[tuple[Candidate, ForkedCall]] = []
        self._is_busy = False
        """Whether a full step was begun that nobody has asked for yet: a trace beside it would have no core."""

    def set_up(self) -> None:
        """Has the job set up for a full step: a core is free until the first micro-batches are known."""
        if self._set_up is None:
            later = self._later() if self._later is not None and not self._has_imported() else None
            if later is not None:
                self._before, self._stepping = self._stepping, later
            self._set_up = self._stepping.call("open")

    def _has_imported(self) -> bool:
        """Whether modules were imported since, others than torch's and memfit's own: what a library keeps of its first
        import, such as an exception with the frames beneath it, would be lacking in the trace of another process."""
        imported = sys.modules.keys() - self._modules
        return any(name.split(".")[0] not in _OWN for name in imported)

    def begin_trace(self, key: TraceKey) -> None:
        """Asks for a micro-batch's trace, unless it was asked for or a full step has the core."""
        shape, modes, accumulated, precision = key
        if key not in self._traces and not self._is_busy:
            self._traces[key] = self._tracing.call("trace", shape, dict(modes), accumulated, precision)

    def begin_full_step(self, best: Candidate, resized: Shape | None) -> None:
        """Asks for a candidate's full step."""
        self._is_busy = True
        if self._before is not None and self._set_up is not None and self._set_up.has_failed:
            self._stepping, self._before = self._before, None
        self._full_steps.append((best, self._stepping.call("full_step", best, resized)))

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
    """Inside, the first search may use a second core: this process is one that may be forked. From then on its
    backwards start no threads, where that is possible."""
    global _is_forkable_later
    _is_forkable_later = available_cores() >= 2 and backward_without_threads()
    _allowed.append(True)
    try:
        yield
    finally:
        _allowed.pop()


@contextmanager
def open_second_core(copied_job: CopiedJob, copied_step: CopiedFullStep) -> Iterator[SecondCore | None]:
    """Context with the copies; None where that is not allowed, or this machine has no core or memory for them."""
    with ExitStack() as copies:

        def forked(target: CopiedJob | CopiedFullStep) -> ForkedProcess | None:
            process = forked_with_room(target)
            return copies.enter_context(closing(process)) if process is not None else None

        tracing = forked(copied_job) if _allowed[-1] else None
        stepping = forked(copied_step) if tracing is not None else None
        if tracing is None or stepping is None:
            copies.close()
            yield None
            return
        _allowed[-1] = False  # the next search would come after a backward
        yield SecondCore(tracing, stepping, partial(forked, copied_step) if _is_forkable_later else None)


def forked_with_room(target: object) -> ForkedProcess | None:
    """A copy of this process that runs methods of ``target``; None where this machine has no core or memory for it, or
    it could not do what this one does."""
    if not has_core_for_copy():
        return None
    try:
        return ForkedProcess(target)
    except OSError:
        return None
