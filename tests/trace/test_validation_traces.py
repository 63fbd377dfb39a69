"""Several policies for validation traced behind the same windows are what each gives when it is traced alone."""

from dataclasses import replace

import pytest

from memfit.job import Shape
from memfit.plan import PhasePolicy
from memfit.planner.options.validation_policies import validation_policies
from memfit.planner.predict import footprint_on
from memfit.trace.step import Tracing, trace_job
from memfit.trace.validation_traces import trace_policies
from tests.planner.test_offload_options import CARD
from tests.planner.test_options import Validated


@pytest.mark.parametrize("zero_grad", ["after_step", "after_forward"])
def test_each_policy_is_as_it_is_alone(zero_grad):
    job, shape = Validated(zero_grad=zero_grad), Shape(items=2)
    how = Tracing(device=CARD, saving=PhasePolicy(), validation=PhasePolicy())
    asked = list(validation_policies(job))
    assert len(asked) > 3
    alone = [footprint_on(trace_job(job, shape, replace(how, validation=item)), CARD) for item in asked]
    together = [footprint_on(item.trace, CARD) for item in trace_policies(job, shape, how, asked)]
    assert together == alone
    assert len({item.phases["validate"].allocated_bytes for item in together if "validate" in item.phases}) > 1
