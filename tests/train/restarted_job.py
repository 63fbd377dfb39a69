"""A job one of whose ranks runs out of memory once, at a chosen point: see tests/train/test_restarts.py."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from memfit.job import Job, Loss
from testing.faulty_jobs import run_out_of_memory


class Planted(nn.Module):
    """Passes on what it gets; in the chosen forward or backward the allocator fails."""

    point = ""
    mark = Path()
    reached = {"forward": 0, "backward": 0}  # noqa: RUF012

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.fail("forward")
            if x.requires_grad:
                x.register_hook(lambda gradient: self.fail("backward"))
        return x

    @classmethod
    def fail(cls, part):
        number = cls.reached[part]
        cls.reached[part] += 1
        if cls.point == f"{part} {number}" and not cls.mark.exists():
            cls.mark.write_text(f"{time.time()}")
            run_out_of_memory()


class Restarted(Job):
    windows: int = 3
    real_validation_batch = True
    fails: str = ""
    """RANK PART NUMBER; empty: nothing fails."""
    mark: str = ""
    validate_every = 1
    clip: float | None = 1.0
    ema: float | None = 0.9

    def nets(self):
        rank, _, point = self.fails.partition(" ")
        if self.mark and Path(self.mark).exists():
            Path(f"{self.mark}.again").write_text(f"{time.time()}")
        if rank and rank == os.environ.get("RANK"):
            Planted.point, Planted.mark = point, Path(self.mark)
        blocks = [nn.Sequential(nn.Linear(16, 32), Planted(), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)]
        return {"net": nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return [torch.randn(shape.items, 8), torch.randn(shape.items)]

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 8, generator=generator)
        return list(zip(x, x.sum(1), strict=True))

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))

    def validate(self, nets, batch):
        if self.fails.endswith("validate") and self.fails[0] == os.environ.get("RANK"):
            tried = Path(f"{self.mark}.{len(batch[0])}")
            if len(batch[0]) > 2 and not tried.exists():
                tried.touch()
                run_out_of_memory()
        return {"error": (nets["net"](batch[0]).squeeze(-1) - batch[1]).square().mean(), "items": len(batch[0])}
