"""AdamW whose moments are quantized by kernels that no processor has: their state's tensors, without the update.

bitsandbytes: a byte for each value and a float32 for each block of it. lpmm (low-bit-optimizers): half a byte, and a
float32 for each group of 128 values, or for each row and column of the second moment (``rank_one``). Parameters of
fewer than 4,096 values keep both moments in float32. What the update takes within one parameter is left out: at that
time the activations of a step are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 4096
"""Parameters of fewer values are not quantized."""


class AdamW(torch.optim.Optimizer):
    """See the module.

    Args:
        bits: 8 or 4, of each value of the two moments.
        block: values that share a scale.
        rank_one: whether the second moment of a matrix has a scale for each row and column instead.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, *, bits: int, block: int, rank_one: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._bits, self._block, self._rank_one = bits, block, rank_one

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Makes the state of the parameters that have a gradient, the first time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] |= self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.numel() < SMALL:
            plain = torch.float32
            return {name: torch.zeros_like(parameter, dtype=plain) for name in ("exp_avg", "exp_avg_sq")}
        codes, scales = -(-parameter.numel() * self._bits // 8), -(-parameter.numel() // self._block)
        second = sum(parameter.shape) if self._rank_one and parameter.dim() > 1 else scales
        state = {name: parameter.new_empty(codes, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
        state |= {"scale": parameter.new_empty(scales, dtype=torch.float32)}
        return state | {"scale_sq": parameter.new_empty(second, dtype=torch.float32)}
