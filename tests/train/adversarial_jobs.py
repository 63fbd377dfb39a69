"""A generator and a judge of its samples, which step one after the other."""

import torch
from torch import nn
from torch.nn.functional import softplus

from memfit.job import Job, Turn


class Adversarial(Job):
    """The judge learns twice in a window, before or after the generator, which then runs without a backward."""

    judge_last: bool = False
    ema: float | None = 0.9

    def nets(self):
        torch.manual_seed(3)
        sizes = {"maker": (8, 24), "judge": (24, 1)}
        return {name: nn.Sequential(nn.Linear(a, 32), nn.Tanh(), nn.Linear(32, b)) for name, (a, b) in sizes.items()}

    def optimizers(self, nets):
        return {name: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for name, net in nets.items()}

    def turns(self, optimizers):
        judge = [Turn(name=name, loss=self.judged, optimizers=("judge",)) for name in ("judge", "judge again")]
        maker = [Turn(name="maker", loss=self.made, optimizers=("maker",))]
        return maker + judge if self.judge_last else judge + maker

    def judged(self, nets, batch, shared):
        made = nets["maker"](batch[:, :8]).detach()
        return softplus(torch.cat([nets["judge"](made), -nets["judge"](batch)])).sum(), len(batch)

    def made(self, nets, batch, shared):
        return softplus(-nets["judge"](nets["maker"](batch[:, :8]))).sum(), len(batch)

    def batch(self, shape):
        return torch.randn(shape.items, 24)

    def dataset(self):
        return torch.randn(32, 24, generator=torch.Generator().manual_seed(5))
