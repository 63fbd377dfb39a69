"""The phases of a step that traces and real runs share: a synthetic micro-batch, validation, and saving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memfit.apply.batches import on_device, validation_on_device
from memfit.apply.stages import validated_by_stages
from memfit.apply.train_state import TrainState
from memfit.apply.window import MicroBatch, WindowResult
from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.fsdp2 import reshard
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.nested_tensors import tensors_in
from memfit.trace.tracer import Tracer
from memfit.trace.watched_shape import WatchedShape


def synthetic_micro_batch(job: Job, shape: Shape, device: torch.device, tracer: Tracer | None = None) -> MicroBatch:
    """A made-up micro-batch all of whose padded units are valid."""
    counts_before = type(job).units is not Job.units
    return MicroBatch(
        fetch=lambda: fetch_synthetic(job, shape, device, tracer),
        padded_units=shape.units,
        units=defaultdict(partial(int, shape.units)) if counts_before else None,
    )


def fetch_synthetic(
    job: Job, shape: Shape, device: torch.device, tracer: Tracer | None = None, validation: bool = False
) -> Any:
    """A made-up batch on the device: as in a run, what the job makes elsewhere, such as of numpy's arrays, is moved."""
    watched = WatchedShape(items=shape.items, length=shape.length)
    with device:
        batch = job.validation_batch(watched) if validation else job.batch(shape)
    batch = validation_on_device(job, batch, device) if validation else on_device(batch, device)
    if tracer is not None:
        if validation:
            tracer.validation_shape = watched
        for tensor in tensors_in(batch):
            tracer.categorise(tensor, "inputs")
    return batch


@contextmanager
def evaluation_mode(train_state: TrainState) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each as it was: under FSDP2 with its weights in parts again."""
    modes = [(module, module.training) for net in train_state.nets.values() for module in net.modules()]
    for net in train_state.nets.values():
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        reshard(train_state.nets)


def validate_once(train_state: TrainState, fetch: Any, mark: Any) -> Any:
    """One validation batch, in evaluation mode and without gradients."""
    with evaluation_mode(train_state):
        mark("fetch")
        batch = fetch()
        mark("validate")
        if train_state.engine.stages > 1:
            values = validated_by_stages(train_state, batch)
        else:
            values = train_state.job.validate(train_state.nets, batch)
    if not isinstance(values, Mapping):
        seen, write = f"{type(train_state.job).__name__}.validate()", "write validate(...) -> {'name': number}"
        raise InputError(seen, f"gave {type(values).__name__}, not a dict of numbers by name", write)
    return values


def save_once(train_state: TrainState) -> None:
    """What saving makes: the job's own dict; under ZeRO nothing, where every rank writes its parts as they lie."""
    if not CAPABILITIES[train_state.engine.name].is_deepspeed:
        saved_by_job(train_state)


def saved_by_job(train_state: TrainState) -> Mapping[str, Any]:
    """What the job's own ``saved`` gives.

    Raises:
        InputError: it is no dict.
    """
    saved = train_state.job.saved(train_state.nets, train_state.optimizers)
    if not isinstance(saved, Mapping):
        seen, write = f"{type(train_state.job).__name__}.saved()", "write saved(...) -> {'name': state_dict}"
        raise InputError(seen, f"gave {type(saved).__name__}, not a dict", write)
    return saved


def check_stepped(result: WindowResult) -> None:
    """Refuses a window in which a turn took no step, since a trace without it lacks its gradients and state.

    Raises:
        InputError: the losses of a turn have no valid unit in the made-up micro-batch.
    """
    for name in result.skipped:
        raise InputError(
            f"turn {name!r}",
            "its losses have 0 valid units in the made-up micro-batch, so that a trace would leave out its step",
            "write batch(self, shape) with units that count, such as labels other than the one that is ignored",
        )
