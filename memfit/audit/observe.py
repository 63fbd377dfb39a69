"""What one rank draws in two epochs: from a loader or sampler, or as a loop reports it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Sampler

from memfit.audit.ids import Batch, batch_of
from memfit.audit.loader_parts import Declared, declared_by, set_epoch
from memfit.audit.loaders import Watch, indices_only, watched
from memfit.audit.target import HOW, is_loop
from memfit.errors import InputError

EPOCHS = 2
MOST_BATCHES = 2_000_000
"""A loop that reports more than these is taken for one that never ends."""
MOST_UNKNOWN = 300_000
"""Samples of an epoch of a loader that says neither its length nor its data set's."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Batches of one rank, in order."""

    rank: int
    batches: tuple[Batch, ...]
    epochs: tuple[int, ...]
    """The batch at which each epoch starts; empty where a loop does not tell."""
    steps: tuple[int, ...] | None = None
    """How many batches came before each optimizer step; None where there is no loop."""
    declared: Declared = field(default_factory=Declared)
    endless: bool = False
    """A stream that was cut: one without an end, or a loop that stops within its first epoch."""
    once: bool = False
    """An iterator that can be run through only once, so that there is no second epoch."""


class Observer:
    """What a loop reports to: every micro-batch it trains on and every optimizer step it takes."""

    def __init__(self, watch: Watch) -> None:
        self.batches: list[Batch] = []
        self.steps: list[int] = []
        self.epochs: list[int] = []
        self.loaders: list[Any] = []
        """The loader that each batch came from; None where none was iterated."""
        self._watch = watch

    def batch(self, ids: Any, lengths: Iterable[float] | None = None) -> None:
        """A micro-batch: its sample ids (list, array, tensor, or a batch with a field of ids), and their lengths."""
        if len(self.batches) >= MOST_BATCHES:
            raise InputError("the loop", f"it has reported {MOST_BATCHES} batches", "let it end after two epochs")
        self.batches.append(batch_of(ids, lengths))
        self.loaders.append(self._watch.current)

    def step(self) -> None:
        """The optimizer has stepped."""
        self.steps.append(len(self.batches))

    def epoch(self, number: int | None = None) -> None:
        """An epoch begins. Not needed where the loop iterates a DataLoader, or where all epochs are equally long."""
        self.epochs.append(len(self.batches))


def run_rank(function: Callable[..., Any], rank: int, world: int, size: int | None = None) -> Drawn:
    """What the target gives to one rank in two epochs; the surroundings (ranks, process group) are the caller's.

    ``size`` is the number of samples, for a stream without an end that does not say it.
    """
    if is_loop(function):
        return _run_loop(function, rank, world)
    with indices_only():
        given = function(rank, world)
        with indices_only():
            return _run_given(given, rank, world, size)


def _run_given(given: Any, rank: int, world: int, size: int | None) -> Drawn:
    given = _chosen(given)
    if isinstance(given, Mapping) or not (isinstance(given, Iterable) or hasattr(given, "__getitem__")):
        raise InputError(
            f"the target gave {type(given).__name__} for rank {rank} of {world}", "no loader and no sampler", HOW
        )
    declared = declared_by(given)
    batches: list[Batch] = []
    epochs: list[int] = []
    once = False
    for epoch in range(EPOCHS):
        set_epoch(given, epoch)
        iterator = iter(given)
        drawn, ended = _run_epoch(iterator, declared, getattr(given, "num_workers", 0))
        if not ended:
            return _endless(drawn, declared, rank, world, declared.size or size)
        once = epoch > 0 and (isinstance(given, (list, tuple)) or (iterator is given and not drawn))
        if not once:
            epochs.append(len(batches))
            batches += drawn
    return Drawn(rank=rank, batches=tuple(batches), epochs=tuple(epochs), declared=declared, once=once)


def _chosen(given: Any) -> Any:
    """The loader, else the sampler, of several things that are returned together."""
    if isinstance(given, (list, tuple)):
        for kind in (DataLoader, Sampler):
            for candidate in given:
                if isinstance(candidate, kind):
                    return candidate
    return given


def _run_epoch(iterator: Any, declared: Declared, workers: int = 0) -> tuple[list[Batch], bool]:
    """Batches of an epoch, and whether it ended by itself.

    Each worker of an iterable data set that does not divide its samples gives them all, in turn with the others.
    """
    repeats = 6 * max(workers, 1)
    batches: list[Batch] = []
    samples, seen = 0, set[Any]()
    most = 3 * declared.size + 1024 if declared.size else MOST_UNKNOWN
    for element in iterator:
        batches.append(batch_of(element))
        samples += len(batches[-1].ids)
        seen.update(batches[-1].ids)
        again = not declared.size and samples > 1024 and samples > repeats * len(seen)
        if again or samples > most or len(batches) > 2 * most:
            return batches, False
    return batches, True


def _endless(batches: list[Batch], declared: Declared, rank: int, world: int, size: int | None) -> Drawn:
    """A stream without an end, cut after ``len`` batches or the rank's share of the samples, and again after that.

    Raises:
        InputError: nothing says how many samples there are, and none came twice.
    """
    seen = {index for batch in batches for index in batch.ids}
    held = list(itertools.accumulate(len(batch.ids) for batch in batches))
    if not (size or declared.steps) and len(seen) == held[-1] > 0:
        raise InputError(
            f"what the target gave for rank {rank} of {world}",
            f"after {held[-1]:,} samples, none of which came twice, it had not ended: how many there are is not known",
            "let it end, or give it a __len__",
        )
    size = size or len(seen)
    share = -(-size // world)
    steps = declared.steps or 0
    if not 0 < steps <= len(batches) // 2:
        steps = next((number for number, samples in enumerate(held, 1) if samples >= share), len(batches) // 2)
    cut = tuple(batches[: 2 * steps])
    return Drawn(rank=rank, batches=cut, epochs=(0, steps), declared=declared, endless=True)


def _run_loop(function: Callable[..., Any], rank: int, world: int) -> Drawn:
    with watched() as watch:
        observer = Observer(watch)
        watch.now = lambda: len(observer.batches)
        function(rank, world, observer)
    used = [loader for loader in observer.loaders if loader is not None]
    loader = max(used, key=lambda candidate: sum(candidate is other for other in used[:1000]), default=None)
    starts = [at for begun, at in watch.begun if begun is loader]
    epochs = [at for at in dict.fromkeys(observer.epochs or starts) if at < len(observer.batches)]
    declared = declared_by(loader) if loader is not None else Declared()
    return Drawn(
        rank=rank,
        batches=tuple(observer.batches),
        epochs=tuple(epochs) if len(epochs) > 1 or observer.epochs else (),
        steps=tuple(observer.steps),
        declared=declared,
        endless=len(epochs) < 2 and len(observer.batches) < (declared.steps or 0),
    )
