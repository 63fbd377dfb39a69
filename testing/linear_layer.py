"""A job as small as one can be, for questions about its batch alone."""

import torch
from torch import nn

import memfit


class LinearLayer(memfit.Job):
    """One layer over many small samples."""

    def nets(self):
        return {"net": nn.Linear(8, 8)}

    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 8)}

    def loss(self, nets, batch):
        return nets["net"](batch["x"]).square().sum(), len(batch["x"])

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters())}
