"""First values of nets, module by module, for jobs that give them so (``Job.initialise``).

Nets that were built without values hold their parts on each rank then. A module's own tensors are made whole, given
their values, and cut to the rank's part, before the next module's: what is whole at a time is one module's own tensors.
All ranks draw the same numbers, in the order of ``net.modules()``: a stage of a pipeline draws those of other stages'
modules too, and drops them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.collectives import local_shard
from memfit.engine.protocol import Engine
from memfit.job import Job, Nets
from memfit.torch_compat import FakeTensor
from memfit.torch_compat.attributes import apply_to_tensors, local_tensor, own_buffers, own_parameters
from memfit.torch_compat.distributed import is_strided


def gives_first_values(job: Job) -> bool:
    """Whether the job says what a module's first values are."""
    return type(job).initialise is not Job.initialise


def builds_without_values(job: Job, engine: Engine) -> bool:
    """Whether nets are built on the meta device, and filled once they are placed."""
    return gives_first_values(job) and CAPABILITIES[engine.name].takes_meta_nets


def give_memory(nets: Nets, device: torch.device, parts: torch.device | str) -> None:
    """Memory without values for nets that were built on the meta device.

    Args:
        parts: where a rank's parts of tensors are; whole ones are on the device.
    """
    for net in nets.values():
        apply_to_tensors(net, lambda t: torch.empty_like(t, device=parts if isinstance(t, DTensor) else device))


def give_first_values(
    job: Job, nets: Nets, device: torch.device, whole: Mapping[str, Sequence[nn.Module]] | None = None
) -> None:
    """Calls ``Job.initialise`` for every module of nets that are on the device, sharded or whole.

    Generators are afterwards as they were. Ranks must have the same seed, as those of a run do.

    Args:
        whole: by net, the modules of the whole net in their order, where ``nets`` lack some of them.
    """
    devices = [device] if device.type == "cuda" and torch.cuda.is_available() else []
    seed = torch.initial_seed()
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        for name, net in nets.items():
            held = set(map(id, net.modules()))
            for module in net.modules() if whole is None else whole[name]:
                (_initialise if id(module) in held else _draw)(job, net, module, device)


def _initialise(job: Job, net: nn.Module, module: nn.Module, device: torch.device) -> None:
    held = own_parameters(module)
    parts: dict[str, Any] = {name: part for name, part in held.items() if isinstance(part, DTensor)}
    try:
        for name, part in parts.items():
            whole = torch.empty(part.shape, dtype=part.dtype, device=device)
            held[name] = nn.Parameter(whole, requires_grad=part.requires_grad)
        job.initialise(net, module)
        for name, part in parts.items():
            _keep_part(part, held[name])
    finally:
        held.update(parts)


def _draw(job: Job, net: nn.Module, module: nn.Module, device: torch.device) -> None:
    """Draws what a module of another stage draws there, and keeps nothing of it."""
    parameters, buffers = own_parameters(module), own_buffers(module)
    before = dict(parameters), dict(buffers)
    try:
        for name, tensor in before[0].items():
            if tensor is not None:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                parameters[name] = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        for name, buffer in before[1].items():
            if buffer is not None:
                buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        job.initialise(net, module)
    finally:
        parameters.update(before[0])
        buffers.update(before[1])


def take_first_values(averages: Nets, nets: Nets) -> None:
    """Gives averages, which hold the same parts as the nets, their values."""
    with torch.no_grad():
        for name, average in averages.items():
            held = (*nets[name].parameters(), *nets[name].buffers())
            for mine, theirs in zip((*average.parameters(), *average.buffers()), held, strict=True):
                local_tensor(mine).copy_(local_tensor(theirs))


def _keep_part(part: Tensor, whole: Tensor | None) -> None:
    """Copies this rank's part, which is cut out of the whole first. In a trace there are no values, and cutting for
    thousands of ranks takes minutes: only its bytes are taken."""
    if whole is None:
        return
    if not isinstance(whole.data, FakeTensor):
        part.copy_(local_shard(whole.data, part))
    elif isinstance(part, DTensor):
        _cut_without_values(part, whole.data)


def _cut_without_values(part: DTensor, whole: Tensor) -> None:
    """Takes the bytes that ``distribute_tensor`` takes: dimension by dimension of the mesh a copy of the piece, and
    before it, where pieces of a later dimension are apart, one of all in another order."""
    for ranks, placement in zip(part.device_mesh.shape, part.placements, strict=True):
        if placement.is_shard() or is_strided(placement):
            ordered = torch.empty_like(whole) if is_strided(placement) else None
            whole = whole.new_empty(-(-whole.numel() // ranks))
            del ordered
