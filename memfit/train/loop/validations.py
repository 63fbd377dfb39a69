"""Validations: the validations of a run's windows, each as keys of its window's line of metrics."""

from __future__ import annotations

import time
from typing import Any

from memfit.apply.train_state import TrainState
from memfit.engine.collectives import gather
from memfit.train.launch.stop_signals import Stop
from memfit.train.loop.phases import Phases
from memfit.train.loop.run_context import RunContext, validate_every


class Validations:
    """Validates after every so many windows.

    Args:
        phases: runs a validation as the plan has it.
        stop: says whether the run is to stop, which abandons a validation.
    """

    def __init__(self, train_state: TrainState, context: RunContext, phases: Phases, stop: Stop) -> None:
        self._engine, self._context, self._phases, self._stop = train_state.engine, context, phases, stop
        self.every = validate_every(train_state, context)
        """Windows between validations; 0: none."""

    def after(self, window: int) -> dict[str, Any]:
        """What a validation after this window gives; empty where none is due."""
        if not self._is_due(window) or any(gather(self._engine, self._stop.asked)):
            return {}
        return self._validate(window)

    def redo_missed(self) -> None:
        """Does the newest window's validation that gave nothing, on the same weights: the run was stopped in or before
        it, it did not fit, or it raised and the job may have been mended."""
        context, window = self._context, self._context.first - 1
        if window < 0 or not self._is_due(window):
            return
        line = context.folder.metrics_of(window) if self._engine.rank == 0 else None
        missed = line is not None and line.get("validation") is None
        if not gather(self._engine, missed)[0]:
            return
        again = self._validate(window)
        if line is not None:
            context.folder.replace_metrics(line | again)

    def try_once(self, window: int) -> None:
        """Validates a little, before the first window, to show that it fits."""
        if self.every:
            self._phases.validate(window, briefly=True, strict=True, abandons=self._stop.abandons)

    def _is_due(self, window: int) -> bool:
        return self.every > 0 and (window + 1) % self.every == 0

    def _validate(self, window: int) -> dict[str, Any]:
        begin = time.perf_counter()
        self._context.progress("validate", window)
        result = self._phases.validate(window, abandons=self._stop.abandons)
        self._context.progress("metrics", window)
        return {
            "validation": dict(result.metrics) if result.metrics is not None else None,
            "validation_tries": result.tries,
            "validation_note": result.note,
            "validation_seconds": time.perf_counter() - begin,
        }
