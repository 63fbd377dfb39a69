"""A micro-batch under some recomputation at another size, estimated from its trace at one size.

What is recomputed is the same at every size, so that its trace is taken as it is, with other bytes and other
work. These are read from two traces with everything kept: what an operator of a module makes and does at the one size
is what it makes and does at the other one. What only the recomputation does grows with the micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from memfit.events import CATEGORIES, Trace

_GROWING = np.array(
    [CATEGORIES.index(name) for name in ("activations", "temporaries", "inputs", "workspace")], np.uint8
)
"""What depends on the micro-batch."""

Call = tuple[str, str]
"""An operator's name and its module."""


def resized(recomputed: Trace, kept: Trace, other: Trace, times: float) -> Trace | None:
    """The trace at the other size; None where the two that keep everything do not run the same operators.

    Args:
        recomputed, kept: at the one size.
        other: at the other size, with everything kept.
        times: how many times as large the other micro-batch is.
    """
    calls = _calls(kept)
    if calls != _calls(other) or not np.array_equal(kept.made_by, other.made_by):
        return None
    work = _Pairs([*zip(calls, _work(kept), strict=True)], _work(other))
    grown = [
        pair if (pair := work.next(call, done)) is not None else tuple(round(each * times) for each in done)
        for call, done in zip(_calls(recomputed), _work(recomputed), strict=True)
    ]
    flops, moved = np.array(grown, np.int64).reshape(-1, 2).T
    return replace(
        recomputed, nbytes=_resized_bytes(recomputed, kept, other, times), operator_flops=flops, operator_bytes=moved
    )


def _resized_bytes(recomputed: Trace, kept: Trace, other: Trace, times: float) -> np.ndarray:
    """int64 (S,): bytes of the storages at the other size."""
    sizes = _Pairs(_storages(kept), [(each,) for each in other.nbytes.tolist()])
    is_growing = np.isin(recomputed.category, _GROWING).tolist()
    nbytes = []
    for (call, size), made_by, grows in zip(
        _storages(recomputed), recomputed.made_by.tolist(), is_growing, strict=True
    ):
        pair = sizes.next(call, size) if made_by >= 0 else (size,)
        nbytes.append(pair[0] if pair is not None else round(size * times) if grows else size)
    return np.array(nbytes, np.int64)


class _Pairs:
    """What stands for what an operator makes or does, in turn: of several that are alike, the first for the first.

    Where its module does nothing alike, an operator of that name in any module stands for it.
    """

    def __init__(self, ones: Sequence[tuple[Call, Hashable]], others: Sequence[tuple[int, ...]]) -> None:
        self._others: dict[Hashable, list[tuple[int, ...]]] = defaultdict(list)
        for (call, what), other in zip(ones, others, strict=True):
            self._others[call, what].append(other)
            self._others[call[0], what].append(other)
        self._count: dict[Hashable, int] = defaultdict(int)

    def next(self, call: Call, what: Hashable) -> tuple[int, ...] | None:
        """The next one, from the first again after the last; None where there is none."""
        key: Hashable = (call, what) if (call, what) in self._others else (call[0], what)
        others = self._others.get(key)
        if others is None:
            return None
        self._count[key] += 1
        return others[(self._count[key] - 1) % len(others)]


def _calls(trace: Trace) -> list[Call]:
    names, modules = trace.operator_name.tolist(), trace.operator_module.tolist()
    return [(trace.names[name], trace.modules[module]) for name, module in zip(names, modules, strict=True)]


def _work(trace: Trace) -> list[tuple[int, ...]]:
    return [*zip(trace.operator_flops.tolist(), trace.operator_bytes.tolist(), strict=True)]


def _storages(trace: Trace) -> list[tuple[Call, int]]:
    """By storage, the operator that made it, and its bytes."""
    calls = _calls(trace)
    made_by, nbytes = trace.made_by.tolist(), trace.nbytes.tolist()
    return [(calls[row], size) for row, size in zip(made_by, nbytes, strict=True)]
