"""Which elements of which parameter a rank holds under ZeRO, and whole tensors made of all ranks' elements.

DeepSpeed lays parameters end to end in one flat tensor and cuts that into equal parts (stages 1 and 2), or cuts every
parameter by itself and lays a rank's cuts end to end (stage 3). Either way a rank holds a run of a parameter's
elements, which lies somewhere in a flat part of the rank's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.torch_compat.attributes import own_parameters


@dataclass(frozen=True, kw_only=True)
class Run:
    """Elements [start, start + count) of a parameter, row by row, at ``at`` of a flat part."""

    name: str
    """``net.path``."""
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """The shape of the full parameter."""
    start: int
    count: int
    flat: Tensor
    """The part, as the optimizer steps it."""
    at: int
    group: int
    """The optimizer's group."""

    def of(self, tensor: Tensor) -> Tensor:
        """This run of a tensor that is laid out as the flat part."""
        return tensor.view(-1)[self.at : self.at + self.count]


def runs(zero: Any, stage: int, rank: int) -> list[Run]:
    """What this rank holds of the parameters that are stepped, in the order of the optimizer's groups."""
    return list(_runs_of_cuts(zero, rank) if stage == 3 else _runs_of_laid_out(zero, rank))


def _runs_of_laid_out(zero: Any, rank: int) -> Iterator[Run]:
    for group, flat in enumerate(zero.single_partition_of_fp32_groups):
        begins, places = zero.grad_start_offset[group][rank], zero.grad_partition_insertion_offset[group][rank]
        for parameter in zero.params_in_partition[group]:
            key = zero.get_param_id(parameter)
            start, at = int(begins[key]), int(places[key])
            yield Run(
                name=zero.param_names[parameter], parameter=parameter, shape=tuple(parameter.shape), start=start,
                count=min(parameter.numel() - start, flat.numel() - at), flat=flat, at=at, group=group,
            )  # fmt: skip


def _runs_of_cuts(zero: Any, rank: int) -> Iterator[Run]:
    for part, parameters in enumerate(zero.fp16_groups):
        at = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = rank * size
            yield Run(
                name=zero.param_names[parameter], parameter=parameter, shape=tuple(parameter.ds_shape), start=start,
                count=max(min(size, parameter.ds_numel - start), 0), flat=zero.fp32_partitioned_groups_flat[part],
                at=at, group=zero.sub_group_to_group_id[part],
            )  # fmt: skip
            at += size


def partition_parameters(net: nn.Module, rank: int, world: int, device: torch.device | None = None) -> None:
    """A net's parameters become this rank's parts of them, cut and told as DeepSpeed has it in stage 3 (``ds_tensor``).

    Args:
        device: where the parts go; None: they stay.
    """
    parts: dict[int, nn.Parameter] = {}
    for module in net.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                if id(parameter) not in parts:
                    parts[id(parameter)] = _cut(parameter, rank, world, device)
                own_parameters(module)[name] = parts[id(parameter)]


def _cut(parameter: nn.Parameter, rank: int, world: int, device: torch.device | None) -> nn.Parameter:
    values = parameter.detach().reshape(-1)
    size = -(-values.numel() // world)
    own = values[rank * size : (rank + 1) * size]
    padded = torch.zeros(size, dtype=values.dtype, device=device or values.device)
    padded[: own.numel()].copy_(own)
    part: Any = nn.Parameter(padded, requires_grad=False)
    part.ds_tensor, part.ds_shape, part.ds_numel = padded, parameter.shape, parameter.numel()
    return part


def buffers(zero: Any, stage: int) -> Iterator[tuple[Tensor, str]]:
    """(tensor, category) of the buffers that DeepSpeed holds beside the nets and the optimizer's state."""
    for bucket in zero.ipg_buckets.values():
        buffers = [bucket.buffer] if isinstance(bucket.buffer, Tensor) else bucket.buffer or ()
        yield from ((buffer, "communication") for buffer in buffers)
    if stage == 3:
        yield zero.grad_partitions_flat_buffer, "gradients"
        if zero.offload_optimizer:
            yield from ((flat, "optimizer") for flat in zero.fp32_partitioned_groups_flat)
        return
    yield from ((flat, "optimizer") for flat in zero.single_partition_of_fp32_groups)
    if zero.grads_in_partition is not None:
        yield zero.grads_in_partition, "gradients"


def step_parts(zero: Any, stage: int, optimizer: Optimizer) -> None:
    """The optimizer's steps alone, by the gradients that lie in the flat parts, in as many calls as DeepSpeed makes."""
    if stage < 3:
        optimizer.step()
        return
    for part, flat in enumerate(zero.fp32_partitioned_groups_flat):
        group = optimizer.param_groups[zero.sub_group_to_group_id[part]]
        group["params"] = [flat]
        optimizer.step()
        group["params"] = []


def most_gradients(groups: Sequence[Sequence[int]], world: int) -> int:
    """The rank with the most gradients under stages 1 and 2: it keeps each whole that begins in, or enters, its part.

    Args:
        groups: elements of the parameters of each of the optimizer's groups, in order.
    """
    kept = [0] * world
    for sizes in groups:
        part = 2 * -(-sum(sizes) // (2 * world))
        begin = 0
        for size in sizes:
            for rank in range(begin // part, min(-(-(begin + size) // part), world)):
                kept[rank] += size
            begin += size
    return max(range(world), key=lambda rank: kept[rank])


def gather_full(values: Tensor, start: int, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """A whole tensor, of which this rank gives the elements from ``start``; every rank calls it.

    Each element is a sum of one rank's value and zeros, which is exact.
    """
    full = torch.zeros(math.prod(shape), dtype=values.dtype, device=values.device)
    full[start : start + values.numel()] = values.view(-1)
    dist.all_reduce(full, group=group)
    return full.view(tuple(shape))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the fewest boxes that make up a run of a tensor's elements, in the order of the run."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(first, rest, begin, end)
        return
    if begin:
        yield from _in_row(first, rest, begin, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(last, rest, 0, end)


def _in_row(row: int, rest: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes(rest, start, stop):
        yield (row, *offsets), (1, *sizes)
