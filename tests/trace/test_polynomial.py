"""What follows from a family is what a trace of that shape gives, event by event.

python -m pytest tests/trace/test_polynomial.py
"""

import numpy as np
import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Loss, Shape
from memfit.trace.polynomial import fit, terms
from memfit.trace.step import Tracing, trace_family, trace_job
from testing.nets import Small


class Masked(Small):
    """Attention under a mask, whose length is padded to 8 and whose statistics to 32; text of 5 / 32 of a length."""

    longest: int | None = 512

    def nets(self):
        return {"net": torch.nn.MultiheadAttention(32, 4, batch_first=True)}

    def batch(self, shape):
        n = shape.length or 1
        return {"x": torch.randn(shape.items, n, 32), "text": torch.zeros(shape.items, n * 5 // 32, dtype=torch.long)}

    def loss(self, nets, batch):
        x = batch["x"]
        hidden = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        y, _ = nets["net"](x, x, x, key_padding_mask=hidden, need_weights=False)
        return Loss(y.float().square().mean((1, 2)).sum(), len(x))


def events(trace):
    return trace.kind, np.where(trace.storage >= 0, trace.nbytes[trace.storage], 0)


def test_every_length_follows():
    how = Tracing(device=find_device("rtx4090"), scratch=False)
    family = trace_family(Masked(), how, Shape(items=2, length=64))
    for items, length in ((3, 320), (7, 136), (6, 45), (2, 301), (1, 128), (1, 77)):
        shape = Shape(items=items, length=length)
        derived = family.derived(shape)
        assert derived is not None
        for item, other in zip(events(derived), events(trace_job(Masked(), shape, how)), strict=True):
            assert np.array_equal(item, other), shape


SHAPES = [
    Shape(items=b, length=n) for b, n in ((2, 64), (3, 64), (2, 96), (3, 96), (2, 160), (3, 160), (5, 224), (4, 37))
]


@pytest.mark.parametrize(
    "size",
    [
        lambda b, n: 12,
        lambda b, n: 4 * b * n * n + 8 * n,
        lambda b, n: 16 * b * (-(-n // 32) * 32),
        lambda b, n: 2 * b * n * (-(-n // 16) * 16),
        lambda b, n: 4 * b * (-(-n // 8) * 8) ** 2,
        lambda b, n: 8 * b * (n * 5 // 32),
        lambda b, n: 4 * b * (n // 3),
    ],
)
def test_a_size_is_told_from_its_values(size):
    sizes = [np.array([size(shape.items, shape.length)]) for shape in SHAPES]
    fitted = fit(SHAPES, sizes, np.array([0]))
    assert fitted is not None
    assert fitted.unit == 1
    for items, length in ((9, 1000), (2, 41), (64, 333)):
        assert fitted.evaluate(Shape(items=items, length=length)).tolist() == [size(items, length)]


def test_what_no_form_gives_holds_for_whole_lengths_alone():
    sizes = [np.array([4 * s.items * s.length + (s.length % 8)]) for s in SHAPES]
    fitted = fit(SHAPES, sizes, np.array([0]))
    assert fitted.unit == 8
    assert fitted.evaluate(Shape(items=2, length=37)) is None
    assert fitted.evaluate(Shape(items=2, length=40)).tolist() == [320]


def test_what_is_no_polynomial_is_not_derived():
    sizes = [np.array([s.items**2 * s.length]) for s in SHAPES]
    assert fit(SHAPES, sizes, np.array([0])) is None


def test_events_that_differ_at_odd_lengths_leave_the_rest():
    sizes = [np.array([4 * s.items * s.length]) if s.length % 8 == 0 else None for s in SHAPES]
    assert fit(SHAPES, sizes, np.array([0])).unit == 8
    assert terms(Shape(items=3, length=10), False, (8, True)) == [1, 3, 16, 48, 256, 768]


def test_a_shape_at_which_bytes_are_no_whole_number_is_not_derived():
    shapes = [Shape(items=b, length=n) for b, n in ((2, 64), (3, 64), (2, 128), (3, 128), (2, 192), (3, 192), (5, 256))]
    fitted = fit(shapes, [np.array([s.items * s.length // 64]) for s in shapes], np.array([0]))
    assert fitted is not None
    assert fitted.evaluate(Shape(items=4, length=320)).tolist() == [20]
    assert fitted.evaluate(Shape(items=1, length=40)) is None
