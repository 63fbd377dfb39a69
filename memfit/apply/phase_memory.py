"""Makes room for validation and saving: frees gradients, moves optimizer state and idle nets aside, restores all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memfit.apply.state_streaming import streams
from memfit.apply.train_state import TrainState
from memfit.job import Job
from memfit.nested_tensors import map_tensors
from memfit.plan import PhasePolicy

Away = Callable[[Tensor], Tensor]


@contextmanager
def phase_memory(train_state: TrainState, policy: PhasePolicy, folder: Path | None = None) -> Iterator[None]:
    """Context in which the memory that a plan's policy frees for a phase is free.

    Args:
        folder: where files with the state of a CPU run are kept. Without a folder, the state of a CPU run stays in
            memory.
    """
    if policy.gradients == "free":
        for net in train_state.nets.values():
            for parameter in net.parameters():
                parameter.grad = None
    if policy.optimizer != "aside":
        yield
        return
    with _waiting_place(train_state.device, folder) as away:
        _move_state(train_state, away)
        try:
            yield
        finally:
            _move_state(train_state, _home(train_state.device))


@contextmanager
def idle_nets_aside(train_state: TrainState, phase: str, folder: Path | None = None) -> Iterator[None]:
    """Context in which nets that this phase does not use (``Job.net_phases``) wait on the host, or in files on a CPU
    run.
    """
    tensors = [
        tensor
        for name in train_state.nets
        if not _uses(train_state, phase, name)
        for tensor in _tensors(train_state, name)
    ]
    if not tensors:
        yield
        return
    with _waiting_place(train_state.device, folder) as away:
        for tensor in tensors:
            tensor.data = away(tensor.data)
        try:
            yield
        finally:
            home = _home(train_state.device)
            for tensor in tensors:
                tensor.data = home(tensor.data)


@contextmanager
def idle_nets_back(train_state: TrainState, phase: str) -> Iterator[None]:
    """Context in which nets that wait during training and that this phase uses are on the device."""
    names = [
        name for name in train_state.nets if _uses(train_state, phase, name) and not _uses(train_state, "train", name)
    ]
    tensors = [tensor for name in names for tensor in _tensors(train_state, name)]
    places, home = [tensor.data for tensor in tensors], _home(train_state.device)
    try:
        for tensor in tensors:
            tensor.data = home(tensor.data)
        yield
    finally:
        for tensor, place in zip(tensors, places, strict=True):
            tensor.data = place.copy_(tensor.data)


def _uses(train_state: TrainState, phase: str, net: str) -> bool:
    return phase in train_state.job.net_phases.get(net, (phase,))


def _tensors(train_state: TrainState, net: str) -> list[Tensor]:
    return [*train_state.nets[net].parameters(), *train_state.nets[net].buffers()]


def with_settings(job: Job, settings: Mapping[str, Any]) -> Job:
    """Returns a copy of the job with a few other settings."""
    return type(job)(**{**job.settings(), **settings}) if settings else job


@contextmanager
def _waiting_place(device: torch.device, folder: Path | None) -> Iterator[Away]:
    """Returns a function that moves a tensor to the host, or on a CPU into a mapped file, which does not count as
    memory.
    """
    if device.type != "cpu":
        yield lambda tensor: tensor.to("cpu")
        return
    if folder is None:
        yield lambda tensor: tensor
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".aside.", ignore_cleanup_errors=True) as name:
        files = (Path(name) / str(number) for number in range(1 << 62))

        def mapped(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                return DTensor.from_local(
                    mapped(tensor.to_local()), tensor.device_mesh, tensor.placements,
                    run_check=False, shape=tensor.shape, stride=tensor.stride(),
                )  # fmt: skip
            if not tensor.is_contiguous() or tensor.numel() == 0:
                return tensor
            away = torch.from_file(str(next(files)), shared=True, size=tensor.nbytes, dtype=torch.uint8)
            return away.view(tensor.dtype).view(tensor.shape).copy_(tensor)

        yield mapped


def _home(device: torch.device) -> Away:
    """Returns a function that moves a tensor back. If a CPU has no memory for it yet, it stays in its unlinked file."""
    if device.type != "cpu":
        return lambda tensor: tensor.to(device)

    def back(tensor: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError, MemoryError):
            return tensor.clone()
        return tensor

    return back


def _move_state(train_state: TrainState, move: Away) -> None:
    for optimizer in train_state.optimizers.values():
        if train_state.optimizer_state == "host" and streams(optimizer):
            continue
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = map_tensors(
                state, lambda tensor: move(tensor) if tensor.numel() > 1 else tensor
            )
