"""PartTimer: how long named functions take for themselves, without the named functions that they call."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce, wraps
from typing import Any
from unittest.mock import patch

EMPTY_CALLS = 20_000


class PartTimer:
    """Times functions while ``timing`` is open, and sums by part what each takes between two calls of ``next_turn``.

    Args:
        parts: by the name of a part, its functions as ``module:Class.function``.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        self._parts = parts
        self._now: dict[str, int] = dict.fromkeys(parts, 0)
        self._turns: list[dict[str, int]] = []
        self._inner: list[int] = [0]
        self._outside = 0
        """Nanoseconds that a call's timing adds outside of what it measures."""

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Inside, the functions are replaced by timed ones."""
        self._outside = self._cost_of_a_timer()
        with ExitStack() as stack:
            for part, targets in self._parts.items():
                for target in targets:
                    module, _, path = target.partition(":")
                    *owners, name = path.split(".")
                    owner = reduce(getattr, owners, importlib.import_module(module))
                    stack.enter_context(patch.object(owner, name, self._timed(part, vars(owner)[name])))
            yield

    def next_turn(self) -> None:
        """Ends a turn, as a window's."""
        self._turns.append(self._now)
        self._now = dict.fromkeys(self._parts, 0)

    def microseconds(self, cold: int) -> dict[str, float]:
        """The mean of each part over the turns, without the first ones."""
        turns = self._turns[cold:]
        return {part: statistics.fmean(turn[part] for turn in turns) / 1000 for part in self._parts}

    def _timed(self, part: str, function: Any) -> Any:
        clock, inner = time.perf_counter_ns, self._inner
        plain = function.__func__ if isinstance(function, staticmethod | classmethod) else function

        @wraps(plain)
        def timed(*arguments: Any, **named: Any) -> Any:
            inner.append(0)
            begin = clock()
            try:
                return plain(*arguments, **named)
            finally:
                spent = clock() - begin
                self._now[part] += spent - inner.pop()
                inner[-1] += spent + self._outside

        return type(function)(timed) if plain is not function else timed

    def _cost_of_a_timer(self) -> int:
        """Nanoseconds that a timed call of an empty function takes longer than it measures."""
        self._now["empty"] = 0
        spent = _nanoseconds(self._timed("empty", _empty)) - _nanoseconds(_empty)
        return max(spent - self._now.pop("empty"), 0) // EMPTY_CALLS


def _nanoseconds(function: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    for _ in range(EMPTY_CALLS):
        function()
    return time.perf_counter_ns() - begin


def _empty() -> None:
    pass
