"""A job traced under several policies for validation, with the windows before them traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memfit.apply.phase_memory import phase_memory
from memfit.apply.train_state import TrainState
from memfit.events import Trace
from memfit.job import Job, Shape
from memfit.plan import PhasePolicy
from memfit.trace.columns import as_trace
from memfit.trace.operator_scratch import with_scratch
from memfit.trace.step import Tracing, run_two_windows, trace_job, validate_under, virtual_job
from memfit.trace.step_phases import save_once
from memfit.trace.trace_splice import Phase, without_events
from memfit.trace.tracer import Tracer
from memfit.trace.untraced_copy import is_untraced_copy_needed


@dataclass(frozen=True, kw_only=True, eq=False)
class ValidationTrace:
    """A job traced under one policy for validation."""

    policy: PhasePolicy
    trace: Trace
    turns: np.ndarray | None
    """int (operators,): how often each one runs in the validation, with turns of loops that were left out; 0 for those
    outside of it. None: not known."""

    @property
    def operators(self) -> int:
        """The number of operators in the validation's trace."""
        if self.turns is not None:
            return int(np.count_nonzero(self.turns))
        rows = [
            self.trace.operator[start:end]
            for name, start, end in self.trace.phases
            if name == "validate" and end > start
        ]
        return sum(int(some.max()) - int(some.min()) + 1 for some in rows)


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """What a tracer holds after the two windows: phases, and how many events, calls and plans of workspaces."""

    phases: tuple[Phase, ...]
    events: int
    calls: int
    plans: frozenset[tuple[Any, ...]]


class PolicyTraces:
    """A job on the virtual device: its two windows, and validation under one policy after another behind them.

    A trace does not depend on the policies that were traced before it. Made by ``open_policy_traces``.

    Args:
        set_up: the job on the virtual device; None: each policy is traced alone.
        leave: leaves the virtual device.
    """

    def __init__(
        self, job: Job, how: Tracing, set_up: tuple[Tracer, TrainState] | None, leave: Callable[[], None]
    ) -> None:
        self.job, self.how = job, how
        self._set_up, self._leave = set_up, leave
        self._windows: _Windows | None = None
        """None before they have run, and once nothing can be traced behind them."""
        self._has_failed = False

    @property
    def are_alone(self) -> bool:
        """Whether each policy is traced alone, from the setup on."""
        return self._set_up is None

    def run_windows(self, shape: Shape, how: Tracing) -> None:
        """Runs the two windows.

        Args:
            how: as the job was set up, with micro-batches and checkpointing.
        """
        self.shape, self.how = shape, how
        if self._set_up is None:
            return
        tracer, train_state = self._set_up
        run_two_windows(train_state, tracer, shape, how)
        self._windows = _Windows(
            phases=tuple(tracer.phases),
            events=len(tracer.kind),
            calls=len(tracer.call_memory.calls),
            plans=frozenset(tracer.call_memory.plans),
        )

    def trace(self, policy: PhasePolicy, seen: Shape | None = None) -> ValidationTrace:
        """What ``trace_job`` gives under a policy.

        Those from a policy on that leaves other storages behind (state that was moved) are traced alone.

        Args:
            seen: the shape of the micro-batches that validation looks at, where that is another.

        Raises:
            RuntimeError: a validation before this one raised.
        """
        if self._has_failed:
            raise RuntimeError("nothing can be traced behind a validation that raised")
        seen = seen or self.shape
        if self._set_up is not None and self._windows is not None:
            self._has_failed = True
            trace = self._behind(*self._set_up, self._windows, policy, seen)
            self._has_failed = False
            if trace is not None:
                return trace
            self._windows = self._set_up = None
            self._leave()
        alone = trace_job(self.job, seen, replace(self.how, validation=policy))
        return ValidationTrace(policy=policy, trace=alone, turns=None)

    def _behind(
        self, tracer: Tracer, train_state: TrainState, windows: _Windows, policy: PhasePolicy, seen: Shape
    ) -> ValidationTrace | None:
        """None where it cannot be told from what other policies have left behind."""
        begin, call, count = len(tracer.kind), len(tracer.call_memory.calls), len(tracer.phases)
        tracer.call_memory.plans, tracer.repeated = set(windows.plans), []
        first_row = len(tracer.op_rows)
        if self.job.validates and policy.where == "here":
            with tracer.phase("validate"), phase_memory(train_state, policy):
                validate_under(train_state, seen, tracer, policy)
        rows = slice(first_row, len(tracer.op_rows))
        with tracer.phase("save"), phase_memory(train_state, self.how.saving):
            tracer.mark("save")
            save_once(train_state)
        phases = (*windows.phases, *tracer.phases[count:])
        trace = without_events(as_trace(tracer), windows.events, begin, phases)
        if trace is None:
            return None
        shift = len(trace.kind) - len(tracer.kind)
        later = [(position + shift, row, key) for position, row, key in tracer.call_memory.calls[call:]]
        turns = np.zeros(len(trace.operator_name), np.int64)
        turns[rows] = 1
        for first, last, times in tracer.repeated:
            turns[first:last] *= times
        if self.how.scratch:
            trace = with_scratch(trace, [*tracer.call_memory.calls[: windows.calls], *later])
        return ValidationTrace(policy=policy, trace=trace, turns=turns)


@contextmanager
def open_policy_traces(job: Job, how: Tracing) -> Iterator[PolicyTraces]:
    """Context with a job that is set up on the virtual device, before its windows; unless earlier traces have left
    something behind, and a copy of this process that has traced nothing traces each policy alone."""
    with ExitStack() as stack:
        set_up = None
        if not is_untraced_copy_needed():
            _, tracer, train_state = stack.enter_context(virtual_job(job, how))
            set_up = tracer, train_state
        yield PolicyTraces(job, how, set_up, stack.close)
