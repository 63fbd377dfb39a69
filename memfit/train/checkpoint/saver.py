"""Saver: writes a run's checkpoints, straight from its tensors or in a thread while training goes on.

Asynchronous, the state is copied into host buffers that are made and touched once and used again, and a thread writes
and syncs them while the training goes on. On a card the copies take no device memory, and are queued on the training's
stream, before whatever changes the state next. On a CPU the buffers are as large as the state, within the same budget:
``Plan.checkpoint_writing`` says whether it holds them. Synchronous, the training waits until the tensors were written
from where they are.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.apply.train_state import TrainState
from memfit.errors import describe
from memfit.plan import Plan
from memfit.sizes import format_size
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.state import state_of
from memfit.train.checkpoint.state_codec import encode, is_dense
from memfit.train.checkpoint.tensor_file import in_file_order
from memfit.train.launch import memory_limit
from memfit.train.recovery.failure import clear_frames, describe_memory_failure, give_back


@dataclass(kw_only=True)
class Saver:
    """Saves when asked, never raises for what the disk or the memory does not hold, and says so instead.

    A write that memory fails in is tried once more.
    """

    checkpoints: Checkpoints
    plan: Plan
    lines: Sequence[Path] = ()
    """Files that must be on disk before a checkpoint of them, as samples.jsonl."""
    every: float = 60.0
    """Seconds between two checkpoints."""
    asynchronous: bool = False
    """Whether to copy, and write while training goes on; given up where there is no memory for the copy."""
    say: Callable[[str], None] = lambda line: None
    written: int | None = None
    """The next window of the newest checkpoint that was written whole."""
    failed: bool = False
    """Whether the last try to save failed."""
    held: float = 0.0
    """Seconds for which the last save held the training up."""
    _buffer: Tensor | None = None
    _thread: threading.Thread | None = None
    _fault: Exception | None = None
    _noted: bool = False
    _last: float = field(default_factory=time.monotonic)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the copy's buffers; 0 where there are none."""
        return 0 if self._buffer is None else len(self._buffer)

    def warm(self, train_state: TrainState) -> None:
        """After the first window: finds what cannot be kept, and makes the buffers, in the writer's thread.

        Raises:
            InputError: the state holds something that cannot be kept, naming it.
        """
        _, tensors = encode(state_of(train_state), "the state to save")
        self._say_notes(train_state)
        if self.asynchronous:
            self._start(lambda: self._room(sum(tensor.nbytes for tensor in tensors.values()), train_state.device))

    def due(self) -> bool:
        """Whether it is time for a checkpoint, and the one before is written."""
        return time.monotonic() - self._last > self.every and not (self._thread and self._thread.is_alive())

    def save(self, train_state: TrainState, next_window: int) -> None:
        """Saves the state with which this window begins; asynchronous, the write may still be going on afterwards."""
        begin = time.perf_counter()
        self._join()
        try:
            try:
                self._save(train_state, next_window)
            except (MemoryError, RuntimeError) as error:  # of what the job saves, or of the copy
                if not memory_limit.is_memory_failure(error):
                    raise
                with memory_limit.lifted():
                    clear_frames(error)
                    give_back(train_state.device)
                self._save(train_state, next_window)
        except (MemoryError, RuntimeError) as error:
            self._memory_failed(next_window, error)
        self._last, self.held = time.monotonic(), time.perf_counter() - begin

    def finish(self) -> bool:
        """Waits for what is being written; gives whether the last checkpoint that was asked for is whole on disk."""
        self._join()
        return not self.failed

    def _save(self, train_state: TrainState, next_window: int) -> None:
        state, tensors = encode(state_of(train_state), "the state to save")
        self._say_notes(train_state)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if not (self.asynchronous and self._room(nbytes, train_state.device)):
            self._write(next_window, state, tensors)
            return
        assert self._buffer is not None
        copies = copy_into(self._buffer, tensors)
        body = self._buffer[:nbytes] if all(copy.is_contiguous() for copy in copies.values()) else None
        copied = torch.cuda.Event() if train_state.device.type == "cuda" else None
        if copied is not None:
            copied.record()

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            self._write(next_window, state, copies, body)

        self._start(write)

    def _say_notes(self, train_state: TrainState) -> None:
        """Says once what a checkpoint does not hold."""
        for note in train_state.carried.notes(in_parts=False) if train_state.carried and not self._noted else ():
            self.say(note)
            self._noted = True

    def _room(self, nbytes: int, device: torch.device) -> bool:
        """Whether there is a host buffer of so many bytes, touched; says so once where there is no memory for it."""
        if self._buffer is not None and self.buffer_bytes >= nbytes:
            return True
        self._buffer = None
        try:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda").zero_()
        except (MemoryError, RuntimeError):
            self.say(
                f"no host memory for a copy of {format_size(nbytes)}: checkpoints are written while the training waits"
            )
            self.asynchronous = False
            return False
        return True

    def _write(self, next_window: int, state: Any, tensors: Mapping[str, Tensor], body: Tensor | None = None) -> None:
        try:
            try:
                self.checkpoints.write(next_window, state, tensors, self.plan, self.lines, body)
            except (MemoryError, RuntimeError, OSError) as error:
                if not memory_limit.is_memory_failure(error):
                    raise
                with memory_limit.lifted():
                    clear_frames(error)
                    give_back(torch.device("cpu"))
                self.checkpoints.write(next_window, state, tensors, self.plan, self.lines, body)
            self.written, self.failed = next_window, False
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, OSError) and not memory_limit.is_memory_failure(error):
                what_to_do = self._what_to_do(sum(t.nbytes for t in tensors.values()))
                self._failed(next_window, error.strerror or describe(error), what_to_do)
            else:
                self._memory_failed(next_window, error)

    def _memory_failed(self, next_window: int, error: Exception) -> None:
        if not memory_limit.is_memory_failure(error):
            raise error
        with memory_limit.lifted():
            self._failed(
                next_window, f"no memory for it: {describe_memory_failure(error)}", "plan again with a larger --memory"
            )

    def _what_to_do(self, nbytes: int) -> str:
        try:
            free = shutil.disk_usage(self.checkpoints.path).free
        except OSError:
            free = None
        room = "" if free is None else f" ({format_size(free)} are free there)"
        needed = format_size(max(nbytes, self._size_of_written()))
        return f"give {self.checkpoints.path} {needed} that can be written{room}"

    def _size_of_written(self) -> int:
        """Bytes that the newest whole checkpoint takes on disk; 0 where there is none."""
        if self.written is None:
            return 0
        files = self.checkpoints.folder(self.written).rglob("*")
        return sum(file.stat().st_blocks * 512 for file in files)

    def _failed(self, next_window: int, why: str, what_to_do: str) -> None:
        self.failed = True
        before = (
            "there is none before it"
            if self.written is None
            else f"the one before it, {self.checkpoints.folder(self.written)}, is whole"
        )
        self.say(f"checkpoint of window {next_window} not written: {why}; {before}; {what_to_do}")

    def _start(self, work: Callable[[], Any]) -> None:
        """Runs work in the writer's thread; here, where the system gives none."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._fault = error

        try:
            thread = threading.Thread(target=guarded, name="memfit-saver")
            memory_limit.start_thread(thread)
        except (RuntimeError, MemoryError):
            work()
        else:
            self._thread = thread

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault


def copy_into(buffer: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors in one host buffer, in the file's order and each in its own memory layout.

    On a card nothing is waited for, and no device memory is taken for tensors that fill one range of memory.
    """
    copies, begin = {}, 0
    for name, tensor in in_file_order(tensors):
        place = buffer[begin : begin + tensor.nbytes].view(tensor.dtype)
        begin += tensor.nbytes
        if is_dense(tensor) and not tensor.is_contiguous():
            place.copy_(tensor.as_strided((tensor.numel(),), (1,)), non_blocking=True)
            copies[name] = place.as_strided(tensor.shape, tensor.stride())
        else:
            copies[name] = place.view(tensor.shape).copy_(tensor, non_blocking=True)
    return copies
