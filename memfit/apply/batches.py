"""Batches on their way: tensors in any nesting, and objects that can only be moved whole, as PyG's Data."""

from __future__ import annotations

from typing import Any

import torch

from memfit.apply.train_state import map_tensors


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device; what is of no kind of a nesting is moved by its own ``to``."""
    return map_tensors(
        batch,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda value: value.to(device) if _moves_itself(value) else value,
    )


def is_opaque(batch: Any) -> bool:
    """Whether something in a batch has tensors that only its own ``to`` reaches."""
    moves = []

    def seen(value: Any) -> Any:
        moves.append(_moves_itself(value))
        return value

    map_tensors(batch, lambda tensor: tensor, seen)
    return any(moves)


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None))
