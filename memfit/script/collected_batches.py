"""Whether a pass over a loader collects what its batches make, as predictions of a whole validation set on the card.

A pass that keeps nothing needs as much for four batches as for four hundred, and is cut short. One that collects goes
on to its end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from memfit.events import ALLOCATE, FREE
from memfit.trace.tracer import Tracer

_MOST_TURNS = 8
"""Turns at most, after which a pass is one that does not collect."""
LEAST_BYTES = 1 << 18
"""A pass that collects less, such as losses, is cut short."""
MOST_OPERATORS = 100_000
"""Operators at most of a pass that collects."""


@dataclass(kw_only=True)
class CollectedBatches:
    """Follows the turns of one pass."""

    tracer: Tracer
    _begins: list[int] = field(default_factory=list)
    """The event at which each turn begins."""
    _first_operator: int = 0

    def turn_begins(self) -> None:
        if not self._begins:
            self._first_operator = len(self.tracer.op_rows)
        self._begins.append(len(self.tracer.kind))

    @property
    def operators(self) -> int:
        """Operators of the pass so far."""
        return len(self.tracer.op_rows) - self._first_operator

    def bytes_of_a_turn(self) -> int | None:
        """Bytes that each turn adds; 0 where one adds none, and None where more turns have to be seen.

        What variables alone keep of a turn is freed in the next one, and the first turns may make what the others use.
        """
        turns = [self._left(begin, end) for begin, end in itertools.pairwise(self._begins[1:])]
        left = [own for _, own in turns[:-1]]
        if left and all(left):
            return sum(left) // len(left)
        last, before = turns[-1][0] if turns else 0, turns[-2][0] if len(turns) > 1 else None
        if last <= 0 or last == before:  # one tensor that a larger one replaces grows by as much in each turn
            return max(last, 0)
        return None if len(turns) < _MOST_TURNS else 0

    def _left(self, begin: int, end: int) -> tuple[int, int]:
        """(bytes that a turn allocates without those that it frees, bytes of the turn's own tensors that live now)."""
        kinds, storages, nbytes = self.tracer.kind, self.tracer.storage, self.tracer.nbytes
        own, net = {}, 0
        for kind, storage in zip(kinds[begin:end], storages[begin:end], strict=True):
            if kind == ALLOCATE:
                own[storage] = nbytes[storage]
                net += nbytes[storage]
            elif kind == FREE:
                own.pop(storage, None)
                net -= nbytes[storage]
        for kind, storage in zip(kinds[end:], storages[end:], strict=True):
            if kind == FREE:
                own.pop(storage, None)
        return net, sum(own.values())
