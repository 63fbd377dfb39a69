"""The training loop of a plan: window after window, on every rank; rank 0 writes a line of metrics for each.

The way of a window through ``TrainingLoop``:

    micro-batches -> gradients -> check -> step -> reports of all ranks -> validation -> lines -> checkpoint
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from memfit.apply.buffer_snapshot import CannotRepeatError
from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import TrainState
from memfit.apply.window import TurnGradients, WindowResult, run_window
from memfit.batch.windows import Window
from memfit.engine.collectives import gather, share_ranks
from memfit.errors import Exit, describe, message_of
from memfit.planner.cpu_margin import planned_process_bytes
from memfit.train.checkpoint.final_weights import write_final
from memfit.train.data.loader import WorkerDiedError
from memfit.train.data.stream import StreamSamples
from memfit.train.data.stream_file import read_stream_state, write_stream_state
from memfit.train.launch import memory_limit
from memfit.train.launch.forked_copy import ForkedCopyGuard
from memfit.train.launch.stop_signals import AbandonedError, Stop
from memfit.train.loop.finite import NotFiniteError, check_gradients, check_state, not_finite_buffers
from memfit.train.loop.memory_reports import MemoryReports
from memfit.train.loop.metrics import EndedWindow, check_finite, lines_of_window, numbers_of
from memfit.train.loop.monitor import Monitor
from memfit.train.loop.phases import Phases
from memfit.train.loop.preflight import largest_micro_batches, preflight_training, try_lone_sample, try_saving
from memfit.train.loop.rank_report import RankReport
from memfit.train.loop.run_context import (
    RunContext,
    make_micro_batch,
    micro_batches,
    padded_units,
    parts_to_read,
)
from memfit.train.loop.validations import Validations
from memfit.train.recovery.failure import Failure, clear_frames, held_bytes, requested_bytes
from memfit.train.recovery.giving_up import GIVES_UP
from memfit.train.recovery.recovery import Recovery
from memfit.train.recovery.reduced_limits import ReducedLimits, StartAgainError
from memfit.train.run_folder import Lines


class GivenUpError(RuntimeError):
    """The run gave up in a window, and has started again to write a checkpoint before it. All ranks raise it."""


class SpoiledByTrialError(RuntimeError):
    """The trial of a window cannot be undone: the train state must be built again, and trained without a trial. All
    ranks raise it.

    Args:
        names: of the tensors that a forward changes.
    """

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


def train(train_state: TrainState, context: RunContext) -> Exit:
    """Trains the windows of a run; a checkpoint at the end, when stopped, and in between.

    Raises:
        NotFiniteError: a loss or gradient is not finite. The step was not applied, and a checkpoint was written.
        GrownMemoryError, SampleTooLargeError, NothingLeftError: memory ran out for good; a checkpoint was written.
        StartAgainError: the same, and the checkpoint can only be written after a new start.
        GivenUpError: this was the new start, and the checkpoint is written.
    """
    return TrainingLoop(train_state, context).run()


@dataclass
class Position:
    """Where a run is."""

    window: int
    stepped: bool = False
    """Whether an optimizer has stepped in this window, which must then be finished."""


class TrainingLoop:
    """Trains windows [first, last) of a run, on one rank."""

    def __init__(self, train_state: TrainState, context: RunContext) -> None:
        self._state, self._context, self._engine = train_state, context, train_state.engine
        self._stop, self._saver, self._progress = Stop(), context.saver, context.progress
        self._at = Position(context.first)
        self._expected_bytes = {
            "predicted_process_bytes": context.plan.phases.get("train", {}).get("process_bytes"),
            "planned_process_bytes": planned_process_bytes(context.plan),
        }
        self._monitor = Monitor(train_state, context.memory)
        self._phases = Phases(
            train_state, context.plan, context.folder.path, context.say, context.limits, context.validation
        )
        self._validations = Validations(train_state, context, self._phases, self._stop)
        self._reports = MemoryReports(train_state, context, self._monitor)
        self._allowed_buffers = not_finite_buffers(train_state)
        self._recovery = Recovery(
            train_state,
            remake=lambda ids: make_micro_batch(train_state, context, self._at.window, ids, keeps=False),
            cost=lambda ids: padded_units(context, ids),
            largest=context.plan.micro_batch,
            skips=context.skips,
            limits=context.limits,
            on_failure=lambda failure: self._reports.record_failure(self._at.window, failure),
            check=self._check,
            has_grown=self._reports.grown_memory,
            held_before=self._reports.held_before,
            changing=context.changing,
        )

    def run(self) -> Exit:
        """Trains, and gives ``Exit.DONE``, ``Exit.STOPPED``, or ``Exit.CHECK_FAILED`` where a validation failed."""
        context = self._context
        with self._around_windows():
            self._read_ahead()
            if context.proves and context.first < context.last:
                with contextlib.suppress(AbandonedError):
                    self._preflight()
            self._validations.redo_missed()
            for number in range(context.first, context.last):
                if self._stop.asked and self._engine.world == 1:
                    return self._stopped_before(number)
                if number == context.limits.stops_before:
                    self._give_up_before(number)
                try:
                    stopped = self._train_window(context.windows.window(number))
                except (AbandonedError, Exception) as error:
                    memory_limit.lift()  # nothing is trained after this, and what is said of it takes memory
                    if not (isinstance(error, AbandonedError) or self._ends_early(error)):
                        if memory_limit.is_memory_failure(error):
                            raise self._failed_after_step(number, error) from None
                        raise
                    clear_frames(error)
                    self._recovery.go_back()
                    return self._stopped_before(number)
                if stopped:
                    if self._saver is not None:
                        self._saver.finish()
                    return Exit.STOPPED
        return self._finish()

    def _read_ahead(self) -> None:
        """Lets workers read the samples of the windows to come, from where the newest checkpoint is."""
        context = self._context
        state = None
        if isinstance(context.samples, StreamSamples):
            state = read_stream_state(context.folder, context.first * context.plan.global_batch)
        if context.loader is not None:
            parts_of = partial(parts_to_read, self._state, context, self._recovery)
            context.loader.follow(context.first, context.last, parts_of, state)
        elif state is not None:
            context.samples.load(state)

    @contextlib.contextmanager
    def _around_windows(self) -> Iterator[None]:
        """Recomputing as the plan has it, the phase of training, and the run's files, which are closed in the end."""
        context = self._context
        with (
            recompute(self._state.nets, context.plan.checkpointing),
            self._phases.training(),
            contextlib.closing(context.folder),
        ):
            yield

    def _train_window(self, window: Window) -> bool:
        """Trains one window; gives whether the run is to stop after it."""
        context, number = self._context, window.number
        self._at.window, self._at.stepped = number, False
        begin = time.perf_counter()
        try:
            with ForkedCopyGuard():
                result = self._learn(window)
        except NotFiniteError as error:
            self._save_before(number, error, together=True)
            raise
        except WorkerDiedError as error:
            if self._engine.world > 1:
                raise
            self._save_before(number, error, together=True)
            raise
        except GIVES_UP as error:
            self._save_before(number, error, together=not self._engine.syncs_in_backward)
            raise
        except Exception as error:
            if not memory_limit.is_memory_failure(error):
                raise
            raise self._out_of_memory(number, error) from None
        seconds = time.perf_counter() - begin
        readings = self._monitor.end(result.norms, self._recovery.retries)
        noise, validation = self._monitor.noise_scale, self._validations.after(number)
        ended = EndedWindow(window, result, seconds, readings, noise, validation)
        reports = gather(self._engine, self._report(result, readings["measured_process_bytes"]))
        if self._engine.rank == 0:
            context.folder.append_soon(partial(self._lines, ended, reports))
        self._at = Position(number + 1)
        if self._state.scaler is not None:  # without a scaler, a step is taken only after its loss was checked
            check_finite(numbers_of(result), window)
        stopped = True in [report.stop for report in reports]
        if number == context.first and self._saver is not None:
            self._saver.warm(self._state)
        if stopped or number + 1 == context.last or True in [report.due for report in reports]:
            self._save(number + 1)
        return stopped

    def _learn(self, window: Window) -> WindowResult:
        """A window's gradients and steps, from its samples."""
        context, number = self._context, window.number
        self._recovery.begin()
        parts = micro_batches(self._state, context, window, self._recovery)
        if self._monitor.begin(parts, number):
            self._reports.warn_of_growth(number)
        verifies = context.proof is not None and context.proof.begins(self._state, number)
        result = run_window(self._state, parts, self._mark, guard=self._recovery.guard)
        self._recovery.end()
        if context.proof is not None and verifies:
            learned = tuple(micro.ids for micro in result.micro_batches if micro.counts and micro.ids)
            losses = {name: float(value) for name, value in result.losses.items()}
            context.proof.ends(self._state, number, learned, losses)
        return result

    def _mark(self, part: str) -> None:
        """Called when a part of the window begins. A long window is abandoned here once the run is to stop."""
        at = self._at
        self._recovery.mark(part)
        self._progress(part, at.window)
        if part == "fetch":
            self._monitor.fetches()
        elif part == "optimizer":
            at.stepped = True
        if not self._stop.asked or self._engine.world > 1 or at.stepped:
            return
        if self._stop.impatient and self._recovery.can_go_back:
            raise AbandonedError

    def _ends_early(self, error: Exception) -> bool:
        """Whether an error only says that the window cannot be finished, since the run is to stop.

        SIGTERM to all processes ends the workers of a job's loader too, and the loader then raises.
        """
        stops = self._stop.asked and self._engine.world == 1 and not self._at.stepped
        return stops and self._recovery.part == "fetch" and self._recovery.can_go_back

    def _check(self, made: TurnGradients) -> None:
        check_gradients(self._state, made, self._at.window)

    def _report(self, result: WindowResult, measured: int) -> RankReport:
        learned = [micro for micro in result.micro_batches if micro.counts and micro.ids]
        return RankReport(
            stop=self._stop.asked,
            due=self._saver is not None and self._saver.due(),
            ids=tuple(chain.from_iterable([micro.ids for micro in learned])),
            done=sum([micro.padded_units for micro in learned]),
            micro_batches=len(learned),
            retries=self._recovery.retries,
            allocator_retries=self._recovery.thrashes,
            skipped_samples=tuple(self._recovery.skipped),
            measured_process_bytes=measured,
        )

    def _lines(self, ended: EndedWindow, reports: list[RankReport]) -> Lines:
        """A window's lines of samples and metrics."""
        numbers = numbers_of(ended.result)
        alarm = {"alarm": self._monitor.alarm(numbers.loss), **self._expected_bytes}
        return lines_of_window(ended, numbers, reports, share_ranks(self._engine), self._context.plan, alarm)

    def _preflight(self) -> None:
        """Tries each phase once, the largest first, after training, whose step makes what the others lie beside."""
        context = self._context
        parts = largest_micro_batches(self._state, context, self._recovery)
        sizes = {name: phase.get("process_bytes", 0) for name, phase in context.plan.phases.items()}
        try:
            try_lone_sample(self._state, context, self._recovery, self._mark)
            with ForkedCopyGuard(), preflight_training(self._state, parts, self._recovery, self._mark):
                for name in sorted(("validate", "save"), key=lambda name: -sizes.get(name, 0)):
                    context.progress(name, context.first)
                    if name == "validate":
                        self._validations.try_once(context.first)
                    elif name == "save" and self._saver is not None and self._saver.written != context.first:
                        with self._phases.phase("save"):
                            try_saving(self._saver, self._state, context.first)
        except CannotRepeatError as error:
            raise SpoiledByTrialError(str(error), error.names) from error

    def _save(self, next_window: int) -> None:
        """A checkpoint of the state with which a window begins; its lines are on disk before it."""
        if self._saver is None:
            return
        self._context.progress("save", next_window)
        self._recovery.mark("save")
        self._context.folder.write_waiting()
        if self._engine.rank == 0 and isinstance(self._context.samples, StreamSamples):
            self._write_stream_state(next_window * self._context.plan.global_batch)
        check_state(self._state, next_window - 1, self._allowed_buffers)
        with self._phases.phase("save"):
            self._saver.save(self._state, next_window)
        self._context.progress("metrics", next_window)

    def _write_stream_state(self, position: int) -> None:
        """The state of the stream before this position."""
        context = self._context
        state = context.loader.state_before(position) if context.loader is not None else context.samples.newest_state()
        write_stream_state(context.folder, state)

    def _stopped_before(self, number: int) -> Exit:
        """Saves and stops before a window, or after it was put back to its start."""
        if self._saver is not None and self._saver.finish() is not None and self._saver.written != number:
            self._save(number)
            self._saver.finish()
        return Exit.STOPPED

    def _save_before(self, number: int, error: Exception, *, together: bool) -> None:
        """Saves the state with which a window began, in which the run gives up. The limit on memory is lifted: nothing
        but the save follows.

        Args:
            together: whether all ranks give up at this place, and none waits for another inside of the window.

        Raises:
            StartAgainError: that state cannot be had any more. All ranks start again, train up to it, save and stop.
        """
        written = self._saver is not None and self._saver.written == number
        if together:
            memory_limit.lift()
            if any(gather(self._engine, written)) or self._went_back():
                with contextlib.suppress(NotFiniteError):
                    self._stopped_before(number)
                gather(self._engine, None)
                return
        if not written and number != self._context.first:
            raise StartAgainError(str(error), ReducedLimits(stops_before=number)) from error

    def _went_back(self) -> bool:
        """Puts the window back to its start on all ranks; gives whether that could be done."""
        if any(gather(self._engine, self._at.stepped)):
            return False
        try:
            self._recovery.go_back()
        except CannotRepeatError:
            return False
        return True

    def _give_up_before(self, number: int) -> None:
        """Saves before the window in which the run gave up before it started again.

        Raises:
            GivenUpError: always.
        """
        memory_limit.lift()
        self._stopped_before(number)
        gather(self._engine, None)
        raise GivenUpError(self._context.limits.reason)

    def _out_of_memory(self, number: int, error: Exception) -> Exception:
        """Memory ran out where nothing is done again, as in what recovery itself allocates. Saves where it can."""
        clear_frames(error)
        memory_limit.lift()
        why = self._grown_memory(error) or error
        self._save_before(number, why, together=self._engine.world == 1)
        return why

    def _failed_after_step(self, number: int, error: Exception) -> Exception:
        """Memory ran out outside of what recovery does again, as where the run saves. Where the window is done, so are
        its lines, and the state is saved."""
        clear_frames(error)
        why = self._grown_memory(error) or error
        if self._engine.world == 1 and self._at.window == number + 1:
            with contextlib.suppress(NotFiniteError, MemoryError, OSError, RuntimeError):  # it may fail in the same way
                self._stopped_before(number + 1)
        return why

    def _finish(self) -> Exit:
        """The final weights, once the last checkpoint is whole."""
        saved = self._saver is None or self._saver.finish()
        if self._saver is not None:
            self._context.progress("save", self._context.last)
            write_final(self._state, self._context.folder.path / "final")
        if not saved:
            return Exit.STOPPED
        return Exit.CHECK_FAILED if self._phases.failed or not self._context.limits.validates else Exit.DONE

    def _grown_memory(self, error: Exception) -> Exception | None:
        """As ``MemoryReports.grown_memory``, of an error in no micro-batch."""
        failure = Failure(
            part=self._recovery.part, micro_batch=-1, ids=(), requested_bytes=requested_bytes(message_of(error)),
            held_bytes=held_bytes(self._state.device), message=describe(error),
        )  # fmt: skip
        return self._reports.grown_memory(failure)
