"""Adam as torch had it before July 2023, as far as memory sees it."""

from __future__ import annotations

from typing import Any

import torch


class Adam(torch.optim.Adam):
    """Adam over lists of tensors with two intermediates as large as the parameters: the root and the denominator.

    Later versions hold one (pytorch/pytorch, issue 97712).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step, without weight decay."""
        for group in self.param_groups:
            lists: list[list[Any]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            parameters, gradients, averages, squares, _, steps = lists
            (beta_1, beta_2), rate = group["betas"], group["lr"]
            torch._foreach_add_(steps, 1)
            torch._foreach_lerp_(averages, gradients, 1 - beta_1)
            torch._foreach_mul_(squares, beta_2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta_2)
            roots = torch._foreach_sqrt(squares)
            denominators = torch._foreach_add(roots, group["eps"])
            torch._foreach_addcdiv_(parameters, averages, denominators, -rate)
