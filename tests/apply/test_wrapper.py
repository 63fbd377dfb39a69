"""pytest tests/apply/test_wrapper.py: buckets as DistributedDataParallel keeps them."""

import pytest
import torch
from torch import nn

import memfit
from memfit.apply.train_state import build, ddp_buckets


class Wrapped(memfit.Job):
    unit = "samples"
    wrapper: str = "ddp"

    def nets(self):
        return {"net": nn.Sequential(*(nn.Linear(2000, 2000, bias=False) for _ in range(4)))}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 2000)

    def loss(self, nets, batch):
        return memfit.Loss(nets["net"](batch).square().sum(), len(batch))


@pytest.mark.parametrize(("wrapper", "first"), [("ddp", [16_000_000]), ("ddp_find_unused", None)])
def test_one_bucket_until_the_second_forward_that_learns(wrapper, first):
    train_state = build(Wrapped(wrapper=wrapper), "cpu")
    net = train_state.nets["net"]
    rebuilt = [count for _, count in ddp_buckets(list(net.parameters()))]
    assert rebuilt == [4_000_000, 8_000_000, 4_000_000]
    sizes = []
    for _ in range(2):
        with torch.no_grad():
            net(torch.randn(1, 2000))
        sizes.append([item.numel() for item in train_state.buckets["net"]])
        net(torch.randn(1, 2000)).sum().backward()
    sizes.append([item.numel() for item in train_state.buckets["net"]])
    assert sizes == [first or rebuilt, first or rebuilt, rebuilt]


def test_no_wrapper_no_buckets():
    assert build(Wrapped(wrapper="none"), "cpu").buckets == {}
