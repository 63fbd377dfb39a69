"""Streaming: optimizer state and the average of the weights wait on the host and visit the device part by part.

A step copies the state of a few parameters to the device, steps only those, and copies their state back, so the device
holds one part's state at a time. The result is the same, bit for bit, for optimizers whose step of a parameter does not
depend on the others (``PER_PARAMETER``); other optimizers keep their state on the device. The host's memory is pinned,
and the copies run on the stream that computes. Not done: copies during computation, and shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.torch_compat.attributes import has_step_hooks

PART = 64 << 20
"""The most bytes of state that visit the device at once; at least those of one parameter."""
PER_PARAMETER = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
        torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor,
        torch.optim.ASGD,
    }
)  # fmt: skip
"""Optimizers whose step of a parameter does not depend on the others."""


def streams(optimizer: Optimizer) -> bool:
    """Whether this optimizer's state can visit the device part by part."""
    hooked = has_step_hooks(optimizer)
    return type(optimizer) in PER_PARAMETER and not hooked


def left_on_the_device(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Optimizers whose state cannot be streamed, by name and class."""
    return [
        f"{name!r} ({type(optimizer).__name__})" for name, optimizer in optimizers.items() if not streams(optimizer)
    ]


@contextmanager
def streamed(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Context in which ``optimizer.step`` brings its state to the device part by part."""
    step, patched = optimizer.step, "step" in vars(optimizer)

    @wraps(step)
    def by_parts(*args: Any, **kwargs: Any) -> Any:
        result = None
        for group, parameters in _parts(optimizer):
            with alone(optimizer, group, parameters), _visiting(optimizer, parameters, device):
                result = step(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result

    optimizer.step = by_parts  # type: ignore[method-assign]
    try:
        yield
    finally:
        if patched:
            optimizer.step = step  # type: ignore[method-assign]
        else:
            del optimizer.step


def update_on_host(old: Sequence[Tensor], new: Sequence[Tensor], weight: float) -> None:
    """old += weight x (new - old). ``old`` waits on the host; the sum is computed part by part on the device of
    ``new``.
    """
    for part in parts_by_size(range(len(old)), [tensor.nbytes for tensor in old]):
        visitors = [_visitor(old[i], new[i].device) for i in part]
        torch._foreach_lerp_(visitors, [new[i] for i in part], weight)
        for i, visitor in zip(part, visitors, strict=True):
            old[i].copy_(visitor, non_blocking=True)
    if new and new[0].device.type == "cuda":
        torch.cuda.synchronize(new[0].device)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in the host's memory, pinned if the tensor is on a card."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def _parts(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
    """Yields parameters that have a gradient, with their group. State that does not exist yet counts as twice its
    parameter.
    """
    for group in optimizer.param_groups:
        learning = [p for p in group["params"] if p.grad is not None]
        sizes = [sum(t.nbytes for _, t in large(optimizer.state.get(p))) or 2 * p.nbytes for p in learning]
        for part in parts_by_size(learning, sizes):
            yield group, part


def parts_by_size(items: Any, sizes: Sequence[int]) -> Iterator[list[Any]]:
    part: list[Any] = []
    part_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if part and part_bytes + size > PART:
            yield part
            part, part_bytes = [], 0
        part.append(item)
        part_bytes += size
    if part:
        yield part


@contextmanager
def alone(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Iterator[None]:
    """Context in which the optimizer sees only these parameters of a group."""
    groups, all_of_group = optimizer.param_groups, group["params"]
    group["params"], optimizer.param_groups = parameters, [group]
    try:
        yield
    finally:
        group["params"], optimizer.param_groups = all_of_group, groups


@contextmanager
def _visiting(optimizer: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Context in which the parameters' state is on the device. If the step fails, the host keeps the earlier state."""
    homes: dict[tuple[nn.Parameter, str], Tensor] = {}
    try:
        for parameter in parameters:
            for key, value in large(optimizer.state.get(parameter)):
                if value.device.type == "cpu":
                    homes[parameter, key] = value
                    optimizer.state[parameter][key] = _visitor(value, device)
        yield
    except BaseException:
        for (parameter, key), home in homes.items():
            optimizer.state[parameter][key] = home
        raise
    for parameter in parameters:
        for key, value in large(optimizer.state.get(parameter)):
            before = homes.get((parameter, key))
            if before is not None and before.shape == value.shape and before.dtype == value.dtype:
                optimizer.state[parameter][key] = before.copy_(value, non_blocking=True)
            else:
                optimizer.state[parameter][key] = copy_to_host(value)


def _visitor(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True, copy=True)


def large(state: Any) -> list[tuple[str, Tensor]]:
    """Yields the tensors of a parameter's state; single numbers stay where they are."""
    values = state.items() if isinstance(state, dict) else ()
    return [(key, value) for key, value in values if isinstance(value, Tensor) and value.numel() > 1]
