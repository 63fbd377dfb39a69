"""MemoryReports: what a run says and writes down when memory runs out, or grows from window to window."""

from __future__ import annotations

import contextlib

from memfit.apply.train_state import TrainState
from memfit.sizes import format_size
from memfit.train.launch import memory_limit
from memfit.train.loop.monitor import Monitor
from memfit.train.loop.run_context import RunContext
from memfit.train.recovery.failure import Failure, describe_request
from memfit.train.recovery.memory_growth import PART_OF_BUDGET, GrownMemoryError, largest_holder
from memfit.train.recovery.oom_record import write_oom_record


class MemoryReports:
    """Reports of one run.

    Args:
        monitor: measures the memory that is held between windows.
    """

    def __init__(self, train_state: TrainState, context: RunContext, monitor: Monitor) -> None:
        self._state, self._context, self._growth = train_state, context, monitor.growth
        self._has_warned = False

    @property
    def held_before(self) -> int:
        """Bytes that no budget counts: of a CPU's process, what it held before the job was built."""
        return self._context.memory.resident_before if self._state.device.type == "cpu" else 0

    def record_failure(self, window: int, failure: Failure) -> None:
        """Says that memory failed, and writes down what was resident."""
        engine = self._state.engine
        again = "all ranks start" if engine.syncs_in_backward and engine.world > 1 else "done"
        rank = f"rank {failure.rank}: " if engine.world > 1 else ""
        request = describe_request(failure, self.held_before)
        self._context.say(f"window {window}: {rank}out of memory in {failure.part} ({request}); {again} again")
        with contextlib.suppress(OSError, MemoryError):
            write_oom_record(self._context.folder, self._context.plan, self._state, window, failure, self.held_before)

    def grown_memory(self, failure: Failure) -> Exception | None:
        """An error where the request that failed would have been served but for what has grown between windows."""
        needed = max(failure.requested_bytes or 0, int(self._context.plan.budget_bytes * PART_OF_BUDGET))
        growth = self._growth.latest(needed)
        if growth is None:
            return None
        memory_limit.lift()
        request = describe_request(failure, self.held_before)
        return GrownMemoryError(f"{growth}{self._holder()}; {failure.part} then ran out of memory ({request})")

    def warn_of_growth(self, window: int) -> None:
        """Says once that memory grows from window to window, and what holds it."""
        if self._has_warned:
            return
        growth = self._growth.steady()
        if growth is None or growth.bytes < self._context.plan.budget_bytes * PART_OF_BUDGET:
            return
        self._has_warned = True
        left = self._context.plan.budget_bytes - growth.end
        windows = max(int(left / (growth.bytes / (growth.last - growth.first))), 0)
        self._context.say(
            f"window {window}: {growth}{self._holder()}; the budget of "
            f"{format_size(self._context.plan.budget_bytes)} is reached in about {windows} windows"
        )

    def _holder(self) -> str:
        holder = largest_holder(self._state, self._context.samples)
        return f"; {holder}" if holder else ""
