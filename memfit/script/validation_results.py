"""Results of a validation that the script keeps, such as the predictions of the whole set: the next one runs beside
them, and needs more.
"""

from __future__ import annotations

from memfit.events import ALLOCATE, FREE
from memfit.script.outcome import Line
from memfit.script.tracer import ScriptTracer

_NUMBER = 8
"""Bytes of one number, such as a mean loss."""


def keeps_results(tracer: ScriptTracer, start: int) -> bool:
    """Whether tensors of the validation that began at event ``start`` are still there.

    What each batch replaces, as a variable for the net's output, does not count: it is there within a validation too.
    """
    alive: set[int] = set()
    replaced: set[tuple[Line, str]] = set()
    for event in range(start, len(tracer.kind)):
        kind, storage = tracer.kind[event], tracer.storage[event]
        if kind == ALLOCATE and tracer.made_in(storage) == "validate":
            alive.add(storage)
        elif kind == FREE and storage in alive:
            alive.discard(storage)
            replaced.add(_maker(tracer, storage))
    return any(tracer.nbytes[storage] > _NUMBER and _maker(tracer, storage) not in replaced for storage in alive)


def _maker(tracer: ScriptTracer, storage: int) -> tuple[Line, str]:
    """The line and the operator that allocated a storage."""
    return tracer.line_of(storage), tracer.op_rows[tracer.made_by[storage]][0]
