"""Saver of a state that is spread over ranks: each writes its part, all wait, and rank 0 puts it in its place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memfit.apply.train_state import TrainState
from memfit.engine.collectives import gather, is_memory_failure
from memfit.errors import InputError, describe
from memfit.job import Job
from memfit.plan import Plan
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.optimizer_state import has_optimizer_state
from memfit.train.checkpoint.sharded_checkpoint import save_sharded
from memfit.train.launch.memory_limit import lifted
from memfit.train.recovery.failure import clear_frames, describe_memory_failure, give_back


@dataclass(frozen=True)
class _Fault:
    """Why a rank has not written its part."""

    words: str
    memory: bool = False


@dataclass(kw_only=True)
class ShardedSaver:
    """As ``Saver``, for engines whose ranks hold parts; every rank has one, and calls it at the same places."""

    checkpoints: Checkpoints
    plan: Plan
    lines: Sequence[Path] = ()
    every: float = 60.0
    say: Callable[[str], None] = lambda line: None
    collect: Callable[[Path], str | None] = lambda parts: None
    """Brings the parts of all ranks together on rank 0's node; gives what failed."""
    clears: Sequence[int] = ()
    """Ranks that write into a folder of their own node, and remove what they have sent."""
    written: int | None = None
    held: float = 0.0
    failed: bool = False
    _last: float = field(default_factory=time.monotonic)

    def warm(self, train_state: TrainState) -> None:
        """Says what parts do not hold. Raises InputError where the job keeps more than nets and optimizers, which has
        no part on each rank."""
        if train_state.carried and train_state.carried.changed():
            for note in train_state.carried.notes(in_parts=True):
                self.say(note)
        if type(train_state.job).saved is not Job.saved:
            raise InputError(
                f"{type(train_state.job).__name__}.saved() on --engine {train_state.engine.name}",
                "a checkpoint in parts holds nets, optimizers and schedules alone",
                "write --engine ddp",
            )

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._last > self.every

    def save(self, train_state: TrainState, next_window: int) -> None:
        """Saves the state with which this window begins; nothing before every optimizer that keeps state has stepped.

        torch makes a state that is missing by a step of its own, which would stay (``get_optimizer_state_dict``).
        """
        if not has_optimizer_state(train_state):
            return
        begin = time.perf_counter()
        fault = self._try(train_state, next_window)
        if fault is not None and fault.memory:
            give_back(train_state.device)
            fault = self._try(train_state, next_window)
        self.failed = fault is not None
        if fault is None:
            self.written = next_window
        else:
            write = "plan again with a larger --memory" if fault.memory else f"give {self.checkpoints.path} more room"
            self.say(f"checkpoint of window {next_window} not written: {fault.words}; {write}")
        self._last, self.held = time.monotonic(), time.perf_counter() - begin

    def _try(self, train_state: TrainState, next_window: int) -> _Fault | None:
        """Writes the state once; gives the fault of the first rank that has one."""
        engine = train_state.engine
        unfinished = self.checkpoints.unfinished(next_window)
        clears = engine.rank == 0 or engine.rank in self.clears
        if clears:
            shutil.rmtree(unfinished, ignore_errors=True)
        gather(engine, None)
        fault = None
        try:
            save_sharded(train_state, unfinished / "parts")
            uncollected = self.collect(unfinished / "parts")
            fault = None if uncollected is None else _Fault(uncollected)
            if engine.rank == 0 and fault is None:
                self.checkpoints.write_parts(next_window, self.plan, self.lines)
        except OSError as error:
            fault = _Fault(error.strerror or describe(error))
        except (MemoryError, RuntimeError) as error:
            if not is_memory_failure(error):
                raise
            with lifted():
                fault = _Fault(f"no memory for it: {describe_memory_failure(error)}", memory=True)
                clear_frames(error)
        first = next((report for report in gather(engine, fault) if report is not None), None)
        if clears and engine.rank > 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        return first

    def finish(self) -> bool:
        """Whether the last checkpoint that was asked for is whole on disk."""
        return not self.failed
