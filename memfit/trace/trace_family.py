"""TraceFamily: a job traced at a few shapes, and every other shape derived from them.

The bytes of each storage are a polynomial in items and length (``memfit.trace.polynomial``), solved exactly on the
first shapes and checked on further ones. At one item copies fall away, and attention pads masks whose length is no
multiple of 8: these are members of the family of their own, traced where they are first asked for. Where the sequence
of events changes otherwise with the shape, or a size is no such polynomial, the shape is traced itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, EMPTY_CACHE, Trace
from memfit.job import Shape
from memfit.trace.polynomial import Fit

_VARYING = ("fetch", "forward", "backward", "validate")
"""The parts whose sizes depend on the shape."""

Slices = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Which shapes a member of a family is for."""

    single: bool = False
    """One item, or several."""
    ragged: bool = False
    """Lengths that are no multiple of 8."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """A trace at one shape, and how its storages' bytes follow from another; None: they do not."""

    shape: Shape
    trace: Trace
    polynomials: Fit | None

    def bytes_at(self, shape: Shape) -> np.ndarray | None:
        """int64 (S,): bytes of the trace's storages at a shape; None where they do not follow."""
        derived = self.polynomials.evaluate(shape) if self.polynomials is not None and shape.length != 1 else None
        if self.polynomials is None or derived is None:
            return None
        nbytes = self.trace.nbytes.copy()
        nbytes[self.polynomials.storages] = derived
        return nbytes


class TraceFamily:
    """Traces of one job by shape. ``at`` gives any of them.

    Args:
        trace_at: traces one shape itself.
        member: traces the sample shapes of a kind.
    """

    def __init__(self, trace_at: Callable[[Shape], Trace], member: Callable[[Kind], Member]) -> None:
        self._trace_at, self._make = trace_at, member
        first = member(Kind())
        self._members = {Kind(): first}
        self._direct: dict[Shape, Trace] = {first.shape: first.trace}

    @property
    def derives(self) -> bool:
        """Whether other shapes follow from the traced ones."""
        return self._members[Kind()].polynomials is not None

    def derived(self, shape: Shape) -> Trace | None:
        """The trace of a shape, from its member of the family; None where it must be traced itself."""
        kinds = [Kind(single=shape.items == 1)]
        if shape.length is not None and shape.length % 8:
            kinds.append(Kind(single=shape.items == 1, ragged=True))
        if not self.derives or (shape.length is None and shape.items == 1):
            return None
        for kind in kinds:
            if kind not in self._members:
                self._members[kind] = self._make(kind)
            nearest = self._members[kind]
            nbytes = nearest.bytes_at(shape)
            if nbytes is not None:
                return dataclasses.replace(nearest.trace, nbytes=nbytes)
        return None

    def bound(self, shape: Shape) -> Trace:
        """The trace of this shape, or of the next multiple of 32 in length where only that can be derived."""
        if shape.length is None or not self.derives or self.derived(shape) is not None:
            return self.at(shape)
        return self.at(Shape(items=shape.items, length=-(-shape.length // 32) * 32))

    def at(self, shape: Shape) -> Trace:
        """The trace of a shape, in a millisecond where it can be derived."""
        if shape in self._direct:
            return self._direct[shape]
        derived_trace = self.derived(shape)
        if derived_trace is not None:
            return derived_trace
        self._direct[shape] = self._trace_at(shape)
        return self._direct[shape]


_SAMPLES = {
    Kind(): ((2, 64), (3, 64), (2, 96), (3, 96), (2, 160), (3, 160), (5, 224), (3, 104), (4, 37)),
    Kind(ragged=True): ((2, 37), (3, 37), (2, 51), (3, 51), (2, 99), (3, 99), (5, 131), (4, 77)),
    Kind(single=True): ((1, 64), (1, 96), (1, 160), (1, 224), (1, 104), (1, 37)),
    Kind(single=True, ragged=True): ((1, 37), (1, 51), (1, 99), (1, 131), (1, 77)),
}
"""(items, length): enough for every coefficient, and some to check on."""


def sample_shapes(like: Shape, kind: Kind) -> list[Shape]:
    """Shapes to trace for a member of a family."""
    if like.length is None:
        return [Shape(items=items) for items in (2, 3, 5)]
    return [Shape(items=items, length=length) for items, length in _SAMPLES[kind]]


def events_before(trace: Trace, end: int, phases: tuple[tuple[str, int, int], ...]) -> Trace:
    """The events before ``end``; storages and operators keep their numbers."""
    return dataclasses.replace(
        trace, kind=trace.kind[:end], storage=trace.storage[:end], operator=trace.operator[:end], phases=phases
    )


def varying(marks: list[tuple[int, str]], start: int, end: int) -> Slices:
    """Event ranges between ``start`` and ``end`` whose part's sizes depend on the shape."""
    inside = [(position, part) for position, part in marks if start <= position <= end]
    stops = [position for position, _ in inside[1:]] + [end]
    return [(position, stop) for (position, part), stop in zip(inside, stops, strict=True) if part in _VARYING]


def storages_in(trace: Trace, slices: Slices, without: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(storages allocated in these ranges, in order; the ranges' structure, which is equal where the events are).

    Without cuBLAS's workspaces and cuDNN's searches, which only the first window makes, and the storages ``without``.
    """
    events = np.concatenate([np.arange(start, end) for start, end in slices]) if slices else np.zeros(0, int)
    events = events[trace.kind[events] != EMPTY_CACHE]
    events = events[trace.category[trace.storage[events]] != CATEGORIES.index("workspace")]
    if without is not None:
        events = events[~np.isin(trace.storage[events], without)]
    kind, storage = trace.kind[events], trace.storage[events]
    made = storage[kind == ALLOCATE]
    local = np.full(len(trace.nbytes) + 1, -1)
    local[made] = np.arange(len(made))
    return made, np.stack([kind, local[storage]])
