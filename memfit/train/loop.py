"""The training loop of a plan on one device: window after window, a line of metrics for each."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from memfit.apply.recompute import recompute
from memfit.apply.rig import Rig, map_tensors
from memfit.apply.window import MicroBatch, WindowResult, run_window
from memfit.batch.windows import Window, Windows
from memfit.errors import Exit, InputError
from memfit.job import Job
from memfit.plan import Plan
from memfit.train import limit
from memfit.train.final import write_final
from memfit.train.folder import RunFolder
from memfit.train.saver import Saver


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
    saver: Saver
    show: Callable[[dict[str, Any]], None] = lambda line: None


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
    stop, saver = Stop(), course.saver
    predicted = course.plan.phases.get("train", {}).get("process_bytes")
    with recompute(rig.nets, course.plan.checkpointing):
        for number in range(course.first, course.last):
            window = course.windows.window(number)
            begin = time.perf_counter()
            limit.reset_peak()
            result = run_window(rig, [_micro(rig, course, ids) for ids in window.micro_batches])
            line = _line(window, result, time.perf_counter() - begin, course) | {"predicted_process_bytes": predicted}
            course.folder.append("samples", {"window": number, "rank": 0, "ids": list(window.ids)})
            course.folder.append("metrics", line)
            course.show(line)
            if number == course.first:
                saver.warm(rig)
            if stop.asked or number + 1 == course.last or saver.due():
                saver.save(rig, number + 1)
            if stop.asked:
                saver.finish()
                return Exit.STOPPED
    saved = saver.finish()
    write_final(rig, course.folder.path / "final")
    return Exit.DONE if saved else Exit.STOPPED


def _micro(rig: Rig, course: Course, ids: tuple[int, ...]) -> MicroBatch:
    host: list[Any] = []

    def fetch() -> Any:
        batch = host.pop() if host else rig.job.collate([course.samples[i] for i in ids])
        return map_tensors(batch, lambda tensor: tensor.to(rig.device, non_blocking=True))

    units = None
    if type(rig.job).units is not Job.units:
        host.append(rig.job.collate([course.samples[i] for i in ids]))
        units = rig.job.units(host[0])
    return MicroBatch(fetch=fetch, padded_units=_padded(course, ids), units=units)


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
