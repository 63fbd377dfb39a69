"""A job whose bytes lie on no line of its batch's size."""

import torch
from torch import nn

import memfit


class Contrasted(memfit.Job):
    """Each item is compared with each, so that bytes grow as the square of the items."""

    def nets(self):
        return {"net": nn.Linear(8, 8)}

    def batch(self, shape):
        return torch.randn(shape.items, 8)

    def loss(self, nets, batch):
        made = nets["net"](batch)
        return (made @ made.T).square().sum(), len(batch)

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}
