"""Gradients and units over ranks, for models that torch's DDP and FSDP2 wrap.

DDP: every backward of a window runs without DDP's own reduction, and the gradients are reduced once, when all ranks
have theirs. Until then a rank meets no other, so that it repeats what ran out of memory alone. DDP would also send
rank 0's buffers to the others in the next forward; that happens here, at the same place.

FSDP2 gathers and reduces in every forward and backward, which ranks must enter together: it accumulates exactly, and
a rank cannot repeat alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memfit.torch_compat.attributes import use_count

RELEASE_SECONDS = 1.0
"""Longest wait for gloo's threads to drop the tensors of a collective."""


class OtherRankOutOfMemoryError(RuntimeError):
    """Another rank could not finish its window; every rank stops at the same place."""


class RankGroup:
    """The ranks that learn from a window together; one alone where no model is wrapped."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        self.wrapped = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self.sharded = any(isinstance(part, FSDPModule) for part in parts)
        shared = bool(self.wrapped or self.sharded) and dist.is_initialized()
        self.group = self.wrapped[0].process_group if self.wrapped else None
        self.world = dist.get_world_size(self.group) if shared else 1
        parameter = next((p for module in modules for p in module.parameters()), torch.zeros(()))
        self.device = parameter.device

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A forward and backward in which DDP's ranks do not meet."""
        with ExitStack() as stack:
            for module in self.wrapped:
                module.require_forward_param_sync = False
                stack.enter_context(module.no_sync())
            yield

    def most(self, value: float) -> float:
        """The largest value of the ranks."""
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def total(self, units: float, *, failed: bool) -> float:
        """Units of all ranks.

        Raises:
            OtherRankOutOfMemoryError: a rank failed, and this one did not.
        """
        units, failures = self._reduced([units, float(failed)], dist.ReduceOp.SUM)
        if failures and not failed:
            raise OtherRankOutOfMemoryError("memory ran out on another rank, whose sample does not fit alone")
        return units

    def finish(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiplies this rank's gradients by the factor and, with DDP, adds those of the other ranks."""
        if self.wrapped and self.world > 1:
            self._complete(parameters)
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        for group in _by_device_and_type(gradients):
            torch._foreach_mul_(group, factor)
        if self.wrapped and self.world > 1:
            shared = self._shared_buffers()
            uses = [(tensor, use_count(tensor)) for tensor in (*gradients, *shared)]
            waits = [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]
            for wait in waits:
                if wait is not None:
                    wait.wait()
            first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
            for buffer in shared:
                dist.broadcast(buffer, first, group=self.group)
            _wait_for_release(uses)

    def _complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """A parameter that some ranks did not use gets a gradient of zeros there."""
        flags = self._reduced([float(p.grad is not None) for p in parameters], dist.ReduceOp.MAX)
        for parameter, used in zip(parameters, flags, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _shared_buffers(self) -> list[Tensor]:
        """The buffers that DDP sends from rank 0 to the others."""
        return [buffer for module in self.wrapped if module.broadcast_buffers for buffer in module.module.buffers()]

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how, group=self.group)
        return [float(value) for value in tensor.tolist()]


def _wait_for_release(uses: Sequence[tuple[Tensor, int]]) -> None:
    """Waits until gloo's threads hold none of the tensors, each given with its use count from before.

    A thread of gloo drops its tensors after the collective is done, and needs Python's lock for it. A loop that ends
    here and destroys its process group would hold that lock while it joins the thread, and never end.
    """
    limit = time.monotonic() + RELEASE_SECONDS
    while any(use_count(tensor) > count for tensor, count in uses) and time.monotonic() < limit:
        time.sleep(0.0001)


def local(gradient: Tensor) -> Tensor:
    """The part of a gradient that this rank holds."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _by_device_and_type(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())
