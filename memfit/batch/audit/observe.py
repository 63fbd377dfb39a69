"""What one rank draws in two epochs: from a loader or sampler, or as a loop reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from memfit.batch.audit.ids import Batch, batch_of
from memfit.batch.audit.loaders import indices_only, watched
from memfit.batch.audit.parts import Declared, declared_by, set_epoch
from memfit.batch.audit.target import HOW, is_loop
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
    once: bool = False
    """An iterator that can be run through only once, so that there is no second epoch."""


class Observer:
    """What a loop reports to: every micro-batch it trains on and every optimizer step it takes."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.steps: list[int] = []
        self.epochs: list[int] = []

    def batch(self, ids: Any, lengths: Iterable[float] | None = None) -> None:
        """A micro-batch: its sample ids (list, array, tensor, or a batch with a field of ids), and their lengths."""
        if len(self.batches) >= MOST_BATCHES:
            raise InputError("the loop", f"it has reported {MOST_BATCHES} batches", "let it end after two epochs")
        self.batches.append(batch_of(ids, lengths))

    def step(self) -> None:
        """The optimizer has stepped."""
        self.steps.append(len(self.batches))

    def epoch(self, number: int | None = None) -> None:
        """An epoch begins. Not needed where the loop iterates a DataLoader, or where all epochs are equally long."""
        self.epochs.append(len(self.batches))


def run_rank(function: Callable[..., Any], rank: int, world: int) -> Drawn:
    """What the target gives to one rank in two epochs; the surroundings (ranks, process group) are the caller's."""
    if is_loop(function):
        return _run_loop(function, rank, world)
    with indices_only():
        given = function(rank, world)
        with indices_only():
            return _run_given(given, rank, world)


def _run_given(given: Any, rank: int, world: int) -> Drawn:
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise InputError(
            f"the target gave {type(given).__name__} for rank {rank} of {world}", "no loader and no sampler", HOW
        )
    declared = declared_by(given)
    batches: list[Batch] = []
    epochs: list[int] = []
    endless = once = False
    for epoch in range(EPOCHS):
        set_epoch(given, epoch)
        iterator = iter(given)
        drawn, endless = _run_epoch(iterator, declared, world)
        once = iterator is given and not drawn and epoch > 0
        if not once:
            epochs.append(len(batches))
            batches += drawn
    options = {"rank": rank, "declared": declared, "endless": endless, "once": once}
    return Drawn(batches=tuple(batches), epochs=tuple(epochs), **options)


def _run_epoch(iterator: Any, declared: Declared, world: int) -> tuple[list[Batch], bool]:
    """Batches of an epoch, and whether it had to be cut: after ``len`` batches or its share of the samples."""
    batches: list[Batch] = []
    samples, size = 0, declared.size or 0
    most = 3 * size + 1024 if size else MOST_UNKNOWN
    for element in iterator:
        batches.append(batch_of(element))
        samples += len(batches[-1].ids)
        if samples > most or len(batches) > 2 * most:
            break
    else:
        return batches, False
    if declared.steps and declared.steps < len(batches):
        return batches[: declared.steps], True
    if not size:
        raise InputError(
            "the target", f"it gave {samples} samples without an end", "give it a __len__, or let it end after an epoch"
        )
    share, held = -(-size // world), 0
    for number, batch in enumerate(batches):
        held += len(batch.ids)
        if held >= share:
            return batches[: number + 1], True
    return batches, True


def _run_loop(function: Callable[..., Any], rank: int, world: int) -> Drawn:
    observer, begun = Observer(), []

    def seen(loader: Any) -> None:
        begun.append((loader, len(observer.batches)))

    with watched(seen):
        function(rank, world, observer)
    loader, starts = _training_loader(begun, len(observer.batches))
    epochs = [at for at in dict.fromkeys(observer.epochs or starts) if at < len(observer.batches)]
    return Drawn(
        rank=rank,
        batches=tuple(observer.batches),
        epochs=tuple(epochs),
        steps=tuple(observer.steps),
        declared=declared_by(loader) if loader is not None else Declared(),
    )


def _training_loader(begun: list[tuple[Any, int]], total: int) -> tuple[Any, list[int]]:
    """Of the loaders that a loop iterated, the one under most of the reported batches, and where it began each time."""
    share: dict[int, int] = {}
    ends = [at for _, at in begun[1:]] + [total]
    for (loader, at), end in zip(begun, ends, strict=True):
        share[id(loader)] = share.get(id(loader), 0) + end - at
    if not any(share.values()):
        return None, []
    most = max(share, key=share.__getitem__)
    own = [(loader, at) for loader, at in begun if id(loader) == most]
    starts = [at for _, at in own]
    return own[0][0], starts if len(starts) > 1 else []
