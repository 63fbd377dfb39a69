"""Checks that no window is applied, and no checkpoint written, with a number that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memfit.apply.train_state import TrainState
from memfit.apply.window import TurnGradients
from memfit.engine.collectives import gather_shares, reported
from memfit.errors import InputError
from memfit.job import is_trained
from memfit.nested_tensors import tensors_in

SHOWN = 16
"""Samples that a message names."""


class NotFiniteError(InputError):
    """A loss or a gradient is not finite. The step was not applied."""


def check_gradients(train_state: TrainState, made: TurnGradients, window: int) -> None:
    """Checks a turn's losses and gradient norm before its step. All ranks raise together.

    A scaler leaves out the steps whose gradients overflowed, so with a scaler nothing is checked here.

    Raises:
        NotFiniteError: names the window's samples.
    """
    if train_state.scaler is not None:
        return
    engine, fault = train_state.engine, _fault(made)
    if engine.world > 1 and train_state.job.unsynchronised:
        fault = reported(engine, fault)
    if fault is None:
        return
    ids = sorted({i for micro in made.micro_batches if micro.counts for i in micro.ids})
    samples = sorted(chain.from_iterable(gather_shares(engine, ids)))
    raise NotFiniteError(
        f"window {window}: {fault}",
        "not a finite number, so the step was not applied",
        f"lower the learning rate, or look at samples {_words(samples)}",
    )


def _fault(made: TurnGradients) -> str | None:
    for name, value in made.sums.items():
        if not math.isfinite(float(value)):
            return f"the sum of loss {name!r} is {float(value)}"
    norm = None if made.norm is None else float(made.norm)
    if norm is not None and not math.isfinite(norm):
        return f"the norm of the gradients of {', '.join(map(repr, made.sums))} is {norm}"
    return None


def _words(samples: Sequence[int]) -> str:
    more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
    return ", ".join(map(str, samples[:SHOWN])) + more


def not_finite_buffers(train_state: TrainState) -> frozenset[str]:
    """Names of the buffers that are not finite before the training, such as a mask of minus infinity."""
    return frozenset(name for name, tensor in _buffers(train_state) if not is_finite(tensor))


def check_state(train_state: TrainState, window: int, except_for: frozenset[str]) -> None:
    """Checks what a checkpoint would hold. Every rank that saves calls it.

    Args:
        except_for: buffers that were not finite before the training.

    Raises:
        NotFiniteError: names a tensor. The job can allow it (``Job.allows_not_finite``).
    """
    if train_state.job.allows_not_finite:
        return
    named = chain(_learned(train_state), ((n, t) for n, t in _buffers(train_state) if n not in except_for))
    fault = next((name for name, tensor in named if not is_finite(tensor)), None)
    if train_state.engine.sharded_state:
        fault = reported(train_state.engine, fault)
    if fault is not None:
        raise NotFiniteError(
            f"window {window}: {fault}",
            "it holds a number that is not finite, so no checkpoint is written of it",
            "lower the learning rate and go on with --resume, or write allows_not_finite = True in the job",
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of a tensor is finite, without a copy. Formats that torch cannot reduce count as finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not (local.is_floating_point() or local.is_complex()) or local.numel() == 0 or local.is_meta:
        return True
    try:
        with torch.no_grad():
            return math.isfinite(float(torch.linalg.vector_norm(local.detach(), math.inf)))
    except (RuntimeError, NotImplementedError):
        return True


def _learned(train_state: TrainState) -> Iterator[tuple[str, Any]]:
    """Trained parameters, the optimizers' state and the average, by name."""
    names: dict[Any, str] = {}
    for name, net in train_state.nets.items():
        for path, parameter in net.named_parameters():
            names[parameter] = f"{name}.{path}"
            if parameter.requires_grad:
                yield f"parameter {name}.{path}", parameter
    for name, optimizer in train_state.optimizers.items():
        for key_of_state, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else (("state", state),):
                for part in tensors_in(value):
                    yield f"{key} of {names.get(key_of_state, 'a parameter')} in optimizer {name}", part
    for name, net in train_state.ema.items():
        for path, averaged in net.named_parameters():
            yield f"the average of {name}.{path}", averaged


def _buffers(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    for name, net in train_state.nets.items():
        if is_trained(net):
            for path, buffer in net.named_buffers():
                yield f"buffer {name}.{path}", buffer
