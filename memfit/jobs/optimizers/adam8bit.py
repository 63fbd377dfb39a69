"""AdamW with its moments in 8 bits (Dettmers et al. 2022): dynamic codes, one scale for each block of 256 values.

State of a parameter of n values: 2 n bytes and 2 x 4 bytes a block; below 4096 values both moments stay fp32, as in
bitsandbytes. A step decodes one parameter's moments at a time, so it needs a few fp32 copies of the largest parameter,
where bitsandbytes' kernel needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BLOCK = 256
SMALL = 4096
"""Parameters of fewer values keep fp32 moments."""


class AdamW8bit(Optimizer):
    """See the module. Hyperparameters and their defaults are those of ``torch.optim.AdamW``."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    device = parameter.device
                    if device not in tables:
                        tables[device] = codes(True, device), codes(False, device)
                    self._step_one(group, parameter, self.state[parameter], *tables[device])
        return loss

    def _step_one(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], signed: Tensor, unsigned: Tensor
    ) -> None:
        (beta1, beta2), gradient = group["betas"], parameter.grad
        assert gradient is not None
        small = parameter.numel() < SMALL
        if not state:
            state["step"] = 0
            for name, table in (("exp_avg", signed), ("exp_avg_sq", unsigned)):
                zero = torch.zeros_like(parameter)
                state[name] = zero if small else quantize(zero, table)
        state["step"] += 1
        first = state["exp_avg"] if small else dequantize(state["exp_avg"], signed, parameter.shape)
        second = state["exp_avg_sq"] if small else dequantize(state["exp_avg_sq"], unsigned, parameter.shape)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        spread = second.sqrt().div_(correction2**0.5).add_(group["eps"])
        parameter.addcdiv_(first, spread, value=-group["lr"] / correction1)
        if not small:
            state["exp_avg"], state["exp_avg_sq"] = quantize(first, signed), quantize(second, unsigned)


def codes(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """The 256 values in -1 to 1 (or 0 to 1) that 8 bits stand for, ascending.

    Seven decades; each further one up has twice as many values, so that small numbers keep their order of magnitude and
    large ones their digits.
    """
    decades, extra = [], 0 if signed else 1
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + extra) + 1, device=device)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6))
    positive = torch.cat(decades)
    ends = [torch.zeros(1, device=device), torch.ones(1, device=device)]
    return torch.cat((-positive, *ends, positive) if signed else (*ends, positive)).sort()[0]


def quantize(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Values of any shape to (codes uint8 (n,), largest magnitude of each block fp32 (blocks,))."""
    flat = values.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1)
    nearest = torch.bucketize(blocks / scale.clamp(min=1e-38)[:, None], (table[1:] + table[:-1]) / 2)
    return nearest.to(torch.uint8).flatten()[: len(flat)].clone(), scale


def dequantize(stored: tuple[Tensor, Tensor], table: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of ``encode``, to the nearest of the table's values."""
    numbers, scale = stored
    blocks = table[nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).int()].view(-1, BLOCK) * scale[:, None]
    return blocks.flatten()[: len(numbers)].view(shape)
