"""Moves batches to a device: tensors in any nesting, and objects that move only as a whole, such as PyG's Data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.apply.job_objects import JobCall
from memfit.errors import InputError
from memfit.job import Job
from memfit.nested_tensors import map_tensors


def on_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on the device. An object of an unknown class is moved by its own ``to``.

    Raises:
        InputError: a part of it cannot be moved.
    """
    with JobCall("a batch", "give tensors that can be copied to the device, or objects whose to(device) does it"):
        return map_tensors(
            batch,
            lambda tensor: tensor.to(device, non_blocking=True),
            lambda value: value.to(device) if _moves_itself(value) else value,
        )


def validation_on_device(job: Job, batch: Any, device: torch.device) -> Any:
    """A validation batch on the device, but for what the job keeps on the host.

    Raises:
        InputError: as ``on_device``; the batch has no such part.
    """
    kept = {}
    for name in job.validation_on_host():
        if not isinstance(batch, Mapping) or name not in batch:
            why = "the validation batch is no dict with this key"
            raise InputError(f"{type(job).__name__}.validation_on_host(): {name!r}", why, "write keys of that dict")
        kept[name] = batch[name]
    if not kept:
        return on_device(batch, device)
    return on_device({name: value for name, value in batch.items() if name not in kept}, device) | kept


def is_opaque(batch: Any) -> bool:
    """Whether a batch holds an object whose tensors only its own ``to`` method reaches."""
    moves = []

    def seen(value: Any) -> Any:
        moves.append(_moves_itself(value))
        return value

    map_tensors(batch, lambda tensor: tensor, seen)
    return any(moves)


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None))
