"""The same job traced and really run on the CPU: peaks by phase, without and with what lives inside operator calls."""

import gc

import torch

from memfit.apply.rig import build
from memfit.apply.window import run_window
from memfit.device.measure import AllocatorEvents, MeasuredPeak
from memfit.job import Job, Shape
from memfit.events import Trace
from memfit.trace.step import fetch_synthetic, synthetic_micro_batch, trace_job, validate_once


def traced_peaks(trace: Trace) -> dict[str, int]:
    """Peak live bytes of each phase."""
    import numpy as np

    live = np.cumsum(trace.kind.astype(np.int64) * trace.nbytes[trace.storage])
    peaks: dict[str, int] = {}
    for name, start, end in trace.phases:
        before = int(live[start - 1]) if start else 0
        peaks[name] = max(peaks.get(name, 0), before, int(live[start:end].max(initial=0)))
    return peaks


def operator_names(trace: Trace) -> set[str]:
    """The traced calls as the profiler names them."""
    return {name.replace(".", "::").split("::")[0] + "::" + name.split(".")[1] for name in trace.names if "." in name}


def measured_peaks(job: Job, shape: Shape, micro_batches: int, operators: set[str], windows: int = 2) -> dict[str, MeasuredPeak]:
    """Really runs what ``trace_job`` traces."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    try:
        with AllocatorEvents() as events:
            with events.phase("setup"):
                rig = build(job, device)
            micro = synthetic_micro_batch(job, shape, device)
            for _ in range(windows):
                with events.phase("train"):
                    run_window(rig, [micro] * micro_batches)
            if job.validates:
                with events.phase("validate"):
                    validate_once(rig, lambda: fetch_synthetic(job, shape, device, validation=True), lambda part: None)
            with events.phase("save"):
                job.saved(rig.nets, rig.optimizers)
    finally:
        gc.enable()
    return events.peaks(operators)


def compare(make: type[Job], settings: dict, shape: Shape, micro_batches: int) -> tuple[dict[str, int], dict[str, MeasuredPeak]]:
    """(traced peaks, measured peaks) of one job."""
    trace = trace_job(make(**settings), shape, micro_batches=micro_batches)
    measured = measured_peaks(make(**settings), shape, min(micro_batches, 2), operator_names(trace))
    return traced_peaks(trace), measured
