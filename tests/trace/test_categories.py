"""python -m pytest tests/trace/test_categories.py"""

import sys

import numpy as np
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.redirect import SaysCuda
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.job import Job, Loss, Shape
from memfit.planner.predict import predict
from memfit.replay.cpu_allocator import CpuAllocator
from memfit.replay.replay import footprint
from memfit.trace import categories


class HalfFrozen(Job):
    """One net of two layers, of which one learns."""

    def nets(self):
        net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        net[0].requires_grad_(False)
        return {"net": net}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD([p for p in nets["net"].parameters() if p.requires_grad], lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 64)

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().sum(), len(batch))


def test_a_frozen_parameter_of_a_trained_net_is_frozen():
    save = predict(HalfFrozen(), "half", Shape(items=2), find_device("rtx4090")).footprint.phases["save"]
    assert save.categories["frozen"] == 4 * (64 * 256 + 256)
    assert save.categories["parameters"] == 4 * (256 * 64 + 64)


def test_of_equal_requests_the_last_is_the_largest():
    """Two requests of 8 bytes, in modules a and b."""
    kind, storage = [ALLOCATE, FREE, ALLOCATE], [0, 0, 1]
    trace = Trace(
        kind=np.array(kind, np.int8),
        storage=np.array(storage, np.int32),
        operator=np.array([0, 0, 1], np.int32),
        nbytes=np.array([8, 8], np.int64),
        category=np.full(2, CATEGORIES.index("temporaries"), np.uint8),
        stream=np.zeros(2, np.uint8),
        made_by=np.array([0, 1], np.int32),
        operator_name=np.zeros(2, np.int32),
        operator_module=np.array([0, 1], np.int32),
        operator_part=np.zeros(2, np.int32),
        operator_flops=np.zeros(2, np.int64),
        operator_bytes=np.zeros(2, np.int64),
        names=("aten.empty",),
        modules=("a", "b"),
        parts=("forward",),
        phases=(("train", 0, 3),),
    )
    assert footprint(trace, CpuAllocator, None, 100).phases["train"].largest_request.module == "b"


def test_reading_what_tensors_hold_is_no_torch_function_of_the_job(monkeypatch):
    read = []
    passed = SaysCuda.__torch_function__

    def counted(self, func, types, args=(), kwargs=None):
        read.append(sys._getframe(1).f_code.co_filename)
        return passed(self, func, types, args, kwargs)

    monkeypatch.setattr(SaysCuda, "__torch_function__", counted)
    predict(HalfFrozen(), "half", Shape(items=2), find_device("rtx4090"))
    assert read
    assert categories.__file__ not in read
