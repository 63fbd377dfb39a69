"""Bytes of storages as exact polynomials in a batch's shape, solved on some shapes and checked on others.

The terms are 1, B, L, BL, L² and BL² in items B and length L; 1, L, L² at a single item, 1 and B where samples have no
length. An operator that pads lengths (attention's masks and statistics) has the padded length in place of L, or of one
of the two in L²: each padding is tried, and what agrees with the check shapes is taken. A part of
the length that is rounded down (characters of text to a second of speech) is told from its values.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from memfit.job import Shape

PADDINGS = (8, 16, 32)
FORMS = ((1, False), *((to, both_factors) for to in PADDINGS for both_factors in (False, True)))
"""(lengths are padded to a multiple of this, in both factors of L²)."""
ITEM_BYTES = (8, 4, 2, 1)
"""Places behind FORMS: items of so many bytes, their number in a sample being a part of the length rounded down."""
LARGEST_PART = 64
"""The largest denominator of such a part."""
UNITS = (1, 8, 32)
MOST = 1 << 31
"""The largest numerator, so that 64 bits hold the products."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Bytes of storages: row ``which[i]`` belongs to storage ``storages[i]``, whose bytes are numerators · terms /
    denominator, with the terms in the row's form."""

    storages: np.ndarray
    which: np.ndarray
    numerators: np.ndarray
    """int64 (rows, terms)."""
    denominators: np.ndarray
    forms: np.ndarray
    """Of each row, its place in FORMS, or behind them in ITEM_BYTES; there, the number of items is the first numerator
    over the denominator, times the length."""
    single: bool
    """Holds at one item alone, or at two and more."""
    unit: int = 1
    """Lengths for which this holds: multiples of it."""

    def evaluate(self, shape: Shape) -> np.ndarray | None:
        """int64 bytes of ``storages`` at a shape; None where this does not hold for it."""
        if shape.length is not None and shape.length % self.unit:
            return None
        values = np.array([terms(shape, self.single, form) for form in FORMS], np.int64)
        floored = self.forms >= len(FORMS)
        products = (self.numerators * values[np.where(floored, 0, self.forms)]).sum(1)
        if floored.any():
            products[floored] = self.numerators[floored, 0] * (shape.length or 1)
        quotients, rest = np.divmod(products, self.denominators)
        if rest[~floored].any() or (quotients < 0).any():
            return None
        if floored.any():
            quotients[floored] *= np.array(ITEM_BYTES)[self.forms[floored] - len(FORMS)] * shape.items
        return quotients[self.which]


def terms(shape: Shape, single: bool, form: tuple[int, bool] = (1, False)) -> list[int]:
    """The polynomial's terms at a shape, with lengths padded as a form says."""
    b, n = shape.items, shape.length
    if n is None:
        return [1] if single else [1, b]
    to, both_padded = form
    padded = -(-n // to) * to
    square = padded * padded if both_padded else n * padded
    return [1, padded, square] if single else [1, b, padded, b * padded, square, b * square]


def fit(shapes: list[Shape], sizes: list[np.ndarray | None] | None, storages: np.ndarray) -> Fit | None:
    """The polynomials of these storages, or None where they do not hold for multiples of 32 either.

    Args:
        shapes: first those to solve on, then those to check on.
        sizes: for each shape, int64 (storages,) bytes; None: its events differ from the first shape's.
        storages: which storages of the trace they are.
    """
    if sizes is None:
        return None
    single = shapes[0].items == 1
    count = len(terms(shapes[0], single))
    for unit in UNITS:
        kept = [i for i, shape in enumerate(shapes) if i < count or (shape.length or 0) % unit == 0]
        rows = [sizes[i] for i in kept if sizes[i] is not None]
        if len(rows) == len(kept) > count:
            solved = _solved([shapes[i] for i in kept], np.stack(rows), count, single)  # type: ignore[arg-type]
            if solved is not None:
                return Fit(storages=storages, single=single, unit=unit, **solved)
    return None


def _solved(shapes: list[Shape], sizes: np.ndarray, count: int, single: bool) -> dict[str, np.ndarray] | None:
    columns, which = np.unique(sizes, axis=1, return_inverse=True)
    solvers = [_solver(shapes, count, single, form) for form in FORMS]
    numerators, denominators, forms = [], [], []
    for column in columns.T.tolist():
        row_and_form = _row(column, count, solvers) or _floored(column, shapes, count)
        if row_and_form is None:
            return None
        row, form = row_and_form
        denominator = math.lcm(*(value.denominator for value in row))
        numerators.append([int(value * denominator) for value in row])
        denominators.append(denominator)
        forms.append(form)
    if max((abs(value) for row in numerators for value in row), default=0) >= MOST:
        return None
    return {
        "which": which.reshape(-1),
        "numerators": np.array(numerators, np.int64).reshape(-1, count),
        "denominators": np.array(denominators, np.int64),
        "forms": np.array(forms, np.int64),
    }


Solver = tuple[list[list[Fraction]], list[list[int]]]


def _row(column: list[int], count: int, solvers: list[Solver]) -> tuple[list[Fraction], int] | None:
    """The coefficients and the first form with which they agree with every check shape."""
    for form, (inverse, checks) in enumerate(solvers):
        row = [sum((a * b for a, b in zip(line, column[:count], strict=True)), Fraction(0)) for line in inverse]
        pairs = zip(checks, column[count:], strict=False)
        if row and all(sum(map(operator.mul, row, check), Fraction(0)) == size for check, size in pairs):
            return row, form
    return None


def _floored(column: list[int], shapes: list[Shape], count: int) -> tuple[list[Fraction], int] | None:
    """The part of the length that, rounded down, is the number of items in a sample at every shape; None where several
    parts with small denominators would do."""
    for place, nbytes in enumerate(ITEM_BYTES):
        numbers = [divmod(size, nbytes * shape.items) for size, shape in zip(column, shapes, strict=True)]
        if any(rest for _, rest in numbers) or any(shape.length is None for shape in shapes):
            continue
        lengths = [(n, shape.length or 1) for (n, _), shape in zip(numbers, shapes, strict=True)]
        low = max(Fraction(n, length) for n, length in lengths)
        high = min(Fraction(n + 1, length) for n, length in lengths)
        parts = {
            Fraction(p, q)
            for q in range(1, LARGEST_PART + 1)
            for p in range(-(-low.numerator * q // low.denominator), -(-high.numerator * q // high.denominator))
        }
        if len({length for n, length in lengths if Fraction(n, length) == low}) > 1:
            parts = {low}
        if low < high and len(parts) == 1:
            return [*parts, *[Fraction(0)] * (count - 1)], len(FORMS) + place
    return None


def _solver(shapes: list[Shape], count: int, single: bool, form: tuple[int, bool]) -> Solver:
    """(the inverse of the terms at the first shapes, the terms at the others); no inverse where a form has none."""
    matrix = [[Fraction(v) for v in terms(shape, single, form)] for shape in shapes[:count]]
    try:
        return _inverse(matrix), [terms(shape, single, form) for shape in shapes[count:]]
    except StopIteration:
        return [], [[]]


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
