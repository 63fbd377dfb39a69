"""A job whose code keeps tensors in its module's variables, for test_untraced_copy.py."""

import torch
from torch import nn

from memfit.job import Job
from tests.trace.kept_tensors import kept


class Kept(Job):
    """Makes them at the head of its first step, and gives them to an operator at its end."""

    width: int = 512

    def nets(self):
        return {"net": nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(8)))}

    def optimizers(self, nets):
        return {"adam": torch.optim.Adam(nets["net"].parameters())}

    def batch(self, shape):
        return torch.empty(shape.items, 256, self.width)

    def loss(self, nets, batch):
        mask, ones = kept(str(batch.device))
        made = nets["net"](batch).square().mean((1, 2)).sum()
        mask.mul(2)
        ones.mul(2)
        return made, len(batch)
