"""The prediction of the step that failed, of a job or a script, with what its changes save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit.device.hardware.catalogue import Device, catalogue, find_device, with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.explain.changes import Change
from memfit.explain.evidence import Evidence, MemoryFailure
from memfit.footprint import Footprint
from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.job import Job, Shape

NEAR = 0.1
"""Measured and predicted bytes within this part of each other count as the same."""


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What memfit predicts for the step."""

    of: str
    device: Device
    footprint: Footprint
    lines: tuple[tuple[str, int], ...]
    """Of a script: the lines that hold most, with their bytes."""
    changes: tuple[Change, ...]
    epoch: LargestWindow | None = None
    """Of a job whose samples have lengths."""


@dataclass(frozen=True, kw_only=True)
class LargestWindow:
    """When an epoch meets its largest micro-batch, in the order that ``memfit run`` draws."""

    window: int
    windows: int
    shape: Shape
    process_bytes: int
    fits: bool

    def __str__(self) -> str:
        batch = f"{self.shape.items} x {self.shape.length}"
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"the largest micro-batch of an epoch, {batch}, comes in window {self.window} of {self.windows} (counted "
            f"from 0): {format_size(self.process_bytes)} predicted, which {verdict}"
        )


def device_for(name: str | None, failure: MemoryFailure | None) -> Device:
    """The card of --device, or the one of the catalogue whose memory is nearest to the failure's, with that memory."""
    capacity = failure.capacity if failure is not None else None
    if name is not None:
        device = local_cpu() if name == "cpu" else find_device(name)
    elif failure is not None and failure.allocator == "cpu":
        device = local_cpu()
    else:
        cards = [find_device(key) for key in catalogue() if key != "cpu"]
        wanted = capacity or 80 << 30
        device = min(cards, key=lambda card: abs((card.memory_bytes or 0) - wanted))
    limit = failure.allowed if failure is not None and failure.allowed is not None else capacity
    return device if limit is None or name is not None else with_memory(device, limit)


def predict_job(job: Job, name: str, shape: Shape, device: Device) -> StepPrediction:
    """The step of a job, and what half the micro-batch and checkpointing every block save of it."""
    from memfit.geometry import shape_of
    from memfit.planner.predict import checkpoint_all, plain_nets, predict

    own = predict(job, name, shape, device)
    changes = []
    peak = _peak(own.footprint)
    if shape.units >= 2 * (job.longest or 1) or (job.longest is None and shape.units > 1):
        half = predict(job, name, shape_of(job, shape.units // 2), device, micro_batches=2)
        changes.append(
            _change(
                f"micro-batch {shape.units // 2} with twice the accumulation",
                f"memfit plan {name} --global-batch {shape.units} --device {device.key}",
                peak, half.footprint,
            )
        )  # fmt: skip
    modes = checkpoint_all(job, plain_nets(job))
    if modes and dict(own.checkpointing) != modes:
        recomputed = predict(job, name, shape, device, checkpointing=modes)
        write = f"memfit predict {name} --checkpoint all"
        changes.append(_change("checkpoint activations", write, peak, recomputed.footprint))
    return StepPrediction(
        of=f"{name}, micro-batch {shape.units} {job.unit}", device=device, footprint=own.footprint, lines=(),
        changes=tuple(changes), epoch=_largest_window(job, name, shape, device),
    )  # fmt: skip


def _largest_window(job: Job, name: str, shape: Shape, device: Device) -> LargestWindow | None:
    """The window of the first epoch with the largest micro-batch, by items times length; None without lengths."""
    from memfit.batch.dataset import lengths_of
    from memfit.planner.predict import predict
    from memfit.planner.variable_length.sequence import drawn_windows

    lengths = lengths_of(job) if job.longest is not None and job.lengths() is not None else None
    if not lengths or min(lengths) == max(lengths):
        return None
    windows = drawn_windows(job, lengths, global_batch=shape.units, micro_batch=shape.units, count=0)
    largest = max(range(len(windows)), key=lambda number: max(each.units for each in windows[number]))
    worst = max(windows[largest], key=lambda each: each.units)
    footprint = predict(job, name, worst, device).footprint
    return LargestWindow(
        window=largest, windows=len(windows), shape=worst, process_bytes=_peak(footprint), fits=footprint.fits
    )  # fmt: skip


def predict_script(command: str, device: Device) -> StepPrediction | None:
    """The steps of a script on the virtual card; None where it ended before its first step."""
    from memfit.script.command_line import parse_command_line
    from memfit.script.launch import trace_with_need
    from memfit.script.outcome import TraceRequest

    outcome = trace_with_need(TraceRequest(command=parse_command_line(command), device=device.key))
    if outcome.footprint is None:
        return None
    changes = [
        Change(
            name=option.name, write=option.write, helps="perhaps", saves_bytes=option.saves_bytes,
            why=f"{option.where}: {option.reason}".rstrip(": "),
        )
        for option in outcome.options
    ]  # fmt: skip
    lines = [(f"{line.file}:{line.line}  {line.text.strip()}", line.bytes) for line in outcome.lines[:5]]
    return StepPrediction(
        of=command, device=device, footprint=outcome.footprint, lines=tuple(lines), changes=tuple(changes)
    )  # fmt: skip


def measured_and_predicted(evidence: Evidence, prediction: StepPrediction) -> list[tuple[str, int | None, int]]:
    """(what, measured bytes or None, predicted bytes), in the order in which they are compared."""
    failure = evidence.failures[0] if evidence.failures else None
    phase = _largest_phase(prediction.footprint)
    state = evidence.state
    allocated = failure.allocated if failure is not None and failure.allocator != "host" else None
    if allocated is None and state is not None:
        allocated = state.peak_allocated or state.allocated
    reserved = failure.reserved if failure is not None else state.reserved if state is not None else None
    process = failure.process if failure is not None else None
    rows: list[tuple[str, int | None, int]] = [
        ("allocated", allocated, phase.allocated_bytes),
        ("reserved", reserved, phase.reserved_bytes),
        ("process", process, phase.process_bytes),
    ]
    measured: Mapping[str, int] = dict(evidence.categories)
    rows += [(name, measured.get(name), nbytes) for name, nbytes in phase.categories.items() if nbytes]
    return rows


def conclusion(evidence: Evidence, prediction: StepPrediction) -> str:
    """Whether the failure agrees with the prediction, in one sentence."""
    footprint, failure = prediction.footprint, evidence.failures[0] if evidence.failures else None
    need, room = _peak(footprint), prediction.device.usable_bytes
    on = f"on {prediction.device.key}" + (f" with {format_size(room)}" if room else "")
    if footprint.verdict == "no":
        return f"The prediction agrees: {prediction.of} needs {format_size(need)} {on}, which does not fit."
    measured = failure.allocated if failure is not None and failure.allocator != "host" else None
    predicted = _largest_phase(footprint).allocated_bytes
    if measured is not None and measured > predicted * (1 + NEAR):
        return (
            f"The prediction differs: {prediction.of} fits {on} with {format_size(need)}. The run had "
            f"{format_size(measured - predicted)} more allocated than that step needs: a leak, a longer sample, or "
            "another phase."
        )
    return (
        f"The prediction differs: {prediction.of} fits {on} with {format_size(need)}; look at what else holds the "
        "card's memory, and at fragmentation."
    )


def with_prediction(changes: tuple[Change, ...], prediction: StepPrediction, short: int | None) -> tuple[Change, ...]:
    """The changes with the prediction's bytes in the place of those that the file could not tell."""
    own = [
        replace(change, helps="yes")
        if short is not None and change.saves_bytes is not None and change.saves_bytes >= short
        else change
        for change in prediction.changes
    ]
    names = {change.name for change in own}
    both = {"half the micro-batch, twice the accumulation"} if any("micro-batch" in name for name in names) else set()
    rest = [change for change in changes if change.name not in names | both]
    order = {"yes": 0, "perhaps": 1, "no": 2}
    return tuple(sorted([*own, *rest], key=lambda change: (order[change.helps], -(change.saves_bytes or 0))))


def _change(name: str, write: str, peak: int, footprint: Footprint) -> Change:
    return Change(
        name=name, write=write, helps="perhaps", saves_bytes=max(peak - _peak(footprint), 0),
        why=f"predicted: {format_size(_peak(footprint))} in place of {format_size(peak)}",
    )  # fmt: skip


def _largest_phase(footprint: Footprint) -> Any:
    return max(footprint.phases.values(), key=lambda phase: phase.process_bytes)


def _peak(footprint: Footprint) -> int:
    return int(_largest_phase(footprint).process_bytes)
