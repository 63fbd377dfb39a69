"""A job that is set up on the virtual device before anybody asks: the next trace of it begins behind its setup.

A process prepares one job and traces it once. A copy of the process may do so in its place, so that each of several
questions finds the job set up (``memfit.cli.loaded_copy``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.apply.train_state import TrainState
from memfit.device.virtual.card_rules import RecordedRules, card_facts, note_fact, recorded_facts
from memfit.device.virtual.virtual_device import Virtual
from memfit.job import Job
from memfit.trace.tracer import Tracer

if TYPE_CHECKING:
    from memfit.trace.step import Tracing

SetUp = tuple[Virtual, Tracer, TrainState]


@dataclass(frozen=True, kw_only=True, eq=False)
class _PreparedJob:
    job: Job
    how: Tracing
    set_up: SetUp
    facts: frozenset[str]
    """What the setup asked of its card."""
    stack: ExitStack


_prepared: list[_PreparedJob] = []
"""At most one."""


def prepare_job(job: Job, how: Tracing, set_up: Callable[[], AbstractContextManager[SetUp]]) -> None:
    """Sets a job up for the next trace of it.

    Args:
        set_up: context with the job on the virtual device.
    """
    with ExitStack() as stack, recorded_facts() as read:
        opened = stack.enter_context(set_up())
        _prepared[:] = [_PreparedJob(job=job, how=how, set_up=opened, facts=frozenset(read), stack=stack.pop_all())]


def take_prepared(job: Job, how: Tracing) -> tuple[SetUp, ExitStack] | None:
    """The job as it was set up, and what ends that; None where it was not. What was set up otherwise is ended.

    Another card takes the place of the one that it was set up on, where it answers the same to what the setup asked.
    """
    if not _prepared:
        return None
    prepared = _prepared.pop()
    rules = prepared.set_up[0].rules
    is_same = prepared.job is job and _setup_of(prepared.how) == _setup_of(how) and how.device.is_cuda
    if is_same and isinstance(rules, RecordedRules):
        before, now = (card_facts(device, prepared.facts) for device in (prepared.how.device, how.device))
        if before == now:
            rules.become(how.device)
            for fact in prepared.facts:
                note_fact(fact)
            return prepared.set_up, prepared.stack
    prepared.stack.close()
    return None


def leave_prepared() -> None:
    """Ends what was set up, before something else is."""
    while _prepared:
        _prepared.pop().stack.close()


def _setup_of(how: Tracing) -> tuple[object, ...]:
    """What a job's setup depends on, beside its card."""
    return (
        how.engine, how.world, how.mesh, how.rank, dict(how.engine_choices), how.implementation, how.optimizer_state,
        how.average,
    )  # fmt: skip
