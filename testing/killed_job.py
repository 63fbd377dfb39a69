"""A small job with all that a checkpoint must hold: for runs that are killed and resumed."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import memfit


def changed(sample: torch.Tensor) -> torch.Tensor:
    """Augmentation from every source of random numbers."""
    return sample * random.uniform(0.9, 1.1) + float(np.random.normal(0, 0.01)) + 0.01 * torch.randn(())


class Killed(memfit.Job):
    """Dropout, BatchNorm in a trained and in a frozen net, two optimizers, a schedule, an average, clipping."""

    windows: int = 40
    clip: float | None = 1.0
    ema: float | None = 0.9
    width: int = 64

    def nets(self):
        made = nn.Sequential(
            nn.Linear(16, self.width), nn.BatchNorm1d(self.width), nn.Dropout(0.2), nn.Linear(self.width, 8)
        )
        judge = nn.Sequential(nn.Linear(8, self.width), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(self.width, 1))
        frozen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        return {"made": made, "judge": judge, "frozen": frozen}

    def optimizers(self, nets):
        adam = torch.optim.AdamW(nets["made"].parameters(), lr=1e-2, amsgrad=True)
        return {"made": adam, "judge": torch.optim.SGD(nets["judge"].parameters(), lr=1e-2, momentum=0.9)}

    def schedules(self, optimizers, windows):
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers["made"], 50)
        return {"cosine": cosine, "steps": torch.optim.lr_scheduler.MultiStepLR(optimizers["judge"], [5, 15, 30])}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 16), "y": torch.randn(shape.items, 8)}

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(16, generator=generator), torch.randn(8, generator=generator)) for _ in range(50)]

    def collate(self, samples):
        return {"x": torch.stack([changed(x) for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def turns(self, optimizers):
        judge = memfit.Turn(name="judge", loss=self.judged, optimizers=("judge",))
        return [judge, memfit.Turn(name="made", loss=self.made, optimizers=("made",))]

    def judged(self, nets, batch, shared):
        fake = nets["made"](batch["x"]).detach()
        right, wrong = nets["judge"](batch["y"]), nets["judge"](fake)
        return (1 - right).square().sum() + wrong.square().sum(), len(fake)

    def made(self, nets, batch, shared):
        fake = nets["made"](batch["x"])
        near = F.mse_loss(nets["frozen"](fake), batch["y"], reduction="sum")
        return (1 - nets["judge"](fake)).square().sum() + near, len(fake)

    def units(self, batch):
        return {"judge": len(batch["x"]), "made": len(batch["x"])}
