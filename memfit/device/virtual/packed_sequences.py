"""Packed sequences (``torch.nn.utils.rnn``) in a trace, whose kernels read and write lengths on the host.

As in ATen/native/PackedSequence.cpp: runs of steps that the same number of sequences reaches are copied together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby

import torch
from torch import Tensor

from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.torch_compat.packed_sequences import unpacking_replaced


def packed(padded: Tensor, sizes: Sequence[int], batch_first: bool) -> Tensor:
    """The rows of each step, concatenated.

    Args:
        padded: (batch, steps, ...) where ``batch_first``, else (steps, batch, ...).
        sizes: how many sequences reach each step; none more than the step before.
    """
    steps = padded.transpose(0, 1) if batch_first else padded
    runs = [steps[begin:end, :size].contiguous().flatten(0, 1) for begin, end, size in _runs(sizes)]
    return torch.cat(runs)


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first step, step after the last, sequences) of each run of steps that equally many sequences reach."""
    begin = 0
    for size, steps in groupby(sizes):
        end = begin + len(list(steps))
        yield begin, end, size
        begin = end


def unpacked_in_a_trace() -> AbstractContextManager[None]:
    """Context in which ``pad_packed_sequence`` takes tensors of a trace: torch's own writes the lengths to memory that
    a fake tensor does not have."""
    return unpacking_replaced(_unpacking)


def _unpacking(unpack: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def unpacked(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(data, FakeTensor) or isinstance(batch_sizes, FakeTensor):
            return unpack(data, batch_sizes, batch_first, padding_value, total_length)
        with disable_current_modes():
            sizes = batch_sizes.tolist()
            lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
        return _padded(data, sizes, batch_first, padding_value, total_length), lengths

    return unpacked


def _padded(data: Tensor, sizes: Sequence[int], batch_first: bool, padding_value: float, total_length: int) -> Tensor:
    """(steps, batch, ...), or (batch, steps, ...) where ``batch_first``."""
    steps, place = max(total_length, len(sizes)), 0
    out = data.new_full((steps, sizes[0], *data.shape[1:]), padding_value)
    for begin, end, size in _runs(sizes):
        rows = size * (end - begin)
        out[begin:end, :size].copy_(data[place : place + rows].unflatten(0, (end - begin, size)))
        place += rows
    return out.transpose(0, 1) if batch_first else out
