"""Ends the training loops of a script once enough steps were seen, so that what comes after the loops is seen too.

Many scripts validate or save after their last step alone. A loop that trains, of the user's own files or of a library's
trainer, is left before its next turn, as if it had come to its end. A loop around it makes two turns: what a turn does
before its first step, such as playing games, is seen with the optimizers' state. Where each turn is a training of its
own, as a fold of a cross-validation, and each leaves its net in memory, the loop makes more turns. The last number of a
``range`` has its turn too: what a script does in its last step, it asks for by that number. Where validation and saving
were seen within the loops, all of them are left once the turn that runs is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import torch

from memfit.script.step_watch import StepWatch

LEAST_TURNS = 2
"""Turns that train, of a loop that began before enough was seen; one that begins later makes one."""

MOST_TRAININGS = 10
"""Turns at most of a loop each of which makes an optimizer and leaves more in memory than the one before it."""

LEAST_WINDOWS = 2
"""Steps of each optimizer: the first makes its state."""


@dataclass(kw_only=True, eq=False)
class _Loop:
    """A loop that runs. A turn trains where a backward and a step are in it."""

    is_late: bool
    """Whether it began after enough was seen."""
    backwards: int = 0
    steps: int = 0
    """How many there were when the turn began."""
    optimizers: int = 0
    """How many there were when the turn began."""
    turns: int = 0
    """Turns that have trained, and are over."""
    trainings: int = 0
    """Those of them that made an optimizer."""


@dataclass(kw_only=True)
class LoopEnds:
    """Leaves loops where ``is_enough`` says so."""

    watch: StepWatch
    is_enough: Callable[[], bool] = lambda: False
    rest_alone: Callable[[], bool] = lambda: False
    """Whether all phases were seen within the loops: they end as soon as their turns do."""
    trainings_grow: Callable[[], bool] = lambda: False
    """Whether the last training that the script repeats began beside more than the one before it."""
    ended: list[str] = field(default_factory=list)
    """Where loops were left, as ``file:line``."""
    trainings_cut: bool = False
    """Whether one of them was a loop whose turns are trainings."""
    _running: list[_Loop] = field(default_factory=list)

    @property
    def can_end(self) -> bool:
        """Whether a loop runs that has trained."""
        return any(loop.turns or self._trains(loop) for loop in self._running)

    @property
    def repeats_trainings(self) -> bool:
        """Whether a loop runs whose turns make an optimizer and train with it."""
        return any(loop.trainings or (self._trains(loop) and self._made_optimizer(loop)) for loop in self._running)

    def turns(self, iterable: Iterable[Any], where: str) -> Iterable[Any]:
        """The elements of a ``for`` loop's iterable, until enough was seen."""
        return self._until_enough(iterable, where) if self._may_train() else iterable

    def goes_on(self, where: str) -> Callable[[], bool]:
        """What a ``while`` loop asks before each turn, after its own condition. It is made where the loop begins."""
        if not self._may_train():
            return lambda: True
        turns = self._until_enough(iter(lambda: True, False), where)
        return lambda: next(turns, False)

    def _may_train(self) -> bool:
        watch = self.watch
        return torch.is_grad_enabled() and not watch.depth and not watch.tracer.is_paused

    def _until_enough(self, iterable: Iterable[Any], where: str) -> Iterator[Any]:
        loop, elements = _Loop(is_late=self.is_enough()), iter(iterable)
        self._running.append(loop)
        try:
            while not self._may_end(loop):
                loop.backwards, loop.steps = self.watch.backwards, len(self.watch.steps)
                try:  # an element is held by the loop alone; a generator may train to make it
                    element = [next(elements)]
                except StopIteration:
                    return
                loop.optimizers = len(self.watch.optimizers)
                yield element.pop()
                loop.turns += self._trains(loop)
                loop.trainings += self._trains(loop) and self._made_optimizer(loop)
            self.ended.append(where)
            self.trainings_cut |= loop.trainings > 0
            if type(iterable) is range and length_hint(elements) and not self.rest_alone():
                self.watch.in_last_turn = True
                yield iterable[-1]
            self.watch.epoch_ended()
        finally:
            self.watch.in_last_turn = False
            self._running.remove(loop)

    def _may_end(self, loop: _Loop) -> bool:
        """Whether it has shown enough. An optimizer of a later stage steps with its state, too."""
        if not loop.turns or not self.is_enough():
            return False
        if 0 < loop.trainings < MOST_TRAININGS and self.trainings_grow():
            return False
        enough_turns = loop.is_late or loop.turns >= LEAST_TURNS or self.rest_alone()
        return self.watch.windows >= LEAST_WINDOWS and enough_turns

    def _trains(self, loop: _Loop) -> bool:
        """Whether the turn has trained so far."""
        return len(self.watch.steps) > loop.steps and self.watch.backwards > loop.backwards

    def _made_optimizer(self, loop: _Loop) -> bool:
        """Whether the turn has made an optimizer so far."""
        return len(self.watch.optimizers) > loop.optimizers
