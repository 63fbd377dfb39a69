"""Conditions on a counter, ``step % 1000 == 0``, that hold too late for a trace: each of them holds once in it.

Scripts validate, save and log every so many steps, and a trace sees a few. After two windows, when the optimizers have
their state, a condition on a counter that does not hold by itself holds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FROM_WINDOW = 2
"""Complete windows after which a condition may hold early."""


@dataclass(frozen=True, kw_only=True)
class EarlyCondition:
    """A condition that held early: where it is, as ``file:line``, its text, and the value that it was given."""

    where: str
    text: str
    answer: bool


@dataclass(kw_only=True)
class _Counter:
    """What one condition has counted."""

    first: int
    value: int
    window: int
    growth: int = 0
    """Of the last two values."""
    is_steady: bool = True
    """Whether it never went back but to its first value: lengths and other data do."""
    counts: bool = False
    """Whether it went on from one window to a later one, by 1 or by as much as before."""
    is_met: bool = False
    """Whether the condition held after ``FROM_WINDOW``, by itself or early: at 0 it is often left out. One that held at
    two values before, such as an accumulation's, soon holds again."""
    held_at: int | None = None
    """The value at which the condition held first."""
    times: int = 0
    """How often the condition held."""

    def see(self, value: int, window: int) -> None:
        """Notes the next value."""
        growth = value - self.value
        self.is_steady &= growth >= 0 or value == self.first
        self.counts |= window > self.window and growth > 0 and growth in (1, self.growth)
        self.value, self.window, self.growth = value, window, growth


@dataclass(kw_only=True)
class Intervals:
    """Meets each condition once. ``windows`` counts complete windows; ``allows`` asks for a place whether it may;
    ``on_early`` is told that a condition holds early."""

    windows: Callable[[], int]
    allows: Callable[[str], bool] = lambda where: True
    on_early: Callable[[], None] = lambda: None
    early: list[EarlyCondition] = field(default_factory=list)
    _counters: dict[tuple[str, str], _Counter] = field(default_factory=dict)

    def remainder(self, value: Any, divisor: Any, wanted: Any, where: str, text: str, holds: bool) -> Any:
        """``value % divisor``, or ``wanted`` where the condition holds early.

        Args:
            text: the condition.
            holds: its value where the remainder is ``wanted``.
        """
        rest = value % divisor
        if not all(type(number) is int for number in (value, divisor, wanted)):
            return rest
        window = self.windows()
        counter = self._counters.setdefault((where, text), _Counter(first=value, value=value, window=window))
        counter.see(value, window)
        counter.times += rest == wanted
        if rest == wanted:
            counter.held_at = value if counter.held_at is None else counter.held_at
            counter.is_met |= window >= FROM_WINDOW or value > counter.held_at
        elif counter.is_steady and counter.counts and not counter.is_met and self._may_hold(where, window):
            counter.is_met = True
            counter.times += 1
            self.on_early()
            early = EarlyCondition(where=where, text=text, answer=holds)
            if early not in self.early:
                self.early.append(early)
            return wanted
        return rest

    def meet_again(self) -> bool:
        """Lets each condition that held early hold once more; returns whether there is one."""
        for early in self.early:
            self._counters[early.where, early.text].is_met = False
        return bool(self.early)

    def counted(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(value, how often it held) of each condition so far."""
        return {key: (counter.value, counter.times) for key, counter in self._counters.items()}

    def _may_hold(self, where: str, window: int) -> bool:
        return window >= FROM_WINDOW and self.allows(where)
