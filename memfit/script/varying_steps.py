"""Whether training steps differ in size, as those of sequences of varying lengths do: a trace sees a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, Trace
from memfit.sizes import format_size

LARGER = ("steps of larger batches than", "larger micro-batches than")
"""Beginnings of what ``larger_steps`` says."""
_LEAST_STEPS = 3
_SAME = 1e-3
"""Steps whose activations differ by a smaller share are of one size."""
_DIFFERENT = 0.02
_ACTIVATIONS = CATEGORIES.index("activations")


def larger_steps(trace: Trace, ends: Sequence[int]) -> str | None:
    """What is not seen where no other step is as large as the largest one; None where steps are of a few sizes, such as
    a full batch and the last one of a pass. Of a few steps, and of steps of several numbers of micro-batches, these are
    compared.

    Args:
        ends: the event after each step.
    """
    backwards = _backward_ends(trace)
    times = np.diff(np.searchsorted(backwards, [0, *ends], side="right"))
    of_steps = len(ends) >= _LEAST_STEPS and min(times) == max(times)
    ends = ends if of_steps else backwards
    made = np.where(trace.kind == ALLOCATE, trace.nbytes[trace.storage], 0)
    made = np.where(trace.category[trace.storage] == _ACTIVATIONS, made, 0)
    trains = np.zeros(len(made), bool)
    for name, start, end in trace.phases:
        trains[start:end] |= name == "train"
    sums = np.concatenate([[0], np.cumsum(np.where(trains, made, 0))])
    in_order = [int(size) for size in np.diff(sums[[0, *ends]])]
    if len(in_order) > _LEAST_STEPS and min(in_order[1:]) > max(in_order[1:]) * (1 - _SAME):
        return None  # the first one has more: what came before the training, such as a forward that shows its output
    sizes = sorted(in_order)
    if (
        len(sizes) < _LEAST_STEPS
        or not sizes[-1]
        or sizes[-2] > sizes[-1] * (1 - _SAME)
        or sizes[0] > sizes[-1] * (1 - _DIFFERENT)
    ):
        return None
    return (
        f"{LARGER[0] if of_steps else LARGER[1]} the {len(sizes)} that ran, which differ "
        f"(their forwards make {format_size(sizes[0])} to {format_size(sizes[-1])})"
    )


def _backward_ends(trace: Trace) -> list[int]:
    """The event after each backward."""
    if "backward" not in trace.parts:
        return []
    inside = trace.operator_part[trace.operator] == trace.parts.index("backward")
    return (np.flatnonzero(inside[:-1] & ~inside[1:]) + 1).tolist()
