"""What a storage was named stays its category, whatever part of the step it was made in.

python -m pytest tests/trace/test_named_categories.py
"""

import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.events import CATEGORIES
from memfit.job import Job, Loss, Shape
from memfit.trace.step import Tracing, trace_job


class FrozenNorm(Job):
    """A frozen net with buffers beside a trained one, whose first buffer grows in the forward."""

    def nets(self):
        return {
            "encoder": nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).requires_grad_(False).eval(),
            "net": nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)),
        }

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 32)

    def loss(self, nets, batch):
        return Loss(nets["net"](nets["encoder"](batch)).square().sum(), len(batch))


def bytes_of(category):
    trace = trace_job(FrozenNorm(), Shape(items=4), Tracing(device=find_device("rtx4090")))
    return int(trace.nbytes[trace.category == CATEGORIES.index(category)].sum())


def test_buffers_of_a_frozen_net_are_frozen_and_those_of_a_trained_net_are_buffers():
    norm = 32 * 4 * 2 + 8
    assert bytes_of("buffers") == norm
    assert bytes_of("frozen") == 4 * (32 * 32 + 32 + 32 + 32) + norm


def test_parameters_and_gradients_are_not_counted_as_activations():
    parameters = 4 * (32 * 32 + 32 + 32 + 32)
    assert bytes_of("parameters") == parameters
    assert bytes_of("gradients") % parameters == 0
    assert bytes_of("gradients") >= parameters
