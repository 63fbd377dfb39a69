"""Data parallel: every rank holds the whole job, and gradients are summed over ranks once a window.

The sum is torch.distributed's all-reduce over buckets, as in DistributedDataParallel, but after the window's last
backward instead of inside of it. For that:

- a rank whose memory runs out in forward or backward leaves no other waiting in a collective: all agree first;
- ranks may have different numbers of micro-batches, or none, and nets may be called in any way and any number of times;
- gradients are freed between windows, where DistributedDataParallel keeps its buckets, as large as they are, through
  every forward, and beside them the gradients that ``no_sync`` made.

What it costs: the last micro-batch's backward no longer hides communication, and one bucket stands beside the gradients
while they are summed (bench/ddp_reduction.py: 262 MiB at the peak against 218, 1.37 s a window against 1.20, for
100 MiB of weights and one micro-batch on two busy cores).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from memfit.engine.collectives import gather
from memfit.engine.data_parallel_mixin import DataParallelMixin
from memfit.engine.process_group import every_rank
from memfit.engine.refusals import check_turns
from memfit.engine.single import copied
from memfit.engine.torch_optim_mixin import TorchOptimMixin
from memfit.engine.torch_state_mixin import TorchStateMixin
from memfit.errors import InputError
from memfit.job import Job, Nets, is_trained
from memfit.torch_compat.attributes import local_tensor

BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's default, 25 MiB."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Gradients to be summed: large ones in place, the small ones through one buffer a kind of tensor."""

    large: tuple[Tensor, ...]
    buckets: tuple[tuple[Tensor, tuple[Tensor, ...]], ...]
    """(the buffer's part, the gradients that go through it); every bucket of a dtype has the same buffer."""


@dataclass(frozen=True, kw_only=True)
class Ddp(DataParallelMixin, TorchOptimMixin, TorchStateMixin):
    """The engine of whole replicas."""

    rank: int
    world: int
    mesh: DeviceMesh
    name: str = "ddp"
    syncs_in_backward: bool = False
    syncs_in_step: bool = False
    sharded_state: bool = False
    parts_on_host: bool = False

    @property
    def _group(self) -> dist.ProcessGroup:
        return every_rank(self.mesh)

    def place(self, job: Job, nets: Nets) -> Nets:
        """Gives every rank the parameters and buffers of rank 0.

        Raises:
            InputError: the ranks built different nets.
        """
        shapes = {name: [tuple(t.shape) for t in net.state_dict().values()] for name, net in nets.items()}
        everyone = gather(self, shapes)
        for rank, theirs in enumerate(everyone):
            for name in {**everyone[0], **theirs}:
                if theirs.get(name) != everyone[0].get(name):
                    raise InputError(
                        f"net {name!r} on rank {rank}",
                        "its tensors have other shapes than on rank 0",
                        "build the same nets on every rank",
                    )
        for net in nets.values():
            for tensor in (*net.parameters(), *net.buffers()):
                if tensor.device.type == "meta":  # without values, which every rank gives itself
                    continue
                dist.broadcast(tensor.detach(), group=self._group, group_src=0)
        return nets

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Copies of the trained nets on rank 0; empty on the other ranks."""
        return copied(nets) if self.rank == 0 else {}

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where one turn steps both a net that ranks share and one that each trains by itself."""
        check_turns(job, nets, optimizers, self.name)

    def divide(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Every rank has the whole."""

    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> AbstractContextManager[Any]:
        """Does nothing: no backward communicates."""
        return nullcontext()

    def prepare(self, parameters: Sequence[nn.Parameter]) -> Prepared:
        """Buffers, and zeros where another rank has a gradient and this one has none."""
        self.fill(parameters)
        gradients: list[Tensor] = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        in_place = [g.nbytes >= BUCKET_BYTES // 2 and g.is_contiguous() for g in gradients]
        return Prepared(
            large=tuple(g for g, alone in zip(gradients, in_place, strict=True) if alone),
            buckets=_buckets([g for g, alone in zip(gradients, in_place, strict=True) if not alone]),
        )

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zeros where another rank has a gradient and this one has none."""
        here = [p.grad is not None for p in parameters]
        somewhere = [any(rank) for rank in zip(*gather(self, here), strict=True)]
        for parameter, has, needs in zip(parameters, here, somewhere, strict=True):
            if needs and not has:
                parameter.grad = torch.zeros_like(parameter)

    def reduce(self, prepared: Prepared) -> None:
        """Sums every gradient over the ranks."""
        for gradient in prepared.large:
            dist.all_reduce(gradient, group=self._group)
        for buffer, gradients in prepared.buckets:
            views = [
                part.view_as(gradient)
                for part, gradient in zip(buffer.split([g.numel() for g in gradients]), gradients, strict=True)
            ]
            torch._foreach_copy_(views, list(gradients))
            dist.all_reduce(buffer, group=self._group)
            torch._foreach_copy_(list(gradients), views)

    def share_buffers(self, nets: Nets) -> None:
        """Running statistics of rank 0, as DistributedDataParallel has it."""
        for net in nets.values():
            if is_trained(net):
                for buffer in net.buffers():
                    dist.broadcast(local_tensor(buffer), group=self._group, group_src=0)


def _buckets(gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, tuple[Tensor, ...]], ...]:
    """Gradients of one dtype and device, in order, cut where a bucket is full; one buffer for all of a kind."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = defaultdict(list)
    for gradient in gradients:
        buckets = kinds[gradient.dtype, gradient.device]
        if not buckets or sum(g.nbytes for g in buckets[-1]) + gradient.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient)
    filled = []
    for (dtype, device), buckets in kinds.items():
        sizes = [sum(g.numel() for g in bucket) for bucket in buckets]
        buffer = torch.empty(max(sizes), dtype=dtype, device=device)
        filled += [(buffer[:size], tuple(bucket)) for size, bucket in zip(sizes, buckets, strict=True)]
    return tuple(filled)
