"""A job's file as text, for runs in other processes."""

_LINEAR = """
import torch
from torch import nn
import memfit

class NAME(memfit.Job):
    windows: int = 6

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return [torch.randn(shape.items, 16), torch.randn(shape.items)]

    def dataset(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(50, 16, generator=g)
        return list(zip(x, x.sum(1)))

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return error.sum(), len(error)
"""


def linear(width: int, name: str = "Net") -> str:
    """Two linear layers with dropout on 50 samples."""
    return _LINEAR.replace("WIDTH", str(width)).replace("NAME", name)
