"""Loops without gradients whose turns repeat to the byte: a trace leaves them early.

Validation that calls the net two hundred times needs no more memory than one that calls it three times. A loop that
asks for a counter, ``if step % 10 == 0``, goes on until that held; where its turn then keeps something, to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.events import ALLOCATE, FREE
from memfit.script.step_watch import StepWatch

EQUAL = 3
"""Turns in a row with the same requests, after which a loop is left."""


@dataclass(frozen=True, kw_only=True)
class RepeatedTurns:
    """Ends loops. ``note`` is told which; ``counted`` gives (value, how often it held) of conditions on counters."""

    watch: StepWatch
    counted: Callable[[], dict[Any, tuple[int, int]]] = dict
    note: Callable[[str], None]

    def turns(self, iterable: Iterable[Any], where: str) -> Iterable[Any]:
        """The elements of a loop's iterable: all of them, unless the loop calls a net and its turns repeat."""
        if torch.is_grad_enabled() or self.watch.depth or self.watch.tracer.is_paused:
            return iterable
        return self._until_repeated(iterable, where)

    def _until_repeated(self, iterable: Iterable[Any], where: str) -> Iterator[Any]:
        watch, tracer = self.watch, self.watch.tracer
        before: list[tuple[int, int]] = []
        equal, elements, turns, collects = 1, iter(iterable), 0, False
        counted = second = self.counted()
        while True:
            try:  # an element is held by the loop alone
                element = [next(elements)]
            except StopIteration:
                return
            before_last, counted = counted, self.counted()
            second = counted if turns == 1 else second
            start, steps, calls = len(tracer.kind), len(watch.steps), watch.calls
            yield element.pop()
            turn, turns = self._requests(start), turns + 1
            collects |= turns > 2 and not _is_balanced(turn) and self._held_since(before_last)
            repeats = watch.calls > calls and len(watch.steps) == steps and turn == before and _is_balanced(turn)
            equal = equal + 1 if repeats and not self._held_since(counted) else 1
            if equal >= EQUAL and not collects and not self._waits_since(second):
                watch.pass_cut()
                self.note(f"the rest of the loop at {where}, whose turns repeat")
                return
            before = turn

    def _held_since(self, before: dict[Any, tuple[int, int]]) -> bool:
        """Whether a condition on a counter has held."""
        return any(times > before.get(key, (0, 0))[1] for key, (_, times) in self.counted().items())

    def _waits_since(self, before: dict[Any, tuple[int, int]]) -> bool:
        """Whether a counter went on, and its condition has not held."""
        now = self.counted().items()
        return any(key in before and value != before[key][0] and times == before[key][1] for key, (value, times) in now)

    def _requests(self, start: int) -> list[tuple[int, int]]:
        """(kind, bytes) of the events from ``start`` on."""
        tracer = self.watch.tracer
        nbytes = tracer.nbytes
        return [
            (kind, nbytes[storage] if storage >= 0 else 0)
            for kind, storage in zip(tracer.kind[start:], tracer.storage[start:], strict=True)
        ]


def _is_balanced(turn: list[tuple[int, int]]) -> bool:
    """Whether a turn keeps nothing: another one then begins where it did."""
    signs = {ALLOCATE: 1, FREE: -1}
    return sum(signs.get(kind, 0) * nbytes for kind, nbytes in turn) == 0
