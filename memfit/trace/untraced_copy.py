"""A copy of this process from before its first trace, where further traces of a job that leaves tensors are made.

Code may make a tensor once and keep it, in its module's variables or behind ``functools.lru_cache``. In a process that
has traced one step, the next one finds it there: neither the tensor nor what was allocated to make it is where a
process of its own has it. The copy has traced nothing, and traces each step in a copy of itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch

from memfit.device.hardware.process_limits import has_room_for_copy
from memfit.device.virtual.card_rules import attention_shared, is_attention_shared, note_fact, recorded_facts
from memfit.forked_process import ForkedBranch, ForkedProcess, NoResultError, is_forkable
from memfit.job import Job
from memfit.trace.event_limit import event_limit, most_events
from memfit.trace.event_record import are_storages_left

_Name = tuple[str, str, str]
"""Of a class: its module's, its own, and its file's."""
Record = Callable[..., Any]
"""What traces: of a job and further arguments, which can be pickled, as its result can."""


class _Copies:
    """What one process has."""

    def __init__(self) -> None:
        self.process = 0
        """The process that may make a copy, and may ask it; 0: none."""
        self.copy: ForkedProcess | None = None
        self.has_traced = False


_copies = _Copies()


@contextmanager
def untraced_copy_allowed() -> Iterator[None]:
    """Context in which this process may have such a copy; it is made before its first trace, and ends with the context.

    Within another one, nothing.
    """
    if _copies.process == os.getpid():
        yield
        return
    _copies.process, _copies.copy = os.getpid(), None
    try:
        yield
    finally:
        if _copies.process == os.getpid():
            _copies.process = 0
            if _copies.copy is not None:
                _copies.copy.close()
                _copies.copy = None


def before_trace(record: Record) -> None:
    """Makes the copy, where this process may have one and traces for the first time.

    Args:
        record: what the copy traces with.
    """
    is_first, _copies.has_traced = not _copies.has_traced, True
    if not is_first or _copies.process != os.getpid() or sys.platform != "linux":
        return
    if is_forkable() and has_room_for_copy():
        with suppress(OSError):
            _copies.copy = ForkedProcess(_UntracedProcess(record))


def is_untraced_copy_needed() -> bool:
    """Whether a trace would find what earlier ones left behind, and there is a copy that does not."""
    return _copies.copy is not None and _copies.process == os.getpid() and are_storages_left()


def recorded_in_copy(job: Job, *arguments: Any) -> Any:
    """What ``record`` of ``before_trace`` gives in a process that has traced nothing.

    Args:
        arguments: further ones of ``record``.

    Raises:
        NoResultError: there is no copy, it does not have the job's class, or the trace raised.
    """
    if _copies.copy is None:
        raise NoResultError
    kind = type(job)
    recorded = _copies.copy.call(
        "recorded", id(kind), _name_of(kind), job.settings(), event_limit(), is_attention_shared(), arguments
    )
    result, facts = recorded.result()
    for fact in facts:
        note_fact(fact)
    return result


class _UntracedProcess:
    """What the copy does."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def recorded(
        self, kind: int, name: _Name, settings: Mapping[str, Any], events: int, is_shared: bool,
        arguments: tuple[Any, ...],
    ) -> tuple[Any, list[str]]:  # fmt: skip
        """(what was traced in a copy of this process, facts that it asked of its card)."""
        with closing(ForkedBranch()) as branch:
            if branch.is_copy:
                try:
                    torch.set_num_threads(1)
                    with recorded_facts() as read, attention_shared(is_shared), most_events(events):
                        result = self._record(_class_of(kind, name)(**settings), *arguments)
                    branch.give((result, sorted(read)))
                finally:
                    branch.end()
            branch.begin()
            traced: tuple[Any, list[str]] = branch.result()
            return traced


def _class_of(number: int, name: _Name) -> type[Job]:
    """The job's class, or one of the same name of the same file, which the process that asks has run again.

    Raises:
        NoResultError: there is none.
    """
    kinds: list[type[Job]] = [Job]
    for kind in kinds:
        kinds += kind.__subclasses__()
    like = [kind for kind in kinds if _name_of(kind) == name]
    same = [kind for kind in like if id(kind) == number] or (like if name[2] else [])
    if not same:
        raise NoResultError
    return same[-1]


def _name_of(kind: type[Job]) -> _Name:
    module = sys.modules.get(kind.__module__)
    return kind.__module__, kind.__qualname__, getattr(module, "__file__", None) or ""
