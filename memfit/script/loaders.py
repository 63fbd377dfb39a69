"""The script's DataLoaders: they run in this process, without pinned memory, and each pass is cut short."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from memfit.device.virtual.patching import replaced
from memfit.script.collected_batches import LEAST_BYTES, MOST_OPERATORS, CollectedBatches
from memfit.script.longest_samples import LongestSamples
from memfit.script.source_lines import own_frames
from memfit.script.step_watch import StepWatch
from memfit.torch_compat.data_workers import WorkerInfo, in_worker

LEAST_WINDOWS = 2
"""The least number of windows of a pass over a training loader, however many batches a window takes."""
MOST_BY_HAND = 64
"""A factor on the batches of a short pass, for ``next(iterator)`` in a script that does not handle the end of a pass.

"""
_ASKED = "_memfit_length_asked"
"""Attribute of a loader whose length the script has asked for."""
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_IN_PROCESS = {
    "num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None,
    "multiprocessing_context": None, "timeout": 0, "worker_init_fn": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShortPasses:
    """How passes over loaders are cut short.

    Attributes:
        most: batches of a pass.
        whole: whether a pass that does not train goes on to its end.
        collects: whether one that collects what its batches make does, within a limit.
        backwards: returns the number of backwards so far.
        on_cut: called where a pass that does not train is cut short.
        on_training_cut: called where a pass that trains is.
        on_collecting_cut: called where a pass that collects is, with its line, the bytes that a batch adds, and the
            number of batches left; None: unknown.
        longest: makes batches of the longest samples; None: batches are those of the samplers.
    """

    most: int
    watch: StepWatch
    backwards: Callable[[], int]
    whole: bool = False
    collects: bool = True
    on_cut: Callable[[], None] = lambda: None
    on_training_cut: Callable[[], None] = lambda: None
    on_collecting_cut: Callable[[str, int, int | None], None] = lambda line, nbytes, left: None
    longest: LongestSamples | None = None


class ShortIterator:
    """The first batches of a pass. A training pass goes on until its windows were seen."""

    def __init__(
        self,
        iterator: Any,
        passes: ShortPasses,
        worker: WorkerInfo | None = None,
        length: int | None = None,
        is_length_known: Callable[[], bool] = lambda: False,
    ) -> None:
        self._iterator, self._passes, self._worker, self._length = iterator, passes, worker, length
        self._is_length_known = is_length_known
        self._turns = CollectedBatches(tracer=passes.watch.tracer)
        self._most, self._watch, self._backwards = passes.most, passes.watch, passes.backwards
        self._served = self._collected = 0
        self._windows, self._started = self._watch.windows, self._backwards()
        self._stepped: list[int] = []
        """Batches served when each window of the pass had ended."""

    def __iter__(self) -> ShortIterator:
        return self

    def __next__(self) -> Any:
        trains = self._backwards() > self._started
        if self._watch.windows - self._windows > len(self._stepped):
            self._stepped.append(self._served)
        enough = not trains or self._watch.windows - self._windows >= LEAST_WINDOWS or self._watch.windows > 4
        enough = enough and (not trains or self._ends_as_a_whole_pass())
        is_cut = self._served >= self._most and enough and not self._goes_on()
        if is_cut and trains:
            self._passes.on_training_cut()
            self._end(trains)
        if not trains and not self._collected:
            self._turns.turn_begins()
        if is_cut and not self._passes.whole and not self._collects():
            self._passes.on_cut()
            self._end(trains)
        try:
            with as_worker(self._worker):
                batch = next(self._iterator)
        except StopIteration:
            self._end(trains)
        self._served += 1
        return batch

    def _ends_as_a_whole_pass(self) -> bool:
        """Whether as many batches were served since a window ended as are left over in the end of a whole pass.

        A script that accumulates gradients has some in its validation where batches are left over. One that has asked
        for the length may step with the last batch, and leaves none.
        """
        if len(self._stepped) < LEAST_WINDOWS:
            return True
        accumulated = self._stepped[-1] - self._stepped[-2]
        most = max(self._most, self._stepped[LEAST_WINDOWS - 1]) + 2 * accumulated
        if accumulated < 2 or self._served >= most:
            return True
        left_over = 0 if self._is_length_known() else self._length or 0
        return (self._served - left_over) % accumulated == 0

    def _goes_on(self) -> bool:
        """Whether the script would fail if the pass ended early."""
        return self._served < MOST_BY_HAND * self._most and _asked_by_hand(self._watch)

    def _collects(self) -> bool:
        """Whether the pass goes on, since it keeps what each of its batches makes."""
        if self._collected:
            return self._turns.operators < MOST_OPERATORS or self._cut_collecting(self._collected)
        nbytes = self._turns.bytes_of_a_turn()
        if nbytes is None:
            return self._passes.collects
        left = self._left()
        if nbytes * (MOST_OPERATORS if left is None else left) < LEAST_BYTES:
            return False
        self._collected = nbytes
        operators = self._turns.operators // self._served * (self._served + (left or 0))
        return (self._passes.collects and operators < MOST_OPERATORS) or self._cut_collecting(nbytes)

    def _cut_collecting(self, nbytes: int) -> bool:
        self._passes.on_collecting_cut(_line_of(self._watch), nbytes, self._left())
        return False

    def _left(self) -> int | None:
        return None if self._length is None else self._length - self._served

    def _end(self, trains: bool) -> None:
        if trains:
            self._watch.epoch_ended()
        raise StopIteration

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


@contextmanager
def as_worker(worker: WorkerInfo | None) -> Iterator[None]:
    """Context in which ``torch.utils.data.get_worker_info`` answers as in a worker of the loader."""
    with in_worker(worker) if worker is not None else nullcontext():
        yield


def _asked_by_hand(watch: StepWatch) -> bool:
    """Whether the user's own code calls ``next(iterator)`` and does not handle the end of a pass."""
    for frame in own_frames(watch.tracer.lines)[:1]:
        code = frame.f_code
        in_for_loop = dis.opname[code.co_code[frame.f_lasti]] == "FOR_ITER"
        asks = {"next", "__next__"} & set(code.co_names)
        return bool(asks) and not in_for_loop and "StopIteration" not in code.co_names
    return False


def _line_of(watch: StepWatch) -> str:
    """The user's line that asks for a batch."""
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in own_frames(watch.tracer.lines)), "")


def _asked_by_lightning() -> bool:
    """Whether Lightning asks for a length: it refuses intervals that are longer, and takes an early end for the end."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _LIGHTNING


@contextmanager
def short_loaders(passes: ShortPasses) -> Iterator[None]:
    """Context in which passes over DataLoaders are cut short, and ``len`` says so to all but Lightning."""
    with ExitStack() as stack:
        for owner in _loader_classes():
            stack.enter_context(replaced(owner, **_shortened(owner, passes)))
        yield


def _loader_classes() -> list[type]:
    """PyTorch's loader. Loaders of other libraries that do not use its iterators are left unchanged."""
    return [DataLoader]


def _shortened(owner: Any, passes: ShortPasses) -> dict[str, Any]:
    initialize, iterate, length = owner.__init__, owner.__iter__, owner.__len__
    names = [name for name in inspect.signature(initialize).parameters if name != "self"]

    @wraps(initialize)
    def in_process(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        initialize(self, **given | _IN_PROCESS)
        self.__dict__["_memfit_worker"] = (given.get("num_workers", 0), given.get("worker_init_fn"))

    def short(self: Any) -> ShortIterator:
        passes.watch.loaders += 1
        workers, prepare = self.__dict__.get("_memfit_worker", (0, None))
        worker = None
        if workers:
            worker = WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=self.dataset)
        with as_worker(worker):
            if workers and prepare is not None:
                prepare(0)
            iterator = iterate(self)
            if passes.longest is not None:
                with passes.watch.tracer.quiet():
                    passes.longest.replace(self, iterator)
        try:
            batches = int(length(self))
        except TypeError:  # of an IterableDataset
            batches = None
        return ShortIterator(iterator, passes, worker, batches, lambda: _ASKED in self.__dict__)

    def short_length(self: Any) -> int:
        self.__dict__[_ASKED] = True
        is_whole = passes.whole and not isinstance(self.sampler, RandomSampler)
        return int(length(self)) if is_whole or _asked_by_lightning() else min(passes.most, length(self))

    return {"__init__": in_process, "__iter__": short, "__len__": short_length}
