"""python -m pytest tests/apply/test_build_nets.py"""

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.apply.build_nets import nets_of
from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.virtual_device import virtual_cpu
from memfit.job import Shape
from memfit.planner.predict import net_sizes, plain_nets
from memfit.trace.session import open_session
from memfit.trace.step import Tracing


class ReadsValues(nn.Module):
    """What works on the CPU alone: a legacy constructor, an array of a tensor, and a size from drawn numbers."""

    def __init__(self):
        super().__init__()
        positions = torch.arange(6).flip(0)
        self.register_buffer("order", torch.LongTensor(positions))
        drawn = torch.randperm(6, generator=torch.Generator().manual_seed(0))
        self.order_of = {int(place): number for number, place in enumerate(drawn)}
        assert len(self.order_of) == 6
        width = int(np.asarray(torch.linspace(6, 24, 4))[-1])
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)
        self.down.weight = nn.Parameter(torch.from_numpy(np.ones((6, width), np.float32)))
        self.again = self.down

    def forward(self, x):
        assert self.order.tolist() == [5, 4, 3, 2, 1, 0]
        return self.down(self.up(x[:, self.order]))


class Reading(memfit.Job):
    fails: bool = False

    def nets(self):
        net = ReadsValues()
        if self.fails:
            raise ValueError("wrong on every device")
        return {"net": net}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 6)

    def loss(self, nets, x):
        return nets["net"](x).sum(), len(x)


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_nets_whose_code_reads_values_are_made_on_the_cpu_and_moved(device):
    with open_session(Reading(), Tracing(device=find_device(device)), Shape(items=4)) as session:
        net = session.train_state.nets["net"]
        assert all(tensor.is_cuda == (device != "cpu") for tensor in (*net.parameters(), *net.buffers()))
        assert net.down.weight.shape == (6, 24)
        assert net.again is net.down
        resident = {i for i, category in enumerate(session._tracer.category) if category == "parameters"}
        assert sum(session._tracer.nbytes[i] for i in resident) == 4 * (24 * 6 + 24 + 6 * 24 + 6)


def test_they_are_counted_as_they_are():
    (size,) = net_sizes(plain_nets(Reading()))
    assert size.parameters == 24 * 6 + 24 + 6 * 24 + 6


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_what_fails_on_the_cpu_too_is_told_as_the_device_had_it(device):
    job = Reading(fails=True)
    with (
        pytest.raises((AssertionError, TypeError)),
        open_session(job, Tracing(device=find_device(device)), Shape(items=4)),
    ):
        pass
    with pytest.raises(ValueError, match="wrong on every device"):
        nets_of(job, torch.device("cpu"))


def test_for_a_real_device_they_wait_on_the_cpu_to_be_moved():
    net = nets_of(Reading(), torch.device("meta"))["net"]
    assert net.order.tolist() == [5, 4, 3, 2, 1, 0]
    assert {p.device.type for p in net.parameters()} == {"cpu"}


class ClearsTracebacks(memfit.Job):
    """Fails as huggingface_hub does, which clears the tracebacks of the exceptions before its own."""

    def nets(self):
        error = OSError("offline")
        try:
            raise error
        finally:
            before = error.__context__
            while before is not None:
                before.__traceback__, before = None, before.__context__


def test_an_exception_keeps_its_lines_if_a_second_attempt_clears_them():
    with virtual_cpu() as virtual, pytest.raises(OSError, match="offline") as raised:
        nets_of(ClearsTracebacks(), virtual.device)
    assert raised.traceback[-1].name == "nets"
