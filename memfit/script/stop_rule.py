"""Decides when a trace has seen enough: the requested windows, every phase, or the time limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from memfit.script.outcome import TraceRequest
from memfit.script.repeated_trainings import RepeatedTrainings
from memfit.script.step_watch import EnoughError, StepWatch
from memfit.script.validation_results import keeps_results

WINDOWS = 3
"""Windows to see if the command gives no number: the first one makes the optimizers' state."""
MOST_WINDOWS = 12
"""After so many windows a trace stops waiting for a phase that has not come."""
NEXT_WINDOWS = 2
"""Windows within which conditions on counters hold once more."""
SHORT_TRACE = 20_000
"""A loop without a DataLoader of at most so many operators is followed past ``WINDOWS``, to its end."""
MOST_OF_ONE = 4
"""How many more times than requested an optimizer may step while another one never does."""
FURTHER_WINDOWS = 16
"""Windows at most that the turns of outer loops may take, until all loops have ended."""
LEAST_REST_SECONDS = 30.0
"""The least time for what comes after the loops. Its operators are limited too, so that sizes of a scan end alike."""
_OPERATORS_BETWEEN_LOOKS = 256
_PATIENCE = 3
"""How often a script may catch the stop and go on."""


@dataclass(kw_only=True)
class TraceStop:
    """Raises EnoughError in the script; if the script catches it again and again, calls ``finish_now``."""

    request: TraceRequest
    watch: StepWatch
    begin: float
    trainings: RepeatedTrainings
    reason: str = ""
    code_after: str = ""
    """What the script does with its nets after the training, where that was stopped."""
    find_code_after: Callable[[bool], str] = lambda is_past: ""
    """Tells where that begins; ``is_past``: the training is over."""
    finish_now: Callable[[str], None] = lambda why: None
    can_end_loops: Callable[[], bool] = lambda: False
    """Whether the loops that run can be left."""
    repeats_trainings: Callable[[], bool] = lambda: False
    """Whether a loop runs whose turns are trainings of their own."""
    meet_again: Callable[[], bool] = lambda: False
    """Lets conditions on counters that held early hold once more; returns whether there are any."""
    ends_loops: bool = False
    """Whether enough was seen, and what comes after the loops is waited for."""
    rest_alone: bool = False
    """Whether all phases were seen, and it is waited for what the script does with its nets after the training."""
    enough: str = ""
    """Why the next part of a window is not run."""
    _last_steps: int = 0
    """Steps of all optimizers, past which loops that do not end are stopped."""
    _last_operators: int = 0
    """Operators, past which what comes after the loops is stopped."""
    _operators: int = 0
    _raised: int = 0
    _next_validation: int | None = None
    """The number of windows after which the next validation, that runs beside what the first one left, is waited for
    no longer; None: there was no reason to wait."""

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Context in which the time limit holds, whatever the script does."""
        with suppress(ValueError):
            signal.signal(signal.SIGALRM, self._alarm)
            signal.setitimer(signal.ITIMER_REAL, self.request.limit_seconds, 5.0)
        try:
            yield
        finally:
            with suppress(ValueError):
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _alarm(self, *signal_and_frame: Any) -> None:
        self.stop(self.enough or f"the limit of {self.request.limit_seconds:.0f} s")

    def check(self) -> None:
        """Called before each operator."""
        self._operators += 1
        looks = self._operators % _OPERATORS_BETWEEN_LOOKS == 0
        if looks and self.ends_loops and self._operators > self._last_operators:
            self.stop(f"{self.watch.complete_windows} complete steps")
        if looks and time.perf_counter() - self.begin > self.request.limit_seconds:
            self.stop(f"the limit of {self.request.limit_seconds:.0f} s")

    def stop(self, why: str) -> None:
        """Raises:
        EnoughError: always, unless the script has caught it too often: then the process reports and ends.
        """
        if not self.reason:
            self.code_after = self.find_code_after(self.ends_loops and not self.can_end_loops())
        self.reason = self.reason or why
        self._raised += 1
        if self._raised > _PATIENCE:
            self.finish_now(self.reason)
        self.watch.tracer.pause()
        raise EnoughError(self.reason)

    def training_goes_on(self) -> None:
        """Called before each part of a window. Code after the last step, such as saving, still runs."""
        if not self.enough:
            return
        if not self.ends_loops:
            self.stop(self.enough)
        elif len(self.watch.steps) >= self._last_steps:
            self.stop(f"{self.watch.complete_windows} complete steps")

    def window_ended(self) -> None:
        """Called after each optimizer step."""
        if self.reason:
            self.stop(self.reason)
        self.trainings.step_ended()
        if self.enough:
            return
        self._look_for_more_weights()
        known = [optimizer.steps for optimizer in self.watch.current()]
        least, most = min(known), max(known)
        if self.request.steps is not None:
            if least >= self.request.steps or most >= MOST_OF_ONE * self.request.steps:
                self.enough = f"{self.request.steps} steps of every optimizer"
        elif self.request.batches is None:
            complete = least if least or most < MOST_OF_ONE * WINDOWS else most // MOST_OF_ONE
            if complete >= WINDOWS and (not self._waits() or complete >= MOST_WINDOWS):
                self.enough = f"{complete} steps of every optimizer"
                self._wait_for_the_rest(len(known))

    def _look_for_more_weights(self) -> None:
        """Waits for all phases again where more weights are trained from this step on: the optimizer has more state."""
        watch = self.watch
        states = watch.optimizers[watch.steps[-1][1]].states
        if len(states) > 1 and states[-1] > states[-2]:
            watch.saves = watch.validations = watch.epochs = 0

    def _wait_for_the_rest(self, optimizers: int) -> None:
        """Has the loops end where a phase, or other work with the nets, may come after them, within a limit that
        follows from the trace so far.
        """
        watch = self.watch
        seen = bool(watch.saves and watch.validations) and not self.repeats_trainings()
        if not self.can_end_loops() or (seen and not self.find_code_after(False)):
            return
        self.ends_loops, self.rest_alone = True, seen
        self._last_operators = 2 * (self._operators + SHORT_TRACE)
        self._last_steps = len(watch.steps) + FURTHER_WINDOWS * optimizers
        elapsed = time.perf_counter() - self.begin
        with suppress(ValueError):
            rest = min(max(elapsed, LEAST_REST_SECONDS), max(self.request.limit_seconds - elapsed, 1.0))
            signal.setitimer(signal.ITIMER_REAL, rest, 5.0)

    def _waits(self) -> bool:
        """Whether a phase that was not seen may still come soon."""
        watch = self.watch
        if self._waits_for_next_validation():
            return True
        if watch.loaders == 0:
            return not watch.saves and self._operators < SHORT_TRACE
        if watch.epochs >= 2:
            return False
        return not (watch.validations and watch.saves and watch.epochs) or self._keeps_results()

    def _waits_for_next_validation(self) -> bool:
        """Whether a validation every so many steps, which left its results, comes again."""
        if self._next_validation is None and self._keeps_results() and self.meet_again():
            self._next_validation = self.watch.windows + NEXT_WINDOWS
        comes = self._next_validation is not None and self.watch.windows < self._next_validation
        return comes and self.watch.validations == 1

    def _keeps_results(self) -> bool:
        """Whether the next validation needs more than the only one so far."""
        watch = self.watch
        if watch.validations != 1:
            return False
        start = next(cut.start for cut in reversed(watch.cuts) if cut.phase == "validate")
        return keeps_results(watch.tracer, start)
