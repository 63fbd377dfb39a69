"""A linear layer whose output is several tensors side by side, cut over tensor-parallel ranks.

A projection to queries, keys and values (3 parts) or to values and gates (GEGLU, SwiGLU: 2 parts) is one weight, whose
output is then split. Rank r must have the r-th piece of every part; a DTensor that is sharded on its first dimension
gives it neighbouring rows. So the parameter stays a plain Shard(0), with the rows and checkpoints of one device, and
ranks exchange rows (all-to-all) in the forward, and their gradients in the backward. Weights are exchanged and not
activations, since a layer's weight has dim rows and its input has one for each token of the micro-batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from memfit.engine.local_parameters import LocalParameters
from memfit.errors import InputError
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import OWN_VALUES, all_to_all_rows


class FusedColwiseParallel(ParallelStyle):
    """torch's ``ColwiseParallel`` for a linear layer whose output is ``parts`` tensors of one size, side by side.

    Takes a replicated tensor (..., in) and gives (..., out / ranks): this rank's piece of the first part, of the
    second, and so on. ``out`` must divide by ``parts`` times the ranks of the mesh.

    Raises:
        InputError: from ``parallelize_module``: it does not divide so, or the module is no ``nn.Linear``.
    """

    def __init__(self, *, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Called by ``parallelize_module``."""
        if not isinstance(module, nn.Linear):
            why, write = f"it cuts nn.Linear, not {type(module).__name__}", "name the linear layer of the projection"
            raise InputError("FusedColwiseParallel", why, write)
        if module.out_features % (self.parts * device_mesh.size()):
            seen = f"FusedColwiseParallel(parts={self.parts}) on {device_mesh.size()} ranks"
            raise InputError(seen, f"an output of {module.out_features} does not divide so", "write another tp")
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                cut = distribute_tensor(parameter.data, device_mesh, [Shard(0)], **OWN_VALUES)
                module.register_parameter(key, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(partial(_enter, device_mesh))
        LocalParameters(partial(exchanged, device_mesh, self.parts)).watch(module)
        return module


def _enter(mesh: DeviceMesh, module: nn.Module, args: Any) -> Any:
    """The input, whose gradient is the sum of what the ranks' pieces of the output give."""
    replicated = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
    return (replicated.to_local(grad_placements=[Partial()]), *args[1:])


def exchanged(mesh: DeviceMesh, parts: int, rows: Tensor) -> Tensor:
    """Of neighbouring rows of a tensor of ``parts`` parts: this rank's piece of each part, from all ranks."""
    result: Tensor = _Exchange.apply(rows, mesh, parts)
    return result


class _Exchange(torch.autograd.Function):
    """This rank's neighbouring rows of a tensor to its piece of each part; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: DeviceMesh, parts: int) -> Tensor:
        ctx.mesh, ctx.parts = mesh, parts
        order, sent, received = _exchange_plan(parts, mesh.size(), mesh.get_local_rank(), len(rows) // parts)
        return all_to_all_rows(_in_order(rows, order), received, sent, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = gradients[0].contiguous()
        mesh, parts = ctx.mesh, ctx.parts
        order, sent, received = _exchange_plan(parts, mesh.size(), mesh.get_local_rank(), len(rows) // parts)
        back = all_to_all_rows(rows, sent, received, mesh)
        return _in_order(back, [order.index(k) for k in range(parts)]), None, None


def _exchange_plan(parts: int, ranks: int, rank: int, length: int) -> tuple[list[int], list[int], list[int]]:
    """Of chunks of ``length`` rows, of which a rank has ``parts``: the order in which it sends its own, how many rows
    it sends to each rank, and how many it receives from each.

    Chunk c of all ``parts * ranks`` belongs to rank ``c % ranks``. It comes from rank ``c // parts``, so that what is
    received is in the order of the parts.
    """
    owner = [(rank * parts + k) % ranks for k in range(parts)]
    order = sorted(range(parts), key=owner.__getitem__)
    sent = [length * owner.count(other) for other in range(ranks)]
    source = [chunk // parts for chunk in range(rank, parts * ranks, ranks)]
    return order, sent, [length * source.count(other) for other in range(ranks)]


def _in_order(rows: Tensor, order: list[int]) -> Tensor:
    if order == sorted(order):
        return rows
    chunks = rows.chunk(len(order))
    return torch.cat([chunks[k] for k in order])
