"""A job becomes a Trace: its window, validation and saving are run on fake tensors, without their memory or time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from memfit.apply.rig import Rig, build, is_trained, tensors_in
from memfit.apply.window import MicroBatch, run_window
from memfit.device.libraries import as_in_a_real_run
from memfit.device.virtual import virtual_cpu
from memfit.events import CATEGORIES, Trace
from memfit.job import Job, Shape
from memfit.trace.tracer import Tracer


def trace_job(job: Job, shape: Shape, device: str = "cpu", *, micro_batches: int = 1, validate: bool = True, save: bool = True) -> Trace:
    """One job's memory events: setup, two windows (the first makes the optimizers' state), validation and saving.

    Args:
        shape: the micro-batch.
        device: ``cpu``.
        micro_batches: micro-batches in a window; above two the further ones repeat the second.
    """
    target = torch.device(device)
    with virtual_cpu(), as_in_a_real_run(), Tracer(target).recording() as tracer:
        with tracer.phase("setup"):
            rig = build(job, target)
            tracer.name_modules(rig.nets)
            _categorise_state(tracer, rig)
        micro = synthetic_micro_batch(job, shape, target, tracer)
        for _ in range(2):
            with tracer.phase("train"):
                run_window(rig, [micro] * min(micro_batches, 2), lambda part: _mark(tracer, rig, part))
                _categorise_state(tracer, rig)
        if validate and job.validates:
            with tracer.phase("validate"):
                validate_once(rig, lambda: fetch_synthetic(job, shape, target, tracer, validation=True), tracer.mark)
        if save:
            with tracer.phase("save"):
                tracer.mark("save")
                job.saved(rig.nets, rig.optimizers)
        return as_trace(tracer)


def synthetic_micro_batch(job: Job, shape: Shape, device: torch.device, tracer: Tracer | None = None) -> MicroBatch:
    """A made-up micro-batch all of whose padded units are valid."""
    counts_before = type(job).units is not Job.units
    return MicroBatch(
        fetch=lambda: fetch_synthetic(job, shape, device, tracer),
        padded_units=shape.units,
        units=defaultdict(lambda: shape.units) if counts_before else None,
    )


def fetch_synthetic(job: Job, shape: Shape, device: torch.device, tracer: Tracer | None = None, validation: bool = False) -> Any:
    """A made-up batch on the device."""
    with device:
        batch = job.validation_batch(shape) if validation else job.batch(shape)
    if tracer is not None:
        for tensor in tensors_in(batch):
            tracer.categorise(tensor, "inputs")
    return batch


@contextmanager
def evaluation_mode(rig: Rig) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each as it was."""
    modes = [(module, module.training) for net in rig.nets.values() for module in net.modules()]
    for net in rig.nets.values():
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def validate_once(rig: Rig, fetch: Any, mark: Any) -> Any:
    """One validation batch, in evaluation mode and without gradients."""
    with evaluation_mode(rig):
        mark("fetch")
        batch = fetch()
        mark("validate")
        return rig.job.validate(rig.nets, batch)


def _mark(tracer: Tracer, rig: Rig, part: str) -> None:
    for net in rig.nets.values():
        for parameter in net.parameters():
            if parameter.grad is not None:
                tracer.categorise(parameter.grad, "gradients")
    tracer.mark(part)


def _categorise_state(tracer: Tracer, rig: Rig) -> None:
    for net in rig.nets.values():
        trained = is_trained(net)
        for parameter in net.parameters():
            tracer.categorise(parameter, "parameters" if trained else "frozen")
        for buffer in net.buffers():
            tracer.categorise(buffer, "buffers" if trained else "frozen")
    for average in rig.ema.values():
        for tensor in (*average.parameters(), *average.buffers()):
            tracer.categorise(tensor, "ema")
    for optimizer in rig.optimizers.values():
        for state in optimizer.state.values():
            for tensor in tensors_in(state):
                tracer.categorise(tensor, "optimizer")


def as_trace(tracer: Tracer) -> Trace:
    """The tracer's lists as a Trace; a storage that was never named is a temporary."""
    names: dict[str, int] = {}
    parts: dict[str, int] = {}
    rows = tracer.op_rows or [("", 0, "setup", 0, 0)]
    code = {name: index for index, name in enumerate(CATEGORIES)}
    return Trace(
        kind=np.array(tracer.kind, np.int8),
        storage=np.array(tracer.storage, np.int32),
        operator=np.array(tracer.operator, np.int32),
        nbytes=np.array(tracer.nbytes, np.int64),
        category=np.array([code[name or "temporaries"] for name in tracer.category], np.uint8),
        stream=np.zeros(len(tracer.nbytes), np.uint8),
        made_by=np.array(tracer.made_by, np.int32),
        operator_name=np.array([names.setdefault(row[0], len(names)) for row in rows], np.int32),
        operator_module=np.array([row[1] for row in rows], np.int32),
        operator_part=np.array([parts.setdefault(row[2], len(parts)) for row in rows], np.int32),
        operator_flops=np.array([row[3] for row in rows], np.int64),
        operator_bytes=np.array([row[4] for row in rows], np.int64),
        names=tuple(names),
        modules=tuple(tracer.modules),
        parts=tuple(parts),
        phases=tuple(tracer.phases),
    )
