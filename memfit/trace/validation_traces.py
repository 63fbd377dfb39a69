"""A job traced under several policies for validation, with the windows before them traced once."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memfit.apply.phase_memory import phase_memory
from memfit.events import Trace
from memfit.job import Job, Shape
from memfit.plan import PhasePolicy
from memfit.trace.columns import as_trace
from memfit.trace.operator_scratch import with_scratch
from memfit.trace.step import Tracing, trace_job, traced_windows, validate_under
from memfit.trace.step_phases import save_once
from memfit.trace.trace_splice import without_events


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


def trace_policies(
    job: Job, shape: Shape, how: Tracing, policies: Iterable[PhasePolicy | tuple[PhasePolicy, Shape]]
) -> Generator[ValidationTrace, None, None]:
    """What ``trace_job`` gives under one policy for validation after another, with the windows before them traced once.

    Each policy is asked for when the one before it was given, and its trace does not depend on those between it and the
    first. Those behind a policy that leaves other storages behind (state that was moved) are traced alone. Close it.

    Args:
        policies: each with the shape of the micro-batches that validation looks at, where that is another.
    """
    waiting = ((asked if isinstance(asked, tuple) else (asked, shape)) for asked in policies)
    asked, equal, is_first = next(waiting, None), set[Any](), True
    with traced_windows(job, shape, how) as (_, tracer, train_state):
        windows, end, calls, plans = (
            list(tracer.phases),
            len(tracer.kind),
            len(tracer.call_memory.calls),
            set(tracer.call_memory.plans),
        )
        while asked is not None:
            policy, seen = asked
            begin, call, count = len(tracer.kind), len(tracer.call_memory.calls), len(tracer.phases)
            tracer.call_memory.plans, tracer.repeated = set(plans), []
            first_row = len(tracer.op_rows)
            if job.validates and policy.where == "here":
                with tracer.phase("validate"), phase_memory(train_state, policy):
                    validate_under(train_state, seen, tracer, policy, equal if is_first else set(equal))
            rows = slice(first_row, len(tracer.op_rows))
            with tracer.phase("save"), phase_memory(train_state, how.saving):
                tracer.mark("save")
                save_once(train_state)
            policy_trace = without_events(as_trace(tracer), end, begin, (*windows, *tracer.phases[count:]))
            if policy_trace is None:
                break
            shift = len(policy_trace.kind) - len(tracer.kind)
            later = [(position + shift, row, key) for position, row, key in tracer.call_memory.calls[call:]]
            turns = np.zeros(len(policy_trace.operator_name), np.int64)
            turns[rows] = 1
            for first, last, times in tracer.repeated:
                turns[first:last] *= times
            policy_trace = (
                with_scratch(policy_trace, [*tracer.call_memory.calls[:calls], *later]) if how.scratch else policy_trace
            )
            yield ValidationTrace(policy=policy, trace=policy_trace, turns=turns)
            asked, is_first = next(waiting, None), False
    while asked is not None:
        policy, seen = asked
        trace = trace_job(job, seen, replace(how, validation=policy))
        yield ValidationTrace(policy=policy, trace=trace, turns=None)
        asked = next(waiting, None)
