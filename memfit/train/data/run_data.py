"""RunData: a run's job, its samples, the windows of them, and the workers that read them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.batch.dataset import by_index, check_no_loader, is_stream, lengths_of
from memfit.batch.windows import Windows
from memfit.engine.protocol import Engine
from memfit.engine.torchrun_env import torchrun_env
from memfit.errors import InputError
from memfit.job import Job
from memfit.loading import load_job
from memfit.plan import Plan
from memfit.train.data.loader import BatchLoader
from memfit.train.data.reader import BatchReader
from memfit.train.data.stream import StreamSamples, StreamWindows
from memfit.train.data.worker_count import DEFAULT_BYTES, ReadingCost, choose_loading, reading_cost
from memfit.train.launch.outcome import say
from memfit.train.launch.warm_up import warm_up
from memfit.train.loop.rng import seed_all
from memfit.train.loop.validation_data import ValidationData, validation_data


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run reads."""

    job: Job
    samples: Any
    """By index; ``StreamSamples`` of a data set that can only be iterated."""
    lengths: Sequence[int] | None
    """Units of each sample; None: a sample is one unit."""
    windows: Windows | StreamWindows
    validation: ValidationData | None
    """None: the job is not validated."""
    loader: BatchLoader | None
    """Workers that read the samples; None: this process reads them."""
    first_sample: int
    """Checksum of the first sample; 0 where samples have an index, and the first is not the same each time."""


def load_run_data(plan: Plan, engine: Engine, workers: int | None) -> RunData:
    """Loads the job and its samples, and takes what libraries keep before the memory is limited. Workers are forked
    last, while this process is small.

    Args:
        workers: processes that read; None: chosen by what reading a sample takes.

    Raises:
        InputError: the data set is no sequence and no stream, or its lengths do not fit it.
    """
    threads = {thread.ident for thread in threading.enumerate()}
    job = load_job(plan.job, dict(plan.settings), unit=plan.unit)
    seed_all(plan.seed)
    samples, lengths, windows = samples_and_windows(job, plan, engine.data_world)
    reader = BatchReader(samples=samples, collate=job.collate, seed=plan.seed)
    cost = reading_cost(reader, (0,), threads)
    if isinstance(samples, StreamSamples):
        samples.forget()
    validation = validation_data(job)
    warm_up(job, plan.micro_batch)
    data = RunData(
        job=job,
        samples=samples,
        lengths=lengths,
        windows=windows,
        validation=validation,
        loader=_loader(plan, engine, workers, job=job, lengths=lengths, reader=reader, cost=cost),
        first_sample=cost.checksum if isinstance(samples, StreamSamples) or cost.repeats else 0,
    )
    seed_all(plan.seed)
    return data


def samples_and_windows(job: Job, plan: Plan, ranks: int) -> tuple[Any, list[int] | None, Windows | StreamWindows]:
    """A job's samples by index or as a stream, their lengths, and the windows of them.

    Raises:
        InputError: see ``load_run_data``.
    """
    raw = job.dataset()
    check_no_loader(job, raw)
    if not is_stream(raw):
        samples, lengths = by_index(job, raw), lengths_of(job)
        return samples, lengths, Windows.of_plan(plan, size=len(samples), lengths=lengths, ranks=ranks)
    if job.lengths() is not None or job.longest is not None:
        seen = f"{type(job).__name__}.dataset() of type {type(raw).__name__}"
        write = "give a sequence of samples, or a job in which a sample is one unit"
        raise InputError(seen, f"it can only be iterated, and {plan.unit} are counted before samples are read", write)
    stream = StreamSamples(raw, seed=plan.seed, window=plan.global_batch, keep=2 * plan.global_batch)
    return stream, None, StreamWindows(global_batch=plan.global_batch, micro_batch=plan.micro_batch, ranks=ranks)


def _loader(
    plan: Plan,
    engine: Engine,
    workers: int | None,
    *,
    job: Job,
    lengths: Sequence[int] | None,
    reader: BatchReader,
    cost: ReadingCost,
) -> BatchLoader | None:
    """The workers that read this rank's batches; None where this process reads them."""
    choice = choose_loading(
        workers,
        cost,
        reader,
        batch_units=plan.micro_batch / (lengths[0] if lengths is not None else 1),
        window_parts=len(plan.micro_batches[engine.data_rank]),
        turns=max(len(job.turns([])), 1) if type(job).turns is not Job.turns else 1,
        ranks_here=_ranks_here(),
        budget=plan.read_ahead_bytes or DEFAULT_BYTES,
    )
    if choice.line and engine.rank == 0:
        say(choice.line)
    if not choice.workers:
        return None
    return BatchLoader(
        reader,
        choice.workers,
        ahead=choice.ahead,
        kept=choice.kept,
        slot_bytes=choice.slot_bytes,
        pins=plan.device != "cpu",
    )


def _ranks_here() -> int:
    place = torchrun_env()
    return 1 if place is None else place.local_world
