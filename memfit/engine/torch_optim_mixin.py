"""What engines have in common that leave gradients in the parameters and steps to torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class TorchOptimMixin:
    """The second half of a window, where ``reduce`` has left the sums in ``grad``."""

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The sums; of sharded parameters this rank's shards."""
        return [p.grad for p in parameters if p.grad is not None]

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Every rank has the whole gradient."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    @contextmanager
    def local_step(self, optimizer: Optimizer) -> Iterator[Callable[[], None]]:
        """torch's own step communicates nothing. It is looked up when it is called: streamed state replaces it."""
        yield lambda: optimizer.step()

    def step(self, optimizer: Optimizer) -> None:
        """Steps the parameters that this rank holds."""
        optimizer.step()

    def stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """The optimizer's parameters."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self, optimizer: Optimizer) -> None:
        """torch's own."""
        optimizer.zero_grad(set_to_none=True)

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """Every rank has them."""
        return dict(net.state_dict())

    def parts(self, net: nn.Module) -> list[Tensor]:
        """The net's parameters."""
        return list(net.parameters())
