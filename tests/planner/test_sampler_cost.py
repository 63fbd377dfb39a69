"""The cost that a sampler packs by, taken from a job's trace."""

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.planner.predict import predict
from memfit.planner.sampler_cost import traced_cost
from testing.nets import Convolution, Transformer


def test_it_foretells_the_peak_of_other_shapes():
    device = find_device("a100-80gb")
    job = Transformer(longest=256)
    cost, fixed = traced_cost(job, device)
    for shape in (Shape(items=24, length=160), Shape(items=100, length=96), Shape(items=40, length=250)):
        peak = predict(job, "dit", shape, device).footprint.phases["train"].allocated_bytes
        assert fixed + cost.linear * shape.units + cost.quadratic * shape.units * shape.length == pytest.approx(
            peak, rel=0.03
        )


def test_items_without_a_length_have_none():
    with pytest.raises(InputError, match="no length"):
        traced_cost(Convolution(), find_device("a100-80gb"))
