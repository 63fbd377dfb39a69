"""python -m pytest tests/trace/test_net_kind.py"""

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.job import Job, Shape
from memfit.planner.predict import footprint_on, predict
from memfit.replay.margins import margin_of, margins
from memfit.show.footprint_table import footprint_remarks
from memfit.trace.step import Tracing, trace_job


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)


class SelectiveKernel(nn.Module):
    """Weighs its branches by a softmax over them, which is no attention."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        branches = self.convolution(x).unflatten(1, (2, 4))
        return (branches * branches.mean((3, 4), keepdim=True).softmax(1)).sum(1)


class Tokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


def patches():
    return [nn.Conv2d(3, 32, 8, 8), Tokens()]


NETS = {
    "convolution": lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)],
    "depthwise": lambda: [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)],
    "attention": lambda: [*patches(), Attention(fused=True)],
    "attention by hand": lambda: [*patches(), Attention(fused=False)],
    "hybrid": lambda: [nn.Conv2d(3, 3, 3, padding=1), *patches(), Attention(fused=True)],
    "matmul": lambda: [*patches(), nn.Linear(32, 8)],
    "1-d convolution": lambda: [nn.Flatten(2), nn.Conv1d(3, 4, 3)],
    "convolution, softmax of branches": lambda: [nn.Conv2d(3, 4, 3), SelectiveKernel()],
    "recurrent": lambda: [*patches(), nn.LSTM(32, 8)],
}


class Net(Job):
    name: str = "matmul"

    def nets(self):
        return {"net": nn.ModuleList(NETS[self.name]())}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 3, 32, 32)

    def loss(self, nets, batch):
        for layer in nets["net"]:
            batch = layer(batch)
            batch = batch[0] if isinstance(batch, tuple) else batch
        return batch.float().square().flatten(1).mean(1).sum(), len(batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_a_kind_follows_from_the_operators(name, precision):
    trace = trace_job(Net(name=name, precision=precision), Shape(items=2), Tracing(device=find_device("a100-40gb")))
    family = {"attention by hand": "attention", "convolution, softmax of branches": "convolution"}.get(name, name)
    assert trace.net_kind == f"{family}, {'float32' if precision == 'fp32' else 'bfloat16'}"


def test_a_convolution_that_reads_channels_last_says_so():
    class Last(Net):
        def batch(self, shape):
            return super().batch(shape).to(memory_format=torch.channels_last)

    trace = trace_job(Last(name="convolution"), Shape(items=2), Tracing(device=find_device("a100-40gb")))
    assert trace.net_kind == "convolution, float32, channels last"


def test_the_interval_is_the_measured_one_and_a_kind_never_measured_says_so():
    card = find_device("a100-40gb")
    measured = predict(Net(name="convolution"), "net", Shape(items=2), card).footprint
    margin = margins()["convolution, float32"]
    train = measured.phases["train"]
    assert measured.measured_runs == margin.runs > 0
    assert train.process_bytes_low == int((train.reserved_bytes + card.context_low) * (1 + margin.low))
    assert train.process_bytes_low < train.process_bytes < train.process_bytes_high
    assert not any("No measured runs" in line for line in footprint_remarks(measured))

    never = predict(Net(name="recurrent"), "net", Shape(items=2), card).footprint
    assert never.measured_runs == 0
    assert any("recurrent, float32" in line and "No measured runs" in line for line in footprint_remarks(never))
    widest = margin_of("recurrent, float32")
    assert all(widest.low <= item.low and widest.high >= item.high for item in margins().values())


def test_on_a_cpu_the_replay_is_exact():
    cpu = find_device("cpu")
    trace = trace_job(Net(name="convolution"), Shape(items=2), Tracing(device=cpu))
    footprint = footprint_on(trace, _with_memory(cpu))
    assert footprint.measured_runs is None
    assert all(
        phase.process_bytes_low == phase.process_bytes == phase.process_bytes_high
        for phase in footprint.phases.values()
    )
    assert footprint_remarks(footprint) == []


def test_plan_searches_have_a_line_of_their_own_and_are_not_in_the_need():
    card = find_device("a100-40gb")
    plain = predict(Net(name="convolution"), "net", Shape(items=2), card).footprint
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        searching = predict(Net(name="convolution"), "net", Shape(items=2), card).footprint
    finally:
        torch.backends.cudnn.benchmark = before
    assert plain.plan_searches == 0
    assert searching.plan_searches == 5  # three passes of each of two convolutions; no gradient of the picture
    assert ["cudnn.benchmark searches for plans 5 times" in line for line in footprint_remarks(searching)] == [True]
    assert searching.phases["train"].allocated_bytes == plain.phases["train"].allocated_bytes


def _with_memory(device):
    from memfit.device.hardware.catalogue import with_memory

    return with_memory(device, 2**30)
