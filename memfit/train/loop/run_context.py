"""RunContext: what a training loop is given beside the train state; and the micro-batches that it makes of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.apply.batches import on_device
from memfit.apply.losses import MicroBatch, host_units
from memfit.apply.train_state import TrainState
from memfit.batch.windows import Window, Windows
from memfit.engine.collectives import gather
from memfit.job import Job
from memfit.plan import Plan
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.sharded_saver import ShardedSaver
from memfit.train.data.device_copies import DeviceCopies
from memfit.train.data.loader import BatchLoader
from memfit.train.data.reader import BatchReader
from memfit.train.data.stream import StreamWindows
from memfit.train.launch.memory_limit import ProcessMemory
from memfit.train.loop.online_verify import OnlineVerify
from memfit.train.loop.rng import LOSS, seed_stream
from memfit.train.loop.validation_data import ValidationData
from memfit.train.recovery.failure import Ids
from memfit.train.recovery.recovery import Recovery
from memfit.train.recovery.reduced_limits import NO_REDUCTION, ReducedLimits
from memfit.train.run_folder import RunFolder

Progress = Callable[[str, int | None], None]
"""Called with each part of a window that begins, and the window's number."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a loop needs beside the train state."""

    plan: Plan
    folder: RunFolder
    samples: Any
    """The job's data set, by index; ``StreamSamples`` of one that can only be iterated."""
    lengths: Sequence[int] | None
    windows: Windows | StreamWindows
    first: int
    last: int
    """Windows [first, last) are trained."""
    saver: Saver | ShardedSaver | None
    """On rank 0; for a sharded state, on all ranks."""
    memory: ProcessMemory = field(default_factory=ProcessMemory)
    """Made before the job was built."""
    say: Callable[[str], None] = lambda line: None
    proves: bool = False
    """Whether every phase is tried before the first window."""
    changing: tuple[str, ...] = ()
    """Names of tensors that forwards changed in a trial that could not be undone."""
    validation: ValidationData | None = None
    """What the job is validated on; None: it is not."""
    proof: OnlineVerify | None = None
    """Verifies windows during the run."""
    limits: ReducedLimits = NO_REDUCTION
    """Smaller limits of ranks that started again."""
    skips: bool = False
    """Whether a sample that does not fit alone is left out, instead of ending the run."""
    progress: Progress = lambda part, window: None
    loader: BatchLoader | None = None
    """Reads the batches in workers; None: this process reads them."""
    copies: DeviceCopies | None = None
    """Copies to a card what workers have read; None: each batch is copied where the training stands."""


def micro_batches(
    train_state: TrainState, context: RunContext, window: Window, recovery: Recovery | None = None
) -> list[MicroBatch]:
    """This rank's part of a window. Where ranks synchronise in the backward, each has as many as the rank with most."""
    planned = window.ranks[train_state.engine.data_rank]

    def make(ids: Ids, keeps: bool = True) -> MicroBatch:
        return make_micro_batch(train_state, context, window.number, ids, keeps=keeps)

    parts = [make(ids) for ids in planned] if recovery is None else recovery.micro_batches(planned, make)
    if train_state.engine.syncs_in_backward:
        most = max(gather(train_state.engine, len(parts)))
        for _ in range(most - len(parts)):
            parts.append(make(_shortest(context, window))._replace(counts=False))
    return parts


def parts_to_read(train_state: TrainState, context: RunContext, recovery: Recovery, number: int) -> list[Ids]:
    """The samples of each micro-batch that this rank will read in a window, as far as is known before it."""
    window, rank = context.windows.window(number), train_state.engine.data_rank
    parts = recovery.sizes.parts_of(window.ranks[rank])
    if train_state.engine.syncs_in_backward:
        most = max(len(recovery.sizes.parts_of(share)) for share in window.ranks)
        parts += [_shortest(context, window)] * (most - len(parts))
    return parts


def _shortest(context: RunContext, window: Window) -> Ids:
    """The window's shortest sample: of micro-batches that a rank runs only to join the others."""
    return (min(window.ids, key=lambda i: (context.lengths[i] if context.lengths is not None else 1, i)),)


def make_micro_batch(
    train_state: TrainState, context: RunContext, window: int, ids: Ids, *, keeps: bool = True
) -> MicroBatch:
    """The micro-batch of these samples; collated now where the job counts its units before the forward.

    Args:
        keeps: whether a batch that is collated now is kept for the forward, and not collated again.
    """
    host: list[Any] = []
    seed, early, loader = context.plan.seed, type(train_state.job).units is not Job.units, context.loader
    if loader is not None:
        loader.wants(window, ids)

    def collated() -> Any:
        if loader is not None:
            return loader.read(window, ids)
        return BatchReader(samples=context.samples, collate=train_state.job.collate, seed=seed).read(window, ids)

    def fetch() -> Any:
        batch = host.pop() if host else collated()
        seed_stream(seed, window, ids[0], LOSS)
        return on_device(batch, train_state.device) if context.copies is None else context.copies.copy(batch)

    units = None
    if early:
        context.progress("fetch", window)
        batch = collated()
        units = host_units(train_state.job.units(batch))
        if keeps:
            host.append(batch)
    return MicroBatch(fetch=fetch, padded_units=padded_units(context, ids), ids=ids, units=units)


def padded_units(context: RunContext, ids: Ids) -> int:
    """What these samples cost in one micro-batch."""
    if not ids or context.lengths is None:
        return len(ids)
    return len(ids) * max(context.lengths[i] for i in ids)


def validate_every(train_state: TrainState, context: RunContext) -> int:
    """Windows between validations; 0: none."""
    every = context.plan.validate_every
    if not train_state.job.validates or context.validation is None:
        return 0
    return train_state.job.validate_every if every is None else every
