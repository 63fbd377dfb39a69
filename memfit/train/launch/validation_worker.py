"""The process that validates a checkpoint by hand: started by ``memfit validate``, limited to the plan's budget.

``memfit.train.launch.validation_entry`` calls ``main`` here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit.apply.phase_memory import with_settings
from memfit.apply.train_state import TrainState, build
from memfit.atomic_file import write_atomic
from memfit.device.virtual import backend
from memfit.errors import Exit, InputError, mistake_in_job, why_unreadable
from memfit.geometry import shape_of
from memfit.job import Job, Shape
from memfit.loading import load_job
from memfit.plan import Plan
from memfit.printable import shortened
from memfit.sizes import format_size
from memfit.trace.step_phases import validate_once
from memfit.train.checkpoint.checkpoints import Checkpoint, Checkpoints, is_checkpoint, read_checkpoint
from memfit.train.checkpoint.resume import of_this_job
from memfit.train.checkpoint.sharded_checkpoint import load_sharded_nets
from memfit.train.checkpoint.state import put_nets_back
from memfit.train.launch import memory_limit
from memfit.train.launch.ending import ended_by_job
from memfit.train.launch.outcome import say
from memfit.train.launch.plan_device import device_of_plan
from memfit.train.launch.stop_signals import ends_at_once
from memfit.train.launch.warm_up import warm_up
from memfit.train.loop.phases import VALIDATION
from memfit.train.loop.rng import seed_all, seed_stream
from memfit.train.loop.validation_data import ValidationData, mean_of, metrics_of, no_real_samples, validation_data
from memfit.train.recovery.failure import clear_frames, give_back

CHECKPOINTS = "checkpoints"
"""The folder of them in that of a run."""


def main(arguments: list[str]) -> int:
    """Validates RUN or a checkpoint, and writes the values into a file: TARGET, FILE, bytes (0: the plan's budget)."""
    target, file, budget = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    ends_at_once(lambda: None)
    try:
        result = validate(find_checkpoint(target), budget)
    except InputError as error:
        say(str(error))
        return Exit.BAD_INPUT
    except Exception as error:
        mistake = mistake_in_job(error) or _unreadable(target, error)
        if mistake is None:
            raise
        say(str(mistake))
        return Exit.BAD_INPUT
    except BaseException as error:
        say(ended_by_job(error))
        return Exit.BAD_INPUT
    if result is None:
        return Exit.NOTHING_FITS
    write_atomic(file, json.dumps(result, allow_nan=False))
    return Exit.DONE


def _unreadable(target: Path, error: Exception) -> InputError | None:
    """What the system refuses of the path that was given, such as one that is too long; None for another error."""
    if not isinstance(error, OSError) or not str(error.filename or "").startswith(str(target)):
        return None
    seen, why = f"run {shortened(str(error.filename))}", f"cannot be read: {why_unreadable(error)}"
    return InputError(seen, why, "write the path of a run's folder that can be read")


def find_checkpoint(target: Path) -> Checkpoint:
    """The checkpoint itself, or the newest whole one of a run.

    Raises:
        InputError: there is none, or it is torn or foreign; names the folder where the target lies in one, or is the
            folder of a run's checkpoints.
        OSError: the system refuses the path.
    """
    above = target.parent
    if target.is_file() and (is_checkpoint(above) or (above / CHECKPOINTS).is_dir()):
        raise InputError(f"run {target}", "a file of a run, and not its folder", f"write {above}")
    if not is_checkpoint(target) and Checkpoints(target).numbers():
        raise InputError(f"run {target}", "the folder of a run's checkpoints", f"write {above}, or one of its numbers")
    if is_checkpoint(target):
        return read_checkpoint(target)
    checkpoint = Checkpoints(target / CHECKPOINTS).newest(say)
    if checkpoint is None:
        why = "there is no checkpoint in it" if target.exists() else "no such folder"
        write = "write a folder that memfit run --out wrote, or one of its checkpoints/NUMBER"
        raise InputError(f"run {target}", why, write)
    return checkpoint


def validate(checkpoint: Checkpoint, budget: int = 0) -> dict[str, Any] | None:
    """Validates on the job's real samples, in batches as the plan has them, or smaller ones where they do not fit.

    Random numbers begin at the plan's seed, so that the same checkpoint gives the same values. None: not even one item
    fits into the budget.

    Args:
        budget: bytes; 0: the plan's.
    """
    backend.register_virtual_device()
    plan = replace(checkpoint.plan, budget_bytes=budget or checkpoint.plan.budget_bytes)
    job, data = _job_and_data(plan)
    device = device_of_plan(plan)
    warm_up(job, plan.micro_batch)
    seed_all(plan.seed)
    before = memory_limit.limit(plan.budget_bytes) if device.type == "cpu" else 0
    memory = memory_limit.ProcessMemory()
    begin = time.perf_counter()
    fitting = None
    try:
        train_state = _train_state_of(job, device, checkpoint)
        memory.reset_peak()
        fitting = _largest_that_fits(train_state, data, plan)
    except Exception as error:
        if not memory_limit.is_memory_failure(error):
            raise
    if fitting is None:
        memory_limit.lift()
        held = f" over the {format_size(before)} held before" if before else ""
        say(
            f"validation of {checkpoint.path}: out of memory, even with one item; "
            f"the budget is {format_size(plan.budget_bytes)}{held}; write a larger --memory"
        )
        return None
    shape, settings, values = fitting
    return {
        "checkpoint": str(checkpoint.path),
        "window": checkpoint.next_window,
        "items": shape.items if data.samples is None else len(data.samples),
        "data": str(data),
        "settings": settings,
        "values": values,
        "measured_process_bytes": memory.peak(),
        "budget_bytes": plan.budget_bytes,
        "seconds": time.perf_counter() - begin,
    }


def _job_and_data(plan: Plan) -> tuple[Job, ValidationData]:
    """The plan's job, and what it is validated on.

    Raises:
        InputError: it has no validation, or no real samples for it.
    """
    job = load_job(plan.job, dict(plan.settings), unit=plan.unit)
    if not job.validates:
        write = f"write validate(self, nets, batch) -> {{'name': number}} in {type(job).__name__}"
        raise InputError(f"job {plan.job}", "it has no validation", write)
    data = validation_data(job)
    if data is None:
        raise InputError(
            f"job {plan.job}", "it has no real samples to validate on", no_real_samples(job).partition(": ")[2]
        )
    return job, data


def _train_state_of(job: Job, device: torch.device, checkpoint: Checkpoint) -> TrainState:
    """The job on one device, with a checkpoint's weights."""
    train_state = build(job, device)
    if checkpoint.parts is not None:
        load_sharded_nets(train_state, checkpoint.parts)
    else:
        with of_this_job(checkpoint):
            put_nets_back(train_state, checkpoint.state, checkpoint.on(device), checkpoint.mapped)
    return train_state


def _largest_that_fits(
    train_state: TrainState, data: ValidationData, plan: Plan
) -> tuple[Shape, dict[str, Any], dict[str, Any]] | None:
    """(batch, settings and values) of the first validation that fits: as planned, with the job's settings that need
    less, then with half of the items, and so on. None: not even one item fits.
    """
    job, settings = train_state.job, dict(plan.validation.settings)
    planned = shape_of(job, plan.micro_batch)
    shape = replace(planned, items=min(plan.validation.items or planned.items, planned.items))
    while True:
        shape = data.largest(shape)
        values = _tried(replace(train_state, job=with_settings(job, settings)), data, shape, plan.seed)
        if values is not None:
            return shape, settings, values
        if settings != (smaller := {**settings, **job.validation_smaller}):
            settings = smaller
        elif shape.items > 1:
            shape = replace(shape, items=shape.items // 2)
        else:
            return None
        say(f"validation does not fit: {shape.items} items{_with(settings)} are tried")


def _tried(train_state: TrainState, data: ValidationData, shape: Shape, seed: int) -> dict[str, Any] | None:
    """The values of all batches, as a run's own validation draws them; None where memory runs out."""
    seed_stream(seed, 0, 0, VALIDATION)
    parts: list[tuple[dict[str, Any], int]] = []
    try:
        for fetch, items in data.batches(train_state, shape):
            values = validate_once(train_state, fetch, lambda part: None)
            parts.append((_finite(metrics_of(train_state.job, values, lists=True)), items))
        mean: dict[str, Any] = mean_of(parts)
        return mean
    except Exception as error:
        if not memory_limit.is_memory_failure(error):
            raise
        clear_frames(error)
    give_back(train_state.device)
    return None


def _with(settings: Mapping[str, Any]) -> str:
    return " with " + ", ".join(f"{name}={value}" for name, value in settings.items()) if settings else ""


def _finite(value: Any) -> Any:
    """The same with None for each number that is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if abs(value) < float("inf") else None
