"""Trainings that a script repeats, such as the folds of a cross-validation, and what the earlier ones leave in memory.

Each of them makes an optimizer at the same line. Where the script keeps the nets of earlier ones, or their weights,
each needs more memory than the one before it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from memfit.events import ALLOCATE, FREE
from memfit.script.outcome import Line
from memfit.script.step_watch import StepWatch

_AT_STEP = 2
"""The step of each training after which what is in memory is compared: the first one makes the optimizer's state."""
_SHARE = 0.01
"""Of what is in memory: a smaller difference, as of results that are collected, does not count."""
_LEAST_TIMES = 2
"""Times in a row that memory grows before it is told: the best net so far is kept once."""


@dataclass(kw_only=True)
class RepeatedTrainings:
    """Call ``step_ended`` after each optimizer step."""

    watch: StepWatch
    _alive: dict[Line, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """(event, bytes in memory) of each training, by the line that makes its optimizer."""
    _events: int = 0
    _bytes: int = 0

    def step_ended(self) -> None:
        event, number = self.watch.steps[-1]
        known = self.watch.optimizers[number]
        trainings = self._alive[known.line]
        follows = not trainings or known.made_at > trainings[-1][0]
        if known.steps == _AT_STEP and follows:
            trainings.append((event, self._bytes_in_memory()))

    @property
    def grow(self) -> bool:
        """Whether the last training began beside more than the one before it."""
        return any(self._growths(line)[-1:] > [0] for line in self._alive)

    def growing(self) -> dict[Line, int]:
        """The lines of optimizers of which each training adds to what is in memory, and by how many bytes."""
        last = {line: self._growths(line)[-_LEAST_TIMES:] for line in self._alive}
        return {line: grows[-1] for line, grows in last.items() if len(grows) == _LEAST_TIMES and all(grows)}

    def _growths(self, line: Line) -> list[int]:
        """By how much each training but the first has more in memory than the one before it."""
        since = self.watch.failures[-1].end if self.watch.failures else -1
        alive = [nbytes for event, nbytes in self._alive[line] if event > since]
        grows = [after - before for before, after in itertools.pairwise(alive)]
        return [grown if grown > _SHARE * after else 0 for grown, after in zip(grows, alive[1:], strict=True)]

    def _bytes_in_memory(self) -> int:
        tracer = self.watch.tracer
        signs = {ALLOCATE: 1, FREE: -1}
        for event in range(self._events, len(tracer.kind)):
            self._bytes += signs.get(tracer.kind[event], 0) * tracer.nbytes[tracer.storage[event]]
        self._events = len(tracer.kind)
        return self._bytes
