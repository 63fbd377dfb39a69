"""The training loop of a plan: window after window, on every rank; rank 0 writes a line of metrics for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from memfit.apply.batches import on_device
from memfit.apply.buffer_snapshot import CannotRepeatError
from memfit.apply.checkpointing import recompute
from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import TrainState
from memfit.apply.window import WindowResult, run_window
from memfit.batch.windows import Window, Windows
from memfit.engine.collectives import gather
from memfit.errors import Exit
from memfit.job import Job
from memfit.plan import Plan
from memfit.train.checkpoint.final_weights import write_final
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.sharded_saver import ShardedSaver
from memfit.train.launch.stop_signals import AbandonedError, Stop
from memfit.train.loop.metrics import check_finite, window_line
from memfit.train.loop.monitor import Monitor
from memfit.train.loop.online_verify import OnlineVerify
from memfit.train.loop.phases import Phases
from memfit.train.loop.preflight import largest, preflight_training, try_saving
from memfit.train.loop.rng import COLLATE, LOSS, seed_stream
from memfit.train.recovery.oom_record import write_oom_record
from memfit.train.recovery.recovery import Failure, Ids, Recovery, describe_request, release
from memfit.train.recovery.reduced_limits import NO_REDUCTION, ReducedLimits
from memfit.train.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a loop needs beside the rig."""

    plan: Plan
    folder: RunFolder
    samples: Any
    """The job's data set, by index."""
    lengths: Sequence[int] | None
    windows: Windows
    first: int
    last: int
    """Windows [first, last) are trained."""
    resident_before: int
    """Bytes of the process before the job was built."""
    saver: Saver | ShardedSaver | None
    """On rank 0; where a state is spread over ranks, on all."""
    say: Callable[[str], None] = lambda line: None
    proves: bool = False
    """Whether every phase is tried before the first window."""
    proof: OnlineVerify | None = None
    """What proves windows during the run."""
    less: ReducedLimits = NO_REDUCTION
    """What ranks that started again do with less."""
    skips: bool = False
    """Whether a sample that does not fit alone is left out, instead of ending the run."""


def train(train_state: TrainState, context: RunContext) -> Exit:
    """Trains the windows of a course; a checkpoint at the end, when stopped, and in between."""
    stop, saver, engine = Stop(), context.saver, train_state.engine
    predicted = context.plan.phases.get("train", {}).get("process_bytes")
    at = Position(context.first)
    recovery = Recovery(
        train_state,
        remake=lambda ids: _micro(train_state, context, at.window, ids),
        cost=lambda ids: padded_units(context, ids),
        largest=context.plan.micro_batch,
        skips=context.skips,
        less=context.less,
        told=lambda failure: _record(train_state, context, at.window, failure),
    )
    monitor = Monitor(train_state, context.resident_before)

    def mark(part: str) -> None:
        recovery.mark(part)
        if part == "fetch":
            monitor.fetches()
        elif part == "optimizer":
            at.stepped = True
        if stop.asked and engine.world == 1 and not at.stepped and stop.impatient and recovery.can_go_back:
            raise AbandonedError

    def stopped_at(number: int) -> Exit:
        if saver is not None and saver.finish() is not None and saver.written != number:
            context.folder.flush()
            with phases.phase("save"):
                saver.save(train_state, number)
            saver.finish()
        return Exit.STOPPED

    phases = Phases(train_state, context.plan, context.folder.path, context.say, context.less)
    every = validate_every(train_state, context)
    with recompute(train_state.nets, context.plan.checkpointing), phases.training(), contextlib.closing(context.folder):
        if context.proves and context.first < context.last:
            with contextlib.suppress(AbandonedError):
                _prove(train_state, context, recovery, phases, mark, stop)
        for number in range(context.first, context.last):
            if stop.asked and engine.world == 1:
                return stopped_at(number)
            window, at.window, at.stepped = context.windows.window(number), number, False
            begin = time.perf_counter()
            recovery.begin()
            parts = micro_batches(train_state, context, window, recovery)
            monitor.begin(parts)
            proves = context.proof is not None and context.proof.begins(train_state, number)
            try:
                result = run_window(train_state, parts, mark, guard=recovery.guard)
            except AbandonedError as error:
                release(error)
                recovery.go_back()
                return stopped_at(number)
            recovery.end()
            learnt = tuple(ids for ids in _learnt(result) if ids)
            if context.proof is not None and proves:
                context.proof.ends(
                    train_state, number, learnt, {name: float(one) for name, one in result.losses.items()}
                )
            done = sum(padded_units(context, ids) for ids in learnt)
            mine = _Told(
                stop=stop.asked,
                due=saver is not None and saver.due(),
                ids=tuple(chain.from_iterable(learnt)),
                done=done,
                micro_batches=len(learnt),
                retries=recovery.retries,
                thrashes=recovery.thrashes,
                skipped_samples=tuple(recovery.skipped),
            )
            line = window_line(window, result, done, time.perf_counter() - begin, context.plan)
            norms = [norm for norm in line["gradient_norm"].values() if norm is not None]
            line |= monitor.end(line["loss"], norms[0] if len(norms) == 1 else None, recovery.retries)
            if every and (number + 1) % every == 0 and not any(gather(engine, stop.asked)):
                line |= _validation_line(phases, number, stop)
            ranks = gather(engine, (mine, line["measured_process_bytes"]))
            told = [one for one, _ in ranks]
            stopped, last = any(one.stop for one in told), number + 1 == context.last
            if engine.rank == 0:
                line |= _of_all(told, [measured for _, measured in ranks], line["seconds"])
                line["predicted_process_bytes"] = predicted
                for rank, one in enumerate(told):
                    context.folder.append("samples", {"window": number, "rank": rank, "ids": list(one.ids)})
                context.folder.append("metrics", line)
                check_finite(line, window)
            if saver is not None:
                if number == context.first:
                    saver.warm(train_state)
                if stopped or last or any(one.due for one in told):
                    context.folder.flush()
                    with phases.phase("save"):
                        saver.save(train_state, number + 1)
            if stopped:
                if saver is not None:
                    saver.finish()
                return Exit.STOPPED
    saved = saver is None or saver.finish()
    if saver is not None:
        write_final(train_state, context.folder.path / "final")
    return Exit.DONE if saved else Exit.STOPPED


@dataclass
class Position:
    """Where a run is."""

    window: int
    stepped: bool = False
    """Whether an optimizer has stepped in this window, which must then be finished."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a rank tells the others after a window."""

    stop: bool
    due: bool
    ids: Ids
    done: int
    micro_batches: int
    retries: int
    thrashes: int
    skipped_samples: Ids


def validate_every(train_state: TrainState, context: RunContext) -> int:
    """Windows between validations; 0: none."""
    every = context.plan.validate_every
    return (train_state.job.validate_every if every is None else every) if train_state.job.validates else 0


class SpoiledByTrialError(RuntimeError):
    """The trial of a window cannot be undone: the rig must be built again, and trained without a trial. All ranks
    raise it."""


def _prove(
    train_state: TrainState,
    context: RunContext,
    recovery: Recovery,
    phases: Phases,
    mark: Callable[[str], None],
    stop: Stop,
) -> None:
    """Each phase is tried once, the largest first, after training, whose step makes the state that the others lie
    beside. Every rank tries the largest micro-batch of any rank."""
    some = range(context.first, min(context.first + PROVEN_FROM, context.last))
    windows = [recovery.parts(share) for number in some for share in context.windows.window(number).ranks]
    ids = largest(windows, lambda ids: padded_units(context, ids))
    parts = [_micro(train_state, context, context.first, ids) for _ in range(min(max(map(len, windows)), 2))]
    sizes = {name: phase.get("process_bytes", 0) for name, phase in context.plan.phases.items()}
    try:
        with preflight_training(train_state, parts, recovery, mark):
            for name in sorted(("validate", "save"), key=lambda name: -sizes.get(name, 0)):
                if name == "validate" and validate_every(train_state, context):
                    phases.validate(context.first, briefly=True, abandons=stop.abandons)
                elif name == "save" and context.saver is not None and context.saver.written != context.first:
                    with phases.phase("save"):
                        try_saving(context.saver, train_state, context.first)
    except CannotRepeatError as error:
        raise SpoiledByTrialError(str(error)) from error


PROVEN_FROM = 64
"""Windows among which the largest micro-batch is looked for."""


def _validation_line(phases: Phases, window: int, stop: Stop) -> dict[str, Any]:
    begin = time.perf_counter()
    found = phases.validate(window, abandons=stop.abandons)
    return {
        "validation": dict(found.metrics) if found.metrics is not None else None,
        "validation_tries": found.tries,
        "validation_note": found.note,
        "validation_seconds": time.perf_counter() - begin,
    }


def _of_all(told: list[_Told], measured: list[int], seconds: float) -> dict[str, Any]:
    """The part of a line that sums what the ranks did."""
    done = sum(one.done for one in told)
    line: dict[str, Any] = {
        "global_batch_done": done,
        "units_per_second": done / seconds,
        "micro_batches": sum(one.micro_batches for one in told),
        "retries": max(one.retries for one in told),
        "allocator_retries": sum(one.thrashes for one in told),
        "skipped_samples": [i for one in told for i in one.skipped_samples],
        "measured_process_bytes": max(measured),
    }
    if len(told) > 1:
        line["measured_process_bytes_of_ranks"] = measured
    return line


def _learnt(result: WindowResult) -> list[Ids]:
    return [micro.ids for micro in result.micro_batches if micro.counts]


def _record(train_state: TrainState, context: RunContext, window: int, failure: Failure) -> None:
    """A memory failure is told, and what was resident is written down."""
    again = "all ranks start" if train_state.engine.syncs_in_backward and train_state.engine.world > 1 else "done"
    context.say(f"window {window}: out of memory in {failure.part} ({describe_request(failure)}); {again} again")
    with contextlib.suppress(OSError, MemoryError):
        write_oom_record(context.folder, context.plan, train_state, window, failure, context.resident_before)


def micro_batches(
    train_state: TrainState, context: RunContext, window: Window, recovery: Recovery | None = None
) -> list[MicroBatch]:
    """This rank's part of a window; on an engine in lockstep, as many as the rank with the most."""
    planned = window.ranks[train_state.engine.rank]
    own = planned if recovery is None else recovery.parts(planned)
    found = [_micro(train_state, context, window.number, ids) for ids in own]
    if train_state.engine.syncs_in_backward:
        most = max(gather(train_state.engine, len(own)))
        shortest = min(window.ids, key=lambda i: (context.lengths[i] if context.lengths is not None else 1, i))
        for _ in range(most - len(own)):
            found.append(replace(_micro(train_state, context, window.number, (shortest,)), counts=False))
    return found


def _micro(train_state: TrainState, context: RunContext, window: int, ids: tuple[int, ...]) -> MicroBatch:
    host: list[Any] = []
    seed, early = context.plan.seed, type(train_state.job).units is not Job.units

    def collated() -> Any:
        seed_stream(seed, window, ids[0], COLLATE)
        return train_state.job.collate([context.samples[i] for i in ids])

    def fetch() -> Any:
        batch = host.pop() if host else collated()
        if early:
            seed_stream(seed, window, ids[0], LOSS)
        return on_device(batch, train_state.device)

    units = None
    if early:
        host.append(collated())
        units = train_state.job.units(host[0])
    return MicroBatch(fetch=fetch, padded_units=padded_units(context, ids), ids=ids, units=units)


def padded_units(context: RunContext, ids: Ids) -> int:
    """What these samples cost in one micro-batch."""
    if not ids or context.lengths is None:
        return len(ids)
    return len(ids) * max(context.lengths[i] for i in ids)
