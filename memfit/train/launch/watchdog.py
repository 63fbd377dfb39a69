"""Watchdog: ends a process that makes no progress, or that does not end soon after a signal to stop.

One thread in each training process. It looks on five times a second:

- Where no part of a window has begun for longer than the patience, the stacks of all threads are written to
  RUN/stacks/rank-N.txt. The other ranks see the file and write theirs. The line that is printed names the call and the
  rank that the others wait for. The exit code is 5: the run continues from its newest checkpoint.
- A signal is read from the system's own pipe (``signal.set_wakeup_fd``), since a thread that is stuck in C never runs
  Python's handler. A run that has not ended ``END_SECONDS`` later is ended. A checkpoint that is being written then is
  discarded, and the one before it stays. A second signal, later than a terminal's double, ends the run at once.

A C call that holds the interpreter's lock stops this thread too. For that case ``faulthandler``, which needs no lock,
has a timer that writes the stacks and ends the process; and ``memfit run`` kills its children (``supervisor``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from memfit.engine.torchrun_env import launch_suffix
from memfit.errors import Exit, line_of_job, line_of_job_in, with_source
from memfit.train.launch.memory_limit import small_stacks, start_thread
from memfit.train.launch.outcome import Outcome, clear_outcome, write_outcome
from memfit.train.launch.stop_signals import SIGNALS
from memfit.train.run_folder import CannotWriteError, RunFolder

LOOKS_EVERY, ARMS_EVERY = 0.2, 5.0
"""Seconds."""
END_SECONDS = 8.0
"""Seconds after a signal in which a run ends by itself."""
SECOND_SIGNAL = 2.0
"""Seconds after which another signal is a second request, and not the same one passed on."""
FACTOR = 20
"""The patience is so many times the longest part that was measured,"""
LEAST_PATIENCE = {"window": 120.0, "start": 1800.0, "validate": 1800.0, "save": 1800.0}
"""and no less than these seconds: for parts of a window, and for what happens once or seldom."""
LEAST_START = 120.0
"""Seconds that the start has with any patience: libraries are imported and the data set is made in it."""
FIRST_WINDOW = 900.0
"""Seconds for parts of a window before a window was finished: kernels are chosen and compiled in it."""
_COLLECTIVES = ("torch/distributed/", "memfit/engine/", "torch/autograd/", "torch/_dynamo/")
_GRACE = 3.0
"""Seconds in which the other ranks write their stacks."""


Part = tuple[str, int | None]
"""What a process is at: the part's name, and its window. A new one is made in every part of a window."""


class Watchdog:
    """Watches one training process.

    Args:
        folder: the run's folder.
        rank, world: of this process.
        patience: seconds without progress; None: by what was measured, see ``LEAST_PATIENCE``.
    """

    def __init__(self, folder: RunFolder, *, rank: int, world: int, patience: float | None = None) -> None:
        self._folder, self._rank, self._world, self._patience = folder, rank, world, patience
        self.part: Part = ("start", None)
        self._seen: Part = self.part
        """The part that this thread saw last."""
        self._since = time.monotonic()
        """When it saw that part first."""
        self.worker_stacks: Callable[[], list[str]] = list
        """Gives the stacks of the processes that read the data, as text."""
        self._of_workers: list[str] = []
        self._longest: dict[str, float] = {}
        self._windows = 0
        self._main = threading.main_thread().ident or 0
        self._signals: list[float] = []
        self._closed = threading.Event()
        self._armed = -ARMS_EVERY
        self._arming = threading.Lock()
        self._watching = False
        self._held = folder.stacks / f"held-{rank}{launch_suffix()}"
        """Stacks that are written without the interpreter's lock."""
        self._held_file: IO[bytes] | None = None
        self._earlier = frozenset(self._states("*"))
        """Of an earlier launch, where they could not be removed."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches while this is open."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._watching = True
        self._arm(time.monotonic())
        thread = threading.Thread(target=self._watch, args=(reader,), name="memfit-watchdog", daemon=True)
        start_thread(thread)
        try:
            yield
        finally:
            self._closed.set()
            self._watching = False
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._remove_held()
            signal.set_wakeup_fd(before)
            for descriptor in (reader, writer):
                os.close(descriptor)

    def progress(self, name: str, window: int | None = None) -> None:
        """Notes that a part begins: of a window, or ``validate``, ``save``, ``start``."""
        before = self.part
        name_before, window_before = before
        self.part = (name, window_before if window is None else window)
        if (name in LEAST_PATIENCE or name_before in LEAST_PATIENCE) and _kind(name) != _kind(name_before):
            now = time.monotonic()
            self._see(before, now)
            self._see(self.part, now)
            if (
                self._watching
            ):  # by the patience of what begins, which may be far shorter, and may hold the lock at once
                self._arm(now)

    def _see(self, part: Part, now: float) -> None:
        """Notes how long the part before took, as far as it was looked at."""
        before = self._seen
        if part is before:
            return
        kind = _kind(before[0])
        self._longest[kind] = max(self._longest.get(kind, 0.0), now - self._since)
        if part[1] is not None and before[1] is not None and part[1] > before[1]:
            self._windows += 1
        self._seen, self._since = part, now

    @property
    def patience(self) -> float:
        """Seconds that the part at hand may take."""
        kind = _kind(self.part[0])
        if self._patience is not None:
            return max(self._patience, LEAST_START) if kind == "start" else self._patience
        least = FIRST_WINDOW if kind == "window" and not self._windows else LEAST_PATIENCE[kind]
        return max(least, FACTOR * self._longest.get(kind, 0.0))

    def _watch(self, reader: int) -> None:
        while not self._closed.wait(LOOKS_EVERY):
            with contextlib.suppress(MemoryError, OSError, RuntimeError):  # a thread may find no memory
                self._look(reader)

    def _look(self, reader: int) -> None:
        now = time.monotonic()
        self._see(self.part, now)
        with contextlib.suppress(BlockingIOError):
            if any(number in SIGNALS for number in os.read(reader, 64)):
                self._signals.append(now)
        self._end_after_signal(now)
        with contextlib.suppress(CannotWriteError):  # the thread that trains raises it
            self._folder.write_waiting()
        if now - self._since > self.patience or self._another_hangs():
            self._end_without_progress(now)
        elif now - self._armed > ARMS_EVERY:
            self._arm(now)

    def _end_after_signal(self, now: float) -> None:
        if not self._signals:
            return
        elapsed = now - self._signals[0]
        again = len(self._signals) > 1 and self._signals[-1] - self._signals[0] > SECOND_SIGNAL
        if again or elapsed > END_SECONDS:
            self._write_stacks()
            why = "was told to stop twice" if again else f"did not end {END_SECONDS:g} s after it was told to stop"
            self._end(f"the run {why}, in {self._place()}; it continues from its newest checkpoint with --resume")

    def _another_hangs(self) -> bool:
        return self._world > 1 and self._count("rank-*") > 0

    def _end_without_progress(self, now: float) -> None:
        """All ranks write their stacks; one that the others wait for says so, or each where all wait."""
        seconds, waits = now - self._since, self._waits_for_others()
        self._write_stacks()
        if waits:
            (self._folder.stacks / f".waits-{self._rank}{launch_suffix()}").touch()
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and self._count("rank-*") < self._world:
            time.sleep(0.1)
        if waits and self._count(".waits-*") < self._count("rank-*"):
            time.sleep(_GRACE)
        self._end(
            f"{f'rank {self._rank}' if self._world > 1 else 'the run'} has made no progress for {seconds:.0f} s "
            f"in {self._place()}; the stacks of all ranks and threads are in {self._folder.stacks}; "
            "go on with --resume"
        )

    def _count(self, pattern: str) -> int:
        """Files of this launch that ranks have written."""
        return sum(state not in self._earlier for state in self._states(pattern))

    def _states(self, pattern: str) -> Iterator[tuple[str, int, int]]:
        """(name, inode, time of the last write) of each file."""
        for file in self._folder.stacks.glob(f"{pattern}{launch_suffix()}"):
            with contextlib.suppress(OSError):
                status = file.stat()
                yield file.name, status.st_ino, status.st_mtime_ns

    def _waits_for_others(self) -> bool:
        """Whether the main thread is in a collective, and not in code of the job."""
        frame = sys._current_frames().get(self._main)
        for at, line in traceback.walk_stack(frame) if self._world > 1 and frame is not None else ():
            if line_of_job([(at, line)]) is not None:
                return False
            if any(part in at.f_code.co_filename for part in _COLLECTIVES):
                return True
        return False

    def _place(self) -> str:
        """The part, the window and the call, in words."""
        name, number = self.part
        window = "" if number is None else f" of window {number}"
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return f"{name}{window}"
        stack = list(traceback.walk_stack(frame))
        code = stack[0][0].f_code
        call = f"{Path(code.co_filename).name}:{stack[0][1]} in {code.co_name}()"
        in_workers = next(filter(None, map(line_of_job_in, self._of_workers)), None)
        return f"{name}{window}, at {line_of_job(reversed(stack)) or in_workers or call}"

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError):
            self._of_workers = self.worker_stacks()
            self._folder.stacks.mkdir(exist_ok=True)
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            with open(
                self._folder.stacks / f"rank-{self._rank}{launch_suffix()}",
                "w",
                encoding="utf-8",
                errors="backslashreplace",
            ) as file:
                file.write(f"rank {self._rank} of {self._world}, process {os.getpid()}: {self._place()}\n")
                for ident, frame in sys._current_frames().items():
                    if ident != threading.get_ident():
                        file.write(f"\nThread {names.get(ident, ident)}, outermost call first:\n")
                        file.write("".join(traceback.format_stack(frame)))
                for number, stack in enumerate(self._of_workers):
                    file.write(f"\nWorker {number}, innermost call first:\n{with_source(stack)}")

    def _arm(self, now: float) -> None:
        """Sets the timer that needs no interpreter lock, later than this thread would act."""
        with self._arming, contextlib.suppress(MemoryError, OSError, RuntimeError), small_stacks():
            self._armed = now
            left = max(self.patience - (now - self._since), 0.0)
            if self._held_file is None:
                self._folder.stacks.mkdir(exist_ok=True)
                self._held_file = open(self._held, "wb", buffering=0)  # noqa: SIM115
            faulthandler.dump_traceback_later(left + 2 * _GRACE + ARMS_EVERY, exit=True, file=self._held_file)

    def _remove_held(self) -> None:
        if self._held_file is not None:
            self._held_file.close()
            with contextlib.suppress(OSError):
                self._held.unlink()
                self._folder.stacks.rmdir()

    def _end(self, line: str) -> None:
        """Ends the process, whatever its other threads are at."""
        self._remove_held()
        write_outcome(self._folder.path, Outcome(code=Exit.STOPPED), line)
        sys.stderr.flush()
        os._exit(Exit.STOPPED)


def clear_earlier(folder: RunFolder) -> None:
    """Removes what an earlier launch has left, its outcome and its stacks, before a process of this one begins."""
    clear_outcome(folder.path)
    for pattern in ("rank-*", ".waits-*", "held-*", "crash-*"):
        for left in folder.stacks.glob(pattern):
            with contextlib.suppress(OSError):
                left.unlink()


def ranks_that_held(folder: RunFolder) -> list[str]:
    """Files with the stacks of ranks that held the interpreter's lock until they were ended."""
    return [str(file) for file in sorted(folder.stacks.glob("held-*")) if file.stat().st_size]


def made_no_progress(folder: RunFolder) -> bool:
    """Whether ranks of the last launch have left stacks: the job's code hung in one of them."""
    return any(folder.stacks.glob("rank-*")) or bool(ranks_that_held(folder))


def remove_temporary_stacks(folder: RunFolder) -> None:
    """Removes what the ended processes of a launch have left beside their stacks: marks, and empty files that killed
    ones had kept open."""
    with contextlib.suppress(OSError):
        for left in (file for pattern in ("held-*", "crash-*", ".waits-*") for file in folder.stacks.glob(pattern)):
            if not left.stat().st_size:
                left.unlink()
        folder.stacks.rmdir()


def _kind(name: str) -> str:
    return name if name in LEAST_PATIENCE else "window"
