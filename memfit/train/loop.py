"""The training loop of a plan: window after window, on every rank; rank 0 writes a line of metrics for each."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from memfit.apply.losses import MicroBatch
from memfit.apply.recompute import recompute
from memfit.apply.rig import Rig, map_tensors
from memfit.apply.window import WindowResult, run_window
from memfit.batch.windows import Window, Windows
from memfit.engine.ranks import gather
from memfit.errors import Exit, InputError
from memfit.job import Job
from memfit.plan import Plan
from memfit.train import limit
from memfit.train.final import write_final
from memfit.train.folder import RunFolder
from memfit.train.saver import Saver
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
    saver: Saver | None
    """On rank 0."""


class Stop:
    """Set by SIGINT and SIGTERM; the window at hand is finished first."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def train(rig: Rig, course: Course) -> Exit:
    """Trains the windows of a course; a checkpoint at the end, when stopped, and in between."""
    stop, saver, engine = Stop(), course.saver, rig.engine
    predicted = course.plan.phases.get("train", {}).get("process_bytes")
    with recompute(rig.nets, course.plan.checkpointing):
        for number in range(course.first, course.last):
            window = course.windows.window(number)
            begin = time.perf_counter()
            limit.reset_peak()
            result = run_window(rig, micro_batches(rig, course, window))
            line = _line(window, result, time.perf_counter() - begin, course)
            mine = (stop.asked, saver is not None and saver.due(), line["measured_process_bytes"])
            asked, due, measured = zip(*gather(engine, mine), strict=True)
            stopped, last = any(asked), number + 1 == course.last
            if saver is not None:
                line |= {"predicted_process_bytes": predicted, "measured_process_bytes": max(measured)}
                if engine.world > 1:
                    line["measured_process_bytes_of_ranks"] = list(measured)
                for rank in range(engine.world):
                    applied = {"window": number, "rank": rank, "ids": list(window.ids_of([rank]))}
                    course.folder.append("samples", applied)
                course.folder.append("metrics", line)
                if number == course.first:
                    saver.warm(rig)
                if stopped or last or any(due):
                    saver.save(rig, number + 1)
            if stopped:
                if saver is not None:
                    saver.finish()
                return Exit.STOPPED
    saved = saver is None or saver.finish()
    if saver is not None:
        write_final(rig, course.folder.path / "final")
    return Exit.DONE if saved else Exit.STOPPED


def micro_batches(rig: Rig, course: Course, window: Window) -> list[MicroBatch]:
    """This rank's part of a window; on an engine in lockstep, as many as the rank with the most."""
    own = window.ranks[rig.engine.rank]
    most = max(map(len, window.ranks)) if rig.engine.lockstep else len(own)
    found = [_micro(rig, course, window.number, ids) for ids in own]
    shortest = min(window.ids, key=lambda i: (course.lengths[i] if course.lengths is not None else 1, i))
    for _ in range(most - len(own)):
        found.append(replace(_micro(rig, course, window.number, (shortest,)), counts=False))
    return found


def _micro(rig: Rig, course: Course, window: int, ids: tuple[int, ...]) -> MicroBatch:
    host: list[Any] = []
    seed = course.plan.seed

    def collated() -> Any:
        seed_stream(seed, window, ids[0], COLLATE)
        return rig.job.collate([course.samples[i] for i in ids])

    def fetch() -> Any:
        batch = host.pop() if host else collated()
        seed_stream(seed, window, ids[0], LOSS)
        return map_tensors(batch, lambda tensor: tensor.to(rig.device, non_blocking=True))

    units = None
    if type(rig.job).units is not Job.units:
        host.append(collated())
        units = rig.job.units(host[0])
    return MicroBatch(fetch=fetch, padded_units=_padded(course, ids), ids=ids, units=units)


def _padded(course: Course, ids: tuple[int, ...]) -> int:
    if course.lengths is None:
        return len(ids)
    return len(ids) * max(course.lengths[i] for i in ids)


def _line(window: Window, result: WindowResult, seconds: float, course: Course) -> dict[str, Any]:
    done = sum(_padded(course, ids) for ids in window.micro_batches)
    losses = {name: float(value) for name, value in result.losses.items()}
    for name, count in result.units.items():
        if float(count) == 0:
            raise InputError(
                f"window {window.number}: loss {name!r}",
                "no valid unit in the whole window",
                "leave out samples that have none: look at " + ", ".join(map(str, window.ids[:8])),
            )
    if any(not math.isfinite(value) for value in losses.values()):
        raise InputError(
            f"window {window.number}: loss {losses}",
            "not a finite number",
            "lower the learning rate, or look at samples " + ", ".join(map(str, window.ids[:8])),
        )
    return {
        "window": window.number,
        "epoch": window.epoch,
        "loss": sum(losses.values()),
        "losses": losses,
        "units": {name: float(value) for name, value in result.units.items()},
        "gradient_norm": {name: None if value is None else float(value) for name, value in result.norms.items()},
        "skipped": list(result.skipped),
        "global_batch_asked": course.plan.global_batch,
        "global_batch_done": done,
        "micro_batches": len(window.micro_batches),
        "seconds": seconds,
        "units_per_second": done / seconds,
        "measured_process_bytes": limit.peak_resident_bytes() - course.resident_before,
    }
