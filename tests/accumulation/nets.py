"""A small net of every kind of state, ragged windows, and failures in chosen backwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

RANK_SIZES = {0: (4, 3, 5), 1: (2, 6)}
"""Micro-batches of each rank: ragged, and not of the same number where ranks need not meet."""
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Net(nn.Module):
    """A linear net whose first layer sees some noise, with a buffer that every forward changes."""

    def __init__(self, *, noise: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.noise = noise
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.noise:
            x = x + torch.randn(6, dtype=x.dtype) * random.random() * np.random.rand()
        return self.last(torch.tanh(self.first(x)))


def windows(count: int = 3, sizes: tuple[int, ...] = (4, 3, 5)) -> list[list[tuple[Tensor, Tensor]]]:
    """Windows of ragged micro-batches."""
    made = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(n, 6, generator=made).double(), torch.randn(n, 1, generator=made).double()) for n in sizes]
        for _ in range(count)
    ]


def mean_loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def mean_over_nothing(net: nn.Module, rows: Tensor) -> Tensor:
    """The mean over the valid units of a micro-batch that has none: 0 / 0, as masked losses are written."""
    valid = torch.zeros(len(rows), 1, dtype=rows.dtype)
    return (net(rows) * valid).sum() / valid.sum()


class Failures:
    """Raises in the backward calls with these numbers, counted over all."""

    def __init__(self, net: nn.Module, at: set[int]) -> None:
        self.calls, self.at = 0, at
        module = net.module if hasattr(net, "module") else net
        module.first.weight.register_hook(self._raise_where_due)

    def _raise_where_due(self, gradient: Tensor) -> None:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise torch.OutOfMemoryError(MESSAGE)


@contextmanager
def failing_step(parameter: nn.Parameter, at: int) -> Iterator[None]:
    """The ``at``-th write into a parameter's data inside of an optimizer's step fails once, after others were done."""
    from memfit.torch_compat import TorchDispatchMode

    class Mode(TorchDispatchMode):
        writes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::addcdiv_", "aten::add_") and args[0].data_ptr() == parameter.data_ptr():
                self.writes += 1
                if self.writes == at:
                    raise torch.OutOfMemoryError(MESSAGE)
            return func(*args, **(kwargs or {}))

    with Mode():
        yield
