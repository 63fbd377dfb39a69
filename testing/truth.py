"""The same job traced and really run on the CPU: peaks by phase, without and with what lives inside operator calls."""

import gc
from dataclasses import replace

import torch

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.benchmarks import AllocatorEvents, MeasuredPeak
from memfit.device.hardware.catalogue import find_device
from memfit.events import Trace
from memfit.job import Job, Shape
from memfit.planner.predict import default_checkpointing, plain_nets
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from memfit.trace.step_phases import fetch_synthetic, synthetic_micro_batch, validate_once


def operator_names(trace: Trace) -> set[str]:
    """The traced calls as the profiler names them."""
    return {name.replace(".", "::").split("::")[0] + "::" + name.split(".")[1] for name in trace.names if "." in name}


def measured_peaks(
    job: Job, shape: Shape, micro_batches: int, operators: set[str], modes: dict
) -> dict[str, MeasuredPeak]:
    """Really runs what ``trace_job`` traces."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    try:
        with AllocatorEvents() as events:
            with events.phase("setup"):
                train_state = build(job, device)
            micro = synthetic_micro_batch(job, shape, device)
            with recompute(train_state.nets, modes):
                for is_first in (True, False):
                    with events.phase("train"):
                        run_window(train_state, [micro] * micro_batches)
                        if is_first:  # the collector of a run comes by some time after its first window
                            gc.collect()
            if job.validates:
                with events.phase("validate"):
                    validate_once(
                        train_state, lambda: fetch_synthetic(job, shape, device, validation=True), lambda part: None
                    )
            with events.phase("save"):
                job.saved(train_state.nets, train_state.optimizers)
    finally:
        gc.enable()
    return events.peaks(operators)


def compare(make, settings, shape, micro_batches, wrapping=frozenset()):
    """(traced peaks without scratch, with it, measured peaks) of one job.

    Args:
        wrapping: operators (``aten::copy_``) that a tensor subclass carries out by others, which the profiler shows
            within them and a trace on their own.
    """
    job = make(**settings)
    modes = default_checkpointing(job, plain_nets(job))
    how = Tracing(device=find_device("cpu"), micro_batches=micro_batches, checkpointing=modes, scratch=False)
    trace = trace_job(job, shape, how)
    with_scratch = trace_job(make(**settings), shape, replace(how, scratch=True))
    operators = operator_names(trace) - wrapping
    measured = measured_peaks(make(**settings), shape, min(micro_batches, 2), operators, modes)
    return live_peaks(trace), live_peaks(with_scratch), measured
