"""Seconds of one collective over the ranks of a group, by the link that joins them.

Rings of NCCL: over n ranks an all-gather or reduce-scatter of S bytes sends (n - 1) S / n from every rank in n - 1
steps, an all-reduce twice as much in twice as many (Patarasuk and Yuan, 2009; nccl-tests doc/PERFORMANCE.md).

Left out: trees, NVLS and what a link does not reach of its rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from memfit.device.hardware.cluster import GroupLink
from memfit.events import OVER, Trace


def gather_seconds(nbytes: float, link: GroupLink) -> float:
    """Seconds of an all-gather or reduce-scatter of a tensor of ``nbytes`` when it is whole."""
    if link.ranks < 2:
        return 0.0
    return nbytes * (link.ranks - 1) / link.ranks / link.bytes + link.ring_seconds


def reduce_seconds(nbytes: float, link: GroupLink) -> float:
    """Seconds of an all-reduce of ``nbytes``."""
    return 2 * gather_seconds(nbytes, link)


def _gathered(moved: float, link: GroupLink) -> float:
    """``moved`` is the whole tensor and this rank's part of it."""
    return gather_seconds(moved * link.ranks / (link.ranks + 1), link)


_SECONDS: Mapping[str, Callable[[float, GroupLink], float]] = {
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _gathered,
    "all_to_all_single": lambda moved, link: gather_seconds(moved / 2, link),
    "all_reduce": lambda moved, link: reduce_seconds(moved / 2, link),
}
"""Of an operator that moved so many bytes, read and written together."""


def collective_rows(trace: Trace, links: Mapping[str, GroupLink]) -> tuple[np.ndarray, np.ndarray]:
    """int (R,): the operators that wait for other ranks, and float (R,): seconds of each.

    Args:
        links: by dimension of the mesh; a collective of another group joins all ranks, which ``links`` has as "".
    """
    rows, seconds = [], []
    for index, name in enumerate(trace.names):
        kind, over, dimension = name.partition(OVER)
        if not over:
            continue
        mine = np.flatnonzero(trace.operator_name == index)
        link = links.get(dimension, links[""])
        takes = _SECONDS.get(kind, reduce_seconds)
        moved = trace.operator_bytes[mine].astype(float)
        rows.append(mine)
        seconds.append(np.array([takes(each, link) for each in moved.tolist()]))
    if not rows:
        return np.zeros(0, int), np.zeros(0)
    return np.concatenate(rows), np.concatenate(seconds)


def seconds_by_collective(trace: Trace, links: Mapping[str, GroupLink]) -> dict[str, float]:
    """Seconds of a trace's collectives by their name, ``all_reduce over tp``."""
    rows, seconds = collective_rows(trace, links)
    totals: dict[str, float] = {}
    for row, each in zip(rows.tolist(), seconds.tolist(), strict=True):
        name = trace.names[trace.operator_name[row]]
        if each:
            totals[name] = totals.get(name, 0.0) + each
    return totals
