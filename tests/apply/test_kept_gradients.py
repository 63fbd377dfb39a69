"""A loss that frees the gradients of a window's earlier micro-batches is refused by name.

python -m pytest tests/apply/test_kept_gradients.py
"""

import pytest
import torch
from torch import nn

from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Job, Shape, Turn
from memfit.trace.step import Tracing, trace_job


class Clearing(Job):
    """Its loss was taken over from a loop, with the line that frees gradients."""

    validates = False
    how: str = "nothing"

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))}

    def optimizers(self, nets):
        self.optimizer = torch.optim.SGD(nets["net"].parameters(), lr=0.1)
        return {"sgd": self.optimizer}

    def batch(self, shape):
        return torch.randn(shape.items, 4)

    def loss(self, nets, batch):
        if self.how == "frees":
            nets["net"].zero_grad()
        elif self.how == "zeroes":
            self.optimizer.zero_grad(set_to_none=False)
        elif self.how == "steps":
            nets["net"](batch).sum().backward()
        return nets["net"](batch).sum(), len(batch)


def windows_run(job, count):
    train_state = build(job, "cpu")
    parts = [MicroBatch(lambda: torch.randn(2, 4), 2)] * count
    for _ in range(2):
        run_window(train_state, parts)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "frees",
            r"its loss frees the gradients of earlier micro-batches \(net.0.weight\), .*; take zero_grad\(\) out",
        ),
        ("zeroes", "its loss changes the gradients of earlier micro-batches"),
        ("steps", r"its loss changes .* as they were; take zero_grad\(\) or backward\(\) out of the loss"),
    ],
)
def test_a_loss_that_touches_earlier_gradients_is_refused_where_there_are_some(how, words):
    windows_run(Clearing(how=how), 1)
    with pytest.raises(InputError, match=words):
        windows_run(Clearing(how=how), 3)
    with pytest.raises(InputError, match=words):
        trace_job(Clearing(how=how), Shape(items=2, length=None), Tracing(device=find_device("t4"), micro_batches=2))


class Adversarial(Clearing):
    """A turn that steps one of two nets frees the gradients of the judge."""

    steps: str = "maker"

    def nets(self):
        return {"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)}

    def optimizers(self, nets):
        return {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}

    def turns(self, optimizers):
        return [Turn(name="only", loss=self.taken, optimizers=(self.steps,))]

    def taken(self, nets, batch, shared):
        nets["judge"].zero_grad()
        return nets["judge"](nets["maker"](batch)).sum(), len(batch)


def test_a_turn_may_free_the_gradients_of_what_it_does_not_step():
    windows_run(Adversarial(), 3)
    with pytest.raises(InputError, match=r"turn 'only': its loss frees .* \(judge.weight\)"):
        windows_run(Adversarial(steps="judge"), 3)
