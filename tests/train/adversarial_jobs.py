"""A generator and a judge of its samples, which step one after the other."""

import torch
from torch import nn
from torch.nn.functional import softplus

from memfit.job import Job, Turn


class Adversarial(Job):
    """The judge's turn runs the generator without a backward, and is the first or the last of a window."""

    judge_last: bool = False
    ema: float | None = 0.9

    def nets(self):
        torch.manual_seed(3)
        sizes = {"maker": (8, 24), "judge": (24, 1)}
        return {name: nn.Sequential(nn.Linear(a, 32), nn.Tanh(), nn.Linear(32, b)) for name, (a, b) in sizes.items()}

    def optimizers(self, nets):
        return {name: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for name, net in nets.items()}

    def turns(self, optimizers):
        turns = [
            Turn(name="judge", loss=self.judged, optimizers=("judge",)),
            Turn(name="maker", loss=self.made, optimizers=("maker",)),
        ]
        return turns[::-1] if self.judge_last else turns

    def judged(self, nets, batch, shared):
        made = nets["maker"](batch[:, :8]).detach()
        return softplus(torch.cat([nets["judge"](made), -nets["judge"](batch)])).sum(), len(batch)

    def made(self, nets, batch, shared):
        return softplus(-nets["judge"](nets["maker"](batch[:, :8]))).sum(), len(batch)

    def batch(self, shape):
        return torch.randn(shape.items, 24)

    def dataset(self):
        return torch.randn(32, 24, generator=torch.Generator().manual_seed(5))
