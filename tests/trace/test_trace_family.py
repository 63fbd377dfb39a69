"""pytest tests/trace/test_trace_family.py: a derived trace is the trace itself, event by event and byte by byte."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Loss, Shape
from memfit.trace.step import Tracing, trace_family, trace_job
from testing.nets import JOBS, SHAPES

ENDLESS = 1 << 60
CARD = replace(find_device("rtx4090"), usable_bytes=ENDLESS)
CPU = replace(find_device("cpu"), usable_bytes=ENDLESS, memory_bytes=ENDLESS)


CASES = [(name, "fp32", CARD) for name in JOBS] + [
    ("convolution", "fp16", CARD),
    ("gan", "fp16", CARD),
    ("dit", "bf16", CARD),
    ("convolution", "fp32", CPU),
    ("dit", "fp32", CPU),
]


def same(derived, traced) -> None:
    assert np.array_equal(derived.kind, traced.kind)
    for name in ("nbytes", "category"):
        mine, other = getattr(derived, name)[derived.storage], getattr(traced, name)[traced.storage]
        assert np.array_equal(mine, other), name


@pytest.mark.parametrize(("name", "precision", "device"), CASES)
def test_other_shapes_follow_exactly(name, precision, device):
    job, like = JOBS[name](precision=precision), Shape(items=SHAPES[name][0], length=SHAPES[name][1])
    how = Tracing(device=device, micro_batches=2, scratch=False)
    family = trace_family(job, how, like)
    assert family.derives
    asked = Shape(items=7, length=None if like.length is None else 192)
    derived = family.at(asked)
    assert asked not in family._direct, "it was derived, not traced"
    same(derived, trace_job(job, asked, how))


def test_units_in_a_tensor_are_looked_at_outside_of_what_varies():
    class Counted(JOBS["dit"]):
        def loss(self, nets, batch):
            result = super().loss(nets, batch)
            return Loss(result.sum, torch.as_tensor(result.units, device=result.sum.device))

    how = Tracing(device=CARD, micro_batches=2, scratch=False)
    family = trace_family(Counted(), how, Shape(items=2, length=64))
    assert family.derives
    same(family.at(Shape(items=6, length=128)), trace_job(Counted(), Shape(items=6, length=128), how))


def test_validation_of_its_own_size_is_traced_once(monkeypatch):
    class Fixed(JOBS["convolution"]):
        def validation_batch(self, shape):
            return self.batch(Shape(items=3))

    entered = []
    validate = Fixed.validate
    monkeypatch.setattr(Fixed, "validate", lambda *given: entered.append(1) or validate(*given))
    how = Tracing(device=CARD, micro_batches=2, scratch=False)
    family = trace_family(Fixed(), how, Shape(items=2))
    assert family.derives
    assert len(entered) == 1
    same(family.at(Shape(items=6)), trace_job(Fixed(), Shape(items=6), how))
