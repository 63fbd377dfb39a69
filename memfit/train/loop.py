"""The training loop of a plan: window after window, on every rank; rank 0 writes a line of metrics for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from memfit.apply.batches import on_device
from memfit.apply.losses import MicroBatch
from memfit.apply.moving import CannotRepeatError
from memfit.apply.recompute import recompute
from memfit.apply.rig import Rig
from memfit.apply.window import WindowResult, run_window
from memfit.batch.windows import Window, Windows
from memfit.engine.ranks import gather
from memfit.errors import Exit
from memfit.job import Job
from memfit.plan import Plan
from memfit.train.envelope import largest, proven_training, try_saving
from memfit.train.final import write_final
from memfit.train.flight import write_flight
from memfit.train.folder import RunFolder
from memfit.train.less import AS_PLANNED, Less
from memfit.train.lines import check_finite, window_line
from memfit.train.monitor import Monitor
from memfit.train.phases import Phases
from memfit.train.proof import Proof
from memfit.train.recovery import Failure, Ids, Recovery, describe_request, release
from memfit.train.saver import Saver
from memfit.train.spread_saver import SpreadSaver
from memfit.train.stop import AbandonedError, Stop
from memfit.train.streams import COLLATE, LOSS, seed_stream


@dataclass(frozen=True, kw_only=True)
class Course:
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
    saver: Saver | SpreadSaver | None
    """On rank 0; where a state is spread over ranks, on all."""
    say: Callable[[str], None] = lambda line: None
    proves: bool = False
    """Whether every phase is tried before the first window."""
    proof: Proof | None = None
    """What proves windows during the run."""
    less: Less = AS_PLANNED
    """What ranks that started again do with less."""
    skips: bool = False
    """Whether a sample that does not fit alone is left out, instead of ending the run."""


def train(rig: Rig, course: Course) -> Exit:
    """Trains the windows of a course; a checkpoint at the end, when stopped, and in between."""
    stop, saver, engine = Stop(), course.saver, rig.engine
    predicted = course.plan.phases.get("train", {}).get("process_bytes")
    at = Position(course.first)
    recovery = Recovery(
        rig,
        remake=lambda ids: _micro(rig, course, at.window, ids),
        cost=lambda ids: padded_units(course, ids),
        largest=course.plan.micro_batch,
        skips=course.skips,
        less=course.less,
        told=lambda failure: _record(rig, course, at.window, failure),
    )
    monitor = Monitor(rig, course.resident_before)

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
            course.folder.flush()
            with phases.phase("save"):
                saver.save(rig, number)
            saver.finish()
        return Exit.STOPPED

    phases = Phases(rig, course.plan, course.folder.path, course.say, course.less)
    every = validate_every(rig, course)
    with recompute(rig.nets, course.plan.checkpointing), phases.training(), contextlib.closing(course.folder):
        if course.proves and course.first < course.last:
            with contextlib.suppress(AbandonedError):
                _prove(rig, course, recovery, phases, mark, stop)
        for number in range(course.first, course.last):
            if stop.asked and engine.world == 1:
                return stopped_at(number)
            window, at.window, at.stepped = course.windows.window(number), number, False
            begin = time.perf_counter()
            recovery.begin()
            parts = micro_batches(rig, course, window, recovery)
            monitor.begin(parts)
            proves = course.proof is not None and course.proof.begins(rig, number)
            try:
                result = run_window(rig, parts, mark, guard=recovery.guard)
            except AbandonedError as error:
                release(error)
                recovery.go_back()
                return stopped_at(number)
            recovery.end()
            learnt = tuple(ids for ids in _learnt(result) if ids)
            if course.proof is not None and proves:
                course.proof.ends(rig, number, learnt, {name: float(one) for name, one in result.losses.items()})
            done = sum(padded_units(course, ids) for ids in learnt)
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
            line = window_line(window, result, done, time.perf_counter() - begin, course.plan)
            norms = [norm for norm in line["gradient_norm"].values() if norm is not None]
            line |= monitor.end(line["loss"], norms[0] if len(norms) == 1 else None, recovery.retries)
            if every and (number + 1) % every == 0 and not any(gather(engine, stop.asked)):
                line |= _validation_line(phases, number, stop)
            ranks = gather(engine, (mine, line["measured_process_bytes"]))
            told = [one for one, _ in ranks]
            stopped, last = any(one.stop for one in told), number + 1 == course.last
            if engine.rank == 0:
                line |= _of_all(told, [measured for _, measured in ranks], line["seconds"])
                line["predicted_process_bytes"] = predicted
                for rank, one in enumerate(told):
                    course.folder.append("samples", {"window": number, "rank": rank, "ids": list(one.ids)})
                course.folder.append("metrics", line)
                check_finite(line, window)
            if saver is not None:
                if number == course.first:
                    saver.warm(rig)
                if stopped or last or any(one.due for one in told):
                    course.folder.flush()
                    with phases.phase("save"):
                        saver.save(rig, number + 1)
            if stopped:
                if saver is not None:
                    saver.finish()
                return Exit.STOPPED
    saved = saver is None or saver.finish()
    if saver is not None:
        write_final(rig, course.folder.path / "final")
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


def validate_every(rig: Rig, course: Course) -> int:
    """Windows between validations; 0: none."""
    every = course.plan.validate_every
    return (rig.job.validate_every if every is None else every) if rig.job.validates else 0


class SpoiledByTrialError(RuntimeError):
    """The trial of a window cannot be undone: the rig must be built again, and trained without a trial. All ranks
    raise it."""


def _prove(
    rig: Rig, course: Course, recovery: Recovery, phases: Phases, mark: Callable[[str], None], stop: Stop
) -> None:
    """Each phase is tried once, the largest first, after training, whose step makes the state that the others lie
    beside. Every rank tries the largest micro-batch of any rank."""
    some = range(course.first, min(course.first + PROVEN_FROM, course.last))
    windows = [recovery.parts(share) for number in some for share in course.windows.window(number).ranks]
    ids = largest(windows, lambda ids: padded_units(course, ids))
    parts = [_micro(rig, course, course.first, ids) for _ in range(min(max(map(len, windows)), 2))]
    sizes = {name: phase.get("process_bytes", 0) for name, phase in course.plan.phases.items()}
    try:
        with proven_training(rig, parts, recovery, mark):
            for name in sorted(("validate", "save"), key=lambda name: -sizes.get(name, 0)):
                if name == "validate" and validate_every(rig, course):
                    phases.validate(course.first, briefly=True, abandons=stop.abandons)
                elif name == "save" and course.saver is not None and course.saver.written != course.first:
                    with phases.phase("save"):
                        try_saving(course.saver, rig, course.first)
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


def _record(rig: Rig, course: Course, window: int, failure: Failure) -> None:
    """A memory failure is told, and what was resident is written down."""
    again = "all ranks start" if rig.engine.lockstep and rig.engine.world > 1 else "done"
    course.say(f"window {window}: out of memory in {failure.part} ({describe_request(failure)}); {again} again")
    with contextlib.suppress(OSError, MemoryError):
        write_flight(course.folder, course.plan, rig, window, failure, course.resident_before)


def micro_batches(rig: Rig, course: Course, window: Window, recovery: Recovery | None = None) -> list[MicroBatch]:
    """This rank's part of a window; on an engine in lockstep, as many as the rank with the most."""
    planned = window.ranks[rig.engine.rank]
    own = planned if recovery is None else recovery.parts(planned)
    found = [_micro(rig, course, window.number, ids) for ids in own]
    if rig.engine.lockstep:
        most = max(gather(rig.engine, len(own)))
        shortest = min(window.ids, key=lambda i: (course.lengths[i] if course.lengths is not None else 1, i))
        for _ in range(most - len(own)):
            found.append(replace(_micro(rig, course, window.number, (shortest,)), counts=False))
    return found


def _micro(rig: Rig, course: Course, window: int, ids: tuple[int, ...]) -> MicroBatch:
    host: list[Any] = []
    seed, early = course.plan.seed, type(rig.job).units is not Job.units

    def collated() -> Any:
        seed_stream(seed, window, ids[0], COLLATE)
        return rig.job.collate([course.samples[i] for i in ids])

    def fetch() -> Any:
        batch = host.pop() if host else collated()
        if early:
            seed_stream(seed, window, ids[0], LOSS)
        return on_device(batch, rig.device)

    units = None
    if early:
        host.append(collated())
        units = rig.job.units(host[0])
    return MicroBatch(fetch=fetch, padded_units=padded_units(course, ids), ids=ids, units=units)


def padded_units(course: Course, ids: Ids) -> int:
    """What these samples cost in one micro-batch."""
    if not ids or course.lengths is None:
        return len(ids)
    return len(ids) * max(course.lengths[i] for i in ids)
