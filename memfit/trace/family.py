"""TraceFamily: a job traced at a few shapes, and every other shape derived from them.

The bytes of each storage are a polynomial in items B and length L: 1, B, L, BL, L², BL² (1 and B where samples have no
length). It is solved exactly on the first shapes and checked on a further one. Where the sequence of events changes
with the shape (as it does at one item, where copies fall away), or a size is no such polynomial (attention pads
lengths to 16 or 32), the shape is traced itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, Trace
from memfit.job import Shape

_VARYING = ("fetch", "forward", "backward", "validate")
"""The parts whose sizes depend on the shape."""

Slices = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Bytes of storages as polynomials: row ``which[i]`` of ``rows`` belongs to storage ``storages[i]``."""

    storages: np.ndarray
    which: np.ndarray
    rows: list[list[Fraction]]
    unit: int = 1
    """Lengths for which this holds: multiples of it."""

    def evaluate(self, shape: Shape) -> np.ndarray | None:
        """int64 bytes of ``storages`` at a shape; None where a polynomial gives a part of a byte."""
        if shape.length is not None and shape.length % self.unit:
            return None
        values = [sum((c * v for c, v in zip(row, basis(shape), strict=True)), Fraction(0)) for row in self.rows]
        if any(value.denominator != 1 for value in values):
            return None
        return np.array([int(value) for value in values], np.int64)[self.which]


class TraceFamily:
    """Traces of one job by shape. ``at`` gives any of them."""

    def __init__(self, trace_at: Callable[[Shape], Trace], base: Shape, trace: Trace, polynomials: Fit | None) -> None:
        self._trace_at, self._trace, self._polynomials = trace_at, trace, polynomials
        self._direct: dict[Shape, Trace] = {base: trace}

    @property
    def derives(self) -> bool:
        """Whether other shapes follow from the traced ones."""
        return self._polynomials is not None

    def bound(self, shape: Shape) -> Trace:
        """The trace of this shape, or of the next length that can be derived."""
        if self._polynomials is None or shape.length is None:
            return self.at(shape)
        unit = self._polynomials.unit
        return self.at(Shape(items=shape.items, length=-(-shape.length // unit) * unit))

    def at(self, shape: Shape) -> Trace:
        """The trace of a shape, in milliseconds where it can be derived."""
        if shape in self._direct:
            return self._direct[shape]
        if self._polynomials is not None and shape.items > 1 and (shape.length or 2) > 1:
            found = self._polynomials.evaluate(shape)
            if found is not None:
                nbytes = self._trace.nbytes.copy()
                nbytes[self._polynomials.storages] = found
                return dataclasses.replace(self._trace, nbytes=nbytes)
        self._direct[shape] = self._trace_at(shape)
        return self._direct[shape]


def sample_shapes(shape: Shape) -> list[Shape]:
    """Shapes to trace for a family: enough for every coefficient, one to check, and one of an odd length."""
    if shape.length is None:
        return [Shape(items=items) for items in (2, 3, 5)]
    lengths = ((2, 64), (3, 64), (2, 96), (3, 96), (2, 160), (3, 160), (5, 224), (4, 45))
    return [Shape(items=items, length=length) for items, length in lengths]


def basis(shape: Shape) -> list[int]:
    """The polynomial's terms at a shape."""
    b, n = shape.items, shape.length
    return [1, b] if n is None else [1, b, n, b * n, n * n, b * n * n]


def fit(shapes: list[Shape], sizes: np.ndarray | None, storages: np.ndarray) -> Fit | None:
    """The polynomials of these storages, or None where a check shape disagrees.

    Where only the odd length disagrees (attention pads lengths), they hold for multiples of 32.

    Args:
        sizes: int64 (shapes, storages), bytes at each shape; None: the events differ.
        storages: which storages of the trace they are.
    """
    if sizes is None:
        return None
    terms = len(basis(shapes[0]))
    inverse = _inverse([[Fraction(v) for v in basis(shape)] for shape in shapes[:terms]])
    columns, which = np.unique(sizes, axis=1, return_inverse=True)
    rows, unit = [], 1
    for column in columns.T.tolist():
        coefficients = [sum((row[i] * column[i] for i in range(terms)), Fraction(0)) for row in inverse]
        for shape, size in zip(shapes[terms:], column[terms:], strict=True):
            if sum(c * v for c, v in zip(coefficients, basis(shape), strict=True)) != size:
                if shape.length is None or shape.length % 32 == 0:
                    return None
                unit = 32
        rows.append(coefficients)
    return Fit(storages=storages, which=which.reshape(-1), rows=rows, unit=unit)


def cut(trace: Trace, end: int, phases: tuple[tuple[str, int, int], ...]) -> Trace:
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

    Without cuBLAS's workspaces, which only the first window makes, and the storages ``without``.
    """
    events = np.concatenate([np.arange(start, end) for start, end in slices]) if slices else np.zeros(0, int)
    events = events[trace.category[trace.storage[events]] != CATEGORIES.index("workspace")]
    if without is not None:
        events = events[~np.isin(trace.storage[events], without)]
    kind, storage = trace.kind[events], trace.storage[events]
    made = storage[kind == ALLOCATE]
    local = np.full(len(trace.nbytes) + 1, -1)
    local[made] = np.arange(len(made))
    return made, np.stack([kind, local[storage]])


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss-Jordan, exact."""
    size = len(matrix)
    rows = [row + [Fraction(int(i == j)) for j in range(size)] for i, row in enumerate(matrix)]
    for i in range(size):
        pivot = next(r for r in range(i, size) if rows[r][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for r in range(size):
            if r != i and rows[r][i]:
                rows[r] = [a - rows[r][i] * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[size:] for row in rows]
