"""Steps of a DeepSpeed engine, whose ZeRO optimizers step the engine's own optimizer once for each group."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class EngineStepHook:
    """Calls a function after each ``engine.step`` that stepped: not after those in the middle of a window."""

    def __init__(self, engine: Any, stepped: Callable[[], None]) -> None:
        self._stepped: Callable[[], None] | None = stepped
        step = engine.step

        @wraps(step)
        def step_and_call(*args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            value = step(*args, **kwargs)
            if self._stepped is not None and engine.global_steps > before:
                self._stepped()
            return value

        engine.step = step_and_call

    def remove(self) -> None:
        """Ends the calls."""
        self._stepped = None
